"""Reads a run directory, of a finished or unfinished run, for the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from g2rpo.config.schema import Config
from g2rpo.core.data import Row
from g2rpo.core.statistics import Comparison
from g2rpo.evaluation.untrained import Controls
from g2rpo.run.records import Compared, Right, RunResults, Start
from g2rpo.run.run import Run

Points = tuple[list[float], list[float | None]]
"""The x and y of a curve; a missing value is None."""


@dataclass(frozen=True, kw_only=True)
class Change(Comparison):
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
        values = [value / self.spread for value in (self.change, *self.interval)] if self.spread else []
        return (values[0], values[1], values[2]) if values and all(map(math.isfinite, values)) else None

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

    @property
    def rolled_back(self) -> bool:
        """Whether results.json describes the best evaluation, after a rollback by an alarm."""
        return self.results is not None and self.results.rolled_back_from is not None

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

    @property
    def right_in_words(self) -> str:
        """What right pictures do, with {} for their share; runs without results do not say it."""
        return Right.model_fields["in_words"].default if self.right_results is None else self.right_results.in_words

    @property
    def right_results(self) -> Right | None:
        return None if self.results is None else self.results.right

    def controls(self) -> list[Controls]:
        """The controls of the base model against the tuned one, in a list; an empty one if none were sampled."""
        found = None if self.newest_results is None else self.newest_results.controls
        return [] if found is None else [found]

    def spreads(self, key: str) -> list[tuple[float, float]]:
        """How much pictures of one prompt differ, base and tuned, by a key of `DIVERSITIES`, in a list; an empty one if it
        is not known."""
        found = None if self.newest_results is None else getattr(self.newest_results, key)
        return [] if found is None else [(found.base, found.tuned)]

    def changes(self) -> list[Change]:
        """Base against tuned by reward: the run's result or, before there is one, its newest evaluation."""
        if (results := self.newest_results) is not None:
            table, iteration = results.rewards, results.iteration
        elif len(self.evaluations) > 1:
            first, last = self.evaluations[0], self.evaluations[-1]
            table, iteration = _paired(first, last, self.rewards()), last["iteration"]
        else:
            return []
        return [
            Change(
                *self._compared(row),
                spread=row.spread,
                reward=name,
                trained=name in self.config.rewards,
                iteration=iteration,
            )
            for name, row in table.items()
        ]

    def right(self) -> Change | None:
        """The share of right held-out pictures, base against tuned; None if no reward defines it."""
        if (results := self.newest_results) is not None:
            found: Compared | None = results.right
            iteration = results.iteration
        else:
            rows = [row for row in self.evaluations if row.get("right") is not None]
            found, iteration = None, rows[-1]["iteration"] if rows else 0
            if len(rows) > 1:
                error = rows[-1].get("right_stderr")
                found = Compared(base=rows[0]["right"], tuned=rows[-1]["right"], error=math.nan if error is None else error)
        return Change(*self._compared(found), reward="right", trained=False, iteration=iteration) if found else None

    def _compared(self, row: Compared) -> tuple[float, float, float, int]:
        """Base, tuned, standard error and number of prompts of a result; that of an evaluation lacks the number."""
        count = row.count or self.judged_prompts or self.config.evaluation.num_prompts
        return row.base, row.tuned, row.error, count


def read_runs(directories: Sequence[Path]) -> list[RunHistory]:
    """The runs in `directories`, each once, under names that tell them apart. UserError for a directory that is no run."""
    unique = [d for i, d in enumerate(directories) if d.resolve() not in [other.resolve() for other in directories[:i]]]
    names = [directory.resolve().name for directory in unique]
    told_apart = [name if names.count(name) == 1 else str(path) for name, path in zip(names, unique, strict=True)]
    return [
        RunHistory(name, files, files.read_config(), files.read_log(), files.read_starts(), files.read_results())
        for name, files in zip(told_apart, map(Run, unique), strict=True)
    ]


def rollout_seconds(row: Row) -> float:
    """The time in which all ranks made the evaluations of a training row. Its times are those of one rank; with several, that
    rank also waits while others still roll out."""
    waiting: float = row.get("seconds/waiting", 0.0) if row.get("ranks", 1) > 1 else 0.0
    return float(row["seconds/rollout"]) + waiting


def _paired(base: Row, tuned: Row, names: Sequence[str]) -> dict[str, Compared]:
    nan = float("nan")

    def value(row: Row, key: str) -> float:
        return nan if row.get(key) is None else row[key]

    return {
        name: Compared(
            base=value(base, f"reward/{name}"),
            tuned=value(tuned, f"reward/{name}"),
            error=value(tuned, f"stderr/{name}"),
        )
        for name in names
    }
