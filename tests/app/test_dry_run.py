"""Own code fails before a model is loaded, and the message points into it."""

from dataclasses import dataclass

import pytest

from g2rpo import api
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.cli.main import main
from g2rpo.core.errors import UserError
from g2rpo.policies.gaussian import GaussianPolicy
from tests.support.commands import refused
from tests.support.runs import PROMPTS, brightness, darkness

REWARDS = {
    "return images.flatten(1)": "returned the shape [2, 12288]",
    "return None": "should return 2 scores, one per image, but returned None",
    "return images.nothing": "mine.py:2: return images.nothing",
}


@pytest.fixture
def nothing_loads(monkeypatch):
    def load(*given, **options):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("g2rpo.assembly.components.load_pipeline", load)


@pytest.mark.parametrize("body", REWARDS)
@pytest.mark.parametrize("table", ["rewards", "evaluation.rewards"])
def test_a_reward_of_ones_own_is_tried_on_two_random_pictures(
    capsys, tmp_path, nothing_loads, body, table
):
    (tmp_path / "mine.py").write_text(f"def it(images, prompts):\n    {body}\n")
    err = refused(
        capsys,
        "train",
        "scenes",
        f"{table}.mine.kind={tmp_path}/mine.py:it",
        "--run-dir",
        tmp_path / "run",
    )
    assert "reward 'mine'" in err and "2 random pictures" in err and REWARDS[body] in err
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_called_is_no_reward(capsys, tmp_path, nothing_loads):
    (tmp_path / "mine.py").write_text(
        "class It:\n    def score(self, images, prompts): ...\n\n\nTHAT = 3\n"
    )
    for name in ("It", "THAT"):
        err = refused(
            capsys,
            "train",
            "scenes",
            f"rewards.mine.kind={tmp_path}/mine.py:{name}",
            "--run-dir",
            tmp_path / "run",
        )
        assert (
            "rewards.mine: " in err
            and f"mine.py:{name}: is no reward, it has no __call__(images, prompts)" in err
        )


@dataclass(frozen=True)
class Mine(GranularGRPO):
    fault: str = ""

    def advantages(self, rewards, weights):
        if self.fault == "raises":
            return rewards.nothing
        return rewards.mean(1) if self.fault == "shape" else super().advantages(rewards, weights)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "shape",
            r"algorithm Mine \(.*test_dry_run\.py:\d+\): advantages should return shape \[\d+, \d+\]",
        ),
        (
            "raises",
            r"algorithm Mine \(.*has no attribute 'nothing' \(in advantages, .*test_dry_run\.py:\d+: return rewards",
        ),
    ],
)
def test_an_algorithm_of_ones_own_is_tried_for_an_iteration(nothing_loads, fault, message):
    with pytest.raises(UserError, match=message):
        api.trainer("scenes", algorithm=Mine(branch_steps=(0, 1), fault=fault))


def test_a_trial_calls_a_reward_once_with_pictures_of_the_policy():
    seen = []

    def bright(images, prompts):
        seen.append((list(images.shape), list(prompts)))
        return brightness(images, prompts)

    objects = {
        "policy": GaussianPolicy(),
        "prompts": PROMPTS,
        "heldout": ["0.9"],
        "judges": {"dark": darkness},
    }
    api.trainer(
        "scenes",
        ["sampling.num_steps=6"],
        algorithm=Mine(branch_steps=(0, 1)),
        rewards={"b": bright},
        **objects,
    )
    assert seen == [([2, 3, 4, 4], [*PROMPTS[:1], "0.9"])]


def test_a_reward_may_read_metadata_of_any_prompt_and_is_tried_on_a_held_out_one(
    capsys, tmp_path, nothing_loads
):
    """Prompts of a text file have empty metadata; a key that only training prompts have is found
    missing before a model is loaded."""
    (tmp_path / "mine.py").write_text(
        "def lenient(images, prompts):\n    return [float(len(prompt.metadata)) for prompt in prompts]\n\n\n"
        "def strict(images, prompts):\n    return [prompt.metadata['target'] for prompt in prompts]\n"
    )
    (tmp_path / "train.jsonl").write_text('{"prompt": "a red circle", "target": 1}\n')
    asked = [
        "train",
        "scenes",
        f"prompts.train={tmp_path}/train.jsonl",
        "rewards.scene_accuracy=",
        "--run-dir",
        tmp_path / "run",
    ]
    err = refused(capsys, *asked, f"rewards.mine.kind={tmp_path}/mine.py:strict")
    assert "KeyError: 'target'" in err and "with the prompts 'a red circle', " in err
    with pytest.raises(AssertionError, match="a model is loaded"):
        main([str(word) for word in [*asked, f"rewards.mine.kind={tmp_path}/mine.py:lenient"]])
