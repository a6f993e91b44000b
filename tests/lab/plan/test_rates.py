"""Times of kernels against counts by hand and torch's own counter."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from g2rpo.lab.plan import trace
from g2rpo.lab.plan.cards import CARDS, Card
from g2rpo.lab.plan.counting import count
from g2rpo.lab.plan.kernels import (
    ATTENTION,
    BACKWARD,
    CONVOLUTIONS,
    MOVING,
    PRODUCTS,
    Meter,
    Rates,
    Roofline,
    fixed_storages,
)
from g2rpo.lab.plan.trace import trace_calls
from g2rpo.models.blueprint import read_blueprint
from tests.lab.plan.test_cost import config
from tests.support.policies import build_on_meta
from tests.support.tables import rows

CARD = Card("made up", 1, 2e-9, 1e-9, 1e-6, watts=1, cache=0, hbm=True, pattern="")
"""2000 and 1000 operations a second; 1000 bytes a second; no cache."""
PEAK = Rates(
    **dict.fromkeys(("hbm", "most", "attention", "flash2", "backward", "convolutions"), 1),
    **{"bandwidth": 1, "hbm_power": 0, "gap": 0, "launch": 0, "launch_checkpointed": 0},
)


def traced(call, existing=()):
    with Meter(existing) as found, torch.no_grad():
        call()
    return Roofline(tuple(found.kernels), fixed_storages(found.kernels, found.existing))


def moved(roofline, *kinds):
    chosen = [kernel for kernel in roofline.kernels if kernel.kind in kinds]
    return [sum((*each.reads.values(), *each.writes.values())) for each in chosen]


def test_a_block_by_hand():
    """x -> norm -> product -> gelu -> product -> + x, of 6 rows: 2 * 6 * 4 * 8 operations in each
    product, float32."""
    x, up, down = torch.randn(6, 4), torch.randn(4, 8), torch.randn(8, 4)
    kernels = traced(lambda: x + F.gelu(F.layer_norm(x, (4,)) @ up) @ down)
    narrow, wide, weights, statistics = 4 * 6 * 4, 4 * 6 * 8, 4 * 4 * 8, 2 * 4 * 6
    assert kernels.flops == 2 * 2 * 6 * 4 * 8
    assert moved(kernels, PRODUCTS) == [narrow + weights + wide] * 2
    assert moved(kernels, MOVING) == [2 * narrow + statistics, 2 * wide, 3 * narrow]


def test_casts_views_and_expanded_tensors():
    """A view moves nothing; an expanded row is read once; a cast writes half of what it reads."""
    x, row = torch.randn(6, 4), torch.randn(1, 4)
    kernels = traced(
        lambda: x.t().reshape(4, 6).t().unsqueeze(0).add(row.expand(6, 4)).to(torch.bfloat16)
    )
    assert moved(kernels, MOVING) == [96 + 16 + 96, 96 + 48]


def test_seconds_are_of_the_slower_of_operations_and_bytes():
    # 32,000 operations, 32,064 bytes
    narrow = traced(lambda: torch.ones(4, 1000) @ torch.ones(1000, 4)).kernels[-1]
    # 2,000,000 and 120,000
    square = traced(lambda: torch.ones(100, 100) @ torch.ones(100, 100)).kernels[-1]
    both = Roofline((narrow, square))
    assert both.seconds(CARD, PEAK)[PRODUCTS] == pytest.approx(32.064 + 2000)
    slower = replace(PEAK, hbm=0.5, bandwidth=0.25, gap=7.0)
    assert both.seconds(CARD, slower)[PRODUCTS] == pytest.approx(4 * 32.064 + 4000)
    assert both.seconds(CARD, slower)[MOVING] == 14
    assert both.call(CARD, replace(PEAK, launch=5000.0)) == 10000


def test_what_the_cache_holds_is_not_read_from_memory():
    """x -> y -> z, of a megabyte each, and x + z. Without a cache 2 + 2 + 3 MB pass; one of 2 MB
    has y and z when they are read, and writes nothing; one of 5 MB has x too, but for its first
    reading."""
    x = torch.ones(250_000)
    kernels = traced(lambda: x + (x * 2) * 3)
    seconds = [
        kernels.seconds(replace(CARD, cache=megabytes), PEAK)[MOVING] for megabytes in (0, 2, 5)
    ]
    assert seconds == [7000, 2000, 1000]


def test_a_call_of_fewer_rows_has_the_same_weights():
    weight = torch.ones(1000, 1000)
    many, few_rows = (
        traced(lambda rows=rows: torch.relu(torch.ones(rows, 1000) @ (weight * 2)), [weight])
        for rows in (64, 16)
    )
    for card in (CARD, CARDS["h100"]):
        assert many.call(card, PEAK, rows=0.25) == pytest.approx(
            few_rows.call(card, PEAK), rel=1e-6
        )


@pytest.mark.parametrize(("card", "slower"), [("h100", False), ("l40s", True), ("a100", False)])
def test_the_gradient_of_attention_is_slower_on_cards_with_gddr(card, slower):
    """A training pass with many tokens was planned 1.5 times too fast there."""
    query, key, value = torch.ones(3, 1, 2, 64, 8, requires_grad=True).unbind()
    with Meter() as found:
        F.scaled_dot_product_attention(query, key, value).sum().backward()
    both = Roofline(tuple(each for each in found.kernels if each.kind in (ATTENTION, BACKWARD)))
    rates = replace(PEAK, attention=1.0, flash2=1.0, backward=0.5)
    forward, gradient = (both.seconds(CARDS[card], rates)[kind] for kind in (ATTENTION, BACKWARD))
    assert gradient / forward == pytest.approx(2.5 * (2 if slower else 1))


def test_convolutions_and_compiled_networks_have_rates_of_their_own():
    picture, weight = torch.ones(1, 8, 16, 16), torch.ones(8, 8, 3, 3)
    kernels = traced(lambda: F.conv2d(picture, weight).relu())
    assert [kernel.kind for kernel in kernels.kernels] == [CONVOLUTIONS, MOVING]
    eager, compiled = (
        replace(kernels, compiled=fused).seconds(CARD, replace(PEAK, compiled=0.5))
        for fused in (False, True)
    )
    assert compiled[CONVOLUTIONS] == eager[CONVOLUTIONS] and compiled[MOVING] == eager[MOVING] / 2


@pytest.mark.slow
def test_autocast_moves_more(flux_directory):
    changes = [], ["policy.autocast=false"]
    wide, narrow = (
        traced_calls(flux_directory, "policy.dtype=bfloat16", *more).velocity.roofline
        for more in changes
    )
    assert wide.flops == narrow.flops
    assert sum(moved(wide, MOVING)) > sum(moved(narrow, MOVING))


@pytest.mark.slow
def test_attention_by_torchs_own_operations_keeps_its_scores(flux_directory):
    fused, plain = (
        traced_calls(flux_directory, f"policy.attention={kind}").velocity
        for kind in ("auto", "math")
    )
    kinds = [{kernel.kind for kernel in each.roofline.kernels} for each in (fused, plain)]
    assert ATTENTION in kinds[0] - kinds[1]
    assert plain.roofline.flops == fused.roofline.flops
    assert plain.peak > fused.peak


SHALLOW = """
flux -> 1e-9
flux policy.dtype=bfloat16 policy.gradient_checkpointing=true -> 1e-9
qwen policy.dtype=bfloat16 policy.gradient_checkpointing=true policy.guidance_scale=4 -> 0.02
"""
"""The last calls its network twice, for prompts and for their negative; no gradient reaches what its
last block makes of the text."""


@pytest.mark.slow
@pytest.mark.parametrize(("words", "off"), rows(SHALLOW))
def test_two_blocks_stand_for_all(deep, monkeypatch, words, off):
    """Memory, operations and seconds of a call and of a training pass, against those of the model
    with every block.

    The bytes of attention's float32 statistics and of the last block's gradients differ: within a
    percent.
    """
    model, *overrides = words.split()
    off, shallow = float(off), traced_calls(deep[model], *overrides)
    monkeypatch.setattr(trace, "build_shallow", whole)
    full = traced_calls(deep[model], *overrides)
    for name in ("velocity", "training"):
        assert getattr(shallow, name).peak == pytest.approx(getattr(full, name).peak, rel=0.02)
        some, every = (getattr(calls, name).roofline for calls in (shallow, full))
        assert len(some.kernels) < len(every.kernels)
        assert some.flops == pytest.approx(every.flops, rel=off)
        assert some.launches == pytest.approx(every.launches, rel=0.02 + off)
        assert some.call(CARD, PEAK) == pytest.approx(every.call(CARD, PEAK), rel=0.02 + off)


def whole(blueprint, policy):
    built = build_on_meta(blueprint, policy)
    return built, [1] * len(built.blocks)


def traced_calls(directory, *overrides):
    c = config(directory, *overrides)
    return trace_calls(read_blueprint(c.policy), c, count(c, 3), like_cuda=True)
