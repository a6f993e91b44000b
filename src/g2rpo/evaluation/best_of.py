"""The best of n pictures of a prompt, by the trained rewards: what its scores are expected to be, from one set of pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from g2rpo.core.statistics import group_std


def best_of(scores: Mapping[str, Tensor], weights: Mapping[str, float], n: int) -> dict[str, Tensor]:
    """The expected scores [N] by name of the best of n pictures, from scores [N, S] of S >= n pictures of each prompt; the best
    has the highest `utility`."""
    by = utility(scores, weights)
    return {name: expected_of_best(by, values, n) for name, values in scores.items()}


def utility(scores: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """What pictures [N, S] are chosen by: the weighted sum of their trained rewards, each as its deviation from the prompt's
    mean in units of its standard deviation within a prompt. As in training, a missing score counts as the mean."""
    total = torch.zeros_like(next(iter(scores.values())), dtype=torch.float64)
    for name, weight in weights.items():
        values = scores[name].double()
        deviation = (values - values.nanmean(-1, keepdim=True)).nan_to_num()
        spread = group_std(values).square().nanmean().sqrt()
        total += weight * deviation / (spread if spread > 0 else 1.0)
    return total


def expected_of_best(by: Tensor, of: Tensor, n: int) -> Tensor:
    """The expected value `of` [N] of the picture that is highest in `by` [N, S] among n of the S, drawn without replacement,
    which is unbiased for n new pictures. One of equally good pictures is taken by lot; missing values are left out."""
    count = by.shape[-1]
    of_rank = torch.tensor([math.comb(rank, n - 1) / math.comb(count, n) for rank in range(count)], dtype=torch.float64)
    chance = torch.empty_like(by, dtype=torch.float64).scatter_(-1, by.argsort(-1), of_rank.expand(by.shape))
    equal = (by[..., :, None] == by[..., None, :]).double()
    chance = (equal * chance[..., None, :]).sum(-1) / equal.sum(-1)
    known = ~of.isnan()
    return (chance * of.double()).where(known, 0).sum(-1) / chance.where(known, 0).sum(-1)
