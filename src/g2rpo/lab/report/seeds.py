"""Runs of one config with several seeds, as one line of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from g2rpo.core.statistics import Interval, Z, group_std, interval
from g2rpo.evaluation.heldout import least_reached
from g2rpo.evaluation.untrained import Controls
from g2rpo.lab.report.history import Change, Occurrence, Points, RunHistory
from g2rpo.monitor.scores import read_scores

SEED, PLACES = "trainer.seed", {"policy.device", "prompts.cache", "trackers"}
"""Runs of one line have different seeds, and may differ in where they ran and what they logged to."""


@dataclass(frozen=True)
class SeedGroup:
    """A run, or several that differ in their seed alone: numbers are means over these, and changes have an interval over seeds
    and prompts."""

    runs: tuple[RunHistory, ...]

    @property
    def name(self) -> str:
        return " · ".join(run.name for run in self.runs)

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
    def right_in_words(self) -> str:
        return self._with_results.right_in_words

    @property
    def judged_prompts(self) -> int | None:
        return self._with_results.judged_prompts

    @property
    def _with_results(self) -> RunHistory:
        """A run whose results say what is right, if there is one."""
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

    def controls(self) -> list[Controls]:
        """Of every run that sampled any."""
        return [found for run in self.runs for found in run.controls()]

    def spreads(self, key: str) -> list[tuple[float, float]]:
        """As `RunHistory.spreads`, of every run; an empty list unless all know it."""
        found = [spread for run in self.runs for spread in run.spreads(key)]
        return found if len(found) == len(self.runs) else []

    def changes(self) -> list[Change]:
        """As `RunHistory.changes`."""
        if len(self.runs) == 1:
            return self.runs[0].changes()
        if not self.judged_after:
            return []
        base, tuned = self._sides()
        return [self._change(name, base[name], tuned[name]) for name in self.rewards()]

    def right(self) -> Change | None:
        """As `RunHistory.right`; None also for several runs of which none has results, which say what is right."""
        if len(self.runs) == 1:
            return self.runs[0].right()
        right = self._with_results.right_results
        least = {} if right is None else right.least
        if not least or not self.judged_after:
            return None
        if unknown := sorted(least.keys() - {*self.rewards()}):
            raise UserError(f"{self._with_results.files.results}: right.least names {', '.join(unknown)}, no reward of the run")
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
        paths = [run.files.scores(iteration) for run, iteration in zip(self.runs, after, strict=True)]
        for path in paths:
            if path not in self._files:
                count = next((len(one[name]) for one in self._files.values() for name in one), None)
                self._files[path] = read_scores(path, self.rewards(), count)
        by_run = [self._files[path] for path in paths]
        return {name: torch.stack([scores[name] for scores in by_run]) for name in self.rewards()}

    @cached_property
    def _files(self) -> dict[Path, dict[str, Tensor]]:
        """Scores that have been read: every reward's curve asks for all of them."""
        return {}

    def _change(self, reward: str, base: Tensor, tuned: Tensor) -> Change:
        """From the base's values [S, N] to the tuned ones; prompts that have both count."""
        both = ~(base.isnan() | tuned.isnan())
        base, tuned = base.double(), tuned.double()
        change = interval(tuned - base)
        return Change(
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
    return [SeedGroup(tuple(group)) for group in groups]


def mean_of(series: Sequence[Points]) -> Points:
    """The mean of several (x, y) where all have a point, missing values left out."""
    if len(series) == 1:
        return series[0]
    at = [dict(zip(*each, strict=True)) for each in series]
    x = _common([each for each, _ in series])
    known = [[y for each in at if (y := each[place]) is not None] for place in x]
    return x, [sum(values) / len(values) if values else None for values in known]


def _common(many: Sequence[Sequence[Any]]) -> list[Any]:
    """The items of the first that are in all."""
    first, *others = many
    return [item for item in first if all(item in other for other in others)]


def _differ_in_seed(one: RunHistory, other: RunHistory) -> bool:
    apart = differences(one.config, other.config).keys()
    contents = [run.starts[-1].contents if run.starts else None for run in (one, other)]
    return SEED in apart and apart <= {SEED, *PLACES} and contents[0] == contents[1] and _kept(one) and _kept(other)


def _kept(run: RunHistory) -> bool:
    """Whether the scores of all evaluations are there, prompt by prompt."""
    return all(run.files.scores(row["iteration"]).is_file() for row in run.evaluations)
