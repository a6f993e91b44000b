"""What ranks send each other, beside sums by hand."""

from types import SimpleNamespace

import pytest
import torch

from g2rpo.core.errors import UserError
from g2rpo.lab.plan.cards import CARDS
from g2rpo.lab.plan.network import Layout, Traffic, limit_of, nodes_of, traffic

W, G = 2 * 1000, 4 * 1000  # bytes of a thousand weights in bfloat16, and of their gradients
CALLS, PASSES, STEPS = 10, 3, 2
WEIGHT = torch.nn.Linear(1000, 1, bias=False)
POLICY = SimpleNamespace(dtype=torch.bfloat16, trainable_parameters=lambda: [WEIGHT.weight], transformer=WEIGHT)
ITERATION = SimpleNamespace(calls=range(CALLS), passes=range(PASSES), optimizer_steps=STEPS)
COUNTS = SimpleNamespace(mean=lambda of: of(ITERATION))


def sent(sharding, **layout):
    config = SimpleNamespace(trainer=SimpleNamespace(sharding=sharding))
    return traffic(config, POLICY, COUNTS, Layout(**layout))


def test_one_rank_sends_nothing():
    assert sent("none") == Traffic(0.0, 0.0)


def test_whole_weights_are_summed_once_an_update_in_one_ring():
    """Each of 16 ranks sends 2 x 15/16 of the gradients to the next; one of a node's eight next ones is in the other node."""
    assert sent("none", ranks=8, node=8) == Traffic(STEPS * 2 * 7 / 8 * G, 0.0)
    assert sent("none", ranks=16, node=8) == Traffic(STEPS * 2 * 15 / 16 * G, STEPS * 2 * 15 / 16 * G)


@pytest.mark.parametrize(("sharding", "gathers"), [("training", 1 + 2 * PASSES), ("full", CALLS + 2 * PASSES)])
def test_shards_of_all_ranks_cross_nodes_in_every_gather_and_those_of_a_node_in_none(sharding, gathers):
    everything = gathers * W + PASSES * G
    assert sent(sharding, ranks=8, node=8, group=8) == Traffic(7 / 8 * everything, 0.0)
    assert sent(sharding, ranks=16, node=8, group=16) == Traffic(15 / 16 * everything, 15 / 16 * everything)
    hybrid = sent(sharding, ranks=16, node=8, group=8)  # eight rings of two, each sums an eighth: 2 x 1/2 of it is sent
    assert hybrid == Traffic(7 / 8 * everything, STEPS * 2 * 1 / 2 * G)
    inside = sent(sharding, ranks=8, node=8, group=4)  # two groups in one node: nothing crosses
    assert inside == Traffic(3 / 4 * everything + STEPS * 2 * 1 / 2 * G / 4, 0.0)


def test_what_takes_longest_limits():
    """An H200 sends 450 GB/s to its neighbours."""
    card, layout = CARDS["h200"], Layout(16, 8, 8, network=10.0)
    limit = limit_of(card, Traffic(inside=900e9, across=50e9), 3.0, layout)
    assert (limit.compute, limit.links, limit.network) == (3.0, 2.0, 5.0)
    assert (limit.what, limit.least, limit.most) == ("network", 5.0, 8.0)
    assert limit_of(card, Traffic(900e9, 1e9), 3.0, layout).what == "compute"


def test_nodes_hold_as_many_ranks_as_there_are_up_to_eight_or_as_is_said():
    assert [nodes_of(4, None), nodes_of(16, None), nodes_of(16, 4)] == [4, 8, 4]
    with pytest.raises(UserError, match="--ranks-per-node 8: 12 ranks do not fill such nodes; give a divisor of 12"):
        nodes_of(12, 8)
