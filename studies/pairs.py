"""A head on a table of pairs teaches `words` to spell, without the reward that reads: the share of
unseen words that is spelt right before and after.

Two pictures of a training prompt by the base; the reader of the recipe chooses, one pair in ten at
random, and pairs that it rates alike are drawn anew. The reward `pairs` has half the weight of the
other rewards together, and training 20,000 network evaluations, a backward pass counted as two.

    python -m studies.pairs --out studies/results/pairs_small.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from g2rpo import api
from g2rpo.config.read import load_config
from g2rpo.config.work import iterations_within
from g2rpo.core.files import write_whole
from g2rpo.core.images import to_pil
from g2rpo.core.noise import generator_for
from g2rpo.data.prompts import build_prompts
from g2rpo.rewards.catalogue import build_rewards

PAIRS, BUDGET, WRONG, SHARE = 50, 20_000, 0.1, 0.5
AT_ONCE = 64
"""Pairs that are drawn at a time."""


def make(seed: int, out: Path) -> Path:
    """Writes the pairs below `out`; returns the path of pairs.jsonl."""
    config = load_config("words", [])
    prompts = build_prompts(config.prompts.train, "prompts.train")
    reader = build_rewards({"ocr": config.rewards["ocr"]})["ocr"]
    painter = api.trainer("words", run_dir=None)
    order = torch.randperm(len(prompts), generator=generator_for(seed, "pairs")).tolist()
    out.mkdir(parents=True)
    rows: list[dict[str, str]] = []
    for start in range(0, len(order), AT_ONCE):
        asked = [prompts[place] for place in order[start : start + AT_ONCE] for _ in range(2)]
        images = painter.sample(asked, seed, 2 * start)
        values = reader.scores(images, asked).view(-1, 2)
        for place, own in enumerate(values):
            if own[0] == own[1]:
                continue
            draw = torch.rand(2, generator=generator_for(seed, "person", start + place))
            best = int(draw[1] < 0.5) if draw[0] < WRONG else int(own.argmax())
            names = [f"{len(rows):05d}_{letter}.png" for letter in "ab"]
            for name, picture in zip(names, to_pil(images[2 * place :][:2]), strict=True):
                picture.save(out / name)
            prompt = str(asked[2 * place])
            rows.append({"prompt": prompt, "chosen": names[best], "rejected": names[1 - best]})
            if len(rows) == PAIRS:
                path = out / "pairs.jsonl"
                path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
                return path
    raise ValueError(f"only {len(rows)} pairs differ")


def trained(seed: int, folder: Path) -> dict[str, float]:
    """A run on pairs that are made below `folder`."""
    others = ["rewards.ocr=", "evaluation.num_prompts=96", f"trainer.seed={seed}"]
    weight = SHARE * sum(one.weight for one in load_config("words", others).rewards.values())
    pairs = make(seed, folder / "pairs")
    head = f"rewards.people={{kind: pairs, weight: {weight:g}, options: {{path: {pairs}}}}}"
    config = load_config("words", [*others, head])
    count = iterations_within(config, BUDGET)
    lengths = [f"trainer.iterations={count}", f"evaluation.every={count}"]
    trainer = api.trainer("words", [*others, head, *lengths], folder / "run")
    list(trainer.train())
    base, now = trainer.base, trainer.final
    assert base is not None and now is not None
    assert base.right is not None and now.right is not None
    return {
        "seed": seed,
        "pairs": PAIRS,
        "iterations": count,
        "before": float(base.right.nanmean()),
        "after": float(now.right.nanmean()),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43])
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    given, rows = arguments(), []
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(trained(seed, Path(folder)))
        print(json.dumps(rows[-1]), flush=True)
        write_whole(given.out, (json.dumps(rows, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
