"""Runs that share an evaluation of the base: equal to the bit, and only where nothing that it
depends on differs."""

import copy
from pathlib import Path

import pytest
import torch

from g2rpo.assembly.config import load_config
from g2rpo.core.errors import Preempted
from g2rpo.core.types import Reward
from g2rpo.evaluation.heldout import Evaluation, save_evaluation
from g2rpo.evaluation.sampler import Sampler
from g2rpo.run.base import SharedBase, shared_base, with_floors
from g2rpo.run.lock import InUse
from g2rpo.run.lock import held as lock
from g2rpo.run.run import Run
from g2rpo.runtime.distributed import ALONE, World
from tests.support.policies import make
from tests.support.runs import brightness, config, log, trainer
from tests.support.tiny_pipelines import CLASSES, tiny_pipeline


def begun(run_dir, bases, **more):
    """The row of the base in a run whose base may be shared, and how often its first reward was
    asked."""
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
    asked = [begun(alone, None), *(begun(run, tmp_path / "bases") for run in (first, second))]
    assert asked[0] == asked[1] > 0 == asked[2]
    for run in (first, second):
        (row,), (expected,) = log(run), log(alone)
        assert list(row.items()) == list(expected.items())
        for name in ("scores/iteration_000000.jsonl", "samples/iteration_000000.png"):
            assert (run / name).read_bytes() == (alone / name).read_bytes()
        base = "baseline.safetensors"
        assert (run / base).read_bytes() == (alone / base).read_bytes()


JUDGED = ["rewards.scene_accuracy=", "rewards.brightness=1", "evaluation.rewards.scene_clip={}"]


SWAPPED = ["rewards.scene_accuracy=", "rewards.scene_clip=1", "evaluation.rewards.brightness={}"]


def test_floors_at_the_bases_mean_are_numbers_where_the_run_knows_them(tmp_path):
    run, asked = Run(tmp_path), config("rewards.bright.floor=base")
    assert with_floors(run, asked) == asked
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)  # as they are stored
    scores = {"bright": torch.tensor([0.25, 0.75])}
    save_evaluation(run.baseline, Evaluation((), images, scores))
    assert with_floors(run, asked).rewards["bright"].floor == 0.5


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
    """Its ranks meet between attempts, or they would take one another for lost after a while."""
    refused, met, meet = [InUse("one"), InUse("two")], [], World.total
    before_attempt = []
    monkeypatch.setattr(World, "total", lambda world, n: met.append(n) or meet(world, n))

    def held(folder):
        before_attempt.append(len(met))
        if refused:
            raise refused.pop()
        return lock(folder)

    monkeypatch.setattr("g2rpo.run.base.held", held)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert begun(tmp_path / "run", tmp_path / "bases") > 0 and not refused
    assert before_attempt == [0, 2, 4]  # and whether one of them was asked to leave


def test_who_waits_leaves_when_asked(tmp_path, monkeypatch):
    t, sleeps = trainer(tmp_path / "run"), []
    t.shared_base = SharedBase(tmp_path / "bases", ALONE)

    def held(folder):
        raise InUse("another run")

    def sleep(seconds):
        assert not sleeps
        sleeps.append(seconds)
        t.stopping = True  # as a signal does

    monkeypatch.setattr("g2rpo.run.base.held", held)
    monkeypatch.setattr("time.sleep", sleep)
    with pytest.raises(Preempted, match="stopped after iteration 0, as asked"):
        list(t.train())


def key(*overrides, contents=None):
    bases = shared_base(Path("bases"), load_config("scenes", overrides), contents or {}, ALONE)
    return bases.folder.name


@pytest.mark.parametrize(
    ("overrides", "other", "same"),
    [
        (["algorithm.name=mixgrpo", "trainer.iterations=3", "policy.lora_rank=4"], [], True),
        (["rewards.scene_accuracy.weight=3", "evaluation.every=3"], [], True),
        (JUDGED, SWAPPED, True),
        (["trainer.seed=1"], [], False),
        (["policy.guidance_scale=2"], [], False),
        (["policy.dtype=bfloat16"], [], False),
        (["evaluation.num_prompts=5"], [], False),
        (["evaluation.num_steps=5"], [], False),
        (["sampling.shift=1"], [], False),
        (["evaluation.rewards.brightness={}"], [], False),
    ],
)
def test_it_is_shared_where_all_that_determines_it_is_equal(overrides, other, same):
    assert (key(*overrides) == key(*other)) == same


@pytest.mark.parametrize(
    ("changed", "same"), [("prompts.train", True), ("evaluation.prompts", False)]
)
def test_other_held_out_prompts_have_another_and_other_training_prompts_the_same(changed, same):
    plain = {"prompts.train": "a", "evaluation.prompts": "a"}
    assert (key(contents=plain | {changed: "b"}) == key(contents=plain)) == same


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_that_was_not_trained_adds_exactly_nothing(dtype):
    """So neither its rank nor where it acts is anything that the base depends on."""
    pipeline, found = tiny_pipeline("FluxPipeline"), []
    size = {"height": 32, "width": 48, "max_sequence_length": 24, "dtype": dtype}
    for own in ({"lora_rank": 2}, {"lora_rank": 5, "lora_above": 0.5}):
        policy = make(CLASSES["FluxPipeline"], copy.deepcopy(pipeline), **size, **own)
        found.append(Sampler(policy=policy, shift="model", num_steps=3).pictures(["a red circle"]))
    assert torch.equal(*found)
