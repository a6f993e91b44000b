"""What a pipeline's own call costs beside a call of its network alone: `python -m
benchmarks.replay`.

The tiny FLUX of the recipe scenes: one row, a rollout's batch of 96 rows, a training pass of 48
with LoRA, and a whole rollout of a group; that of words, 96 and 48 rows; and a block of each kind
as wide as FLUX.1-dev's (3072). The same weights, inputs and process; both ways alternate, and the
median of their ratios counts. `besides_ms` is a call whose network answers at once: all that is not
the network, which the ratios are too noisy to show.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.core.data import Cond
from g2rpo.core.flow import sigma_grid
from g2rpo.core.noise import generator_for
from g2rpo.data.testbed import pipeline_dir
from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.models.catalogue import flux
from g2rpo.models.options import PolicyConfig
from g2rpo.models.pipelines import read_pipeline
from g2rpo.rollout.engine import Engine

RESULTS = Path(__file__).parent / "results" / "replay.json"
SIZES: dict[str, dict[str, Any]] = {
    "testbed": {"height": 64, "width": 64, "max_sequence_length": 16},
    "words": {"height": 32, "width": 96, "max_sequence_length": 20},
}
WIDE = {
    "num_layers": 1,
    "num_single_layers": 1,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "axes_dims_rope": (16, 56, 56),
}


def policy_of(name: str = "testbed", wide: bool = False) -> DiffusersPolicy:
    from diffusers import FluxPipeline

    made = read_pipeline(FluxPipeline, pipeline_dir(name), torch.float32)
    if wide:
        made.transformer = FluxTransformer2DModel.from_config({**made.transformer.config, **WIDE})
    return DiffusersPolicy.of(flux)(made, PolicyConfig(path="", **SIZES[name]))


def alone(policy: DiffusersPolicy) -> Callable[[Tensor, Tensor, Cond], Tensor]:
    """The same velocity by a call of the network, with all that does not depend on x and sigma at
    hand."""
    image_ids = policy._prepared(policy.blank(1, 1), [torch.Generator()])[1]

    guided = policy.config.guidance_embeds

    def velocity(x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        answer: Tensor = policy.tuning.active(
            hidden_states=x,
            timestep=1000 * sigma / 1000,
            guidance=torch.full((len(x),), policy.guidance_scale) if guided else None,
            encoder_hidden_states=cond.tensors["prompt_embeds"],
            pooled_projections=cond.tensors["pooled_prompt_embeds"],
            txt_ids=cond.tensors["text_ids"][0],
            img_ids=image_ids,
            return_dict=False,
        )[0]
        return answer

    return velocity


def compared(
    one: Callable[[], Tensor], other: Callable[[], Tensor], repeats: int
) -> dict[str, float]:
    """Milliseconds of processor time of both; the median of their ratios."""
    assert torch.equal(one(), other())
    times: list[tuple[float, float]] = []
    for repeat in range(repeats):
        pair = {}
        for index, call in sorted(enumerate((one, other)), reverse=bool(repeat % 2)):
            began = time.process_time()
            call()
            pair[index] = 1e3 * (time.process_time() - began)
        times.append((pair[0], pair[1]))
    network, replayed = (statistics.median(each) for each in zip(*times, strict=True))
    ratio = statistics.median(after / before for before, after in times)
    return {"network_ms": network, "replayed_ms": replayed, "ratio": ratio}


def calls(
    rows: int, repeats: int, name: str = "testbed", wide: bool = False, train: bool = False
) -> dict[str, float]:
    policy = policy_of(name, wide)
    cond = policy.encode(["a red circle"] * rows)
    x, sigma = policy.noise([generator_for(i) for i in range(rows)]), torch.linspace(0.2, 0.9, rows)

    def call(velocity: Callable[[Tensor, Tensor, Cond], Tensor]) -> Tensor:
        with torch.set_grad_enabled(train):
            v = velocity(x, sigma, cond)
        if not train:
            return v
        return torch.cat(
            [
                g.flatten()
                for g in torch.autograd.grad(v.square().mean(), policy.trainable_parameters())
            ]
        )

    network = alone(policy)
    own = {} if wide or train else {"besides_ms": besides(rows, repeats, name)}
    return {
        "rows": rows,
        **compared(lambda: call(network), lambda: call(policy.velocity), repeats),
        **own,
    }


@torch.no_grad()
def besides(rows: int, repeats: int, name: str) -> float:
    """Milliseconds of processor time of a velocity whose network answers at once."""
    policy = policy_of(name)
    cond = policy.encode(["a red circle"] * rows)
    x, sigma = policy.noise([generator_for(i) for i in range(rows)]), torch.linspace(0.2, 0.9, rows)
    policy.tuning.active.forward = lambda hidden_states, **_: (hidden_states,)
    times = []
    for _ in range(20 * repeats):
        began = time.process_time()
        policy.velocity(x, sigma, cond)
        times.append(1e3 * (time.process_time() - began))
    return statistics.median(times)


def rollouts(repeats: int) -> dict[str, float]:
    """Of a group of 12 from two branch steps, with the recipe's grid and granularities."""
    policy, sigmas = policy_of(), sigma_grid(10, 3.0)
    algorithm = GranularGRPO(group_size=12, branch_steps=(0, 4), granularities=(1, 2))
    engine = Engine(
        policy=policy, cond=policy.encode(["a red circle"]), sigmas=sigmas, batch_size=96
    )

    def rollout() -> Tensor:
        done = engine.rollout(algorithm.plans(10), 12, algorithm.kernel(sigmas), generator_for)
        return torch.stack([each.finals for each in done])

    network = alone(policy)

    def with_network() -> Tensor:
        with patch.object(policy, "velocity", network):
            return rollout()

    return compared(with_network, rollout, repeats)


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    results = {
        "tiny FLUX, 1 row": calls(1, 8 * args.repeats),
        "tiny FLUX, 96 rows": calls(96, args.repeats),
        "tiny FLUX, training pass of 48 rows": calls(48, args.repeats, train=True),
        "tiny FLUX, rollout of a group": rollouts(args.repeats),
        "words, 96 rows": calls(96, args.repeats, "words"),
        "words, training pass of 48 rows": calls(48, args.repeats, "words", train=True),
        "3072 wide, 1 double and 1 single block, 1 row": calls(1, args.repeats, wide=True),
    }
    for name, result in results.items():
        print(name, {key: round(value, 3) for key, value in result.items()})
    args.out.write_text(json.dumps(results, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repeats", type=int, default=25, help="alternations (8 times as many of single rows)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results are written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
