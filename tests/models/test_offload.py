"""policy.offload: blocks that come and go compute what blocks that stay do, to the bit."""

import dataclasses
import re

import pytest
import torch

from g2rpo.config.read import load_config
from g2rpo.lab.plan.answer import for_memory
from g2rpo.lab.plan.cards import CARDS
from g2rpo.lab.plan.plan import limited_target, make_plan
from g2rpo.models.catalogue import SPECS
from g2rpo.models.load import build_policy
from g2rpo.models.offload import Offload, offloaded_bytes
from g2rpo.models.pipelines import blocks_of
from tests.fake_device.cases import config
from tests.support.policies import policy_of, question
from tests.support.tiny_pipelines import CLASSES, tiny_pipeline
from tests.support.variants import few

CPU = torch.device("cpu")


def takes_offload(spec):
    return not spec.pictured and "offload" not in spec.unsupported


QUANTISED = few(
    [(kind, "none") for kind, spec in SPECS.items() if kind in CLASSES and takes_offload(spec)]
    + [("FluxPipeline", "int8"), ("ZImagePipeline", "int8"), ("FluxPipeline", "nf4")],
    {
        ("FluxPipeline", "int8"),
        ("StableDiffusion3Pipeline", "none"),
        ("ZImagePipeline", "int8"),
    }.__contains__,
)


def two_updates(policy):
    """All that an optimizer and a rollout see: velocities, gradients, weights."""
    policy.transformer.train()  # checkpointing works in this mode only
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=0.05)
    given, seen = question(policy, 0.9, 0.4), []
    for _ in range(2):
        with torch.no_grad():
            seen.append(policy.velocity(*given))
            with policy.base():
                seen.append(policy.velocity(*given))
        policy.velocity(*given).float().square().mean().backward()
        seen += [p.grad.clone() for p in policy.trainable_parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        seen += [parameter.detach().clone() for parameter in policy.trainable_parameters()]
    return seen


@pytest.mark.parametrize(("kind", "quantize"), QUANTISED, ids=str)
def test_velocities_gradients_and_weights_are_equal_to_the_bit(kind, quantize):
    if quantize == "nf4":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    options = {"dtype": torch.bfloat16, "quantize": quantize, "gradient_checkpointing": True}
    stays, goes = (policy_of(tiny_pipeline(kind), "lora", lora_rank=2, **options) for _ in range(2))
    Offload(goes.transformer, blocks_of(goes.transformer), CPU)
    for ours, theirs in zip(two_updates(goes), two_updates(stays), strict=True):
        assert torch.equal(ours, theirs)


def test_a_plan_counts_what_stays_and_what_is_copied(flux_directory, tmp_path):
    """In memory the blocks but for two; in a call one copy of each, in a checkpointed training pass
    two; which take time where they take longer than the products."""
    asked = ["policy.dtype=bfloat16", "policy.gradient_checkpointing=true"]
    stays, goes = (
        make_plan(
            config(tmp_path, flux_directory, *asked, *more),
            cuda=True,
            heldout=4,
            distinct_prompts=4,
        )
        for more in ([], ["policy.offload=true"])
    )
    policy = build_policy(config(tmp_path, flux_directory, *asked, "policy.device=cpu").policy)
    blocks = [offloaded_bytes(block) for block in policy.blocks]
    parts, before = goes.memory.parts, stays.memory.parts
    assert parts["frozen weights"] == before["frozen weights"] - sum(blocks)
    assert parts["two blocks of those in host memory"] == 2 * max(blocks)
    call, training = goes.traced.velocity.roofline, goes.traced.training.roofline
    assert (call.streamed, training.streamed) == (sum(blocks), 2 * sum(blocks))
    slow = dataclasses.replace(CARDS["rtx3060"], link=1e-6)
    assert call.call(slow) == sum(blocks) / 1e3
    assert call.call(CARDS["rtx3060"]) == stays.traced.velocity.roofline.call(CARDS["rtx3060"])


def test_offload_is_proposed_before_smaller_batches_and_not_where_it_cannot_be():
    def proposed(*overrides):
        changes = for_memory(load_config("flux1-dev-evening", overrides), 1)
        return [change.overrides[0] for change in changes if change.keeps]

    offload, smaller = "policy.offload=true", "sampling.decode_batch_size=1"
    assert proposed().index(offload) < proposed().index(smaller)
    for given in ([offload], ["policy.compile=true"], ["policy.tuning=full"]):
        assert offload not in proposed(*given)


@pytest.mark.parametrize(
    ("device", "gb", "name", "capacity"),
    [
        (None, 12, "RTX 3060", 12e9),
        (None, 16, "RTX 4060 Ti", 16e9),
        ("rtx4090", 16, "RTX 4090", 16e9),
        ("rtx4090", 64, "RTX 4090", 23.5 * 2**30),
    ],
)
def test_a_limit_of_memory_is_of_any_card_or_none(device, gb, name, capacity):
    target = limited_target(device, gb)
    assert name in target.name and name in target.card.name and target.capacity == capacity


@pytest.mark.slow
def test_12_gb_are_answered_in_two_lines(says):
    fits, rest = says("plan flux1-dev-evening-16gb --memory 12").strip().splitlines()
    assert "It does not fit a GPU of 12 GB" in fits
    assert re.match(r"With `.*options.device=cpu` it needs .* and takes .* --all", rest)
