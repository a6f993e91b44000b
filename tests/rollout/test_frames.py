"""Clips: how rewards of pictures score them."""

import math

import pytest
import torch

from g2rpo.core.data import Prompt
from g2rpo.core.errors import RewardFailed, UserError
from g2rpo.core.rewards import CallableReward, Frames
from g2rpo.rewards.analytic import FunctionReward
from g2rpo.rewards.catalogue import build_rewards, with_frames
from g2rpo.rollout import scoring
from g2rpo.rollout.scoring import score
from tests.support.runs import brightness, config
from tests.support.tolerances import near, rounding

NAN = math.nan


def framed(scorer, *frames):
    """A reward of pictures that scores `Frames(*frames)` of clips."""
    reward = CallableReward(scorer)
    reward.frames = Frames(*frames)
    return reward


def flat(*values):
    """A clip [1, T, 3, 2, 2] whose frames have one value each."""
    return torch.tensor(values).reshape(1, -1, 1, 1, 1).expand(-1, -1, 3, 2, 2)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [(None, 0.45), ((1,), 0.42), ((2,), 0.4), ((1, "min"), 0.1), ((2, "min"), 0.3), ((9,), 0.3)],
)
def test_frames_and_how_their_scores_are_reduced(frames, expected):
    """By default the mean of every fourth."""
    clip = flat(0.3, 0.1, 0.3, 0.8, 0.6)
    reward = brightness if frames is None else framed(brightness, *frames)
    assert score({"bright": reward}, clip, ["a"]).item() == near(expected, rounding(10))


@pytest.mark.parametrize(
    ("reduce", "missing", "expected"), [("mean", NAN, 0.4), ("min", math.inf, 0.2)]
)
def test_frames_without_a_score_are_left_out(reduce, missing, expected):
    def some(images, prompts):
        bright = brightness(images, prompts)
        return bright.where(bright < 0.9, missing)

    clips = torch.cat([flat(0.2, 1.0, 0.6), flat(1.0, 1.0, 1.0)])
    (found,) = score({"some": framed(some, 1, reduce)}, clips, ["a", "b"]).tolist()
    assert found == near([expected, NAN], rounding(10), nan_ok=True)


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
    motion = score({"motion": FunctionReward(Whole)}, flat(0.1, 0.9, 0.4), ["a"])
    assert motion.item() == near(0.3, rounding(4, size=1.0))


def test_a_reward_that_answers_for_clips_instead_of_frames_is_named():
    short = framed(lambda images, prompts: torch.zeros(2), 1)
    said = r"reward 'x' failed on 2 pictures: .*should return 6 scores, one per image"
    with pytest.raises(RewardFailed, match=said):
        score({"x": short}, torch.rand(2, 3, 3, 2, 2), ["a", "b"])


def test_the_config_names_frames():
    """But not of a reward of whole clips."""
    asked = config("rewards.bright.frames.every=3").rewards["bright"]
    assert asked.frames == Frames(3, "mean")
    built = build_rewards({"bright": asked.model_copy(update={"kind": "brightness"})})
    assert built["bright"].frames == asked.frames
    with pytest.raises(UserError, match=r"rewards\.own\.frames: this reward takes whole clips"):
        with_frames("own", Whole(), asked)
