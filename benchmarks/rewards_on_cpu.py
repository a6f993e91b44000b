"""Seconds of one CPU core for a picture that a reward scores, and FLOP/s: `CORE` of
`lab.plan.seconds` and the cost of `ocr`.

    OMP_NUM_THREADS=1 python -m benchmarks.rewards_on_cpu    # a minute, 8 GB, no download

Random weights of the published architectures in float32; OCR has its own. Seconds are the
process's, for other programs may share the machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from g2rpo.lab.plan.models import count_flops
from g2rpo.rewards.clip import PickScore
from g2rpo.rewards.image_reward import ImageReward
from g2rpo.rewards.ocr import OCR

CALLS = 5


def seconds(call: Callable[[], Any]) -> float:
    """The median of `CALLS`, after one more."""
    taken = []
    for _ in range(CALLS + 1):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return median(taken[1:])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    arguments()
    torch.set_num_threads(1)
    for name, kind, path in (
        ("ViT-H-14 (pickscore, hpsv2, clip_score)", PickScore, "yuvalkirstain/PickScore_v1"),
        ("image_reward", ImageReward, "THUDM/ImageReward"),
    ):
        options = {"path": path}
        with torch.device("meta"):
            shapes = kind.model_of(options)
            assert shapes is not None
            flops = count_flops(shapes.networks, shapes.score)
        model = kind.model_of(options)
        assert model is not None
        took = seconds(model.score)
        print(f"{name}: {took:.2f} s, {flops / took / 1e9:.0f} GFLOP/s")
    pictures = iter(torch.rand(2 * (CALLS + 1), 1, 3, 512, 512))  # each is read once
    for detect in (True, False):
        reward = OCR(detect=detect)
        took = seconds(lambda reward=reward: reward(next(pictures), ['a sign "HELLO"']))  # type: ignore[misc]
        print(f"ocr, detect={detect}: {took:.3f} s")


if __name__ == "__main__":
    main()
