"""The trainer: learning, on-policy ratios, equal updates however split, and runs that repeat and
resume bit for bit."""

import dataclasses
import json
import shutil
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file

from g2rpo.config.algorithms import ALGORITHMS
from g2rpo.core.errors import Preempted, UserError
from g2rpo.core.flow import scheduler_grid, sigma_grid
from g2rpo.core.noise import generator_for
from g2rpo.core.objectives import updates_once
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.train.collector import Stopwatch
from g2rpo.train.first_group import widest
from g2rpo.train.listeners import Ask
from g2rpo.train.run.checkpoint import checkpoints
from tests.support.runs import asking, cut, fits, log, mean, resumed, smooth, trainer, untimed
from tests.support.tolerances import Tolerance, adam, near, reordered, rounding
from tests.support.watched import Watched


def test_a_run_raises_its_reward_and_leaves_its_files(tmp_path):
    t = trainer(tmp_path, "trainer.iterations=8")
    rows = list(t.train())
    evaluations = [row["reward/bright"] for row in rows if row["kind"] == "eval"]
    assert evaluations[-1] > evaluations[0] + 0.02
    table = t.finish()
    assert table["bright"].tuned - table["bright"].base > 0.02
    assert table["dark"].tuned == -table["bright"].tuned
    assert t.export().is_file()
    for name in ("curves.png", "results.json", "samples/before_after.png", "tensorboard"):
        assert (tmp_path / name).stat().st_size > 0, name
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [row["iteration"] for row in logged] == [row["iteration"] for row in rows]


@pytest.mark.parametrize("update_every", ["rollout", "branch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ratio_is_exactly_one_before_the_first_update(update_every, dtype):
    """The recorded log-probs against the training pass: no drift at all, for the first update of a
    rollout; later branch steps see weights that have moved. In bfloat16 the anchor's velocity was
    computed from the unrounded latent, an error of 2^-9 in x and in v."""
    precision = "published" if dtype == "bfloat16" else dtype
    options = (f"algorithm.update_every={update_every}", f"sampling.precision={precision}")
    row = trainer(None, *options, policy=GaussianPolicy(dtype=getattr(torch, dtype))).iterate()
    assert (row["ratio_deviation"] == 0) == (update_every == "rollout")
    assert row["log_prob_drift"] <= (0 if dtype == "float32" else 0.02)


NO_RATIO = {"pave_grpo", "awm", "dgpo", "refl", "self_opd", *("diffusion_nft", "epg", "opsd")}
"""Algorithms with one update a rollout, or without a ratio to it."""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_other_rounding_in_the_rollout_moves_no_ratio_of_a_single_update(name):
    """Log-probs and means of the rollout as compiled kernels might round them: weights are the same
    to the bit. With several updates of a rollout a ratio contains them."""

    def weights(rounded, every):
        settings = [f"algorithm.name={name}", *fits(name)]
        if name != "refl":  # which has one update
            settings.append(f"algorithm.update_every={every}")
        t = trainer(None, "sampling.num_steps=10", *settings)
        update = t.updater.update

        def with_other_rounding(examples, cond):
            for example in examples:
                for key, values in example.data.items():
                    if key.startswith("old_"):
                        values *= 1 + rounded
            return update(examples, cond)

        t.updater.update = with_other_rounding
        row = t.iterate()
        assert updates_once(t.algorithm) == (every == "rollout")
        assert not updates_once(t.algorithm) or row.get("ratio_deviation", 0) == 0
        return mean(t)

    assert torch.equal(weights(0, "rollout"), weights(1e-3, "rollout"))
    if name not in NO_RATIO:
        several = {"g2rpo": "branch", "e_grpo": "branch", "fdfo": 1}.get(name, 3)
        assert not torch.equal(weights(0, several), weights(1e-3, several))


def test_the_shift_can_be_the_models_own():
    """The Gaussian policy is deployed without a shift; the config's default is 3."""
    assert torch.equal(trainer(None).sigmas, sigma_grid(6, 3.0))
    assert torch.equal(trainer(None, "sampling.shift=model").sigmas, sigma_grid(6, 1.0))
    walked = trainer(None, "sampling.shift=scheduler", "evaluation.num_steps=9")
    assert torch.equal(walked.sigmas, scheduler_grid(6, 1.0))
    assert torch.equal(walked.evaluator.sampler.sigmas, scheduler_grid(9, 1.0))


class Minutes(Stopwatch):
    """Every iteration and every evaluation takes a minute."""

    def __init__(self):
        super().__init__()
        phases = ("encode", "rollout", "decode", "rewards", "update", "evaluation")
        self.seconds = dict.fromkeys(phases, 10.0)

    def lap(self, phase):
        pass


def test_minutes_of_training_are_counted_across_a_resumption(tmp_path, monkeypatch):
    """For evaluations; checkpoints are written by the clock as well."""
    monkeypatch.setattr("g2rpo.train.trainer.Stopwatch", Minutes)
    options = ["evaluation.every=100", "evaluation.every_minutes=4.5", "trainer.iterations=8"]
    options += ["trainer.checkpoint_every=100", "trainer.checkpoint_minutes=1e-9"]
    cut(trainer(tmp_path, *options), "train", 4)
    rows = resumed(tmp_path, *options).train()
    assert [row["iteration"] for row in rows if row["kind"] == "eval"] == [6, 8]


def test_base_and_tuned_are_compared_by_the_last_evaluation_if_weights_are_still_those():
    t = trainer(None)
    list(t.train())
    inner, calls = t.policy.velocity, []
    t.policy.velocity = lambda *given: calls.append(1) or inner(*given)
    table = t.finish()
    assert not calls
    assert table["bright"].tuned == near(t.score_heldout().means()["bright"], rounding(8))
    t.iterate()
    assert t.finish()["bright"].tuned != table["bright"].tuned


class Watching(GaussianPolicy):
    """It notes the most rows of a training pass."""

    widest = 0

    def velocity(self, x, sigma, cond):
        if torch.is_grad_enabled():
            self.widest = max(self.widest, len(x))
        return super().velocity(x, sigma, cond)


@pytest.mark.parametrize(
    ("name", "kl_weight"), [("g2rpo", 0.0), ("g2rpo", 0.5), ("flow_grpo", 0.04), ("mixgrpo", 0.0)]
)
def test_an_update_is_the_same_in_one_pass_or_in_many(name, kl_weight):
    """Gradients of 84 members and steps at most, 0.01 in one entry, in another order. Members with
    latents of their own are split over passes of at most micro_batch_size latents."""
    results, words = [], [f"algorithm.name={name}", f"algorithm.kl_weight={kl_weight}"]
    for size in (1, 4, 64):
        passes = f"trainer.micro_batch_size={size}", "algorithm.group_size=6"
        t = smooth(trainer(None, *words, *passes, policy=Watching()))
        t.iterate()
        t.iterate()
        results.append(mean(t))
        assert name == "g2rpo" or size == 64 or t.policy.widest == size
        allowed = adam(1000 * 0.05, updates=t.learner.steps, gradient=reordered(84, 0.01)["atol"])
        torch.testing.assert_close(results[-1], results[0], **allowed)
    assert float(results[0].abs().mean()) > 100 * allowed["atol"]


def test_the_loss_gradient_is_the_policy_gradient():
    """At ratio 1 the gradient of the loss is -mean(A d log p / d theta), here by central
    differences in the one parameter. The objective is quadratic in the mean, so these are exact up
    to the rounding of two objectives of size 1, over 2 h. The old log-prob is a constant."""
    t = trainer(None, "trainer.prompts_per_iteration=1", policy=(policy := GaussianPolicy(size=1)))
    seen = Watched(t)
    t.learner.learning_rate = 0.0
    t.iterate()
    (((examples, cond), _),), ((gradient,),) = seen.updated, seen.gradients
    assert policy.mean.grad is None  # its memory is the next rollout's
    advantages = torch.cat([item.advantages for item in examples])

    @torch.no_grad()
    def objective(change):
        policy.mean += change
        log_ratio = t.updater.loss(examples, cond, first=False).log["log_ratio"]
        policy.mean -= change
        return float((advantages * log_ratio).double().mean())

    policy.mean.requires_grad_(False)
    for entry in range(3):
        step = torch.zeros_like(policy.mean)
        step.view(-1)[entry] = h = 0.05
        expected = -(objective(step) - objective(-step)) / (2 * h)
        apart = Tolerance(rtol=0.0, atol=2 * rounding(60, size=1.0)["atol"] / (2 * h))
        assert float(gradient.view(-1)[entry]) == near(expected, apart)


@pytest.mark.parametrize(
    "words",
    [
        "optim.ema_decay=0.0",
        "optim.ema_decay=0.9 algorithm.update_every=branch",
        # plans that are functions of the iteration, and old weights
        "algorithm.name=mixgrpo algorithm.schedule=random sampling.num_steps=10",
        "algorithm.name=diffusion_nft algorithm.old_schedule=[0,0.2,0.5] optim.ema_decay=0.9",
    ],
)
def test_two_iterations_a_kill_and_two_more_equal_four(tmp_path, words):
    options = [*words.split(), "algorithm.group_size=6", "optim.warmup_iterations=3"]
    straight = trainer(tmp_path / "straight", *options)
    list(straight.train())
    cut(trainer(tmp_path / "cut", *options), "train", 3)  # after the checkpoint of 2
    again = trainer(tmp_path / "cut", *options)
    assert again.resume() == [] and again.iteration == 2
    list(again.train())
    assert torch.equal(mean(straight), mean(again))
    assert log(tmp_path / "straight") == log(tmp_path / "cut")
    averages = [t.learner.average.module if t.learner.average else [] for t in (straight, again)]
    for kept, found in (averages, (straight.learner.old, again.learner.old)):
        for one, other in zip(kept, found, strict=True):
            assert torch.equal(one, other) and not torch.equal(one, mean(again))


def test_evaluation_and_export_use_the_average(tmp_path):
    t = trainer(tmp_path, "optim.ema_decay=0.99", "trainer.iterations=2")
    list(t.train())
    own = mean(t)
    t.export()
    saved = load_file(tmp_path / "adapter" / "gaussian.safetensors")["mean"]
    assert torch.equal(saved, t.learner.average.module[0]) and not torch.equal(saved, own)
    assert torch.equal(mean(t), own)  # and training goes on from its own weights


MIXED = ["algorithm.name=mixgrpo", "algorithm.group_size=6"]


def test_an_iteration_is_trained_by_the_algorithm_of_that_iteration(monkeypatch):
    t, other = (trainer(None, *MIXED, f"algorithm.update_every={n}") for n in ("rollout", 2))
    now = dataclasses.replace(t.algorithm, update_every=2)
    monkeypatch.setattr(t, "algorithm_now", lambda: now)
    assert untimed([t.iterate()]) == untimed([other.iterate()])
    assert torch.equal(mean(t), mean(other))


def test_the_logged_loss_is_the_mean_over_members_whatever_parts_they_are_updated_in():
    """With steps of almost 0 the ratio is 1, and the loss the mean of advantages, which is 0."""
    t = trainer(None, *MIXED, "optim.learning_rate=1e-12", "algorithm.update_every=4")
    assert t.iterate()["loss"] == near(0, reordered(48, 1.0))


def test_the_best_weights_of_an_attempt_that_is_repeated_are_forgotten(tmp_path):
    t = trainer(tmp_path)
    list(t.train())
    # as if it had been killed before the last checkpoint
    shutil.rmtree(checkpoints(t.run.checkpoints)[-1])
    t.persistence.keep_best(4)
    assert [path.name for path in checkpoints(t.run.best)] == ["iteration_000004"]
    assert resumed(tmp_path).iteration == 2 and not checkpoints(t.run.best)


def test_a_signal_during_an_evaluation_loses_no_alarms_end(tmp_path, monkeypatch):
    """A run that an alarm ends is not one that was preempted, or it would go on."""
    t, ended = trainer(tmp_path, "alarms.action=stop", "evaluation.every=1"), []
    t.early_stop.end = lambda: ended.append(t.iteration)

    def preempted():
        raise Preempted("as asked")

    t.iterate()
    t.evaluate = preempted
    with pytest.raises(Preempted):
        list(t.train())
    assert ended == [1]


def test_the_group_that_a_report_shows_has_right_and_wrong_members_and_the_widest_spread():
    """The spread is that of one reward. A difference of rounding has advantages as large as any."""
    rewards = torch.zeros(3, 2, 1, 6)  # [N, R, M, G]
    rewards[0, 0] = torch.tensor([0, 1e-6, 0, 0, 0, 0])
    rewards[1, 0] = torch.tensor([1, 0, 1, 0, 1, 0])
    rewards[2, 1] = torch.tensor([torch.nan, 0, 100, 0, 0, 0])
    right = torch.zeros(3, 1, 6)
    for none in (None, right, right + 1, right + torch.nan):
        assert widest(rewards, none) == 1  # both 1 and 2 have the largest
    right[0, 0, 2] = 1
    assert widest(rewards, right) == 0  # the only one with right and wrong members


@pytest.mark.parametrize(
    ("ask", "heard", "saved"),
    [
        (Ask.EVALUATE, ["eval", "train", "eval", "train", "eval"], [2]),
        (Ask.SAVE, ["eval", "train", "train", "eval"], [1, 2]),
        (Ask.LEAVE, ["eval", "train"], [1]),
    ],
)
def test_a_listener_hears_every_row_with_its_alarms_and_gets_what_it_asks_for(
    tmp_path, monkeypatch, ask, heard, saved
):
    never = ["evaluation.every=9", "trainer.checkpoint_every=9", "trainer.iterations=2"]
    t = trainer(tmp_path, *never)

    def see(row, scores):
        t.alarms.rows.append(row)
        return row.setdefault("alarms", {"drift": "much"})

    monkeypatch.setattr(t.alarms, "see", see)
    mine = asking(t, ask, after=1)
    with suppress(Preempted):
        list(t.train())
    rows = [each for each in mine.heard if each[0] != "groups"]
    assert rows == [(row["kind"], row["iteration"], "alarms" in row) for row in log(tmp_path)]
    assert [kind for kind, *_ in rows] == heard and all(alarms for *_, alarms in rows)
    assert mine.heard.count(("groups", 2, 6)) == heard.count("train")
    kept = [int(path.name[-6:]) for path in checkpoints(t.run.checkpoints)]
    assert kept == saved


def test_groups_of_any_prompts_are_sampled_by_place_and_scored_by_the_rewards_that_are_named():
    """Their pictures do not depend on the prompts beside them, but for the rounding of a batch."""

    def sampled(prompts, first):
        def noise(place, *purpose):
            return generator_for(7, first + place, *purpose)

        return t.sample_groups(prompts, noise=noise, rewards={})

    t = smooth(trainer(None))
    both = sampled(["0", "0.5"], 0)
    apart = [*t.pictures(sampled(["0"], 0)), *t.pictures(sampled(["0.5"], 1))]
    for one, other in zip(t.pictures(both), apart, strict=True):
        torch.testing.assert_close(one, other, **rounding(6 * 20, size=1.0))
    assert both.rewards.shape[1] == 0
    with pytest.raises(UserError, match="these groups have 0 rewards, and an iteration's have 1"):
        t.learn_from(both, torch.zeros(len(both.rewards), both.rewards.shape[-1]))


def test_an_iteration_is_sampling_and_learning_and_can_be_taken_back():
    plain, built = trainer(None), trainer(None)
    before, groups = built.snapshot(), built.sample_groups()
    advantages = built.algorithm.advantages(groups.rewards, built.reward_weights)
    assert untimed([plain.iterate()]) == untimed([built.learn_from(groups, advantages)])
    assert built.iteration == 1 and torch.equal(mean(plain), mean(built))
    built.restore(before)
    assert torch.equal(mean(built), mean(trainer(None))) and built.iteration == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a[:1], r"needed is shape \[\d+, \d+\] .*, got shape \[1, "),
        (lambda a: a[:, :, None], "needed is shape"),
        (lambda a: a.log(), r"needed is finite numbers \(0 for .*, got \d+ that are NaN"),
    ],
)
def test_advantages_by_a_rule_of_ones_own_are_checked(change, said):
    t = trainer(None)
    groups = t.sample_groups()
    zeros = torch.zeros(len(groups.rewards), groups.rewards.shape[-1])
    with pytest.raises(UserError, match=f"^advantages: {said}"):
        t.learn_from(groups, change(zeros))
    assert t.iteration == 0
