"""`g2rpo agree`: which rewards order the pictures of a session as the person did."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from g2rpo.assembly.components import pick_device
from g2rpo.assembly.rewards import build_rewards
from g2rpo.config.resolve import resolve_as
from g2rpo.config.schema import RewardTable, Section
from g2rpo.core.errors import UserError
from g2rpo.core.statistics import Interval, interval
from g2rpo.lab.teach import votes
from g2rpo.monitor.scores import picture_of, read_picture
from g2rpo.rewards.taste import agreement_of
from g2rpo.rollout.scoring import score
from g2rpo.runs.directory import RunDirectory


class _Rewards(Section):
    rewards: RewardTable


def agree(directory: Path, rewards: Mapping[str, object]) -> dict[str, Interval]:
    """By reward the share of pairs of a liked and another picture of a group that it orders as the person did, ties counting
    one half: mean over the groups of a session, with a 95 % interval. UserError for a run without answers."""
    run = RunDirectory(directory)
    table = resolve_as(_Rewards, {"rewards": dict(rewards)}, source="--rewards").rewards
    answered = votes.standing(votes.read(run.votes))
    if not answered:
        raise UserError(f"{run.votes}: names no picture that was liked")
    built = build_rewards(table, pick_device("auto"))
    shares: dict[str, list[float]] = {name: [] for name in built}
    for vote in answered:
        folder = run.group(vote.round)
        try:
            paths = [picture_of(folder, member) for member in range(len(list(folder.glob("??????.png"))))]
            images = torch.stack([read_picture(path) for path in paths]).float() / 255
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"{folder}: the pictures of round {vote.round + 1} cannot be read ({error})") from None
        scores = score(built, images, [vote.prompt] * len(images), batch_size=16)
        for name, values in zip(built, scores, strict=True):
            shares[name].append(float("nan") if values.isnan().any() else agreement_of(values.double().numpy(), vote.liked))
    return {name: interval(np.array(values)) for name, values in shares.items()}
