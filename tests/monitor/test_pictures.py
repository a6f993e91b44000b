"""Grids of pictures: what they show can be read from the file, and in the picture."""

import json
import math

import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from g2rpo.core.errors import UserError
from g2rpo.core.types import Reward, as_reward
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
from g2rpo.monitor.grids import read_grid
from g2rpo.monitor.metrics import read_metrics
from g2rpo.monitor.pictures import NOTE, RIGHT, WRONG, Strip, figure, save_grid
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.rewards.function import FunctionReward
from g2rpo.rewards.geneval import GenEval
from g2rpo.rewards.ocr import OCR
from g2rpo.testbed.rewards import SceneAccuracy
from g2rpo.testbed.words.judges import WordColour
from g2rpo.training.evaluator import chosen
from tests.support.runs import brightness, trainer

NAN = math.nan


@pytest.mark.parametrize(("width", "cell"), [(4, 128), (200, 200), (512, 256)])
def test_a_grid_comes_apart_again(tmp_path, width, cell):
    """Flat pictures stay flat when resized, so the cut pictures must be their colours exactly, with no edge of a neighbour."""
    values = torch.tensor([0.0, 0.2, 0.4, 0.6, 0.8, 1.0]).reshape(2, 3, 1, 1, 1)
    rows = list(values.expand(2, 3, 3, width // 2, width))
    scores = {"one": torch.tensor([0.5, NAN, -1.0]), "two": torch.tensor([70.0, 80.0, 90.0])}
    strips = [Strip(rows[0], "base", scores, torch.tensor([1.0, 0.0, NAN])), Strip(rows[1], "tuned")]
    save_grid(tmp_path / "grid.png", strips, ["é", "b" * 300, "c"], "what stands under them")
    grid = read_grid(tmp_path / "grid.png")
    assert grid.prompts == ["é", "b" * 300, "c"]
    for row, expected in zip(grid.rows, rows, strict=True):
        for picture, image in zip(row, expected, strict=True):
            value = round(float(image.flatten()[0]) * 255)
            assert picture.size == (cell, cell // 2) and picture.getextrema() == ((value, value),) * 3
    assert grid.scores == [[{"one": 0.5, "two": 70.0}, {"one": None, "two": 80.0}, {"one": -1.0, "two": 90.0}], [{}, {}, {}]]
    assert grid.right == [[True, False, None], [None, None, None]]


def test_right_and_wrong_are_marked_below_their_pictures(tmp_path):
    """Ticks and crosses have their colours where they belong, and nowhere else."""
    white = torch.ones(3, 3, 64, 64)
    path = tmp_path / "grid.png"
    save_grid(
        path, [Strip(white, "", {"score": torch.tensor([1.0, 0.0, NAN])}, torch.tensor([1.0, 0.0, NAN]))], ["a", "b", "c"]
    )
    with Image.open(path) as canvas:
        ((x, y), *_), (width, height) = json.loads(canvas.info[NOTE])["boxes"][0], json.loads(canvas.info[NOTE])["size"]
        for column, colour in enumerate((RIGHT, WRONG, None)):
            left = x + column * (width + 8)
            below = canvas.crop((left, y + height, left + width, canvas.height))
            colours = {colour for _, colour in below.getcolors(10**6)}
            assert {RIGHT, WRONG} & colours == ({colour} if colour else set())
        assert canvas.crop((x, y, x + width, y + height)).getextrema() == ((255, 255),) * 3


def test_a_note_makes_a_grid_higher_and_is_never_cut(tmp_path):
    def size(note):
        save_grid(tmp_path / "grid.png", [Strip(torch.ones(2, 3, 64, 64))], ["a", "b"], note)
        with Image.open(tmp_path / "grid.png") as canvas:
            assert json.loads(canvas.info[NOTE])["note"] == note
            return canvas.size

    (width, bare), (wide, noted), (_, long) = size(""), size("a note"), size("a note of many words " * 20)
    assert width == wide and bare < noted < long


def test_a_picture_that_is_no_grid_is_refused(tmp_path):
    Image.new("RGB", (9, 9)).save(tmp_path / "x.png")
    with pytest.raises(ValueError, match="does not say what it shows"):
        read_grid(tmp_path / "x.png")


@pytest.mark.parametrize(
    "change",
    [
        {"scores": [[{}]]},
        {"scores": [[1, 2]]},
        {"scores": [[{"a": "b"}, {}]]},
        {"right": [[True]]},
        {"right": 3},
        {"scores": []},
    ],
)
def test_scores_that_do_not_fit_their_pictures_are_refused(tmp_path, change):
    path = tmp_path / "grid.png"
    save_grid(path, [Strip(torch.rand(2, 3, 8, 8), "", {"a": torch.zeros(2)}, torch.zeros(2))], ["a", "b"])
    with Image.open(path) as canvas:
        info = PngInfo()
        info.add_itxt(NOTE, json.dumps({**json.loads(canvas.info[NOTE]), **change}))
        canvas.save(path, pnginfo=info)
    with pytest.raises(ValueError, match=r"grid\.png"):
        read_grid(path)


def test_a_grid_of_before_there_were_scores_is_read(tmp_path):
    path = tmp_path / "grid.png"
    save_grid(path, [Strip(torch.rand(2, 3, 8, 8))], ["a", "b"])
    with Image.open(path) as canvas:
        old = {key: value for key, value in json.loads(canvas.info[NOTE]).items() if key in ("prompts", "size", "boxes")}
        info = PngInfo()
        info.add_itxt(NOTE, json.dumps(old))
        canvas.save(path, pnginfo=info)
    assert (read_grid(path).scores, read_grid(path).right) == ([[{}, {}]], [[None, None]])


@pytest.mark.parametrize(("value", "text"), [(0.66666, "0.667"), (-0.1, "-0.100"), (73.6512, "73.65"), (NAN, "no score")])
def test_scores_for_people(value, text):
    assert figure(value) == text


class Least(Reward):
    """A reward that is the mean of the picture; at least `right` is right."""

    def __init__(self, right):
        self.right = right

    def __call__(self, images, prompts):
        return images.flatten(1).mean(1)


def test_right_is_what_all_say_who_can():
    scores = {name: torch.tensor(values) for name, values in {"a": [1.0, 0.5, 1.0, NAN], "b": [3.0, 3.0, 2.0, 3.0]}.items()}
    scores["c"] = torch.full((4,), NAN)
    said = verdicts({"a": Least(1), "b": Least(2.5), "c": as_reward(brightness)}, scores)
    assert said[:3].tolist() == [1, 0, 0] and said[3].isnan()
    assert verdicts({"c": as_reward(brightness)}, scores) is None
    with pytest.raises(UserError, match="reward 'a': `right` is the least score of a right picture, a number"):
        least_scores({"a": Least("1")})


def test_a_scene_is_right_if_all_that_was_asked_is_right():
    """For every share of partial credit, a picture without a fault scores exactly what counts as right."""
    for partial in (0, 1 / 3, 0.1, 0.7, 0.9, 1):
        reward = SceneAccuracy(partial=partial)
        blank = reward(torch.ones(1, 3, 64, 64), ["a red circle"])
        assert float(torch.tensor(reward.partial * 3 / 3 + (1 - reward.partial))) >= reward.right > float(blank)


def test_a_function_may_say_what_is_right(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def f(images, prompts):\n    return [1.0] * len(prompts)\nf.right = 0.5\n\ng = f.__class__\n"
    )
    assert least_scores({"mine": FunctionReward(f"{tmp_path / 'mine.py'}:f")}) == {"mine": 0.5}


def test_rewards_say_in_words_what_is_right(tmp_path):
    def saying(words, right=1.0):
        reward = Least(right)
        reward.right_in_words = words
        return reward

    spells, draws, colour = saying("Spells {} texts"), saying("Draws {} things"), saying("in the asked colour")
    assert right_in_words({"a": spells, "b": saying("Spells {} texts"), "c": as_reward(brightness)}) == "Spells {} texts"
    assert right_in_words({"a": colour, "b": spells}) == "Spells {} texts in the asked colour"
    assert right_in_words({"a": colour, "b": spells, "c": saying("alone")}) == "Spells {} texts in the asked colour and alone"
    for rewards in ([spells, draws], [spells, Least(1)], [colour], [Least(1)], [as_reward(brightness)]):
        assert right_in_words(dict(enumerate(rewards))) is None  # some say nothing, or two say different things
    assert right_in_words({"a": spells, "b": saying("unheard", right=None)}) == "Spells {} texts"
    for wrong in (3, "{} and {}"):
        with pytest.raises(UserError, match="reward 'a': `right_in_words` is a text with {} once or never"):
            least_scores({"a": saying(wrong)})
    (tmp_path / "mine.py").write_text(
        "def f(i, p):\n    return [1.0] * len(p)\nf.right = 0.5\nf.right_in_words = 'Fills {} skies'\n"
    )
    assert right_in_words({"mine": FunctionReward(f"{tmp_path / 'mine.py'}:f")}) == "Fills {} skies"
    built_in = {"ocr": OCR, "colour": WordColour}
    assert right_in_words(built_in) == "Spells {} texts in the asked colour"
    assert right_in_words({"a": SceneAccuracy, "b": GenEval}) == "Draws what {} prompts ask for"


def test_evaluations_keep_their_verdicts(tmp_path):
    rewards = {"bright": Least(0.4), "other": brightness}
    judged = Sampler(policy=GaussianPolicy(), shift=1.0, num_steps=4, seed=1).evaluate(["0", "0.9", "-0.9"], rewards)
    assert judged.right.tolist() == [float(score >= 0.4) for score in judged.scores["bright"]]
    assert 0 < judged.right.sum() < 3
    save_evaluation(tmp_path / "e.safetensors", judged)
    again = load_evaluation(tmp_path / "e.safetensors", judged.prompts)
    assert torch.equal(again.right, judged.right) and again.scores.keys() == judged.scores.keys()


def test_shares_of_right_pictures_are_compared_prompt_by_prompt():
    def evaluation(right):
        values = None if right is None else torch.tensor(right)
        return Evaluation(("",) * 5, torch.zeros(5, 3, 2, 2), {}, values)

    change = compare_right(evaluation([0.0, 0.0, 1.0, 1.0, NAN]), evaluation([1.0, 0.0, 1.0, 1.0, 1.0]))
    assert (change.base, change.tuned) == (0.5, 0.75)
    assert change.error == pytest.approx(torch.tensor([1.0, 0.0, 0.0, 0.0]).std().item() / 2)
    assert compare_right(evaluation(None), evaluation([1.0] * 5)) is None


def test_a_run_says_how_many_pictures_are_right(tmp_path):
    reward = Least(0.5)
    run = trainer(tmp_path, rewards={"bright": reward})
    list(run.train())
    run.finish()
    results = json.loads((tmp_path / "results.json").read_text())
    rows = [row for row in read_metrics(tmp_path) if row["kind"] == "eval"]
    base, tuned = (run.evaluator.baseline, run.score_heldout())
    assert results["right"]["base"] == rows[0]["right"] == float((base.scores["bright"] >= 0.5).float().mean())
    assert results["right"]["tuned"] == rows[-1]["right"] == float((tuned.scores["bright"] >= 0.5).float().mean())
    assert results["right"]["error"] == rows[-1]["right_stderr"] and rows[0]["right_stderr"] == 0
    places, how = chosen([base.right, tuned.right], 8, 3)
    grid = read_grid(tmp_path / "samples" / "before_after.png")
    for cells, right, side in zip(grid.scores, grid.right, (base, tuned), strict=True):
        assert [cell["bright"] for cell in cells] == side.scores["bright"][places].tolist()
        assert right == [bool(value) for value in side.right[places]]
    with Image.open(tmp_path / "samples" / "before_after.png") as canvas:
        note = json.loads(canvas.info[NOTE])["note"]
    shares = f"the base draws {100 * rows[0]['right']:.0f} % right and the tuned model {100 * rows[-1]['right']:.0f} %"
    assert note == (f"{how}.\nBoth rows from the same noise. Right: bright at least 0.5. Of all 3, {shares}.")
    assert results["right"]["least"] == {"bright": 0.5} and "in_words" not in results["right"]
    during = read_grid(tmp_path / "samples" / "iteration_000002.png")
    assert during.note == ("The first 3 of 3 held-out prompts, in their order.\nAfter iteration 2. Right: bright at least 0.5.")


def test_pictures_before_and_after_are_in_the_proportions_of_all():
    """Ten prompts: 4 became right, 1 wrong, 2 stayed right, 2 wrong, 1 has no verdict. Of 4 that is 1.6, .4, .8, .8 and .4:
    1 by rounding down, and the three largest remainders are those of both that stayed and of what became right."""
    before = torch.tensor([1.0, 1, 0, 0, 0, 1, 0, 0, 0, NAN])
    after = torch.tensor([1.0, 1, 1, 0, 0, 0, 1, 1, 1, 1])
    places, how = chosen([before, after], 4, 10)
    assert places == [0, 2, 3, 6]
    assert how == (
        "4 of 10 held-out prompts, in the proportions of all: 2 of 4 that became right, 0 of 1 that became wrong, "
        "1 of 2 that stayed right, 1 of 2 that stayed wrong, 0 of 1 that have no verdict"
    )
    assert chosen([before[:5], before[:5]], 2, 5)[1].endswith(
        "none that became right, none that became wrong, 1 of 2 that stayed right, 1 of 3 that stayed wrong"
    )
    for right in ([before], [before, None], [None, None]):
        assert chosen(right, 4, 10) == ([0, 1, 2, 3], "The first 4 of 10 held-out prompts, in their order")
    assert chosen([None], 8, 3)[0] == [0, 1, 2]
