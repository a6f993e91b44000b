"""`g2rpo sample`: pictures from a run, or from any pipeline with or without tuned weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from g2rpo.build import components
from g2rpo.commands.progress import say
from g2rpo.config.resolve import resolve_as
from g2rpo.config.schema import Count, PolicyConfig, Section, Shift, Steps, grid_of
from g2rpo.errors import UserError, loading
from g2rpo.evaluation.heldout import sample_images
from g2rpo.input_pictures import check_inputs
from g2rpo.monitor.pictures import Strip, save_grid, to_pil
from g2rpo.rollout.scoring import stills
from g2rpo.runs.directory import read_config, weights_path
from g2rpo.runtime.folders import is_empty


class SampleOptions(Section):
    """Sampling options; None: the run's values, else 28 steps with the model's own shift."""

    steps: Steps | None
    shift: Shift | None
    strength: float
    batch_size: Count


def sample(
    prompts: Sequence[str],
    *,
    run: Path | None,
    policy: PolicyConfig | None,
    weights: Path | None,
    strength: float,
    base: bool,
    steps: int | None,
    shift: Shift | None,
    seed: int,
    batch_size: int,
    out: Path,
    console: Console,
) -> None:
    """Writes `out/NNNN.png`, `out/prompts.jsonl` (the prompt of each picture) and `out/grid.png`."""
    asked = {"steps": steps, "shift": shift, "strength": strength, "batch_size": batch_size}
    drawing = resolve_as(SampleOptions, asked, source="sample")
    if not prompts:
        raise UserError("give prompts as arguments, or a file of them with --prompts")
    check_inputs(prompts)
    if not is_empty(out):
        raise UserError(f"{out} is {'not empty' if out.is_dir() else 'a file'}; name another --out")
    if run is not None:
        config = read_config(run)
        policy, weights = config.policy, weights or (None if base else weights_path(run))
        own = {"steps": drawing.steps or config.sampling.num_steps, "shift": drawing.shift or config.sampling.shift}
        drawing = drawing.model_copy(update=own)
    if policy is None:
        raise UserError("name a run with --run, or a pipeline with --model")
    painter = components.build_policy(policy, tuning="frozen")
    if weights is not None and not base:
        with loading(f"{weights}: the weights do not fit {policy.path}"):
            painter.load(weights, drawing.strength)
    sigmas = grid_of(drawing.shift or "model", painter, drawing.steps or 28)
    rows = drawing.batch_size
    images = stills(sample_images(painter, prompts, sigmas, seed=seed, batch_size=rows, decode_batch_size=rows))
    out.mkdir(parents=True, exist_ok=True)
    with (out / "prompts.jsonl").open("w", encoding="utf-8") as listing:
        for number, (prompt, image) in enumerate(zip(prompts, images, strict=True)):
            name = f"{number:04d}.png"
            to_pil(image).save(out / name)
            listing.write(
                json.dumps({"file": name, "prompt": prompt, "seed": seed, "index": number}, ensure_ascii=False) + "\n"
            )
    shown = min(8, len(prompts))
    save_grid(out / "grid.png", [Strip(images[:shown])], prompts[:shown])
    say(console, f"{len(images)} pictures in {out}, the first {shown} side by side in {out / 'grid.png'}")
