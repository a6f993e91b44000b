"""What runs did, finished or not, and the sentences about it: one run, or several that differ in
their seed alone, as one line of the report."""

from __future__ import annotations

import math
import shlex
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
from g2rpo.core.errors import counted
from g2rpo.core.files import real
from g2rpo.core.statistics import (
    RIGHT,
    Comparison,
    decimals_of,
    fixed,
    paired,
    percent,
    rise,
    signed,
)
from g2rpo.models.options import PolicyConfig
from g2rpo.train.evaluation.heldout import read_rows, values_of
from g2rpo.train.monitor.alarms import DIVERSITIES, HELPS, Occurrence, occurrences
from g2rpo.train.monitor.curves import CurveLine, heldout_line
from g2rpo.train.run.folder import Run
from g2rpo.train.run.records import RunResults, Start

Points = tuple[list[float], list[float]]
"""The x and y of a curve; a missing value is NaN."""
SEED_KEY, PLACES = "trainer.seed", {"policy.device", "prompts.cache", "trackers"}
"""Runs of one line have different seeds, and may differ in where they ran and what they logged
to."""
AS_VARIED = 0.8
"""Pictures that differ by less than this share of what the base's do are a loss of diversity."""


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
        evaluated = (row["iteration"] for row in self.evaluations)
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
        if 0 in self.kept:
            return len(read_rows(self.files.scores(0)))
        return self.config.evaluation.num_prompts

    def scores(self, iteration: int) -> dict[str, Tensor]:
        """Held-out scores [N] after an iteration by reward, and verdicts where rewards define right
        pictures."""
        # refuses another table
        self.files.read_scores(iteration, self.config.all_rewards, self.heldout)
        return values_of(read_rows(self.files.scores(iteration)))

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
    def kept(self) -> list[int]:
        """The iterations of which all runs have kept the scores."""
        return sorted(set.intersection(*({*run.kept} for run in self.runs)))

    @cached_property
    def judged_after(self) -> list[int]:
        """By run the iteration of the tuned weights in `changes`: that of the results if all have
        them, else of the last evaluation that all have. Empty if there is none, or its scores or
        the base's are not kept."""
        results = [run.newest_results for run in self.runs]
        after = [one.iteration for one in results if one is not None]
        if len(after) < len(self.runs):
            after = [max(self.kept, default=0)] * len(self.runs)
        known = zip(after, self.runs, strict=True)
        return after if all(own and {0, own} <= {*run.kept} for own, run in known) else []

    @cached_property
    def changes(self) -> dict[str, Comparison]:
        """Base against tuned, by reward and, where pictures can be right, by `RIGHT`: from the
        stored scores of every prompt; results.json gives only the iteration."""
        if not self.judged_after:
            return {}
        base, tuned = self._scores([0] * len(self.runs)), self._scores(self.judged_after)
        return {
            name: paired(base[name], tuned[name], share=name == RIGHT)
            for name in base
            if name in tuned
        }

    def curve(self, reward: str) -> CurveLine:
        """Held-out means of a reward, with the interval of their change from the base: of one run
        by the log, of several over seeds and prompts."""
        label, run = self.label("held-out"), self.runs[0]
        if len(self.runs) == 1:
            return heldout_line(label, run.evaluations, reward, run.heldout, self.style)
        scores = [table[reward].double() for table in self.tables.values()]
        means = [float(each.nanmean()) for each in scores]
        ends = []
        for mean, each in zip(means, scores, strict=True):
            change = paired(scores[0], each).change
            ends.append((mean - change.mean + change.low, mean - change.mean + change.high))
        return CurveLine(label, [*self.tables], means, self.style, ends, "marked")

    def results(self, key: str) -> list[Any]:
        """An entry of every run's results, of those that have it."""
        found = [getattr(run.newest_results, key, None) for run in self.runs]
        return [each for each in found if each is not None]

    @cached_property
    def tables(self) -> dict[int, dict[str, Tensor]]:
        """Scores [S, N] by reward after each evaluation that all runs have kept: every reward's
        curve asks for them."""
        return {iteration: self._scores([iteration] * len(self.runs)) for iteration in self.kept}

    def _scores(self, after: Sequence[int]) -> dict[str, Tensor]:
        """Scores [S, N] by reward, and verdicts where there are some, of S runs each after its own
        iteration."""
        tables = [run.scores(iteration) for run, iteration in zip(self.runs, after, strict=True)]
        return {
            name: torch.stack([table[name] for table in tables])
            for name in tables[0]
            if all(name in table for table in tables)
        }


def read_runs(directories: Sequence[Path]) -> list[RunHistory]:
    """The runs in `directories`, each once, under names that tell them apart. UserError for a
    directory that is no run."""
    unique: dict[Path, Path] = {}
    for directory in directories:
        unique.setdefault(real(directory), directory)
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
        for group in groups:
            if all(_differ_in_seed(other, run) for other in group):
                group.append(run)
                break
        else:
            groups.append([run])
    return [SeedGroup(tuple(group), style, len(groups) == 1) for style, group in enumerate(groups)]


def mean(values: Iterable[float | None]) -> float:
    """The mean of those that are known; NaN if none is."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _differ_in_seed(one: RunHistory, other: RunHistory) -> bool:
    apart = differences(one.config, other.config).keys()
    contents = [run.starts[-1].contents if run.starts else None for run in (one, other)]
    kept = all(len(run.kept) == len(run.evaluations) for run in (one, other))
    return (
        kept and SEED_KEY in apart and apart <= {SEED_KEY, *PLACES} and contents[0] == contents[1]
    )


def summary_of(of: RunHistory | SeedGroup) -> list[str]:
    """At most three sentences: what was learnt, what got worse if anything did, and what to do
    next. What was learnt is of right pictures, or of the trained rewards if no reward defines right
    pictures."""
    group = of if isinstance(of, SeedGroup) else SeedGroup((of,))
    if not group.changes:
        return [_in_training(group)]
    return [each for each in (_outcome(group), _worse(group), _next(group)) if each]


def _outcome(group: SeedGroup) -> str:
    changes, heldout = group.changes, group.runs[0].heldout
    names = [name for name in group.config.trained if name in changes]
    if RIGHT in changes:
        words = next((of.in_words for of in group.results("right")), "Right on {} prompts")
        done = words.replace("{}", f"{percent(changes[RIGHT].tuned)} of {heldout} held-out")
        said = f"{done[0].lower()}{done[1:]}, {changes[RIGHT].sentence(RIGHT)}"
    else:
        told = [changes[name].sentence(name) for name in names]
        said = f"on {counted(heldout, 'held-out prompt')} {'; '.join(told)}"
    length = counted(max(group.judged_after), "iteration")
    return f"Trained on {_with_and(names)} for {length}: {said}."


def _in_training(group: SeedGroup) -> str:
    """How the trained rewards move from iteration to iteration, where no two evaluations with their
    scores are kept."""
    told = []
    for name in group.config.trained:
        values = group.series(f"reward/{name}")[1]
        change, margin = rise(values)
        if math.isnan(margin):
            told.append(f"{name}: too early to say after {counted(len(values), 'iteration')}")
            continue
        digits = decimals_of(margin / 2)
        way = (
            "rising"
            if change > margin
            else "falling"
            if -change > margin
            else "no clear change yet"
        )
        told.append(f"{name}: {way}, {signed(change, digits)} ± {fixed(margin, digits)}")
    return f"In training {'; '.join(told)}; held-out prompts are not evaluated yet."


def _fallen(group: SeedGroup) -> list[str]:
    """Scores that fell, and lost diversity: of right pictures where every run knows it, since
    training that works leaves fewer wrong ones."""
    worse = [
        f"{name} ({signed(change.effect.mean, 2)} s.d.)"
        for name, change in group.changes.items()
        if name != RIGHT and change.verdict == "lower"
    ]
    for which, key in DIVERSITIES.items():
        spreads = group.results(key)
        if len(spreads) == len(group.runs):
            base, tuned = mean(one.base for one in spreads), mean(one.tuned for one in spreads)
            if tuned < AS_VARIED * base:
                times = f"{tuned / base:.2f} times as much as before"
                worse.append(f"{which} of one prompt differ {times}")
            break
    return worse


def _worse(group: SeedGroup) -> str:
    """What fell and the alarms; "" for neither."""
    raised = list(dict.fromkeys(one.name for one in group.alarms()))
    alarms = [f"alarm{'s' * (len(raised) > 1)} {_with_and(raised)}"] if raised else []
    worse = [*_fallen(group), *alarms]
    return f"Worse: {'; '.join(worse)}." if worse else ""


def _next(group: SeedGroup) -> str:
    """What a finished run suggests."""
    if not all(run.finished for run in group.runs):
        return ""
    folder, raised = str(group.runs[0].files.path), group.alarms()
    if raised:
        return f"Next: {HELPS.get(raised[-1].name, 'look at the report')}."
    if _fallen(group):
        return "Next: train on what fell too, or lower the learning rate."
    aims = [group.changes[RIGHT]] if RIGHT in group.changes else list(group.changes.values())
    if any(change.verdict.endswith("higher") for change in aims):
        asked = ["g2rpo", "evaluate", folder, "--controls", "--out", f"{folder}-controls"]
        return f"Next: `{shlex.join(asked)}` tries whether other sampler settings do as well."
    more = f"trainer.iterations={2 * group.config.trainer.iterations}"
    return f"Next: `{shlex.join(['g2rpo', 'resume', folder, more])}` trains on."


def _with_and(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def model_name(policy: PolicyConfig) -> str:
    """A description of the model."""
    embedded = policy.path in ("testbed", "words")
    return "the tiny FLUX that comes with g2rpo" if embedded else policy.path
