"""`g2rpo agree`: which rewards order the pictures of a session as the person did."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from g2rpo.app.evaluate import reward_table
from g2rpo.assembly.components import pick_device
from g2rpo.assembly.rewards import build_rewards
from g2rpo.core.statistics import Interval, interval
from g2rpo.rewards import votes
from g2rpo.rewards.taste import agreement_of
from g2rpo.rollout.scoring import score


def agree(directory: Path, rewards: Mapping[str, object]) -> dict[str, Interval]:
    """By reward the share of pairs of a liked and another picture of a group that it orders as the person did, ties counting
    one half: mean over the groups of a session, with a 95 % interval. UserError for a run without answers."""
    table = reward_table(rewards)
    answered = list(votes.answered(directory))
    built = build_rewards(table, pick_device("auto"))
    shares: dict[str, list[float]] = {name: [] for name in built}
    for vote, images in answered:
        scores = score(built, images, [vote.prompt] * len(images), batch_size=16, members=len(images))
        for name, values in zip(built, scores, strict=True):
            shares[name].append(float("nan") if values.isnan().any() else agreement_of(values.double().numpy(), vote.liked))
    return {name: interval(np.array(values)) for name, values in shares.items()}
