"""Reads the runs and evaluations of a study, and sets them beside one another."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from g2rpo.config.schema import Config
from g2rpo.core.data import Row
from g2rpo.core.errors import UserError
from g2rpo.core.statistics import Interval, interval
from g2rpo.evaluation.sweep import EvaluationDirectory
from g2rpo.evaluation.sweep import JudgedSteps as JudgedRow
from g2rpo.evaluation.untrained import Controls
from g2rpo.evaluation.work import work
from g2rpo.monitor.scores import read_rows, read_scores, scores_of
from g2rpo.run.rates import RateGain, Values, gain_at, gains
from g2rpo.run.run import Run

MADE_AGAIN = "delete this folder, and the same command makes it again"


def seconds_per_evaluation(config: Config, run_dir: Path) -> float:
    """Seconds per unit of `work`, from a probe: a short run of `config`, without its first iteration."""
    rows = [row for row in Run(run_dir).read_log() if row["kind"] == "train" and row["iteration"] > 1]
    if not rows:
        raise UserError(f"{run_dir}: its log has no second iteration; {MADE_AGAIN}")
    return sum(row["seconds"] for row in rows) / sum(work(config, row["iteration"] - 1) for row in rows)


@dataclass(frozen=True)
class History:
    """The history of a finished run: after every evaluation the scores [N] by reward, and the cost until then; all alarms."""

    iterations: list[int]
    work: list[int]
    seconds: list[float]
    """Seconds of training, without evaluations."""
    scores: list[dict[str, Values]]
    alarms: dict[str, str] = field(default_factory=dict)
    pictures: int = 0
    """Pictures drawn in training."""


def read_run(config: Config, run_dir: Path) -> History:
    """The run of `config` in `run_dir`."""
    names = [*config.rewards, *config.evaluation.rewards]
    evaluations, clock, pictures, count = 0, 0.0, 0, None
    alarms: dict[str, str] = {}
    looks: list[tuple[int, int, float, dict[str, Values]]] = []
    rows = Run(run_dir).read_log()
    if Run(run_dir).gaps(rows, config.trainer.iterations):
        raise UserError(f"{run_dir}: its log has not all iterations of the run; {MADE_AGAIN}")
    for row in rows:
        alarms |= row.get("alarms", {})
        iteration = row["iteration"]
        if row["kind"] == "train":
            evaluations += work(config, iteration - 1, row["evaluations"])
            clock += row["seconds"]
            pictures += row["images"]
        else:
            scores = read_scores(Run(run_dir).scores(iteration), names, count)
            count = len(next(iter(scores.values())))
            looks.append((iteration, evaluations, clock, {name: values.double().numpy() for name, values in scores.items()}))
    iterations = [iteration for iteration, *_ in looks]
    whole = iterations[:1] == [0] and iterations[-1:] == [config.trainer.iterations]
    if not whole or iterations != sorted({*iterations}):
        raise UserError(f"{run_dir}: its log has not the evaluations of one whole run; {MADE_AGAIN}")
    _, spent, seconds, scored = map(list, zip(*looks, strict=True))
    return History(iterations, spent, seconds, scored, alarms, pictures)


def gain_of(rate: float, pilots: Sequence[History], weights: Mapping[str, float]) -> RateGain:
    """The gain of pilots at a rate, over their seeds and prompts, in rewards of these weights."""
    found = [gains(run.scores[0], run.scores[-1], weights) for run in pilots]
    alarms = {name: said for run in pilots for name, said in run.alarms.items()}
    return gain_at(rate, found, alarms)


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


Judged = Mapping[tuple[int, str], Values]
"""Scores by (steps, reward): [N] of the base, [S, N] of a cell."""


def read_judged(folder: Path) -> Judged:
    """The scores of an evaluation of one side, with each of its pictures once."""
    path = EvaluationDirectory(folder).pictures
    rows = read_rows(path, JudgedRow, MADE_AGAIN)
    indices: dict[tuple[Any, ...], list[int]] = {}
    for row in rows:
        indices.setdefault((row["steps"], row["side"], row.get("control")), []).append(row["index"])
    if any(sorted(own) != list(range(len(own))) for own in indices.values()):
        raise UserError(f"{path}: lacks pictures, or has one twice; {MADE_AGAIN}")
    return judged_scores(rows)


def judged_scores(rows: Sequence[Row]) -> Judged:
    """Scores [N] by (steps, reward) from the rows of an evaluation of one side (`evaluation.sweep.Judging.rows`)."""
    by_index = sorted(rows, key=lambda row: row["index"])
    return {
        (steps, name): values.double().numpy()
        for steps in sorted({row["steps"] for row in rows})
        for name, values in scores_of([row for row in by_index if row["steps"] == steps]).items()
    }


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


@dataclass(frozen=True)
class Knob:
    """For one reward the best free knob of the untrained model ("best"), or the best of several pictures by the trained rewards
    ("best_of"): its change against the base, on the same noise, and what a picture costs."""

    kind: str
    reward: str
    control: str
    mean: float
    change: Interval
    evaluations: int
    readings: int


def best_knobs(found: Controls, rewards: Collection[str]) -> list[Knob]:
    """Those of an evaluation, of `rewards`."""
    ways, knobs = {way.name: way for way in found.ways}, []
    for kind, by_reward in (("best", found.best), ("best_of", found.best_of)):
        for reward, best in by_reward.items():
            if reward in rewards:
                way = ways[best.way]
                change = way.changes[reward].interval
                knobs.append(Knob(kind, reward, way.name, best.mean, change, way.evaluations, way.readings))
    return knobs
