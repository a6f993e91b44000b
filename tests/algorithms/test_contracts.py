"""What an algorithm returns is what its method promises, or one message says what is wrong: nothing
broadcasts in silence."""

from dataclasses import dataclass, replace

import pytest
import torch

from g2rpo import api
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.core.contracts import plans_of
from g2rpo.core.errors import UserError
from g2rpo.core.plans import Plan
from g2rpo.models.gaussian import GaussianPolicy
from tests.support.runs import PROMPTS, brightness, darkness

MEMBERS, STEPS = 4, 6


@dataclass(frozen=True)
class Mine(GranularGRPO):
    """An algorithm of somebody's own, whose methods return `wrong` instead."""

    name: str = "mine"
    group_size: int = MEMBERS
    branch_steps: tuple = (0, 1)
    granularities: tuple = (1, 2)
    method: str = ""
    wrong: object = None

    def _of(self, method, right):
        return self.wrong(right) if self.method == method else right

    def plans(self, num_steps, iteration=0, seed=0):
        return self._of("plans", super().plans(num_steps, iteration, seed))

    def advantages(self, rewards, weights):
        return self._of("advantages", super().advantages(rewards, weights))

    def metrics(self, log):
        return self._of("metrics", super().metrics(log))

    def loss(self, batch, network):
        right = super().loss(batch, network)
        return self._of("loss", replace(right, values=self._of("values", right.values)))


def trained(algorithm):
    """Rows of a short run on the policy of three numbers."""
    short = ["trainer.iterations=1", f"sampling.num_steps={STEPS}"]
    short += ["trainer.prompts_per_iteration=2", "evaluation.rewards={}"]
    objects = {"rewards": {"bright": brightness}, "judges": {"dark": darkness}}
    objects |= {"prompts": PROMPTS, "heldout": PROMPTS[:3]}
    trainer = api.trainer("scenes", short, algorithm=algorithm, policy=GaussianPolicy(), **objects)
    return list(trainer.train())


def test_an_algorithm_that_keeps_its_promises_trains():
    assert [row["kind"] for row in trained(Mine())] == ["eval", "train", "eval"]


RIGHT = GranularGRPO(branch_steps=(0, 1), granularities=(1, 2))


@pytest.mark.parametrize(
    ("method", "wrong", "fact"),
    [
        ("plans", lambda plans: [], "at least one Plan"),
        (
            "plans",
            lambda plans: [plans[0], ((0, 1), 6)],
            "a list of Plan, but returned a tuple in it",
        ),
        (
            "plans",
            lambda plans: [replace(plans[0], tails=plans[0].tails[:1], granularities=()), plans[1]],
            r"numbers of tails \[1, 2\]",
        ),
        ("plans", lambda plans: RIGHT.plans(STEPS - 1), "tails that end at 5"),
        ("advantages", lambda a: a[:, 0], r"shape \[4, 4\] .* returned shape \[4\]"),
        ("advantages", lambda a: a / 0, "16 that are NaN or infinite"),
        ("values", lambda loss: loss.mean(), r"returned shape \[\]"),
        ("values", lambda loss: loss.detach(), "without a gradient"),
        (
            "values",
            lambda loss: loss.where(loss != loss, torch.inf),
            r"NaN or infinity for \d+ members",
        ),
    ],
)
def test_what_is_wrong_is_said_with_the_algorithms_name(method, wrong, fact):
    method_named = method.replace("values", "loss")
    with pytest.raises(UserError, match=f"^algorithm mine: {method_named} should return .*{fact}"):
        trained(Mine(method=method, wrong=wrong))


@pytest.mark.parametrize(
    ("more", "fact"),
    [
        ({"kl": torch.ones(())}, "Tensor is not JSON serializable"),
        ({"note": "good"}, "note.*: Input should be a valid"),
        ({"iteration": 0.5}, "iteration: Input should be a valid integer"),
    ],
)
def test_metrics_that_no_log_can_hold_are_refused_before_a_run(more, fact):
    with pytest.raises(UserError, match=f"^algorithm mine: a trial iteration .*{fact}"):
        trained(Mine(method="metrics", wrong=lambda right: right | more))


@pytest.mark.parametrize(
    ("wrong", "fact"),
    [
        (
            lambda plans: GranularGRPO(branch_steps=(5,)).plans(STEPS),
            r"branch_steps must lie in 0\.\.4",
        ),
        (lambda plans: None, "TypeError: 'NoneType' object is not iterable"),
        (lambda plans: plans.nothing, r"AttributeError: .* \(in <lambda>, .*test_contracts\.py"),
        (
            lambda plans: [Plan(7, 8, (tuple(range(8, STEPS + 1)),))],
            r"a tail must start at merge=8 and increase, got \(\)",
        ),
    ],
)
def test_plans_that_fail_are_one_message(wrong, fact):
    with pytest.raises(UserError, match=f"^algorithm.*{fact}"):
        plans_of(Mine(method="plans", wrong=wrong), STEPS)


def test_update_every_is_no_other_word():
    with pytest.raises(UserError, match="update_every is 'step'"):
        trained(Mine(update_every="step"))
