"""How a policy samples: its guidance and its size, where it has them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from g2rpo.core.data import Prompt
from g2rpo.core.errors import UserError
from g2rpo.core.holding import holding
from g2rpo.core.images import images_of
from g2rpo.rollout.engine import Engine


def guidance_of(policy: object) -> float | None:
    """The guidance scale with which a policy samples; None without one, or where the network does
    not take it."""
    scale, spec = getattr(policy, "guidance_scale", None), getattr(policy, "spec", None)
    if scale is None or not getattr(policy, "guidable", True):
        return None
    return scale if (scale > 1 if spec is None else spec.guides(scale)) else None


def guided_by_hand(policy: object) -> bool:
    """Whether classifier-free guidance of a policy is by hand, because it has none of its own."""
    return not getattr(policy, "guided", guidance_of(policy) is not None)


def check_guidance(policy: object, scale: float | None) -> None:
    """UserError for a policy that cannot train with the guidance scale `scale` (None: its own)."""
    if scale is not None and not hasattr(policy, "guidance_scale"):
        kind = type(policy).__name__
        raise UserError(
            f"sampling.guidance_scale={scale:g}: a {kind} has no guidance_scale; take it out"
        )


def guided_by(policy: object, scale: float | None) -> AbstractContextManager[None]:
    """While entered, the policy has the guidance scale `scale`; None: its own."""
    return nullcontext() if scale is None else holding(policy, guidance_scale=scale)


def sized(policy: Any, size: tuple[int, int] | None) -> AbstractContextManager[None]:
    """While entered, the policy makes pictures of this height and width; None: of its own."""
    return nullcontext() if size is None else policy.sized(*size)


@dataclass(frozen=True)
class Guidance:
    """Guidance in the first `steps` steps (None: in all).

    `scale` is the policy's own scale there. `cfg` is the scale s of classifier-free guidance by
    hand (arXiv 2207.12598), for policies without any of their own: v_negative + s (v - v_negative),
    with a second evaluation, of the negative prompt.
    """

    scale: float | None = None
    cfg: float | None = None
    negative_prompt: str = ""
    steps: int | None = None

    def encoded(self, prompts: Sequence[str]) -> list[str]:
        """The prompts and, for guidance by hand, their negative ones with the same input
        pictures."""
        negative = [Prompt(self.negative_prompt, images_of(prompt)) for prompt in prompts]
        return [*prompts, *(negative if self.cfg is not None else [])]


@dataclass(kw_only=True)
class GuidedEngine(Engine):
    """An engine whose velocities are guided; all rows of a call are at one step. The conditioning
    has the rows of `Guidance.encoded`."""

    guidance: Guidance

    def velocity(self, x: Tensor, steps: Sequence[int], prompts: Sequence[int]) -> Tensor:
        (step,) = {*steps}
        g = self.guidance
        if g.steps is not None and step >= g.steps:
            return super().velocity(x, steps, prompts)
        with guided_by(self.policy, g.scale):
            v = super().velocity(x, steps, prompts)
        if g.cfg is None:
            return v
        half = len(self.cond) // 2
        without = super().velocity(x, steps, [half + row for row in prompts])
        return without + g.cfg * (v - without)
