"""Ours beside a restatement: the same weights, prompts, noise and scores, and what both made of
them."""

import copy
from dataclasses import dataclass, field
from functools import cached_property

import torch

from g2rpo.core.noise import generator_for
from tests.published.neighbours import Learner, Member, sample
from tests.support.runs import smooth
from tests.support.watched import Watched, flat


class Ours(Watched):
    """Everything that the iterations of a trainer computed, as they went."""

    def __init__(self, t):
        super().__init__(t)
        self.before = [p.detach().clone() for p in t.learner.parameters]
        self.rows = [t.iterate() for _ in range(2)]

    def means(self, name):
        """Of an iteration's updates."""
        return [row[name] for row in self.rows]

    @property
    def moved(self):
        """How far all weights have come."""
        return moved(self.t.learner.parameters, self.before)

    def members(self, iteration):
        """By group, what is to compare of each member: latents before and after trained steps,
        log-probs, advantage, final."""
        groups = []
        for rollout in self.collected[iteration][1].rollouts:
            steps = [item for item in self.examples[iteration] if item.prompt == rollout.prompt]
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

    def __post_init__(self):
        self.before = [p.detach().clone() for p in self.learner.parameters]

    def members(self, iteration):
        """The same of them as of `Ours`."""
        trained = self.trained[iteration]
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
            for group in self.groups[iteration]
        ]

    def mean_norm(self, iteration):
        """Of the gradients of an iteration's updates, before they were clipped."""
        count = len(self.learner.updates) // len(self.groups)
        updates = self.learner.updates[iteration * count : (iteration + 1) * count]
        return sum(update.norm for update in updates) / count

    @property
    def moved(self):
        return moved(self.learner.parameters, self.before)


def walked(t, network, iteration, prompt, sigmas, step, *, noisy, dtype, own=False):
    """A group's members, one after another, from the noise that an iteration of `t` draws: of their
    `own`, or one for all; `noisy` are the stochastic steps."""

    def generator(*purpose):
        return generator_for(t.config.trainer.seed, "rollout", iteration, prompt, *purpose)

    size = t.algorithm.group_size
    initial = t.policy.noise([generator("initial", *[member] * own) for member in range(size)])
    noise = {
        i: torch.randn(initial.shape, generator=generator("branch", noisy[0], i)).to(dtype)
        for i in noisy
    }
    return [
        sample(
            network,
            prompt,
            initial[g : g + 1].to(dtype),
            sigmas,
            {i: n[g : g + 1] for i, n in noise.items()},
            step,
        )
        for g in range(size)
    ]


def texts(t, iteration, dtype):
    """The embeddings of an iteration's prompts, a row each."""
    cond = t.policy.encode(t.prompts_of(iteration))
    return [
        {name: value[i : i + 1].to(dtype) for name, value in cond.tensors.items()}
        for i in range(len(cond))
    ]


def moved(now, before):
    """How far all weights have come."""
    pairs = zip(now, before, strict=True)
    return flat(p.detach().double() - b.double() for p, b in pairs)


def nudged(transformer, off):
    """A copy whose weights are `off` by this share of themselves, up or down."""
    generator, other = torch.Generator().manual_seed(0), copy.deepcopy(transformer)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1 + off * (2 * torch.randint(2, weight.shape, generator=generator) - 1))
    return other


def distance(a, b):
    """|a - b| / |b|."""
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


def apart(ours, others):
    """By quantity, how far all members of all groups are apart."""

    def of_all(groups, name):
        members = [member for group in groups for member in group]
        return flat(torch.as_tensor(member[name]).double() for member in members)

    return {name: distance(of_all(ours, name), of_all(others, name)) for name in ours[0][0]}


class Pair:
    """Two iterations of the trainer `t`, ours at once and restated when asked for, by
    `restate(off)`.

    `off` is the share of itself by which every weight is off: `measure` tells how near is near, and
    ours may be `share` of what it is apart.
    """

    autocast = None
    share = 4.0

    def __init__(self, t):
        self.start, self.ours = copy.deepcopy(t.policy.pipeline.transformer), Ours(smooth(t))

    @cached_property
    def restated(self):
        return self.restate()

    @cached_property
    def measure(self):
        return self.restate(off=2**-23)


def agree(pair):
    """Ours and restated, by everything that is computed on the way.

    In float32 two orders of the same sums differ by a few roundings, and these grow on the way
    through network, group normalisation and Adam as one rounding in every weight grows, which
    `measure` has: four times that is allowed. In bfloat16 a half of what bfloat16 itself changes is
    allowed, and for advantages all of it: they come of pictures that are decoded in bfloat16, where
    a group's scores differ by a few roundings. Of gradients and losses the most of all updates is
    taken, as one of them may be near by chance.
    """
    ours, restated, measure = pair.ours, pair.restated, pair.measure
    for iteration in range(2):
        members = restated.members(iteration)
        allowed = apart(measure.members(iteration), members)
        for name, value in apart(ours.members(iteration), members).items():
            share = 1.0 if name == "advantage" and pair.autocast else pair.share
            _check(f"{name} of iteration {iteration}", value, share * allowed[name])
    updates = restated.learner.updates
    pairs = zip(measure.learner.updates, updates, strict=True)
    limit = pair.share * max(distance(off.flat, own.flat) for off, own in pairs)
    for number, (own, other) in enumerate(zip(ours.gradients, updates, strict=True)):
        _check(f"gradient of update {number}", distance(flat(own), other.flat), limit)
    weights = pair.share * distance(measure.moved, restated.moved)
    _check("weights", distance(ours.moved, restated.moved), weights)
    if pair.autocast is None:
        # lengths are no further apart than the vectors
        for iteration, norm in enumerate(ours.means("grad_norm")):
            off = abs(norm / restated.mean_norm(iteration) - 1)
            _check(f"gradient norm of iteration {iteration}", off, limit)
        losses, others = (
            [update.loss for update in learner.updates]
            for learner in (restated.learner, measure.learner)
        )
        apart_by = [abs(one - other) for one, other in zip(losses, others, strict=True)]
        limit = pair.share * max(apart_by)
        # a mean over its updates is no further off than the furthest of them
        for iteration, loss in enumerate(ours.means("loss")):
            theirs = losses[len(losses) // 2 * iteration :][: len(losses) // 2]
            _check(f"loss of iteration {iteration}", abs(loss - sum(theirs) / len(theirs)), limit)
        clipped = ours.means("clip_fraction")
        assert all(0.02 < share < 0.48 for share in clipped), f"the clip acts on {clipped}"


def _check(what, value, limit):
    assert value <= limit, f"{what}: {value:.2e} apart, {limit:.2e} allowed"
