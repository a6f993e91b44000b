"""`g2rpo agree`: which rewards order the pictures of a session as the person did."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from g2rpo.app.evaluate import reward_table
from g2rpo.assembly.components import pick_device
from g2rpo.assembly.rewards import build_rewards
from g2rpo.core.errors import UserError
from g2rpo.core.statistics import Interval
from g2rpo.rewards import votes
from g2rpo.rewards.taste import agreement_interval, agreement_of
from g2rpo.rollout.scoring import score
from g2rpo.runs.directory import RunDirectory
from g2rpo.runs.lifecycle import read_config


def agree(directory: Path, rewards: Mapping[str, object]) -> dict[str, Interval]:
    """By reward the share of pairs of a liked and another picture of a group that it orders as the person did, ties counting
    one half: mean over the groups of a session, and the 95 % interval of `agreement_interval`. A name without settings is the
    session's own reward or judge of that name, else a kind with its defaults. UserError for a run without answers."""
    own = _rewards_of(directory)
    table = reward_table({name: entry or own.get(name, {}) for name, entry in rewards.items()})
    if any(entry.kind == "clicks" and "run" not in entry.options for entry in table.values()):
        raise UserError(
            "clicks: is fitted to these answers, so they cannot judge it; the page of a session shows its agreement"
        )
    answered = list(votes.answered(directory))
    built = build_rewards(table, pick_device("auto"))
    shares: dict[str, list[float]] = {name: [] for name in built}
    for vote, images in answered:
        scores = score(built, images, [vote.prompt] * len(images), batch_size=16, members=len(images))
        for name, values in zip(built, scores, strict=True):
            if not values.isnan().any():
                shares[name].append(agreement_of(values.double().numpy(), vote.liked))
    return {name: _interval(values) for name, values in shares.items()}


def _rewards_of(directory: Path) -> dict[str, object]:
    """The settings of a session's rewards and judges by name; none of a folder without a config."""
    if not RunDirectory(directory).config.is_file():
        return {}
    config = read_config(directory)
    return {name: one.model_dump(mode="json") for name, one in {**config.evaluation.rewards, **config.rewards}.items()}


def _interval(shares: Sequence[float]) -> Interval:
    around = agreement_interval(shares, 0.95)
    return Interval(float(np.mean(shares)) if shares else math.nan, max(0.0, around.low), min(1.0, around.high), len(shares))
