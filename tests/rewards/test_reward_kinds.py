"""Rewards of latents, for which nothing is decoded, and rewards with state, in checkpoints and the
same on all ranks."""

import importlib.util
from pathlib import Path

import pytest
import torch

from g2rpo.app import sample
from g2rpo.assembly.rewards import build_rewards
from g2rpo.config.schema import RewardConfig
from g2rpo.core import plugins
from g2rpo.core.errors import RewardFailed, UserError
from g2rpo.core.types import Frames, as_reward
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.rewards.analytic import FunctionReward
from g2rpo.rollout.scoring import score
from g2rpo.training.reward_states import take_stored
from tests.support.ranks import finish, start
from tests.support.runs import brightness, darkness, finished, groups_of, mean, trainer
from tests.support.tolerances import near, reordered, rounding

EXAMPLES = Path(__file__).parents[2] / "examples" / "plugin" / "g2rpo_example"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Undecodable(GaussianPolicy):
    decoded = 0

    def decode(self, x):
        self.decoded += len(x)
        return super().decode(x)


def energy(latents, prompts):
    return latents.flatten(1).square().mean(1)


energy.latent = True


def test_nothing_is_decoded_where_all_rewards_take_latents():
    policy = Undecodable()
    t = trainer(None, policy=policy, rewards={"bright": energy})
    collected = groups_of(t).collected
    assert policy.decoded == 0
    latents = collected.rollouts[0].finals[0]
    assert torch.equal(collected.rewards[0, 0, 0], energy(latents, []))  # [N, R, M, G]
    t.evaluate()
    assert policy.decoded == 3  # held-out pictures are kept


@pytest.mark.parametrize("batch", [5, 64])
def test_latents_and_pictures_are_scored_beside_each_other(batch):
    overrides = ["rewards.low=1.0", f"sampling.decode_batch_size={batch}"]
    rewards, judges = {"bright": brightness, "low": energy}, {"dark": darkness, "far": energy}
    t = trainer(None, *overrides, rewards=rewards, judges=judges)
    collected = groups_of(t).collected
    for rollout, scores in zip(collected.rollouts, collected.rewards, strict=True):
        for tail, latents in enumerate(rollout.finals):
            bright = brightness(t.policy.decode(latents), [])
            torch.testing.assert_close(scores[0, tail], bright, **reordered(3 * 4 * 4, size=1.0))
            far = energy(latents, [])
            torch.testing.assert_close(scores[1, tail], far, **reordered(3 * 4 * 4, far.max()))
    scores = t.score_heldout().scores
    assert torch.equal(scores["low"], scores["far"]) and scores["low"].isfinite().all()


def test_a_reward_without_what_it_scores_is_named():
    with pytest.raises(UserError, match="reward 'low' scores latents"):
        score({"low": energy}, torch.zeros(2, 3, 4, 4), ["a", "b"])
    plugins.allow(f"{EXAMPLES}/texture.py")
    with pytest.raises(UserError, match="rewards.low.frames"):
        build_rewards({"low": RewardConfig(kind=f"{EXAMPLES}/texture.py:texture", frames=Frames())})


def test_the_example_of_latents_is_smaller_for_smoother_ones():
    texture = FunctionReward(example("texture").texture)
    ramp = torch.linspace(0, 1, 8).expand(2, 4, 8, 8) * torch.tensor([1.0, 2.0]).view(2, 1, 1, 1)
    smooth = texture(ramp, ["a", "b"])
    # squares of differences of numbers up to 2
    torch.testing.assert_close(smooth, torch.tensor([1 / 49, 4 / 49]), **rounding(64, size=4 / 7))
    assert texture.latent and texture.state is None


class Bar:
    """Pictures above a bar that follows the mean of their brightness."""

    def __init__(self):
        self.state = {"bar": 0.0, "seen": torch.zeros(2, dtype=torch.int64)}

    def __call__(self, images, prompts):
        return torch.sigmoid(20 * (brightness(images, prompts) - self.state["bar"]))

    def observe(self, iteration, scores):
        self.state["bar"] += 0.02 * float(scores.mean() - 0.5)
        self.state["seen"] = self.state["seen"] + torch.tensor([1, scores.numel()])


def with_bar(folder=None, iterations=4, kind=Bar, **more):
    options = {"rewards": {"bright": kind()}, **more}
    return trainer(folder, f"trainer.iterations={iterations}", **options)


def states_of(t):
    state = t.rewards["bright"].state
    return [state["bar"], state["seen"].tolist()]


def test_a_run_with_a_stateful_reward_resumes_bit_for_bit(tmp_path):
    whole = finished(with_bar(tmp_path / "whole"))
    # iterations; prompts, branch steps, tails, members
    assert states_of(whole)[0] != 0 and states_of(whole)[1] == [4, 4 * 2 * 3 * 2 * 6]
    finished(with_bar(tmp_path / "parts", 2, rewards={"bright": FunctionReward(Bar)}))
    again = with_bar(tmp_path / "parts")
    assert again.resume() == [] and states_of(again)[1][0] == 2
    finished(again)
    assert torch.equal(mean(again), mean(whole)) and states_of(again) == states_of(whole)


def test_an_evaluation_takes_the_state_that_a_run_has_stored(tmp_path):
    run, alone, told = finished(with_bar(tmp_path / "run", 2)), with_bar(), []
    rewards = {**alone.rewards, "dark": as_reward(darkness)}
    take_stored(rewards, tmp_path / "run", told.append)
    assert states_of(alone) == states_of(run)
    take_stored(rewards, tmp_path / "none", told.append)
    take_stored({"bright": as_reward(brightness)}, tmp_path / "run", told.append)
    assert "after iteration 2" in told[0] and told[1:] == ["reward bright: as at the start"]


def test_the_best_of_several_samples_is_chosen_by_what_a_reward_had_learnt(tmp_path, monkeypatch):
    run, built = finished(with_bar(tmp_path, 2)), with_bar()
    monkeypatch.setattr(sample, "build_rewards", lambda *_: built.rewards)
    settings = {
        "policy": run.config.policy.model_dump(),
        "weights": str(run.run.weights),
        "rewards": {"bright": {"kind": "brightness"}},
    }
    sample._drawing(None, sample.sample_config(settings, ["best_of=2"]), print)
    assert states_of(built) == states_of(run)


class Careless(Bar):
    """Changes its state as it scores, so that it differs on ranks with different pictures."""

    def __call__(self, images, prompts):
        self.state["bar"] += float(images.mean())
        return super().__call__(images, prompts)


def train_on(world, folder, kind):
    t = finished(with_bar(folder / "run", 1, kind, world=world))
    return [states_of(t), mean(t).tolist()]


def test_ranks_have_the_state_of_one_process(tmp_path):
    """After one iteration: its scores are of the same weights, but are added in another order."""
    alone = states_of(finished(with_bar(tmp_path / "alone", 1)))
    one, two = (left["answer"] for left in finish(start(2, train_on, tmp_path, Bar), tmp_path))
    (bar, seen), scores = alone, alone[1][1]
    assert one == two and one[0] == [near(bar, reordered(scores, size=0.02)), seen]


def test_ranks_whose_states_differ_save_nothing(tmp_path):
    left = finish(start(2, train_on, tmp_path, Careless), tmp_path)
    assert all("reward 'bright': the state of ranks [1]" in each["error"] for each in left)
    assert not list((tmp_path / "run" / "checkpoints").glob("iteration_*"))


def test_a_state_that_no_checkpoint_can_hold_is_refused_at_the_start():
    reward = Bar()
    reward.state = {"net": torch.nn.Linear(1, 1)}
    with pytest.raises(UserError, match="reward 'bright'.* not Linear"):
        with_bar(kind=lambda: reward)


def test_a_reward_that_fails_to_observe_is_named():
    class Broken(Bar):
        def observe(self, iteration, scores):
            raise ValueError("no")

    with pytest.raises(RewardFailed, match="after iteration 0: reward 'bright' failed to observe"):
        with_bar(kind=Broken).iterate()


def test_the_example_of_state_raises_its_bar():
    rising = example("rising").Rising()
    red = torch.zeros(3, 3, 8, 8)
    red[:, 0] = torch.tensor([0.0, 0.05, 0.5]).view(3, 1, 1)
    before = rising(red, [""] * 3)
    assert before.tolist() == pytest.approx([0.5, 0.731, 1.0], abs=5e-4)
    rising.observe(0, before.view(1, 1, 3))
    bar = pytest.approx(0.05 * (0.744 - 0.5), abs=0.05 * 5e-4)
    assert rising.state["bar"] == bar and (rising(red, [""] * 3) < before).all()
    rising.observe(1, torch.full((1, 1, 3), torch.nan))
    assert rising.state["bar"] == bar
