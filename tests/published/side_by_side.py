"""Ours beside a restatement: the same weights, prompts, noise and scores, and what both made of them."""

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from g2rpo.seeding import generator_for
from g2rpo.trainer import Trainer
from tests.published.neighbours import Learner, Member, Update


@dataclass
class Ours:
    """Everything that a trainer's iterations computed, as they went."""

    trainer: Trainer
    rollouts: list = field(default_factory=list)  # one list an iteration
    experience: list = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # mean over an iteration's updates

    def __post_init__(self) -> None:
        t = self.trainer
        sample, update = t.sampler.sample, t.updater.update
        t.sampler.sample = lambda *given: self._keep(self.rollouts, sample(*given))
        t.updater.update = lambda experience, cond: update(self._keep(self.experience, experience), cond)
        t.learner.optimizer.register_step_pre_hook(
            lambda *_: self.updates.append(Update(0.0, [p.grad.clone() for p in t.learner.parameters]))
        )

    @staticmethod
    def _keep(kept: list, value):
        kept.append(value)
        return value

    def iterate(self) -> None:
        self.losses.append(self.trainer.iterate()["loss"])

    def members(self, iteration: int) -> list[list[dict]]:
        """By group, what is to compare of each member: latents before and after trained steps, log-probs, advantage, final."""
        groups = []
        sampled, experience = self.rollouts[iteration], self.experience[iteration]
        for rollout in sampled.rollouts:
            items = [e for e in experience if any(e.transition is t for t in rollout.transitions)]
            groups.append(
                [
                    {
                        "before": torch.stack([t.x[g if len(t.x) > 1 else 0] for t in rollout.transitions]),
                        "after": torch.stack([t.x_next[g] for t in rollout.transitions]),
                        "log_probs": torch.stack([t.old_log_prob[g] for t in rollout.transitions]),
                        "advantage": items[0].advantages[g],
                        "final": rollout.finals[0, g],
                    }
                    for g in range(rollout.finals.shape[1])
                ]
            )
        return groups


def theirs(groups: list[list[Member]], trained: list[int]) -> list[list[dict]]:
    """The same of a restatement's members."""
    return [
        [
            {
                "before": torch.cat([member.latents[i] for i in trained]),
                "after": torch.cat([member.latents[i + 1] for i in trained]),
                "log_probs": torch.stack([member.log_probs[i] for i in trained]),
                "advantage": member.advantage,
                "final": member.final[0],
            }
            for member in group
        ]
        for group in groups
    ]


def drawn(t: Trainer, iteration: int, prompt: int, group: int, branch: int, steps: range, dtype: torch.dtype, own: bool):
    """The noise that an iteration of `t` draws: (initial latents [G, ...], {step: [G, ...]})."""

    def generator(*purpose) -> torch.Generator:
        return generator_for(t.config.trainer.seed, "rollout", iteration, prompt, *purpose)

    keys = [("initial", member) for member in range(group)] if own else [("initial",)] * group
    initial = t.policy.noise([generator(*key) for key in keys])
    noise = {i: torch.randn(initial.shape, generator=generator("branch", branch, i)).to(dtype) for i in steps}
    return initial.to(dtype), noise


def texts(t: Trainer, iteration: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """The embeddings of an iteration's prompts, a row each."""
    cond = t.policy.encode(t.prompts_of(iteration))
    return [{name: value[i : i + 1].to(dtype) for name, value in cond.tensors.items()} for i in range(len(cond))]


def copied(t: Trainer, dtype: torch.dtype) -> tuple[torch.nn.Module, list[torch.nn.Parameter]]:
    """A copy of the transformer that `t` is about to train, and its trained parameters."""
    transformer = copy.deepcopy(t.policy.pipeline.transformer).to(dtype)
    return transformer, [p for p in transformer.parameters() if p.requires_grad]


def distance(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def apart(ours: list[list[dict]], others: list[list[dict]]) -> dict[str, float]:
    """By quantity, how far all members of all groups are apart."""

    def flat(groups: list[list[dict]], name: str) -> Tensor:
        return torch.cat([torch.as_tensor(member[name]).double().flatten() for group in groups for member in group])

    return {name: distance(flat(ours, name), flat(others, name)) for name in ours[0][0]}


def moved(learner: Learner, before: list[Tensor]) -> Tensor:
    """How far all weights have come."""
    return torch.cat([(p.detach().double() - b.double()).flatten() for p, b in zip(learner.parameters, before, strict=True)])
