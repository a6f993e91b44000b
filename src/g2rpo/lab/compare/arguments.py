"""Parses the arguments of `g2rpo compare`: cells, budgets, learning rates."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import get_args

from g2rpo.config.algorithms import algorithm_class
from g2rpo.core import plugins
from g2rpo.core.errors import UserError, did_you_mean
from g2rpo.lab.compare.study import Unit

BUDGET = "budget="  # the prefix of a cell's own budget among its overrides
NAME = r"[\w.+-]+"
SWEPT = ("optim.learning_rate", "trainer.seed", "trainer.iterations")


def parse_cells(algorithms: str, cells: Sequence[str]) -> dict[str, list[str]]:
    """Overrides by cell, from "g2rpo,mixgrpo" and from words like "coarse: algorithm.granularities=[1,2] ..."."""
    table: dict[str, list[str]] = {}
    for name in filter(None, (word.strip() for word in algorithms.split(","))):
        if plugins.is_code(name):
            plugins.allow(name)
        try:
            algorithm_class(name)
        except UserError as error:
            raise UserError(f"--algorithms: {error}") from None
        _add(table, name.rpartition(":")[2], [f"algorithm.name={name}"])
    for cell in cells:
        name, colon, overrides = cell.partition(":")
        if not colon or not re.fullmatch(NAME, name):
            example = "--cell 'coarse: algorithm.granularities=[1,2]'"
            raise UserError(f"--cell '{cell}': should be a name (letters, digits, ._+-), a colon and overrides, like {example}")
        _add(table, name, shlex.split(overrides))
    if not table:
        raise UserError("nothing to compare: name --algorithms, or a --cell or two")
    return table


def _add(table: dict[str, list[str]], name: str, overrides: list[str]) -> None:
    if name in table:
        raise UserError(f"two cells are named '{name}'; give one another name with --cell 'NAME: ...'")
    table[name] = overrides


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
    if unit not in get_args(Unit):
        raise UserError(f"--budget {text}: unknown unit '{unit}'.{did_you_mean(unit, get_args(Unit))}")
    return unit, _amount(f"--budget {text}", unit, amount)  # type: ignore[return-value]


def own_budgets(cells: Mapping[str, Sequence[str]], unit: Unit) -> tuple[dict[str, list[str]], dict[str, float]]:
    """The cells' overrides without "budget=20000" and the like, and these budgets by cell, in the study's unit."""
    overrides: dict[str, list[str]] = {}
    budgets: dict[str, float] = {}
    for name, words in cells.items():
        budget_words = [word for word in words if word.startswith(BUDGET)]
        if len(budget_words) > 1:
            raise UserError(f"--cell {name}: has more than one budget: {' '.join(budget_words)}")
        for word in budget_words:
            budgets[name] = _amount(f"--cell {name}: {word}", BUDGET[:-1], word.removeprefix(BUDGET), unit)
        overrides[name] = [word for word in words if word not in budget_words]
    return overrides, budgets


def _amount(where: str, key: str, text: str, unit: str = "") -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)) or ((unit or key) == "iterations" and value != int(value)):
        raise UserError(f"{where}: should be a positive number, like {key}=60")
    return value


def parse_rates(text: str) -> list[float]:
    """[1e-4, 2e-4] of "1e-4,2e-4"."""
    try:
        return sorted({float(word) for word in text.split(",")})
    except ValueError:
        raise UserError(f"--rates {text}: should be numbers with commas between them, like 1e-4,2e-4,4e-4") from None
