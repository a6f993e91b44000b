"""The report: the right numbers, whole runs and broken ones, and a page that asks the network for nothing."""

import json
import math
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
import yaml

from g2rpo.config.recipes import settings
from g2rpo.config.resolve import resolve
from g2rpo.core import statistics
from g2rpo.core.statistics import interval
from g2rpo.lab.report.charts import compact
from g2rpo.lab.report.history import RewardChange, read_runs, rollout_seconds, seed_groups
from g2rpo.lab.report.page import render
from g2rpo.lab.report.pictures import MOST_EVALUATIONS
from g2rpo.lab.report.verdict import decimals, in_time, signed, summary_of, verdict
from g2rpo.monitor.alarms import ALARM_ADVICE
from g2rpo.monitor.scores import read_rows, right_of, save_pictures, save_rows, score_rows, scores_of
from g2rpo.run.run import Run
from tests.support.commands import done, g2rpo, refused
from tests.support.runs import PLAIN, brightness, config, trainer

VOID = {"meta", "img", "input", "br", "link", "hr"}
SVG_LEAVES = {"path", "use"}  # written as <path .../>


class Page(HTMLParser):
    """Checks that every tag is closed in order, and keeps text, attributes and resources."""

    def __init__(self, html):
        super().__init__()
        self.open, self.text, self.tags = [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert tag in SVG_LEAVES, tag
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)

    def all(self, tag, **attributes):
        return [a for t, a in self.tags if t == tag and all(a.get(k.rstrip("_")) == v for k, v in attributes.items())]

    @property
    def charts(self):
        """What every chart shows, by its title."""
        return {a["aria-label"].split(".")[0]: json.loads(a["data-chart"]) for a in self.all("svg", class_="chart")}

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def make_run(directory, *overrides, iterations=None, finish=True):
    """A run of the Gaussian policy in `directory`, as `g2rpo train` leaves it; stopped after `iterations`, if given."""
    Run(directory).claim(config(*overrides))
    t = trainer(directory, *overrides)
    Run(directory).record_start(0, torch.device("cpu"))
    for row in t.train():
        if row["kind"] == "train" and row["iteration"] == iterations:
            return directory
    if finish:
        t.finish()
    return directory


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "second", "algorithm.group_size=8", "algorithm.granularities=[1]")


@pytest.fixture(scope="module")
def html(run_dir):
    return render(read_runs([run_dir]))


def test_the_headline_is_results_json(run_dir, html):
    words = Page(html).words
    results = json.loads((run_dir / "results.json").read_text())
    assert results["iteration"] == 4
    for name, use in (("bright", "trained on"), ("dark", "judged only")):
        row = results["rewards"][name]
        digits = decimals(row["error"])
        base, tuned = (f"{row[key]:.{digits}f}".replace("-", "−") for key in ("base", "tuned"))
        change = signed(row["tuned"] - row["base"], digits)
        assert f"{name} {use} {base} {tuned} {change} too few prompts" in words.replace("  ", " ")
        assert row["count"] == 3
    assert "Finished: 4 iterations." in words and "LoRA of rank 32" in words and "bright × 1" in words


def test_charts_hold_the_logged_numbers(run_dir, html):
    charts = Page(html).charts
    rows = Run(run_dir).read_log()
    faint, marked = charts["bright, trained on"]["lines"]
    for line, kind in ((faint, "train"), (marked, "eval")):
        logged = [row for row in rows if row["kind"] == kind]
        assert line["x"] == [row["iteration"] for row in logged]
        assert [float(y) for y in line["y"]] == [pytest.approx(row["reward/bright"], rel=1e-3) for row in logged]
    early, late = charts["Spread of bright"]["lines"]
    for line, row in ((early, rows[1]), (late, rows[-2])):  # a fifth of four iterations is one
        assert row["kind"] == "train" and line["x"] == [0, 1, 2]
        assert [float(y) for y in line["y"]] == [pytest.approx(row[f"step/{k}/spread/bright"], rel=1e-3) for k in range(3)]
    assert {"Advantage size", "Agreement of tails", "Agreement over time", "Gradient norm", "Loss"} <= set(charts)


def test_with_several_ranks_evaluations_take_as_long_as_the_last_rank():
    """The first one waits for it; a single rank waits for scores at most."""
    row = {"seconds/rollout": 0.5, "seconds/waiting": 3.5}
    assert [rollout_seconds(row | ranks) for ranks in ({}, {"ranks": 1}, {"ranks": 2})] == [0.5, 0.5, 4.0]


def test_costs_are_sums(run_dir, html):
    rows = [row for row in Run(run_dir).read_log() if row["kind"] == "train"]
    words = Page(html).words
    assert f"Network evaluations {sum(row['evaluations'] for row in rows):,}" in words
    assert f"Pictures scored {4 * 2 * 3 * 2 * 6}" in words  # iterations, prompts, branch steps, granularities, members


def test_the_page_needs_nothing_else(html):
    page = Page(html)
    assert not re.search(r"https?://|@import|url\(", html)
    for tag, attributes in page.tags:
        for key in ("src", "href", "srcset", "xlink:href", "action", "data"):
            value = attributes.get(key)
            assert value is None or value.startswith(("data:image/webp;base64,", "#")), (tag, key)
    assert page.all("html", lang="en") and page.all("meta", name="viewport")
    targets = {a["id"] for _, a in page.tags if "id" in a}
    assert {a["href"][1:] for a in page.all("a")} <= targets
    assert len(targets) == sum("id" in a for _, a in page.tags)


def test_a_group_of_the_first_iteration_is_shown_from_best_to_worst(run_dir, html):
    rows, page = read_rows(Run(run_dir).group_scores), Page(html)
    scores = scores_of(rows)["bright"].reshape(2, 6)  # granularities, members
    advantages = scores_of(rows)["advantage"][:6]
    standard = (scores - scores.mean(1, keepdim=True)) / scores.std(1, keepdim=True)
    assert torch.allclose(advantages, standard.sum(0), atol=1e-4) and advantages.abs().max() > 0.5
    order = advantages.argsort(descending=True).tolist()
    shown = [a["alt"] for a in page.all("img") if a["alt"].startswith("member ")]
    assert shown == [f"member {member + 1}, tail {tail}" for member in order for tail in (1, 2)]
    told = page.words.partition("nothing else is random.")[2].partition("Any other prompt")[0]
    assert [words.split()[-1] for words in told.split("bright")[1:]] == [signed(float(advantages[m]), 2) for m in order]


def test_pictures_have_the_scores_of_the_log_and_marks_where_something_can_tell(run_dir, tmp_path):
    def bright(images, prompts):
        return brightness(images, prompts)

    bright.right = float(trainer(None).score_heldout().scores["bright"].mean())  # of the base's pictures some are right
    Run(tmp_path).claim(config())
    t = trainer(tmp_path, rewards={"bright": bright})
    rows = [row for row in t.train() if row["kind"] == "eval"]
    t.finish()
    page = Page(render(read_runs([tmp_path])))
    below = page.words.partition("by the rewards that can tell")[2]
    marks = below.count("✓ right"), below.count("✗ wrong")
    judged = [t.evaluator.baseline.right, t.score_heldout().right]
    middle = right_of(read_rows(Run(tmp_path).scores(2)))
    expected = [bool(v) for side in [*judged, middle] for v in side]
    assert marks == (expected.count(True), expected.count(False)) and sum(marks) == 9 > marks[0] > 0
    for value in [*t.evaluator.baseline.scores["bright"], *t.score_heldout().scores["bright"]]:
        assert f"bright {float(value):.3f}" in page.words
    share = [f"{100 * row['right']:.0f} %" for row in (rows[0], rows[-1])]
    assert f"Right on {share[1]} of 3 held-out prompts; before training {share[0]}, too few" in page.words
    assert "✓ is right and ✗ wrong" in page.words
    assert "✓" not in Page(render(read_runs([run_dir]))).words  # nothing there can tell


def said(directory, rewards, right=None, alarms=(), more=None):
    """Sentences and figures of a run with these results: {name: (trained, base, tuned, error, spread)}."""
    names, judged = ({name: 1.0 for name, row in rewards.items() if row[0] == trained} for trained in (True, False))
    Run(directory).claim(resolve({**PLAIN, "rewards": names, "evaluation": {**PLAIN["evaluation"], "rewards": judged}}))

    def row(*values):
        return dict(zip(("base", "tuned", "error", "spread"), values, strict=True))

    results = {"iteration": 4, "prompts": 192, "rewards": {name: row(*values[1:]) for name, values in rewards.items()}}
    (directory / "results.json").write_text(json.dumps(results | ({"right": row(*right)} if right else {}) | (more or {})))
    logged = {"kind": "eval", "iteration": 4, "seconds": 1.0, "alarms": dict.fromkeys(alarms, "seen")}
    (directory / "metrics.jsonl").write_text(json.dumps(logged) + "\n")
    told = summary_of(*read_runs([directory]))
    plain = [" ".join(lines).replace("\N{NO-BREAK SPACE}", " ") for lines in (told.sentences, told.figures)]
    assert "No free knob of the untrained model was tried" in plain[0]
    return plain


def test_the_summary_says_what_happened_in_plain_words(tmp_path):
    up, flat, down = (True, 0.5, 0.7, 0.05, 0.4), (False, 70.0, 70.4, 0.3, 2.0), (False, 0.8, 0.6, 0.05, 0.1)
    sentences, figures = said(tmp_path / "a", {"one": up, "two": flat}, right=(0.43, 0.62, 0.03, 0.5), alarms=["hacking"])
    assert sentences.startswith("Right on 62 % of 192 held-out prompts; before training 43 %. No free knob")
    assert sentences.endswith("No other score clearly fell; 1 alarm: hacking.")
    assert figures == (
        "Right pictures: 43 % to 62 % (+19 ± 6 points). one: 0.500 to 0.700 (change +0.101 to +0.299); "
        "+0.50 s.d. (+0.25 to +0.75)."
    )
    sentences, _ = said(tmp_path / "c", {"one": up})
    assert sentences.startswith("On 192 held-out prompts one rose: +0.50 standard deviations (+0.25 to +0.75). No free knob")
    assert sentences.endswith("No other score was judged; no alarm.")
    both, _ = said(
        tmp_path / "d",
        {"one": (True, 0.5, 0.3, 0.05, 0.4), "other": (True, 0.5, 0.51, 0.05, 0.4), "two": down},
        alarms=["a", "b"],
    )
    assert both.startswith(
        "On 192 held-out prompts one fell: −0.50 standard deviations (−0.75 to −0.25); "
        "other did not clearly change: +0.03 standard deviations (−0.22 to +0.27)."
    )
    assert both.endswith("Fallen: one, two; 2 alarms: a, b.")
    Run(tmp_path / "e").claim(config())
    assert summary_of(*read_runs([tmp_path / "e"])).sentences == [
        "Nothing can be said yet: there is no second evaluation to compare the base model's with."
    ]


def test_a_change_that_is_clear_and_small_shows_how_small_it_is(tmp_path):
    """Beyond the error, and a fiftieth of what the prompts differ by."""
    sentences, _ = said(tmp_path / "a", {"red": (True, 0.048887, 0.049108, 0.00003, 0.011)})
    assert "red rose: +0.02 standard deviations (+0.01 to +0.03)" in sentences


@pytest.mark.parametrize(
    ("spreads", "told"),
    [
        (
            {"diversity": (0.045, 0.015)},
            "diversity was lost: pictures of one prompt differ 0.33 times as much as the base's;",
        ),
        ({"diversity": (0.045, 0.041)}, "; pictures of one prompt differ 0.91 times as much as the base's;"),
        (
            {"diversity": (0.045, 0.015), "diversity_right": (0.02, 0.014)},
            "; diversity was lost: pictures of one prompt differ 0.33 times as much as the base's, right ones 0.70 times;",
        ),
        (
            {"diversity": (0.045, 0.015), "diversity_right": (0.02, 0.019)},
            "was judged; pictures of one prompt differ 0.33 times as much as the base's, right ones 0.95 times;",
        ),
        ({}, "was judged; no alarm."),
    ],
)
def test_lost_diversity_is_called_a_loss(tmp_path, spreads, told):
    more = {key: {"base": base, "tuned": tuned} for key, (base, tuned) in spreads.items()}
    assert told in said(tmp_path / "a", {"one": (True, 0.5, 0.7, 0.05, 0.4)}, more=more)[0]


def test_markup_from_users_is_text(tmp_path):
    bad = "<script>alert('1')</script>&\"x"
    directory = make_run(tmp_path / "<b>bold", finish=False)
    table = Run(directory).scores(0)
    rows = read_rows(table)
    save_rows(table, [row | {"prompt": bad} for row in rows])
    text = (directory / "metrics.jsonl").read_text()
    (directory / "metrics.jsonl").write_text(text.replace("bright", "<i>bright"))
    text = (directory / "config.yaml").read_text()
    (directory / "config.yaml").write_text(text.replace("path: none", f"path: {json.dumps(bad)}"))
    (directory / "results.json").write_text(
        json.dumps({"iteration": 9, "rewards": {"<i>bright": {"base": 1.0, "tuned": 2.0, "error": 0.1}}})
    )
    html = render(read_runs([directory]))
    page = Page(html)
    assert html.count("<script>") == 1 and "<b>bold" not in html and not page.all("i", class_=None)
    assert "<b>bold" in page.words and "<i>bright" in page.words
    assert page.words.count("alert('1')") >= 2  # the prompt below its pictures, and the model
    assert page.all("img")[0]["alt"] == f"Base model: {bad}"


def test_two_runs_share_their_charts(run_dir, other_dir):
    page = Page(render(read_runs([run_dir, other_dir])))
    charts = page.charts
    lines = charts["bright, trained on"]["lines"]
    assert [line["name"] for line in lines] == [
        f"{run}: {what}" for run in ("first", "second") for what in ("training batches", "held-out")
    ]
    for colour in ("c0", "c1"):
        assert [mark["style"] for mark in page.all("use") if f"fill: var(--{colour})" in mark["style"]]
    assert len(page.all("ul", class_="legend")) == 4 and page.words.count("first.") == 1
    assert "algorithm.group_size 6 8" in page.words and "algorithm.granularities [1, 2] [1]" in page.words
    assert {line["name"].split(":")[0] for line in charts["Agreement of tails"]["lines"]} == {"first"}  # one tail: no agreement


def marked(images, prompts):
    return brightness(images, prompts)


marked.right, marked.right_in_words = 0.5, "Lights {} rooms"


def seeded(directory, seed, *overrides):
    """A finished run of another seed whose trained reward says what is right."""
    Run(directory).claim(config(f"trainer.seed={seed}", *overrides))
    t = trainer(directory, f"trainer.seed={seed}", *overrides, rewards={"bright": marked})
    list(t.train())
    t.finish()
    return directory


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeds")
    return [seeded(folder / str(seed), seed) for seed in (1, 2, 3)]


def test_runs_with_other_seeds_are_one_line_with_an_interval_over_seeds_and_prompts(seeds):
    scores = [[scores_of(read_rows(Run(run).scores(i))) for run in seeds] for i in (0, 2, 4)]
    bright = np.stack([[one["bright"].double().numpy() for one in after] for after in scores])  # [evaluation, seed, prompt]
    change = interval(bright[2] - bright[0])
    (line,) = seed_groups(read_runs(seeds))
    found = {one.reward: one for one in line.changes()}
    assert (found["bright"].base, found["bright"].tuned) == pytest.approx((bright[0].mean(), bright[2].mean()))
    assert found["bright"].interval == (change.low, change.high) and found["bright"].seeds == 3 and found["bright"].trained
    right = (bright >= 0.5).astype(float)
    share, ends = line.right(), interval(right[2] - right[0])
    assert (share.base, share.tuned, share.interval) == (right[0].mean(), right[2].mean(), (ends.low, ends.high))
    page = Page(render(read_runs(seeds)))
    points = [signed(100 * value, 0) for value in (ends.mean, ends.low, ends.high)]
    shares = f"{100 * share.tuned:.0f} % of 3 held-out rooms; before training {100 * share.base:.0f} %"
    assert f"Lights {shares}" in page.words
    assert f"({points[0]} points, {points[1]} to {points[2]} over 3 seeds)" in page.words
    digits = decimals(found["bright"].error)
    assert f"({signed(change.low, digits)} to {signed(change.high, digits)})" in page.words and "bootstrap" in page.words
    assert page.words.count("Finished: 4 iterations.") == 1 and "trainer.seed 1 2 3" in page.words
    charts = page.charts
    faint, held_out = charts["bright, trained on"]["lines"]
    assert held_out["y"] == [compact(float(each.mean())) for each in bright] and held_out["x"] == [0, 2, 4]
    logged = [[row["reward/bright"] for row in Run(run).read_log() if row["kind"] == "train"] for run in seeds]
    assert faint["y"] == [compact(float(np.mean(each))) for each in zip(*logged, strict=True)]
    assert len(charts["Gradient norm"]["lines"]) == 1 and not page.all("ul", class_="legend")
    _, y, changes = line.curve("bright")
    assert y == pytest.approx(bright.mean((1, 2))) and (changes[2].low, changes[2].high) == (change.low, change.high)


def test_only_runs_of_one_config_and_several_seeds_are_one_line(seeds, tmp_path):
    again = shutil.copytree(seeds[0], tmp_path / "again")  # the same seed
    longer = seeded(tmp_path / "longer", 4, "trainer.iterations=6")
    other_place = seeded(tmp_path / "place", 5, "trackers=[]")
    runs = read_runs([seeds[0], longer, again, seeds[1], other_place])
    names = lambda lines: [[run.name for run in line.runs] for line in lines]  # noqa: E731
    assert names(seed_groups(runs)) == [["1", "2", "place"], ["longer"], ["again"]]
    page = Page(render(runs))
    charts = page.charts
    assert [line["name"] for line in charts["Gradient norm"]["lines"]] == ["1 · 2 · place", "longer", "again"]
    assert page.words.count("1 · 2 · place.") == 1 and "over 3 seeds" in page.words


def test_unfinished_runs_with_other_seeds_are_compared_at_the_last_evaluation_of_all(seeds, tmp_path):
    shorter = shutil.copytree(seeds[1], tmp_path / "shorter")
    rows = [row for row in Run(shorter).read_log() if row["iteration"] <= 2]
    (shorter / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (shorter / "results.json").unlink()
    runs = read_runs([seeds[0], shorter])
    (line,) = seed_groups(runs)
    both = [scores_of(read_rows(Run(run).scores(2)))["bright"].double().mean() for run in (seeds[0], shorter)]
    assert [one.iteration for one in [*line.changes(), line.right()]] == [2, 2, 2]
    assert line.changes()[0].tuned == pytest.approx(float(sum(both)) / 2)
    words = Page(render(runs)).words
    assert "1: Finished: 4 iterations." in words and "shorter: Unfinished: 2 of 4 iterations" in words
    assert "Lights " in words and "over 2 seeds" in words
    rows = [row for row in rows if row["kind"] == "train" or row["iteration"] == 0]
    (shorter / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "Nothing can be said yet" in Page(render(read_runs([seeds[0], shorter]))).words


def test_a_run_that_stopped_has_a_page(tmp_path):
    directory = make_run(tmp_path / "run", iterations=3)
    page = Page(render(read_runs([directory])))
    assert "Unfinished: 3 of 4 iterations are logged" in page.words
    (run,) = read_runs([directory])
    evaluations = [row for row in Run(directory).read_log() if row["kind"] == "eval"]
    assert [row["iteration"] for row in evaluations] == [0, 2]
    first, last = evaluations
    (change, _) = run.changes()
    assert change == RewardChange(
        first["reward/bright"],
        last["reward/bright"],
        last["stderr/bright"],
        3,
        reward="bright",
        trained=True,
        iteration=2,
    )


def test_a_run_that_logged_nothing_has_a_page(tmp_path):
    Run(tmp_path).claim(config())
    assert "nothing is logged yet of 4 iterations" in Page(render(read_runs([tmp_path]))).words


def test_damaged_pictures_and_scores_are_named(run_dir, tmp_path):
    directory = shutil.copytree(run_dir, tmp_path / "run")
    files = Run(directory)
    for damage in (files.pictures(2) / "000000.png", files.scores(2)):
        damage.write_bytes(b"no")
        page = Page(render([*read_runs([directory])]))
        assert "Not shown: " in page.words and str(damage) in page.words
        assert all(a["alt"].startswith("member ") for a in page.all("img"))


def test_missing_numbers_are_gaps(run_dir, tmp_path):
    """A reward without a single score in an iteration is null in the log."""
    directory = shutil.copytree(run_dir, tmp_path / "run")
    rows = Run(directory).read_log()
    for row in rows:
        if row["iteration"] == 2:
            row |= {"reward/bright": None, "stderr/bright": None}
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(render(read_runs([directory])))
    charts = page.charts
    assert "–" in charts["bright, trained on"]["lines"][0]["y"]


def test_the_recipe_and_what_was_changed(tmp_path):
    data = settings("scenes")
    data["trainer"]["iterations"] = 7
    data["rewards"]["scene_accuracy"]["weight"] = 2.0
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(data))
    words = Page(render(read_runs([tmp_path]))).words
    assert "rewards.scene_accuracy.weight 1.0 2.0 trainer.iterations 80 7 config.yaml" in words
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.yaml").write_text(yaml.safe_dump(PLAIN))
    assert "names no recipe that this version of g2rpo has" in Page(render(read_runs([plain]))).words


def test_the_command(capsys, tmp_path, run_dir, other_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "report.html").symlink_to(tmp_path / "mine")
    out = done(capsys, "report", run_dir)
    assert str(run_dir / "report.html") in out and (run_dir / "report.html").stat().st_size < 5e6
    assert g2rpo(capsys, "report", run_dir, other_dir)[0] == 0 and (tmp_path / "report.html").stat().st_size > 1e4
    assert (tmp_path / "mine").read_text() == "mine"
    done(capsys, "report", run_dir, "--out", tmp_path / "new" / "page.html")
    Page((tmp_path / "new" / "page.html").read_text("utf-8"))


def test_wrong_input_is_one_message(capsys, tmp_path, run_dir):
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ((tmp_path / "empty",), "is no run directory (no config.yaml)"),
        ((run_dir, tmp_path / "nowhere"), "nowhere is no run directory"),
        ((run_dir, "--out", tmp_path), "cannot be written"),
    ):
        assert message in refused(capsys, "report", *arguments)
    Run(tmp_path / "broken").claim(config())
    (tmp_path / "broken" / "metrics.jsonl").write_text('{"kind": "tr\n{"kind": "train"}\n')
    assert "metrics.jsonl, line 1: is no JSON" in refused(capsys, "report", tmp_path / "broken")


@pytest.mark.slow  # 160 pictures of noise
def test_many_large_pictures_are_thinned_and_shrunk(tmp_path):
    """Noise is the hardest picture to compress: 8 prompts at 20 evaluations stay within the page's bound."""
    Run(tmp_path).claim(config("trainer.iterations=20"))
    row = {"kind": "eval", "reward/bright": 0.5, "reward/dark": 0.5, "seconds": 1.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({**row, "iteration": i}) + "\n" for i in range(20)))
    noise = torch.rand(8, 3, 256, 256, generator=torch.Generator().manual_seed(0))
    files = Run(tmp_path)
    for i in range(20):
        save_rows(files.scores(i), score_rows([str(n) for n in range(8)], {"bright": torch.rand(8)}))
        save_pictures(files.pictures(i), noise, range(8), 1)
    html = render(read_runs([tmp_path]))
    assert len(html) < 5e6
    (slider,) = [a for a in Page(html).all("input") if "data-iterations" in a]
    shown = [int(i) for i in slider["data-iterations"].split(",")]
    assert len(shown) == MOST_EVALUATIONS and shown[0] == 0 and shown[-1] == 19


@pytest.mark.parametrize(
    ("tuned", "error", "said"),
    [
        (1.3, 0.1, "higher"),
        (0.7, 0.1, "lower"),
        (1.19, 0.1, "no clear change"),
        (1.0, 0.0, "no clear change"),
        (1.3, math.nan, "unknown"),
        (math.nan, 0.1, "unknown"),
    ],
)
def test_verdicts(tuned, error, said):
    assert verdict(RewardChange(1.0, tuned, error, 64, reward="r", trained=True, iteration=1)) == said


def test_numbers_for_people():
    assert [decimals(e) for e in (0.0159, 0.22, 3.1, 41.0, 0.0, math.nan, 1e-9)] == [3, 2, 1, 0, 3, 3, 6]
    assert [in_time(s) for s in (0.78, 42, 301, 12000)] == ["0.78 s", "42 s", "5 min 1 s", "3 h 20 min"]


def test_alarms_are_told_and_marked(tmp_path, monkeypatch):
    """A judged reward falls in every toy run (dark is minus bright); a row of training has one of its own."""
    monkeypatch.setattr(statistics, "FEWEST_VALUES", 3)
    directory = make_run(tmp_path / "run", "trainer.iterations=6", finish=False)
    rows = Run(directory).read_log()
    for row in rows:
        if row["kind"] == "train" and row["iteration"] in (2, 3, 5):
            row["alarms"] = {"drift": f"seen <{row['iteration']}>"}
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run,) = read_runs([directory])
    assert [(one.name, one.kind, one.first, one.last, one.said) for one in run.alarms() if one.name == "drift"] == [
        ("drift", "train", 2, 3, "seen <2>"),
        ("drift", "train", 5, 5, "seen <5>"),
    ]
    (hacking,) = [one for one in run.alarms() if one.name == "hacking"]
    assert (hacking.first, hacking.last) == (2, 6)
    page = Page(render([run]))
    assert f"hacking 2 to 6 {hacking.said} {ALARM_ADVICE['hacking']}" in page.words
    assert "drift 2 to 3 seen <2>" in page.words and "drift 5 seen <5>" in page.words
    charts = {a["aria-label"].split(".")[0]: a["aria-label"] for a in page.all("svg", class_="chart")}
    assert "Alarm at iteration 2." in charts["dark, judged only"] and "Alarm" not in charts["Gradient norm"]
    assert len(page.all("path", class_="alarm")) == 2 and len(read_runs([directory])[0].alarms()) == 3  # bright and dark
    quiet = Page(render(read_runs([make_run(tmp_path / "quiet", "alarms.action=off")])))
    assert "None was raised." in quiet.words and not quiet.all("path", class_="alarm")


def test_a_run_that_went_back_says_so(tmp_path):
    directory = make_run(tmp_path / "run", iterations=3, finish=False)
    t = trainer(directory, "alarms.action=rollback")
    t.resume()
    t.persistence.keep_best(t.iteration)
    t.loop.iteration = 3
    t.roll_back()
    table = t.finish()
    (run,) = read_runs([directory])
    words = Page(render([run])).words
    assert "Ended by an alarm after 3 of 4 iterations: the weights are those after 2, the best evaluation." in words
    assert [(change.iteration, change.tuned) for change in run.changes()] == [(2, row.tuned) for row in table.values()]
