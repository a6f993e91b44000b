"""The charts of the report and the table by granularity, with all runs in each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from g2rpo.core.data import Row
from g2rpo.lab.report.charts import compact, line_chart, mean, thin
from g2rpo.lab.report.history import RunHistory, rollout_seconds
from g2rpo.lab.report.seeds import SeedGroup, mean_of
from g2rpo.lab.report.words import figures
from g2rpo.monitor.curves import Line, heldout_line


@dataclass(frozen=True)
class Chart:
    title: str
    note: str
    svg: Markup
    tag: str = ""


HEALTH = (
    ("ratio_deviation", "Ratio deviation", "largest |ratio − 1| of an iteration"),
    ("clip_fraction", "Clip fraction", "share of ratios outside the clip range"),
    ("kl", "KL to the base", "of the step kernels, mean over entries"),
    ("grad_norm", "Gradient norm", "before clipping"),
    ("loss", "Loss", "the clipped surrogate, and the KL term if there is one"),
    ("learning_rate", "Learning rate", "as scheduled"),
    ("advantage_size", "Advantage size", "mean |advantage|"),
    ("advantage_clipped", "Clipped advantages", "share at the advantage clip"),
    ("silent_groups", "Zero-variance groups", "share of groups without a gradient: all advantages 0"),
    ("missing_scores", "Missing scores", "share of scores that are NaN"),
    ("masked_groups", "Masked groups", "share of groups without two scores to compare"),
    ("log_prob_drift", "Log-prob drift", "training pass against rollout; rounding, or something is wrong"),
    ("skipped_updates", "Skipped updates", "with a gradient that was not finite"),
)


ALARMED = {"log_prob_drift": "drift", "silent_groups": "silent", "masked_groups": "masked", "advantage_clipped": "saturated"}
"""The alarm of a logged number of the update."""


LOOKS = {
    "brightness": "mean luma",
    "contrast": "standard deviation of luma within a picture; blank: 0",
    "saturation": "largest minus smallest channel of a pixel",
    "clipped": "share of values that are 0 or 1",
    "detail": "luma of a pixel against its neighbours; noise is high",
    "motion": "of clips: luma of a pixel against the frame before; standing still: 0",
}


def reward_charts(runs: Sequence[SeedGroup]) -> list[Chart]:
    """A chart per reward: held-out evaluations with the interval of their change, and training batches behind them."""
    charts = []
    trained = {name for run in runs for name in run.config.rewards}
    for name in sorted(_union(run.rewards() for run in runs), key=lambda name: name not in trained):
        lines = []
        for style, run in enumerate(runs):
            x, y = thin(*run.series(f"reward/{name}"))
            lines.append(Line(_label(runs, run, "training batches"), x, y, style, look="faint"))
            lines.append(_heldout(_label(runs, run, "held-out"), run, name, style))
        tag = "trained on" if name in trained else "judged only"
        charts += _chart(name, "", lines, "iteration", tag=tag, marks=_marks(runs, "hacking", "decline"))
    return charts


def _heldout(label: str, run: SeedGroup, reward: str, style: int) -> Line:
    """Held-out means of a reward, with the interval of their change from the base: of one run by its standard error, of several
    over seeds and prompts."""
    if len(run.runs) > 1:
        iterations, means, changes = run.curve(reward)
        ends = [(mean - one.mean + one.low, mean - one.mean + one.high) for mean, one in zip(means, changes, strict=True)]
        return Line(label, iterations, means, style, ends, "marked")
    (alone,) = run.runs
    return heldout_line(label, alone.evaluations, reward, alone.judged_prompts or alone.config.evaluation.num_prompts, style)


def look_charts(runs: Sequence[SeedGroup]) -> list[Chart]:
    """A chart for each statistic of the held-out pictures, with the base's range (5 to 95 % of its pictures) behind it."""
    charts = []
    for name, note in LOOKS.items():
        lines = []
        for style, run in enumerate(runs):
            lines.append(_range(_label(runs, run, "base"), run, f"image/{name}", style))
            lines.append(Line(_label(runs, run, "mean"), *run.series(f"image/{name}", "eval"), style, look="marked"))
        charts += _chart(name.capitalize(), note, lines, "iteration", marks=_marks(runs, "pictures"))
    return charts


def _range(label: str, run: SeedGroup, key: str, style: int) -> Line:
    """The range from KEY/low to KEY/high at every evaluation."""
    x, low = run.series(f"{key}/low", "eval")
    _, high = run.series(f"{key}/high", "eval")
    ends = [(math.nan if a is None else a, math.nan if b is None else b) for a, b in zip(low, high, strict=True)]
    return Line(label, x, [(a + b) / 2 for a, b in ends], style, ends, "range")


def step_charts(runs: Sequence[SeedGroup]) -> list[Chart]:
    """Charts of `diagnostics.diagnose` by branch step: means of the first and last fifth, and agreement over time."""
    logged = _split(runs, "step")
    charts = []
    for what in dict.fromkeys(what for _, what in logged):
        ticks = sorted(int(step) for step, each in logged if each == what)
        lines = []
        for style, run in enumerate(runs):
            early, late = ([mean(row.get(f"step/{k}/{what}") for row in rows) for k in ticks] for rows in fifths(run))
            lines.append(Line(_label(runs, run, "first fifth"), ticks, early, style, look="pale"))
            lines.append(Line(_label(runs, run, "last fifth"), ticks, late, style, look="marked"))
        charts += _chart(*_step_words(what), lines, "branch step", ticks=ticks)
    steps = [f"step/{step}/agreement" for step, what in logged if what == "agreement"]
    over_time = []
    for style, run in enumerate(runs):
        means = mean_of([(_numbers(one), [mean(row.get(key) for key in steps) for row in one.iterations]) for one in run.runs])
        over_time.append(Line(_label(runs, run), *thin(*means), style))
    return charts + _chart("Agreement over time", "the same, mean over branch steps", over_time, "iteration")


def health(runs: Sequence[SeedGroup]) -> tuple[list[Chart], list[str]]:
    """A chart for every number of the update that varies, and text for constant ones."""
    charts, constants = [], []
    for key, title, note in HEALTH:
        lines = [Line(_label(runs, run), *thin(*run.series(key)), style) for style, run in enumerate(runs)]
        seen = list(dict.fromkeys(y for run in runs for y in run.series(key)[1]))
        if len(seen) == 1:
            constants.append(f"{title} {compact(seen[0])}")
        elif seen:
            charts += _chart(title, note, lines, "iteration", marks=_marks(runs, ALARMED.get(key, "")))
    return charts, constants


def cost_charts(runs: Sequence[SeedGroup]) -> list[Chart]:
    """Speed during the run."""
    rates, lengths = [], []
    for style, run in enumerate(runs):
        speed = [(_numbers(one), [row["evaluations"] / rollout_seconds(row) for row in one.iterations]) for one in run.runs]
        rates.append(Line(_label(runs, run), *thin(*mean_of(speed)), style))
        lengths.append(Line(_label(runs, run), *thin(*run.series("seconds")), style))
    return [
        *_chart("Evaluations a second", "network evaluations of the rollout by its time", rates, "iteration"),
        *_chart("Seconds an iteration", "all phases, without held-out evaluations", lengths, "iteration"),
    ]


def granularity_table(runs: Sequence[SeedGroup]) -> dict[str, Any]:
    """The same by granularity: heads, and rows of (style, run, granularity, "first fifth → last fifth" by head)."""
    logged = _split(runs, "granularity")
    kinds = list(dict.fromkeys(what for _, what in logged))
    rows = []
    for style, run in enumerate(runs):
        for granularity in sorted({int(m) for m, _ in _split([run], "granularity")}):
            cells = []
            for what in kinds:
                early, late = (mean(row.get(f"granularity/{granularity}/{what}") for row in rows) for rows in fifths(run))
                cells.append("–" if early is None and late is None else f"{figures(early)} → {figures(late)}")
            rows.append((style, run.name, granularity, cells))
    heads = ["agreement with the finest" if what == "agreement" else what.replace("/", " of ") for what in kinds]
    return {"heads": heads, "rows": rows}


def fifths(run: SeedGroup) -> tuple[list[Row], list[Row]]:
    """The first and the last fifth of each run's iterations, at least one each."""
    counts = [(one.iterations, max(1, len(one.iterations) // 5)) for one in run.runs]
    return [row for rows, n in counts for row in rows[:n]], [row for rows, n in counts for row in rows[-n:]]


def _numbers(run: RunHistory) -> list[float]:
    return [row["iteration"] for row in run.iterations]


def _split(runs: Sequence[SeedGroup], axis: str) -> list[tuple[str, str]]:
    """(index, what) of every logged `axis/INDEX/WHAT`."""
    keys = _union((key for row in run.iterations for key in row if key.startswith(f"{axis}/")) for run in runs)
    return [(key.split("/", 2)[1], key.split("/", 2)[2]) for key in keys]


def _step_words(what: str) -> tuple[str, str]:
    kind, _, name = what.partition("/")
    return {
        "spread": (f"Spread of {name}", "standard deviation within a group"),
        "advantage": ("Advantage size", "mean |advantage|"),
        "agreement": ("Agreement of tails", "rank correlation of a group's rewards between granularities; 1: the same order"),
    }.get(kind, (what, ""))


def _marks(runs: Sequence[SeedGroup], *names: str) -> list[tuple[float, str]]:
    """The iterations at which alarms of these names were raised."""
    return [
        (one.first, f"{_label(runs, run, 'alarm')}: {one.name}, {one.said}")
        for run in runs
        for one in run.alarms()
        if one.name in names
    ]


def _chart(
    title: str,
    note: str,
    lines: Sequence[Line],
    x_label: str,
    *,
    ticks: Sequence[float] = (),
    tag: str = "",
    marks: Sequence[tuple[float, str]] = (),
) -> list[Chart]:
    """The chart, or nothing if no line has a point."""
    known = [line for line in lines if _points(line)]
    if not known:
        return []
    alt = f"{title}{f', {tag}' if tag else ''}. " + " ".join(_ends(line, x_label) for line in known)
    alt += "".join(f" Alarm at {x_label} {compact(x)}." for x, _ in marks)
    return [Chart(title, note, line_chart(known, x_label=x_label, alt=alt, x_ticks=ticks, marks=marks), tag)]


def _ends(line: Line, x_label: str) -> str:
    (x0, y0), (x1, y1) = _points(line)[0], _points(line)[-1]
    return f"{line.label or 'From'}: {compact(y0)} at {x_label} {compact(x0)}, {compact(y1)} at {compact(x1)}."


def _points(line: Line) -> list[tuple[float, float]]:
    return [(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None and math.isfinite(y)]


def _label(runs: Sequence[SeedGroup], run: SeedGroup, what: str = "") -> str:
    return " ".join(part for part in (run.name + (":" if what else "") if len(runs) > 1 else "", what) if part)


def _union(many: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(item for each in many for item in each))
