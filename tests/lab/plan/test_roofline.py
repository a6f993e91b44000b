"""Rooflines against counts by hand and torch's own counter."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from g2rpo.assembly import components
from g2rpo.assembly.blueprint import read_blueprint, shapes_of
from g2rpo.lab.plan import trace
from g2rpo.lab.plan.cards import Card
from g2rpo.lab.plan.roofline import (
    ATTENTION,
    CASTS,
    NORMS,
    PRODUCTS,
    REST,
    Kernels,
    Reached,
    Roofline,
    rollout_call,
    training_call,
)
from tests.lab.plan.test_cost import config

CARD = Card("made up", 1, bfloat16=2e-9, float8=4e-9, float32=1e-9, bandwidth=1e-6, pattern="")
"""2000, 4000 and 1000 operations a second; 1000 bytes a second."""


def traced(call):
    with Kernels() as found, torch.no_grad():
        call()
    return Roofline(tuple(found.kernels))


def attention(call):
    return sum(kernel.flops for kernel in call.kernels if kernel.kind == ATTENTION)


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


@pytest.mark.parametrize("overrides", [[], ["policy.dtype=bfloat16", "policy.gradient_checkpointing=true"]], ids=str)
def test_operations_of_flux_are_torchs_count(flux_directory, overrides):
    """Forward exactly. Backward: attention is five products in one kernel and four in steps, and gradients that nothing needs
    are left out, as in `test_cost`."""
    c = config(flux_directory, *overrides)
    policy, blueprint = components.build_policy(c.policy), read_blueprint(c.policy)
    plans = set(c.algorithm.plans(c.sampling.num_steps))
    shapes = shapes_of(policy, blueprint)
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward, torch.no_grad():
            policy.velocity(*trace.inputs(policy, shapes, 3))
        with FlopCounterMode(display=False) as both:
            trace.training_pass(policy, c, shapes, plans, 3)
    found = rollout_call(blueprint, c, 3)
    assert found.flops == forward.get_total_flops()
    training = training_call(blueprint, c, 3, plans)
    assert training.flops == pytest.approx(both.get_total_flops(), rel=0.09)
    forwards = 2 if c.policy.gradient_checkpointing else 1
    assert attention(training) == (forwards + 2.5) * attention(found) > 0


def test_autocast_moves_more_and_float8_is_counted_as_such(flux_directory):
    bf16 = config(flux_directory, "policy.dtype=bfloat16")
    blueprint = read_blueprint(bf16.policy)
    wide, narrow, eight = (
        rollout_call(blueprint, config(flux_directory, "policy.dtype=bfloat16", *more), 3)
        for more in ([], ["policy.autocast=false"], ["policy.autocast=false", "policy.quantize=fp8"])
    )
    assert wide.flops == narrow.flops == eight.flops
    assert wide.bytes(NORMS, CASTS, REST) > narrow.bytes(NORMS, CASTS, REST)
    in_float8 = sum(kernel.flops for kernel in eight.kernels if kernel.dtype == "float8")
    assert 0 < in_float8 < eight.flops and eight.seconds(CARD)[PRODUCTS] < narrow.seconds(CARD)[PRODUCTS]
