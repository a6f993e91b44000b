"""examples/pixels.py and the numbers in docs/models.md."""

import re
import runpy
from pathlib import Path

import pytest
import torch

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.core.flow import sigma_grid
from g2rpo.core.seeding import generator_for
from g2rpo.core.types import Policy
from g2rpo.policies.pipelines import deployed_shift
from g2rpo.rollout.engine import Engine
from tests.policies.test_flux import SCHEDULERS

EXAMPLE = Path(__file__).parents[2] / "examples" / "pixels.py"
TEXT = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def world():
    """Everything that the example defines."""
    return runpy.run_path(str(EXAMPLE))


def test_the_policy_of_the_walk_through_is_one(world):
    assert isinstance(world["trainer"].policy, Policy)


def test_it_learns_what_the_text_says(world):
    said = re.search(r"rises from ([\d.]+) to ([\d.]+)", EXAMPLE.read_text(encoding="utf-8"))
    assert world["trainer"].iteration == 20
    assert world["row"]["reward/saturation"] == pytest.approx(float(said[2]), abs=0.02)
    with torch.no_grad(), world["trainer"].policy.base():
        base = world["trainer"].score_heldout().means()["saturation"]
    assert base == pytest.approx(float(said[1]), abs=0.1)


def test_its_ratio_is_one_before_the_first_update(world):
    policy, sigmas = world["pretrained"](2), sigma_grid(6, 3.0)
    algorithm = GranularGRPO(group_size=3, branch_steps=(0, 2), granularities=(1, 2))
    kernel = algorithm.kernel(sigmas)
    engine = Engine(policy=policy, cond=policy.encode(["red"]), sigmas=sigmas)
    for rollout in engine.rollout(algorithm.plans(6), 3, kernel, generator_for):
        (t,) = rollout.transitions
        sigma = sigmas[t.step]
        velocity = policy.velocity(t.x, sigma[None], engine.cond)
        log_prob = kernel(t.x, velocity, sigma, sigmas[t.step + 1]).log_prob(t.x_next)
        assert torch.equal(log_prob, t.old_log_prob)


def test_the_shifts_in_the_text_are_flux_devs():
    said = dict(re.findall(r"([\d.]+) at (\d+)x", TEXT))
    assert {float(shift): int(size) for shift, size in said.items() if size in ("512", "720", "1024")} == {
        round(deployed_shift(SCHEDULERS["dev"], (size // 16) ** 2), 2): size for size in (512, 720, 1024)
    }
