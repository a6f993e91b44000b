"""What `g2rpo plan` computes for calls of FLUX.1-dev, beside what others have measured.

OMP_NUM_THREADS=1 python -m benchmarks.published_times --out benchmarks/results/published_times.json    # a minute
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g2rpo.assembly.blueprint import read_blueprint
from g2rpo.assembly.config import load_config
from g2rpo.lab.plan.cards import CARDS, Card
from g2rpo.lab.plan.counting import count, settled
from g2rpo.lab.plan.roofline import USUAL_SHARES
from g2rpo.lab.plan.trace import trace_calls

L20 = Card("NVIDIA L20", 44.5, 119.5, 239, 59.8, 864, "L20$")
DEVLOG = "docs.pytorch.org/devlogs/inductor/2026-05-11-torch-compile-and-diffusers"


@dataclass(frozen=True)
class Published:
    """`seconds` of `steps` calls of one picture, as measured; `outside` what encoding and decoding take of them, estimated."""

    source: str
    card: Card
    size: int
    compiled: bool
    steps: int
    seconds: float
    outside: float = 0.0


PUBLISHED = (
    Published(DEVLOG, CARDS["h100"], 1024, False, 28, 6.7, 0.15),
    Published(DEVLOG, CARDS["h100"], 1024, True, 28, 4.5, 0.15),
    Published("huggingface.co/datasets/diffusers/benchmarks", CARDS["l40s"], 1024, False, 1, 0.493),
    Published("huggingface.co/datasets/diffusers/benchmarks", CARDS["l40s"], 1024, True, 1, 0.374),
    Published("pruna.ai/blog/comparison-flux-torch-compile-tensor-rt-pruna", CARDS["l40s"], 512, False, 50, 8.71, 0.15),
    Published("github.com/xlite-dev/flux-faster", L20, 1024, False, 28, 24.94, 0.4),
    Published("github.com/xlite-dev/flux-faster", L20, 1024, True, 28, 20.24, 0.4),
)


def planned(size: int, compiled: bool, card: Card) -> float:
    """Seconds of one call for one picture, in bfloat16 and without autocast, as diffusers' own pipeline computes."""
    options = ["autocast=false", "lora_rank=1", f"height={size}", f"width={size}"]
    config = settled(load_config("flux1-dev-lora", [f"policy.{option}" for option in options]), cuda=True)
    traced = trace_calls(read_blueprint(config.policy), config, count(config, 1), like_cuda=True)
    return (traced.compiled() if compiled else traced).single.roofline.call(card, USUAL_SHARES)


def rows() -> list[dict[str, Any]]:
    found = []
    for it in PUBLISHED:
        measured, plan = (it.seconds - it.outside) / it.steps, planned(it.size, it.compiled, it.card)
        found.append(
            {
                "source": it.source,
                "card": it.card.name,
                "size": it.size,
                "compiled": it.compiled,
                "measured": measured,
                "plan": plan,
                "ratio": plan / measured,
            }
        )
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    out = arguments().out
    found = rows()
    print("| card | size | | measured, s | plan, s | plan / measured | source |\n|---|---|---|---|---|---|---|")
    for row in found:
        way = "compiled" if row["compiled"] else "eager"
        numbers = f"{row['measured']:.3f} | {row['plan']:.3f} | {row['ratio']:.2f}"
        print(f"| {row['card']} | {row['size']} | {way} | {numbers} | {row['source']} |")
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
