"""Device memory of a run by part and by phase, and its disk space."""

from __future__ import annotations

import math
from dataclasses import dataclass

from g2rpo.assembly.blueprint import Blueprint, size_of
from g2rpo.config.schema import Config
from g2rpo.core.capabilities import keeps_old
from g2rpo.lab.plan.counting import CountedIteration, Counts
from g2rpo.lab.plan.rewards import RewardCost
from g2rpo.lab.plan.trace import Calls
from g2rpo.policies.anyflow import DiffusersPolicy
from g2rpo.policies.pipelines import Shapes
from g2rpo.policies.quantized import weights_of
from g2rpo.rewards.weights import parse_dtype

CONTEXT_BYTES, SLACK = 2**30, 0.05
"""Assumed: the CUDA context and kernels' workspaces in bytes, and the allocator's gaps as a share of the peak."""
STORED = 2
"""Bytes of a parameter in published files, mostly bfloat16; those in float32 have twice as many."""


@dataclass(frozen=True, kw_only=True)
class PlannedMemory:
    """Bytes. `parts` is permanent from the first update on, `working` temporary, `moments` the peak of every phase, including
    the encoding of prompts before the optimizer exists. `needed` is the largest peak with the reserve; `host` is the host
    memory for loading. `files` are the weights of the model and of the rewards, with `STORED` bytes a parameter; `written` are
    the checkpoints that are there at a time, and the final weights.
    """

    parts: dict[str, int]
    working: dict[str, int]
    moments: dict[str, int]
    needed: int
    host: int
    files: dict[str, int]
    written: int
    checkpoint: int
    embeddings: int
    unknown: tuple[str, ...]
    """Rewards of unknown size."""


def plan_memory(
    config: Config,
    blueprint: Blueprint,
    policy: DiffusersPolicy,
    shapes: Shapes,
    reward_costs: dict[str, RewardCost | None],
    counts: Counts,
    traced: Calls,
    *,
    cuda: bool,
    distinct_prompts: int,
    ranks: int = 1,
    group: int = 1,
) -> PlannedMemory:
    """The memory of a rank in a run of `config`, whose policy on the meta device is `policy`; weights are divided over `group`.

    Of the three numbers beside the device's, `host` is of the `ranks` of a node, which share one copy of what is mapped from
    its files, in the dtype in which it is stored (assumed: that of calls); `checkpoint` and `embeddings` are the run's.
    """
    whole = trained_parts(config, policy)
    trained = {kind: {part: _piece(config, size, group) for part, size in sizes.items()} for kind, sizes in whole.items()}
    encoders = sum(size_of(getattr(policy.pipeline, name)) for name in blueprint.parts if name.startswith("text_encoder"))
    parked = cuda and config.prompts.cache != "off"  # used first and then moved off the device; on a CPU they stay
    always = {
        **trained["weights"],
        "VAE": size_of(policy.pipeline.vae),
        **_reward_models(reward_costs, "cuda" if cuda else "cpu"),
        **_other_networks(config, policy, group),
    }
    after = {**trained["optimizer"], **({} if parked else {"text encoders": encoders})}
    kept, finals = _latents(config, counts, shapes)
    work = {"latents": kept, "prompt embeddings": counts.prompts_drawn * _row(policy, shapes)}
    layers, sampled = _gathered(config, policy)
    working = {
        **work,
        "finished latents, as rows": finals,
        **({"gathered layers": layers} if layers else {}),
        **({"all weights, gathered to sample": sampled} if config.trainer.sharding == "training" else {}),
        "network call": traced.velocity.peak,
        "decoding": traced.decode.peak,
        "training pass": traced.training.peak,
        "optimizer step": 0 if cuda or config.trainer.sharding != "none" else _optimizer_scratch(policy),
        **({"averaged weights swapped in": trained["weights"]["trained weights"]} if config.optim.ema_decay else {}),
    }
    stays = sum(always.values()) + sum(after.values())
    held = stays + sum(work.values())  # without what only a rollout and decoding have: `finals` a second time, as rows
    sampling = max(traced.heldout.peak, traced.judged.peak)
    moments = {
        "encoding prompts": encoders if parked else sum(always.values()) + encoders,
        "rollout": held + finals + sampled + traced.velocity.peak,
        "decoding": held + finals + working.get("all weights, gathered to sample", 0) + traced.decode.peak,
        "update": held + max(2 * layers + traced.training.peak, working["optimizer step"]),  # layers, and gradients of layers
        "evaluation": stays + working.get("averaged weights swapped in", 0) + sampled + sampling,
    }
    peak, copies = max(moments.values()), 1 + bool(config.optim.ema_decay) + keeps_old(config.algorithm)
    frozen = [policy.pipeline.vae, *(getattr(policy.pipeline, n) for n in blueprint.parts if n.startswith("text_encoder"))]
    networks = sum(map(weights_of, (policy.transformer, *policy.frozen.values())))
    scored_by = sum(it.bytes // parse_dtype(it.dtype).itemsize for it in reward_costs.values() if it is not None)
    final = whole["weights"]["trained weights"]
    checkpoint = copies * final + whole["optimizer"]["moments"]
    return PlannedMemory(
        parts={**always, **after},
        working=working,
        moments=moments,
        needed=math.ceil(peak * (1 + SLACK)) + CONTEXT_BYTES if cuda else peak,
        host=_loaded(config, policy) + size_of(policy.pipeline.vae) + encoders + ranks * _converted(config, policy),
        files={
            "the model": STORED * (networks + sum(p.numel() for part in frozen for p in part.parameters())),
            "the rewards": STORED * scored_by,
        },
        written=(config.trainer.keep_checkpoints + 1) * checkpoint + final,  # those that are kept, and the next one
        checkpoint=checkpoint,
        embeddings=distinct_prompts * _row(policy, shapes) if config.prompts.cache != "off" else 0,
        unknown=tuple(name for name, known in reward_costs.items() if known is None),
    )


def trained_parts(config: Config, policy: DiffusersPolicy) -> dict[str, dict[str, int]]:
    """Bytes of the transformer's weights, frozen and trained, and of the optimizer's state.

    Trained weights are float32, and with them gradients (kept from one update to the next), AdamW's two moments and its
    step counter (4 bytes for every tensor), and the moving average and the old weights where there are such.
    """
    parameters = policy.trainable_parameters()
    trained = sum(p.nbytes for p in parameters)
    optimizer = {"gradients": trained, "moments": 2 * trained + 4 * len(parameters)}
    if config.optim.ema_decay:
        optimizer["moving average"] = trained
    if keeps_old(config.algorithm):
        optimizer["old weights"] = trained
    frozen = size_of(policy.transformer) - trained
    return {"weights": {"frozen weights": frozen, "trained weights": trained}, "optimizer": optimizer}


def _reward_models(costs: dict[str, RewardCost | None], device: str) -> dict[str, int]:
    """Bytes of the rewards whose size is known on a device."""
    return {
        f"reward {name}": known.bytes
        for name, known in costs.items()
        if known is not None and known.bytes and known.device.removesuffix(":0") == device
    }


def _other_networks(config: Config, policy: DiffusersPolicy, group: int) -> dict[str, int]:
    """Bytes of the transformers that a run keeps beside the policy's."""
    networks = {}
    if config.policy.tuning == "full" and config.algorithm.uses_base:
        copy = sum(p.numel() for p in policy.trainable_parameters()) * policy.dtype.itemsize
        networks["base copy for the KL term"] = _piece(config, copy, group)
    if policy.frozen:
        networks["frozen expert"] = sum(map(size_of, policy.frozen.values()))
    return networks


def _loaded(config: Config, policy: DiffusersPolicy) -> int:
    """Bytes of the transformers in host memory, as they are stored: in the dtype of their calls, with adapters."""
    networks = policy.transformer, *policy.frozen.values()
    if config.policy.tuning == "full" or config.policy.quantize != "none":  # the device converts
        return sum(map(weights_of, networks)) * policy.dtype.itemsize
    return sum(map(size_of, networks))


def _converted(config: Config, policy: DiffusersPolicy) -> int:
    """Bytes that a rank needs of its own in host memory: the block that it converts to float32 before it is divided."""
    if config.trainer.sharding == "none":
        return 0
    return max(sum(p.numel() for p in block.parameters()) for block in policy.blocks) * 4


def _piece(config: Config, size: int, group: int) -> int:
    """One rank's share of `size` bytes of trained weights or of their gradients and moments."""
    return size if config.trainer.sharding == "none" else math.ceil(size / group)


def _gathered(config: Config, policy: DiffusersPolicy) -> tuple[int, int]:
    """Bytes that a rank gathers with sharded weights: in a call, and while it samples. A call holds one block, the prefetched
    next one, and the weights outside the blocks.
    """
    if config.trainer.sharding == "none":
        return 0, 0
    everything = in_calls_dtype(policy)
    blocks = [sum(p.numel() for p in block.parameters()) * policy.dtype.itemsize for block in policy.blocks]
    layers = min(everything, everything - sum(blocks) + 2 * max(blocks))
    return layers, everything if config.trainer.sharding == "training" else layers


def in_calls_dtype(policy: DiffusersPolicy) -> int:
    """Bytes of the transformer's weights in the dtype of its calls."""
    return sum(p.numel() for p in policy.transformer.parameters()) * policy.dtype.itemsize


def _optimizer_scratch(policy: DiffusersPolicy) -> int:
    """Temporary bytes of an AdamW step that is not fused: a square root of the second moments of one tensor after the other."""
    return max(p.nbytes for p in policy.trainable_parameters())


def _latents(config: Config, counts: Counts, shapes: Shapes) -> tuple[int, int]:
    """Bytes of the latents of a rollout, and of the finals among them: for every group a branch point with its velocity, two
    latents for every member and stochastic step, and the finals."""
    group = config.algorithm.group_size

    def finals(iteration: CountedIteration) -> list[int]:
        return [sum(group * len(plan.tails) for plan in iteration.plans)]

    def rows(iteration: CountedIteration) -> list[int]:
        return [sum(2 + group * (2 * len(plan.stochastic) + len(plan.tails)) for plan in iteration.plans)]

    candidates = 2 * counts.prompts_drawn if counts.prompts_drawn > counts.prompts else 0
    kept = counts.prompts * counts.largest(rows) + candidates
    return kept * shapes.latent_bytes, counts.prompts * counts.largest(finals) * shapes.latent_bytes


def _row(policy: DiffusersPolicy, shapes: Shapes) -> int:
    """One prompt's embedding, in the encoders' dtype."""
    return sum(math.prod(shape) for shape in shapes.cond.values()) * policy.dtype.itemsize
