"""Device memory of a run by part and by phase, and its disk space."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from g2rpo.config.schema import Config
from g2rpo.core.plans import Plan
from g2rpo.lab.plan.counting import Counts
from g2rpo.lab.plan.models import Model, RewardCost
from g2rpo.lab.plan.trace import Calls
from g2rpo.models.blueprint import size_of
from g2rpo.models.offload import offloaded_bytes
from g2rpo.rewards.weights import parse_dtype

CONTEXT_BYTES, SLACK = 2**30, 0.05
"""Assumed: the CUDA context and kernels' workspaces in bytes, and the allocator's gaps as a share
of the peak."""
BYTES_IN_FILES = 2
"""Bytes of a parameter in published files, mostly bfloat16; those in float32 have twice as many."""


@dataclass(frozen=True, kw_only=True)
class PlannedMemory:
    """Bytes. `parts` is permanent from the first update on, `working` temporary, `moments` the peak
    of every phase, including the encoding of prompts before the optimizer exists. `needed` is the
    largest peak with the reserve; `host` is the host memory for loading. `files` are the weights of
    the model and of the rewards, with `BYTES_IN_FILES` bytes a parameter; `written` are the checkpoints
    that are there at a time, and the final weights.
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
    model: Model,
    reward_costs: dict[str, RewardCost | None],
    counts: Counts,
    traced: Calls,
    *,
    cuda: bool,
    distinct_prompts: int,
    ranks: int = 1,
    group: int = 1,
) -> PlannedMemory:
    """The memory of a rank in a run of `config`; trained weights are divided over `group`.

    Of the three numbers beside the device's, `host` is of the `ranks` of a node, which share one
    copy of what is mapped from its files, in the dtype in which it is stored (assumed: that of
    calls); `checkpoint` and `embeddings` are the run's.

    Trained weights are float32, and with them gradients (in an update alone), AdamW's two moments
    and its step counter (4 bytes for every tensor), and the moving average and the old weights
    where there are such.
    """
    policy, shapes, trained = model.policy, model.shapes, model.trained
    sharded = config.trainer.sharding != "none"

    def piece(size: int) -> int:
        """One rank's share of trained weights, or of their gradients and moments."""
        return math.ceil(size / group) if sharded else size

    weights = sum(p.nbytes for p in trained)
    moments = 2 * weights + 4 * len(trained)
    average = weights if config.optim.ema_decay else 0
    old = weights if config.algorithm.uses_old else 0
    frozen = model.total(size_of) - weights
    away, passing = _offloaded(model) if cuda and config.policy.offload else (0, 0)
    encoders = sum(encoder.bytes for encoder in model.encoders)
    row = sum(math.prod(shape) for shape in shapes.cond.values()) * policy.dtype.itemsize
    # used first and then moved off the device; on a CPU they stay
    parked = cuda and config.prompts.cache != "off"
    copied = config.policy.tuning == "full" and config.algorithm.uses_base
    base = weights // 4 * policy.dtype.itemsize if copied else 0
    always = {
        "frozen weights": piece(frozen - away),
        "two blocks of those in host memory": passing,
        "trained weights": piece(weights),
        "VAE": size_of(policy.pipeline.vae),
        **_reward_models(reward_costs, "cuda" if cuda else "cpu"),
        "base copy for the KL term": piece(base),
    }
    after = {
        "moments": piece(moments),
        "moving average": piece(average),
        "old weights": piece(old),
        "text encoders": 0 if parked else encoders,
    }
    kept, finals = _latents(config, counts, shapes.latent_bytes)
    work = {"latents": kept, "prompt embeddings": counts.prompts * row}
    layers, everything = _gathered(config, model)
    gathered = everything if config.trainer.sharding == "training" else 0
    # not fused: a root of the second moments of one tensor
    step = 0 if cuda or sharded else max(p.nbytes for p in trained)
    working = {
        **work,
        "finished latents, as rows": finals,
        "gathered layers": layers,
        "all weights, gathered to sample": gathered,
        "network call": traced.velocity.peak,
        "decoding": traced.decode.peak,
        "gradients": piece(weights),
        "training pass": traced.training.peak,
        "optimizer step": step,
        "averaged weights swapped in": piece(average),
    }
    stays = sum(always.values()) + sum(after.values())
    # without what only a rollout and decoding have: `finals` a second time, as rows
    held = stays + sum(work.values())
    sampling = max(traced.heldout.peak, traced.judged.peak)
    peaks = {
        "encoding prompts": encoders if parked else sum(always.values()) + encoders,
        "rollout": held + finals + (gathered or layers) + traced.velocity.peak,
        "decoding": held + finals + gathered + traced.decode.peak,
        # layers, and gradients of layers
        "update": held + piece(weights) + max(2 * layers + traced.training.peak, step),
        "evaluation": stays + piece(average) + (gathered or layers) + sampling,
    }
    peak = max(peaks.values())
    checkpoint = weights + average + old + moments
    scored_by = sum(
        it.bytes // parse_dtype(it.dtype).itemsize for it in reward_costs.values() if it is not None
    )
    published = sum(each.parameters for each in model.encoders)
    published += _parameters_in(policy.pipeline.vae)
    # to float32, a block at a time
    converted = 4 * max(map(_parameters_in, policy.blocks)) if sharded else 0
    return PlannedMemory(
        parts={**always, **after},
        working=working,
        moments=peaks,
        needed=math.ceil(peak * (1 + SLACK)) + CONTEXT_BYTES if cuda else peak,
        host=_loaded(config, model) + always["VAE"] + encoders + ranks * converted,
        files={
            "the model": BYTES_IN_FILES * (model.parameters + published),
            "the rewards": BYTES_IN_FILES * scored_by,
        },
        # those that are kept, and the next one
        written=(config.trainer.keep_checkpoints + 1) * checkpoint + weights,
        checkpoint=checkpoint,
        embeddings=distinct_prompts * row if config.prompts.cache != "off" else 0,
        unknown=tuple(name for name, known in reward_costs.items() if known is None),
    )


def _offloaded(model: Model) -> tuple[int, int]:
    """Bytes of the blocks that live in host memory, and of the device's places for two of them."""
    sizes = [offloaded_bytes(block) for block in model.policy.blocks]
    away = sum(times * size for times, size in zip(model.times, sizes, strict=True))
    return away, max(sizes) * min(2, sum(model.times))


def _reward_models(costs: dict[str, RewardCost | None], device: str) -> dict[str, int]:
    """Bytes of the rewards whose size is known on a device."""
    return {
        f"reward {name}": known.bytes
        for name, known in costs.items()
        if known is not None and known.bytes and known.device.removesuffix(":0") == device
    }


def _loaded(config: Config, model: Model) -> int:
    """Bytes of the transformers in host memory, as they are stored: in the dtype of their calls,
    with adapters."""
    if config.policy.tuning == "full" or config.policy.quantize != "none":  # the device converts
        return model.parameters * model.policy.dtype.itemsize
    return model.total(size_of)


def _parameters_in(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def _gathered(config: Config, model: Model) -> tuple[int, int]:
    """Bytes that a rank with sharded weights gathers in a call, and those of all weights, in the
    dtype of calls. A call holds one block, the prefetched next one, and the weights outside the
    blocks.
    """
    if config.trainer.sharding == "none":
        return 0, 0
    size, blocks = model.policy.dtype.itemsize, [*map(_parameters_in, model.policy.blocks)]
    everything = model.total(_parameters_in)
    inside = sum(times * block for times, block in zip(model.times, blocks, strict=True))
    return size * min(everything, everything - inside + 2 * max(blocks)), size * everything


def _latents(config: Config, counts: Counts, latent: int) -> tuple[int, int]:
    """Bytes of the latents of a rollout, and of the finals among them: for every group a branch
    point with its velocity, two latents for every member and stochastic step, and the finals."""
    group = config.algorithm.group_size
    finals = counts.largest(
        lambda it: [sum((group + plan.baseline) * len(plan.tails) for plan in it.plans)]
    )

    def held(plan: Plan) -> int:
        ends = len(plan.tails) + (plan.kept_sigma is not None)
        return 2 + group * (2 * len(plan.stochastic) + ends)

    steps = counts.largest(lambda it: [sum(map(held, it.plans))])
    return counts.prompts * steps * latent, counts.prompts * finals * latent
