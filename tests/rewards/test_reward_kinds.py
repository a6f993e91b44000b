"""Rewards of latents, for which nothing is decoded, and rewards with state, in checkpoints and the
same on all ranks."""

from pathlib import Path

import pytest
import torch

from g2rpo.core import plugins
from g2rpo.core.errors import UserError
from g2rpo.core.rewards import Frames, as_reward
from g2rpo.lab import sample
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.rewards.analytic import FunctionReward
from g2rpo.rewards.catalogue import RewardConfig, build_rewards
from g2rpo.rollout.scoring import score
from g2rpo.train.first_group import rounded
from g2rpo.train.persistence import take_stored
from tests.support.ranks import finish, start
from tests.support.runs import brightness, darkness, finished, groups_of, trainer
from tests.support.tables import rows
from tests.support.tolerances import reordered, rounding

TEXTURE = f"{Path(__file__).parents[2]}/examples/plugin/g2rpo_example/texture.py:texture"


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
    plugins.allow(TEXTURE.removesuffix(":texture"))
    with pytest.raises(UserError, match="rewards.low.frames"):
        build_rewards({"low": RewardConfig(kind=TEXTURE, frames=Frames())})


def test_the_example_of_latents_is_smaller_for_smoother_ones():
    texture = FunctionReward(TEXTURE)
    ramp = torch.linspace(0, 1, 8).expand(2, 4, 8, 8) * torch.tensor([1.0, 2.0]).view(2, 1, 1, 1)
    smooth = texture(ramp, ["a", "b"])
    # squares of differences of numbers up to 2
    torch.testing.assert_close(smooth, torch.tensor([1 / 49, 4 / 49]), **rounding(64, size=4 / 7))
    assert texture.latent and texture.state is None


class Bar:
    """Pictures above a bar, which the caller moves."""

    def __init__(self):
        self.state = {"bar": 0.0, "moved": torch.zeros(2, dtype=torch.int64)}

    def __call__(self, images, prompts):
        return torch.sigmoid(20 * (brightness(images, prompts) - self.state["bar"]))


def with_bar(folder=None, iterations=2, kind=Bar, **more):
    options = {"rewards": {"bright": kind()}, **more}
    return trainer(folder, f"trainer.iterations={iterations}", **options)


def state_in(t):
    state = t.rewards["bright"].state
    return [state["bar"], state["moved"].tolist()]


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A run whose bar has been moved before it began."""
    t = with_bar(tmp_path_factory.mktemp("run") / "run")
    t.rewards["bright"].state = {"bar": 0.3, "moved": torch.tensor([1, 2])}
    return finished(t)


def test_a_resumed_run_has_the_state_of_the_checkpoint(taught):
    again = with_bar(taught.run_dir)
    assert again.resume() == [] and state_in(again) == state_in(taught) == [0.3, [1, 2]]


def test_an_evaluation_takes_the_state_that_a_run_has_stored(taught, tmp_path):
    alone, told = with_bar(), []
    rewards = {**alone.rewards, "dark": as_reward(darkness)}
    take_stored(rewards, taught.run_dir, told.append)
    assert state_in(alone) == state_in(taught)
    take_stored(rewards, tmp_path / "none", told.append)
    take_stored({"bright": as_reward(brightness)}, taught.run_dir, told.append)
    assert "after iteration 2" in told[0] and told[1:] == ["reward bright: as at the start"]


def test_the_best_of_several_samples_is_chosen_by_what_a_reward_had_learnt(taught, monkeypatch):
    built = with_bar()
    monkeypatch.setattr(sample, "build_rewards", lambda *_: built.rewards)
    settings = {
        "policy": taught.config.policy.model_dump(),
        "weights": str(taught.run.weights),
        "rewards": {"bright": {"kind": "brightness"}},
    }
    sample._drawing(None, sample.sample_config(settings, ["best_of=2"]), print)
    assert state_in(built) == state_in(taught)


class Careless(Bar):
    """Changes its state as it scores, so that it differs on ranks with different pictures."""

    def __call__(self, images, prompts):
        self.state["bar"] += float(images.mean())
        return super().__call__(images, prompts)


def train_on(world, folder):
    finished(with_bar(folder / "run", 2, Careless, world=world))


def test_ranks_whose_states_differ_save_nothing(tmp_path):
    left = finish(start(2, train_on, tmp_path), tmp_path)
    assert all("reward 'bright': the state of ranks [1]" in each["error"] for each in left)
    assert not list((tmp_path / "run" / "checkpoints").glob("iteration_*"))


def test_a_state_that_no_checkpoint_can_hold_is_refused_at_the_start():
    reward = Bar()
    reward.state = {"net": torch.nn.Linear(1, 1)}
    with pytest.raises(UserError, match="reward 'bright'.* not Linear"):
        with_bar(kind=lambda: reward)


LEAVING = """import torch
def leave():
    torch.manual_seed(0)
    {}
leave()
class it:
    def __init__(self):
        leave()
    def __call__(self, images, prompts):
        leave()
        return [1.0] * len(prompts)
"""


LEFT = """
default dtype -> torch.set_default_dtype(torch.bfloat16)
default device -> torch.set_default_device('meta')
grad mode -> torch.set_grad_enabled(False)
number of threads -> torch.set_num_threads(2)
deterministic mode -> torch.use_deterministic_algorithms(True)
cudnn.benchmark -> torch.backends.cudnn.benchmark = True
"""


def settings_of_torch():
    deterministic, benchmark = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    now = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    return *now, torch.is_grad_enabled(), deterministic, benchmark


@pytest.mark.parametrize(("name", "source"), rows(LEFT))
def test_settings_that_a_reward_leaves_behind_do_not_change_a_run(tmp_path, caplog, name, source):
    """Its module, when it is made, and at every call. Seeds are nothing to a run, whose noise is from
    generators of its own."""
    before = settings_of_torch()
    (file := tmp_path / "mine.py").write_text(LEAVING.format(source))
    plugins.allow(str(file))
    rewards = build_rewards({"bad": RewardConfig(kind=f"{file}:it")})
    assert settings_of_torch() == before
    for _ in range(2):
        assert score(rewards, torch.zeros(2, 3, 4, 4), ["a", "b"]).tolist() == [[1, 1]]
        assert settings_of_torch() == before
    # calls are without gradients anyway
    told = [f"{who} left torch's {name} at" for who in (file, "the reward bad", "the reward it")]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (2 if name == "grad mode" else 3)
    assert all(each.startswith(begin) for each, begin in zip(said, told, strict=False))


def test_few_scores_close_together_are_told_of_at_the_first_iteration():
    """20.9 in bfloat16 has steps of .125. Scores that are few by nature, as right or wrong, 1 to 5
    or a share of letters, are no such, nor are exact ones of a part of the members."""
    levels = torch.linspace(0, 1, 6).repeat(2)[None, None, None]  # of a group of 12
    exact = 20.9 + torch.linspace(0, 0.3, 12)[None, None, None]
    kinds = {
        "exact": exact,
        "half scored": exact.where(torch.arange(12) % 2 == 0, torch.nan),
        "rounded": exact.bfloat16().float(),
        "right": levels.round(),
        "stars": (4 * levels).round() + 1,
    }
    (line,) = rounded(list(kinds), torch.cat([*kinds.values()], 1))
    assert line.startswith(
        "reward 'rounded': 4 different scores in a group of 12, in steps of 0.12"
    )
    said = []
    exact = lambda images, prompts: 16 + 10 * images.mean((1, 2, 3))  # noqa: E731
    for reward in (exact, lambda *given: exact(*given).bfloat16()):
        t = trainer(None, "algorithm.group_size=8", rewards={"bright": reward}, notify=said.append)
        t.iterate()
        t.iterate()
    assert len(said) == 1, said
