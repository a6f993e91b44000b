"""The report: the right numbers, whole runs and broken ones, and a page that asks the network for
nothing."""

import json
import math
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
import yaml

from g2rpo.config.recipes import settings
from g2rpo.config.resolve import resolve
from g2rpo.core import statistics
from g2rpo.core.statistics import Interval, interval
from g2rpo.evaluation.untrained import RIGHT
from g2rpo.lab.report.charts import compact
from g2rpo.lab.report.history import Change, SeedGroup, read_runs, seed_groups
from g2rpo.lab.report.page import render
from g2rpo.lab.report.pictures import MOST_EVALUATIONS
from g2rpo.lab.report.verdict import decimals, figures, in_time, signed, summary_of, verdict
from g2rpo.monitor.alarms import ALARMS
from g2rpo.monitor.scores import (
    read_rows,
    right_of,
    save_pictures,
    save_rows,
    score_rows,
    scores_of,
)
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
        return [
            a
            for t, a in self.tags
            if t == tag and all(a.get(k.rstrip("_")) == v for k, v in attributes.items())
        ]

    @property
    def charts(self):
        """What every chart shows, by its title."""
        return {
            a["aria-label"].split(".")[0]: json.loads(a["data-chart"])
            for a in self.all("svg", class_="chart")
        }

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def make_run(directory, *overrides, iterations=None, finish=True):
    """A run of the Gaussian policy in `directory`, as `g2rpo train` leaves it; stopped after
    `iterations`, if given."""
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
    return make_run(
        tmp_path_factory.mktemp("runs") / "second",
        "algorithm.group_size=8",
        "algorithm.granularities=[1]",
    )


@pytest.fixture(scope="module")
def html(run_dir):
    return render(read_runs([run_dir]))


def test_the_headline_is_results_json(run_dir, html):
    words = Page(html).words
    results = json.loads((run_dir / "results.json").read_text())
    assert results["iteration"] == 4
    for name, use in (("bright", "trained on"), ("dark", "judged only")):
        row = results["rewards"][name]
        base, tuned = (f"{row[key]:.3f}".replace("-", "−") for key in ("base", "tuned"))
        assert (
            f"{name} {use} {base} {tuned} {signed(row['tuned'] - row['base'], 3)} too few prompts"
            in words
        )
        assert row["count"] == 3
    assert (
        "Finished: 4 iterations." in words and "LoRA of rank 32" in words and "bright × 1" in words
    )


def test_charts_hold_the_logged_numbers(run_dir, html):
    page = Page(html)
    charts, rows = page.charts, Run(run_dir).read_log()
    faint, marked = charts["bright, trained on"]["lines"]
    for line, kind in ((faint, "train"), (marked, "eval")):
        logged = [row for row in rows if row["kind"] == kind]
        assert line["x"] == [row["iteration"] for row in logged]
        assert [float(y) for y in line["y"]] == [
            pytest.approx(row["reward/bright"], rel=1e-3) for row in logged
        ]
    assert {"Gradient norm", "Loss", "Brightness"} <= set(charts)
    early, late = rows[1], rows[-2]  # a fifth of four iterations is one
    for step in range(3):
        keys = [f"step/{step}/{what}" for what in ("spread/bright", "advantage", "agreement")]
        cells = [f"{figures(early[key])} → {figures(late[key])}" for key in keys]
        assert f"{step} {' '.join(cells)}" in page.words


def test_costs_are_sums(run_dir, html):
    rows = [row for row in Run(run_dir).read_log() if row["kind"] == "train"]
    words = Page(html).words
    assert f"Network evaluations {sum(row['evaluations'] for row in rows):,}" in words
    assert (
        "… rollout" in words and f"Pictures scored {4 * 2 * 3 * 2 * 6}," in words
    )  # iterations, prompts, branch steps, granularities, members


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
    assert [words.split()[-1] for words in told.split("bright")[1:]] == [
        signed(float(advantages[m]), 2) for m in order
    ]


def test_pictures_have_the_scores_of_the_log_and_marks_where_something_can_tell(run_dir, tmp_path):
    def bright(images, prompts):
        return brightness(images, prompts)

    # of the base's pictures some are right
    bright.right = float(trainer(None).score_heldout().scores["bright"].mean())
    Run(tmp_path).claim(config())
    t = trainer(tmp_path, rewards={"bright": bright})
    rows = [row for row in t.train() if row["kind"] == "eval"]
    t.finish()
    page = Page(render(read_runs([tmp_path])))
    # members have marks too
    below = page.words.partition("by the rewards that can tell")[2].partition("How it learns")[0]
    marks = below.count("✓ right"), below.count("✗ wrong")
    judged = [t.evaluator.baseline.right, t.score_heldout().right]
    middle = right_of(read_rows(Run(tmp_path).scores(2)))
    expected = [bool(v) for side in [*judged, middle] for v in side]
    assert marks == (expected.count(True), expected.count(False)) and sum(marks) == 9 > marks[0] > 0
    for value in [*t.evaluator.baseline.scores["bright"], *t.score_heldout().scores["bright"]]:
        assert f"bright {float(value):.3f}" in page.words
    share = [f"{100 * row['right']:.0f} %" for row in (rows[0], rows[-1])]
    assert (
        f"Right on {share[1]} of 3 held-out prompts, before training {share[0]}, too few"
        in page.words
    )
    assert "✓ is right and ✗ wrong" in page.words
    assert "✓" not in Page(render(read_runs([run_dir]))).words  # nothing there can tell


COUNT = 192


def said(directory, rewards, right=(), alarms=(), more=None):
    """Sentences of a run whose scores have these statistics: {name: (trained, base, tuned, error,
    spread)}."""
    names, judged = (
        {name: 1.0 for name, row in rewards.items() if row[0] == trained}
        for trained in (True, False)
    )
    Run(directory).claim(
        resolve(
            {**PLAIN, "rewards": names, "evaluation": {**PLAIN["evaluation"], "rewards": judged}}
        )
    )
    standard = torch.arange(COUNT).double()
    standard = (standard - standard.mean()) / standard.std()
    base = {name: row[1] + row[4] * standard for name, row in rewards.items()}
    tuned = {
        name: base[name] + row[2] - row[1] + row[3] * COUNT**0.5 * standard.flip(0)
        for name, row in rewards.items()
    }
    for place, (iteration, scores) in enumerate(((0, base), (4, tuned))):
        verdicts = (torch.arange(COUNT) < round(right[place] * COUNT)).float() if right else None
        save_rows(Run(directory).scores(iteration), score_rows(["a"] * COUNT, scores, verdicts))
    results = {"iteration": 4, "rewards": {}} | (more or {})
    (directory / "results.json").write_text(json.dumps(results))
    logged = [{"kind": "eval", "iteration": iteration, "seconds": 1.0} for iteration in (0, 4)]
    logged[1]["alarms"] = dict.fromkeys(alarms, "seen")
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))
    sentences = " ".join(summary_of(*read_runs([directory])).sentences).replace(
        "\N{NO-BREAK SPACE}", " "
    )
    assert "No free knob of the untrained model was tried" in sentences
    return sentences


def test_the_summary_says_what_happened_in_plain_words(tmp_path):
    """Intervals by hand: 36 of 192 prompts became right: .1875, ± 1.97 sqrt(.1875 (1 - .1875) /
    191) = .056."""
    up, flat, down = (
        (True, 0.5, 0.7, 0.05, 0.4),
        (False, 70.0, 70.4, 0.3, 2.0),
        (False, 0.8, 0.6, 0.05, 0.1),
    )
    sentences = said(
        tmp_path / "a", {"one": up, "two": flat}, right=(0.43, 0.62), alarms=["hacking"]
    )
    told = "Trained on one for 4 iterations. Right on 62 % of 192 held-out prompts, before training 43 %"
    assert sentences.startswith(f"{told} (+19 points, +13 to +24). No free knob")
    assert sentences.endswith("Nothing that was judged clearly fell. 1 alarm: hacking.")
    sentences = said(tmp_path / "c", {"one": up})
    assert (
        "On 192 held-out prompts one rose: +0.50 standard deviations (+0.25 to +0.75). No free knob"
        in sentences
    )
    assert sentences.endswith("No other score was judged. No alarm.")
    rewards = {
        "one": (True, 0.5, 0.3, 0.05, 0.4),
        "other": (True, 0.5, 0.51, 0.05, 0.4),
        "two": down,
    }
    both = said(tmp_path / "d", rewards, alarms=["a", "b"])
    assert both.startswith(
        "Trained on one and other for 4 iterations. On 192 held-out prompts one fell: −0.50 standard deviations "
        "(−0.75 to −0.25); other did not clearly change: +0.03 standard deviations (−0.22 to +0.27)."
    )
    assert both.endswith("Worse: one (−0.50 s.d.), two (−2.00 s.d.). 2 alarms: a, b.")
    Run(tmp_path / "e").claim(config())
    (only,) = summary_of(*read_runs([tmp_path / "e"])).sentences
    assert only.startswith("Nothing can be said yet")


def test_a_change_that_is_clear_and_small_is_called_slight_and_no_loss(tmp_path):
    """Beyond the error, and a fiftieth of what the prompts differ by."""
    rewards = {
        "red": (True, 0.048887, 0.049108, 0.00003, 0.011),
        "green": (False, 0.5, 0.499, 0.0001, 0.05),
    }
    sentences = said(tmp_path / "a", rewards)
    assert "red rose slightly: +0.02 standard deviations (+0.01 to +0.03)" in sentences
    assert "Nothing that was judged clearly fell" in sentences


@pytest.mark.parametrize(
    ("spreads", "told"),
    [
        (
            {"diversity": (0.045, 0.015)},
            "Worse: diversity (pictures of one prompt differ 0.33 times as much as the base's). No alarm.",
        ),
        (
            {"diversity": (0.045, 0.041)},
            "judged. Pictures of one prompt differ 0.91 times as much as the base's. No",
        ),
        (
            {"diversity": (0.045, 0.015), "diversity_right": (0.02, 0.014)},
            "Worse: diversity (pictures of one prompt differ 0.33 times as much as the base's, right ones 0.70 times).",
        ),
        (
            {"diversity": (0.045, 0.015), "diversity_right": (0.02, 0.019)},
            "was judged. Pictures of one prompt differ 0.33 times as much as the base's, right ones 0.95 times.",
        ),
        ({}, "was judged. No alarm."),
    ],
)
def test_lost_diversity_is_called_a_loss(tmp_path, spreads, told):
    more = {key: {"base": base, "tuned": tuned} for key, (base, tuned) in spreads.items()}
    assert told in said(tmp_path / "a", {"one": (True, 0.5, 0.7, 0.05, 0.4)}, more=more)


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
    html = render(read_runs([directory]))
    page = Page(html)
    assert html.count("<script>") == 1 and "<b>bold" not in html and not page.all("i", class_=None)
    assert "<b>bold" in page.words and "<i>bright" in page.words
    assert page.words.count("alert('1')") >= 2  # the prompt above its pictures, and the model
    assert page.all("img")[0]["alt"] == f"Base model: {bad}"


def test_two_runs_share_their_charts(run_dir, other_dir):
    page = Page(render(read_runs([run_dir, other_dir])))
    charts = page.charts
    lines = charts["bright, trained on"]["lines"]
    assert [line["name"] for line in lines] == [
        f"{run}: {what}" for run in ("first", "second") for what in ("training batches", "held-out")
    ]
    for colour in ("c0", "c1"):
        assert [
            mark["style"] for mark in page.all("use") if f"fill: var(--{colour})" in mark["style"]
        ]
    assert len(page.all("ul", class_="legend")) == 2 and page.words.count("first.") == 1
    assert (
        "algorithm.group_size 6 8" in page.words
        and "algorithm.granularities [1, 2] [1]" in page.words
    )
    assert page.words.count("agreement") and "second 0" in page.words  # a row of each run by step


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
    # [evaluation, seed, prompt]
    bright = np.stack([[one["bright"].double().numpy() for one in after] for after in scores])
    change = interval(bright[2] - bright[0])
    (line,) = seed_groups(read_runs(seeds))
    found = line.changes["bright"]
    assert (found.base, found.tuned) == pytest.approx((bright[0].mean(), bright[2].mean()))
    assert found.change == change and found.seeds == 3 and found.trained
    right = (bright >= 0.5).astype(float)
    share, ends = line.changes[RIGHT], interval(right[2] - right[0])
    assert (share.base, share.tuned, share.change) == (right[0].mean(), right[2].mean(), ends)
    page = Page(render(read_runs(seeds)))
    shares = f"{100 * share.tuned:.0f} % of 3 held-out rooms, before training {100 * share.base:.0f} %, too few"
    assert f"Lights {shares}" in page.words
    digits = decimals(found)
    assert (
        f"{signed(change.low, digits)} to {signed(change.high, digits)}" in page.words
        and "over seeds" in page.words
    )
    assert page.words.count("Finished: 4 iterations.") == 1 and "trainer.seed 1 2 3" in page.words
    charts = page.charts
    faint, held_out = charts["bright, trained on"]["lines"]
    assert held_out["y"] == [compact(float(each.mean())) for each in bright] and held_out["x"] == [
        0,
        2,
        4,
    ]
    logged = [
        [row["reward/bright"] for row in Run(run).read_log() if row["kind"] == "train"]
        for run in seeds
    ]
    assert faint["y"] == [compact(float(np.mean(each))) for each in zip(*logged, strict=True)]
    assert len(charts["Gradient norm"]["lines"]) == 1 and not page.all("ul", class_="legend")
    curve = line.curve("bright")
    assert curve.y == pytest.approx(bright.mean((1, 2)))
    assert [end - curve.y[2] for end in curve.ends[2]] == pytest.approx(
        [change.low - change.mean, change.high - change.mean]
    )


def test_only_runs_of_one_config_and_several_seeds_are_one_line(seeds, tmp_path):
    again = shutil.copytree(seeds[0], tmp_path / "again")  # the same seed
    longer = seeded(tmp_path / "longer", 4, "trainer.iterations=6")
    other_place = seeded(tmp_path / "place", 5, "trackers=[]")
    runs = read_runs([seeds[0], longer, again, seeds[1], other_place])
    names = lambda lines: [[run.name for run in line.runs] for line in lines]  # noqa: E731
    assert names(seed_groups(runs)) == [["1", "2", "place"], ["longer"], ["again"]]
    page = Page(render(runs))
    charts = page.charts
    assert [line["name"] for line in charts["Gradient norm"]["lines"]] == [
        "1 · 2 · place",
        "longer",
        "again",
    ]
    assert page.words.count("1 · 2 · place.") == 1


def test_unfinished_runs_with_other_seeds_are_compared_at_the_last_evaluation_of_all(
    seeds, tmp_path
):
    shorter = shutil.copytree(seeds[1], tmp_path / "shorter")
    rows = [row for row in Run(shorter).read_log() if row["iteration"] <= 2]
    (shorter / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (shorter / "results.json").unlink()
    runs = read_runs([seeds[0], shorter])
    (line,) = seed_groups(runs)
    both = [
        scores_of(read_rows(Run(run).scores(2)))["bright"].double().mean()
        for run in (seeds[0], shorter)
    ]
    assert line.judged_after == [2, 2] and {*line.changes} == {"bright", "dark", RIGHT}
    assert line.changes["bright"].tuned == pytest.approx(float(sum(both)) / 2)
    words = Page(render(runs)).words
    assert (
        "1: Finished: 4 iterations." in words and "shorter: Unfinished: 2 of 4 iterations" in words
    )
    assert "Lights " in words
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
    change = SeedGroup((run,)).changes["bright"]
    assert (change.base, change.tuned) == pytest.approx(
        (first["reward/bright"], last["reward/bright"])
    )


def test_a_run_without_tables_of_scores_has_a_page(run_dir, tmp_path):
    directory = shutil.copytree(run_dir, tmp_path / "run")
    shutil.rmtree(directory / "scores")
    page = Page(render(read_runs([directory])))
    assert "no two evaluations" in page.words and "No pictures yet." in page.words
    assert page.charts["bright, trained on"]["lines"][1]["x"] == [0, 2, 4]  # from the log


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
    assert (
        "recipe scenes" in words
        and "rewards.scene_accuracy.weight 1.0 2.0 trainer.iterations 80 7 config.yaml" in words
    )


def test_the_command(capsys, tmp_path, run_dir, other_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "report.html").symlink_to(tmp_path / "mine")
    out = done(capsys, "report", run_dir)
    assert str(run_dir / "report.html") in out and (run_dir / "report.html").stat().st_size < 5e6
    assert (
        g2rpo(capsys, "report", run_dir, other_dir)[0] == 0
        and (tmp_path / "report.html").stat().st_size > 1e4
    )
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
    """Noise is the hardest picture to compress: 8 prompts at 20 evaluations stay within the page's
    bound."""
    Run(tmp_path).claim(config("trainer.iterations=20"))
    row = {"kind": "eval", "reward/bright": 0.5, "reward/dark": 0.5, "seconds": 1.0}
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({**row, "iteration": i}) + "\n" for i in range(20))
    )
    noise = torch.rand(8, 3, 256, 256, generator=torch.Generator().manual_seed(0))
    files = Run(tmp_path)
    for i in range(20):
        save_rows(
            files.scores(i),
            score_rows(
                [str(n) for n in range(8)], dict.fromkeys(("bright", "dark"), torch.rand(8))
            ),
        )
        save_pictures(files.pictures(i), noise, range(8), 1)
    html = render(read_runs([tmp_path]))
    assert len(html) < 5e6
    (slider,) = [a for a in Page(html).all("input") if "data-iterations" in a]
    shown = [int(i) for i in slider["data-iterations"].split(",")]
    assert len(shown) == MOST_EVALUATIONS and shown[0] == 0 and shown[-1] == 19


@pytest.mark.parametrize(
    ("ends", "spread", "said"),
    [
        ((0.3, 0.1, 0.5), math.nan, "higher"),
        ((-0.3, -0.5, -0.1), 0.4, "lower"),
        ((0.3, 0.1, 0.5), 1.6, "slightly higher"),
        ((-0.3, -0.5, -0.1), 1.6, "slightly lower"),
        ((0.19, -0.01, 0.39), 0.4, "no clear change"),
        ((0.0, 0.0, 0.0), 0.0, "no clear change"),
        ((0.3, math.nan, math.nan), 0.4, "unknown"),
    ],
)
def test_verdicts(ends, spread, said):
    assert verdict(Change("r", True, 1.0, 1.0 + ends[0], Interval(*ends, 64), spread, 64)) == said
    assert (
        verdict(Change("r", True, 1.0, 1.0 + ends[0], Interval(*ends, 7), spread, 7))
        == "too few prompts"
    )


def test_numbers_for_people():
    halves = (0.0312, 0.43, 6.1, 80.0, 0.0, math.nan, 2e-9)  # 1.96 standard errors
    changes = [
        Change("r", True, 0, 1, Interval(1, 1 - half, 1 + half, 64), 1, 64) for half in halves
    ]
    assert [decimals(change) for change in changes] == [3, 2, 1, 0, 3, 3, 6]
    assert [in_time(s) for s in (0.78, 42, 301, 12000)] == [
        "0.78 s",
        "42 s",
        "5 min 1 s",
        "3 h 20 min",
    ]


def test_alarms_are_told_and_marked(html, tmp_path, monkeypatch):
    """A judged reward falls in every toy run (dark is minus bright); a row of training has one of
    its own."""
    monkeypatch.setattr(statistics, "FEWEST_VALUES", 3)
    directory = make_run(tmp_path / "run", "trainer.iterations=6", finish=False)
    rows = Run(directory).read_log()
    for row in rows:
        if row["kind"] == "train" and row["iteration"] in (2, 3, 5):
            row["alarms"] = {"drift": f"seen <{row['iteration']}>"}
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run,) = read_runs([directory])
    drifts = [(one.first, one.last, one.said) for one in run.alarms() if one.name == "drift"]
    assert drifts == [(2, 3, "seen <2>"), (5, 5, "seen <5>")]
    (hacking,) = [one for one in run.alarms() if one.name == "hacking"]
    assert (hacking.first, hacking.last) == (2, 6)
    page = Page(render([run]))
    assert f"hacking 2 to 6 {hacking.said} {ALARMS['hacking'].helps}" in page.words
    assert "drift 2 to 3 seen <2>" in page.words and "drift 5 seen <5>" in page.words
    charts = {
        a["aria-label"].split(".")[0]: a["aria-label"] for a in page.all("svg", class_="chart")
    }
    assert (
        "Alarm at iteration 2." in charts["dark, judged only"]
        and "Alarm" not in charts["Gradient norm"]
    )
    assert len(page.all("path", class_="alarm")) == 3  # bright, dark and the key
    quiet = Page(html)
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
    assert (
        "Ended by an alarm after 3 of 4 iterations: the weights are those after 2, the best evaluation."
        in words
    )
    line = SeedGroup((run,))
    assert line.judged_after == [2]
    assert {name: change.tuned for name, change in line.changes.items()} == {
        name: row.tuned for name, row in table.items()
    }


def test_pages_that_are_made_at_once_are_as_those_made_alone(run_dir, other_dir):
    """The demo makes pages in threads, which share matplotlib's settings and the charts' axes."""
    alone = [render(read_runs([each])) for each in (run_dir, other_dir)]
    with ThreadPoolExecutor(4) as pool:
        assert (
            list(pool.map(lambda each: render(read_runs([each])), [run_dir, other_dir] * 2))
            == alone * 2
        )
