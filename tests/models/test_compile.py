"""policy.compile: how many graphs there are, and that they compute what the blocks do."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from g2rpo.models.compiling import Compiled
from tests.support import policies


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
    options = {"lora_rank": 2, "gradient_checkpointing": True}
    policy = policies.moved(policies.load(flux_directory, **options), 0.05)
    # one kind of block is enough, and half the time
    policy.pipeline.transformer.transformer_blocks = torch.nn.ModuleList()
    # gradient checkpointing works in this mode only; there is no dropout
    policy.pipeline.transformer.train()

    def sampled(rows):
        return policy.velocity(*policies.question(policy, *(0.2, 0.5, 0.9)[:rows]))

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


class Plain(nn.Linear):
    """A block. torch's own code of layers alone would not be compiled."""

    def forward(self, x):
        return super().forward(x)


class Broken(nn.Linear):
    """A block whose graph has a break."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


def passed(blocks, rows):
    """The result of blocks, and the gradients of a checkpointed pass."""
    x = torch.linspace(-1, 1, 4 * rows).view(rows, 4)
    with torch.no_grad():
        result = nn.Sequential(*blocks)(x)
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    weights = [weight for block in blocks for weight in block.parameters()]
    return [result, *torch.autograd.grad(x.square().sum(), weights)]


def fails(*given):
    raise ValueError("no such operation\nat a place")


FORWARD_ALONE = aot_autograd(
    fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=fails
)


@pytest.mark.parametrize(
    ("backend", "lines"),
    [
        ("aot_eager", {"Plain is compiled in 0 s": 1, "GLOBAL_STATE changed: grad_mode": 2,
                       "Broken has a break in its graph: Call to": 1}),
        (fails, {"Plain cannot be compiled and runs as it is: no such operation": 1,
                 "Broken cannot be compiled and runs as it is: no such operation": 1}),
        (FORWARD_ALONE, {"Plain is compiled": 1,
                         "cannot be compiled and runs as it is: no such operation": 2}),
    ],
    ids=["compiled", "failing", "failing backward"],
)  # fmt: skip
def test_graphs_breaks_and_failures_are_lines_and_results_stay(graphs, backend, lines):
    """A compiler that fails, even in the backward graph alone, would end a run or be silent."""
    blocks = [Plain(4, 4), Plain(4, 4), Broken(4, 4)]
    exact, said = {rows: passed(blocks, rows) for rows in (2, 3)}, []
    Compiled(blocks, backend).notify = said.append
    for rows in (2, 3, 2):
        for found, right in zip(passed(blocks, rows), exact[rows], strict=True):
            assert torch.equal(found, right)
    for line, times in lines.items():
        assert sum(line in each for each in said) >= times, said
    assert not [line for line in said if "\n" in line]
    assert (backend == "aot_eager") == all("cannot" not in line for line in said)
