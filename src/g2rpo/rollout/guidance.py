"""How a policy samples: its guidance scale, its size and its assistant, where it has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from g2rpo.core.types import Policy


def guidance_of(policy: object) -> float | None:
    """The guidance scale with which a policy samples; None without one."""
    inner = _inner(policy)
    scale, spec = getattr(inner, "guidance_scale", None), getattr(inner, "spec", None)
    if scale is None:
        return None
    return scale if (scale > 1 if spec is None else spec.guides(scale)) else None


@contextmanager
def guided_by(policy: Policy, scale: float | None) -> Iterator[None]:
    """While entered, the policy has the guidance scale `scale`; None: its own."""
    inner = _inner(policy)
    if scale is None:
        yield
        return
    before, inner.guidance_scale = inner.guidance_scale, scale
    try:
        yield
    finally:
        inner.guidance_scale = before


@contextmanager
def in_training(policy: Policy, scale: float | None) -> Iterator[None]:
    """While entered, the policy samples as training does: with this guidance, and with its assistant if it has one."""
    with getattr(_inner(policy), "assisted", nullcontext)(), guided_by(policy, scale):
        yield


@contextmanager
def sized(policy: Policy, size: tuple[int, int] | None) -> Iterator[None]:
    """While entered, the policy makes pictures of this height and width; None: of its own."""
    with _inner(policy).sized(*size) if size is not None else nullcontext():
        yield


def _inner(policy: object) -> Any:
    return getattr(policy, "policy", policy)  # of a CachedPolicy
