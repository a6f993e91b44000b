"""A head: a small model of what people choose, fitted to choices within groups of pictures.

A choice "i is the best of these" has the probability exp(u_i) / sum_j exp(u_j) of a Plackett-Luce
model (Bradley-Terry for two) with the utility u = theta . z, theta ~ N(0, variance), and z the
first principal components of one block of features within groups; a share `SLIP_SHARE` of the choices is
random. Block and variance are those under which left-out groups are most likely.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit
from torch import Tensor

from g2rpo.core.statistics import Interval

Features = Mapping[str, Tensor]
"""Features [G, D] of the pictures of a group, by block."""


class PictureEncoder(Protocol):
    """What a reward with a picture encoder has."""

    def features(self, images: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Features [B, D] of pictures [B, 3, H, W] in [0, 1] and of their prompts."""
        ...


@torch.no_grad()
def features_of(
    images: Tensor, prompts: Sequence[str], encoder: PictureEncoder | None = None
) -> dict[str, Tensor]:
    """Features of pictures [B, 3, H, W] in [0, 1], or means over frames of clips [B, T, 3, H, W],
    by block: statistics of colour and layout, 8 x 8 pixels and, with an `encoder`, its features of
    the picture, and their products with the prompt's.
    """
    if images.ndim == 5:
        every = features_of(
            images.flatten(0, 1),
            [prompt for prompt in prompts for _ in range(images.shape[1])],
            encoder,
        )
        return {
            block: values.unflatten(0, images.shape[:2]).mean(1) for block, values in every.items()
        }
    images = images.float().cpu()
    found = {
        "colour": _colour(images),
        "layout": _layout(images),
        "pixels": torch.nn.functional.adaptive_avg_pool2d(images, 8).flatten(1),
    }
    if encoder is not None:
        pictures, texts = encoder.features(images, prompts)
        found["encoder"] = pictures.float().cpu()
        found["encoder x prompt"] = found["encoder"] * texts.float().cpu()
    return found


def _colour(images: Tensor) -> Tensor:
    """Means and deviations of the channels, saturation, red less blue, and the share of dark and of
    bright pixels."""
    luma = images.mean(1)
    saturation = images.amax(1) - images.amin(1)
    parts = [
        images.mean((2, 3)),
        images.std((2, 3)),
        saturation.mean((1, 2))[:, None],
        (images[:, 0] - images[:, 2]).mean((1, 2))[:, None],
    ]
    shares = [
        torch.sigmoid(20 * (0.35 - luma)).mean((1, 2))[:, None],
        torch.sigmoid(20 * (luma - 0.65)).mean((1, 2))[:, None],
    ]
    return torch.cat(parts + shares, 1)


def _layout(images: Tensor) -> Tensor:
    """Where and how much differs from the ground, the median colour: on 4 x 4 places, in all, its
    extent, its edges; and how far the picture is from its mirror images."""
    ground = images.flatten(2).median(2).values[..., None, None]
    ink = (images - ground).abs().amax(1)
    places = torch.nn.functional.adaptive_avg_pool2d(ink[:, None], 4).flatten(1)
    rows, columns = (torch.linspace(-1, 1, size) for size in ink.shape[1:])
    mass = ink.sum((1, 2)) + 1e-6
    v, u = (ink.sum(2) * rows).sum(1) / mass, (ink.sum(1) * columns).sum(1) / mass
    extent = (
        ink * ((rows[None, :, None] - v[:, None, None]) ** 2 + (columns - u[:, None])[:, None] ** 2)
    ).sum((1, 2)) / mass
    edges = (ink[:, 1:] - ink[:, :-1]).abs().mean((1, 2)) + (
        ink[:, :, 1:] - ink[:, :, :-1]
    ).abs().mean((1, 2))
    mirror = [(images - images.flip(side)).abs().mean((1, 2, 3)) for side in (2, 3)]
    solid = torch.sigmoid(20 * (ink - 0.25)).mean((1, 2))
    return torch.cat([places, torch.stack([ink.mean((1, 2)), solid, extent, edges, *mirror], 1)], 1)


MOST_COMPONENTS = 24
VARIANCES = (1.0, 10.0)
FOLDS = 4
SLIP_SHARE = 0.1
"""The share of choices that are taken at random: without it a single slip outweighs several
choices."""
CHANCE, TRUSTED = 0.5, 0.55
"""The agreement of a head that guesses; that above which the lower end of a 90 % interval has to
lie before a head counts."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Choice:
    """What people liked of a group, by its members' indices: one, or several; the others lost to
    each of them."""

    features: Features
    liked: tuple[int, ...]
    about: Hashable
    """Choices about the same thing, such as a prompt, may share pictures, so none of them judges
    what others are fitted to."""

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
    groups that it was not fitted to (`agreement_interval`)."""

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
    def trusted(self) -> bool:
        """Whether it agrees with people surely enough to be trained on."""
        return self.agreement.low > TRUSTED

    @property
    def state(self) -> dict[str, Any]:
        """Plain data and tensors, for a checkpoint."""
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Head:
        """The head with this `state`."""
        return cls(**{**state, "agreement": Interval(**state["agreement"])})


def fit(choices: Sequence[Choice]) -> Head | None:
    """The head of these choices, in float64 on the CPU, so that it is the same on every rank; None
    for fewer than two groups with both a liked and another picture."""
    choices = [choice for choice in choices if 0 < len(choice.liked) < choice.size]
    if len(choices) < 2:
        return None
    groups, about = range(len(choices)), [choice.about for choice in choices]
    about = about if len({*about}) > 1 else list(groups)
    blocks = {block: _Block.of(block, choices) for block in choices[0].features}
    agreed: dict[Hashable, list[float]] = {}
    # nested: a left-out group does not choose the block by which it is judged
    for inside, outside in _folds(groups, about):
        block, variance = _most_likely(blocks, inside, about)
        theta = blocks[block].fit(inside, variance)
        for group in outside:
            agreed.setdefault(about[group], []).append(blocks[block].agreement(theta, group))
    block, variance = _most_likely(blocks, groups, about)
    own = blocks[block]
    theta = own.fit(groups, variance)
    shown = [own.groups[group] @ theta for group in groups]
    spread = float(np.sqrt(np.mean([np.var(utilities) for utilities in shown]))) or 1.0
    direction = torch.from_numpy(own.axes @ theta / spread)
    lower = np.linalg.cholesky(own.curvature(theta, groups, variance))
    root = torch.from_numpy(np.linalg.solve(lower, own.axes.T).T / spread)
    pictures = torch.cat([choice.features[block].double() @ direction for choice in choices])
    offset = float(pictures.mean())
    means = [float(np.mean(values)) for values in agreed.values()]
    return Head(block, direction, root, offset, agreement_interval(means))


def agreement_interval(agreed: Sequence[float]) -> Interval:
    """The t interval of 90 % of the agreement in these groups and one more at chance: three perfect
    ones are not certain."""
    values = np.array([*agreed, CHANCE])
    mean, spread = float(values.mean()), values.std(ddof=1)
    half = float(stdtrit(len(agreed), 0.95) * spread) / math.sqrt(len(values))
    return Interval(mean, max(0.0, mean - half), min(1.0, mean + half), len(agreed))


def _folds(groups: Sequence[int], about: Sequence[Hashable]) -> list[tuple[list[int], list[int]]]:
    """(fitted, left out) groups of each fold, by turns of what they are about; none where all are
    about the same."""
    every = list(dict.fromkeys(about[group] for group in groups))
    count = min(FOLDS, len(every))
    turns = {thing: place % count for place, thing in enumerate(every)}
    folds = []
    for turn in range(count if count > 1 else 0):
        left = [group for group in groups if turns[about[group]] == turn]
        folds.append(([group for group in groups if group not in left], left))
    return folds


def _most_likely(
    blocks: Mapping[str, _Block], groups: Sequence[int], about: Sequence[Hashable]
) -> tuple[str, float]:
    """The block and variance under which left-out groups of `groups` are most likely; the first of
    ties."""
    folds = _folds(groups, about)
    likelihood = {
        (block, variance): sum(
            data.likelihood(data.fit(fitted, variance), left) for fitted, left in folds
        )
        for block, data in blocks.items()
        for variance in VARIANCES
    }
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
        kept = scale[:, None] * axes[:MOST_COMPONENTS].T / first
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
        """The share of pairs of a liked and another picture of a group that its utilities order as
        people did; ties count one half."""
        utilities, liked = self.groups[group] @ theta, list(self.liked[group])
        others, chosen = np.delete(utilities, liked), utilities[liked][:, None]
        return float(np.mean((chosen > others) + 0.5 * (chosen == others)))


def _explained(theta: Floats, z: Floats, allowed: Floats) -> tuple[Floats, Floats, float]:
    """Of choices of the first of each row of members: the probabilities [E, G] of choices that are
    meant; the probability [E] that this one was meant and no slip; and the log-likelihood of them
    all."""
    utilities = z @ theta + allowed
    p = np.exp(utilities - np.logaddexp.reduce(utilities, axis=1)[:, None])
    meant, slipped = (1 - SLIP_SHARE) * p[:, 0], SLIP_SHARE / np.isfinite(allowed).sum(1)
    return p, meant / (meant + slipped), float(np.log(meant + slipped).sum())


def _curvature(z: Floats, p: Floats, meant: Floats, variance: float) -> Floats:
    """`_Block.curvature`, by the probabilities of `_explained`."""
    rows, mean = z.reshape(-1, z.shape[2]), (p[:, None] @ z)[:, 0]
    within = (rows * (meant[:, None] * p).reshape(-1, 1)).T @ rows
    return within - (meant[:, None] * mean).T @ mean + np.eye(z.shape[2]) / variance
