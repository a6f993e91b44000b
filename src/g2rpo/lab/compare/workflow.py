"""Runs a study: what is missing of its runs and evaluations, each in a folder of its own, and then
its results.

OUT/study.yaml         what is compared
OUT/runs/CELL/seed_S/  the runs
OUT/judged/base/, .../CELL/seed_S/  with `--steps`: evaluations of the base and of the runs' weights
OUT/judged/controls/   with `--controls`: of other sampler settings of the base
OUT/results.json, results.md, curves.png
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from g2rpo.config.read import read
from g2rpo.config.resolve import listed_differences, resolve_as
from g2rpo.config.schema import Alarm, Config
from g2rpo.config.work import iterations_within, work_of_run
from g2rpo.core.errors import Stopped, UserError, placed
from g2rpo.core.events import Caution, Emit, Line, silent
from g2rpo.core.files import write_whole
from g2rpo.lab.compare.jobs import Job, Workers, working
from g2rpo.lab.compare.results import write_results
from g2rpo.lab.compare.study import Study, StudyDirectory, Unit
from g2rpo.lab.evaluate import config_settings, held_settings
from g2rpo.lab.judging import EvaluationDirectory
from g2rpo.train.checks import check
from g2rpo.train.model_card import CARD
from g2rpo.train.run.folder import Run
from g2rpo.train.run.lock import first_usable

ALIKE = 1.1
"""Cells whose network evaluations differ by no more than this factor spend as much."""
NOISE = 0
"""The seed of the evaluations at `Study.steps`: the same noise for all cells, so that differences
are paired."""


def compare(
    recipe: str,
    overrides: Sequence[str],
    cells: Mapping[str, Sequence[str]],
    budget: tuple[Unit, float],
    *,
    seeds: int = 3,
    steps: Sequence[int] = (),
    jobs: int = 1,
    out: Path | None = None,
    controls: bool = False,
    emit: Emit = silent,
) -> StudyDirectory:
    """Runs the missing parts of a study in the folder `out`, and writes its results; without `out`,
    in the first of study, study-2 ... that holds no other. `controls` samples controls of the
    base too. A part that fails ends no other: there are results of the cells that are whole, and
    then an error that names what failed."""
    asked = {
        "recipe": recipe,
        "overrides": list(overrides),
        "cells": {name: list(own) for name, own in cells.items()},
        "unit": budget[0],
        "budget": budget[1],
        "seeds": seeds,
        "steps": sorted({*steps}),
    }
    study = resolve_as(Study, asked, source="study")
    if any(word.startswith("trainer.iterations=") for word in study.overrides):
        emit(
            Line(
                f"trainer.iterations: runs are as long as --budget {budget[0]}={budget[1]:.15g} says"
            )
        )
    configs = _configs(study, emit)
    _check_judged_alike(configs, one_base=bool(study.steps))
    iterations = {cell: _iterations(study, cell, config) for cell, config in configs.items()}
    if (caution := unequal_work(configs, iterations)) is not None:
        emit(Caution(caution))
    out = out or first_usable("study", partial(_check_same, study))
    emit(Line(f"in {out}"))
    _check_same(study, out)
    with working(out, jobs, emit) as workers:
        work = _Work(study, StudyDirectory(out), configs, iterations, workers)
        write_whole(work.folder.study, study.to_yaml().encode())
        failed = work.train() | work.judge(controls)
        if whole := work.whole():
            trained = sorted({name for config in configs.values() for name in config.trained})
            write_results(study, work.folder, whole, work.seeds, trained)
    if failed:
        said = [job.failed(code) for job, code in failed.items()]
        rest = "results are of the cells that are whole" if whole else "no cell is whole"
        kind = UserError if {*failed.values()} == {2} else Stopped
        raise kind("\n".join([*said, f"{rest}; the same command does what is missing"]))
    return work.folder


def unequal_work(configs: Mapping[str, Config], iterations: Mapping[str, int]) -> str | None:
    """What to say where cells spend different numbers of network evaluations; None where no cell
    spends more than `ALIKE` times the least."""
    spent = {}
    for cell, config in configs.items():
        spent[cell] = work_of_run(config.changed("trainer", iterations=iterations[cell]))
    least = min(spent.values())
    if max(spent.values()) <= ALIKE * least:
        return None
    listed = ", ".join(f"{cell} {work:,} ({work / least:.1f})" for cell, work in spent.items())
    return f"cells spend different network evaluations: {listed}; --budget evaluations={least} gives all the same"


@dataclass(frozen=True)
class _Work:
    """The jobs of a study in its folder."""

    study: Study
    folder: StudyDirectory
    configs: Mapping[str, Config]
    iterations: Mapping[str, int]
    workers: Workers

    @property
    def seeds(self) -> range:
        first = next(iter(self.configs.values())).trainer.seed
        return range(first, first + self.study.seeds)

    def train(self) -> dict[Job, int]:
        """Trains what is missing; the exit codes of what failed."""
        return self.workers.run(
            self._training(cell, seed) for cell in self.configs for seed in self.seeds
        )

    def judge(self, controls: bool) -> dict[Job, int]:
        """Evaluates what is missing, of the cells whose runs are finished; the exit codes of what
        failed."""
        cells, folder = self.trained(), self.folder
        if not cells:
            return {}
        run, own = folder.run(cells[0], self.seeds[0]), self.configs[cells[0]]
        steps = self.study.steps or [own.judged_steps]
        jobs = []
        if controls:
            place, other = folder.judged("controls"), ("weights=", "--controls")
            jobs.append(judging_job("sampler settings of the base", run, place, steps[:1], *other))
        if self.study.steps:
            jobs.append(judging_job("the base", run, folder.judged("base"), steps, "weights="))
            for cell in cells:
                for seed in self.seeds:
                    run, place = folder.run(cell, seed), folder.judged(cell, seed)
                    name = f"{cell}, seed {seed}"
                    jobs.append(judging_job(name, run, place, steps, "base=false"))
        return self.workers.run(jobs)

    def trained(self) -> list[str]:
        """The cells all of whose runs are finished."""
        run, seeds = self.folder.run, self.seeds
        return [cell for cell in self.configs if all(finished(run(cell, seed)) for seed in seeds)]

    def whole(self) -> list[str]:
        """The cells all of whose runs, and evaluations at `Study.steps`, are finished."""
        judged = self.folder.judged
        if not self.study.steps:
            return self.trained()
        if judged("base").unfinished:
            return []
        return [
            cell
            for cell in self.trained()
            if not any(judged(cell, seed).unfinished for seed in self.seeds)
        ]

    def _training(self, cell: str, seed: int) -> Job | None:
        """The job that trains, or continues training; None if the run is finished."""
        run, config = self.folder.run(cell, seed), self.configs[cell]
        if finished(run):
            return None
        own = run_overrides(config, seed, self.iterations[cell])
        words = ["train", self.study.recipe, *self.study.overrides_of(cell), *own]
        words += ["--run-dir", str(run.path), "--resume"]
        return Job(f"{cell}, seed {seed}", tuple(words), run.path.with_suffix(".log"))


def judging_job(
    name: str, run: Run, folder: EvaluationDirectory, steps: Sequence[int], *settings: str
) -> Job | None:
    """The job that evaluates a run's weights; None if it is finished."""
    if not folder.unfinished:
        return None
    counts = ",".join(map(str, steps))
    own = "--steps", counts, "--out", str(folder.path), f"seed={NOISE}", *settings
    log = folder.path.with_suffix(".log")
    return Job(f"judging {name}", ("evaluate", str(run.path), *own), log)


def run_overrides(config: Config, seed: int, iterations: int) -> list[str]:
    """What a study sets in a run's config; every run has as many evaluations as the recipe's
    own."""
    every = math.ceil(iterations / max(1, config.trainer.iterations // config.evaluation.every))
    return [
        f"trainer.seed={seed}",
        f"trainer.iterations={iterations}",
        f"evaluation.every={every}",
        *(["evaluation.every_minutes=null"] if config.evaluation.every_minutes else []),
        f"trainer.checkpoint_every={min(every, config.trainer.checkpoint_every)}",
    ]


def finished(run: Run) -> bool:
    """Whether a training run has finished: the model card is written last."""
    try:
        return (run.weights / CARD).is_file()
    except UserError:
        return False


def _configs(study: Study, emit: Emit) -> dict[str, Config]:
    """The configs of the cells; one message refuses all that cannot be trained."""
    configs: dict[str, Config] = {}
    wrong: dict[str, list[str]] = {}  # cells by message

    def note(cell: str, message: str) -> None:
        emit(Line(f"{cell}: {message}"))

    for cell in study.cells:
        try:
            overrides, told = study.overrides_of(cell), partial(note, cell)
            configs[cell] = config = read(study.recipe, overrides, told)
            for alarm in ("action", *get_args(Alarm)):
                if config.action_of(alarm) == "stop":
                    raise UserError(
                        f"alarms.{alarm}=stop may end a run of the study early; set it to warn or off"
                    )
            check(config)
        except UserError as error:
            wrong.setdefault(str(error), []).append(cell)
    if wrong:
        listed = [
            f"cell{'s' * (len(named) > 1)} {', '.join(named)}: {message}"
            for message, named in wrong.items()
        ]
        raise UserError("\n".join(listed))
    return configs


def _check_judged_alike(configs: Mapping[str, Config], *, one_base: bool) -> None:
    """Refuses cells whose evaluations would differ, and with `one_base`, as is evaluated at
    `Study.steps`, those whose untrained models do."""
    found = {cell: _judged_by(config) for cell, config in configs.items()}
    for cell, config in configs.items() if one_base else ():
        for key in ("quantize", "adapter"):
            found[cell][f"policy.{key}"] = getattr(config.policy, key)
    first = next(iter(found))
    for cell, own in found.items():
        for key, value in own.items():
            if value != (other := found[first][key]):
                raise UserError(
                    f"cells {first} and {cell} would not be judged alike: {key} is {other!r} and {value!r}"
                )


def _judged_by(config: Config) -> dict[str, Any]:
    """What an evaluation's scores depend on, beside the weights."""
    judged = config_settings(config)
    rewards = {name: {**entry, "weight": 1.0} for name, entry in judged["rewards"].items()}
    keys = (
        "path",
        "height",
        "width",
        "num_frames",
        "guidance_scale",
        "negative_prompt",
        "max_sequence_length",
        "dtype",
    )
    return {
        **{f"policy.{key}": judged["policy"][key] for key in keys},
        **{f"evaluation.{key}": judged[key] for key in ("prompts", "num_prompts", "steps")},
        "sampling.shift": judged["shift"],
        "trainer.seed": judged["seed"],
        "rewards and evaluation.rewards": dict(sorted(rewards.items())),
    }


def _check_same(study: Study, out: Path) -> None:
    """Refuses a folder that holds another study, or anything else; cells and seeds may be added."""
    held = held_settings(Study, StudyDirectory(out).study, "study")
    if held is None:
        return
    cells = {name: own for name, own in study.cells.items() if name in held.cells}
    asked = study.model_copy(update={"cells": cells, "seeds": min(study.seeds, held.seeds)})
    if listed := listed_differences(asked, held):
        raise UserError(
            f"{out} holds another study:{listed}\nName another --out; cells and seeds can be added to a study."
        )


def _iterations(study: Study, cell: str, config: Config) -> int:
    """The iterations that a cell's budget buys."""
    budget = study.budget_of(cell)
    if study.unit == "iterations":
        return int(budget)
    with placed(f"cell {cell}: ", UserError):
        return iterations_within(config, budget)
