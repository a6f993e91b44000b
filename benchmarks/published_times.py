"""What `g2rpo plan` computes for calls, beside what others have measured and what was measured
here.

    OMP_NUM_THREADS=1 python -m benchmarks.published_times --out benchmarks/results/published_times.json    # a minute
    OMP_NUM_THREADS=1 python -m benchmarks.published_times --fit     # fits the constants of `lab.plan.kernels` on one half

`published_times.json` has the figures. Before the first fit they were sorted by card, by kind and
by the SHA-256 of what they said; every second one was held out. So are all that were measured later.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np

from g2rpo.config.read import load_config
from g2rpo.lab.plan import fake_tensors
from g2rpo.lab.plan.cards import CARDS, Card
from g2rpo.lab.plan.counting import count, settled
from g2rpo.lab.plan.kernels import RATES, Rates
from g2rpo.lab.plan.trace import TracedCall, trace_calls
from g2rpo.models.blueprint import read_blueprint

MORE_CARDS = {
    "l20": Card("NVIDIA L20", 44.5, 119.5, 59.8, 864, 275, 96, False, "L20$"),
    "gb200": Card("NVIDIA GB200", 178.3, 2450, 80, 8000, 1200, 126, True, "GB200", hopper=True),
}
RECIPES = {
    "flux": "flux1-dev-lora",
    "klein": "flux2-klein-lora",
    "qwen": "qwen-image-lora",
    "sd35": "sd35-medium-lora",
    "wan": "wan-lora",
    "z-image": "z-image-lora",
}
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

    @property
    def measured(self) -> float:
        return (self.seconds - self.outside) / self.calls


def published() -> list[Published]:
    rows = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return [
        Published(**{**row, "overrides": tuple(row["overrides"]) if "overrides" in row else None})
        for row in rows
    ]


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
    if overrides is None:
        options += ["policy.autocast=false", "policy.lora_rank=1", *AS_PUBLISHED[model]]
    else:
        options += ["policy.autocast=true", *overrides]
    config = settled(load_config(RECIPES[model], options), cuda=True)
    with patch.object(
        fake_tensors, "FLOAT32_OPERATIONS", fake_tensors.FLOAT32_OPERATIONS - {"rms_norm"}
    ):
        return getattr(
            trace_calls(read_blueprint(config.policy), config, count(config, 1), like_cuda=True),
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
