"""Random numbers without state: every draw has its own generator, keyed by its purpose.

A run is a function of its config: nothing depends on how often, in which order or on which rank
draws happen, and resuming needs no generator state.
"""

from __future__ import annotations

import hashlib

import torch


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
