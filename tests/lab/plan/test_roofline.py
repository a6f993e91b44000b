"""Rooflines against counts by hand and torch's own counter."""

import pytest
import torch
from torch.nn import functional as F

from g2rpo.assembly.blueprint import build_on_meta, read_blueprint
from g2rpo.lab.plan import trace
from g2rpo.lab.plan.cards import Card
from g2rpo.lab.plan.counting import count
from g2rpo.lab.plan.roofline import CASTS, NORMS, PEAK, PRODUCTS, REST, Meter, Reached, Roofline
from g2rpo.lab.plan.trace import trace_calls
from tests.lab.plan.test_cost import config
from tests.support.variants import few

CARD = Card("made up", 1, bfloat16=2e-9, float8=4e-9, float32=1e-9, bandwidth=1e-6, pattern="")
"""2000, 4000 and 1000 operations a second; 1000 bytes a second."""


def traced(call):
    with Meter() as found, torch.no_grad():
        call()
    return Roofline(tuple(found.kernels))


def test_a_block_by_hand():
    """x -> norm -> product -> gelu -> product -> + x, of 6 rows: 2 * 6 * 4 * 8 operations in each product, float32."""
    x, up, down = torch.randn(6, 4), torch.randn(4, 8), torch.randn(8, 4)

    def block():
        return x + F.gelu(F.layer_norm(x, (4,)) @ up).mul(2.0).mul(3.0) @ down

    kernels = traced(block)
    narrow, wide, weights, statistics = 4 * 6 * 4, 4 * 6 * 8, 4 * 4 * 8, 2 * 4 * 6
    assert kernels.flops == 2 * 2 * 6 * 4 * 8
    assert kernels.bytes(PRODUCTS) == 2 * (narrow + weights + wide)
    assert kernels.bytes(NORMS) == 2 * narrow + statistics
    assert kernels.bytes(REST) == 3 * 2 * wide + 3 * narrow
    fused = kernels.fused()  # norm; gelu and the two factors; the sum
    assert fused.flops == kernels.flops and fused.bytes(PRODUCTS) == kernels.bytes(PRODUCTS)
    assert [k.moved for k in fused.kernels if k.kind == REST] == [2 * narrow + statistics, 2 * wide, 3 * narrow]


def test_a_stream_that_passes_by_a_product_is_written_and_read_again():
    """What is kept beside a product cannot be fused with what follows it."""
    x, weight = torch.randn(6, 4), torch.randn(4, 4)

    def around():
        y = x * 2
        return y + (y * 3) @ weight

    assert [k.moved for k in traced(around).fused().kernels if k.kind == REST] == [3 * 96, 3 * 96]


def test_casts_views_and_expanded_tensors():
    """A view moves nothing; an expanded row is read once; a cast writes half of what it reads."""
    x, row = torch.randn(6, 4), torch.randn(1, 4)
    kernels = traced(lambda: x.t().reshape(4, 6).t().unsqueeze(0).add(row.expand(6, 4)).to(torch.bfloat16))
    assert [(k.kind, k.moved) for k in kernels.kernels] == [(REST, 96 + 16 + 96), (CASTS, 96 + 48)]


def test_seconds_are_of_the_slower_of_operations_and_bytes():
    narrow = traced(lambda: torch.ones(4, 1000) @ torch.ones(1000, 4)).kernels[-1]  # 32,000 operations, 32,064 bytes
    square = traced(lambda: torch.ones(100, 100) @ torch.ones(100, 100)).kernels[-1]  # 2,000,000 and 120,000
    both = Roofline((narrow, square))
    assert both.seconds(CARD)[PRODUCTS] == pytest.approx(32.064 + 2000)
    assert both.seconds(CARD, Reached(0.5, 1, 0.25))[PRODUCTS] == pytest.approx(4 * 32.064 + 4000)


def test_autocast_moves_more_and_float8_is_counted_as_such(flux_directory):
    wide, narrow, eight = (
        rollout_call(flux_directory, "policy.dtype=bfloat16", *more)
        for more in ([], ["policy.autocast=false"], ["policy.autocast=false", "policy.quantize=fp8"])
    )
    assert wide.flops == narrow.flops == eight.flops
    assert wide.bytes(NORMS, CASTS, REST) > narrow.bytes(NORMS, CASTS, REST)
    in_float8 = sum(kernel.times * kernel.flops for kernel in eight.kernels if kernel.dtype == "float8")
    assert 0 < in_float8 < eight.flops and eight.seconds(CARD)[PRODUCTS] < narrow.seconds(CARD)[PRODUCTS]


@pytest.mark.parametrize(
    "overrides", few([[], ["policy.dtype=bfloat16", "policy.gradient_checkpointing=true"]], [].__eq__), ids=str
)
def test_two_blocks_stand_for_all(deep, monkeypatch, overrides):
    """Meter, operations and bytes of a call and of a training pass, against those of the model with every block.

    The bytes of attention's float32 statistics and of the last block's gradients differ: within a percent.
    """
    shallow = traced_calls(deep["flux"], *overrides)
    monkeypatch.setattr(trace, "build_shallow", whole)
    full = traced_calls(deep["flux"], *overrides)
    for name in ("single", "velocity", "training"):
        some, every = (getattr(calls, name).roofline for calls in (shallow, full))
        assert len(some.kernels) < len(every.kernels)
        assert some.flops == pytest.approx(every.flops, rel=1e-9)
        assert some.launches == pytest.approx(every.launches, rel=0.02)
        assert some.call(CARD, PEAK) == pytest.approx(every.call(CARD, PEAK), rel=0.02)
        assert some.fused().call(CARD, PEAK) == pytest.approx(every.fused().call(CARD, PEAK), rel=0.05)


def whole(blueprint, policy):
    built = build_on_meta(blueprint, policy)
    return built, [1] * len(built.blocks)


def traced_calls(directory, *overrides):
    c = config(directory, *overrides)
    return trace_calls(read_blueprint(c.policy), c, count(c, 3), like_cuda=True)


def rollout_call(directory, *overrides):
    return traced_calls(directory, *overrides).velocity.roofline
