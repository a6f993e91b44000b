"""What `g2rpo plan` computes for calls, beside what others have measured and what was measured
here.

    OMP_NUM_THREADS=1 python -m benchmarks.published_times --out benchmarks/results/published_times.json    # a minute
    OMP_NUM_THREADS=1 python -m benchmarks.published_times --fit     # fits the constants of `lab.plan.kernels` on one half

`published_times.json` has the figures. Before the first fit they were sorted by card, by kind and
by the SHA-256 of what they said; every second one was held out. So are all that were measured in
2026-11-27's hour on an H200. Those `collected` later were split in the same way before the next fit
(`halved`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from g2rpo.config.read import load_config
from g2rpo.config.schema import Config
from g2rpo.lab.plan import fake_tensors
from g2rpo.lab.plan.cards import CARDS, Card
from g2rpo.lab.plan.counting import count, settled
from g2rpo.lab.plan.kernels import RATES, Rates
from g2rpo.lab.plan.trace import TracedCall, trace_calls
from g2rpo.models import catalogue
from g2rpo.models.blueprint import Blueprint, read_blueprint
from g2rpo.models.blueprint import published as published_blueprint

MORE_CARDS = {
    "l20": Card("NVIDIA L20", 44.5, 119.5, 59.8, 864, 275, 96, False, "L20$"),
    "gb200": Card("NVIDIA GB200", 178.3, 2450, 80, 8000, 1200, 126, True, "GB200", hopper=True),
    "gb300": Card("NVIDIA GB300", 267.7, 2500, 80, 8000, 1400, 126, True, "GB300", hopper=True),
}
RECIPES = {
    "flux": "flux1-dev-lora",
    "klein": "flux2-klein-lora",
    "qwen": "qwen-image-lora",
    "sd35": "sd35-medium-lora",
    "wan": "wan-lora",
    "z-image": "z-image-lora",
}
RELATED: dict[str, tuple[str, str, str | None, dict[str, Any]]] = {
    "schnell": ("flux", "black-forest-labs/FLUX.1-schnell", None, {}),
    "sd35-large": ("sd35", "stabilityai/stable-diffusion-3.5-large", None, {}),
    "sd3": (
        "sd35",
        "stabilityai/stable-diffusion-3-medium-diffusers",
        "SD3Transformer2DModel",
        {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536}
        | {"pos_embed_max_size": 192},
    ),
    "flux2-dev": (
        "klein",
        "black-forest-labs/FLUX.2-klein-base-4B",  # whose pipeline gives no guidance to embed
        "Flux2Transformer2DModel",
        {"guidance_embeds": False},
    ),
    "wan-14b": ("wan", "Wan-AI/Wan2.1-T2V-14B-Diffusers", "WanTransformer3DModel", {}),
    "chroma": ("flux", "lodestones/Chroma1-HD", "ChromaTransformer2DModel", {}),
    "krea2": ("qwen", "krea/Krea-2-Raw", "Krea2Transformer2DModel", {}),
    "lumina2": (
        "flux",
        "Alpha-VLLM/Lumina-Image-2.0",
        "Lumina2Transformer2DModel",
        {"cap_feat_dim": 2304},
    ),
}
"""Models without a recipe: the one whose recipe they take, with its other parts; their id; the
class of their transformer, and what is not its default, unless the blueprint is known."""
AS_PUBLISHED = {
    "flux": ["policy.lora_targets=[proj_out]"],
    "klein": ["policy.lora_targets=[proj_out]", "policy.guidance_scale=1"],
    "qwen": ["policy.lora_targets=[proj_out]", "policy.max_sequence_length=128"],
    "sd35": ["policy.lora_targets=[proj_out]"],
    "wan": ["policy.lora_targets=[proj_out]", "policy.num_frames=81"],
}
"""As diffusers' own pipelines compute: without autocast and, but for one layer, without
adapters."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """`seconds` of `calls` calls, as measured; `outside` what encoding and decoding take of them,
    estimated. `note`: what the figure used. `overrides` of the recipe; without them the call is as
    diffusers' own."""

    card: str
    model: str
    width: int
    height: int
    what: str
    rows: int
    compiled: bool
    attention: str
    seconds: float
    calls: float
    outside: float
    note: str
    source: str
    held_out: bool
    overrides: tuple[str, ...] | None = None
    collected: str = ""

    @property
    def measured(self) -> float:
        return (self.seconds - self.outside) / self.calls


def published() -> list[Published]:
    rows = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return [
        Published(**{**row, "overrides": tuple(row["overrides"]) if "overrides" in row else None})
        for row in rows
    ]


def halved(rows: Sequence[Published]) -> list[bool]:
    """Whether each is held out: every second one, sorted by card, kind and the SHA-256 of its model,
    size, rows, seconds and source."""

    def order(i: int) -> tuple[str, str, str]:
        row = rows[i]
        name = f"{row.model} {row.width} {row.height} {row.rows} {row.seconds} {row.source}"
        return row.card, row.what, hashlib.sha256(name.encode()).hexdigest()

    held = {i: bool(place % 2) for place, i in enumerate(sorted(range(len(rows)), key=order))}
    return [held[i] for i in range(len(rows))]


def blueprint_for(config: Config, model: str) -> Blueprint:
    """The published blueprint, or that of a related model with its own transformer."""
    _, path, transformer, options = RELATED.get(model, ("", "", None, {}))
    if transformer is None:
        return read_blueprint(config.policy)
    base = published_blueprint(load_config(RECIPES[RELATED[model][0]], []).policy.path)
    found = catalogue.model_of(path)
    assert base is not None and found is not None
    parts = {**base.parts, "transformer": (f"diffusers:{transformer}", options)}
    return replace(base, kind=found[0].pipeline_class, parts=parts, options={})


@cache
def traced(
    model: str,
    size: tuple[int, int],
    rows: int,
    what: str,
    overrides: tuple[str, ...] | None,
) -> TracedCall:
    """The call on tensors without data. Our own figures are of torch 2.11, whose autocast leaves
    RMS norms in bfloat16."""
    options = [f"policy.width={size[0]}", f"policy.height={size[1]}", f"sampling.batch_size={rows}"]
    like, path = RELATED[model][:2] if model in RELATED else (model, None)
    if path is not None:
        known = catalogue.model_of(path)
        assert known is not None
        options += [f"policy.path={path}", f"policy.pipeline={known[0].pipeline_class}"]
    if overrides is None:
        options += ["policy.autocast=false", "policy.lora_rank=1", *AS_PUBLISHED[like]]
    else:
        options += ["policy.autocast=true", *overrides]
    config = settled(load_config(RECIPES[like], options), cuda=True)
    with patch.object(
        fake_tensors, "FLOAT32_OPERATIONS", fake_tensors.FLOAT32_OPERATIONS - {"rms_norm"}
    ):
        return getattr(
            trace_calls(blueprint_for(config, model), config, count(config, 1), like_cuda=True),
            what,
        )


def planned(row: Published, rates: Rates = RATES) -> float:
    """Seconds of the call."""
    call = traced(row.model, (row.width, row.height), row.rows, row.what, row.overrides)
    card = {**CARDS, **MORE_CARDS}[row.card]
    compiled = row.compiled and row.what != "decode"
    roofline = replace(call.roofline, compiled=compiled, attention=row.attention)
    return roofline.call(card, rates, row.rows / call.rows if row.what == "velocity" else 1.0)


FITTED = (
    "hbm",
    "hbm_power",
    "gddr",
    "attention",
    "backward",
    "convolutions",
    "bandwidth",
    "compiled",
    "gap",
    "launch",
)
SPREAD_OF_PRIORS = {"bandwidth": 0.1, "compiled": 0.3}
"""Relative standard deviations of the constants around those of `Rates`; of the others 1."""


def fitted(rows: Sequence[Published]) -> Rates:
    """The constants with which the logarithms of the ratios are smallest, outliers counting
    less."""
    from scipy.optimize import least_squares

    start = np.log([getattr(RATES, name) for name in FITTED])
    widths = np.array([SPREAD_OF_PRIORS.get(name, 1.0) for name in FITTED])

    def with_numbers(logs: np.ndarray) -> Rates:
        return replace(
            RATES, **{name: float(value) for name, value in zip(FITTED, np.exp(logs), strict=True)}
        )

    def off(logs: np.ndarray) -> list[float]:
        rates = with_numbers(logs)
        ratios = [math.log(planned(row, rates) / row.measured) for row in rows]
        return [*ratios, *(0.1 * (logs - start) / widths)]

    return with_numbers(least_squares(off, start, loss="soft_l1", f_scale=0.1).x)


OWN = "benchmarks/results/"
NAMES = {
    OWN: "measured here",
    "flux-fp8-api": "flux-fp8-api",
    "devlogs": "PyTorch",
    "siliconflow": "OneDiff",
}
NAMES |= {
    "TheStage": "TheStage",
    "xDiT": "xDiT",
    "sglang": "SGLang",
    "flashdreams": "FlashDreams",
    "pruna": "Pruna",
    "VRL": "VRL",
}


def link(source: str) -> str:
    """In Markdown, from results/published_times.md."""
    name = next(
        (name for part, name in NAMES.items() if part in source), "/".join(source.split("/")[1:3])
    )
    own = source.startswith(OWN)
    return f"[{name}]({source.removeprefix(OWN) if own else f'https://{source}'})"


def table(rows: Sequence[Published]) -> Iterator[str]:
    """In Markdown."""
    yield "| card | call | measured, s | plan, s | ratio | used | source |\n|---|---|---|---|---|---|---|"
    for row in rows:
        what = f"{row.model} {row.width}x{row.height}" + (
            f", {row.what}" if row.what != "velocity" else ""
        )
        what += f", {row.rows} rows" if row.rows > 1 else ""
        what += ", compiled" * row.compiled
        plan = planned(row)
        used = ", ".join(
            filter(None, (row.attention.replace("auto", ""), row.note, *(row.overrides or ())))
        )
        figures = f"{row.measured:.3g} | {plan:.3g} | {plan / row.measured:.2f}"
        yield f"| `{row.card}` | {what} | {figures} | {used} | {link(row.source)} |"


def summary(rows: Sequence[Published]) -> str:
    ratios = np.array([planned(row) / row.measured for row in rows])
    within = int(((ratios > 0.75) & (ratios < 1.25)).sum())
    low, high = np.quantile(1 / ratios, (0.05, 0.95))
    return f"{within} of {len(rows)} within 25 %; measured / plan between {low:.2f} and {high:.2f} for nine of ten"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fit", action="store_true", help="print the constants that fit one half best"
    )
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    rows = published()
    halves = {
        name: [row for row in rows if row.held_out == held]
        for name, held in (("fitted on", False), ("held out", True))
    }
    if args.fit:
        rates = fitted(halves["fitted on"])
        print(
            {
                each.name: float(f"{getattr(rates, each.name):.3g}")
                for each in fields(rates)
                if each.name in FITTED
            }
        )
    for name, half in halves.items():
        print(f"\n{name}: {summary(half)}\n", *table(half), sep="\n")
    if args.out is not None:
        found = [
            {"half": name, **vars(row), "measured": row.measured, "plan": planned(row)}
            for name, half in halves.items()
            for row in half
        ]
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
