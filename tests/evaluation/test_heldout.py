"""Held-out pictures: which are right, in words too, and how two evaluations are compared."""

import math

import pytest
import torch

from g2rpo.core.errors import UserError
from g2rpo.core.types import CallableReward, Reward, as_reward
from g2rpo.evaluation.heldout import (
    Evaluation,
    compare_right,
    least_scores,
    load_evaluation,
    right_in_words,
    save_evaluation,
    verdicts,
)
from g2rpo.evaluation.sampler import Sampler
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.rewards.geneval import GenEval
from g2rpo.rewards.ocr import OCR
from g2rpo.testbed.rewards import SceneAccuracy
from g2rpo.testbed.words.judges import WordColour
from tests.support.runs import brightness

NAN = math.nan


class Least(Reward):
    """A reward that is the mean of the picture; at least `right` is right."""

    def __init__(self, right, in_words=None):
        self.right, self.right_in_words = right, in_words

    def __call__(self, images, prompts):
        return images.flatten(1).mean(1)


def test_right_is_what_all_say_who_can():
    scores = {
        name: torch.tensor(values)
        for name, values in {"a": [1.0, 0.5, 1.0, NAN], "b": [3.0, 3.0, 2.0, 3.0]}.items()
    }
    scores["c"] = torch.full((4,), NAN)
    said = verdicts({"a": Least(1), "b": Least(2.5), "c": as_reward(brightness)}, scores)
    assert said[:3].tolist() == [1, 0, 0] and said[3].isnan()
    assert verdicts({"c": as_reward(brightness)}, scores) is None


class Moving(Least):
    """A reward whose scores are twice as large in training."""

    held_out = Least(None)

    def __call__(self, images, prompts):
        return 2 * super().__call__(images, prompts)


def test_held_out_pictures_are_scored_on_one_scale():
    rewards = {"one": Least(None), "moving": Moving(None), "wrapped": CallableReward(Moving(None))}
    scores = (
        Sampler(policy=GaussianPolicy(), shift=1.0, num_steps=4).evaluate(["0"] * 2, rewards).scores
    )
    assert torch.equal(scores["moving"], scores["one"]) and torch.equal(
        scores["wrapped"], scores["one"]
    )


@pytest.mark.parametrize("wrong", [Least("1"), Least(1, 3), Least(1, "{} and {}")])
def test_what_cannot_say_what_is_right_is_named(wrong):
    with pytest.raises(UserError, match="reward 'a': `right"):
        least_scores({"a": wrong})


def test_a_scene_is_right_if_all_that_was_asked_is_right():
    """For every share of partial credit, a picture without a fault scores exactly what counts as
    right."""
    for partial in (0, 1 / 3, 0.1, 0.7, 0.9, 1):
        reward = SceneAccuracy(partial=partial)
        blank = reward(torch.ones(1, 3, 64, 64), ["a red circle"])
        assert (
            float(torch.tensor(reward.partial * 3 / 3 + (1 - reward.partial)))
            >= reward.right
            > float(blank)
        )


def test_rewards_say_in_words_what_is_right():
    spells, draws, colour, alone = (
        Least(1, words)
        for words in ("Spells {} texts", "Draws {} things", "in the asked colour", "alone")
    )
    silent, undefined = Least(1), as_reward(brightness)
    for rewards, words in (
        (
            [spells, Least(1, "Spells {} texts"), undefined, Least(None, "unheard")],
            "Spells {} texts",
        ),
        ([colour, spells], "Spells {} texts in the asked colour"),
        ([colour, spells, alone], "Spells {} texts in the asked colour and alone"),
        ([OCR, WordColour], "Spells {} texts in the asked colour"),
        ([SceneAccuracy, GenEval], "Draws what {} prompts ask for"),
        *(
            ([*each], None)
            for each in ([spells, draws], [spells, silent], [colour], [silent], [undefined])
        ),
    ):
        assert right_in_words(dict(enumerate(rewards))) == words


def test_evaluations_keep_their_verdicts(tmp_path):
    rewards = {"bright": Least(0.4), "other": brightness}
    judged = Sampler(policy=GaussianPolicy(), shift=1.0, num_steps=4, seed=1).evaluate(
        ["0", "0.9", "-0.9"], rewards
    )
    assert judged.right.tolist() == [float(score >= 0.4) for score in judged.scores["bright"]]
    assert 0 < judged.right.sum() < 3
    save_evaluation(tmp_path / "e.safetensors", judged)
    again = load_evaluation(tmp_path / "e.safetensors", judged.prompts, list(rewards))
    assert torch.equal(again.right, judged.right) and list(again.scores) == list(rewards)


def test_shares_of_right_pictures_are_compared_prompt_by_prompt():
    def evaluation(right):
        values = None if right is None else torch.tensor(right)
        return Evaluation(("",) * 5, torch.zeros(5, 3, 2, 2), {}, values)

    change = compare_right(
        evaluation([0.0, 0.0, 1.0, 1.0, NAN]), evaluation([1.0, 0.0, 1.0, 1.0, 1.0])
    )
    assert (change.base, change.tuned) == (0.5, 0.75)
    assert change.error == pytest.approx(torch.tensor([1.0, 0.0, 0.0, 0.0]).std().item() / 2)
    assert compare_right(evaluation(None), evaluation([1.0] * 5)) is None
