"""A person's taste from choices within groups: features of pictures, a Bayesian choice model on
them, and the reward of it.

A choice "i is the best of these" has the probability exp(u_i) / sum_j exp(u_j) of a Plackett-Luce
model (Bradley-Terry for two) with the utility u = theta . z, theta ~ N(0, variance), and z the
first principal components of one block of features within groups; a share `SLIPS` of the choices is
random. Block and variance are those under which left-out groups are most likely.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit
from torch import Tensor

from g2rpo.core.data import Judged
from g2rpo.core.errors import UserError
from g2rpo.core.files import local
from g2rpo.core.input_pictures import cut
from g2rpo.core.statistics import Interval
from g2rpo.core.types import Reward
from g2rpo.prompts.judged import read_judged
from g2rpo.rewards.clip import CLIPScore
from g2rpo.rewards.votes import FILE, answered

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
Features = Mapping[str, Tensor]
"""Features [G, D] of the pictures of a group, by block."""


class PictureEncoder(Protocol):
    """What a reward with a picture encoder has."""

    def features(self, images: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """Features [B, D] of pictures [B, 3, H, W] in [0, 1] and, if it has any, of their
        prompts."""
        ...


@torch.no_grad()
def features_of(
    images: Tensor, prompts: Sequence[str], encoder: PictureEncoder | None = None
) -> dict[str, Tensor]:
    """Features of pictures [B, 3, H, W] in [0, 1], or means over frames of clips [B, T, 3, H, W],
    by block: statistics of colour and layout, 8 x 8 pixels and, with an `encoder`, its features of
    the picture, and their products with any of the prompt's.
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
        if texts is not None:
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


@dataclass(frozen=True)
class Choice:
    """What a person liked of a group, by its members' indices: one, or several; the others lost to
    each of them."""

    features: Features
    liked: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(next(iter(self.features.values())))


@dataclass(frozen=True)
class Head:
    """A utility of pictures, in standard deviations within groups of what was shown, whose mean is
    0: `direction` [D] of one block, less `offset`."""

    block: str
    direction: Tensor
    offset: float
    agreement: Interval
    """The share of pairs of a liked and another picture that the head orders as the person did, in
    groups that it was not fitted to: mean over groups, with a 90 % interval."""

    def __call__(self, features: Features) -> Tensor:
        return (features[self.block].double() @ self.direction - self.offset).float()

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


def fit(choices: Sequence[Choice]) -> Head | None:
    """The head of these choices, in float64 on the CPU, so that it is the same on every rank; None
    for fewer than two groups with both a liked and another picture."""
    choices = [choice for choice in choices if 0 < len(choice.liked) < choice.size]
    if len(choices) < 2:
        return None
    blocks = {block: _Block.of(block, choices) for block in choices[0].features}
    agreed = []
    # nested: a left-out group does not choose the block by which it is judged
    for inside, outside in _folds(len(choices)):
        block, variance = _most_likely(blocks, inside)
        theta = blocks[block].fit(inside, variance)
        agreed += [blocks[block].agreement(theta, group) for group in outside]
    everyone = list(range(len(choices)))
    block, variance = _most_likely(blocks, everyone)
    theta = blocks[block].fit(everyone, variance)
    spread = float(np.sqrt(np.mean([np.var(z @ theta) for z in blocks[block].groups]))) or 1.0
    direction = torch.from_numpy(blocks[block].axes @ theta / spread)
    shown = torch.cat([choice.features[block].double() @ direction for choice in choices])
    return Head(block, direction, float(shown.mean()), agreement_interval(agreed, 0.9))


def agreement_interval(agreed: Sequence[float], level: float) -> Interval:
    """The t interval of the agreement in these groups and one more at chance: three perfect ones
    are not certain."""
    values = np.array([*agreed, CHANCE])
    mean, half = (
        values.mean(),
        stdtrit(len(agreed), (1 + level) / 2) * values.std(ddof=1) / math.sqrt(len(values)),
    )
    return Interval(
        float(mean), max(0.0, float(mean - half)), min(1.0, float(mean + half)), len(agreed)
    )


def mean_agreement(agreed: Sequence[float]) -> Interval:
    """The mean agreement in these groups, with `agreement_interval` of 95 %."""
    mean = float(np.mean(agreed)) if len(agreed) else math.nan
    return replace(agreement_interval(agreed, 0.95), mean=mean)


def _folds(count: int) -> list[tuple[list[int], list[int]]]:
    """(fitted, left out) groups of each fold, by turns."""
    parts = [list(range(start, count, min(FOLDS, count))) for start in range(min(FOLDS, count))]
    return [([group for group in range(count) if group not in part], part) for part in parts]


def _most_likely(blocks: Mapping[str, _Block], groups: Sequence[int]) -> tuple[str, float]:
    """The block and variance under which left-out groups of `groups` are most likely; the first of
    ties."""
    if len(groups) < 2:
        return next(iter(blocks)), VARIANCES[0]
    likelihood: dict[tuple[str, float], float] = {}
    for block, data in blocks.items():
        for variance in VARIANCES:
            parts = [
                ([groups[i] for i in fitted], [groups[i] for i in left])
                for fitted, left in _folds(len(groups))
            ]
            likelihood[block, variance] = sum(
                data.likelihood(data.fit(fitted, variance), left) for fitted, left in parts
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
        rows, theta = z.reshape(-1, z.shape[2]), np.zeros(z.shape[2])
        p, meant, best = _explained(theta, z, allowed)
        for _ in range(50):
            mean = (p[:, None] @ z)[:, 0]
            gradient = meant @ (z[:, 0] - mean) - theta / variance
            curvature = (rows * (meant[:, None] * p).reshape(-1, 1)).T @ rows - (
                meant[:, None] * mean
            ).T @ mean
            step = np.linalg.solve(curvature + np.eye(len(theta)) / variance, gradient)
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


class Clicks(Reward):
    """What the person who clicked would like: the head's utility, in standard deviations within
    groups; 0 before there is one.

    run: the directory of a session of `g2rpo teach`, or a file of pairs, to whose answers the head
        is fitted; to pairs at the first call, at the size of its pictures.
    clip: a CLIP (folder or repository) whose features the head may use.

    A session fits the head itself, and sets `encoder` to another reward that has features.
    UserError for a run with too few answers.
    """

    files: ClassVar[Mapping[str, tuple[str, ...]]] = {"run": (FILE,)}

    def __init__(self, run: str | None = None, clip: str | None = None) -> None:
        self.encoder: PictureEncoder | None = CLIPScore(clip) if clip is not None else None
        self.head: Head | None = None
        self._pairs: Sequence[Judged] = ()
        self._choices: list[Choice] = []
        if run is not None and local(run).is_file() and local(run).name != FILE:
            self._pairs = read_judged(run, "pairs")
        elif run is not None:
            folder = local(run) if local(run).is_dir() else local(run).parent
            found = answered(folder)
            choices = [
                Choice(features_of(images, [vote.prompt] * len(images), self.encoder), vote.liked)
                for vote, images in found
            ]
            self.head = fit(choices)
        if run is not None and self.head is None and len(self._pairs) < 2:
            raise UserError(f"reward clicks: {run} has fewer than two answers to fit a head to")

    def known(self, height: int, width: int) -> list[Choice]:
        """The choices of the file of pairs, if there is one, as pictures of this size."""
        for pair in self._pairs[len(self._choices) :]:
            images = torch.cat([cut(path, width, height) for path in pair.pictures])
            features = features_of(images, [str(pair)] * 2, self.encoder)
            self._choices.append(Choice(features, (0,)))
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
