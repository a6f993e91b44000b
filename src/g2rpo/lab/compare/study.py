"""A study: algorithms (or variants of one) compared under one budget, each with its own best learning rate.

A *cell* is one variant: a name and overrides of the recipe. It is trained once per seed. Its learning rate is chosen
beforehand, from the same rates for every cell, on *pilots*: runs with their own seeds, evaluated on training prompts. So the
choice uses no held-out prompt and no seed of the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt

from g2rpo.config.schema import Config, Section, Steps
from g2rpo.core.errors import UserError
from g2rpo.core.files import whole_file
from g2rpo.core.statistics import Interval, interval
from g2rpo.evaluation.controls import Best, Controls
from g2rpo.evaluation.gains import RateGain, Scores, gain_at, gains, good_rates
from g2rpo.evaluation.work import work
from g2rpo.monitor.curves import COLOURS, curve_with_band
from g2rpo.monitor.metrics import gaps, read_metrics
from g2rpo.monitor.scores import read_scores, scores_of
from g2rpo.runs.directory import RunDirectory

AGAIN = "delete this folder, and the same command makes it again"

Unit = Literal["iterations", "evaluations", "seconds"]


class Study(Section):
    """The settings of a study."""

    recipe: str
    overrides: list[str]
    """Overrides of the recipe in every cell."""
    cells: Annotated[dict[str, list[str]], Field(min_length=1)]
    budget: PositiveFloat
    unit: Unit
    """Unit of the budget of one run."""
    budgets: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Budgets of cells with their own."""
    rates: Annotated[list[PositiveFloat], Field(min_length=1)]
    seeds: PositiveInt
    """Training seeds of every cell."""
    pilots: PositiveInt
    """Pilot runs of each cell at each rate; none are needed for one rate."""
    steps: Annotated[list[Steps], Field(min_length=1)]
    """Step counts at which trained models are evaluated."""

    def overrides_of(self, cell: str) -> list[str]:
        return [*self.overrides, *self.cells[cell]]

    def budget_of(self, cell: str) -> float:
        return self.budgets.get(cell, self.budget)


def seconds_per_evaluation(config: Config, run_dir: Path) -> float:
    """Seconds per unit of `work`, from a probe: a short run of `config`, without its first iteration."""
    rows = [row for row in read_metrics(run_dir) if row["kind"] == "train" and row["iteration"] > 1]
    if not rows:
        raise UserError(f"{run_dir}: its log has no second iteration; {AGAIN}")
    return sum(row["seconds"] for row in rows) / sum(work(config, row["iteration"] - 1) for row in rows)


@dataclass(frozen=True)
class History:
    """The history of a finished run: after every evaluation the scores [N] by reward, and the cost until then; all alarms."""

    iterations: list[int]
    work: list[int]
    seconds: list[float]
    """Seconds of training, without evaluations."""
    scores: list[dict[str, Scores]]
    alarms: dict[str, str] = field(default_factory=dict)


def read_run(config: Config, run_dir: Path) -> History:
    """The run of `config` in `run_dir`."""
    iterations, spent, seconds, scores = [], [], [], list[dict[str, Scores]]()
    names = [*config.rewards, *config.evaluation.rewards]
    evaluations = 0
    clock = 0.0
    alarms: dict[str, str] = {}
    rows = read_metrics(run_dir)
    if gaps(run_dir, rows, config.trainer.iterations):
        raise UserError(f"{run_dir}: its log has not all iterations of the run; {AGAIN}")
    for row in rows:
        alarms |= row.get("alarms", {})
        if row["kind"] == "train":
            evaluations += work(config, row["iteration"] - 1, row["evaluations"])
            clock += row["seconds"]
        else:
            path = RunDirectory(run_dir).scores(row["iteration"])
            iterations.append(row["iteration"])
            spent.append(evaluations)
            seconds.append(clock)
            count = len(next(iter(scores[0].values()))) if scores else None
            scores.append({name: values.double().numpy() for name, values in read_scores(path, names, count).items()})
    whole = iterations[:1] == [0] and iterations[-1:] == [config.trainer.iterations]
    if not whole or iterations != sorted({*iterations}):
        raise UserError(f"{run_dir}: its log has not the evaluations of one whole run; {AGAIN}")
    return History(iterations, spent, seconds, scores, alarms)


def gain_of(rate: float, pilots: Sequence[History], weights: Mapping[str, float]) -> RateGain:
    """The gain of pilots at a rate, over their seeds and prompts, in rewards of these weights."""
    found = [gains(run.scores[0], run.scores[-1], weights) for run in pilots]
    alarms = {name: said for run in pilots for name, said in run.alarms.items()}
    return gain_at(rate, found, alarms)


def smallest_good_rate(tried: Sequence[RateGain]) -> float:
    """The smallest of the `good_rates`: no algorithm's own rate is preferred. If every rate has an alarm, the smallest whose
    gain is within a standard error of the best; UserError if no pilot has scores."""
    unsound = [replace(one, alarms={}) for one in tried]
    rates = good_rates(tried) or good_rates(unsound)
    if not rates:
        raise UserError("no pilot has scores of all rewards, so no learning rate can be chosen; their logs say why")
    return rates[0]


@dataclass(frozen=True)
class Point:
    """A cell after an evaluation: its cost, averaged over seeds, and the change of a reward against the base."""

    iteration: int
    work: float
    seconds: float
    change: Interval


def curve(runs: Sequence[History], reward: str) -> list[Point]:
    """The change of a reward during training, over the runs of all seeds and their common held-out prompts."""
    points = []
    for place, iteration in enumerate(runs[0].iterations):
        change = np.stack([run.scores[place][reward] - run.scores[0][reward] for run in runs])
        spent, seconds = (float(np.mean([getattr(run, of)[place] for run in runs])) for of in ("work", "seconds"))
        points.append(Point(iteration, spent, seconds, interval(change)))
    return points


@dataclass(frozen=True)
class Outcome:
    """The result of a cell for one reward at one step count, over all seeds and prompts, with the same noise for all cells."""

    cell: str
    steps: int
    reward: str
    tuned: Interval
    change: Interval
    """Change against the base."""
    lead: Interval
    """Lead over the first cell, paired by seed and prompt."""


@dataclass(frozen=True)
class Knob:
    """For one reward the best free knob of the untrained model ("best"), or the best of several pictures by the trained rewards
    ("best_of"): its change against the base, on the same noise, and what a picture costs."""

    kind: Literal["best", "best_of"]
    reward: str
    control: str
    mean: float
    change: Interval
    evaluations: int
    readings: int


def best_knobs(found: Controls, rewards: Collection[str]) -> list[Knob]:
    """Those of an evaluation, of `rewards`."""
    ways, knobs = {way.name: way for way in found.ways}, []
    kinds: dict[Literal["best", "best_of"], dict[str, Best]] = {"best": found.best, "best_of": found.best_of}
    for kind, by_reward in kinds.items():
        for reward, best in by_reward.items():
            if reward in rewards:
                way = ways[best.way]
                change = way.changes[reward].interval
                knobs.append(Knob(kind, reward, way.name, best.mean, change, way.evaluations, way.readings))
    return knobs


Judged = Mapping[tuple[int, str], Scores]
"""Scores by (steps, reward): [N] of the base, [S, N] of a cell."""


def lines(base: Judged, cells: Mapping[str, Judged]) -> list[Outcome]:
    """The table of a study, by step count, reward and cell; leads are over the first cell."""
    first = next(iter(cells.values()))
    return [
        Outcome(
            name,
            *key,
            tuned=interval(judged[key]),
            change=interval(judged[key] - base[key]),
            lead=interval(judged[key] - first[key]),
        )
        for key in base
        for name, judged in cells.items()
    ]


def judged_scores(rows: Sequence[dict[str, Any]]) -> dict[tuple[int, str], Scores]:
    """Scores [N] by (steps, reward) from the rows of an evaluation of one side (`evaluation.sweep.Judging.rows`)."""
    by_index = sorted(rows, key=lambda row: row["index"])
    return {
        (steps, name): values.double().numpy()
        for steps in sorted({row["steps"] for row in rows})
        for name, values in scores_of([row for row in by_index if row["steps"] == steps]).items()
    }


def save_curves(path: Path, curves: Mapping[str, Mapping[str, Sequence[Point]]], trained: Sequence[str]) -> None:
    """Draws curves[reward][cell]: a row of panels per reward, against iterations, network evaluations and seconds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    axes_of: dict[str, Callable[[Point], float]] = {
        "iterations": lambda point: point.iteration,
        "network evaluations, training included": lambda point: point.work,
        "seconds of training": lambda point: point.seconds,
    }
    figure = Figure(figsize=(12.6, 2.8 * len(curves)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(curves), 3, squeeze=False, sharey="row")
    for row, (reward, cells) in zip(axes, curves.items(), strict=True):
        for axis, (label, spent) in zip(row, axes_of.items(), strict=True):
            for number, (cell, points) in enumerate(cells.items()):
                mean, low, high = ([getattr(point.change, name) for point in points] for name in ("mean", "low", "high"))
                x, style = [spent(point) for point in points], "-" if number < len(COLOURS) else "--"
                curve_with_band(axis, x, mean, low, high, COLOURS[number % len(COLOURS)], label=cell, linestyle=style)
            axis.axhline(0, color="#888", linewidth=0.8)
            axis.set_xlabel(label, fontsize=9)
        row[0].set_ylabel("change", fontsize=9)
        row[0].set_title(f"{reward} ({'trained on' if reward in trained else 'judged only'})", fontsize=10, loc="left")
    axes[0][0].legend(fontsize=8)
    with whole_file(path) as unfinished:
        figure.savefig(unfinished, dpi=120)
