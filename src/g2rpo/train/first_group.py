"""One group of a run's first iteration as a grid of pictures, for its report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from g2rpo.core.data import Prompt
from g2rpo.core.images import images_of
from g2rpo.core.plans import Plan
from g2rpo.core.statistics import group_std
from g2rpo.train.collector import Groups
from g2rpo.train.evaluation.heldout import (
    save_inputs,
    save_pictures,
    save_rows,
    score_rows,
    verdicts,
)
from g2rpo.train.listeners import Listener
from g2rpo.train.monitor.pictures import PictureRow, decode_reduced, save_grid, stills

CLOSE = 0.05
"""Scores of a group lie close together if their range is at most this part of the largest one. Few
such scores are a sign of rounding: those that are few by nature, as 0 and 1, or 1 to 5, lie further
apart."""
ADVANTAGE = "advantage"
"""The name of a member's advantage among its scores in the grid."""


@dataclass
class FirstGroup(Listener):
    """Says which rewards are `rounded`. Keeps the pictures of one group of the first iteration
    (`widest`), of clips their middle frames, with their scores and advantages, and draws them, a
    row for each tail; nothing where no pictures are compared."""

    def hear_groups(self, groups: Groups, advantages: Tensor) -> None:
        if self.trainer.iteration == 1 and self.trainer.run.world.is_main:
            for said in rounded(list(self.trainer.rewards), groups.rewards):
                self.trainer.run.notify(said)
        latent = all(reward.latent for reward in self.trainer.rewards.values())
        if (
            self.trainer.iteration == 1
            and self.trainer.run.writes
            and not (latent or groups.algorithm.uses_rewards)
        ):
            self.save(groups, advantages)

    def save(self, groups: Groups, advantages: Tensor) -> None:
        policy, sizes, names = self.trainer.policy, self.trainer.sizes, list(self.trainer.rewards)
        by_name = {name: groups.collected.rewards[:, place] for place, name in enumerate(names)}
        right = verdicts(self.trainer.rewards, by_name)
        number = widest(groups.collected.rewards, right)
        rollout, scores = groups.collected.rollouts[number], groups.collected.rewards[number]
        shape, latents = rollout.finals.shape[:2], rollout.finals.flatten(0, 1)
        decoded = sizes.fit(lambda: decode_reduced(policy, latents, sizes.decode))
        images = stills(decoded).unflatten(0, shape)
        picture_rows = []
        for m, tail in enumerate(rollout.plan.tail_names):
            told = {**dict(zip(names, scores[:, m], strict=True)), ADVANTAGE: advantages[number]}
            picture_rows.append(
                PictureRow(
                    images[m], f"g = {tail}", told, None if right is None else right[number, m]
                )
            )
        prompt = groups.prompts[rollout.prompt]
        columns = [
            Prompt("member 1", images_of(prompt)),
            *(f"member {member}" for member in range(2, shape[1] + 1)),
        ]
        cells = {"tails": shape[0], "how": how(rollout.plan)}
        rows = [
            row | {"index": shape[1] * m + row["index"]} | cells
            for m, tail in enumerate(picture_rows)
            for row in score_rows([prompt] * shape[1], tail.scores, tail.right)
        ]
        folder = self.trainer.run.first_group
        with self.trainer.run.writing(folder):
            save_pictures(folder, images.flatten(0, 1), range(len(rows)), 0)
            save_inputs(folder, [prompt], [0])
            save_rows(self.trainer.run.group_scores, rows)
            save_grid(
                self.trainer.run.group_grid, picture_rows, columns, f"{prompt}\n{cells['how']}"
            )


def rounded(names: Sequence[str], rewards: Tensor) -> Iterator[str]:
    """What to say of rewards [N, R, M, G] whose scores in a group lie close together and are few."""
    size = rewards.shape[-1]
    for name, own in zip(names, rewards.transpose(0, 1).flatten(1, 2), strict=True):
        finite = [group[group.isfinite()] for group in own]
        scored = [scores for scores in finite if len(scores.unique()) > 1]
        groups = [scores.unique() for scores in scored]
        close = [float((each[-1] - each[0]) / each.abs().max()) <= CLOSE for each in groups]
        count, members = sum(map(len, groups)), sum(map(len, scored))
        if sum(close) * 2 > len(close) and count * 2 <= members:
            step = min(float(scores.diff().min()) for scores in groups)
            few = f"{count / len(groups):.2g} different scores in a group of {size}, in steps of {step:.2g}"
            yield (
                f"reward '{name}': {few} near {float(groups[0][0]):.4g}. Equal ones tell no member from another; if the score "
                "was rounded, as in bfloat16, compute it in float32"
            )


def widest(rewards: Tensor, right: Tensor | None = None) -> int:
    """The group of `rewards` [N, R, M, G] to look at: of those with right and wrong members by
    `right` [N, M, G], or else of all, the one whose members differ most: by the sum over rewards of
    their standard deviation, in units of that reward's largest one in any group. The first of ties.
    Advantages do not tell: they have one scale in all."""
    spread = group_std(rewards).nan_to_num(0).mean(2)  # [N, R]
    size = (spread / spread.amax(0).clamp_min(torch.finfo(torch.float32).tiny)).sum(1)  # at most R
    if right is not None:
        members = right.flatten(1)
        size += ((members == 1).any(1) & (members == 0).any(1)) * (spread.shape[1] + 1)
    return int(size.argmax())


def how(plan: Plan) -> str:
    """A description of how the members of a group are sampled."""
    last = plan.merge - 1
    steps = f"step {plan.branch}" if last <= plan.branch else f"steps {plan.branch} to {last}"
    if plan.merged:
        steps += ", merged into one,"
    begin = (
        "All members begin from one noise, the anchor's."
        if plan.shared_noise
        else "Each member begins from a noise of its own."
    )
    if plan.branch == plan.merge:
        return f"{begin} Nothing else is random."
    return f"{begin} At {steps} noise enters, different for each; nothing else is random."
