"""The trainer: learning, on-policy ratios, equal updates however split, and runs that repeat and
resume bit for bit."""

import dataclasses
import json
import shutil
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from g2rpo.core.errors import Preempted, UserError
from g2rpo.core.flow import scheduler_grid, sigma_grid
from g2rpo.core.seeding import generator_for
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.run.checkpoint import checkpoints
from g2rpo.training.collector import Groups
from g2rpo.training.listeners.first_group import widest
from g2rpo.training.listeners.listener import Ask
from g2rpo.training.stopwatch import Stopwatch
from tests.support.runs import asking, cut, fallen_back, log, mean, resumed, trainer, untimed


def run(t):
    return list(t.train())


def watched(t):
    """What `t` updates from, (examples, cond) by update, as it goes."""
    seen, update = [], t.updater.update
    t.updater.update = lambda examples, cond: (
        seen.append((examples, cond)) or update(examples, cond)
    )
    return seen


def test_a_run_raises_its_reward_and_leaves_its_files(tmp_path):
    t = trainer(tmp_path, "trainer.iterations=10")
    rows = run(t)
    evaluations = [row for row in rows if row["kind"] == "eval"]
    assert evaluations[-1]["reward/bright"] > evaluations[0]["reward/bright"] + 0.02
    table = t.finish()
    assert table["bright"].tuned - table["bright"].base > 0.02
    assert table["dark"].tuned == pytest.approx(-table["bright"].tuned, abs=1e-6)
    assert t.export().is_file()
    for name in (
        "metrics.jsonl",
        "curves.png",
        "results.json",
        "samples/before_after.png",
        "samples/iteration_000000.png",
    ):
        assert (tmp_path / name).stat().st_size > 0, name
    assert any((tmp_path / "tensorboard").iterdir())
    assert [json.loads(line)["iteration"] for line in (tmp_path / "metrics.jsonl").open()] == [
        r["iteration"] for r in rows
    ]


@pytest.mark.parametrize("update_every", ["rollout", "branch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ratio_is_exactly_one_before_the_first_update(update_every, dtype):
    """The recorded log-probs against the training pass: no drift at all, for the first update of a
    rollout."""
    precision = "published" if dtype == "bfloat16" else dtype
    options = (f"algorithm.update_every={update_every}", f"sampling.precision={precision}")
    row = trainer(None, *options, policy=GaussianPolicy(dtype=getattr(torch, dtype))).iterate()
    # later branch steps see weights that have moved
    assert (row["ratio_deviation"] == 0) == (update_every == "rollout")
    # bfloat16: the anchor's velocity was computed from the unrounded latent, an error of 2^-9 in x
    # and in v
    assert row["log_prob_drift"] <= (0 if dtype == "float32" else 0.02)


def test_the_shift_can_be_the_models_own():
    """The Gaussian policy is deployed without a shift; the config's default is 3."""
    assert torch.equal(trainer(None, "sampling.shift=model").sigmas, sigma_grid(6, 1.0))
    walked = trainer(None, "sampling.shift=scheduler", "evaluation.num_steps=9")
    assert torch.equal(walked.sigmas, scheduler_grid(6, 1.0)) and torch.equal(
        walked.evaluator.sampler.sigmas, scheduler_grid(9, 1.0)
    )
    assert torch.equal(trainer(None).sigmas, sigma_grid(6, 3.0))


def test_without_a_run_dir_a_whole_run_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    t = trainer(None)
    assert [row["iteration"] for row in run(t)] == [0, 1, 2, 2, 3, 4, 4]
    assert t.finish()["bright"].tuned > 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("minutes", "judged"),
    [
        (["every_minutes=1e-9"], [0, 1, 2, 3, 4]),
        (["every_minutes=1e9"], [0, 4]),
    ],
)
def test_pictures_are_judged_by_the_clock_as_well(minutes, judged):
    t = trainer(None, "evaluation.every=100", *(f"evaluation.{each}" for each in minutes))
    assert [row["iteration"] for row in run(t) if row["kind"] == "eval"] == judged


class Minutes(Stopwatch):
    """Every iteration and every evaluation takes a minute."""

    def __init__(self):
        super().__init__()
        self.seconds = dict.fromkeys(
            ("encode", "rollout", "decode", "rewards", "update", "evaluation"), 10.0
        )

    def lap(self, phase):
        pass


def test_minutes_of_training_are_counted_across_a_resumption(tmp_path, monkeypatch):
    for module in ("loop", "trainer"):
        monkeypatch.setattr(f"g2rpo.training.{module}.Stopwatch", Minutes)
    options = (
        "evaluation.every=100",
        "evaluation.every_minutes=4.5",
        "trainer.iterations=8",
        "trainer.checkpoint_every=1",
    )
    begun = trainer(tmp_path, *options).train()
    assert [next(begun)["iteration"] for _ in range(5)] == [0, 1, 1, 2, 3]
    begun.close()
    assert [
        row["iteration"] for row in run(resumed(tmp_path, *options)) if row["kind"] == "eval"
    ] == [6, 8]


def test_checkpoints_are_written_by_the_clock_as_well(tmp_path):
    t = trainer(
        tmp_path,
        "trainer.checkpoint_every=100",
        "trainer.checkpoint_minutes=1e-9",
        "trainer.keep_checkpoints=9",
    )
    run(t)
    assert len(checkpoints(tmp_path / "checkpoints")) == 4


def test_base_and_tuned_are_compared_by_the_evaluation_after_the_last_iteration_if_weights_are_still_those():
    t = trainer(None)
    list(t.train())
    inner, calls = t.policy.velocity, []
    t.policy.velocity = lambda *given: calls.append(1) or inner(*given)
    table = t.finish()
    # float32
    assert not calls and table["bright"].tuned == pytest.approx(
        t.score_heldout().means()["bright"], rel=1e-6
    )
    t.iterate()
    calls.clear()
    assert t.finish()["bright"].tuned != table["bright"].tuned and calls


@pytest.mark.parametrize("kl_weight", [0.0, 0.5])
def test_an_update_is_the_same_in_one_pass_or_in_many(kl_weight):
    """Sums of float32 gradients in another order: 1e-6 of gradients whose size is 1 after Adam's
    normalisation."""
    results = []
    for size in (1, 4, 64):
        t = trainer(None, f"trainer.micro_batch_size={size}", f"algorithm.kl_weight={kl_weight}")
        t.iterate()
        t.iterate()
        results.append(mean(t))
        torch.testing.assert_close(results[-1], results[0], atol=1e-5, rtol=0)


def test_the_loss_gradient_is_the_policy_gradient():
    """At ratio 1 the gradient of the loss is -mean(A d log p / d theta), here by central
    differences in the one parameter."""
    t = trainer(None, "trainer.prompts_per_iteration=1", policy=(policy := GaussianPolicy(size=1)))
    seen, t.learner.optimizer.step = watched(t), lambda: None
    t.iterate()
    (examples, cond), gradient = seen[0], policy.mean.grad.clone()
    advantages = torch.cat([item.advantages for item in examples])

    @torch.no_grad()
    def objective():
        # the old log-prob is a constant
        log_ratio = t.updater.loss(examples, cond, first=False).log["log_ratio"]
        return float((advantages * log_ratio).double().mean())

    policy.mean.requires_grad_(False)
    for entry in range(3):
        # the objective is quadratic in the mean: central differences are exact up to float32
        # rounding / h
        h = 0.05
        policy.mean.view(-1)[entry] += h
        above = objective()
        policy.mean.view(-1)[entry] -= 2 * h
        below = objective()
        policy.mean.view(-1)[entry] += h
        assert float(gradient.view(-1)[entry]) == pytest.approx(
            -(above - below) / (2 * h), rel=1e-2, abs=1e-5
        )


def test_the_kl_term_holds_the_policy_near_its_base():
    free, held = (
        trainer(None, f"algorithm.kl_weight={w}", "trainer.iterations=8") for w in (0.0, 50.0)
    )
    for t in (free, held):
        for _ in range(8):
            row = t.iterate()
    assert row["kl"] > 0
    assert float(mean(held).abs().mean()) < 0.7 * float(mean(free).abs().mean())


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize("update_every", ["rollout", "branch"])
def test_two_iterations_a_kill_and_two_more_equal_four(tmp_path, ema, update_every):
    options = (
        f"optim.ema_decay={ema}",
        f"algorithm.update_every={update_every}",
        "optim.warmup_iterations=3",
    )
    for name in ("straight", "cut"):
        (tmp_path / name).mkdir()
    straight = trainer(tmp_path / "straight", *options)
    run(straight)
    cut(trainer(tmp_path / "cut", *options), "train", 3)  # after the checkpoint of 2
    again = trainer(tmp_path / "cut", *options)
    assert again.resume() == [] and again.iteration == 2
    run(again)
    assert torch.equal(mean(straight), mean(again)) and log(tmp_path / "straight") == log(
        tmp_path / "cut"
    )
    if ema:
        assert torch.equal(straight.learner.average.module[0], again.learner.average.module[0])


def test_evaluation_and_export_use_the_average(tmp_path):
    t = trainer(tmp_path, "optim.ema_decay=0.99", "trainer.iterations=6")
    run(t)
    own = mean(t)
    t.export()
    saved = load_file(tmp_path / "adapter" / "gaussian.safetensors")["mean"]
    assert torch.equal(saved, t.learner.average.module[0]) and not torch.equal(saved, own)
    assert torch.equal(mean(t), own)  # and training goes on from its own weights


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, damage):
    run(trainer(tmp_path))
    file = checkpoints(tmp_path / "checkpoints")[-1] / "weights.safetensors"
    content = file.read_bytes()
    file.unlink()
    if damage != "delete":
        file.write_bytes(
            content[: len(content) // 2]
            if damage == "truncate"
            else content[:-1] + bytes([content[-1] ^ 1])
        )
    _, complaint = fallen_back(tmp_path)
    assert "iteration_000004" in complaint and "weights.safetensors" in complaint


def test_an_iteration_is_trained_by_the_algorithm_of_that_iteration(monkeypatch):
    plain = ["algorithm.name=mixgrpo", "algorithm.group_size=6"]
    t, other = (
        trainer(None, *plain, "algorithm.update_every=rollout"),
        trainer(None, *plain, "algorithm.update_every=2"),
    )
    monkeypatch.setattr(
        t.loop, "algorithm_now", lambda: dataclasses.replace(t.algorithm, update_every=2)
    )
    assert untimed([t.iterate()]) == untimed([other.iterate()]) and torch.equal(
        mean(t), mean(other)
    )


def test_the_logged_loss_is_the_mean_over_members_whatever_parts_they_are_updated_in():
    """With steps of almost 0 the ratio is 1, and the loss the mean of advantages, which is 0."""
    plain = ["algorithm.name=mixgrpo", "algorithm.group_size=6", "optim.learning_rate=1e-12"]
    assert trainer(None, *plain, "algorithm.update_every=4").iterate()["loss"] == pytest.approx(
        0, abs=1e-6
    )


def test_the_best_weights_of_an_attempt_that_is_repeated_are_forgotten(tmp_path):
    t = trainer(tmp_path, "alarms.action=rollback")
    list(t.train())
    t.persistence.keep_best(4)
    # as if it had been killed before the last checkpoint
    shutil.rmtree(checkpoints(t.run.checkpoints)[-1])
    assert resumed(tmp_path, "alarms.action=rollback").iteration == 2 and not checkpoints(
        t.run.best
    )


def test_a_divided_base_is_not_sampled_after_training():
    t = trainer(None, "algorithm.kl_weight=0.1", "policy.tuning=full")
    assert t._keeps_base
    t.shards = SimpleNamespace(divided=True)
    assert not t._keeps_base


def test_a_signal_during_an_evaluation_loses_no_alarms_end(tmp_path):
    """A run that an alarm ends is not one that was preempted, or it would go on."""
    t = trainer(tmp_path, "alarms.action=stop", "evaluation.every=1")
    ended = []
    t.early_stop.end = lambda: ended.append(t.iteration)

    def preempted():
        raise Preempted("as asked")

    t.iterate(), setattr(t, "evaluate", preempted)
    with pytest.raises(Preempted):
        list(t.train())
    assert ended == [1]


def test_the_group_that_a_report_shows_has_right_and_wrong_members_and_the_widest_spread():
    rewards = torch.zeros(4, 2, 1, 6)  # [N, R, M, G]
    # a difference of rounding has advantages as large as any
    rewards[1, 0] = torch.tensor([0, 1e-6, 0, 0, 0, 0])
    rewards[2, 0] = torch.tensor([1, 0, 1, 0, 1, 0])
    rewards[3, 1] = torch.tensor([0, 0, 100, 0, 0, 0])
    rewards[3, 0, 0, 0] = torch.nan
    assert widest(rewards) == 2  # both 2 and 3 have the largest spread of one reward
    rewards[3, 0] = rewards[2, 0] / 2
    assert widest(rewards) == 3
    right = torch.zeros(4, 1, 6)
    assert (
        widest(rewards, right)
        == widest(rewards, right + 1)
        == widest(rewards, right + torch.nan)
        == 3
    )
    right[0], right[1, 0, 2] = 1, 1
    assert widest(rewards, right) == 1  # the only one with right and wrong members
    right[2, 0, 0] = 1
    assert widest(rewards, right) == 2
    assert widest(torch.full((3, 1, 2, 4), torch.nan)) == widest(torch.ones(3, 1, 2, 4)) == 0


@pytest.mark.parametrize("ask", [Ask.EVALUATE, Ask.SAVE, Ask.LEAVE])
def test_a_listener_hears_every_row_and_gets_what_it_asks_for(tmp_path, ask):
    t = trainer(
        tmp_path, "trainer.iterations=3", "evaluation.every=9", "trainer.checkpoint_every=9"
    )
    mine = asking(t, ask, after=1)
    with pytest.raises(Preempted, match="after iteration 1") if ask is Ask.LEAVE else nullcontext():
        run(t)
    rows = [heard[:2] for heard in mine.heard if heard[0] != "groups"]
    evaluated = {Ask.EVALUATE: [("eval", 1)], Ask.SAVE: [], Ask.LEAVE: []}[ask]
    rest = [] if ask is Ask.LEAVE else [("train", 2), ("train", 3), ("eval", 3)]
    assert rows == [("eval", 0), ("train", 1), *evaluated, *rest]
    assert rows == [(row["kind"], row["iteration"]) for row in log(tmp_path)]
    saved = {Ask.EVALUATE: [3], Ask.SAVE: [1, 3], Ask.LEAVE: [1]}[ask]
    assert [path.name for path in checkpoints(t.run.checkpoints)] == [
        f"iteration_{each:06d}" for each in saved
    ]
    groups = [heard for heard in mine.heard if heard[0] == "groups"]
    assert groups == [("groups", 2, 6)] * sum(kind == "train" for kind, _ in rows)


def test_alarms_are_set_before_any_other_listener_hears_a_row(tmp_path, monkeypatch):
    t = trainer(tmp_path)
    monkeypatch.setattr(
        t.alarms, "see", lambda row, scores: row.setdefault("alarms", {"drift": "much"})
    )
    mine = asking(t, Ask.NOTHING, after=9)
    t.listeners = [*t.listeners[:1], mine, *t.listeners[1:]]
    rows = run(t)
    heard = [alarms for kind, *_, alarms in mine.heard if kind != "groups"]
    assert all(heard) and len(heard) == 2 * len(rows)
    assert [row["alarms"] for row in log(tmp_path)] == [{"drift": "much"}] * len(rows)


def test_groups_that_were_sampled_apart_teach_what_groups_sampled_together_do():
    """The same noise by place, and rewards that nobody asked for are not scored. Only sums have
    another order."""
    together, apart = trainer(None), trainer(None)

    def noise(first, place, *purpose):
        return generator_for(7, first + place, *purpose)

    both = together.sample_groups(["0", "0.5"], noise=partial(noise, 0), rewards={})
    each = [
        apart.sample_groups([prompt], noise=partial(noise, first), rewards={})
        for first, prompt in enumerate(["0", "0.5"])
    ]
    joined = Groups.join(each)
    assert both.rewards.shape == joined.rewards.shape and both.rewards.shape[1] == 0
    for one, other in zip(together.pictures(both), apart.pictures(joined), strict=True):
        assert one.shape[:2] == both.rewards.shape[2:] and torch.allclose(one, other, atol=1e-6)
    advantages = torch.linspace(-1, 1, both.rewards.shape[-1]).expand(len(both.rewards), -1)
    assert (
        together.learn_from(both, advantages, counted=False)
        == apart.learn_from(joined, advantages, counted=False)
        == {}
    )
    assert together.iteration == 0 and not torch.equal(mean(together), mean(trainer(None)))
    torch.testing.assert_close(mean(together), mean(apart), rtol=0, atol=1e-6)


def test_an_iteration_is_sampling_and_learning_and_can_be_taken_back():
    plain, built = trainer(None), trainer(None)
    before = built.snapshot()
    groups = built.sample_groups()
    advantages = built.algorithm.advantages(groups.rewards, built.loop.weights)
    own, row = plain.iterate(), built.learn_from(groups, advantages)
    assert {name for name in own if own[name] != row[name]} <= {
        name for name in own if name.startswith("seconds")
    }
    assert built.iteration == 1 and torch.equal(mean(plain), mean(built))
    built.restore(before)
    assert torch.equal(mean(built), mean(trainer(None))) and built.iteration == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a[:1], r"should have shape \[\d+, \d+\] .*, have \[1, "),
        (lambda a: a[:, :, None], "should have shape"),
        (lambda a: a.log(), "should be finite numbers, .* take 0 for what should not count"),
    ],
    ids=["a group is missing", "another dimension", "not finite"],
)
def test_advantages_by_a_rule_of_ones_own_are_checked(change, said):
    t = trainer(None)
    groups = t.sample_groups()
    with pytest.raises(UserError, match=f"^advantages: {said}"):
        t.learn_from(groups, change(torch.zeros(groups.rewards.shape[0], groups.rewards.shape[-1])))
    assert t.iteration == 0


def test_groups_without_the_runs_rewards_cannot_be_an_iteration():
    t = trainer(None)
    groups = t.sample_groups(["0"], rewards={})
    with pytest.raises(UserError, match="counted=False"):
        t.learn_from(groups, torch.zeros(len(groups.rewards), groups.rewards.shape[-1]))
