"""AdaGRPO: which prompt takes a place, and how a picture stands against what the policy can do."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch.testing import assert_close

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.algorithms.g2rpo_variants import AdaGRPO, Level, balanced
from g2rpo.core.errors import UserError
from g2rpo.lab.plan.counting import count
from g2rpo.rollout.planning import count_evaluations, count_per_prompt
from tests.support.runs import trainer

SMALL = (
    "algorithm.name=adagrpo",
    "algorithm.candidates=3",
    "algorithm.branch_steps=[0,2]",
    "algorithm.group_size=6",
)
ONE = torch.ones(1)


def made(*overrides, run_dir=None, **more):
    return trainer(run_dir, *SMALL, *overrides, **more)


# --- the advantage


def test_a_group_is_balanced_to_one_on_either_side():
    z = torch.tensor([3.0, 1.0, -0.5, 0.0, -1.5])
    assert_close(balanced(z), torch.tensor([0.75, 0.25, -0.25, 0.0, -0.75]))
    both = torch.stack([balanced(z), -balanced(z)])
    assert_close(balanced(torch.stack([z, -z])), both)


@pytest.mark.parametrize(
    ("z", "expected"),
    [
        ([1, 2, 6], [-2, -1, 3]),  # centred, where a sign is missing
        ([-4, -1e-7, 1e-7], [-8 / 3, 4 / 3, 4 / 3]),
        ([2, 2, 2, 2], [0, 0, 0, 0]),
        # a member without a score neither counts nor learns
        ([3, math.nan, 1, -2], [0.75, 0, 0.25, -1]),
        ([3, math.nan, 1], [1, 0, -1]),
        ([math.nan] * 3, [0, 0, 0]),
    ],
)
def test_groups_without_a_sign_or_a_score(z, expected):
    assert_close(balanced(torch.tensor(z).float()), torch.tensor(expected).float())


# --- the choice


def test_scores_that_are_missing_are_farthest_and_move_nothing():
    level, nan = Level(AdaGRPO(candidates=3)), math.nan
    assert level.choose(0, torch.tensor([[[nan], [9.0], [nan]]]), ONE) == [1]
    known = dict(level.state)
    assert known == {"mean": [9.0], "variance": [0.0]}
    assert level.choose(1, torch.full((1, 3, 1), nan), ONE) == [0] and level.state == known
    assert level.at(1).level == ((9.0, 1e-4),)  # the published code's smallest std


# --- in a run


@pytest.mark.parametrize("more", [(), ("algorithm.granularities=[1,2]",)])
def test_the_choice_costs_a_walk_and_a_picture_a_candidate(more):
    t = made(*more)
    row, plans, tails = t.iterate(), t.plans(0), len(t.algorithm.granularities)
    assert count_per_prompt(t.algorithm, plans) == 3 * 6 + count_evaluations(plans, 6)
    assert row["evaluations"] == 2 * count_per_prompt(t.algorithm, plans)
    assert row["images"] == 2 * (3 + 6 * 2 * tails)
    ((iteration, _),) = count(t.config, 3).kinds
    assert (iteration.evaluations, iteration.images) == (row["evaluations"], row["images"])


# --- an algorithm of one's own that chooses


@dataclass(frozen=True, kw_only=True)
class Choosy(GranularGRPO):
    name: str = "choosy"
    candidates: int = 3

    def memory(self):
        return None


class Wrong(Level):
    def choose(self, iteration, rewards, weights):
        return [0, 3]


def test_a_choice_that_is_none_is_refused():
    t = trainer(None, "sampling.num_steps=9")
    t.loop.algorithm = Choosy(group_size=4, branch_steps=(0,))
    wrong = r"choose should return 2 numbers from 0 to 2, .* \[0, 3\]"
    for memory, fact in ((None, "NoneType"), (Wrong(AdaGRPO()), wrong)):
        t.loop.algorithm_state = memory
        with pytest.raises(UserError, match=fact):
            t.iterate()


def test_a_reward_without_scores_begins_its_averages_with_the_first_ones():
    level = Level(AdaGRPO(candidates=3))
    none, some = torch.full((1, 3, 1), math.nan), torch.tensor([49.0, 50.0, 51.0]).view(1, 3, 1)
    assert level.choose(0, none, ONE) == [0] and level.observe(0, [], none, ONE) == {}
    assert level.choose(1, some, ONE) == [1] and level.state["mean"] == [50.0]
    both = torch.cat([some, none], 2)
    assert Level(AdaGRPO(candidates=3)).choose(0, both, torch.tensor([1.0, 0.0])) == [1]
