"""Ours beside a restatement: the same weights, prompts, noise and scores, and what both made of them."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from g2rpo.core.seeding import generator_for
from g2rpo.training.trainer import Trainer
from tests.published.neighbours import Learner, Member


@dataclass
class Ours:
    """Everything that a trainer's iterations computed, as they went."""

    trainer: Trainer
    sampled: list = field(default_factory=list)  # an entry for each iteration
    examples: list = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)  # of each update, clipped
    norms: list[float] = field(default_factory=list)  # of gradients before they are clipped, mean over an iteration's updates
    losses: list[float] = field(default_factory=list)  # mean over an iteration's updates
    clipped: list[float] = field(default_factory=list)  # share of ratios beyond the clip range, an iteration each

    def __post_init__(self) -> None:
        t = self.trainer
        self.before = [p.detach().clone() for p in t.learner.parameters]
        sample, update = t.collector.collect, t.updater.update
        t.collector.collect = lambda *given: self._keep(self.sampled, sample(*given))
        t.updater.update = lambda examples, cond: update(self._keep(self.examples, examples), cond)
        t.learner.optimizer.register_step_pre_hook(
            lambda *_: self.gradients.append(torch.cat([p.grad.flatten() for p in t.learner.parameters]))
        )

    @staticmethod
    def _keep(kept: list, value):
        kept.append(value)
        return value

    def iterate(self) -> None:
        row = self.trainer.iterate()
        self.losses.append(row["loss"])
        self.norms.append(row["grad_norm"])
        self.clipped.append(row["clip_fraction"])

    @property
    def moved(self) -> Tensor:
        """How far all weights have come."""
        return moved(self.trainer.learner.parameters, self.before)

    def members(self, iteration: int) -> list[list[dict]]:
        """By group, what is to compare of each member: latents before and after trained steps, log-probs, advantage, final."""
        groups = []
        for rollout in self.sampled[iteration].rollouts:
            steps = [example for example in self.examples[iteration] if example.prompt == rollout.prompt]
            groups.append(
                [
                    {
                        "before": torch.stack([e.x[g if e.rows > 1 else 0] for e in steps]),
                        "after": torch.stack([e.data["x_next"][g] for e in steps]),
                        "log_probs": torch.stack([e.data["old_log_prob"][g] for e in steps]),
                        "advantage": steps[0].advantages[g],
                        "final": rollout.finals[0, g],
                    }
                    for g in range(rollout.finals.shape[1])
                ]
            )
        return groups


@dataclass
class Restated:
    """Everything that a restatement computed."""

    learner: Learner
    groups: list[list[list[Member]]] = field(default_factory=list)  # by iteration
    trained: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before = [p.detach().clone() for p in self.learner.parameters]

    def members(self, iteration: int) -> list[list[dict]]:
        return theirs(self.groups[iteration], self.trained[iteration])

    def mean_norm(self, iteration: int) -> float:
        """Of the gradients of an iteration's updates, before they were clipped."""
        count = len(self.learner.updates) // len(self.groups)
        norms = [update.norm for update in self.learner.updates[iteration * count : (iteration + 1) * count]]
        return sum(norms) / count

    @property
    def moved(self) -> Tensor:
        return moved(self.learner.parameters, self.before)


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


def two_iterations(t: Trainer) -> tuple[torch.nn.Module, Ours]:
    """A copy of the transformer before, and two iterations of the trainer."""
    start, ours = copied(t), Ours(t)
    for _ in range(2):
        ours.iterate()
    return start, ours


def copied(t: Trainer) -> torch.nn.Module:
    """A copy of the transformer that `t` is about to train."""
    return copy.deepcopy(t.policy.pipeline.transformer)


def nudged(transformer: torch.nn.Module, off: float) -> torch.nn.Module:
    """A copy whose weights are `off` by this share of themselves, up or down."""
    generator, other = torch.Generator().manual_seed(0), copy.deepcopy(transformer)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1 + off * (2 * torch.randint(2, weight.shape, generator=generator) - 1))
    return other


def distance(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|."""
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


def apart(ours: list[list[dict]], others: list[list[dict]]) -> dict[str, float]:
    """By quantity, how far all members of all groups are apart."""

    def flat(groups: list[list[dict]], name: str) -> Tensor:
        return torch.cat([torch.as_tensor(member[name]).double().flatten() for group in groups for member in group])

    return {name: distance(flat(ours, name), flat(others, name)) for name in ours[0][0]}


def moved(now: Iterable[Tensor], before: Iterable[Tensor]) -> Tensor:
    """How far all weights have come."""
    return torch.cat([(p.detach().double() - b.detach().double()).flatten() for p, b in zip(now, before, strict=True)])


class Pair(Protocol):
    """Two iterations of one algorithm, ours and restated, and a third that tells how near is near."""

    autocast: torch.dtype | None
    share: float
    ours: Ours
    restated: Restated
    measure: Restated


def agree(pair: Pair) -> None:
    """Ours and restated, by everything that is computed on the way.

    In float32 two orders of the same sums differ by a few roundings, and these grow on the way through network, group
    normalisation and Adam as one rounding in every weight grows, which `measure` has: four times that is allowed. In bfloat16 a
    half of what bfloat16 itself changes is allowed, and for advantages all of it: they come of pictures that are decoded in
    bfloat16, where a group's scores differ by a few roundings.
    """
    ours, restated, measure = pair.ours, pair.restated, pair.measure
    for iteration in range(2):
        members = restated.members(iteration)
        allowed = apart(measure.members(iteration), members)
        for name, value in apart(ours.members(iteration), members).items():
            share = 1.0 if name == "advantage" and pair.autocast else pair.share
            _check(f"{name} of iteration {iteration}", value, share * allowed[name])
    updates = zip(ours.gradients, restated.learner.updates, measure.learner.updates, strict=True)
    limits = []
    for number, (own, other, off) in enumerate(updates):
        limits.append(pair.share * distance(off.flat, other.flat))
        _check(f"gradient of update {number}", distance(own, other.flat), limits[-1])
    _check("weights", distance(ours.moved, restated.moved), pair.share * distance(measure.moved, restated.moved))
    if pair.autocast is None:
        for iteration, norm in enumerate(ours.norms):  # lengths are no further apart than the vectors
            _check(f"gradient norm of iteration {iteration}", abs(norm / restated.mean_norm(iteration) - 1), max(limits))
        check_losses(ours, restated)
        assert all(0.02 < fraction < 0.48 for fraction in ours.clipped), f"the clip acts on {ours.clipped}, not on some"


def _check(what: str, value: float, limit: float) -> None:
    assert value <= limit, f"{what}: {value:.2e} apart, {limit:.2e} allowed"


def check_losses(ours: Ours, restated: Restated) -> None:
    """An iteration's loss is a mean of terms A r with |A| <= 5. A log-ratio is a difference of two log-probs, in ours and the
    restated one each known to a rounding of itself and of its entries' mean: eight roundings, and in the second iteration those
    of the weights, half as much again. A KL term is smaller."""
    count = len(restated.learner.updates) // len(ours.losses)
    for iteration, loss in enumerate(ours.losses):
        largest = max(float(m["log_probs"].abs().max()) for group in ours.members(iteration) for m in group)
        terms = [update.loss for update in restated.learner.updates[iteration * count : (iteration + 1) * count]]
        _check(
            f"loss of iteration {iteration}", abs(loss - sum(terms) / count), 5 * (8 + 4 * iteration) * 2**-24 * (1 + largest)
        )
