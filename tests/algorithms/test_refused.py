"""Settings that leave an algorithm nothing to learn: one message that says what would be right, before
anything is loaded. Values out of range are in test_fields.py."""

import pytest

from g2rpo.config.algorithms import ALGORITHMS
from g2rpo.config.read import load_config
from g2rpo.core.errors import UserError
from g2rpo.lab.plan.plan import Planner
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.train.checks import check
from g2rpo.train.found import Given
from tests.support.commands import refused
from tests.support.runs import config, darkness, trainer
from tests.support.tables import rows

NO_GRADIENT = "learns from the gradient of rewards, and these have none:"
NO_REWARDS = "evaluation.rewards={} rewards.scene_accuracy="
REFUSED = """
sampling.num_steps=1 -> sampling.num_steps
algorithm.name=mixgrpo sampling.num_steps=2 -> num_steps must be at least 3
algorithm.name=self_opd algorithm.steps_drawn=16 -> the steps before the last of num_steps
algorithm.name=self_opd algorithm.step_weights=[0,3] -> at most 1
algorithm.name=mixgrpo_flash sampling.tails.forecast=true -> forecast=false
algorithm.name=opsd -> algorithm opsd NONE scene_accuracy;
algorithm.name=refl rewards.scene_accuracy= rewards.brightness=1 rewards.jpeg_size=1 -> algorithm refl \
NONE jpeg_size (but brightness); take them out, or another algorithm: all but refl and opsd need
algorithm.name=refl NOTHING rewards.scene_clip.frames.every=2 -> none: scene_clip;
algorithm.name=opsd NOTHING rewards.scene_clip=1 policy.num_frames=5 -> none: scene_clip;
"""


@pytest.mark.parametrize(("overrides", "words"), rows(REFUSED))
def test_what_settings_contradict_is_said_before_a_run_and_by_its_plan(overrides, words):
    asked = overrides.replace("NOTHING", NO_REWARDS).split()
    for refusing in (lambda: check(load_config("scenes", asked)), lambda: Planner("scenes", asked)):
        with pytest.raises(UserError) as refusal:
            refusing()
        assert words.replace("NONE", NO_GRADIENT) in str(refusal.value)


@pytest.mark.parametrize(
    "command",
    [["train"], ["plan"], ["teach"], ["compare", "--cell", "a:", "--budget", "iterations=1"]],
)
def test_every_command_says_so_and_writes_nothing(capsys, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    name, *options = command
    said = refused(capsys, name, "scenes", "algorithm.name=opsd", *options)
    if name == "teach":
        assert "learns by g2rpo, not by algorithm.name=opsd" in said
    else:
        assert said.count(NO_GRADIENT) == 1 and "scene_accuracy" in said
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", [name for name, kind in ALGORITHMS.items() if kind.uses_rewards])
def test_rewards_that_only_tell_once_they_are_built_are_asked_by_the_trainer(tmp_path, name):
    """A class of one's own may set `differentiable` as it is made; one of weight 0 needs none."""
    own = tmp_path / "own.py"
    own.write_text(
        "class Own:\n    def __init__(self):\n        self.differentiable = True\n"
        "    def __call__(self, images, prompts):\n        return images.flatten(1).mean(1)\n"
    )
    named = f"rewards={{own: {{kind: '{own}:Own'}}, jpeg_size: 0}}"
    check(
        config(f"algorithm.name={name}", named, "evaluation.rewards={}"),
        Given(policy=GaussianPolicy(), prompts=["a"], heldout=["a"]),
    )
    with pytest.raises(UserError, match=f"{name} {NO_GRADIENT} bright;"):
        trainer(None, f"algorithm.name={name}", rewards={"bright": darkness})
