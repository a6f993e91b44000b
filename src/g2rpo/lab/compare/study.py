"""What a study compares: algorithms, or variants of one, under one budget.

A *cell* is one variant: a name and overrides of the recipe. It is trained once per seed, each time
in a folder of its own.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from g2rpo.config.algorithms import algorithm_class
from g2rpo.config.schema import Steps
from g2rpo.core import plugins
from g2rpo.core.errors import UserError, placed
from g2rpo.core.files import Inside
from g2rpo.core.plain import Section
from g2rpo.lab.judging import EvaluationDirectory
from g2rpo.train.run.folder import Run

Unit = Literal["iterations", "evaluations"]
OWN_BUDGET = "budget="
"""The prefix of a cell's own budget among its overrides."""
NAME = r"[\w.+-]+"
OWN_FOLDERS = (".", "..", "base", "controls")
"""Names that no cell can have: its folders would be in others of the study (`StudyDirectory`)."""
CHOSEN = ("trainer.seed", "trainer.iterations")
"""Keys that a study sets."""


class Study(Section):
    """The settings of a study."""

    recipe: str
    overrides: list[str]
    """Overrides of the recipe in every cell."""
    cells: Annotated[
        dict[Annotated[str, Field(pattern=f"^{NAME}$")], list[str]], Field(min_length=1)
    ]
    """A cell's overrides; "budget=20000" among them is its own budget."""
    budget: PositiveFloat
    unit: Unit
    """Unit of the budget of one run."""
    seeds: PositiveInt
    """Training seeds of every cell."""
    steps: list[Steps]
    """Step counts at which trained models are evaluated; none: a run's own evaluations are
    compared."""

    @field_validator("cells")
    @classmethod
    def _leave_to_the_study(cls, cells: dict[str, list[str]]) -> dict[str, list[str]]:
        for cell, overrides in cells.items():
            if cell in OWN_FOLDERS:
                raise ValueError(f"cell {cell}: a study has a folder of this name; take another")
            for key in CHOSEN:
                if any(word.startswith(f"{key}=") for word in overrides):
                    raise ValueError(
                        f"{key} of cell {cell} belongs to the study: --seeds, --budget"
                    )
        return cells

    def overrides_of(self, cell: str) -> list[str]:
        own = [word for word in self.cells[cell] if not word.startswith(OWN_BUDGET)]
        return [*self.overrides, *own]

    def budget_of(self, cell: str) -> float:
        own = [word for word in self.cells[cell] if word.startswith(OWN_BUDGET)]
        return (
            budget_in(f"--cell {cell}: {own[-1]}", own[-1].removeprefix(OWN_BUDGET), self.unit)
            if own
            else self.budget
        )


@dataclass(frozen=True)
class StudyDirectory:
    """The files of the study in `path` (`g2rpo compare`)."""

    path: Path

    study = Inside("study.yaml")
    results = Inside("results.json")
    page = Inside("results.md")
    curves = Inside("curves.png")

    def run(self, cell: str, seed: int) -> Run:
        return Run(self.path / "runs" / cell / f"seed_{seed}")

    def judged(self, name: str, seed: int | None = None) -> EvaluationDirectory:
        """The evaluation of a cell's run, of the base ("base") or of its controls
        ("controls")."""
        folder = self.path / "judged" / name
        return EvaluationDirectory(folder if seed is None else folder / f"seed_{seed}")


def parse_cells(algorithms: str, cells: Sequence[str]) -> dict[str, list[str]]:
    """Overrides by cell, from "g2rpo,mixgrpo" and from words like "coarse:
    algorithm.granularities=[1,2] ..."."""
    table: dict[str, list[str]] = {}

    def add(name: str, overrides: list[str]) -> None:
        if name in table:
            raise UserError(
                f"two cells are named '{name}'; give one another name with --cell 'NAME: ...'"
            )
        table[name] = overrides

    for name in filter(None, map(str.strip, algorithms.split(","))):
        if plugins.is_code(name):
            plugins.allow(name)
        with placed("--algorithms: ", UserError):
            algorithm_class(name)
        add(name.rpartition(":")[2], [f"algorithm.name={name}"])
    for cell in cells:
        name, colon, overrides = cell.partition(":")
        if not colon or not re.fullmatch(NAME, name):
            example = "--cell 'coarse: algorithm.granularities=[1,2]'"
            raise UserError(
                f"--cell '{cell}': should be a name (letters, digits, ._+-), a colon and overrides, like {example}"
            )
        with placed(f"--cell '{cell}': "):
            words = shlex.split(overrides)
        add(name, words)
    if not table:
        raise UserError("nothing to compare: name --algorithms, or a --cell or two")
    return table


def parse_budget(text: str) -> tuple[Unit, float]:
    """("evaluations", 1e5) of "evaluations=100000"."""
    name, _, amount = text.partition("=")
    for unit in get_args(Unit):
        if name == unit:
            return unit, budget_in(f"--budget {text}", amount, unit)
    units = " or ".join(f"{unit}=NUMBER" for unit in get_args(Unit))
    raise UserError(f"--budget {text}: should be {units}")


def budget_in(where: str, amount: str, unit: Unit) -> float:
    """The number of a budget; UserError, which begins with `where`, for another text."""
    try:
        value = float(amount)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)) or (
        unit == "iterations" and not value.is_integer()
    ):
        raise UserError(f"{where}: should be a positive number, like {unit}=60")
    return value
