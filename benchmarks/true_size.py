"""Iterations of G2RPO on FLUX.1-dev's true shape with random weights: seconds by phase and peaks of memory beside the plan's.

    python -m benchmarks.true_size --out benchmarks/results/flux1-dev.json     # one GPU of 80 GB; every way, nine minutes
    python -m benchmarks.true_size --ways bfloat16 --options "compile=true"    # one way, with fast tails too
    python -m benchmarks.true_size --tiny                                      # a rehearsal on any machine

Random weights cost what trained ones do. The text encoders are left out: training reads cached embeddings. A way is a set of
policy options (`WAYS`); one that this machine cannot have is recorded as refused. The first way is measured with each of the
options of tails, too.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.fast_tails import OPTIONS
from benchmarks.machine import describe, matmul_rate, peak_bytes
from g2rpo.build.components import build_tail_network, check_attention, check_quantized, pick_device, policy_options
from g2rpo.config.resolve import resolve
from g2rpo.config.schema import Config
from g2rpo.cost import blueprint
from g2rpo.cost.plan import COUNTED, make_plan
from g2rpo.errors import UserError
from g2rpo.policies.embeddings import CachedEncoder, CachedPolicy
from g2rpo.policies.flux import FluxPolicy
from g2rpo.rewards.analytic import Brightness
from g2rpo.rollout.tails import Tails
from g2rpo.runtime.devices import accelerator, empty_cache
from g2rpo.seeding import generator_for
from g2rpo.training.trainer import Trainer
from g2rpo.types import Cond

EVALUATED = COUNTED["evaluations"]
WAYS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "autocast=false": {"autocast": False},
    "attention=cudnn": {"autocast": False, "attention": "cudnn"},
    "attention=flash3": {"autocast": False, "attention": "flash3"},
    "quantize=int8": {"autocast": False, "quantize": "int8"},
    "quantize=fp8": {"autocast": False, "quantize": "fp8"},
    "quantize=nf4": {"autocast": False, "quantize": "nf4"},
}
TRANSFORMER = {
    "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128, "num_attention_heads": 24,
    "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True, "axes_dims_rope": (16, 56, 56),
}  # fmt: skip
VAE = {
    "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16, "norm_num_groups": 32,
    "scaling_factor": 0.3611, "shift_factor": 0.1159, "use_quant_conv": False, "use_post_quant_conv": False,
    "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
}  # fmt: skip
SMALL_TRANSFORMER = {
    "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32,
    "pooled_projection_dim": 16, "axes_dims_rope": (4, 6, 6),
}  # fmt: skip
SMALL_VAE = {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "layers_per_block": 1}


class RandomText:
    """Random embeddings of the true shape, in the place of text encoders."""

    def __init__(self, policy: FluxPolicy) -> None:
        self.policy, self.device = policy, policy.device

    def park(self) -> None:
        """There is nothing to move."""

    def encode(self, prompts: Sequence[str]) -> Cond:
        policy = self.policy
        config = policy.pipeline.transformer.config
        shapes = {
            "sequence": (policy.max_sequence_length, config.joint_attention_dim),
            "pooled": (config.pooled_projection_dim,),
        }
        draws = {
            name: torch.stack([torch.randn(shape, generator=generator_for(prompt, name)) for prompt in prompts])
            for name, shape in shapes.items()
        }
        return Cond({name: value.to(policy.device, policy.dtype) for name, value in draws.items()})


def random_pipeline(device: torch.device, dtype: torch.dtype, tiny: bool, **changes: int) -> Any:
    """A FluxPipeline of FLUX.1-dev's shape, drawn on the device itself: 24 GB never pass through the host."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    def drawn(kind: Any, config: dict[str, Any]) -> Any:
        with torch.device("meta"):
            model = kind(**config)
        model = model.to(dtype).to_empty(device=device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.5 * parameter[0].numel() ** -0.5)
                else:
                    parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        return model

    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=False),
        vae=drawn(AutoencoderKL, {**VAE, **(SMALL_VAE if tiny else {})}),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=drawn(FluxTransformer2DModel, {**TRANSFORMER, **(SMALL_TRANSFORMER if tiny else {}), **changes}),
    )


def make_config(args: argparse.Namespace, way: str, tails: Tails) -> Config:
    size = 64 if args.tiny else args.size
    return resolve(
        {
            "policy": {
                "path": "random",
                "height": size,
                "width": size,
                "dtype": "bfloat16",
                "device": args.device,
                "gradient_checkpointing": True,
                "max_sequence_length": 8 if args.tiny else 512,
                **WAYS[way],
            },
            "algorithm": {
                "branch_steps": args.branch_steps,
                "granularities": args.granularities,
                "group_size": 3 if args.tiny else 12,
            },
            "rewards": {"brightness": 1.0},
            "prompts": {"train": "none"},
            "sampling": {
                "num_steps": 16,
                "batch_size": args.batch_size,
                "decode_batch_size": args.decode_batch_size,
                "tails": tails,
            },
            "optim": {"learning_rate": 1e-4},
            "trainer": {"iterations": args.iterations, "prompts_per_iteration": args.prompts, "micro_batch_size": 4},
            "evaluation": {"prompts": "none"},
        }
    )


def planned(args: argparse.Namespace, config: Config) -> dict[str, int]:
    """The peaks that `g2rpo plan` gives for a run of this config on a GPU."""
    transformer = {**TRANSFORMER, **(SMALL_TRANSFORMER if args.tiny else {})}
    parts = {"transformer": ("diffusers:FluxTransformer2DModel", transformer)}
    parts |= {"vae": ("diffusers:AutoencoderKL", {**VAE, **(SMALL_VAE if args.tiny else {})})}
    with patch.dict(blueprint.PUBLISHED, random=blueprint.Blueprint("FluxPipeline", parts)):
        plan = make_plan(config, cuda=True, heldout=1, distinct_prompts=args.prompts)
    return {
        "bytes": max(plan.memory.moments[moment] for moment in ("rollout", "decoding", "update")),
        "evaluations": plan.counts.mean(EVALUATED),
    }


def iterations(args: argparse.Namespace, policy: FluxPolicy, config: Config) -> list[dict[str, Any]]:
    """The log of every iteration, with the peak of memory in it."""
    device, names = policy.device, [f"prompt {i}" for i in range(args.prompts)]
    trainer = Trainer(
        config=config,
        policy=CachedPolicy(policy, CachedEncoder(RandomText(policy), None, notify=print)),
        rewards={"brightness": Brightness()},
        prompts=names,
        heldout=names,
        tail_network=build_tail_network(policy, config.sampling.tails),
    )
    found = []
    for _ in range(config.trainer.iterations):
        if (module := accelerator(device)) is not None:
            module.reset_peak_memory_stats(device)
        found.append({**trainer.iterate(), "peak_bytes": peak_bytes(device)})
    return found


def measured(args: argparse.Namespace, way: str) -> dict[str, Any]:
    """Iterations with exact tails and, by the first of the ways, with each of the options."""
    device = torch.device(pick_device(args.device))
    config = make_config(args, way, OPTIONS["exact"])
    try:
        check_quantized(config)
        check_attention(config.policy)
    except UserError as error:
        return {"refused": str(error)}
    _, options = policy_options(config.policy, "FluxPipeline", device=str(device))
    policy = FluxPolicy(random_pipeline(device, torch.bfloat16, args.tiny), **options)
    found: dict[str, Any] = {"plan": planned(args, config)}
    for option in dict.fromkeys(["exact", *(args.options if way == args.ways[0] else [])]):
        found[option] = iterations(args, policy, make_config(args, way, OPTIONS[option]))
        print(way, option, json.dumps(found[option][-1]), flush=True)
    return found


def main(given: Sequence[str] | None = None) -> None:
    args, began = arguments(given), time.monotonic()
    device = torch.device(pick_device(args.device))
    result: dict[str, Any] = {
        "machine": describe(device),
        "arguments": {key: value for key, value in vars(args).items() if key != "out"},
        "matmul_flops": matmul_rate(torch.bfloat16, device, seconds=0.1 if args.tiny else 2.0),
        "ways": {},
    }
    for way in args.ways:
        if time.monotonic() - began > 60 * args.minutes:
            result["ways"][way] = {"refused": f"{args.minutes} minutes were over"}
        else:
            result["ways"][way] = measured(args, way)
        gc.collect()
        empty_cache()
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")


def rows(text: str) -> int | str:
    """A batch size of the command line."""
    return text if text == "auto" else int(text)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model and small pictures")
    parser.add_argument("--size", type=int, default=720)
    parser.add_argument("--granularities", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--batch-size", type=rows, default=24, help='a number, or "auto"')
    parser.add_argument("--decode-batch-size", type=rows, default=8, help="likewise")
    parser.add_argument("--branch-steps", type=int, nargs="+", default=[3])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--options", nargs="*", choices=OPTIONS, default=["forecast=true"], metavar="OPTION")
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=8.0, help="no further way is begun after so many")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
