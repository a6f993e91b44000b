"""Builds the weights of the testbed's words from nothing: autoencoder, readers, FLUX. About 20 minutes on one core.

Each stage is skipped where its output already exists, so an interrupted build continues where it stopped.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from g2rpo.testbed.build.common import Context, Log
from g2rpo.testbed.build.words.figures import CARD, measure
from g2rpo.testbed.build.words.flux import build_flux
from g2rpo.testbed.build.words.reading import build_readers
from g2rpo.testbed.build.words.vae import build_vae

__all__ = ["build"]


def build(out: Path, *, seed: int = 0, quick: bool = False, log: Log = print) -> dict[str, float]:
    """Writes `pipeline/`, `figures.json` and `README.md` into `out`; returns the figures."""
    ctx = Context(Path(out), seed, quick, log)
    before = torch.random.get_rng_state()
    vae = build_vae(ctx)
    pipe = build_flux(ctx, vae, build_readers(ctx))
    figures = measure(ctx, vae, pipe)
    (ctx.out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    rows = "".join(f"| {name} | {value:.4g} |\n" for name, value in figures.items())
    (ctx.out / "README.md").write_text(CARD + rows, encoding="utf-8")
    torch.random.set_rng_state(before)
    return figures
