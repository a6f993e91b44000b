"""From rewards to advantages, from a rollout's examples to updates of the weights and passes, and from
advantages to a loss. Pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from g2rpo.core.contracts import all_finite, finite_rows, name_of
from g2rpo.core.data import Example
from g2rpo.core.errors import UserError, shown
from g2rpo.core.noise import Normal, per_row
from g2rpo.core.types import Algorithm

TIE_ULPS = 8
"""Rewards of a group that differ by less, in units of eps |largest reward| (eps = 2^-23 in
float32), are a tie.

The same picture gets scores that differ by rounding: its place in a batch changes the order in
which a reward's sums are taken. A float32 sum of n terms in pairs rounds log2(n) times, each by at
most eps / 2; independent roundings have a std of eps sqrt(log2(n) / 12), 1.3 eps for the 3 1024^2
entries of a picture, and a group of 24 such scores spans four of these, 5 eps. Divided by a std of
that size, the noise would become advantages of size 1. Scores in float16 or bfloat16 that differ at
all are at least 2^-12 apart, 500 times as much."""


def without_rounding(rewards: Tensor) -> Tensor:
    """`rewards` [..., G], but with one value for all members of a group whose scores are a tie
    (`TIE_ULPS`); NaN stays."""
    valid = ~rewards.isnan()
    highest = torch.where(valid, rewards, -torch.inf).amax(-1, keepdim=True)
    lowest = torch.where(valid, rewards, torch.inf).amin(-1, keepdim=True)
    largest = torch.maximum(highest.abs(), lowest.abs())
    tie = highest - lowest <= TIE_ULPS * torch.finfo(rewards.dtype).eps * largest
    return torch.where(valid & tie, highest, rewards)


def group_normalize(
    rewards: Tensor, eps: float = 1e-8, batch_std: bool = False, population_std: bool = False
) -> Tensor:
    """Advantages (r - mean) / (std + eps) over the last axis (GRPO, arXiv 2402.03300; G2RPO, Eq.
    8).

    rewards [..., G]; std is the unbiased one, so |advantage| <= (G - 1) / sqrt(G), or with
    `population_std` the biased one. NaN means "no score": such a member gets 0 and is left out of
    its group's statistics. A group whose valid rewards are all equal but for rounding (`TIE_ULPS`),
    or that has fewer than two, gets exactly 0. Float64 inside: the rounding of a float32 mean would
    turn ties of large rewards into advantages. `batch_std` divides by the std of all rewards [N,
    ..., G] along the first and last axes, as Flow-GRPO's code does: groups of low variance then
    have small advantages.
    """
    valid, unbiased = ~rewards.isnan(), 0 if population_std else 1
    r = torch.where(valid, without_rounding(rewards), 0).double()
    n = valid.sum(-1, keepdim=True)
    mean = r.sum(-1, keepdim=True) / n.clamp(min=1)
    deviation = torch.where(valid, r - mean, 0)
    if batch_std:
        all_n = n.sum(0, keepdim=True)
        center = r.sum((0, -1), keepdim=True) / all_n.clamp(min=1)
        squares = torch.where(valid, r - center, 0).square().sum((0, -1), keepdim=True)
        std = (squares / (all_n - unbiased).clamp(min=1)).sqrt()
    else:
        std = (deviation.square().sum(-1, keepdim=True) / (n - unbiased).clamp(min=1)).sqrt()
    infinity = torch.finfo(r.dtype).max
    highest = torch.where(valid, r, -infinity).amax(-1, keepdim=True)
    lowest = torch.where(valid, r, infinity).amin(-1, keepdim=True)
    return torch.where(highest > lowest, deviation / (std + eps), 0).to(rewards.dtype)


RewardMix = Literal["advantages", "rewards", "gdpo"]


def weighted(rewards: Tensor, weights: Tensor) -> Tensor:
    """Rewards [N, R, M, G] times their weights [R]; 0 where the weight is 0, where there need be no
    score."""
    each = weights[:, None, None]
    return torch.where(each != 0, each * rewards, 0)


def mix_rewards(
    rewards: Tensor,
    weights: Tensor,
    mix: RewardMix = "advantages",
    batch_std: bool = False,
    population_std: bool = False,
) -> Tensor:
    """Advantages [N, G] of N groups from rewards [N, R, M, G] of R reward models at M
    granularities, and weights [R].

    "advantages" normalises every reward at every granularity in its group and sums (G2RPO, Eq. 11;
    DanceGRPO for several rewards). "rewards" adds the weighted rewards first and normalises once,
    so their scales matter. "gdpo" normalises the sum of advantages once more over the whole batch
    (GDPO, arXiv 2601.05242, Eq. 4-6). NaN entries are masked out. `batch_std`: see
    `group_normalize`. `population_std` normalises as Flow-GRPO's code does, by the population's std
    + 1e-4.
    """
    normalize = partial(
        group_normalize,
        eps=1e-4 if population_std else 1e-8,
        batch_std=batch_std,
        population_std=population_std,
    )
    if mix == "rewards":  # ties come first: of a sum whose parts cancel, rounding is a large share
        by_grain = normalize(weighted(without_rounding(rewards), weights).sum(-3))
    else:
        by_grain = weighted(normalize(rewards), weights).sum(-3)
    summed = by_grain.sum(-2)
    if mix == "gdpo":  # groups of equal rewards stay at 0
        return torch.where(summed == 0, 0, group_normalize(summed.flatten()).reshape(summed.shape))
    return summed


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """PPO's clipped loss max(-A r, -A clip(r, 1 - c, 1 + c)), r = exp(log_ratio) (G2RPO, Eq. 12).

    Elementwise, to be minimised; all arguments have one shape. With log-probs that are means over
    entries, r is a geometric mean per entry and stays within about 1e-3 of 1.
    """
    ratio = log_ratio.exp()
    return torch.maximum(
        -advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    )


def kernel_kl(kernel: Normal, reference: Normal) -> Tensor:
    """KL between two step kernels of equal std, as a mean over entries, [B] (Flow-GRPO, arXiv
    2505.05470, Eq. 14).

    |mean - mean'|^2 / (2 unit^2); the unit is the std but for `flow.SquaredDistance`, whose KL is
    |mean - mean'|^2.
    """
    difference = (kernel.mean - reference.mean) / per_row(kernel.unit, kernel.mean)
    return 0.5 * difference.square().flatten(1).mean(1)


def without_zero_advantages(examples: Sequence[Example]) -> list[Example]:
    """`examples` in which a member of a prompt counts if it has an advantage other than 0 in any of
    them.

    The others contribute only the KL term, and would make the mean of the rest smaller (Flow-GRPO's
    code).
    """
    alive: dict[int, Tensor] = {}
    for item in examples:
        alive[item.prompt] = alive.get(item.prompt, False) | (item.advantages != 0)
    return [replace(item, counted=alive[item.prompt]) for item in examples]


def without_broken(examples: Sequence[Example]) -> list[Example]:
    """`examples` in which a member with numbers that are not finite does not count. It has those of
    a whole member of its group instead: every group keeps its size, on every rank. A group without a
    whole member does not count, and is another one of the same step, if there is any."""
    if all_finite(value for item in examples for value in (item.x, *item.data.values())):
        return list(examples)
    mended: list[Example | None] = []
    for item in examples:
        tensors = {"": item.x, **item.data}
        own = {name: v for name, v in tensors.items() if len(v) == len(item.advantages)}
        whole = finite_rows(item.advantages, *own.values())
        if not whole.all():
            place = torch.where(whole, torch.arange(len(whole)), int(whole.int().argmax()))
            tensors |= {name: v[place.to(v.device)] for name, v in own.items()}
            x = tensors.pop("")
            item = replace(item, x=x, data=tensors, counted=item.mask & whole)
        mended.append(item if whole.any() else None)
    others = {
        (item.step, item.rows): replace(item, counted=torch.zeros_like(item.mask))
        for item in mended
        if item is not None
    }
    return [
        others.get((item.step, item.rows), item) if own is None else own
        for item, own in zip(examples, mended, strict=True)
    ]


def updates_once(algorithm: Algorithm) -> bool:
    """Whether a rollout has a single update: its ratios are exactly 1 then, however differently
    rollout and training pass round."""
    every = algorithm.update_every
    return every == "rollout" or (isinstance(every, int) and every >= algorithm.group_size)


def updates_of(algorithm: Algorithm, examples: Sequence[Example]) -> Iterator[list[Example]]:
    """The examples of each update, by `Algorithm.update_every`. The network sees a latent that
    members share once in every update that has some of them: the weights differ."""
    every = algorithm.update_every
    if every == "rollout":
        yield list(examples)
        return
    if isinstance(every, int):
        for start in range(0, algorithm.group_size, every):
            yield [item.members(start, start + every) for item in examples]
        return
    if isinstance(every, float):
        parts = min(round(1 / every), len(examples))
        yield from (list(examples[part::parts]) for part in range(parts))
        return
    if every != "branch":
        raise UserError(
            f"algorithm {name_of(algorithm)}: update_every is {shown(every)}; use 'rollout', 'branch' or a number"
        )
    by_step: dict[int, list[Example]] = defaultdict(list)
    for item in examples:
        by_step[item.step].append(item)
    yield from (by_step[step] for step in sorted(by_step))  # in the same order on all ranks


def passes(batch: Sequence[Example], size: int) -> Iterator[list[Example]]:
    """`batch` in passes of at most `size` latents; members with latents of their own may be split
    over passes."""
    part: list[Example] = []
    for item in batch:
        # members of a shared latent stay together: one evaluation
        width = size if item.rows > 1 else len(item.advantages)
        for start in range(0, len(item.advantages), width):
            piece = item.members(start, start + width)
            if part and sum(other.rows for other in part) + piece.rows > size:
                yield part
                part = []
            part.append(piece)
    yield part
