"""Draws that are keyed by their purpose: by hand from the digest, and different wherever a part of
the key is."""

import hashlib

import torch

from g2rpo.core.noise import draw_below, generator_for, seed_for


def test_a_seed_is_63_bits_of_the_keys_digest():
    by_hand = int(hashlib.blake2b(b"(7, 'rollout', 3)", digest_size=8).hexdigest(), 16) // 2
    assert seed_for(7, "rollout", 3) == by_hand < 2**63


def test_every_part_of_a_key_counts_and_so_does_its_kind():
    keys = [(0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2), (0, "a"), (0, 1, "a")]
    keys += [(0, "a", "1"), (0, "a1")]
    assert len({seed_for(*key) for key in keys}) == len(keys)
    assert len({float(torch.randn((), generator=generator_for(*key))) for key in keys}) == len(keys)


def test_every_number_below_is_as_likely_as_any_other():
    """1400 draws of 7: a count has mean 200 and standard deviation 13.1; six of them are
    allowed."""
    counts = torch.bincount(
        torch.tensor([draw_below(7, 0, "x", i) for i in range(1400)]), minlength=7
    )
    assert len(counts) == 7 and all(abs(int(count) - 200) < 79 for count in counts)
