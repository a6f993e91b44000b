"""One iteration of G2RPO on FLUX.1-dev's true shape with random weights: seconds by phase and peak memory on this card.

    python -m benchmarks.true_size --out benchmarks/results/flux1-dev.json     # one large GPU; 12 B parameters in bfloat16
    python -m benchmarks.true_size --options "forecast=true" "compile=true"    # fast tails too; compiling takes minutes
    python -m benchmarks.true_size --tiny                                      # a rehearsal on any machine

Random weights cost what trained ones do. The text encoders are left out: training reads cached embeddings. Tails are exact
first, then with each of the options, by a trainer of its own that goes on with the weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.fast_tails import OPTIONS
from benchmarks.machine import describe, peak_bytes
from g2rpo.build.components import build_tail_network
from g2rpo.config.resolve import resolve
from g2rpo.config.schema import Config
from g2rpo.policies.embeddings import CachedEncoder, CachedPolicy
from g2rpo.policies.flux import FluxPolicy
from g2rpo.rewards.analytic import Brightness
from g2rpo.rollout.planning import count_evaluations
from g2rpo.rollout.tails import Tails
from g2rpo.seeding import generator_for
from g2rpo.training.trainer import Trainer
from g2rpo.types import Cond

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


def random_pipeline(device: torch.device, dtype: torch.dtype, tiny: bool) -> Any:
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
        transformer=drawn(FluxTransformer2DModel, {**TRANSFORMER, **(SMALL_TRANSFORMER if tiny else {})}),
    )


def make_config(args: argparse.Namespace, tails: Tails) -> Config:
    size = 64 if args.tiny else args.size
    return resolve(
        {
            "policy": {"path": "random", "height": size, "width": size, "dtype": "bfloat16", "gradient_checkpointing": True},
            "algorithm": {"granularities": args.granularities, "group_size": 3 if args.tiny else 12},
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


def main() -> None:
    args = arguments()
    config = make_config(args, OPTIONS["exact"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    policy = FluxPolicy(
        random_pipeline(device, torch.bfloat16, args.tiny),
        height=config.policy.height,
        width=config.policy.width,
        dtype=torch.bfloat16,
        device=device,
        gradient_checkpointing=True,
        keep_base=False,
        max_sequence_length=8 if args.tiny else 512,
    )
    names = [f"prompt {i}" for i in range(args.prompts)]
    measured, evaluations = [], {}
    for option in dict.fromkeys(["exact", *args.options]):
        tails = OPTIONS[option]
        config = make_config(args, tails)
        network = build_tail_network(policy, tails)
        reward = {"brightness": Brightness()}
        trainer = Trainer(
            config=config,
            policy=CachedPolicy(policy, CachedEncoder(RandomText(policy), None, notify=print)),
            rewards=reward,
            prompts=names,
            heldout=names,
            tail_network=network,
        )
        evaluations[option] = count_evaluations(trainer.plans(), config.algorithm.group_size, tails)
        for _ in range(config.trainer.iterations):
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            row = {"tails": option, **trainer.iterate(), "peak_gib": peak_bytes(device) / 2**30}
            measured.append(row)
            print(json.dumps(row), flush=True)
    result = {
        "machine": describe(device),
        "arguments": {key: value for key, value in vars(args).items() if key != "out"},
        "parameters": sum(p.numel() for p in policy.pipeline.transformer.parameters()),
        "evaluations_per_prompt": evaluations,
        "iterations": measured,
    }
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def rows(text: str) -> int | str:
    """A batch size of the command line."""
    return text if text == "auto" else int(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model and small pictures")
    parser.add_argument("--size", type=int, default=720)
    parser.add_argument("--granularities", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--batch-size", type=rows, default=24, help='a number, or "auto"')
    parser.add_argument("--decode-batch-size", type=rows, default=8, help="likewise")
    parser.add_argument("--options", nargs="*", choices=OPTIONS, default=["forecast=true"], metavar="OPTION")
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
