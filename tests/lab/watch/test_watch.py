"""What `g2rpo watch` says of a folder, at every moment of a run."""

import json
import math
import os
import platform
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from g2rpo.core.errors import UserError
from g2rpo.core.files import LOCK
from g2rpo.lab.watch.folder import read
from g2rpo.lab.watch.told import bars_of, rise_of, tell
from g2rpo.run.lock import held
from g2rpo.run.status import COMPARING, Status, begun
from tests.support.commands import done, g2rpo, refused

CONFIG = """
recipe: words
trainer: {iterations: 20}
evaluation: {every: 5, num_prompts: 30, rewards: {judge: {kind: x}}}
rewards: {ocr: {weight: 1.0}}
"""
GONE = 2**22 + 1  # above Linux's largest process number
NODE = {"pid": 7, "host": "node7"}


def looked(iteration, ocr, judge, error=0.01, **more):
    scores = {"reward/ocr": ocr, "reward/judge": judge}
    errors = {"stderr/ocr": error, "stderr/judge": error}
    return {"kind": "eval", "iteration": iteration, "seconds": 6.0, **scores, **errors, **more}


def paired(iteration, accuracy, margin):
    pairs = {"pairs/accuracy": accuracy, "pairs/margin": margin, "pairs/count": 30}
    return {"kind": "eval", "iteration": iteration, "seconds": 6.0, **pairs}


def trained(iteration, ocr=0.5, **more):
    cost = {"seconds": 2.0, "seconds/rollout": 1.0, "evaluations": 9, "images": 9}
    return {"kind": "train", "iteration": iteration, "reward/ocr": ocr, **cost, **more}


BASE = looked(0, 0.5, 3.0, 0.0)
FIVE = [trained(iteration) for iteration in range(1, 6)]


@pytest.fixture
def run(tmp_path):
    """Writes a run: its log, its status, its results, and who holds it."""

    def write(rows=(), phase=None, *, results=None, owner=None, config=CONFIG, **status):
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        if config is not None:
            (folder / "config.yaml").write_text(config)
            (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        owner = owner or {"pid": os.getpid(), "host": platform.node()}
        (folder / LOCK).write_text(json.dumps(owner))
        if phase is not None:
            now = Status(phase=phase, since=0.0, **status)
            (folder / "status.json").write_text(now.model_dump_json())
        if results is not None:
            (folder / "results.json").write_text(json.dumps(results))
        return folder

    return write


HERE = {"pid": GONE, "host": platform.node()}
STATES = {
    "loading": ([], {"config": None, "owner": NODE}, "process 7 on node7 loads models"),
    "the base": (
        [],
        {"phase": "evaluating the base", "done": 40, "of": 96, "owner": NODE},
        "evaluating the base: 42% drawn and scored",
    ),
    "an iteration": ([BASE, *FIVE], {"phase": "training", "owner": NODE}, "iteration 6 began"),
    "resumed": (
        [BASE],
        {"phase": "training", "ended": "asked", "owner": {**NODE, "since": 9.0}},
        "process 7 on node7 loads models",
    ),
    "copied": (
        [BASE],
        {"phase": COMPARING, "results": {"iteration": 20}, "owner": NODE},
        "finished: 20 iterations",
    ),
    "resumed after an alarm": (
        [BASE, *FIVE],
        {"phase": "training", "results": {"iteration": 0, "rolled_back_from": 5}, "owner": NODE},
        "iteration 6 began",
    ),
    "finished": ([BASE], {"results": {"iteration": 20}, "owner": HERE}, "finished: 20 iterations"),
    "rolled back": (
        [BASE, *FIVE],
        {"results": {"iteration": 0, "rolled_back_from": 5}, "owner": HERE},
        "ended by an alarm; the weights are those after iteration 0",
    ),
    "stopped": (
        [BASE],
        {"phase": "training", "ended": "as asked; resume", "owner": HERE},
        "ended early: as asked; resume",
    ),
    "killed": ([BASE], {"phase": "training", "owner": HERE}, f"process {GONE} on"),
}


@pytest.mark.parametrize("moment", STATES)
def test_the_state_is_told_at_every_moment(run, moment):
    rows, written, said = STATES[moment]
    seen = read(run(rows, **written))
    told = tell(seen)
    assert said in told.state
    assert seen.over == (moment in ("finished", "copied", "rolled back", "stopped", "killed"))
    assert ("no longer holds the folder; `g2rpo resume" in told.state) == (moment == "killed")


def test_a_holder_is_known_by_its_lock_and_not_by_its_number(run):
    folder = run([BASE], "training")  # by this process's number, which holds nothing there
    if os.path.exists("/proc/locks"):
        assert read(folder).lost
    with held(folder):
        (folder / "status.json").write_text(begun("training").model_dump_json())
        assert read(folder).alive
        assert tell(read(folder)).state.startswith("iteration 1 began")


def test_what_has_no_score_is_told(run):
    folder = run([BASE, *FIVE, {**trained(6), "missing_scores": 0.25}], "training", owner=NODE)
    table = folder / "scores/iteration_000000.jsonl"
    table.parent.mkdir()
    rows = [{"prompt": "a", "scores": {"ocr": score, "judge": 1.0}} for score in (None, 0.5, None)]
    table.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    said = "25 % of iteration 6; ocr of 2 held-out pictures after iteration 0"
    assert tell(read(folder)).missing == f"without a score: {said}"


def test_long_silence_is_said_of_a_process_that_cannot_be_seen(run):
    folder = run([BASE, *FIVE], "training", owner=NODE)
    assert "no new line" not in tell(read(folder)).state
    hour_ago = os.stat(folder).st_mtime - 3600
    for file in folder.iterdir():
        os.utime(file, (hour_ago, hour_ago))
    said = tell(read(folder)).state
    assert "no new line for 1 h 0 min, where the longest took 6 s" in said
    assert "process 7 on node7, which this machine cannot see" in said


ANSWERS = [
    ([], "Too early to say whether it works."),
    # of 20 iterations of 2 s, the next evaluation is after 5
    ([BASE, trained(1)], "Too early to say whether it works; the first look is in about 8 s."),
    ([BASE, *FIVE, looked(5, 0.6, 3.0)], "It works so far: ocr better."),
    ([BASE, *FIVE, looked(5, 0.6, 2.9)], "Mixed: ocr better, judge worse."),
    ([BASE, *FIVE, looked(5, 0.52, 3.0)], "No difference yet on held-out prompts."),
    ([BASE, *FIVE, looked(5, 0.4, 3.0)], "It gets worse: ocr."),
    # of a file of pairs, without rewards
    (
        [paired(0, 0.5, None), *FIVE, paired(5, 0.7, 0.1)],
        "It works so far: as people judged better.",
    ),
    (
        [paired(0, None, None), *FIVE, paired(5, None, None)],
        "Nothing can be said: no reward has scored held-out pictures of both.",
    ),
    (
        [BASE, *FIVE, looked(5, 0.6, 2.9, alarms={"hacking": "judge fell"})],
        "Mixed: ocr better, judge worse. Alarm: hacking.",
    ),
]


@pytest.mark.parametrize(("rows", "said"), ANSWERS)
def test_whether_it_works_is_told_by_held_out_scores_and_their_errors(run, rows, said):
    assert tell(read(run(rows, "training", owner=NODE))).answer == said


@pytest.mark.parametrize(
    ("score", "said"),
    [(0.6, "It worked: ocr better."), (0.4, "It got worse: ocr.")],
)
def test_of_a_finished_run_it_is_told_in_the_past(run, score, said):
    folder = run([BASE, *FIVE, looked(5, score, 3.0)], results={"iteration": 20}, owner=HERE)
    assert tell(read(folder)).answer == said


@pytest.mark.parametrize(
    ("kept", "said"),
    [(5, "It worked: ocr better."), (0, "It did not work: the weights are the base's again.")],
)
def test_after_an_alarm_the_scores_are_those_of_the_weights_that_are_kept(run, kept, said):
    rows = [BASE, *FIVE, looked(5, 0.6, 3.0), trained(6), looked(6, 0.4, 2.9)]
    told = tell(read(run(rows, results={"iteration": kept, "rolled_back_from": 6}, owner=HERE)))
    assert (told.looked, told.answer) == (kept, said)


def test_a_change_has_the_interval_of_students_t(run):
    told = tell(read(run([BASE, *FIVE, looked(5, 0.6, 3.0)], "training", owner=NODE)))
    margin = 0.01 * stats.t.ppf(0.975, 29)  # of 30 held-out prompts
    assert [one.name for one in told.judged] == ["ocr", "judge, judge"]
    assert told.judged[0].rise.margin == pytest.approx(margin, rel=1e-12)
    assert told.judged[0].rise.size == f"+0.100 ± {margin:.3f}"
    few = looked(5, 0.6, 3.0, **{"scored/ocr": 10})
    told = tell(read(run([BASE, *FIVE, few], "training", owner=NODE)))
    assert told.judged[0].rise.margin == pytest.approx(0.01 * stats.t.ppf(0.975, 9), rel=1e-12)


def test_a_change_is_of_the_prompts_that_both_have_a_score_for(run):
    """As in results.json: the base's picture of the third prompt has no score."""
    few = looked(5, 0.5, 3.0, **{"scored/ocr": 2})
    folder = run([BASE, *FIVE, few], "training", owner=NODE)
    (folder / "scores").mkdir()
    for iteration, scores in ((0, (0.25, 0.5, None)), (5, (0.5, 0.75, 0.0))):
        rows = [{"prompt": "a", "scores": {"ocr": score, "judge": 1.0}} for score in scores]
        table = folder / f"scores/iteration_{iteration:06d}.jsonl"
        table.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    ocr = tell(read(folder)).judged[0]
    assert (ocr.base, ocr.now, ocr.rise.change) == ("0.375", "0.625", 0.25)


def test_the_rise_in_training_is_the_least_squares_line_with_its_interval():
    random = np.random.default_rng(0)
    values = 0.5 + 0.02 * np.arange(40) + 0.1 * random.standard_normal(40)
    found, noise = rise_of(list(values))
    line = stats.linregress(np.arange(40), values)
    rest = values - line.intercept - line.slope * np.arange(40)
    # float64 sums of 40 numbers
    assert found.change == pytest.approx(39 * line.slope, rel=1e-9)
    assert found.margin == pytest.approx(39 * line.stderr * stats.t.ppf(0.975, 38), rel=1e-9)
    assert noise == pytest.approx(math.sqrt(float((rest**2).sum()) / 38), rel=1e-9)
    assert math.isnan(rise_of([1.0, 2.0])[0].change)


def test_alarms_say_since_when_and_what_helps_until_they_are_over(run):
    alarmed = [{**row, "alarms": {"silent": "80% have no variance"}} for row in FIVE[2:]]
    folder = run([BASE, *FIVE[:2], *alarmed], "training", owner=NODE)
    (said,) = tell(read(folder)).alarms
    assert said.startswith("silent since iteration 3: 80% have no variance. What helps: zero-var")
    told = tell(read(run([BASE, *FIVE[:2], *alarmed, trained(6)], "training", owner=NODE)))
    assert not told.alarms and "alarms that are over: silent" in told.notes


def test_the_time_left_counts_iterations_and_evaluations(run):
    seen = read(run([BASE, *FIVE, looked(5, 0.6, 3.0)], "training", owner=NODE))
    # 15 iterations of 2 s and evaluations after 10, 15 and 20, of 6 s; since then at most 2 s
    assert 46 <= seen.left <= 48 and seen.seconds == 2.0
    timed = CONFIG.replace("every: 5", "every: 1000, every_minutes: 0.25")
    seen = read(run([BASE, *FIVE], "training", owner=NODE, config=timed))
    assert seen.until_look == 0.0  # a twelfth of 15 s of training is long over


def test_bars_have_the_range_of_the_values():
    assert bars_of([]) == "" and bars_of([1.0]) == "▁"
    assert bars_of([0.0, 1.0, 0.5]) == "▁█▅" and len(bars_of(range(100))) == 16


def test_a_line_that_is_being_written_is_left_out(run):
    folder = run([BASE], "training", owner=NODE)
    with open(folder / "metrics.jsonl", "a") as log:
        log.write('{"kind": "train", "iterat')
    assert read(folder).iteration == 0 and len(read(folder).rows) == 1


REFUSED = {
    "absent": ("", "is no folder"),
    "empty": ("run", "is no run directory (no config.yaml)"),
    "config": ("trainer: {iterations: many}", "config.yaml: trainer.iterations"),
    "log": ("{}", "metrics.jsonl, line 1: is no JSON"),
    "status": ('{"phase": 3}', "status.json: phase"),
    "results": ("[]", "results.json: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_is_no_run_is_refused(run, tmp_path, case):
    content, said = REFUSED[case]
    folder = tmp_path / "run"
    if case == "empty":
        folder.mkdir()
    elif case != "absent":
        folder = run(config=content if case == "config" else CONFIG)
    if case == "log":
        (folder / "metrics.jsonl").write_text("no\n{}\n")
    elif case in ("status", "results"):
        (folder / f"{case}.json").write_text(content)
    with pytest.raises(UserError) as refusal:
        read(folder)
    assert said in str(refusal.value)


def test_the_command_prints_once_without_a_terminal_and_ends_with_1_for_a_lost_run(run, capsys):
    folder = run([BASE, *FIVE, looked(5, 0.6, 2.9)], "training", owner=NODE)
    printed = done(capsys, "watch", folder)
    for part in ("Mixed: ocr better", "iteration 5 of 20, 2 s an iteration", "−0.100 ± 0.0"):
        assert part in printed
    run([BASE], "training", owner=HERE)
    code, out, _ = g2rpo(capsys, "watch", folder, "--once")
    assert code == 1 and "stopped without an end" in out
    assert "no run directory" in refused(capsys, "watch", folder.parent)


def test_a_run_that_an_alarm_ended_exits_with_1_as_training_did(run, capsys, monkeypatch):
    monkeypatch.setattr("g2rpo.cli.watch._verdict", lambda run: None)
    rows, written, _ = STATES["rolled back"]
    code, out, _ = g2rpo(capsys, "watch", run(rows, **written))
    assert code == 1 and "ended by an alarm" in out


def test_no_terminal_gets_control_characters(run, capsys):
    """Of a prompt, or of the message of an alarm or an error."""
    rows = [BASE, *FIVE, looked(5, 0.6, 2.9, alarms={"hacking": "fell\x1b[2J"})]
    folder = run(rows, "training", owner=NODE, ended="why\x1b]0;no\x07\x9b2J")
    for iteration, score in ((0, 0.1), (5, 0.9)):
        table = folder / f"scores/iteration_{iteration:06d}.jsonl"
        table.parent.mkdir(exist_ok=True)
        row = {"prompt": "a\x1b[31m\ncat", "scores": {"ocr": score}}
        table.write_text(json.dumps(row) + "\n")
    _, out, _ = g2rpo(capsys, "watch", folder)
    assert "gained ocr most: a [31m cat 0.1 → 0.9" in out and "fell [2J" in out
    assert not {"\x1b", "\x07", "\x9b"} & set(out)


def test_the_text_needs_no_torch(run):
    folder = run([BASE, *FIVE, looked(5, 0.6, 3.0)], "training", owner=NODE)
    code = (
        "import sys; from g2rpo.cli import main; main.main(['watch', sys.argv[1]]); "
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "It works so far" in done.stdout and "True" not in done.stdout, done.stderr
