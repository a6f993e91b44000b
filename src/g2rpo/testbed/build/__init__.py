"""Trains the testbed's weights from scratch: autoencoder, CLIP, preference model, text encoders, FLUX. About an hour on two CPU
cores.

Each stage is skipped where its output already exists, so an interrupted build continues where it stopped.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from g2rpo.testbed.build.clip import build_clip
from g2rpo.testbed.build.common import Context, Log, build_dataset
from g2rpo.testbed.build.figures import CARD, measure
from g2rpo.testbed.build.flux import build_flux
from g2rpo.testbed.build.preference import build_preference
from g2rpo.testbed.build.reading import build_readers
from g2rpo.testbed.build.vae import build_vae

__all__ = ["build"]


def build(out: Path, *, seed: int = 0, quick: bool = False, log: Log = print) -> dict[str, float]:
    """Writes `pipeline/`, `clip/`, `preference/`, `figures.json` and `README.md` into `out`; returns the figures.

    `quick` takes a few steps of everything, to see that it runs. `out/work/` keeps what only the builder needs.
    """
    ctx = Context(Path(out), seed, quick, log)
    before = torch.random.get_rng_state()
    start = time.perf_counter()

    def done(stage: str) -> None:
        log(f"{stage} done after {time.perf_counter() - start:.0f} s")

    dataset = build_dataset(ctx)
    done("world")
    vae = build_vae(ctx, dataset)
    done("vae")
    clip = build_clip(ctx, dataset)
    done("clip")
    preference = build_preference(ctx, dataset, vae, clip)
    done("preference")
    readers = build_readers(ctx)
    done("reading")
    pipe = build_flux(ctx, vae, readers)
    done("flux")
    figures = measure(ctx, vae, clip, preference, pipe)
    (ctx.out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    rows = "".join(f"| {name} | {value:.4g} |\n" for name, value in figures.items())
    (ctx.out / "README.md").write_text(CARD + rows, encoding="utf-8")
    torch.random.set_rng_state(before)
    done("build")
    return figures
