"""Runs that share an evaluation of the base: equal to the bit, and only where nothing that it depends on differs."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from g2rpo.assembly.config import load_config
from g2rpo.core.types import Reward
from g2rpo.run.base import SharedBase, shared_base
from g2rpo.run.lock import InUse
from g2rpo.run.lock import held as lock
from g2rpo.runtime.distributed import ALONE
from tests.support.runs import brightness, trainer


def begun(run_dir, bases, **more):
    """The row of the base in a run whose base may be shared, and how often its first reward was asked."""
    calls = []

    def bright(images, prompts):
        calls.append(len(images))
        return brightness(images, prompts)

    t = trainer(run_dir, rewards={"bright": bright}, **more)
    t.shared_base = bases and SharedBase(bases, ALONE)
    with t.listening():
        t.evaluate()
    return len(calls)


def test_a_second_run_takes_the_base_of_the_first_and_writes_the_same_files(tmp_path):
    alone, first, second = (tmp_path / name for name in ("alone", "first", "second"))
    asked = [begun(alone, None), begun(first, tmp_path / "bases"), begun(second, tmp_path / "bases")]
    assert asked[0] == asked[1] > 0 == asked[2]
    rows = [json.loads((run / "metrics.jsonl").read_text()) for run in (alone, first, second)]
    assert [list(row) for row in rows] == [list(rows[0])] * 3
    assert [{**row, "seconds": 0} for row in rows] == [{**rows[0], "seconds": 0}] * 3
    names = ["scores/iteration_000000.jsonl", "samples/iteration_000000.png", "baseline.safetensors"]
    for name in names:
        assert (alone / name).read_bytes() == (first / name).read_bytes() == (second / name).read_bytes()


def test_a_damaged_one_is_made_again(tmp_path):
    begun(tmp_path / "first", tmp_path / "bases")
    file = SharedBase(tmp_path / "bases", ALONE).file
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    assert begun(tmp_path / "second", tmp_path / "bases") > 0 and file.read_bytes() == whole


def test_a_reward_with_a_state_scores_the_base_itself(tmp_path):
    class Counting(Reward):
        state = 0

        def __call__(self, images, prompts):
            self.state += len(images)
            return torch.zeros(len(images))

    for name in ("first", "second"):
        assert begun(tmp_path / name, tmp_path / "bases", judges={"dark": Counting()}) > 0


def test_who_comes_while_another_run_makes_it_waits(tmp_path, monkeypatch):
    refused = [InUse("one"), InUse("two")]

    def held(folder):
        if refused:
            raise refused.pop()
        return lock(folder)

    monkeypatch.setattr("g2rpo.run.base.held", held)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert begun(tmp_path / "run", tmp_path / "bases") > 0 and not refused


def key(*overrides, contents=None):
    bases = shared_base(Path("bases"), load_config("scenes", overrides), contents or {}, ALONE)
    return bases.folder.name


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        (["algorithm.name=mixgrpo", "trainer.iterations=3", "optim.learning_rate=1e-3", "policy.lora_rank=4"], True),
        (["rewards.scene_accuracy.weight=3", "evaluation.every=3", "evaluation.controls=false"], True),
        (["trainer.seed=1"], False),
        (["policy.guidance_scale=2"], False),
        (["policy.dtype=bfloat16"], False),
        (["evaluation.num_prompts=5"], False),
        (["evaluation.num_steps=5"], False),
        (["sampling.shift=1"], False),
        (["evaluation.rewards.brightness={}"], False),
    ],
)
def test_it_is_shared_where_all_that_determines_it_is_equal(overrides, same):
    assert (key(*overrides) == key()) == same


def test_other_held_out_prompts_have_another_and_other_training_prompts_the_same():
    plain = key(contents={"prompts.train": "a", "evaluation.prompts": "a"})
    assert key(contents={"prompts.train": "b", "evaluation.prompts": "a"}) == plain
    assert key(contents={"prompts.train": "a", "evaluation.prompts": "b"}) != plain


def test_a_trained_reward_and_a_judge_may_change_places():
    one = ["rewards.scene_accuracy=", "rewards.brightness=1", "evaluation.rewards.scene_clip={}"]
    other = ["rewards.scene_accuracy=", "rewards.scene_clip=1", "evaluation.rewards.brightness={}"]
    assert key(*one) == key(*other)


def test_an_adapter_that_was_not_trained_adds_exactly_nothing(tiny_config, tmp_path):
    """So its rank is nothing that the base depends on."""
    from g2rpo.app.train import train

    found = []
    for rank in (2, 5):
        run = tmp_path / f"rank_{rank}"
        train(str(tiny_config), [f"policy.lora_rank={rank}", "trainer.iterations=1"], run)
        found.append(load_file(run / "baseline.safetensors"))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
