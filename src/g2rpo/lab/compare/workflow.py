"""`g2rpo compare`: trains a grid of algorithms, learning rates and seeds, as ordinary runs in processes of their own.

Everything is kept in one folder, and finished parts are not repeated:
    study.yaml                            what is compared
    probes/CELL/                          for a budget in seconds: what a cell's iteration costs
    pilots/CELL/rate_R/seed_S/            runs that choose a cell's learning rate
    runs/CELL/seed_S/                     the runs that are compared
    judged/base/, judged/CELL/seed_S/     evaluations of their weights
    judged/controls/                      with --controls: of free knobs of the untrained model
    results.json, results.md, curves.png
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from g2rpo.app.dry_run import try_own_code
from g2rpo.app.evaluate import config_settings
from g2rpo.app.events import Emit, Line, silent
from g2rpo.assembly.adapters import completed
from g2rpo.assembly.checks import check
from g2rpo.assembly.config import load_config
from g2rpo.config.resolve import listed_differences, read_yaml, resolve_as
from g2rpo.config.schema import Alarm, Config
from g2rpo.core.errors import UserError
from g2rpo.core.files import is_empty, write_whole
from g2rpo.evaluation.sweep import EvaluationDirectory
from g2rpo.evaluation.work import iterations_within
from g2rpo.lab.compare.jobs import Job, Workers, locked
from g2rpo.lab.compare.outcomes import History, gain_of, read_run, seconds_per_evaluation
from g2rpo.lab.compare.results import Cell, StudyResults, write_results
from g2rpo.lab.compare.study import Study, StudyDirectory, Unit, check_overrides, own_budgets
from g2rpo.run.lock import first_usable
from g2rpo.run.rates import PILOT_SEEDS, RateGain, smallest_good_rate
from g2rpo.run.run import Run
from g2rpo.training.model_card import CARD

NOISE = 0  # the seed of the evaluations: the same noise for all cells, so that differences are paired
PROBED_ITERATIONS = 3  # iterations; the first is a warm-up


@dataclass(frozen=True)
class Training:
    """A run of a study: its folder, and the overrides of the recipe."""

    title: str
    folder: Path
    overrides: list[str]


@dataclass(frozen=True)
class Workspace:
    """The runs of a study in its folder, and the jobs that make them."""

    study: Study
    out: Path

    def config(self, overrides: Sequence[str]) -> Config:
        return completed(load_config(self.study.recipe, overrides))

    def history(self, run: Training) -> History:
        """Of a finished run."""
        return read_run(self.config(run.overrides), run.folder)

    def training(self, run: Training) -> Job | None:
        """The job that trains, or continues training; None if the run is finished. Another run in its folder is refused."""
        begun = Run(run.folder).config.is_file()
        Run(run.folder).check(self.config(run.overrides), resume=begun)
        if finished(run.folder):
            return None
        resume = ["--resume"] if begun else []
        arguments = ["train", self.study.recipe, *run.overrides, "--run-dir", str(run.folder), *resume]
        return Job(run.title, arguments, run.folder.parent / f"{run.folder.name}.log")

    def probe(self, cell: str) -> Training:
        short = [f"trainer.iterations={PROBED_ITERATIONS}", "evaluation.num_prompts=1"]
        return Training(f"probe of {cell}", self.out / "probes" / cell, [*self.study.overrides_of(cell), *short])

    def run(self, cell: str, rate: float, seed: int, iterations: int) -> list[str]:
        """The overrides of one run; every run of a study has as many evaluations as the recipe's own."""
        overrides = self.study.overrides_of(cell)
        config = self.config(overrides)
        looks = max(1, config.trainer.iterations // config.evaluation.every)
        every = math.ceil(iterations / looks)
        return [
            *overrides,
            f"optim.learning_rate={rate}",
            f"trainer.seed={seed}",
            f"trainer.iterations={iterations}",
            f"evaluation.every={every}",
            *(["evaluation.every_minutes=null"] if config.evaluation.every_minutes else []),
            f"trainer.checkpoint_every={min(every, config.trainer.checkpoint_every)}",
            "evaluation.controls=false",
        ]

    def pilots(self, cell: str, iterations: int) -> dict[float, list[Training]]:
        """By rate one of each seed."""
        config = self.config(self.study.overrides_of(cell))
        first = config.trainer.seed + PILOT_SEEDS
        return {
            rate: [
                Training(
                    f"pilot of {cell}, rate {rate:g}, seed {seed}",
                    self.out / "pilots" / cell / f"rate_{rate:g}" / f"seed_{seed}",
                    [*self.run(cell, rate, seed, iterations), f"evaluation.prompts={config.prompts.train}"],
                )
                for seed in range(first, first + self.study.pilots)
            ]
            for rate in self.study.rates
        }

    def runs(self, cell: str, rate: float, iterations: int) -> dict[int, Training]:
        """By seed."""
        first = self.config(self.study.overrides_of(cell)).trainer.seed
        return {
            seed: Training(
                f"{cell}, rate {rate:g}, seed {seed}",
                self.out / "runs" / cell / f"seed_{seed}",
                self.run(cell, rate, seed, iterations),
            )
            for seed in range(first, first + self.study.seeds)
        }

    def gains(self, config: Config, pilots: Mapping[float, Sequence[Training]]) -> list[RateGain]:
        """What finished pilots of a cell with this `config` gained, by rate."""
        weights = {name: entry.weight for name, entry in config.rewards.items()}
        return [gain_of(rate, [self.history(pilot) for pilot in own], weights) for rate, own in pilots.items()]

    def judging(self, title: str, run: Path, folder: Path, *settings: str) -> Job | None:
        """The job that evaluates a run's weights; None if it is finished."""
        if EvaluationDirectory(folder).results.is_file():
            return None
        steps = ",".join(map(str, self.study.steps))
        arguments = ["evaluate", str(run), "--steps", steps, "--out", str(folder), f"seed={NOISE}", *settings]
        return Job(title, arguments, folder.parent / f"{folder.name}.log")


def finished(run: Path) -> bool:
    """Whether a training run has finished: the model card is written last."""
    try:
        return (Run(run).weights / CARD).is_file()
    except UserError:
        return False


def compare(
    recipe: str,
    overrides: Sequence[str],
    cells: Mapping[str, Sequence[str]],
    budget: tuple[Unit, float],
    rates: Sequence[float] | None,
    seeds: int,
    pilots: int,
    steps: Sequence[int] | None,
    jobs: int,
    out: Path | None,
    controls: bool = False,
    emit: Emit = silent,
) -> StudyResults:
    """Runs the missing parts of a study in the folder `out`, and writes and returns its results; without `out`, in the first
    of study, study-2 ... that holds no other. `controls` samples free knobs of the untrained model too."""
    if seeds > PILOT_SEEDS:
        raise UserError(f"--seeds {seeds}: at most {PILOT_SEEDS}, so that no pilot's seed is used again")
    check_overrides(overrides, cells, rates)
    cells, budgets = own_budgets(cells, budget[0])
    configs = _configs(recipe, overrides, cells, emit)
    _check_alike(configs)
    config = next(iter(configs.values()))
    study = resolve_as(
        Study,
        {
            "recipe": recipe,
            "overrides": list(overrides),
            "cells": cells,
            "budgets": budgets,
            "unit": budget[0],
            "budget": budget[1],
            "rates": list(rates or [config.optim.learning_rate]),
            "seeds": seeds,
            "pilots": pilots,
            "steps": sorted(set(steps or [config.evaluation.num_steps or config.sampling.num_steps])),
        },
        source="study",
    )
    out = out or first_usable("study", partial(_check_same, study))
    emit(Line(f"in {out}"))
    _check_same(study, out)
    if study.unit != "seconds":
        _spend(study, configs, {})  # refuses a budget that is too small
    with locked(out) as lock:
        write_whole(StudyDirectory(out).study, study.to_yaml().encode())
        return _work(Workspace(study, out), configs, Workers(jobs, lock, emit), controls)


def _work(workspace: Workspace, configs: Mapping[str, Config], workers: Workers, controls: bool) -> StudyResults:
    """Probes, pilots, runs, judging, results."""
    study, files = workspace.study, StudyDirectory(workspace.out)
    prices: dict[str, float] = {}
    if study.unit == "seconds":
        probes = {cell: workspace.probe(cell) for cell in study.cells}
        workers.run(map(workspace.training, probes.values()))
        prices = {
            cell: seconds_per_evaluation(workspace.config(probe.overrides), probe.folder) for cell, probe in probes.items()
        }
    iterations = _spend(study, configs, prices)

    tried: dict[str, list[RateGain]] = {cell: [] for cell in study.cells}
    if len(study.rates) > 1:
        pilots = {cell: workspace.pilots(cell, iterations[cell]) for cell in study.cells}
        workers.run(
            workspace.training(pilot) for by_rate in pilots.values() for of_seeds in by_rate.values() for pilot in of_seeds
        )
        tried = {cell: workspace.gains(configs[cell], by_rate) for cell, by_rate in pilots.items()}
    chosen = {cell: smallest_good_rate(gains) if gains else study.rates[0] for cell, gains in tried.items()}

    runs = {cell: workspace.runs(cell, chosen[cell], iterations[cell]) for cell in study.cells}
    workers.run(workspace.training(run) for by_seed in runs.values() for run in by_seed.values())
    some_run = next(iter(next(iter(runs.values())).values())).folder
    judging = [workspace.judging("judging the base", some_run, files.base, "weights=")]
    if controls:
        free = workspace.judging("judging free knobs of the base", some_run, files.controls, "weights=", "--controls")
        judging.append(free)
    judged: dict[str, list[Path]] = {cell: [] for cell in study.cells}
    for cell, by_seed in runs.items():
        for seed, run in by_seed.items():
            judged[cell].append(files.base.parent / cell / f"seed_{seed}")
            judging.append(workspace.judging(f"judging {cell}, seed {seed}", run.folder, judged[cell][-1], "base=false"))
    workers.run(judging)

    cells = {
        cell: Cell(chosen[cell], tried[cell], {run.folder: workspace.history(run) for run in by_seed.values()}, judged[cell])
        for cell, by_seed in runs.items()
    }
    trained = sorted({name for config in configs.values() for name in config.rewards})
    knobs = files.controls if EvaluationDirectory(files.controls).results.is_file() else None
    return write_results(study, workspace.out, cells, files.base, trained, prices, knobs)


def _configs(recipe: str, overrides: Sequence[str], cells: Mapping[str, Sequence[str]], emit: Emit) -> dict[str, Config]:
    """The configs of the cells; one message refuses all that cannot be trained."""
    configs: dict[str, Config] = {}
    wrong: dict[str, list[str]] = {}  # cells by message
    for cell, variant in cells.items():
        try:
            note = partial(_note, emit, cell)
            configs[cell] = config = completed(load_config(recipe, [*overrides, *variant], note), note)
            for alarm in get_args(Alarm):
                if (action := config.action_of(alarm)) in ("stop", "rollback"):
                    raise UserError(f"alarms.{alarm}={action} may end a run of the study early; set it to warn or off")
            prompts, _ = check(config)
            try_own_code(config, {"prompts": prompts})
        except UserError as error:
            wrong.setdefault(str(error), []).append(cell)
    if wrong:
        listed = [f"cell{'s' * (len(named) > 1)} {', '.join(named)}: {message}" for message, named in wrong.items()]
        raise UserError("\n".join(listed))
    return configs


def _check_alike(configs: Mapping[str, Config]) -> None:
    """Refuses cells whose evaluations would differ."""
    same: dict[str, Any] = {}
    first = next(iter(configs))
    for cell, config in configs.items():
        judged = config_settings(config)
        rewards = {name: {**entry, "weight": 1} for name, entry in judged.pop("rewards").items()}
        shown = ("path", "height", "width", "guidance_scale", "negative_prompt", "max_sequence_length", "dtype")
        policy = judged.pop("policy")
        alike = {
            **{f"policy.{key}": policy[key] for key in shown},
            **{f"evaluation.{key}": judged[key] for key in ("prompts", "num_prompts")},
            "sampling.shift": judged["shift"],
            "rewards and evaluation.rewards": dict(sorted(rewards.items())),
        }
        same = same or alike
        for key, value in alike.items():
            if value != same[key]:
                raise UserError(f"cells {first} and {cell} would not be judged alike: {key} is {same[key]!r} and {value!r}")


def _check_same(study: Study, out: Path) -> None:
    """Refuses a folder that holds another study, or anything else; cells and seeds may be added."""
    path = StudyDirectory(out).study
    if not path.is_file():
        if not is_empty(out):
            raise UserError(f"{out} is not empty and holds no study (no {path.name}); name another --out")
        return
    other = resolve_as(Study, read_yaml(path), source=str(path))
    shared = {name: variant for name, variant in study.cells.items() if name in other.cells}
    budgets = {name: amount for name, amount in study.budgets.items() if name in other.cells}
    ours = study.model_copy(update={"cells": shared or study.cells, "budgets": budgets, "seeds": other.seeds})
    gone = sorted(set(other.cells) - set(study.cells))
    if gone:
        raise UserError(f"{out} holds a study with the cells {', '.join(gone)} too; name them, or another --out")
    if study.seeds < other.seeds:
        raise UserError(f"{out} holds a study with {other.seeds} seeds; name at least as many, or another --out")
    if listed := listed_differences(ours, other):
        raise UserError(f"{out} holds another study:{listed}\nName another --out for this one.")


def _spend(study: Study, configs: Mapping[str, Config], prices: Mapping[str, float]) -> dict[str, int]:
    """The iterations that each cell's budget buys; `prices` are seconds per evaluation."""
    if study.unit == "iterations":
        return {cell: int(study.budget_of(cell)) for cell in configs}
    iterations = {}
    for cell, config in configs.items():
        evaluations = study.budget_of(cell) / (prices[cell] if study.unit == "seconds" else 1)
        try:
            iterations[cell] = iterations_within(config, evaluations)
        except UserError as error:
            raise UserError(f"--budget {study.unit}={study.budget_of(cell):g}: cell {cell}: {error}") from None
    return iterations


def _note(emit: Emit, cell: str, message: str) -> None:
    emit(Line(f"{cell}: {message}"))
