"""The report: the right numbers, whole runs and broken ones, and a page that asks the network for
nothing."""

import json
import math
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from g2rpo.config.read import load_config
from g2rpo.config.resolve import resolve
from g2rpo.core import statistics
from g2rpo.core.statistics import RIGHT, Comparison, Interval, figures, in_time, interval, signed
from g2rpo.lab.report import page
from g2rpo.lab.report.charts import compact
from g2rpo.lab.report.history import SeedGroup, read_runs, seed_groups, summary_of
from g2rpo.lab.report.page import render
from g2rpo.lab.report.pictures import MOST_EVALUATIONS, first_group, pictures
from g2rpo.train.evaluation.heldout import (
    read_rows,
    save_pictures,
    save_rows,
    score_rows,
    scores_of,
)
from g2rpo.train.monitor.alarms import HELPS
from g2rpo.train.run.folder import Run
from tests.lab.report.pages import attributes, chart_labels, charts, make_run, words, write_log
from tests.support.commands import done, refused
from tests.support.runs import PLAIN, brightness, config
from tests.support.tables import rows
from tests.support.tolerances import rounding
from tests.support.variants import few

BRIGHT = "bright, trained on"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory):
    changes = "algorithm.group_size=8", "algorithm.granularities=[1]"
    return make_run(tmp_path_factory.mktemp("runs") / "second", *changes)


@pytest.fixture(scope="module")
def html(run_dir):
    return render(read_runs([run_dir]))


@pytest.fixture
def copied(run_dir, tmp_path):
    """The files of a run that a test may change."""
    return Run(shutil.copytree(run_dir, tmp_path / "run"))


def test_the_headline_is_results_json(run_dir, html):
    results, shown = json.loads((run_dir / "results.json").read_text()), words(html)
    for name, use in (("bright", "trained on"), ("dark", "judged only")):
        row = results["rewards"][name]
        base, tuned = (f"{row[key]:.3f}".replace("-", "−") for key in ("base", "tuned"))
        change = signed(row["tuned"] - row["base"], 3)
        assert f"{name} {use} {base} {tuned} {change} too few prompts" in shown
    assert f"<code>g2rpo resume {run_dir} trainer.iterations=8</code>" in html
    assert "Finished: 4 iterations." in shown and "LoRA of rank 32" in shown


def test_charts_tables_and_costs_hold_the_logged_numbers(run_dir, html):
    rows, shown = Run(run_dir).read_log(), words(html)
    train, evals = ([row for row in rows if row["kind"] == kind] for kind in ("train", "eval"))
    for line, logged in zip(charts(html)[BRIGHT], (train, evals), strict=True):
        assert line["x"] == [row["iteration"] for row in logged]
        assert line["y"] == [compact(row["reward/bright"]) for row in logged]
    assert {"Gradient norm", "Loss", "Brightness"} <= charts(html).keys()
    for step in range(3):  # a fifth of four iterations is one
        keys = [f"step/{step}/{what}" for what in ("spread/bright", "advantage", "agreement")]
        cells = [f"{figures(train[0][key])} → {figures(train[-1][key])}" for key in keys]
        assert f"{step} {' '.join(cells)}" in shown
    spent = sum(row["evaluations"] for row in train)
    assert f"Network evaluations {spent:,}" in shown and "… rollout" in shown
    # iterations, prompts, branch steps, granularities, members
    assert f"Pictures scored {4 * 2 * 3 * 2 * 6}," in shown


def test_the_page_needs_nothing_else(html):
    assert not re.search(r"https?://|@import|url\(", html)
    ids, links = attributes(html, "id"), attributes(html, "href")
    assert len(ids) == len({*ids}) and {*links} <= {f"#{each}" for each in ids}
    for name in ("src", "srcset", "action", "data"):
        assert all(each.startswith("data:image/webp;base64,") for each in attributes(html, name))


def test_a_group_of_the_first_iteration_is_shown_from_best_to_worst(run_dir, html):
    table = scores_of(read_rows(Run(run_dir).group_scores))
    scores, advantages = table["bright"].double().reshape(2, 6), table["advantage"][:6]
    standard = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-8)
    # the file keeps all as written
    torch.testing.assert_close(advantages, standard.sum(0).float(), **rounding(8, size=4.0))
    assert advantages.abs().max() > 0.5
    order = advantages.argsort(descending=True).tolist()
    members = first_group(*read_runs([run_dir]))["members"]
    found = [(member["number"] - 1, member["advantage"]) for member in members]
    assert found == [*zip(order, advantages[order].tolist(), strict=True)]
    shown = [text for text in attributes(html, "alt") if text.startswith("member ")]
    assert shown == [f"member {member + 1}, tail {tail}" for member in order for tail in (1, 2)]


COUNT = 192


def said(directory, scored, right=(), alarms=(), **more):
    """Sentences of a run whose scores have these rows of `SCORED`, by name."""
    weights = {name: row[0] for name, row in scored.items() if row[0] >= 0}
    judges = dict.fromkeys(scored.keys() - weights.keys(), 1.0)
    files, evaluation = Run(directory), {**PLAIN["evaluation"], "rewards": judges}
    files.claim(resolve({**PLAIN, "rewards": weights, "evaluation": evaluation}))
    standard = torch.arange(COUNT).double()
    standard = (standard - standard.mean()) / standard.std()
    before, after = {}, {}
    for name, (_, base, tuned, error, spread) in scored.items():
        before[name] = base + spread * standard
        after[name] = before[name] + tuned - base + error * COUNT**0.5 * standard.flip(0)
    for place, (iteration, scores) in enumerate(((0, before), (4, after))):
        verdicts = (torch.arange(COUNT) < round(right[place] * COUNT)).float() if right else None
        save_rows(files.scores(iteration), score_rows(["a"] * COUNT, scores, verdicts))
    (directory / "results.json").write_text(json.dumps({"iteration": 4, "rewards": {}, **more}))
    base, last = ({"kind": "eval", "iteration": i, "seconds": 1.0} for i in (0, 4))
    write_log(directory, [base, {**last, "alarms": dict.fromkeys(alarms, "seen")}])
    sentences = summary_of(*read_runs([directory]))
    assert len(sentences) <= 3 and sentences[-1].startswith("Next: ")
    return " ".join(sentences).replace("\N{NO-BREAK SPACE}", " ")


SCORED = """
up 1 0.5 0.7 0.05 0.4
fell 1 0.5 0.3 0.05 0.4
even 1 0.5 0.51 0.05 0.4
slightly 1 0.048887 0.049108 0.00003 0.011
unscored 1 0.5 nan 0.05 0.4
watched 0 0.8 0.9 0.05 0.4
flat nan 70.0 70.4 0.3 2.0
down nan 0.8 0.6 0.05 0.1
little nan 0.5 0.499 0.0001 0.05
"""
"""Weight (none of a judge), base, tuned, error and spread; the last change is beyond its error, and a
fiftieth of what the prompts differ by."""
SUMMARIES = """
one=up right=0.9,0.995 -> before training 90 % (+9 points, +5 to +10).
one=up two=flat right=0.43,0.62 alarms=hacking -> Trained on one for 4 iterations: right on 62 % of 192 held-out prompts,
one=up two=flat right=0.43,0.62 alarms=hacking -> before training 43 % (+19 points, +13 to +24). Worse: alarm hacking. Next: the
one=up -> on 192 held-out prompts one rose, +0.50 standard deviations (+0.25 to +0.75). Next: `g2rpo evaluate
one=up -> run-controls` tries whether other sampler settings do as well.
one=fell two=down alarms=a,b -> one fell, −0.50 standard deviations (−0.75 to −0.25).
one=fell two=down alarms=a,b -> Worse: one (−0.50 s.d.); two (−2.00 s.d.); alarms a and b. Next: look at the report.
one=up two=even -> Trained on one and two
one=up two=even -> two did not clearly change, +0.03 standard deviations
one=up two=watched -> Trained on one for 4 iterations
one=up two=watched -> . Next: `g2rpo evaluate
one=slightly two=little -> one rose slightly, +0.02 standard deviations
one=slightly two=little -> . Next: `g2rpo evaluate
one=unscored -> on 192 held-out prompts one gave no scores. Next: `g2rpo resume
one=unscored -> iterations=8` trains on.
one=up diversity=0.045,0.041 -> (+0.25 to +0.75). Next:
one=up diversity=0.045,0.015 -> Worse: pictures of one prompt differ 0.33 times as much as before. Next: train on what fell too
one=up diversity=0.045,0.015 diversity_right=0.02,0.014 -> Worse: right pictures of one prompt differ 0.70 times as much
one=up diversity=0.045,0.015 diversity_right=0.02,0.019 -> (+0.25 to +0.75). Next:
"""


@pytest.mark.parametrize(("words", "sentence"), rows(SUMMARIES))
def test_the_summary_says_what_happened_in_plain_words(tmp_path, words, sentence):
    """A share has no interval beyond all pictures. Intervals by hand: 36 of 192 prompts became
    right: .1875, ± 1.97 sqrt(.1875 (1 - .1875) / 191) = .056."""
    table = {name: [*map(float, row)] for name, *row in map(str.split, SCORED.split("\n")[1:-1])}
    given = {name: text.split(",") for name, text in (word.split("=") for word in words.split())}
    scored = {name: table[given.pop(name)[0]] for name in ("one", "two") if name in given}
    alarms, right = given.pop("alarms", ()), [*map(float, given.pop("right", ()))]
    more = {name: {"base": float(a), "tuned": float(b)} for name, (a, b) in given.items()}
    assert sentence in said(tmp_path / "run", scored, right, alarms, **more)


def test_markup_from_users_is_text(copied):
    bad = "<script>alert('1')</script>&\"x"
    files = Run(copied.path.rename(copied.path.parent / "<b>bold"))
    save_rows(files.scores(0), [row | {"prompt": bad} for row in read_rows(files.scores(0))])
    replaced(files.path / "metrics.jsonl", "bright", "<i>bright")
    replaced(files.config, "path: none", f"path: {json.dumps(bad)}")
    html = render(read_runs([files.path]))
    assert html.count("<script>") == 1 and "<b>bold" not in html and "<i>bright" not in html
    assert "<b>bold" in words(html) and "<i>bright" in words(html)
    assert words(html).count(bad) >= 2  # the prompt above its pictures, and the model
    assert attributes(html, "alt")[0] == f"Base model: {bad}"


def replaced(path, was, now):
    text = path.read_text()
    assert was in text
    path.write_text(text.replace(was, now))


def test_two_runs_share_their_charts(run_dir, other_dir):
    html = render(read_runs([run_dir, other_dir]))
    what = "training batches", "held-out"
    names = [f"{run}: {each}" for run in ("first", "second") for each in what]
    assert [line["name"] for line in charts(html)[BRIGHT]] == names
    changed = "algorithm.group_size 6 8", "algorithm.granularities [1, 2] [1]"
    assert all(change in words(html) for change in changed)


def marked(images, prompts):
    return brightness(images, prompts)


marked.right, marked.right_in_words = 0.5, "Lights {} rooms"


def seeded(directory, seed, *overrides):
    """A finished run of another seed whose trained reward says what is right."""
    return make_run(directory, f"trainer.seed={seed}", *overrides, rewards={"bright": marked})


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeds")
    return [seeded(folder / str(seed), seed) for seed in (1, 2, 3)]


def test_runs_with_other_seeds_are_one_line_with_an_interval_over_seeds_and_prompts(seeds):
    tables = [[scores_of(read_rows(Run(run).scores(i))) for run in seeds] for i in (0, 2, 4)]
    # [evaluation, seed, prompt]
    bright = np.stack([[one["bright"].double().numpy() for one in after] for after in tables])
    runs, change = read_runs(seeds), interval(bright[2] - bright[0])
    (line,) = seed_groups(runs)
    found, share = line.changes["bright"], line.changes[RIGHT]
    assert (found.base, found.tuned) == pytest.approx((bright[0].mean(), bright[2].mean()))
    assert found.change == change and found.seeds == 3
    right = (bright >= 0.5).astype(float)
    assert (share.base, share.tuned) == (right[0].mean(), right[2].mean())
    assert share.change == interval(right[2] - right[0]).within(-share.base, 1 - share.base)
    curve = line.curve("bright")
    assert curve.y == pytest.approx(bright.mean((1, 2)))
    ends = change.low - change.mean, change.high - change.mean
    assert [end - curve.y[2] for end in curve.ends[2]] == pytest.approx(ends)

    html, shown = render(runs), words(render(runs))
    before, after = (f"{100 * value:.0f} %" for value in (share.base, share.tuned))
    for text in (
        f"lights {after} of 3 held-out rooms, before training {before}, only 3 prompts",
        f"{signed(change.low, found.digits)} to {signed(change.high, found.digits)}",
        "over seeds",
        "trainer.seed 1 2 3",
    ):
        assert text in shown
    logged = np.array([[row["reward/bright"] for row in run.iterations] for run in runs])
    drawn = [line["y"] for line in charts(html)[BRIGHT]]
    means = logged.mean(0), bright.mean((1, 2))
    assert drawn == [[compact(float(each)) for each in line] for line in means]


def test_only_runs_of_one_config_and_several_seeds_are_one_line(seeds, tmp_path):
    def changed(name, was, now):
        directory = shutil.copytree(seeds[0], tmp_path / name)
        replaced(directory / "config.yaml", was, now)
        return directory

    longer = changed("longer", "iterations: 4", "iterations: 6")
    again = changed("again", "device: ", "device:  ")  # the same seed
    place = changed("place", "seed: 1\n", "seed: 5\n")
    runs = read_runs([seeds[0], longer, again, seeds[1], place])
    assert [line.name for line in seed_groups(runs)] == ["1 · 2 · place", "longer", "again"]


def test_unfinished_runs_with_other_seeds_are_compared_at_the_last_evaluation_of_all(
    seeds, tmp_path
):
    shorter = Run(shutil.copytree(seeds[1], tmp_path / "shorter"))
    rows = [row for row in shorter.read_log() if row["iteration"] <= 2]
    write_log(shorter.path, rows)
    (shorter.path / "results.json").unlink()
    both = [seeds[0], shorter.path]
    runs = read_runs(both)
    (line,) = seed_groups(runs)
    bright = [scores_of(read_rows(Run(run).scores(2)))["bright"] for run in both]
    assert line.judged_after == [2, 2] and {*line.changes} == {"bright", "dark", RIGHT}
    assert line.changes["bright"].tuned == pytest.approx(float(torch.cat(bright).double().mean()))
    told = words(render(runs))
    assert "1: Finished: 4 iterations." in told and "shorter: Unfinished: 2 of 4 iterations" in told
    write_log(
        shorter.path, [row for row in rows if not (row["kind"] == "eval" and row["iteration"])]
    )
    (said,) = summary_of(*seed_groups(read_runs(both)))
    assert "too early to say after 2 iterations; held-out prompts are not evaluated yet." in said


@pytest.mark.parametrize(
    ("slope", "said"), [(0.01, "rising, +0.1"), (-0.01, "falling, −0.1"), (0.0, "no clear ch")]
)
def test_of_a_run_in_training_the_first_sentence_is_of_the_trained_reward(
    copied, capsys, slope, said
):
    """Twelve iterations along a line with noise of a tenth of its steps, and no evaluation but the
    base's; the command prints it."""
    base, row = copied.read_log()[:2]
    values = [0.5 + slope * i + 0.001 * (-1) ** i for i in range(12)]
    rows = [row | {"iteration": i, "reward/bright": y} for i, y in enumerate(values, 1)]
    write_log(copied.path, [base, *rows])
    (copied.path / "results.json").unlink()
    assert f"bright: {said}" in done(capsys, "report", copied.path)


def stop(files):
    """As a run that was killed in its third iteration."""
    write_log(files.path, [row for row in files.read_log() if row["iteration"] <= 3])
    (files.path / "results.json").unlink()


def log_nothing(files):
    write_log(files.path, [])
    (files.path / "results.json").unlink()


def lose_a_reward(files):
    """Of an iteration without a single score it is null in the log."""
    rows = files.read_log()
    write_log(files.path, [r | {"reward/bright": None} if r["iteration"] == 2 else r for r in rows])


INCOMPLETE = [
    (stop, "Unfinished: 3 of 4 iterations are logged", 2),
    (log_nothing, "nothing is logged yet of 4 iterations", None),
    (lambda files: shutil.rmtree(files.path / "scores"), "No pictures yet.", None),
    (lambda files: (files.pictures(2) / "000000.png").write_bytes(b"no"), "Not shown: ", 4),
    (lambda files: files.scores(2).write_bytes(b"no"), "Not shown: ", 4),
    (lose_a_reward, "Finished", 4),
]


@pytest.mark.parametrize(
    ("change", "told", "judged"), few(INCOMPLETE, lambda case: case[0] in (stop, lose_a_reward))
)
def test_a_run_that_is_not_whole_has_a_page_that_says_so(copied, change, told, judged):
    """`judged` is the iteration whose weights are compared with the base's."""
    change(copied)
    runs = read_runs([copied.path])
    assert told in words(render(runs))
    line = SeedGroup((runs[0],))
    assert line.judged_after == ([judged] if judged else [])
    if judged:
        after = copied.read_scores(judged, ["bright"], 3)["bright"].double()
        assert line.changes["bright"].tuned == pytest.approx(float(after.mean()))
        shown = pictures(runs)[0][0]
        assert shown["trouble"] or shown["iterations"][-1] == judged


def test_the_recipe_and_what_was_changed(tmp_path):
    changes = ["trainer.iterations=7", "rewards.scene_accuracy.weight=2.0"]
    Run(tmp_path).claim(load_config("scenes", changes))
    heads, rows = page.settings(read_runs([tmp_path]))
    assert heads == ["recipe scenes", tmp_path.name]
    assert rows == [
        ("rewards.scene_accuracy.weight", ["1.0", "2.0"]),
        ("trainer.iterations", ["80", "7"]),
    ]


VERDICTS = """
0.3 0.1 0.5 nan -> higher
-0.3 -0.5 -0.1 0.4 -> lower
0.3 0.1 0.5 1.6 -> slightly higher
-0.3 -0.5 -0.1 1.6 -> slightly lower
0.19 -0.01 0.39 0.4 -> no clear change
0 0 0 0 -> no clear change
0.3 nan nan 0.4 -> unknown
"""
"""A change, its interval and the spread of prompts."""


def test_the_command(capsys, tmp_path, run_dir, other_dir, monkeypatch):
    """A page of several runs is written here; a link that lies there is replaced, not followed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "report.html").symlink_to(tmp_path / "mine")
    assert str(run_dir / "report.html") in done(capsys, "report", run_dir)
    assert (run_dir / "report.html").stat().st_size < 5e6
    done(capsys, "report", run_dir, other_dir)
    assert (tmp_path / "report.html").stat().st_size > 1e4
    assert (tmp_path / "mine").read_text() == "mine"


def test_wrong_input_is_one_message(capsys, tmp_path, run_dir):
    (tmp_path / "empty").mkdir()
    Run(tmp_path / "broken").claim(config())
    (tmp_path / "broken" / "metrics.jsonl").write_text('{"kind": "tr\n{"kind": "train"}\n')
    for arguments, message in (
        ((tmp_path / "empty",), "is no run directory (no config.yaml)"),
        ((run_dir, tmp_path / "nowhere"), "nowhere is no run directory"),
        ((run_dir, "--out", tmp_path), "cannot be written"),
        ((tmp_path / "broken",), "metrics.jsonl, line 1: is no JSON"),
    ):
        assert message in refused(capsys, "report", *arguments)


@pytest.mark.slow  # 160 pictures of noise
def test_many_large_pictures_are_thinned_and_shrunk(tmp_path):
    """Noise is the hardest picture to compress: 8 prompts at 20 evaluations stay within the page's
    bound."""
    files, prompts = Run(tmp_path), [str(number) for number in range(8)]
    files.claim(config("trainer.iterations=20"))
    row = {"kind": "eval", "reward/bright": 0.5, "reward/dark": 0.5, "seconds": 1.0}
    write_log(tmp_path, [{**row, "iteration": iteration} for iteration in range(20)])
    noise = torch.rand(8, 3, 256, 256, generator=torch.Generator().manual_seed(0))
    scores = dict.fromkeys(("bright", "dark"), torch.rand(8))
    for iteration in range(20):
        save_rows(files.scores(iteration), score_rows(prompts, scores))
        save_pictures(files.pictures(iteration), noise, range(8), 1)
    html = render(read_runs([tmp_path]))
    assert len(html) < 5e6
    (slider,) = attributes(html, "data-iterations")
    shown = slider.split(",")
    assert len(shown) == MOST_EVALUATIONS and (shown[0], shown[-1]) == ("0", "19")


@pytest.mark.parametrize(("numbers", "told"), rows(VERDICTS))
def test_verdicts(numbers, told):
    *ends, spread = map(float, numbers.split())
    for count, expected in ((64, told), (7, "too few prompts"), (0, "no scores")):
        change = Interval(*ends, count)
        own = Comparison(1.0, 1.0 + ends[0], math.nan, count, spread, measured=change)
        assert own.verdict == expected


def test_numbers_for_people():
    halves = (0.0312, 0.43, 6.1, 80.0, 0.0, math.nan, 2e-9)  # 1.96 standard errors
    changes = [
        Comparison(0, 1, math.nan, 64, 1, measured=Interval(1, 1 - half, 1 + half, 64))
        for half in halves
    ]
    assert [change.digits for change in changes] == [3, 2, 1, 0, 3, 3, 6]
    times = [in_time(seconds) for seconds in (0.78, 42, 301, 12000)]
    assert times == ["0.78 s", "42 s", "5 min 1 s", "3 h 20 min"]


def test_alarms_are_told_and_marked(html, copied, monkeypatch):
    """A judged reward falls in every toy run (dark is minus bright); a row of training has one of
    its own."""
    monkeypatch.setattr(statistics, "FEWEST_VALUES", 3)
    rows = copied.read_log()
    for row in rows:
        if row["kind"] == "train" and row["iteration"] != 3:
            row["alarms"] = {"drift": f"seen <{row['iteration']}>"}
        if row["kind"] == "eval" and row["iteration"]:
            row["alarms"] = {"hacking": "dark fell"}
    write_log(copied.path, rows)
    runs = read_runs([copied.path])
    found = [(one.name, one.first, one.last, one.said) for one in runs[0].alarms()]
    drifts = ("drift", 1, 2, "seen <1>"), ("drift", 4, 4, "seen <4>")
    assert sorted(found) == [*drifts, ("hacking", 2, 4, "dark fell")]
    alarming = render(runs)
    told = words(alarming)
    assert f"hacking 2 to 4 dark fell {HELPS['hacking']}" in told
    assert "drift 1 to 2 seen <1>" in told and "drift 4 seen <4>" in told
    assert [label.split(".")[0] for label in chart_labels(alarming) if "Alarm" in label]
    assert "None was raised." in words(html) and not any("Alarm" in x for x in chart_labels(html))


def test_pages_that_are_made_at_once_are_as_those_made_alone(html, run_dir, other_dir):
    """The demo makes pages in threads, which share matplotlib's settings."""
    runs = [run_dir, other_dir]
    with ThreadPoolExecutor(2) as pool:
        at_once = list(pool.map(lambda run: render(read_runs([run])), runs))
    assert at_once == [html, render(read_runs([other_dir]))]
