"""What runs did, finished or not: one run, or several that differ in their seed alone, as one line
of the report."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo.config.resolve import differences
from g2rpo.config.schema import Config
from g2rpo.core.data import Row
from g2rpo.core.statistics import Interval, group_std, interval
from g2rpo.train.evaluation.untrained import RIGHT
from g2rpo.train.monitor.alarms import DIVERSITIES, Occurrence, occurrences
from g2rpo.train.monitor.curves import CurveLine, heldout_line
from g2rpo.train.monitor.scores import read_rows, right_of
from g2rpo.train.run.folder import Run
from g2rpo.train.run.records import RunResults, Start

Points = tuple[list[float], list[float]]
"""The x and y of a curve; a missing value is NaN."""
SEED_KEY, PLACES = "trainer.seed", {"policy.device", "prompts.cache", "trackers"}
"""Runs of one line have different seeds, and may differ in where they ran and what they logged
to."""


@dataclass(frozen=True)
class Change:
    """One score on the held-out prompts, or the share of right pictures (`RIGHT`): means of the
    base and of the tuned model, and the 95 % interval of the difference."""

    name: str
    trained: bool
    base: float
    tuned: float
    change: Interval
    spread: float
    """Standard deviation of the base's values over prompts."""
    prompts: int
    """Those that both have a value for."""
    seeds: int = 1

    @property
    def effect(self) -> Interval:
        """The change in units of `spread`; NaN where that is not known or 0."""
        size, low, high = (
            value / (self.spread or math.nan)
            for value in (self.change.mean, self.change.low, self.change.high)
        )
        return Interval(size, low, high, self.change.count)


@dataclass(frozen=True)
class RunHistory:
    """A run directory, read. `results` is results.json, None until the run has finished once."""

    name: str
    files: Run
    config: Config
    rows: list[Row]
    starts: list[Start]
    results: RunResults | None

    @cached_property
    def iterations(self) -> list[Row]:
        return [row for row in self.rows if row["kind"] == "train"]

    @cached_property
    def evaluations(self) -> list[Row]:
        return [row for row in self.rows if row["kind"] == "eval"]

    @cached_property
    def kept(self) -> list[int]:
        """The iterations after which it was evaluated, and of which the scores of all prompts are
        kept."""
        evaluated = [row["iteration"] for row in self.evaluations]
        return [iteration for iteration in evaluated if self.files.scores(iteration).is_file()]

    @property
    def iteration(self) -> int:
        """The number of finished iterations; some have no row but the evaluation after them."""
        return self.rows[-1]["iteration"] if self.rows else 0

    @property
    def finished(self) -> bool:
        return self.results is not None and self.results.iteration >= self.config.trainer.iterations

    @property
    def seconds(self) -> float:
        """Time spent on the iterations and evaluations in the log; without iterations that a
        resumed run repeated."""
        return sum(row["seconds"] for row in self.rows)

    @cached_property
    def heldout(self) -> int:
        """The number of held-out prompts: of those asked for, if the base's scores are not kept."""
        return (
            len(read_rows(self.files.scores(0)))
            if 0 in self.kept
            else self.config.evaluation.num_prompts
        )

    def scores(self, iteration: int) -> dict[str, Tensor]:
        """Held-out scores [N] after an iteration by reward, and verdicts where rewards define right
        pictures."""
        scores = self.files.read_scores(iteration, self.rewards(), self.heldout)
        right = right_of(read_rows(self.files.scores(iteration)))
        return scores if right is None else {**scores, RIGHT: right}

    def rewards(self) -> list[str]:
        """Every reward: the trained ones first."""
        return [*self.config.rewards, *self.config.evaluation.rewards]

    def refitted(self) -> list[str]:
        """The trained rewards whose head is fitted again and again during the run."""
        return [
            name
            for name, entry in self.config.rewards.items()
            if entry.kind == "pairs" and not entry.options.get("path")
        ]

    def alarms(self) -> list[Occurrence]:
        """Every alarm, in the order in which they were raised."""
        return occurrences(self.rows)

    @property
    def newest_results(self) -> RunResults | None:
        """results.json, unless an evaluation after it is logged."""
        newest = self.evaluations[-1]["iteration"] if self.evaluations else 0
        return self.results if self.results and self.results.iteration >= newest else None


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ in their seed alone, or one run: a line of the report, the mean over the
    runs."""

    runs: tuple[RunHistory, ...]
    style: int = 0
    alone: bool = True
    """Whether it is the only one of the page, so that its lines need no name."""

    @property
    def name(self) -> str:
        return " · ".join(run.name for run in self.runs)

    def label(self, what: str = "") -> str:
        """The name of one of its lines."""
        return what if self.alone else f"{self.name}: {what}" if what else self.name

    @property
    def config(self) -> Config:
        return self.runs[0].config

    def alarms(self) -> list[Occurrence]:
        return sorted((one for run in self.runs for one in run.alarms()), key=lambda one: one.first)

    def series(self, key: str, kind: str = "train") -> Points:
        """(iterations, values) of a logged number, by the rows that have it: means over the runs
        where all have a row."""
        at = [
            {row["iteration"]: row[key] for row in run.rows if row["kind"] == kind and key in row}
            for run in self.runs
        ]
        x = [iteration for iteration in at[0] if all(iteration in own for own in at)]
        return x, [mean(own[iteration] for own in at) for iteration in x]

    @cached_property
    def judged_after(self) -> list[int]:
        """By run the iteration of the tuned weights in `changes`: that of the results if all have
        them, else of the last evaluation that all have. Empty if there is none, or its scores or
        the base's are not kept."""
        kept = [{*run.kept} for run in self.runs]
        after = [
            run.newest_results.iteration for run in self.runs if run.newest_results is not None
        ]
        if len(after) < len(self.runs):
            last = max(set.intersection(*kept), default=0)
            after = [last] * len(self.runs) if last else []
        return (
            after if all({0, own} <= known for own, known in zip(after, kept, strict=False)) else []
        )

    @cached_property
    def changes(self) -> dict[str, Change]:
        """Base against tuned, by reward and, where pictures can be right, by `RIGHT`."""
        if not self.judged_after:
            return {}
        base, tuned = self._scores([0] * len(self.runs)), self._scores(self.judged_after)
        return {
            name: _change(name, name in self.config.trained, base[name], tuned[name])
            for name in base
            if name in tuned
        }

    def curve(self, reward: str) -> CurveLine:
        """Held-out means of a reward, with the interval of their change from the base: of one run
        by the log, of several over seeds and prompts."""
        label, run = self.label("held-out"), self.runs[0]
        if len(self.runs) == 1:
            return heldout_line(label, run.evaluations, reward, run.heldout, self.style)
        scores = [table[reward].double() for table in self._evaluated.values()]
        means = [float(each.nanmean()) for each in scores]
        changes = [interval(each - scores[0]) for each in scores]
        ends = [
            (y - one.mean + one.low, y - one.mean + one.high)
            for y, one in zip(means, changes, strict=True)
        ]
        return CurveLine(label, [*self._evaluated], means, self.style, ends, "marked")

    def results(self, key: str) -> list[Any]:
        """An entry of every run's results, of those that have it."""
        found = [getattr(run.newest_results, key, None) for run in self.runs]
        return [each for each in found if each is not None]

    def spreads(self) -> dict[str, tuple[float, float]]:
        """How much pictures of one prompt differ, base and tuned, of all and of right ones where
        all runs know it: means."""
        found = {}
        for which, key in reversed(DIVERSITIES.items()):
            spreads = self.results(key)
            if len(spreads) == len(self.runs):
                found[which] = mean(one.base for one in spreads), mean(one.tuned for one in spreads)
        return found

    @cached_property
    def _evaluated(self) -> dict[int, dict[str, Tensor]]:
        """Scores [S, N] by reward after each evaluation that all runs have kept: every reward's
        curve asks for them."""
        common = [
            iteration
            for iteration in self.runs[0].kept
            if all(iteration in run.kept for run in self.runs)
        ]
        return {iteration: self._scores([iteration] * len(self.runs)) for iteration in common}

    def _scores(self, after: Sequence[int]) -> dict[str, Tensor]:
        """Scores [S, N] by reward, and verdicts where there are some, of S runs each after its own
        iteration."""
        tables = [run.scores(iteration) for run, iteration in zip(self.runs, after, strict=True)]
        shared = set.intersection(*({*table} for table in tables))
        return {
            name: torch.stack([table[name] for table in tables])
            for name in tables[0]
            if name in shared
        }


def read_runs(directories: Sequence[Path]) -> list[RunHistory]:
    """The runs in `directories`, each once, under names that tell them apart. UserError for a
    directory that is no run."""
    unique: dict[Path, Path] = {}
    for directory in directories:
        unique.setdefault(directory.resolve(), directory)
    runs = []
    for resolved, path in unique.items():
        files = Run(path)
        read = files.read_config(), files.read_log(), files.read_starts(), files.read_results()
        runs.append(RunHistory(_shortest(resolved, unique), files, *read))
    return runs


def _shortest(path: Path, among: Collection[Path]) -> str:
    """The last parts of a path that no other one ends with."""
    count = 1
    while sum(other.parts[-count:] == path.parts[-count:] for other in among) > 1:
        count += 1
    return "/".join(path.parts[-count:])


def seed_groups(runs: Sequence[RunHistory]) -> list[SeedGroup]:
    """The runs, those together that differ in their seed alone (configs, and digests of what these
    name) and have kept the scores of their evaluations."""
    groups: list[list[RunHistory]] = []
    for run in runs:
        home = next(
            (group for group in groups if all(_differ_in_seed(other, run) for other in group)), None
        )
        if home is None:
            groups.append([run])
        else:
            home.append(run)
    return [SeedGroup(tuple(group), style, len(groups) == 1) for style, group in enumerate(groups)]


def mean(values: Iterable[float | None]) -> float:
    """The mean of those that are known; NaN if none is."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _change(name: str, trained: bool, base: Tensor, tuned: Tensor) -> Change:
    """From the base's values [S, N] to the tuned ones; prompts that have both count."""
    base, tuned = base.double(), tuned.double()
    both = ~(base.isnan() | tuned.isnan())
    spread = float(group_std(base.where(both, torch.nan)).nanmean())
    means = float(base[both].mean()), float(tuned[both].mean())
    change = interval(tuned - base)
    if name == RIGHT:  # a share
        change = change.within(0.0 - means[0], 1 - means[0])
    return Change(name, trained, *means, change, spread, int(both.any(0).sum()), len(base))


def _differ_in_seed(one: RunHistory, other: RunHistory) -> bool:
    apart = differences(one.config, other.config).keys()
    contents = [run.starts[-1].contents if run.starts else None for run in (one, other)]
    kept = all(len(run.kept) == len(run.evaluations) for run in (one, other))
    return (
        kept and SEED_KEY in apart and apart <= {SEED_KEY, *PLACES} and contents[0] == contents[1]
    )
