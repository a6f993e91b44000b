"""What runs did, finished or not: one run, or several that differ in their seed alone, as one line of the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo.config.resolve import differences
from g2rpo.config.schema import Config
from g2rpo.core.data import Row
from g2rpo.core.errors import UserError
from g2rpo.core.statistics import Comparison, Interval, Z, group_std, interval
from g2rpo.evaluation.heldout import least_reached
from g2rpo.monitor.alarms import DIVERSITIES
from g2rpo.run.records import Compared, Right, RunResults, Start
from g2rpo.run.run import Run

Points = tuple[list[float], list[float | None]]
"""The x and y of a curve; a missing value is None."""
SEED_KEY, PLACES = "trainer.seed", {"policy.device", "prompts.cache", "trackers"}
"""Runs of one line have different seeds, and may differ in where they ran and what they logged to."""


@dataclass(frozen=True, kw_only=True)
class RewardChange(Comparison):
    """A comparison of one reward on the held-out prompts: the base model, and the tuned one after `iteration`."""

    reward: str
    trained: bool
    iteration: int
    ends: tuple[float, float] | None = None
    """Ends of the 95 % interval of the difference, where these are known better than by the standard error."""
    seeds: int = 1

    @property
    def effect(self) -> tuple[float, float, float] | None:
        """The change and the ends of its interval in units of `spread`; None where that is not known or 0."""
        size, low, high = (value / (self.spread or math.nan) for value in (self.change, *self.interval))
        return (size, low, high) if math.isfinite(size + low + high) else None

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the difference."""
        return self.ends or (self.change - self.margin, self.change + self.margin)


@dataclass(frozen=True)
class Occurrence:
    """An alarm, from its first row to the last consecutive row of its kind; `said` is the first row's text."""

    name: str
    kind: str
    first: int
    last: int
    said: str


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

    @property
    def iteration(self) -> int:
        """The number of finished iterations."""
        return self.iterations[-1]["iteration"] if self.iterations else 0

    @property
    def finished(self) -> bool:
        return self.results is not None and self.results.iteration >= self.config.trainer.iterations

    @property
    def seconds(self) -> float:
        """Time spent on the iterations and evaluations in the log; without iterations that a resumed run repeated."""
        return sum(row["seconds"] for row in self.rows)

    def alarms(self) -> list[Occurrence]:
        """Every alarm, in the order in which they were raised."""
        found: list[Occurrence] = []
        for rows in (self.iterations, self.evaluations):
            standing: dict[str, Occurrence] = {}
            for row in rows:
                new = {
                    name: Occurrence(name, row["kind"], row["iteration"], row["iteration"], said)
                    for name, said in row.get("alarms", {}).items()
                }
                found += [one for name, one in standing.items() if name not in new]
                standing = {name: replace(standing.get(name, one), last=one.last) for name, one in new.items()}
            found += standing.values()
        return sorted(found, key=lambda one: one.first)

    def rewards(self) -> list[str]:
        """Every reward of the run: the trained ones first."""
        return [*self.config.rewards, *self.config.evaluation.rewards]

    def series(self, key: str, kind: str = "train") -> Points:
        """(iterations, values) of one logged number; a missing value is None; rows without it are left out."""
        rows = [row for row in (self.iterations if kind == "train" else self.evaluations) if key in row]
        return [row["iteration"] for row in rows], [row[key] for row in rows]

    @property
    def newest_results(self) -> RunResults | None:
        """results.json, unless an evaluation after it is logged."""
        newest = self.evaluations[-1]["iteration"] if self.evaluations else 0
        if self.results is not None and (self.results.rolled_back_from or self.results.iteration) >= newest:
            return self.results
        return None

    @property
    def judged_prompts(self) -> int | None:
        """The number of held-out prompts of `changes`, if known."""
        return None if self.newest_results is None else self.newest_results.prompts

    def changes(self) -> list[RewardChange]:
        """Base against tuned by reward: the run's result or, before there is one, its newest evaluation."""
        if (results := self.newest_results) is not None:
            return [self._change(name, results.iteration, row) for name, row in results.rewards.items()]
        if len(self.evaluations) < 2:
            return []
        first, last = self.evaluations[0], self.evaluations[-1]
        table = {name: _logged(first, last, f"reward/{name}", f"stderr/{name}") for name in self.rewards()}
        return [self._change(name, last["iteration"], row) for name, row in table.items()]

    def right(self) -> RewardChange | None:
        """The share of right held-out pictures, base against tuned; None if no reward defines it."""
        if (results := self.newest_results) is not None:
            return self._change("right", results.iteration, results.right) if results.right else None
        rows = [row for row in self.evaluations if row.get("right") is not None]
        if len(rows) < 2:
            return None
        return self._change("right", rows[-1]["iteration"], _logged(rows[0], rows[-1], "right", "right_stderr"))

    def _change(self, name: str, iteration: int, row: Compared) -> RewardChange:
        """The change of a result; that of an evaluation lacks the number of prompts."""
        count = row.count or self.judged_prompts or self.config.evaluation.num_prompts
        trained = name in self.config.rewards
        return RewardChange(
            row.base, row.tuned, row.error, count, row.spread, reward=name, trained=trained, iteration=iteration
        )


@dataclass(frozen=True)
class SeedGroup:
    """A run, or several that differ in their seed alone: numbers are means over these, and changes have an interval over seeds
    and prompts. `style` is that of its lines in charts."""

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

    @cached_property
    def iterations(self) -> list[Row]:
        """The iterations of all runs."""
        return [row for run in self.runs for row in run.iterations]

    def rewards(self) -> list[str]:
        return self.runs[0].rewards()

    def alarms(self) -> list[Occurrence]:
        return sorted(chain.from_iterable(run.alarms() for run in self.runs), key=lambda one: one.first)

    def series(self, key: str, kind: str = "train") -> Points:
        """As `RunHistory.series`, means over the runs where all logged the number."""
        return mean_of([run.series(key, kind) for run in self.runs])

    @property
    def judged_prompts(self) -> int | None:
        return self.with_results.judged_prompts

    @property
    def right_results(self) -> Right:
        """What pictures are right, by the results of a run that has some."""
        results = self.with_results.results
        nothing = Right(base=math.nan, tuned=math.nan, error=math.nan)
        return (results.right if results else None) or nothing

    @property
    def with_results(self) -> RunHistory:
        """The first run that has results, else the first one."""
        return next((run for run in self.runs if run.results is not None), self.runs[0])

    @cached_property
    def judged_after(self) -> list[int]:
        """By run the iteration of the tuned weights in `changes`: that of the results if all have them, else of the last
        evaluation that all have. Empty if there is none."""
        results = [run.newest_results.iteration for run in self.runs if run.newest_results is not None]
        if len(results) == len(self.runs):
            return results
        common = set.intersection(*({row["iteration"] for row in run.evaluations} for run in self.runs))
        return [max(common)] * len(self.runs) if len(common) > 1 else []

    def results(self, key: str) -> list[Any]:
        """An entry of every run's results, of those that have it."""
        found = [getattr(run.newest_results, key, None) for run in self.runs]
        return [each for each in found if each is not None]

    def spreads(self) -> dict[str, tuple[float, float]]:
        """How much pictures of one prompt differ, base and tuned, of all and of right ones where all runs know it: means."""
        found = {}
        for which, key in reversed(DIVERSITIES.items()):
            spreads = self.results(key)
            if len(spreads) == len(self.runs):
                base, tuned = (sum(getattr(one, side) for one in spreads) / len(spreads) for side in ("base", "tuned"))
                found[which] = base, tuned
        return found

    def changes(self) -> list[RewardChange]:
        """As `RunHistory.changes`."""
        if len(self.runs) == 1:
            return self.runs[0].changes()
        if not self.judged_after:
            return []
        base, tuned = self._sides()
        return [self._change(name, base[name], tuned[name]) for name in self.rewards()]

    def right(self) -> RewardChange | None:
        """As `RunHistory.right`; None also for several runs of which none has results, which say what is right."""
        if len(self.runs) == 1:
            return self.runs[0].right()
        least = self.right_results.least
        if not least or not self.judged_after:
            return None
        if unknown := sorted(least.keys() - {*self.rewards()}):
            raise UserError(f"{self.with_results.files.results}: right.least names {', '.join(unknown)}, no reward of the run")
        base, tuned = (least_reached(least, side) for side in self._sides())
        return self._change("right", base, tuned)

    def curve(self, reward: str) -> tuple[list[int], list[float], list[Interval]]:
        """The iterations that all were evaluated at, the reward's means, and its changes from the base."""
        x = _common([[row["iteration"] for row in run.evaluations] for run in self.runs])
        scores = [self._scores([iteration] * len(self.runs))[reward].double() for iteration in x]
        return x, [float(each.nanmean()) for each in scores], [interval(each - scores[0]) for each in scores]

    def _sides(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return self._scores([0] * len(self.runs)), self._scores(self.judged_after)

    def _scores(self, after: Sequence[int]) -> dict[str, Tensor]:
        """Scores [S, N] by reward, of S runs each after its own iteration."""
        by_run = []
        for run, iteration in zip(self.runs, after, strict=True):
            path = run.files.scores(iteration)
            if path not in self._files:
                count = next((len(one[name]) for one in self._files.values() for name in one), None)
                self._files[path] = run.files.read_scores(iteration, self.rewards(), count)
            by_run.append(self._files[path])
        return {name: torch.stack([scores[name] for scores in by_run]) for name in self.rewards()}

    @cached_property
    def _files(self) -> dict[Path, dict[str, Tensor]]:
        """Scores that have been read: every reward's curve asks for all of them."""
        return {}

    def _change(self, reward: str, base: Tensor, tuned: Tensor) -> RewardChange:
        """From the base's values [S, N] to the tuned ones; prompts that have both count."""
        both = ~(base.isnan() | tuned.isnan())
        base, tuned = base.double(), tuned.double()
        change = interval(tuned - base)
        return RewardChange(
            float(base[both].mean()),
            float(tuned[both].mean()),
            (change.high - change.low) / (2 * Z),
            int(both.any(0).sum()),
            float(group_std(base).nanmean()),
            reward=reward,
            trained=reward in self.config.rewards,
            iteration=max(self.judged_after),
            ends=(change.low, change.high),
            seeds=len(self.runs),
        )


def read_runs(directories: Sequence[Path]) -> list[RunHistory]:
    """The runs in `directories`, each once, under names that tell them apart. UserError for a directory that is no run."""
    unique: dict[Path, Path] = {}
    for directory in directories:
        unique.setdefault(directory.resolve(), directory)
    names = [resolved.name for resolved in unique]
    runs = []
    for name, path in zip(names, unique.values(), strict=True):
        shown, files = name if names.count(name) == 1 else str(path), Run(path)
        read = files.read_config(), files.read_log(), files.read_starts(), files.read_results()
        runs.append(RunHistory(shown, files, *read))
    return runs


def seed_groups(runs: Sequence[RunHistory]) -> list[SeedGroup]:
    """The runs, those together that differ in their seed alone (configs, and digests of what these name) and have kept the
    scores of their evaluations."""
    groups: list[list[RunHistory]] = []
    for run in runs:
        home = next((group for group in groups if all(_differ_in_seed(other, run) for other in group)), None)
        if home is None:
            groups.append([run])
        else:
            home.append(run)
    return [SeedGroup(tuple(group), style, len(groups) == 1) for style, group in enumerate(groups)]


def rollout_seconds(row: Row) -> float:
    """The time in which all ranks made the evaluations of a training row. Its times are those of one rank; with several, that
    rank also waits while others still roll out."""
    waiting: float = row.get("seconds/waiting", 0.0) if row.get("ranks", 1) > 1 else 0.0
    return float(row["seconds/rollout"]) + waiting


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of those that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def mean_of(series: Sequence[Points]) -> Points:
    """The mean of several (x, y) where all have a point, missing values left out."""
    at = [dict(zip(*each, strict=True)) for each in series]
    x = _common([each for each, _ in series])
    return x, [mean(each[place] for each in at) for place in x]


def _common(many: Sequence[Sequence[Any]]) -> list[Any]:
    """The items of the first that are in all."""
    first, *others = many
    return [item for item in first if all(item in other for other in others)]


def _logged(before: Row, after: Row, key: str, error: str) -> Compared:
    """Base against tuned by two rows of the log; null is NaN there."""
    base, tuned, uncertain = (
        math.nan if each is None else each for each in (before.get(key), after.get(key), after.get(error))
    )
    return Compared(base=base, tuned=tuned, error=uncertain)


def _differ_in_seed(one: RunHistory, other: RunHistory) -> bool:
    apart = differences(one.config, other.config).keys()
    contents = [run.starts[-1].contents if run.starts else None for run in (one, other)]
    return SEED_KEY in apart and apart <= {SEED_KEY, *PLACES} and contents[0] == contents[1] and _kept(one) and _kept(other)


def _kept(run: RunHistory) -> bool:
    """Whether the scores of all evaluations are there, prompt by prompt."""
    return all(run.files.scores(row["iteration"]).is_file() for row in run.evaluations)
