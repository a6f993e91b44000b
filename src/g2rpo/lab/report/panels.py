"""The charts of the report and the table by granularity, with all lines in each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from g2rpo.core.data import Row
from g2rpo.lab.report.charts import compact, line_chart, thin
from g2rpo.lab.report.history import SeedGroup, mean, mean_of, rollout_seconds
from g2rpo.lab.report.verdict import figures
from g2rpo.monitor.curves import CurveLine, heldout_line


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


LOOK_PANELS = {
    "brightness": "mean luma",
    "contrast": "standard deviation of luma within a picture; blank: 0",
    "saturation": "largest minus smallest channel of a pixel",
    "clipped": "share of values that are 0 or 1",
    "detail": "luma of a pixel against its neighbours; noise is high",
    "motion": "of clips: luma of a pixel against the frame before; standing still: 0",
}


STEP_PANELS = {
    "spread": ("Spread of {}", "standard deviation within a group"),
    "advantage": ("Advantage size", "mean |advantage|"),
    "agreement": ("Agreement of tails", "rank correlation of a group's rewards between granularities; 1: the same order"),
}
"""Title and note of what `diagnostics.diagnose` logs by step."""


def reward_charts(groups: Sequence[SeedGroup]) -> list[Chart]:
    """A chart per reward: held-out evaluations with the interval of their change, and training batches behind them."""
    charts = []
    trained = {name for group in groups for name in group.config.rewards}
    for name in sorted(_union(group.rewards() for group in groups), key=lambda name: name not in trained):
        lines = []
        for group in groups:
            x, y = thin(*group.series(f"reward/{name}"))
            lines += [CurveLine(group.label("training batches"), x, y, group.style, look="faint"), _heldout(group, name)]
        tag = "trained on" if name in trained else "judged only"
        charts += _chart(name, "", lines, tag=tag, marks=_marks(groups, "hacking", "decline"))
    return charts


def _heldout(group: SeedGroup, reward: str) -> CurveLine:
    """Held-out means of a reward, with the interval of their change from the base: of one run by its standard error, of several
    over seeds and prompts."""
    label, run = group.label("held-out"), group.runs[0]
    if len(group.runs) == 1:
        prompts = run.judged_prompts or run.config.evaluation.num_prompts
        return heldout_line(label, run.evaluations, reward, prompts, group.style)
    x, means, changes = group.curve(reward)
    ends = [(mean - one.mean + one.low, mean - one.mean + one.high) for mean, one in zip(means, changes, strict=True)]
    return CurveLine(label, x, means, group.style, ends, "marked")


def look_charts(groups: Sequence[SeedGroup]) -> list[Chart]:
    """A chart for each statistic of the held-out pictures, with the base's range (5 to 95 % of its pictures) behind it."""
    charts = []
    for name, note in LOOK_PANELS.items():
        lines = []
        for group in groups:
            x, low = group.series(f"image/{name}/low", "eval")
            _, high = group.series(f"image/{name}/high", "eval")
            ends = [(math.nan if a is None else a, math.nan if b is None else b) for a, b in zip(low, high, strict=True)]
            lines.append(CurveLine(group.label("base"), x, [(a + b) / 2 for a, b in ends], group.style, ends, "range"))
            lines.append(CurveLine(group.label("mean"), *group.series(f"image/{name}", "eval"), group.style, look="marked"))
        charts += _chart(name.capitalize(), note, lines, marks=_marks(groups, "pictures"))
    return charts


def step_charts(groups: Sequence[SeedGroup]) -> list[Chart]:
    """Charts of `diagnostics.diagnose` by branch step: means of the first and last fifth, and agreement over time."""
    logged = _logged_by(groups, "step")
    charts = []
    for what, steps in logged.items():
        lines = []
        for group in groups:
            early, late = ([mean(row.get(f"step/{step}/{what}") for row in rows) for step in steps] for rows in fifths(group))
            lines.append(CurveLine(group.label("first fifth"), steps, early, group.style, look="faint"))
            lines.append(CurveLine(group.label("last fifth"), steps, late, group.style, look="marked"))
        kind, _, name = what.partition("/")
        title, note = STEP_PANELS.get(kind, (what, ""))
        charts += _chart(title.format(name), note, lines, "branch step", ticks=steps)
    keys = [f"step/{step}/agreement" for step in logged.get("agreement", ())]
    agreement = _over_time(groups, lambda row: mean(row.get(key) for key in keys))
    return charts + _chart("Agreement over time", "the same, mean over branch steps", agreement)


def health(groups: Sequence[SeedGroup]) -> tuple[list[Chart], list[str]]:
    """A chart for every number of the update that varies, and text for constant ones."""
    charts, constants = [], []
    for key, title, note in HEALTH:
        series = [group.series(key) for group in groups]
        seen = list(dict.fromkeys(value for _, y in series for value in y))
        if len(seen) == 1:
            constants.append(f"{title} {compact(seen[0])}")
        else:
            lines = [CurveLine(group.label(), *thin(*each), group.style) for group, each in zip(groups, series, strict=True)]
            charts += _chart(title, note, lines, marks=_marks(groups, ALARMED.get(key, "")))
    return charts, constants


def cost_charts(groups: Sequence[SeedGroup]) -> list[Chart]:
    """Speed during the run."""
    rates = _over_time(groups, lambda row: row["evaluations"] / rollout_seconds(row))
    lengths = _over_time(groups, lambda row: row["seconds"])
    return [
        *_chart("Evaluations a second", "network evaluations of the rollout by its time", rates),
        *_chart("Seconds an iteration", "all phases, without held-out evaluations", lengths),
    ]


def granularity_table(groups: Sequence[SeedGroup]) -> dict[str, Any]:
    """The same by granularity: heads, and rows of (line, granularity, "first fifth → last fifth" by head)."""
    kinds = list(_logged_by(groups, "granularity"))
    rows = []
    for group in groups:
        sides = fifths(group)
        for granularity in sorted({each for seen in _logged_by([group], "granularity").values() for each in seen}):
            means = [[mean(row.get(f"granularity/{granularity}/{what}") for row in rows) for rows in sides] for what in kinds]
            cells = [f"{figures(early)} → {figures(late)}" if (early, late) != (None, None) else "–" for early, late in means]
            rows.append((group, granularity, cells))
    heads = ["agreement with the finest" if what == "agreement" else what.replace("/", " of ") for what in kinds]
    return {"heads": heads, "rows": rows}


def fifths(group: SeedGroup) -> tuple[list[Row], list[Row]]:
    """The first and the last fifth of each run's iterations, at least one each."""
    counts = [(run.iterations, max(1, len(run.iterations) // 5)) for run in group.runs]
    return [row for rows, n in counts for row in rows[:n]], [row for rows, n in counts for row in rows[-n:]]


def _over_time(groups: Sequence[SeedGroup], value: Callable[[Row], float | None]) -> list[CurveLine]:
    """A value of the iterations, the mean over the runs of a line."""

    def line(group: SeedGroup) -> CurveLine:
        series = [([row["iteration"] for row in run.iterations], [value(row) for row in run.iterations]) for run in group.runs]
        return CurveLine(group.label(), *thin(*mean_of(series)), group.style)

    return [line(group) for group in groups]


def _logged_by(groups: Sequence[SeedGroup], axis: str) -> dict[str, list[int]]:
    """By WHAT of every logged `axis/INDEX/WHAT` its indices."""
    found: dict[str, set[int]] = {}
    for key in _union(row for group in groups for row in group.iterations):
        if key.startswith(f"{axis}/"):
            _, index, what = key.split("/", 2)
            found.setdefault(what, set()).add(int(index))
    return {what: sorted(indices) for what, indices in found.items()}


def _marks(groups: Sequence[SeedGroup], *names: str) -> list[tuple[float, str]]:
    """The iterations at which alarms of these names were raised."""
    raised = [(group, one) for group in groups for one in group.alarms() if one.name in names]
    return [(one.first, f"{group.label('alarm')}: {one.name}, {one.said}") for group, one in raised]


def _chart(
    title: str,
    note: str,
    lines: Sequence[CurveLine],
    x_label: str = "iteration",
    *,
    ticks: Sequence[float] = (),
    tag: str = "",
    marks: Sequence[tuple[float, str]] = (),
) -> list[Chart]:
    """The chart, or nothing if no line has a point."""
    points = [[(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None and math.isfinite(y)] for line in lines]
    known = [(line, each[0], each[-1]) for line, each in zip(lines, points, strict=True) if each]
    if not known:
        return []
    said = [f"{title}, {tag}." if tag else f"{title}."]
    for line, (x0, y0), (x1, y1) in known:
        said.append(f"{line.label or 'From'}: {compact(y0)} at {x_label} {compact(x0)}, {compact(y1)} at {compact(x1)}.")
    said += [f"Alarm at {x_label} {compact(x)}." for x, _ in marks]
    svg = line_chart([line for line, *_ in known], x_label=x_label, alt=" ".join(said), x_ticks=ticks, marks=marks)
    return [Chart(title, note, svg, tag)]


def _union(many: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(item for each in many for item in each))
