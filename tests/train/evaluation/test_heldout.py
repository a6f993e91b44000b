"""Held-out pictures: which are right, in words too, and how two evaluations are compared."""

import math

import pytest
import torch

from g2rpo.core.errors import UserError
from g2rpo.core.rewards import Reward, as_reward
from g2rpo.data.testbed.rewards import SceneAccuracy, WordColour
from g2rpo.rewards.geneval import GenEval
from g2rpo.rewards.ocr import OCR
from g2rpo.train.evaluation.heldout import (
    Evaluation,
    compare_right,
    least_scores,
    load_evaluation,
    right_in_words,
    save_evaluation,
    verdicts,
)
from tests.support.runs import brightness

NAN = math.nan
UNDEFINED = as_reward(brightness)


class Least(Reward):
    """A reward that is the mean of the picture; at least `right` is right."""

    def __init__(self, right, in_words=None):
        self.right, self.right_in_words = right, in_words

    def __call__(self, images, prompts):
        return images.flatten(1).mean(1)


def test_right_is_what_all_say_who_can():
    scores = {"a": torch.tensor([1.0, 0.5, 1.0, NAN]), "b": torch.tensor([3.0, 3.0, 2.0, 3.0])}
    scores["c"] = torch.full((4,), NAN)
    said = verdicts({"a": Least(1), "b": Least(2.5), "c": UNDEFINED}, scores)
    assert said[:3].tolist() == [1, 0, 0] and said[3].isnan()
    assert verdicts({"c": UNDEFINED}, scores) is None


@pytest.mark.parametrize("wrong", [Least("1"), Least(1, 3), Least(1, "{} and {}")])
def test_what_cannot_say_what_is_right_is_named(wrong):
    with pytest.raises(UserError, match="reward 'a': `right"):
        least_scores({"a": wrong})


@pytest.mark.parametrize("partial", [0, 1 / 3, 0.1, 0.7, 0.9, 1])
def test_a_scene_is_right_if_all_that_was_asked_is_right(partial):
    """For every share of partial credit, a picture without a fault scores exactly what counts as
    right."""
    reward = SceneAccuracy(partial=partial)
    blank = reward(torch.ones(1, 3, 64, 64), ["a red circle"])
    faultless = torch.tensor(reward.partial * 3 / 3 + (1 - reward.partial))
    assert float(faultless) >= reward.right > float(blank)


SPELLS, DRAWS = Least(1, "Spells {} texts"), Least(1, "Draws {} things")
COLOUR, ALONE, SILENT = Least(1, "in the asked colour"), Least(1, "alone"), Least(1)


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ([SPELLS, SPELLS, UNDEFINED, Least(None, "unheard")], "Spells {} texts"),
        ([COLOUR, SPELLS], "Spells {} texts in the asked colour"),
        ([COLOUR, SPELLS, ALONE], "Spells {} texts in the asked colour and alone"),
        ([OCR, WordColour], "Spells {} texts in the asked colour"),
        ([SceneAccuracy, GenEval], "Draws what {} prompts ask for"),
        ([SPELLS, DRAWS], None),
        ([SPELLS, SILENT], None),
        ([COLOUR], None),
        ([UNDEFINED], None),
    ],
)
def test_rewards_say_in_words_what_is_right(rewards, words):
    assert right_in_words(dict(enumerate(rewards))) == words


def test_evaluations_keep_their_verdicts(tmp_path):
    scores = {"bright": torch.tensor([0.1, 0.4, 0.9]), "other": torch.ones(3)}
    judged = Evaluation(("a", "b", "c"), torch.zeros(3, 3, 2, 2).byte(), scores, torch.ones(3))
    save_evaluation(tmp_path / "e.safetensors", judged)
    again = load_evaluation(tmp_path / "e.safetensors", judged.prompts, list(scores))
    assert torch.equal(again.right, judged.right) and list(again.scores) == list(scores)


def test_shares_of_right_pictures_are_compared_prompt_by_prompt():
    def evaluation(*right):
        values = torch.tensor(right) if right else None
        return Evaluation(("",) * 5, torch.zeros(5, 3, 2, 2), {}, values)

    tuned = evaluation(1.0, 0.0, 1.0, 1.0, 1.0)
    change = compare_right(evaluation(0.0, 0.0, 1.0, 1.0, NAN), tuned)
    assert (change.base, change.tuned) == (0.5, 0.75)
    assert change.error == pytest.approx(0.25)  # of 1, 0, 0, 0: a deviation of .5 over sqrt(4)
    assert compare_right(evaluation(), tuned) is None
