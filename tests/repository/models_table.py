"""The table of docs/models.md: every class of the catalogue beside diffusers. `python -m tests.repository.models_table`."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import torch
from PIL import Image

from g2rpo.core.data import Prompt
from g2rpo.core.seeding import generator_for
from g2rpo.policies.catalogue import SPECS
from tests.policies import test_any_pipeline as beside
from tests.support.by_hand import by_hand
from tests.support.tiny_pipelines import CLASSES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- python -m tests.repository.models_table -->\n", "<!-- end -->\n"
HEAD = "| pipeline class | guidance: default, off | pictures | velocity | LoRA | gradient |\n" + 6 * "|---" + "|\n"
LIMITS = (1e-5, 2e-5, 1e-5, 1e-2)
"""Largest errors in the columns pictures, velocity, LoRA and gradient, which the tests of every class assert."""


def guidance_of(kind: str) -> str:
    spec = SPECS[kind]
    off = "an input of the network" if spec.unguided is None else f"off at {spec.unguided:g}"
    return f"{spec.guidance:g}, {off}"


def measured(kind: str, folder: Path) -> tuple[float, float, float, float]:
    """The largest differences from diffusers: pictures, velocity, pictures with a saved adapter; relative error of a slope."""
    prompts = prompts_for(kind, folder)
    policy = beside.load(kind)
    drawn = beside.difference(beside.pictures(policy, prompts), beside.theirs(beside.pipeline_of(kind), kind, prompts))
    x, sigma, cond = beside.inputs(policy, prompts)
    with torch.no_grad():
        expected = by_hand(beside.pipeline_of(kind), x, sigma, prompts, policy.guidance_scale, beside.size_of(kind))
        velocity = beside.difference(policy.velocity(x, sigma, cond), expected)
    tuned = beside.perturb(beside.load(kind, tuning="lora", lora_rank=4, lora_alpha=8), 0.1)
    tuned.save(folder / kind)
    pipeline = beside.pipeline_of(kind)
    pipeline.load_lora_weights(folder / kind, weight_name="pytorch_lora_weights.safetensors")
    adapter = beside.difference(beside.pictures(tuned, prompts), beside.theirs(pipeline, kind, prompts))
    slope, expected_slope = beside.slopes(kind, prompts)
    return drawn, velocity, adapter, abs(slope / expected_slope - 1)


def prompts_for(kind: str, folder: Path) -> list[Prompt]:
    path = folder / "input.png"
    Image.fromarray((255 * torch.rand(60, 40, 3, generator=generator_for("input"))).byte().numpy()).save(path)
    return [Prompt(text, [str(path)] if SPECS[kind].pictured else []) for text in beside.PROMPTS]


def up(value: float) -> str:
    """The next power of ten: figures that another machine's rounding leaves alone, mostly."""
    return "0" if value == 0 else f"1e{math.ceil(math.log10(value))}"


def row(kind: str, folder: Path) -> str:
    errors = " | ".join(up(error) for error in measured(kind, folder))
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
