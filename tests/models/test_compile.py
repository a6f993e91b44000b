"""policy.compile: how many graphs there are, and that they compute what the blocks do."""

import pytest
import torch
from torch._dynamo.utils import counters

from g2rpo.core.noise import generator_for
from tests.support import policies

PROMPTS = ["a red circle", "two blue square left of a circle", "a square"]


@pytest.fixture
def graphs():
    """The number of graphs so far."""
    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


@pytest.mark.slow
def test_blocks_of_a_kind_share_a_graph_for_sampling_and_one_for_training(flux_directory, graphs):
    """Whatever the rows; a call of one row has its own."""
    size = {
        "height": 32,
        "width": 32,
        "max_sequence_length": 12,
        "lora_rank": 2,
        "gradient_checkpointing": True,
    }
    policy = policies.load(flux_directory, tuning="lora", dtype=torch.float32, **size)
    # one kind of block is enough, and half the time
    policy.pipeline.transformer.transformer_blocks = torch.nn.ModuleList()
    # gradient checkpointing works in this mode only; there is no dropout
    policy.pipeline.transformer.train()
    for number, parameter in enumerate(policy.trainable_parameters()):
        parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator_for(number))

    def sampled(rows):
        x = policy.noise([generator_for(row) for row in range(rows)])
        return policy.velocity(x, torch.linspace(0.2, 0.9, rows), policy.encode(PROMPTS[:rows]))

    def trained(rows):
        gradients = torch.autograd.grad(
            sampled(rows).square().mean(), policy.trainable_parameters()
        )
        return torch.cat([gradient.flatten() for gradient in gradients])

    with torch.no_grad():
        velocities = {rows: sampled(rows) for rows in (3, 2, 1)}
    gradients = {rows: trained(rows) for rows in (2, 3)}
    policy.compile(backend="eager")
    with torch.no_grad():
        for rows, so_far in ((3, 1), (2, 1), (3, 1), (1, 2), (2, 2)):
            assert torch.equal(sampled(rows), velocities[rows])
            assert graphs() == so_far
    for rows in (2, 3):
        torch.testing.assert_close(trained(rows), gradients[rows], atol=0, rtol=0)
        assert graphs() == 3
    assert not counters["graph_break"]
