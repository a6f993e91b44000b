"""policy.offload: blocks that come and go compute what blocks that stay do, to the bit."""

import pytest
import torch

from g2rpo.core.noise import generator_for
from g2rpo.models.catalogue import SPECS
from g2rpo.models.offload import Offload
from g2rpo.models.pipelines import blocks_of
from tests.support.policies import make
from tests.support.tiny_pipelines import CLASSES, tiny_pipeline
from tests.support.variants import few

SIZE = {"height": 32, "width": 32, "lora_rank": 2}
PROMPTS = ["a red circle", "two blue square left of a circle"]
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


def policy_of(kind, quantize):
    options = {"dtype": torch.bfloat16, "quantize": quantize, "gradient_checkpointing": True}
    policy = make(CLASSES[kind], tiny_pipeline(kind), **SIZE, **options)
    policy.transformer.train()  # checkpointing works in this mode only
    return policy


def two_updates(policy):
    """All that an optimizer and a rollout see: velocities, gradients, weights; and how many bytes
    of blocks were on the device at most."""
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=0.05)
    x = policy.noise([generator_for(i) for i in range(2)])
    question, seen = (x, torch.tensor([0.9, 0.4]), policy.encode(PROMPTS)), []
    for _ in range(2):
        with torch.no_grad():
            seen.append(policy.velocity(*question))
            with policy.base():
                seen.append(policy.velocity(*question))
        policy.velocity(*question).float().square().mean().backward()
        seen += [p.grad.clone() for p in policy.trainable_parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        seen += [parameter.detach().clone() for parameter in policy.trainable_parameters()]
    return seen


@pytest.mark.parametrize(("kind", "quantize"), QUANTISED, ids=str)
def test_velocities_gradients_and_weights_are_equal_to_the_bit(kind, quantize):
    if quantize == "nf4":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    stays, goes = (policy_of(kind, quantize) for _ in range(2))
    Offload(goes.transformer, blocks_of(goes.transformer), CPU)
    for ours, theirs in zip(two_updates(goes), two_updates(stays), strict=True):
        assert torch.equal(ours, theirs)
