"""Noise: the seed of every draw, the distribution of one stochastic step, and the dtypes and shapes in
which steps are computed.

Random numbers have no state: every draw has its own generator, keyed by its purpose. A run is a
function of its config: nothing depends on how often, in which order or on which rank draws happen,
and resuming needs no generator state.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor


def seed_for(*key: int | str) -> int:
    """A 63-bit seed that depends on every part of `key`, the same on every machine and in every
    process."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_for(*key: int | str) -> torch.Generator:
    """A CPU generator seeded with `seed_for(*key)`; draws are made on the CPU so that they do not
    depend on the device."""
    return torch.Generator().manual_seed(seed_for(*key))


def draw_below(count: int, *key: int | str) -> int:
    """One of 0 .. count - 1, each as likely as any other; a function of its arguments."""
    return int(torch.randint(count, (), generator=generator_for(*key)))


NO_FLOAT64 = {"mps"}
"""Types of devices without float64."""


def in_float64(values: Tensor) -> Tensor:
    """`values` in float64, or as they are on a device that has none."""
    return values if values.device.type in NO_FLOAT64 else values.double()


def per_row(value: Tensor, like: Tensor) -> Tensor:
    """`value` [B] (or a scalar) shaped to broadcast against `like` [B, ...], in its dtype and on
    its device."""
    value = value.to(like)
    return value if value.ndim == 0 else value.reshape(-1, *[1] * (like.ndim - 1))


def precise(x: Tensor) -> Tensor:
    """x in float32 if its own dtype is narrower; steps and log-probs are never taken in
    bfloat16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def times(value: Tensor, x: Tensor) -> Tensor:
    """`value` [B] (or a scalar) times x [B, ...], in the dtype of x.

    If x is narrower than `value`, the result is what torch gives for `x * value` with a `value`
    without dimensions: a CPU rounds the product alone, a GPU rounds `value` as well.
    """
    if x.device.type == "cpu":
        return (per_row(value, precise(x)) * precise(x)).to(x.dtype)
    return per_row(value, x) * x


@dataclass(frozen=True)
class Normal:
    """The distribution of x_next after one stochastic step: independent normals, `mean` [B, ...],
    `std` [B] or scalar."""

    mean: Tensor
    std: Tensor

    @property
    def unit(self) -> Tensor:
        """The distance in which log-probs and KLs are measured: one standard deviation."""
        return self.std

    def sample(self, noise: Tensor) -> Tensor:
        """mean + std * noise; `noise` [G, ...] may have more rows than a one-row mean. The product
        has the dtype of `noise`."""
        return self.mean + times(self.std.to(noise.dtype), noise)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log density of x [B, ...], as the *mean* over a row's entries, [B].

        The mean (not the sum) is the convention of DDPO and its descendants: a ratio is then a
        geometric mean per entry, and a clip range of 1e-4 is a sensible one.
        """
        mean = precise(self.mean)
        std = per_row(self.std, mean)
        entries = (
            -((precise(x) - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
        )
        return entries.flatten(1).mean(1)
