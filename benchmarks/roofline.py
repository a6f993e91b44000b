"""What a network call of a recipe takes on a card by its roofline: products, attention, and reading
and writing between them.

    OMP_NUM_THREADS=1 python -m benchmarks.roofline --out benchmarks/results/roofline.json    # two minutes of one core

A derivation, not a measurement: a call is traced on tensors without data, and timed by
`g2rpo.lab.plan.kernels`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from g2rpo.config.read import load_config
from g2rpo.lab.plan.cards import find_card
from g2rpo.lab.plan.counting import count, settled
from g2rpo.lab.plan.kernels import ATTENTION, PRODUCTS, RATES, Roofline
from g2rpo.lab.plan.trace import trace_calls
from g2rpo.models.blueprint import read_blueprint

WAYS: dict[str, list[str]] = {
    "autocast": ["policy.autocast=true"],
    "autocast=false": ["policy.autocast=false"],
    "quantize=int8": ["policy.autocast=false", "policy.quantize=int8"],
}


def calls(recipe: str, overrides: Sequence[str], training: bool) -> Iterator[tuple[str, Roofline]]:
    """The calls of a recipe, by name: a rollout's at its batch size, and the training pass at its
    own."""
    config = settled(load_config(recipe, overrides), cuda=True)
    traced = trace_calls(read_blueprint(config.policy), config, count(config, 1), like_cuda=True)
    yield "rollout", traced.velocity.roofline
    if training:
        yield "training", traced.training.roofline


def rows(recipe: str, device: str, training: bool, ways: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One row for every way of one recipe's calls, as it is and compiled."""
    card = find_card(device)
    first: dict[str, float] = {}
    for way in ways:
        for call, roofline in calls(recipe, WAYS[way], training):
            for compiled, made in (
                ("", roofline),
                (", compiled", replace(roofline, compiled=True)),
            ):
                row = {
                    "recipe": recipe,
                    "card": card.name,
                    "call": call,
                    "way": way + compiled,
                    **figures(made, card),
                }
                row["faster"] = first.setdefault(call, row["seconds"]) / row["seconds"]
                yield row


def figures(roofline: Roofline, card: Any) -> dict[str, Any]:
    by_kind = roofline.seconds(card)
    products, attention, seconds = by_kind[PRODUCTS], by_kind[ATTENTION], roofline.call(card)
    return {
        "flops": roofline.flops,
        "kernels": roofline.launches,
        "products": products,
        "attention": attention,
        "between": sum(by_kind.values()) - products - attention,
        "seconds": seconds,
        "arithmetic": (products + attention) / seconds,
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    """In Markdown."""
    names = ("products", "attention", "between", "seconds")
    lines = [f"| | {' | '.join(names)} | arithmetic | faster |", "|---" * 7 + "|"]
    for row in found:
        name = f"{row['recipe']}, {row['call']}, {row['way']}"
        figures = " | ".join(f"{row[key]:.2f}" for key in names)
        lines.append(f"| {name} | {figures} | {row['arithmetic']:.0%} | {row['faster']:.2f}x |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--recipes", nargs="+", default=["flux1-dev-lora", "flux2-klein-lora"], metavar="RECIPE"
    )
    parser.add_argument("--card", default="h200")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--no-training", action="store_true", help="rollouts only")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    found = [
        row
        for recipe in args.recipes
        for row in rows(recipe, args.card, not args.no_training, args.ways)
    ]
    print(table(found))
    if args.out is not None:
        args.out.write_text(json.dumps({"assumed": asdict(RATES), "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
