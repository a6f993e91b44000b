"""A simulated person teaches `words` to spell by clicks, without the reward that reads: the share of
unseen words that is spelt right before and after.

The person's utility of a picture is its score by the reader, in standard deviations within a group,
and noise of .3. The person clicks on all pictures that are half a deviation better than the group's
mean, or on the best one alone; one group in ten gets a single random click. Groups whose words are all spelt alike are answered
with none.

    python -m studies.teach --out studies/results/teach_small.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from g2rpo.config.read import load_config
from g2rpo.core.files import write_whole
from g2rpo.core.noise import generator_for
from g2rpo.lab.teach.command import opened
from g2rpo.rewards.catalogue import build_rewards

GROUPS, NOISE, WRONG, LIKED = 12, 0.3, 0.1, 0.5


def click(values: Tensor, round: int, seed: int, several: bool) -> list[int]:
    """The pictures that a person likes, whose reader gives these values; none where all are
    alike."""
    if values.max() == values.min():
        return []
    draw = generator_for(seed, "person", round)
    noise = NOISE * torch.randn(len(values), generator=draw)
    utility = (values - values.mean()) / values.std() + noise
    if float(torch.rand((), generator=draw)) < WRONG:
        return [int(torch.randint(len(values), (), generator=draw))]
    liked = (utility > LIKED).nonzero().flatten().tolist()
    return liked if several else [int(utility.argmax())]


def taught(seed: int, several: bool, folder: Path) -> dict[str, float]:
    """A session of `GROUPS` groups."""
    reader = build_rewards({"ocr": load_config("words", []).rewards["ocr"]})["ocr"]
    overrides = ["rewards.ocr=", f"trainer.seed={seed}"]
    clicks = 0
    with opened("words", overrides, folder) as session:
        for _ in range(GROUPS):
            group = session.group
            values = reader.scores(group.images, [group.prompt] * len(group.images)).float()
            liked = click(values, group.round, seed, several)
            clicks += len(liked)
            session.answer(liked, round=group.round)
        session.finish()
        base, now = session.trainer.base, session.trainer.final
    assert base is not None and now is not None
    assert base.right is not None and now.right is not None
    return {
        "seed": seed,
        "several": several,
        "groups": GROUPS,
        "clicks": clicks,
        "iterations": session.trainer.iteration,
        "before": float(base.right.nanmean()),
        "after": float(now.right.nanmean()),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    given, rows = arguments(), []
    for several, seed in product((True, False), given.seeds):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(taught(seed, several, Path(folder) / "run"))
        print(json.dumps(rows[-1]), flush=True)
        write_whole(given.out, (json.dumps(rows, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
