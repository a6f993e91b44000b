"""Alarms: silent where nothing is wrong, raised where something is, the same ones after a resume
and on every rank."""

import json
import math
from itertools import pairwise
from typing import get_args

import pytest
import torch
from scipy.stats import t as student

from g2rpo.config.schema import Alarm
from g2rpo.core.data import Precision
from g2rpo.core.errors import Stopped
from g2rpo.core.flow import sigma_grid
from g2rpo.core.statistics import paired
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.train.monitor.alarms import (
    ALARMS,
    FALSE_ALARM_LEVEL,
    HELPS,
    LEAST_FALL,
    WINDOW_ITERATIONS,
    Alarms,
    crowd,
    fallen_rewards,
    judged_gain,
    outside,
    rounding_of,
)
from g2rpo.train.monitor.image_statistics import image_statistics, statistics_row
from g2rpo.train.run.checkpoint import checkpoints, load_checkpoint
from tests.support import ranks
from tests.support.runs import (
    brightness,
    config,
    cut,
    log,
    mean,
    resumed,
    trainer,
    untimed,
    with_precision,
)

BFLOAT16 = 2 * torch.finfo(torch.bfloat16).eps


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


QUIET = {"kind": "train", "silent_groups": 0.0, "masked_groups": 0.0, "advantage_clipped": 0.0}


def test_an_action_can_be_given_for_every_alarm_and_for_no_other():
    assert get_args(Alarm) == tuple(ALARMS) == tuple(HELPS)


# Rows of training


def training_alarms(rows, limit=1.0):
    log = Alarms([], limit, rows=[{"kind": "train", **row} for row in rows])
    return {name for name, alarm in ALARMS.items() if alarm.look(log, "train")}


@pytest.mark.parametrize(
    ("name", "key", "limit"),
    [
        ("silent", "silent_groups", 0.5),
        ("masked", "masked_groups", 0.1),
        ("saturated", "advantage_clipped", 0.3173),
    ],
)
def test_shares_are_averaged_over_a_window(name, key, limit):
    def alarms(share, count=WINDOW_ITERATIONS):
        shares = [share * (0.5 if i % 2 else 1.5) for i in range(count)]
        return training_alarms([QUIET | {key: each} for each in shares])

    assert alarms(limit * 1.01) == {name}
    assert alarms(limit * 0.99) == alarms(limit * 1.01, WINDOW_ITERATIONS - 1) == set()


def test_a_drift_that_is_not_a_number_is_one_and_an_older_log_has_none():
    for value in (1.1, math.nan, None):  # None as read back from disk
        assert "drift" in training_alarms([{"log_prob_drift": value}])
    assert training_alarms([{"log_prob_drift": 0.9}]) == set() == training_alarms([{}])


# The drift's limit


def limit_of(*overrides, rounding=BFLOAT16):
    return config(*overrides).algorithm.drift_limit(sigma_grid(6, 3.0), range(5), 48, rounding)


def test_half_the_clip_range_is_what_a_later_update_can_bear():
    """GRPO-Guard clips std times the log-ratio; the largest std of the grid counts."""
    for rounding in (2**-22, BFLOAT16):
        assert limit_of("algorithm.update_every=branch", rounding=rounding) == pytest.approx(0.5e-4)
    flow = ["algorithm.name=flow_grpo", "algorithm.group_size=6"]
    often = [*flow, "algorithm.update_every=3", "algorithm.clip_range=0.01"]
    assert limit_of(*often) == pytest.approx(0.5e-2)
    assert limit_of(*flow, "algorithm.update_every=6", "algorithm.clip_range=1e-9") > 1e-4  # once
    guard = ["algorithm.name=grpo_guard", "algorithm.update_every=3", "algorithm.group_size=6"]
    algorithm, sigmas, one = config(*guard).algorithm, sigma_grid(6, 3.0), torch.ones(1, 1)
    stds = [float(algorithm.kernel(sigmas)(one, one, a, b).std) for a, b in pairwise(sigmas[:-1])]
    expected = algorithm.clip_range / 2 / max(stds)
    assert limit_of(*guard, rounding=2**-22) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["flow_grpo", "dancegrpo", "flow_cps"])
def test_the_limit_of_rounding_is_that_of_velocities_with_an_error(name):
    """300 members whose velocity is off by two eps of sqrt 2: the largest drift of all steps is
    within the limit, and not below a third of it (the maximum of 300 normals is 2 to 4 standard
    deviations)."""
    options = [f"algorithm.name={name}", "algorithm.update_every=rollout", "algorithm.eta=0.7"]
    options += ["algorithm.group_size=6", "algorithm.clip_range=1e-9"]
    sigmas = sigma_grid(6, 3.0)
    kernel = config(*options).algorithm.kernel(sigmas)
    x, v = random(300, 48, seed=1), math.sqrt(2) * random(300, 48, seed=2)
    error, drifts = BFLOAT16 * math.sqrt(2) * random(300, 48, seed=3).sign(), []
    for step, at in enumerate(pairwise(sigmas[:-1])):
        sampled, trained = kernel(x, v, *at), kernel(x, v + error, *at)
        x_next = sampled.sample(random(300, 48, seed=4 + step))
        drifts.append((trained.log_prob(x_next) - sampled.log_prob(x_next)).abs().max())
    limit = limit_of(*options)
    assert limit / 3 < max(drifts) <= limit


def test_rounding_is_of_the_coarsest_dtype():
    """Of weights in int8 nothing counts: they are rounded once for all calls."""
    for coarse in ("network", "anchor", "sample", "step"):
        assert Precision(**{coarse: torch.bfloat16}).eps == BFLOAT16 / 2 > Precision().eps
    narrow = ["policy.dtype=bfloat16", "policy.tuning=lora"]
    for options, expected in (
        ([], 2**-22),
        (["sampling.precision=published"], 2**-6),
        (narrow, 2**-6),
        ([*narrow, "policy.quantize=int8"], 2**-6),
    ):
        assert rounding_of(config(*options)) == pytest.approx(expected), options


class Apart(GaussianPolicy):
    """Its training pass sees a velocity that is off by a share."""

    def __init__(self, share, **more):
        super().__init__(**more)
        self.share = share

    def velocity(self, x, sigma, cond):
        v = super().velocity(x, sigma, cond)
        return v * (1 + self.share) if v.requires_grad else v


@pytest.mark.parametrize(
    ("dtype", "update_every", "without"),
    [("float32", "rollout", False), ("bfloat16", "branch", True)],
)
def test_a_training_pass_that_sees_another_model_raises_an_alarm(dtype, update_every, without):
    """A fifth of the velocity is beyond rounding in bfloat16 too. With later updates, bfloat16
    itself takes half the clip range of 1e-4 on a latent of 48 entries, and the alarm says so."""
    precision = "published" if dtype == "bfloat16" else dtype
    options = (f"algorithm.update_every={update_every}", f"sampling.precision={precision}")

    def raised(share):
        policy = Apart(share, dtype=getattr(torch, dtype))
        t = trainer(None, *options, policy=policy, notify=lambda message: None)
        with_precision(t, Precision(anchor=policy.dtype, sample=policy.dtype))
        return "drift" in t.iterate().get("alarms", {})

    assert raised(0.2) and raised(0.0) == without


# Falling rewards


def history(*evaluations):
    return dict(enumerate(evaluations))


def test_a_fall_by_hand():
    """Differences -.1 0 -.2 -.1, twice. Of few prompts the report says no more than the means."""
    before, after = torch.tensor([0.5, 0.6, 0.7, 0.2] * 2), torch.tensor([0.4, 0.6, 0.5, 0.1] * 2)
    expected = float(student.cdf(-0.1 / math.sqrt(0.04 / 7 / 8), 7))
    assert paired(before, after).chance_of_fall == pytest.approx(expected, rel=1e-5)
    ones, zeros = torch.ones(10), torch.zeros(10)
    assert paired(ones, zeros).chance_of_fall == 2**-10
    assert paired(zeros, ones).chance_of_fall == 1


def test_the_pilot_that_was_gamed_is_noticed():
    """studies/LOG.md, 2026-11-21: partial +.028 ± .019 and strict -.133 ± .045, standard errors; and
    without the gain."""
    steps = random(2, 128, seed=1)
    # standard errors of 1
    steps = (steps - steps.mean(1, keepdim=True)) / steps.std(1, keepdim=True) * math.sqrt(128)
    base = {"partial": torch.zeros(128), "strict": torch.zeros(128)}
    partial = {"partial": 0.032 + 0.019 * steps[0]}
    strict = {"strict": -0.133 + 0.045 * steps[1]}
    raised = fallen_rewards(history(base, partial | strict), ["partial"])
    assert raised.keys() == {"hacking"}
    assert "strict -0.133 ± 0.088 since iteration 0 while partial rose" in raised["hacking"]
    assert fallen_rewards(history(base, base | strict), ["partial"]).keys() == {"decline"}
    for evaluations in (history(base), history(base, base | partial)):
        assert fallen_rewards(evaluations, ["partial"]) == {}


def test_a_fall_from_the_peak_counts_though_the_base_was_worse():
    def scores(trained, judged, seed):
        noise = 0.3 * random(2, 100, seed=seed)
        return {"trained": trained + noise[0], "judged": judged + noise[1]}

    rising = [scores(0.0, 0.0, 1), scores(1.0, 1.0, 2)]
    raised = fallen_rewards(history(*rising, scores(2.0, 0.5, 3)), ["trained"])
    assert raised.keys() == {"hacking"}
    assert "since iteration 1 while trained rose" in raised["hacking"]
    raised = fallen_rewards(history(*rising, scores(0.0, 0.5, 3)), ["trained"])
    assert raised.keys() == {"decline"}


def test_what_is_significant_and_too_small_to_see_raises_nothing():
    """In standard deviations of the base's scores of 2,000 prompts, with an error of .0045."""
    base, noise = 7 * random(2000, seed=1), 7 * 0.2 * random(2000, seed=2)
    trained = {"trained": base + 0.7 + noise}
    for fall in (0.11, 0.15):
        judged = {"judged": base - 7 * fall + noise}
        assert paired(base, judged["judged"]).chance_of_fall < 1e-6
        before = {"trained": base, "judged": base}
        raised = fallen_rewards(history(before, trained | judged), ["trained"])
        assert raised.keys() == ({"hacking"} if fall > LEAST_FALL else set())
    assert "(-0.14 s.d.) since iteration 0 while trained rose (+0.11 s.d.) (p" in raised["hacking"]


def test_a_fall_counts_less_the_more_evaluations_it_is_sought_in():
    """The level of the second look is a / (1 reward * 2 * 2 * 3), that of the first a / 2: this
    fall lies in between."""
    base = torch.zeros(20, dtype=torch.float64)
    noise = torch.tensor([1.0, -1.0]).repeat(10).double()
    fallen = min(
        (noise - shift / 100 for shift in range(100)),
        key=lambda now: abs(paired(base, now).chance_of_fall - FALSE_ALARM_LEVEL / 4),
    )
    assert FALSE_ALARM_LEVEL / 12 < paired(base, fallen).chance_of_fall < FALSE_ALARM_LEVEL / 2
    base, fallen = {"r": base}, {"r": fallen}
    assert fallen_rewards(history(base, fallen), []).keys() == {"decline"}
    assert fallen_rewards(history(base, base, fallen), []) == {}


@pytest.mark.slow
def test_runs_that_change_nothing_rarely_raise_a_false_alarm():
    """100 runs of 6 evaluations of 3 rewards on 40 prompts whose scores wander without a direction:
    at most LEVEL of them, and three standard errors (.065) for chance."""
    false = 0
    for run in range(100):
        walk = random(6, 3, 40, seed=run).cumsum(0)
        scores = [dict(zip(("trained", "a", "b"), w, strict=True)) for w in walk]
        false += any(fallen_rewards(history(*scores[: i + 1]), ["trained"]) for i in range(1, 6))
    assert false / 100 < FALSE_ALARM_LEVEL + 0.065


def test_a_reward_of_weight_0_is_not_trained_on():
    """Its rise is no sign that the trained ones are gamed."""
    rewards = {"bright": brightness, "free": brightness}
    free = ["rewards.free.kind=bright", "rewards.free.weight=0"]
    assert trainer(None, *free, rewards=rewards).alarms.trained == ["bright"]


def test_judged_gain_is_in_the_bases_own_units():
    """The base's standard deviations are 1, sqrt(200 / 3), and 0 where it is as it is."""
    nan = math.nan
    base = {"a": [0, 2, nan], "b": [10, 30, 20], "f": [1, 1, 1], "n": [nan] * 3}
    tuned = {"a": [0.5, 2.5, 9], "b": [5, 25, 15], "f": [1.25, 1.25, 1.25], "n": [nan] * 3}
    sides = [{name: torch.tensor(own).float() for name, own in of.items()} for of in (base, tuned)]
    mean = (0.5 - 5 / math.sqrt(200 / 3)) / 2
    for names, expected in {"a": 0.5, "ab": mean, "f": 0.25, "n": nan}.items():
        assert judged_gain(*sides, names) == pytest.approx(expected, nan_ok=True), names


def test_an_evaluation_in_which_a_reward_gives_no_score_raises_masked_at_once():
    watch, none = Alarms(["r"], drift_limit=1.0), torch.full((2,), torch.nan)
    some = torch.tensor([1.0, torch.nan])
    assert watch.see({"kind": "eval", "iteration": 0}, {"r": some, "other": some}) == []
    row = {"kind": "eval", "iteration": 1}
    assert watch.see(row, {"r": some, "other": none}) == ["masked"]
    assert row["alarms"] == {"masked": "other gave no score for any of 2 pictures"}


# Pictures


def scenes(seed, count=100):
    """Smooth pictures of varied colours: low frequencies, some contrast, mostly within (0, 1)."""
    coarse = random(count, 3, 4, 4, seed=seed)
    smooth = torch.nn.functional.interpolate(coarse, size=(24, 24), mode="bicubic")
    return (0.5 + 0.15 * smooth).clamp(0, 1)


def picture_alarm(row, count):
    """What is said of the pictures of an evaluation."""
    judged = {1: {"r": torch.zeros(count)}}
    return outside(Alarms([], 1.0, rows=[{"iteration": 1, **row}], history=judged)) or ""


def test_pictures_that_leave_the_bases_range():
    """All of them, or two fifths. Other noise brings none beyond it."""
    base = scenes(0)
    reference = image_statistics(base)

    def alarm_of(pictures):
        return picture_alarm(statistics_row(reference, image_statistics(pictures)), 100)

    grey = base.mean(1, keepdim=True)
    some = torch.arange(100)[:, None, None, None] % 5 < 2
    for same in (base, scenes(1), scenes(2)):
        assert alarm_of(same) == ""
    for said, pictures in {
        "contrast": torch.full_like(base, 0.5),
        "detail": (base + 0.1 * random(*base.shape, seed=9)).clamp(0, 1),
        "saturation": (grey + 2.5 * (base - grey)).clamp(0, 1),
        "clipped": (0.5 + 3 * (base - 0.5)).clamp(0, 1),
        "brightness": (base + 0.25).clamp(0, 1),
    }.items():
        for changed in (pictures, torch.where(some, pictures, base)):
            assert f"{said} " in alarm_of(changed), said


@pytest.mark.parametrize(("count", "enough"), [(64, 22), (20, 13)])
def test_a_crowd_of_pictures_raises_the_alarm_and_one_less_does_not(count, enough):
    """As docs/alarms.md has it."""
    row = {"detail": 0.5, "detail/low": 0.1, "detail/high": 0.4, "detail/below": 0.0}
    for beyond in (enough - 1, enough):
        row["detail/above"] = beyond / count
        found = {f"image/{key}": value for key, value in row.items()}
        assert bool(picture_alarm(found, count)) == (beyond == enough)


def test_a_crowd_is_more_than_other_noise_brings():
    """Ranks are all that counts, so uniform numbers stand for any statistic; both ends, 1e-4 each,
    of 10,000 draws."""
    assert crowd(3) == crowd(5) == math.inf
    assert [crowd(n) for n in (192, 400)] == [48, 100]  # a quarter
    generator = torch.Generator().manual_seed(0)
    for n in (12, 20, 32, 64):
        assert n / 4 < crowd(n) <= n
        base, tuned = torch.rand(2, 10_000, n, generator=generator, dtype=torch.float64)
        low = base.quantile(0.05, dim=1, keepdim=True)
        beyond = (tuned < low).sum(1)
        # one is expected at most; 6 or more has a chance of 6e-4
        assert int((beyond >= crowd(n)).sum()) <= 5
        assert int((beyond >= crowd(n) - 4).sum()) >= 1  # and it is not far too many either


# A run


def peaked(images, prompts):
    """Brightness up to .02 more than the base has, and then it falls three times as fast as that
    rises."""
    more = brightness(images, prompts) - torch.tensor(
        [0.5 + 0.2 * float(prompt) for prompt in prompts]
    )
    return torch.minimum(more, 0.02 - 3 * (more - 0.02))


def alarmed(run_dir, *overrides, heard=None, make=trainer, **more):
    """A run of ten iterations that games its reward; what it says is added to `heard`."""
    prompts = [str(0.01 * i) for i in range(16)]
    # sixteen grey pictures of nearly one brightness leave its range at once
    options = ["trainer.iterations=10", "trainer.checkpoint_every=5", "alarms.pictures=off"]
    parts = {"prompts": prompts, "heldout": prompts, "judges": {"dark": peaked}}
    notify = ([] if heard is None else heard).append
    return make(run_dir, *options, *overrides, notify=notify, **parts, **more)


def rows_of(t):
    """What `train` yields, without times; and what ended it."""
    rows = []
    try:
        for row in t.train():
            rows += untimed([row])
    except Stopped as stop:
        return rows, stop
    return rows, None


@pytest.fixture(scope="module")
def warned(tmp_path_factory):
    """The run if it is only told: (directory, rows, what it was told, weights, iteration of the
    first alarm)."""
    folder, heard = tmp_path_factory.mktemp("warned"), []
    t = alarmed(folder, heard=heard)
    rows, stop = rows_of(t)
    assert stop is None
    first = next(row["iteration"] for row in rows if "alarms" in row)
    return folder, rows, heard, mean(t), first


def test_an_alarm_is_logged_in_every_row_and_told_once(warned):
    folder, rows, heard, _, at = warned
    gains = {row["iteration"]: row["judged_gain"] for row in rows if row["kind"] == "eval"}
    assert 0 < max(gains, key=gains.get) < at < 10, gains  # it rises, and then falls
    alarms = {row["iteration"]: [*row["alarms"]] for row in rows if "alarms" in row}
    assert alarms == {iteration: ["hacking"] for iteration in range(at, 11, 2)}
    (told,) = [message for message in heard if "hacking" in message]
    assert f"alarm after iteration {at}: hacking: dark -" in told
    assert HELPS["hacking"] in told and log(folder) == json.loads(json.dumps(rows))
    (board,) = (folder / "tensorboard").iterdir()
    assert b"alarms/hacking" in board.read_bytes()


def test_stop_saves_and_ends_and_a_resume_goes_on(tmp_path, warned):
    _, rows, _, weights, at = warned
    stopped_rows, stop = rows_of(alarmed(tmp_path, "alarms.action=stop"))
    assert isinstance(stop, Stopped) and stop.exit_code == 1
    assert f"after iteration {at}" in str(stop)
    assert checkpoints(tmp_path / "checkpoints")[-1].name == f"iteration_{at:06d}"
    again = alarmed(tmp_path, "alarms.action=stop", make=resumed)
    more, stop = rows_of(again)
    assert stop is None and torch.equal(again.policy.mean, weights)
    assert stopped_rows + more == rows and log(tmp_path) == json.loads(json.dumps(rows))


def test_the_best_evaluations_weights_are_kept_also_by_a_resumed_run(tmp_path):
    """Of every run with a folder, those of one evaluation; beside a run that keeps all."""
    options = ("optim.ema_decay=0.5", "optim.learning_rate=0.06")
    told, gains, weights = alarmed(None, *options), {}, {}
    for row in told.train():
        weights[row["iteration"]] = told.learner.average.module[0].detach().clone()
        if row["kind"] == "eval" and "alarms" not in row:
            gains[row["iteration"]] = row["judged_gain"]
    best = max(gains, key=gains.get)
    assert 0 < best < max(weights)
    cut(alarmed(tmp_path, *options), "train", best + 1)
    rows_of(alarmed(tmp_path, *options, make=resumed))
    (kept,) = checkpoints(tmp_path / "checkpoints" / "best")
    found, tensors, _ = load_checkpoint(kept)
    assert found == best and torch.equal(tensors["weights"][0], weights[best])


def test_an_evaluation_with_an_alarm_or_without_a_gain_is_never_the_best():
    watch, alarm = Alarms(["r"], drift_limit=1.0), {"alarms": {"pictures": ""}}
    for gain, more, best in (
        (0.0, {}, True),
        (0.3, {}, True),
        (0.9, alarm, False),
        (0.2, {}, False),
        (0.5, {}, True),
        (None, {}, False),
    ):
        watch.rows.append({"kind": "eval", "judged_gain": gain, **more})
        assert watch.best_so_far == best, gain


def train_alarmed(world, folder):
    t = alarmed(folder, "alarms.action=stop", world=world)
    rows, stop = rows_of(t)
    alarms = [[row["iteration"], row.get("alarms")] for row in rows]
    return alarms, str(stop), t.policy.mean.sum().item()


@pytest.mark.slow
def test_all_ranks_raise_the_same_alarms_and_stop_together(tmp_path, warned):
    (first, second) = ranks.run(2, train_alarmed, tmp_path / "two")
    assert first == second and "stopped by an alarm" in first[1]
    assert [iteration for iteration, alarms in first[0] if alarms] == [warned[-1]]
