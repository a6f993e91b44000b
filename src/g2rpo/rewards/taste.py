"""A person's taste from choices within groups: a Bayesian choice model on features of pictures, and
the reward of it.

A choice "i is the best of these" has the probability exp(u_i) / sum_j exp(u_j) of a Plackett-Luce
model (Bradley-Terry for two) with the utility u = theta . z, theta ~ N(0, variance), and z the
first principal components of one block of features within groups; a share `SLIPS` of the choices is
random. Block and variance are those under which left-out groups are most likely.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit
from torch import Tensor

from g2rpo.core.errors import UserError, placed
from g2rpo.core.input_pictures import cut
from g2rpo.core.statistics import Interval
from g2rpo.core.types import Reward
from g2rpo.prompts.judged import Judged, read_judged, sharing
from g2rpo.rewards.clip import CLIPScore
from g2rpo.rewards.picture_features import Features, PictureEncoder, features_of
from g2rpo.rewards.votes import answered, judged_in, session_of

COMPONENTS = 24
VARIANCES = (1.0, 10.0)
FOLDS = 4
SLIPS = 0.1
"""The share of choices that are taken at random: without it a single slip outweighs several
choices."""
CHANCE, TRUSTED = 0.5, 0.55
"""The agreement of a head that guesses; that above which the lower end of a 90 % interval has to
lie before a head counts."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Choice:
    """What a person liked of a group, by its members' indices: one, or several; the others lost to
    each of them."""

    features: Features
    liked: tuple[int, ...]
    shown: int | None = None
    """Choices with one number share pictures, so none of them judges what others are fitted to."""

    @property
    def size(self) -> int:
        return len(next(iter(self.features.values())))


@dataclass(frozen=True)
class Head:
    """A utility of pictures, in standard deviations within groups of what was shown, whose mean is
    0: `direction` [D] of one block, less `offset`. Given the choices, the covariance of `direction`
    is `root` [D, K] times its transpose (Laplace's approximation)."""

    block: str
    direction: Tensor
    root: Tensor
    offset: float
    agreement: Interval
    """The share of pairs of a liked and another picture that the head orders as the person did, in
    groups that it was not fitted to: `agreement_interval` of 90 % over groups."""

    def __call__(self, features: Features) -> Tensor:
        return (features[self.block].double() @ self.direction - self.offset).float()

    def rise(self, before: Features, now: Features) -> tuple[float, float]:
        """How much higher the mean utility of pictures is now than before, and the posterior
        standard deviation of that."""
        change = now[self.block].double().mean(0) - before[self.block].double().mean(0)
        return float(change @ self.direction), float((change @ self.root).norm())

    @property
    def agreed(self) -> float:
        """The mean of `agreement` over the groups alone, without the one at chance."""
        count = self.agreement.count
        return (self.agreement.mean * (count + 1) - CHANCE) / count

    @property
    def trust(self) -> float:
        """How much pictures count that nobody has looked at, 0 to 1: (2 agreement - 1)^2, and 0
        while the lower end of the interval is not above `TRUSTED`."""
        return (2 * self.agreement.mean - 1) ** 2 if self.agreement.low > TRUSTED else 0.0

    @property
    def state(self) -> dict[str, Any]:
        """Plain data and tensors, for a checkpoint."""
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Head:
        """The head with this `state`."""
        return cls(**{**state, "agreement": Interval(**state["agreement"])})


def fit(choices: Sequence[Choice], pairs: Sequence[Choice] = ()) -> Head | None:
    """The head of these choices, in float64 on the CPU, so that it is the same on every rank; None
    for fewer than two groups with both a liked and another picture. `pairs` are choices as well,
    which neither block nor agreement are judged by."""
    choices = [choice for choice in choices if 0 < len(choice.liked) < choice.size]
    if len(choices) < 2:
        return None
    every = [*choices, *pairs]
    groups, beside = range(len(choices)), range(len(choices), len(every))
    alike = _shown(choices)
    blocks = {block: _Block.of(block, every) for block in choices[0].features}
    agreed: dict[int, list[float]] = {}
    # nested: a left-out group does not choose the block by which it is judged
    for inside, outside in _folds(groups, alike):
        block, variance = _most_likely(blocks, inside, beside, alike)
        theta = blocks[block].fit([*inside, *beside], variance)
        for group in outside:
            agreed.setdefault(alike[group], []).append(blocks[block].agreement(theta, group))
    block, variance = _most_likely(blocks, groups, beside, alike)
    own, everything = blocks[block], range(len(every))
    theta = own.fit(everything, variance)
    shown = [own.groups[group] @ theta for group in groups]
    spread = float(np.sqrt(np.mean([np.var(utilities) for utilities in shown]))) or 1.0
    direction = torch.from_numpy(own.axes @ theta / spread)
    lower = np.linalg.cholesky(own.curvature(theta, everything, variance))
    root = torch.from_numpy(np.linalg.solve(lower, own.axes.T).T / spread)
    pictures = torch.cat([choice.features[block].double() @ direction for choice in choices])
    offset = float(pictures.mean())
    means = [float(np.mean(values)) for values in agreed.values()]
    return Head(block, direction, root, offset, agreement_interval(means, 0.9))


def agreement_interval(agreed: Sequence[float], level: float) -> Interval:
    """The t interval of the agreement in these groups and one more at chance: three perfect ones
    are not certain."""
    values = np.array([*agreed, CHANCE])
    mean, spread = float(values.mean()), values.std(ddof=1)
    half = float(stdtrit(len(agreed), (1 + level) / 2) * spread) / math.sqrt(len(values))
    return Interval(mean, max(0.0, mean - half), min(1.0, mean + half), len(agreed))


def mean_agreement(agreed: Sequence[float]) -> Interval:
    """The mean agreement in these groups, with `agreement_interval` of 95 %."""
    if not len(agreed):
        return Interval(math.nan, math.nan, math.nan, 0)
    return replace(agreement_interval(agreed, 0.95), mean=float(np.mean(agreed)))


def _shown(choices: Sequence[Choice]) -> list[int]:
    """What each choice shows, as a number: its own, unless it shares pictures with others, and not
    all do."""
    numbers = [place if one.shown is None else -1 - one.shown for place, one in enumerate(choices)]
    return numbers if len(set(numbers)) > 1 else list(range(len(choices)))


def _folds(groups: Sequence[int], shown: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """(fitted, left out) groups of each fold, by turns of what is `shown`."""
    every = list(dict.fromkeys(shown[group] for group in groups))
    count = min(FOLDS, len(every))
    turns = {number: place % count for place, number in enumerate(every)}
    return [
        (
            [group for group in groups if turns[shown[group]] != turn],
            [group for group in groups if turns[shown[group]] == turn],
        )
        for turn in range(count)
    ]


def _most_likely(
    blocks: Mapping[str, _Block],
    groups: Sequence[int],
    beside: Sequence[int],
    shown: Sequence[int],
) -> tuple[str, float]:
    """The block and variance under which left-out groups of `groups` are most likely; the first of
    ties. Choices `beside` them are always fitted."""
    if len({shown[group] for group in groups}) < 2:
        return next(iter(blocks)), VARIANCES[0]
    likelihood: dict[tuple[str, float], float] = {}
    for block, data in blocks.items():
        for variance in VARIANCES:
            likelihood[block, variance] = sum(
                data.likelihood(data.fit([*fitted, *beside], variance), left)
                for fitted, left in _folds(groups, shown)
            )
    return max(likelihood, key=lambda key: likelihood[key])


@dataclass(frozen=True)
class _Block:
    """One block of features of the groups that were answered: coordinates [G, K] of each, and their
    axes [D, K]."""

    groups: Sequence[Floats]
    axes: Floats
    liked: Sequence[tuple[int, ...]]

    @classmethod
    def of(cls, block: str, choices: Sequence[Choice]) -> _Block:
        """Principal components within groups, of features in units of their deviation within
        groups; the first one has the variance 1."""
        centred = [choice.features[block].double().numpy() for choice in choices]
        centred = [values - values.mean(0) for values in centred]
        every = np.concatenate(centred)
        deviation = every.std(0)
        scale = np.where(
            deviation > 1e-8 * max(deviation.max(), 1e-30), 1 / np.maximum(deviation, 1e-30), 0.0
        )
        _, singular, axes = np.linalg.svd(every * scale, full_matrices=False)
        first = singular[0] / math.sqrt(len(every)) if singular[0] > 0 else 1.0
        kept = scale[:, None] * axes[:COMPONENTS].T / first
        return cls(
            [values @ kept for values in centred], kept, [choice.liked for choice in choices]
        )

    def _events(self, groups: Sequence[int]) -> tuple[Floats, Floats]:
        """A choice of each liked member, as coordinates [E, G, K] with it first, then the members
        that were not liked, then zeros; and 0 [E, G] for members, minus infinity for those
        zeros."""
        size = max(len(self.groups[group]) for group in groups)
        z, allowed = [], []
        for group in groups:
            own, liked = self.groups[group], self.liked[group]
            others = [member for member in range(len(own)) if member not in liked]
            for member in liked:
                rows = own[[member, *others]]
                z.append(np.concatenate([rows, np.zeros((size - len(rows), rows.shape[1]))]))
                allowed.append(np.where(np.arange(size) < len(rows), 0.0, -np.inf))
        return np.stack(z), np.stack(allowed)

    def likelihood(self, theta: Floats, groups: Sequence[int]) -> float:
        """The log-likelihood of the choices in `groups`."""
        return _explained(theta, *self._events(groups))[2]

    def fit(self, groups: Sequence[int], variance: float) -> Floats:
        """The theta of a posterior mode, by Newton's method with the curvature of the choices
        without slips, which is positive, and halved steps."""
        z, allowed = self._events(groups)
        theta = np.zeros(z.shape[2])
        p, meant, best = _explained(theta, z, allowed)
        for _ in range(50):
            gradient = meant @ (z[:, 0] - (p[:, None] @ z)[:, 0]) - theta / variance
            curvature = _curvature(z, p, meant, variance)
            step = np.linalg.solve(curvature, gradient)
            while True:
                p, meant, likelihood = _explained(theta + step, z, allowed)
                now = likelihood - ((theta + step) ** 2).sum() / (2 * variance)
                if now >= best:
                    break
                step /= 2
                if np.abs(step).max() < 1e-9:
                    return theta
            theta, gained, best = theta + step, now - best, now
            if gained < 1e-6:
                break
        return theta

    def curvature(self, theta: Floats, groups: Sequence[int], variance: float) -> Floats:
        """Minus the second derivative of the log-posterior at theta, the inverse of its covariance;
        of choices that are meant, so that it is positive."""
        z, allowed = self._events(groups)
        p, meant, _ = _explained(theta, z, allowed)
        return _curvature(z, p, meant, variance)

    def agreement(self, theta: Floats, group: int) -> float:
        """`agreement_of` the utilities of a group."""
        return agreement_of(self.groups[group] @ theta, self.liked[group])


def agreement_of(utilities: Floats, liked: Sequence[int]) -> float:
    """The share of pairs of a liked and another picture that utilities [G] order as the person did;
    ties count one half."""
    others, chosen = np.delete(utilities, list(liked)), utilities[list(liked)][:, None]
    return float(np.mean((chosen > others) + 0.5 * (chosen == others)))


def _explained(theta: Floats, z: Floats, allowed: Floats) -> tuple[Floats, Floats, float]:
    """Of choices of the first of each row of members: the probabilities [E, G] of choices that are
    meant; the probability [E] that this one was meant and no slip; and the log-likelihood of them
    all."""
    utilities = z @ theta + allowed
    p = np.exp(utilities - np.logaddexp.reduce(utilities, axis=1)[:, None])
    meant, slipped = (1 - SLIPS) * p[:, 0], SLIPS / np.isfinite(allowed).sum(1)
    return p, meant / (meant + slipped), float(np.log(meant + slipped).sum())


def _curvature(z: Floats, p: Floats, meant: Floats, variance: float) -> Floats:
    """`_Block.curvature`, by the probabilities of `_explained`."""
    rows, mean = z.reshape(-1, z.shape[2]), (p[:, None] @ z)[:, 0]
    within = (rows * (meant[:, None] * p).reshape(-1, 1)).T @ rows
    return within - (meant[:, None] * mean).T @ mean + np.eye(z.shape[2]) / variance


class Clicks(Reward):
    """What the person who clicked would like: the head's utility, in standard deviations within
    groups; 0 before there is one.

    run: a session of `g2rpo teach` (its directory or votes), or another source of pairs, to whose
        answers the head is fitted; to pairs at the first call, at the size of its pictures.
    clip: a CLIP (folder or repository) whose features the head may use.

    A session fits the head itself, and sets `encoder` to another reward that has features.
    UserError for a run with too few answers.
    """

    def __init__(self, run: str | None = None, clip: str | None = None) -> None:
        self.encoder: PictureEncoder | None = CLIPScore(clip) if clip is not None else None
        self.head: Head | None = None
        self._pairs: Sequence[Judged] = ()
        self._shown: Sequence[int] = ()
        self._choices: list[Choice] = []
        if run is not None and (session := session_of(run)) is not None:
            choices = [
                Choice(features_of(images, [vote.prompt] * len(images), self.encoder), vote.liked)
                for vote, images in answered(session)
            ]
            self.head = fit(choices)
        elif run is not None:
            self._pairs = read_judged(run, "pairs")
            self._shown = sharing(self._pairs)
        if run is not None and self.head is None and len(self._pairs) < 2:
            raise UserError(f"reward clicks: {run} has fewer than two answers to fit a head to")

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        if (run := options["run"]) is not None:
            with placed("run: ", UserError):
                judged_in(run, "pairs")

    def known(self, height: int, width: int) -> list[Choice]:
        """The choices of the file of pairs, if there is one, as pictures of this size."""
        for pair in self._pairs[len(self._choices) :]:
            shown = self._shown[len(self._choices)]
            images = torch.cat([cut(path, width, height) for path in pair.pictures])
            features = features_of(images, [str(pair)] * 2, self.encoder)
            self._choices.append(Choice(features, (0,), shown))
        return self._choices

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        if self._pairs and self.head is None:
            self.head = fit(self.known(images.shape[-2], images.shape[-1]))
        if self.head is None:
            return torch.zeros(len(prompts))
        return self.head(features_of(images, prompts, self.encoder))

    @property
    def state(self) -> dict[str, Any]:
        return {} if self.head is None else self.head.state

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        self.head = Head.of(state) if state else None
