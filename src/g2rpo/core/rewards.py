"""What scores pictures: `Reward`, and functions and objects that stand in for one."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from g2rpo.core.errors import at_least_one, shown
from g2rpo.core.plugins import keeping_settings


@dataclass(frozen=True)
class Frames:
    """How a reward of pictures scores clips.

    every: frames 0, `every`, 2 `every`, ... are scored. Video VAEs make four frames (Wan) or eight
        (LTX-Video) of one latent frame, so neighbours differ little.
    reduce: "mean" of the frames' scores, or "min", their least. Frames without a score are left
    out.
    """

    every: int = 4
    reduce: Literal["mean", "min"] = "mean"

    def __post_init__(self) -> None:
        at_least_one(every=self.every)
        if self.reduce not in ("mean", "min"):
            raise ValueError(f"reduce must be mean or min, got {shown(self.reduce)}")

    def of(self, length: int) -> int:
        """How many frames of a clip of `length` frames are scored."""
        return math.ceil(length / self.every)


@dataclass(frozen=True)
class RewardModel:
    """The size of a reward's model: networks on the meta device with a call that scores one
    picture, or numbers."""

    networks: Sequence[torch.nn.Module] = ()
    score: Callable[[], Any] = lambda: None
    parameters: int = 0
    flops: float = 0.0
    """Floating-point operations for one picture, besides those of `score`."""


Scorer = Callable[[Tensor, Sequence[str]], Any]
"""A `Reward`, or a function or object with its signature, which `as_reward` wraps."""


class Reward:
    """Scores pictures: raw, unweighted, higher is better. NaN means "no score" and is masked out of
    its group.

    A subclass needs `__call__`; the rest has defaults. A function, or an object of another class,
    may have the same attributes.
    """

    right: float | None = None
    """The least score of a right picture: pictures are then marked, and the share of right ones is
    logged."""
    right_in_words: str | None = None
    """What a right picture does, for the first sentence of the report: "Spells {} texts" becomes
    "Spells 71 % of 192 held-out texts"; words without {}, such as "in the asked colour", follow
    those of another reward."""
    video: bool = False
    """Whether it takes whole clips [B, T, 3, H, W] of a video policy. Clips are otherwise scored by
    their `frames`."""
    latent: bool = False
    """Whether it takes final latents [B, ...] (as `Policy.decode` does): where all rewards do,
    training decodes nothing."""
    differentiable: bool = False
    """Whether scores of pictures that require a gradient carry it, on any device; ReFL and
    DiffusionOPSD need that."""
    device: torch.device | None = None
    """Where it computes, if that is an accelerator; where the policy is, nothing is rolled out
    meanwhile."""
    waits: bool = False
    """Whether it may wait for an answer from elsewhere: pictures are then scored while other
    prompts are rolled out."""
    frames: Frames | None = None
    """The frames of clips that it scores; None: those of `Frames()`."""
    state: Any = None
    """State that changes during the run: plain data and tensors, saved in checkpoints and restored
    on resuming. It must be equal on all ranks, which score different pictures."""

    # Declarations of the class, read by checks and `g2rpo plan` before construction; options are
    # constructor arguments.
    upstream: ClassVar[str] = ""
    """The URL of the code whose scores are reproduced, and its `licence`."""
    licence: ClassVar[str] = ""
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """By option that names a file, a folder or a hub repository: file names, one of which must
    exist there."""
    code_option: ClassVar[str] = ""
    """The option that may name code, as FILE.py:NAME."""
    libraries: ClassVar[tuple[str, ...]] = ()
    """Libraries that it needs besides g2rpo's own requirements."""
    side: ClassVar[int | None] = None
    """The height and width of its pictures, if it takes one size only (the testbed's)."""
    asks: ClassVar[bool] = False
    """Whether the constructor sends a request to a server, with the time limit `timeout_s` of its
    option `endpoint`."""
    wants: ClassVar[str] = ""
    """What it needs of a prompt beside its text, in words for messages: a quoted text, metadata, an
    input picture."""

    @staticmethod
    def target(prompt: str) -> Any:
        """The part of the prompt that `wants` describes, None if absent; ValueError if its metadata
        are malformed."""
        return None

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """UserError that begins with the name of an option that is wrong beyond its type; called
        before anything is loaded."""

    @classmethod
    def fault(cls, options: Mapping[str, Any], prompts: Sequence[str]) -> str | None:
        """Why a reward with all these options cannot score these prompts; None if it can. Called
        before anything is loaded."""
        if not cls.wants:
            return None
        targets = []
        for prompt in prompts:
            try:
                targets.append(cls.target(prompt))
            except ValueError as error:
                return f"the metadata of prompt {prompt!r}: {error}"
        return None if any(targets) else f"none of {len(prompts)} prompts has {cls.wants}"

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel | None:
        """The model that runs in this process, given all options; None if unknown. Called by `g2rpo
        plan`, on the meta device."""
        return None if "device" in inspect.signature(cls).parameters else RewardModel()

    def prepare(self, height: int, width: int) -> str | None:
        """Called once before training, with the size of the pictures; returns a line to print."""
        return None

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores [B], float32 on CPU, of images [B, 3, H, W] in [0, 1], each for its own prompt."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__")

    @property
    def name(self) -> str:
        return type(self).__name__

    def answer(self, images: Tensor, prompts: Sequence[str]) -> Any:
        """What a call returns; it leaves torch's settings as they were."""
        with keeping_settings(f"the reward {self.name}"):
            return self(images, prompts)

    @torch.no_grad()
    def scores(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """The scores of a call as float32 [B] on CPU, infinite ones as NaN; ValueError unless there
        is one number per picture."""
        answer = self.answer(images, list(prompts))
        if inspect.iscoroutine(answer):  # of an async function
            answer = asyncio.run(answer)
        if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping):
            answer = answer[0]  # with details, as other trainers have them
        values = _as_numbers(answer)
        if values is None or values.shape != (len(prompts),):
            returned = _described(answer) if values is None else f"the shape {list(values.shape)}"
            raise ValueError(
                f"should return {len(prompts)} scores, one per image, but returned {returned}"
            )
        values = values.detach().float().cpu()
        return values.where(values.isfinite(), torch.nan)


def _as_numbers(answer: Any) -> Tensor | None:
    """The tensor of what a reward returned, in which None is NaN; None if it holds other things
    than numbers."""
    try:
        if isinstance(answer, np.ndarray) and answer.ndim == 1:
            answer = answer.tolist()  # torch refuses some, and does not see what is masked
        if isinstance(answer, list | tuple):
            answer = [math.nan if value is None else _number(value) for value in answer]
        return torch.as_tensor(answer)
    except (TypeError, ValueError, RuntimeError):
        return None


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError("a text is no number, whatever stands in it")
    return float(value)


def _described(answer: Any) -> str:
    """What a reward returned, in words."""
    if answer is None:
        return "None"
    if isinstance(answer, Mapping):
        return f"a mapping of {shown(list(answer))}: return one of these"
    held = f" of {type(answer[0]).__name__}" if isinstance(answer, list | tuple) and answer else ""
    return f"a {type(answer).__name__}{held}, {shown(answer)}"


COPIED_ATTRIBUTES = (
    "right", "right_in_words", "video", "latent", "differentiable", "device", "waits", "frames",
)  # fmt: skip
"""Attributes of `Reward` that functions and objects of other classes may have."""


class CallableReward(Reward):
    """A reward from a function or an object of any class, called with `options`; its attributes of
    `Reward` are copied."""

    def __init__(self, scorer: Scorer, options: Mapping[str, Any] | None = None) -> None:
        self.scorer, self.options = scorer, dict(options or {})
        self.__doc__ = inspect.getdoc(scorer)
        for name in COPIED_ATTRIBUTES:
            setattr(self, name, getattr(scorer, name, getattr(Reward, name)))

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel | None:
        return None

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Any:
        return self.scorer(images, prompts, **self.options)

    @property
    def state(self) -> Any:
        return getattr(self.scorer, "state", None)

    @state.setter
    def state(self, state: Any) -> None:
        self.scorer.state = state  # type: ignore[attr-defined]

    @property
    def name(self) -> str:
        return getattr(self.scorer, "__qualname__", type(self.scorer).__name__)


def as_reward(scorer: Scorer) -> Reward:
    """`scorer` itself if it is a `Reward`, else a `CallableReward`."""
    return scorer if isinstance(scorer, Reward) else CallableReward(scorer)


def as_rewards(scorers: Mapping[str, Scorer]) -> dict[str, Reward]:
    return {name: as_reward(scorer) for name, scorer in scorers.items()}
