"""What a study compares: algorithms (or variants of one) under one budget, each with its own best learning rate.

A *cell* is one variant: a name and overrides of the recipe. It is trained once per seed. Its learning rate is chosen
beforehand, from the same rates for every cell, on *pilots*: runs with their own seeds, evaluated on training prompts. So the
choice uses no held-out prompt and no seed of the comparison.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, PositiveFloat, PositiveInt

from g2rpo.config.algorithms import algorithm_class
from g2rpo.config.schema import Section, Steps
from g2rpo.core import plugins
from g2rpo.core.errors import UserError, did_you_mean
from g2rpo.core.files import Inside

Unit = Literal["iterations", "evaluations", "seconds"]
OWN_BUDGET = "budget="
"""The prefix of a cell's own budget among its overrides."""
NAME = r"[\w.+-]+"
SWEPT = ("optim.learning_rate", "trainer.seed", "trainer.iterations")


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


@dataclass(frozen=True)
class StudyDirectory:
    """The files of the study in `path` (`g2rpo compare`)."""

    path: Path

    study = Inside("study.yaml")
    base = Inside("judged/base")
    controls = Inside("judged/controls")
    results = Inside("results.json")
    page = Inside("results.md")
    curves = Inside("curves.png")


def parse_cells(algorithms: str, cells: Sequence[str]) -> dict[str, list[str]]:
    """Overrides by cell, from "g2rpo,mixgrpo" and from words like "coarse: algorithm.granularities=[1,2] ..."."""
    table: list[tuple[str, list[str]]] = []
    for name in filter(None, map(str.strip, algorithms.split(","))):
        if plugins.is_code(name):
            plugins.allow(name)
        try:
            algorithm_class(name)
        except UserError as error:
            raise UserError(f"--algorithms: {error}") from None
        table.append((name.rpartition(":")[2], [f"algorithm.name={name}"]))
    for cell in cells:
        name, colon, overrides = cell.partition(":")
        if not colon or not re.fullmatch(NAME, name):
            example = "--cell 'coarse: algorithm.granularities=[1,2]'"
            raise UserError(f"--cell '{cell}': should be a name (letters, digits, ._+-), a colon and overrides, like {example}")
        table.append((name, shlex.split(overrides)))
    if not table:
        raise UserError("nothing to compare: name --algorithms, or a --cell or two")
    names = [name for name, _ in table]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two cells are named '{name}'; give one another name with --cell 'NAME: ...'")
    return dict(table)


def check_overrides(overrides: Sequence[str], cells: Mapping[str, Sequence[str]], rates: Sequence[float] | None) -> None:
    """Refuses overrides of what a study chooses by itself, and names of cells that cannot be folders."""
    for name, own in cells.items():
        if not re.fullmatch(NAME, name):
            raise UserError(f"cell {name!r}: its name may have letters, digits and ._+-")
        for override in own:
            if (key := override.partition("=")[0]) in SWEPT:
                raise UserError(f"--cell {name}: {key} belongs to the study (--rates, --seeds, --budget), not to a cell")
    if rates and (given := [each for each in overrides if each.startswith("optim.learning_rate=")]):
        raise UserError(f"{given[0]}: --rates has the learning rates of all cells; take one of the two out")


def parse_budget(text: str) -> tuple[Unit, float]:
    """("evaluations", 1e5) of "evaluations=100000"."""
    unit, _, amount = text.partition("=")
    for known in get_args(Unit):
        if unit == known:
            return known, _amount(f"--budget {text}", unit, amount, unit)
    raise UserError(f"--budget {text}: unknown unit '{unit}'.{did_you_mean(unit, get_args(Unit))}")


def own_budgets(cells: Mapping[str, Sequence[str]], unit: Unit) -> tuple[dict[str, list[str]], dict[str, float]]:
    """The cells' overrides without "budget=20000" and the like, and these budgets by cell, in the study's unit."""
    overrides: dict[str, list[str]] = {}
    budgets: dict[str, float] = {}
    for name, words in cells.items():
        own = [word for word in words if word.startswith(OWN_BUDGET)]
        if len(own) > 1:
            raise UserError(f"--cell {name}: has more than one budget: {' '.join(own)}")
        for word in own:
            budgets[name] = _amount(f"--cell {name}: {word}", "budget", word.removeprefix(OWN_BUDGET), unit)
        overrides[name] = [word for word in words if word not in own]
    return overrides, budgets


def _amount(where: str, key: str, text: str, unit: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)) or (unit == "iterations" and value != int(value)):
        raise UserError(f"{where}: should be a positive number, like {key}=60")
    return value


def parse_rates(text: str) -> list[float]:
    """[1e-4, 2e-4] of "1e-4,2e-4"."""
    try:
        return sorted({float(word) for word in text.split(",")})
    except ValueError:
        raise UserError(f"--rates {text}: should be numbers with commas between them, like 1e-4,2e-4,4e-4") from None
