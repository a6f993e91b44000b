"""Own code fails before a model is loaded, and the message points into it."""

from dataclasses import dataclass

import pytest

from g2rpo import api
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.cli.main import main
from g2rpo.core.errors import UserError
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.train.dry_run import tried
from g2rpo.train.found import Found, Given
from tests.support.commands import refused
from tests.support.runs import PROMPTS, brightness, config, darkness
from tests.support.tables import rows


@pytest.fixture(autouse=True)
def nothing_loads(monkeypatch):
    def load(*given, **options):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("g2rpo.models.load.Pipeline.load", load)


BROKEN = r"""
FUNCTION images.flatten(1) -> rewards -> returned the shape [2, 12288]
FUNCTION None -> evaluation.rewards -> 2 scores, one per image, but returned
FUNCTION images.nothing -> rewards -> mine.py:2: return images.nothing
class it:\n    def score(self): ... -> rewards -> rewards.mine: PLACE: is no reward
it = 3 -> evaluation.rewards -> evaluation.rewards.mine: PLACE: is no reward, it has no __call__(images, prompts)
"""


@pytest.mark.parametrize(("source", "table", "said"), rows(BROKEN))
def test_a_reward_of_ones_own_is_tried_on_two_random_pictures(
    capsys, tmp_path, source, table, said
):
    own, run = tmp_path / "mine.py", tmp_path / "run"
    function = source.replace("FUNCTION", "def it(images, prompts):\n    return")
    own.write_text(function + "\n")
    err = refused(capsys, "train", "scenes", f"{table}.mine.kind={own}:it", "--run-dir", run)
    assert said.replace("PLACE", f"{own}:it") in err and not run.exists()
    assert ("reward 'mine'" in err and "2 random pictures" in err) == (function != source)


@dataclass(frozen=True)
class Wrong(GranularGRPO):
    def advantages(self, rewards, weights):
        return rewards.nothing


def test_an_algorithm_of_ones_own_is_tried_for_an_iteration():
    said = r"'nothing' \(in advantages, .*test_dry_run\.py:\d+: return rewards"
    with pytest.raises(UserError, match=rf"algorithm Wrong \(.*{said}"):
        api.trainer("scenes", algorithm=Wrong(branch_steps=(0, 1)))


def test_a_trial_asks_for_no_guidance_scale():
    algorithm = GranularGRPO(branch_steps=(0, 1))
    asked = config("sampling.guidance_scale=1").model_copy(update={"algorithm": algorithm})
    given = Given(rewards={"bright": brightness}, judges={"dark": darkness})
    found = Found(config=asked, given=given, prompts=PROMPTS, heldout=PROMPTS[:1])
    assert list(tried(found)) == []


def test_a_trial_calls_a_reward_once_with_pictures_of_the_policy():
    seen = []

    def bright(images, prompts):
        seen.append((list(images.shape), list(prompts)))
        return brightness(images, prompts)

    parts = {"policy": GaussianPolicy(), "algorithm": GranularGRPO(branch_steps=(0, 1))}
    parts |= {"prompts": PROMPTS, "heldout": ["0.9"]}
    parts |= {"rewards": {"b": bright}, "judges": {"dark": darkness}}
    api.trainer("scenes", ["sampling.num_steps=6"], **parts)
    assert seen == [([2, 3, 4, 4], [PROMPTS[0], "0.9"])]


def test_a_reward_may_read_metadata_of_any_prompt_and_is_tried_on_a_held_out_one(capsys, tmp_path):
    """Prompts of a text file have empty metadata; a key that only training prompts have is found
    missing before a model is loaded."""
    (tmp_path / "mine.py").write_text(
        "def lenient(images, prompts):\n    return [float(len(p.metadata)) for p in prompts]\n\n\n"
        "def strict(images, prompts):\n    return [p.metadata['target'] for p in prompts]\n"
    )
    (tmp_path / "train.jsonl").write_text('{"prompt": "a red circle", "target": 1}\n')
    asked = ["train", "scenes", f"prompts.train={tmp_path}/train.jsonl", "rewards.scene_accuracy="]
    asked += ["--run-dir", f"{tmp_path}/run"]
    err = refused(capsys, *asked, f"rewards.mine.kind={tmp_path}/mine.py:strict")
    assert "KeyError: 'target'" in err and "with the prompts 'a red circle', " in err
    with pytest.raises(AssertionError, match="a model is loaded"):
        main([*asked, f"rewards.mine.kind={tmp_path}/mine.py:lenient"])
