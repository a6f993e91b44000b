"""Granularities chosen as a run goes: what agreement is, what it is worth, what is spent, and that a run remembers."""

import itertools
import math
from functools import partial

import pytest
import torch
from scipy.stats import spearmanr

from g2rpo.algorithms.allocation import FIRST, Allocator, Auto, best_ratio, cautious
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.commands.train import load_config
from g2rpo.errors import UserError
from g2rpo.evaluation.study import iterations_within, read_run, work
from g2rpo.monitor.metrics import read_metrics
from g2rpo.objectives import group_normalize
from g2rpo.rollout.planning import count_evaluations
from g2rpo.rollout.tails import Tails
from tests.support.runs import trainer


def allocator(num_steps=16, tails=None, **fields):
    algorithm = GranularGRPO(**{"granularities": "auto", "branch_steps": (0, 3, 6), **fields})
    return Allocator(algorithm, num_steps, partial(count_evaluations, tails=tails or Tails()))


def knowing(agreements, members=1e6, **fields):
    """An allocator that is sure of the agreement of every candidate at every branch step."""
    own = allocator(**fields)
    own.state = {
        str(step): [[rho * members, members, members] for rho in (1.0, *rhos)]
        for step, rhos in zip(own.algorithm.branch_steps, agreements, strict=True)
    }
    return own


LATER = FIRST + 1  # an iteration that does not calibrate


def test_the_best_ratio_is_the_best_of_all_choices():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        worths, costs = torch.rand(2, 4, 3, generator=generator).tolist()
        costs = [[cost + 0.1 for cost in row] for row in costs]

        def ratio(places, worths=worths, costs=costs):
            return sum(row[p] for row, p in zip(worths, places, strict=True)) / sum(
                row[p] for row, p in zip(costs, places, strict=True)
            )

        most = max(ratio(places) for places in itertools.product(range(3), repeat=4))
        assert ratio(best_ratio(worths, costs)) == pytest.approx(most)


def test_the_choice_by_hand():
    """16 steps, branches at 0, 3 and 6: a member costs 15, 12, 9 evaluations at granularity 1; 8, 6, 5 at 2; 5, 4, 3 at 3."""
    priced = allocator()
    for step, costs in zip((0, 3, 6), ((15, 8, 5), (12, 6, 4), (9, 5, 3)), strict=True):
        for grain, cost in zip((1, 2, 3), costs, strict=True):
            assert priced._price_of_a_member(GranularGRPO(branch_steps=(step,), granularities=(grain,)), 0) == cost
    assert allocator().choice() == (1, 1, 1)  # nothing is known
    assert knowing([(0.5, 0.5)] * 3).choice() == (1, 1, 1)  # below the floor
    assert knowing([(0.95, 0.6)] * 3).choice() == (2, 2, 2)  # .9 for half the price
    assert knowing([(0.95, 0.9)] * 3).choice() == (3, 3, 3)
    assert knowing([(0.95, 0.71)] * 3).choice() == (3, 2, 2)  # .5 + .9 + .9 for 5 + 6 + 5 beats .9 * 3 for 8 + 6 + 5
    assert knowing([(0.95, 0.71)] * 3, auto=Auto(image_cost=100)).choice() == (1, 1, 1)  # pictures cost more than tails
    assert knowing([(0.6, 0.5), (0.8, 0.65), (0.9, 0.95)]).choice() == (1, 2, 3)  # 1 + .64 + .9 for 15 + 6 + 3
    assert knowing([(0.95, 0.9)] * 3, members=5).choice() == (2, 2, 2)  # tanh(atanh(.9) - 1 / sqrt(2)) = .64 < .7
    assert knowing([(0.95, 0.9)] * 3, members=3).choice() == (1, 1, 1)


def test_what_is_saved_goes_into_members():
    """Members of granularity 1 take 36 evaluations, of {1, 2, 3} 36 + 19 + 12 - 2 * 2 * 3, at 2 they take 19: 12 * 36 / 19."""
    own = knowing([(0.95, 0.6)] * 3)
    coarse, calibrating = own.at(LATER), own.at(0)
    assert (coarse.granularities, coarse.group_size) == (((2, 2, 2),), 22)
    assert (calibrating.granularities, calibrating.granularity_weights) == ((1, 2, 3), (1.0, 0.0, 0.0))
    assert calibrating.group_size == 12 * 36 // 55
    assert allocator().at(LATER).group_size == 12  # the finest, as asked
    assert knowing([(0.95, 0.6)] * 3, auto=Auto(spend="time")).at(LATER).group_size == 12
    with pytest.raises(UserError, match="group_size=2 is too small: calibration would leave groups of 1"):
        allocator(group_size=2)


@pytest.mark.parametrize("tails", [Tails(), Tails(forecast=True)])
def test_no_iteration_spends_more_than_is_planned_ahead(tails):
    own = knowing([(0.9, 0.6), (0.95, 0.8), (0.97, 0.9)], tails=tails)
    for iteration in range(30):
        used = own.at(iteration)
        planned, spent = (
            count_evaluations(algorithm.plans(16, iteration), algorithm.group_size, tails)
            for algorithm in (own.algorithm, used)
        )
        assert planned - own._price_of_a_member(used, iteration) < spent <= planned


def test_calibration_comes_first_and_again():
    own = allocator(auto=Auto(calibrate_every=5))
    assert [i for i in range(12) if own.calibrates(i)] == [*range(FIRST), 5, 10]


def test_agreement_is_the_rank_correlation_within_groups():
    """Step 0, one group without ties: Spearman's own. Step 3, three groups: in one the finest tail tells nothing apart, which
    adds to the noise, in one the coarse tail does not, which is signal missed."""
    own = allocator(auto=Auto(candidates=(1, 2)), branch_steps=(0, 3))
    rewards = torch.rand(4, 1, 2, 9, generator=torch.Generator().manual_seed(0))
    rewards[2, 0, 0] = 0.3
    rewards[3, 0, 1] = 0.7
    weights = torch.ones(1)
    row = own.observe(0, [0, 3, 3, 3], rewards, weights)
    each = [spearmanr(*group[0]).statistic for group in rewards[:2].numpy()]
    assert row["allocation/0/agreement/2"] == pytest.approx(each[0])
    assert row["allocation/3/agreement/2"] == pytest.approx(each[1] / 2)  # 8 / sqrt(16 * 16)
    assert own.state["3"][1][1:] == [pytest.approx(16), pytest.approx(16)]
    assert (row["group_size"], row["allocation/3/granularity"]) == (own.at(0).group_size, 1)


def test_calibrations_are_forgotten_by_and_by():
    own = allocator(auto=Auto(candidates=(1, 2), forget=0.5), branch_steps=(0,))
    up = torch.arange(5.0)
    for coarse, agreement in ((up, 1.0), (-up, (0.5 - 1) / 1.5), (-up, (0.25 - 0.5 - 1) / 1.75)):
        row = own.observe(0, [0], torch.stack([up, coarse])[None, None], torch.ones(1))
        assert row["allocation/0/agreement/2"] == pytest.approx(agreement)
    untouched = own.observe(LATER, [0], torch.rand(1, 1, 1, 12), torch.ones(1))
    assert untouched["allocation/0/agreement/2"] == row["allocation/0/agreement/2"]


def test_caution_is_one_standard_error():
    """Of correlations measured on 40 pairs, 16 % should exceed the truth even so, as a normal would; 2000 draws: +- .8 %."""
    rho, n, draws = 0.8, 40, 2000
    x, noise = torch.randn(2, draws, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = rho * x + math.sqrt(1 - rho**2) * noise
    x, y = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
    sums = [(a * b).sum(1) / (y * y).sum(1) * n for a, b in ((x, y), (x, x), (y, y))]
    above = sum(cautious(*one) > rho for one in torch.stack(sums, 1).tolist()) / draws
    assert above == pytest.approx(0.159, abs=4 * 0.008)
    assert cautious(3.0, 3.0, 3.0) == -1 and cautious(0.0, 0.0, 100.0) == -1  # nothing to go by
    assert 0.999 < cautious(100.0, 100.0, 100.0) < 1 and cautious(-100.0, 100.0, 100.0) < -0.999


@pytest.mark.parametrize("group_size", [6, 20])
def test_the_signal_of_a_coarse_reward_is_rho_times_the_finest_and_its_noise_is_the_same(group_size):
    """docs/algorithm.md: squared signal-to-noise ratio rho^2 (G - 1) c^2 / D, c the mean of a sample std over the true one.

    The fine reward is linear in the noise; the coarse one shares rho with it, and half of its rest is linear in another
    direction, half not linear at all. 40,000 groups: the mean of the gradient along the signal has a standard error of
    1 / sqrt(G N) < .0021, of which 4 are allowed, the noise per direction one of sqrt(1 / (2 N D)) < .0007 relative.
    """
    groups, size, rho = 40_000, 32, 0.6
    noise = torch.randn(groups, group_size, size, generator=torch.Generator().manual_seed(group_size))
    fine = noise[..., 0]
    rest = (noise[..., 1] + noise[..., 2].abs() * (noise[..., 3] * noise[..., 4]).sign()) / math.sqrt(2)  # normal again
    c = math.sqrt(2 / (group_size - 1)) * math.gamma(group_size / 2) / math.gamma((group_size - 1) / 2)
    for reward, share in ((fine, 1.0), (rho * fine + math.sqrt(1 - rho**2) * rest, rho)):
        gradients = (group_normalize(reward)[..., None] * noise).mean(1)
        signal, noise_size = float(gradients[:, 0].mean()), float(gradients[:, 5:].std())
        assert signal == pytest.approx(share * c * (group_size - 1) / group_size, abs=4 * 0.0021)
        assert noise_size == pytest.approx(math.sqrt(group_size - 1) / group_size, rel=0.003)


AUTO = ("algorithm.granularities=auto", "algorithm.auto.calibrate_every=2", "algorithm.group_size=8")


def wavy(images, prompts):
    """On this the Gaussian's tails differ: their images are stretched by a percent or so."""
    return torch.sin(15 * images).flatten(1).mean(1)


def test_two_iterations_a_kill_and_two_more_remember_what_was_measured(tmp_path):
    (tmp_path / "straight").mkdir()
    (tmp_path / "cut").mkdir()
    more = {"rewards": {"bright": wavy}}
    straight, killed, resumed = (trainer(tmp_path / name, *AUTO, **more) for name in ("straight", "cut", "cut"))
    list(straight.train())
    for row in killed.train():
        if row["kind"] == "train" and row["iteration"] == 3:
            break
    assert resumed.resume() == [] and resumed.iteration == 2
    list(resumed.train())
    assert resumed.memory.state == straight.memory.state
    assert torch.equal(resumed.learner.parameters[0], straight.learner.parameters[0])
    rows = [
        [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in read_metrics(tmp_path / name)]
        for name in ("straight", "cut")
    ]
    assert rows[0] == rows[1]
    trained = [row for row in rows[0] if row["kind"] == "train"]
    assert 0 < trained[-1]["allocation/0/agreement/3"] < 0.999  # there was something to remember


def test_a_run_spends_what_its_study_counts(tmp_path):
    t = trainer(tmp_path, *AUTO, "trainer.iterations=5")
    rows = [row for row in t.train() if row["kind"] == "train"]
    ahead = [2 * count_evaluations(t.plans(i), 8) for i in range(5)]
    assert all(row["evaluations"] <= bound for row, bound in zip(rows, ahead, strict=True))
    assert rows[3]["group_size"] > 8 and rows[3]["allocation/0/granularity"] > 1  # brightness: any tail will do
    assert rows[3]["images"] == 2 * 3 * rows[3]["group_size"]
    assert "granularity/2/agreement" in rows[2] and "granularity/2/agreement" not in rows[3]
    spent = read_run(t.config, tmp_path).work[-1]
    assert spent == sum(row["evaluations"] for row in rows) + 5 * 3 * 6


def test_a_budget_in_evaluations_can_be_planned():
    fixed, auto = (load_config("scenes", [f"algorithm.granularities={of}"]) for of in ("[1]", "auto"))
    assert work(auto, 7) == work(fixed, 7) and iterations_within(auto, 90_000) == iterations_within(fixed, 90_000)


def test_a_granularity_may_differ_by_branch_step():
    algorithm = GranularGRPO(branch_steps=(0, 3, 6), granularities=(1, (2, 2, 3)), tail="closed")
    each = [GranularGRPO(branch_steps=(k,), granularities=(1, g), tail="closed") for k, g in ((0, 2), (3, 2), (6, 3))]
    assert algorithm.plans(16) == [plan for one in each for plan in one.plans(16)]


@pytest.mark.parametrize("mix", ["advantages", "rewards"])
def test_granularities_can_be_weighed(mix):
    rewards = torch.rand(3, 2, 2, 6, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([1.0, 0.5])
    plain = GranularGRPO(granularities=(1,), reward_mix=mix, advantage_clip=100)
    fine, coarse = (plain.advantages(rewards[:, :, m : m + 1], weights) for m in (0, 1))
    weighed = GranularGRPO(granularities=(1, 2), granularity_weights=(1.0, 0.25), reward_mix=mix, advantage_clip=100)
    torch.testing.assert_close(weighed.advantages(rewards, weights), fine + 0.25 * coarse)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"granularities": ((1, 2),)}, "a list must have one for each branch step"),
        ({"granularities": ((0,) * 8,)}, "must be >= 1"),
        ({"granularities": (1, 2), "granularity_weights": (1.0,)}, "one for each granularity"),
        ({"granularities": "auto", "granularity_weights": (1.0,)}, "nothing to weigh"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        GranularGRPO(**fields)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("candidates=[3,2]", "from fine to coarse"),
        ("calibrate_every=0", "calibrate_every must be at least 1"),
        ("floor=1.5", "floor must lie in"),
        ("forget=0", "forget must lie in"),
        ("image_cost=-1", "image_cost must not be negative"),
        ("flor=.5", "unknown key 'algorithm.auto.flor'. Did you mean 'floor'"),
    ],
)
def test_a_wrong_setting_is_named(override, message):
    with pytest.raises(UserError, match=message):
        load_config("scenes", ["algorithm.granularities=auto", f"algorithm.auto.{override}"])
