"""The floor of a reward: what falls below costs, what rises above earns nothing."""

import pytest
import torch

from g2rpo.assembly.checks import check
from g2rpo.core.errors import UserError
from g2rpo.core.types import CallableReward
from tests.support.runs import brightness, config, cut, log, mean, resumed, trainer

FLOOR = 0.48
"""Pictures of the Gaussian policy lie around .5."""
ALGORITHMS = {
    "g2rpo": (),
    "refl": ("algorithm.group_size=6", "algorithm.ceiling=2"),
    "adagrpo": ("algorithm.branch_steps=[0,1,2]",),
    "self_opd": ("algorithm.group_size=6", "algorithm.step_weights=[1,0,1]"),
}


def capped(images, prompts):
    return brightness(images, prompts).clamp(max=FLOOR)


capped.differentiable = True


@pytest.mark.parametrize("name", ALGORITHMS)
def test_training_up_to_a_floor_is_training_on_the_capped_score(name):
    """Where the algorithm takes advantages, differences from a baseline, gradients, or chooses
    prompts. The log has scores as they are."""
    own = f"algorithm.name={name}", *ALGORITHMS[name]
    plain = trainer(None, *own)
    floored = trainer(None, *own, f"rewards.bright.floor={FLOOR}")
    other = trainer(None, *own, rewards={"bright": capped})
    _, *rows = [[t.iterate()["reward/bright"] for _ in range(2)] for t in (plain, floored, other)]
    assert torch.equal(mean(floored), mean(other)) and not torch.equal(mean(floored), mean(plain))
    assert rows[0][0] > rows[1][0]


def test_the_floor_of_the_base_is_its_mean_on_heldout_prompts_also_after_a_kill(tmp_path):
    base = "rewards.bright.floor=base"
    straight = trainer(tmp_path / "straight", base)
    list(straight.train())
    floor = straight.base.means()["bright"]
    by_number = trainer(None, f"rewards.bright.floor={floor}")
    by_number.evaluate()
    for _ in range(4):
        by_number.iterate()
    assert torch.equal(mean(straight), mean(by_number))
    cut(trainer(tmp_path / "cut", base), "train", 3)
    list(resumed(tmp_path / "cut", base).train())
    assert log(tmp_path / "straight") == log(tmp_path / "cut")


def test_a_floor_that_is_not_known_is_refused():
    with pytest.raises(UserError, match="rewards.bright.floor: the mean of the base is not known"):
        trainer(None, "rewards.bright.floor=base").iterate()


def test_the_bases_mean_is_no_floor_of_a_reward_that_has_a_state_once_it_is_built():
    changing = CallableReward(brightness)
    changing.state = {"iteration": 0}
    with pytest.raises(UserError, match="rewards.bright.floor: this reward changes during the run"):
        trainer(None, "rewards.bright.floor=base", rewards={"bright": changing})


REFUSED = [
    (["rewards.bright.floor=high"], "rewards.bright.floor"),
    (["rewards.bright.floor=.nan"], "rewards.bright.floor"),
    (["evaluation.rewards.dark.floor=0.3"], "evaluation.rewards.dark.floor: .* only judges"),
    (["rewards={pairwise_vlm: {floor: base}}"], "compares pictures .* give a number"),
    (["rewards={clicks: {floor: base}}"], "changes during the run.* give a number"),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED)
def test_floors_that_mean_nothing_are_refused_before_anything_loads(overrides, said):
    with pytest.raises(UserError, match=said):
        check(config(*overrides))
