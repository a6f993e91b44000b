"""The table of docs/models.md: every class of the catalogue beside diffusers. `python -m
tests.repository.models_table`."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from g2rpo.policies.catalogue import SPECS
from tests.policies import test_any_pipeline as beside
from tests.support.tiny_pipelines import CLASSES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- python -m tests.repository.models_table -->\n", "<!-- end -->\n"
HEAD = (
    "| pipeline class | guidance: default, off | pictures | velocity | batch | LoRA | gradient |\n"
    + 7 * "|---"
    + "|\n"
)
COLUMNS = {"pictures": 1e-5, "velocity": 2e-5, "batch": 2e-5, "weights": 1e-4, "gradient": 1e-2}
"""The checks of `g2rpo check-model` that are columns, with the largest errors that the tests of
every class allow."""


def guidance_of(kind: str) -> str:
    spec = SPECS[kind]
    off = "an input of the network" if spec.unguided is None else f"off at {spec.unguided:g}"
    return f"{spec.guidance:g}, {off}"


def up(value: float) -> str:
    """The next power of ten: figures that another machine's rounding leaves alone, mostly."""
    return "0" if value == 0 else f"1e{math.ceil(math.log10(value))}"


def row(kind: str, folder: Path) -> str:
    found = {check.name: check for check in beside.checked(kind, folder)}
    errors = " | ".join(up(found[name].error) for name in COLUMNS)
    return f"| `{kind}` | {guidance_of(kind)} | {errors} |\n"


def rows_in(page: str) -> dict[str, list[str]]:
    """The table's cells by class."""
    table = page.split(BEGIN)[1].split(END)[0].removeprefix(HEAD)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {first.strip("`"): rest for first, *rest in cells}


def main() -> None:
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    with tempfile.TemporaryDirectory() as folder, beside.small():
        table = HEAD + "".join(row(kind, Path(folder)) for kind in CLASSES)
    PAGE.write_text(before + BEGIN + table + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
