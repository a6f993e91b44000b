"""Clips: how rewards of pictures score them."""

import math

import pytest
import torch

from g2rpo import api
from g2rpo.assembly.rewards import build_rewards, configured
from g2rpo.config.schema import RewardConfig
from g2rpo.core.errors import RewardFailed, UserError
from g2rpo.core.types import CallableReward, Frames, Prompt
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.rewards.analytic import FunctionReward
from g2rpo.rollout import scoring
from g2rpo.rollout.scoring import score
from tests.support.commands import refused
from tests.support.runs import brightness, config, trainer

NAN = math.nan


def framed(scorer, *frames):
    """A reward of pictures that scores `Frames(*frames)` of clips."""
    reward = CallableReward(scorer)
    reward.frames = Frames(*frames)
    return reward


def flat(*values):
    """A clip [1, T, 3, 2, 2] whose frames have one value each."""
    return torch.tensor(values).reshape(1, -1, 1, 1, 1).expand(-1, -1, 3, 2, 2)


def test_every_fourth_frame_is_scored_and_the_mean_is_the_clips():
    clips = torch.cat([flat(0.1, 0.9, 0.9, 0.9, 0.2, 0.9, 0.9, 0.9, 0.6), flat(*[0.5] * 9)])
    assert score({"bright": brightness}, clips, ["a", "b"])[0].tolist() == pytest.approx([0.3, 0.5])


@pytest.mark.parametrize(
    ("frames", "expected"),
    [((1,), 0.4), ((2,), 0.35), ((1, "min"), 0.1), ((2, "min"), 0.3), ((9,), 0.3)],
)
def test_frames_and_how_their_scores_are_reduced(frames, expected):
    clip = flat(0.3, 0.1, 0.4, 0.8)
    assert score({"bright": framed(brightness, *frames)}, clip, ["a"]).item() == pytest.approx(
        expected
    )


@pytest.mark.parametrize(("reduce", "expected"), [("mean", 0.4), ("min", 0.2)])
def test_frames_without_a_score_are_left_out(reduce, expected):
    def some(images, prompts):
        bright = brightness(images, prompts)
        return bright.where(bright < 0.9, torch.inf if reduce == "min" else NAN)

    clips = torch.cat([flat(0.2, 1.0, 0.6), flat(1.0, 1.0, 1.0)])
    first, second = score({"some": framed(some, 1, reduce)}, clips, ["a", "b"])[0]
    assert float(first) == pytest.approx(expected) and second.isnan()


def test_frames_go_through_a_reward_in_batches_with_their_own_prompts(monkeypatch):
    monkeypatch.setattr(scoring, "AT_ONCE", 4)
    calls = []

    def reward(images, prompts):
        calls.append([str(prompt) for prompt in prompts])
        images.mul_(0)  # it may change what it is given
        return [float(prompt.metadata["value"]) for prompt in prompts]

    clips = torch.rand(2, 5, 3, 2, 2)
    before = clips.clone()
    prompts = [Prompt("a", metadata={"value": 1}), Prompt("b", metadata={"value": 2})]
    assert score({"own": framed(reward, 1, "mean")}, clips, prompts)[0].tolist() == [1, 2]
    assert calls == [["a"] * 4, ["a", "b", "b", "b"], ["b", "b"]] and torch.equal(clips, before)


class Whole:
    """Scores clips by their change from the first frame to the last."""

    video, right = True, 0.5

    def __call__(self, images, prompts):
        return (images[:, -1] - images[:, 0]).flatten(1).mean(1)


def test_a_function_may_take_whole_clips():
    assert score(
        {"motion": FunctionReward(Whole)}, flat(0.1, 0.9, 0.4), ["a"]
    ).item() == pytest.approx(0.3)


def test_a_reward_that_answers_for_clips_instead_of_frames_is_named():
    with pytest.raises(
        RewardFailed,
        match=r"reward 'x' failed on 2 pictures: .*should return 6 scores, one per image",
    ):
        score(
            {"x": framed(lambda images, prompts: torch.zeros(2), 1)},
            torch.rand(2, 3, 3, 2, 2),
            ["a", "b"],
        )


def test_the_config_names_frames():
    asked = {"every": 2, "reduce": "min"}
    reward = build_rewards({"bright": RewardConfig(kind="brightness", frames=asked)})["bright"]
    assert reward.frames == Frames(2, "min")
    assert config("rewards.bright.frames.every=3").rewards["bright"].frames == Frames(3, "mean")


@pytest.mark.parametrize(
    ("setting", "message"), [("every=0", "every"), ("reduce=max", "reduce"), ("evry=2", ".every'")]
)
def test_frames_that_cannot_be_are_refused(setting, message, capsys):
    assert message in refused(capsys, "train", "scenes", f"rewards.scene_accuracy.frames.{setting}")


def test_a_reward_of_whole_clips_has_no_frames_to_choose():
    few = [
        "trainer.iterations=1",
        "rewards.motion.kind=brightness",
        "rewards.motion.frames.every=2",
    ]
    with pytest.raises(UserError, match=r"rewards\.motion\.frames: this reward takes whole clips"):
        api.trainer(
            "scenes",
            few,
            policy=GaussianPolicy(),
            prompts=["0"],
            heldout=["0"],
            rewards={"motion": Whole()},
        )


def test_an_object_that_learns_learns_and_has_no_frames_to_choose():
    class Mine:
        learns_every = 1

        def __call__(self, images, prompts):
            return images.flatten(1).mean(1)

        def look(self, images, prompts):
            return images.flatten(1).mean(1, keepdim=True)

        def learn(self, iteration, seen):
            return {"seen": float(seen.mean())}

    t = trainer(None, rewards={"bright": Mine()})
    assert t.iterate()["bright/seen"] > 0
    with pytest.raises(UserError, match=r"rewards\.bright\.frames: this reward learns from clips"):
        configured(
            {"bright": Mine()}, {"bright": RewardConfig(kind="function", frames={"every": 2})}
        )
