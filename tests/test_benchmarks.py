"""The loop that the engine is measured against does what is published, and gives the same latents."""

import pytest
import torch

from benchmarks.published_loop import PublishedLoop
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.rollout.engine import Engine
from tests.runs import brightness
from tests.test_rollout import SIGMAS, Network, noise


@pytest.mark.parametrize(("granularities", "published"), [((1,), 1216), ((1, 2), 1792), ((1, 2, 3), 2188)])
def test_the_published_loop_needs_what_is_published_and_the_engine_gives_its_latents(granularities, published):
    """Elementwise float32 arithmetic in another batch: the last bits of |x| ~ 3 over 16 steps."""
    algorithm, policy = GranularGRPO(granularities=granularities), Network(size=1)
    loop = PublishedLoop(policy, SIGMAS, algorithm, {"bright": brightness})
    (finals,) = loop.rollout(["0.1"], noise)
    assert loop.evaluations == published
    engine = Engine(policy, policy.encode(["0.1"]), SIGMAS)
    rollouts = engine.rollout(algorithm.plans(16), algorithm.group_size, algorithm.kernel(SIGMAS), noise)
    torch.testing.assert_close(torch.stack([rollout.finals for rollout in rollouts]), finals, atol=1e-5, rtol=0)
