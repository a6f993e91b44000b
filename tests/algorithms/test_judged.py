"""Flow-DPO and Flow-KTO: their losses beside closed forms on the Gaussian policy, in float64; times,
passes, counts and whole runs on stored pictures."""

import json
import math
import time

import pytest
import torch
from torch.testing import assert_close

from g2rpo.algorithms.flow_dpo import FlowDPO, sigma_at
from g2rpo.algorithms.flow_kto import FlowKTO
from g2rpo.assembly.checks import check
from g2rpo.assembly.consistency import check_settings
from g2rpo.core import normal
from g2rpo.core.data import Batch
from g2rpo.core.errors import UserError
from g2rpo.core.flow import sigma_grid
from g2rpo.core.plans import Rollout
from g2rpo.core.seeding import generator_for
from g2rpo.evaluation.work import work
from g2rpo.lab.plan.counting import count
from g2rpo.lab.plan.plan import COUNTED
from g2rpo.lab.report.history import read_runs
from g2rpo.lab.report.page import write_page
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.runtime.distributed import World
from g2rpo.training.held_out_pairs import area, rows_of, share_right, spread_over_prompts
from g2rpo.training.updater import Trained
from tests.lab.counting import Counting
from tests.support.judged import Encodes, marks_of, pairs, trainer
from tests.support.runs import config, picture
from tests.support.watched import Watched

EXACT = {"rtol": 1e-10, "atol": 1e-12}
"""Some thirty float64 operations on numbers of size 1 to 100 round by less."""
SIGMAS = sigma_grid(6, 3.0).double()


def moved(by=0.1):
    """A policy in float64 whose mean has moved from the base's."""
    policy = GaussianPolicy(size=2, dtype=torch.float64)
    draw = torch.Generator().manual_seed(3)
    policy.mean.data = by * torch.randn(3, 2, 2, generator=draw, dtype=torch.float64)
    policy._base_mean = policy._base_mean.double() + 0.5  # worse than the mean: gains are positive
    return policy


def batch_of(algorithm, groups=3):
    """Groups of random latents as a batch, their marks in turn."""
    draw = torch.Generator().manual_seed(5)
    examples = []
    for row in range(groups):
        x = torch.randn(algorithm.group_size, 3, 2, 2, generator=draw, dtype=torch.float64)
        rollout = Rollout(row, algorithm.plans(6)[0], (), x[None])
        advantages = torch.tensor([1.0, -1.0])[row % 2 :][: algorithm.group_size].double()
        if algorithm.group_size == 2:
            advantages = torch.tensor([1.0, -1.0]).double()
        given = algorithm.examples(rollout, advantages, lambda *of, r=row: generator_for(r, *of))
        examples += given
    return examples


def loss_of(algorithm, policy, examples):
    cond = policy.encode(["0", "0.25", "-0.5"])
    return algorithm.loss(
        Batch.of(examples, SIGMAS, True), Trained(policy, cond, torch.float64)
    ).values


def gains_by_hand(mean, examples):
    """Of every row: velocities of N(m + shift, .6^2) written out, and both errors."""
    gains = []
    for example in examples:
        place, noise = float(example.data["place"]) * 6, example.data["noise"][0].double()
        step = int(place)
        sigma = SIGMAS[step] + (place - step) * (SIGMAS[step + 1] - SIGMAS[step])
        shift = [0, 0.25, -0.5][example.prompt]
        for image in example.x:
            x, errors = (1 - sigma) * image + sigma * noise, []
            for m in (torch.zeros(3, 2, 2).double() + 0.5 + shift, mean + shift):
                var = (1 - sigma) ** 2 * 0.36 + sigma**2
                away = x - (1 - sigma) * m
                expected_noise, expected_image = (
                    sigma * away / var,
                    m + (1 - sigma) * 0.36 * away / var,
                )
                errors.append(((expected_noise - expected_image - (noise - image)) ** 2).mean())
            gains.append(errors[0] - errors[1])
    return torch.stack(gains)


def dpo_by_hand(mean, examples):
    gains = gains_by_hand(mean, examples).view(-1, 2)
    return torch.log1p((-3.5 * (gains[:, 0] - gains[:, 1])).exp())


def kto_by_hand(mean, examples):
    gains = gains_by_hand(mean, examples)
    marks = torch.cat([example.advantages for example in examples])
    reference = max(0.0, gains.mean().item())
    u = 1 / (1 + (-marks * 7 * (gains - reference)).exp())
    return torch.where(marks > 0, 1.0, 0.5) * (1 - u)


CASES = [
    (FlowDPO(beta=7.0, times=2), dpo_by_hand),
    (FlowKTO(beta=7.0, times=2, bad_weight=0.5), kto_by_hand),
]


@pytest.mark.parametrize(("algorithm", "by_hand"), CASES, ids=["dpo", "kto"])
def test_loss_and_gradient_are_the_closed_forms(algorithm, by_hand):
    """The gradient also by central differences, whose error is h^2 times a third derivative of size
    1: 1e-8 of 1e-4."""
    policy = moved()
    examples = batch_of(algorithm)
    if algorithm.group_size == 1:
        reference = gains_by_hand(policy.mean.detach(), examples).mean()
        assert reference > 0.01
        examples = [example.with_group_sum(reference) for example in examples]
    values = loss_of(algorithm, policy, examples)
    assert_close(values, by_hand(policy.mean, examples), **EXACT)
    (gradient,) = torch.autograd.grad(values.mean(), policy.mean)
    start, h = policy.mean.detach().clone(), 1e-4
    slopes = []
    for entry in range(start.numel()):
        sides = []
        for sign in (1, -1):
            step = torch.zeros(start.numel(), dtype=torch.float64)
            step[entry] = sign * h
            policy.mean.data = start + step.view_as(start)
            sides.append(loss_of(algorithm, policy, examples).mean().item())
        slopes.append((sides[0] - sides[1]) / (2 * h))
    assert_close(gradient.flatten(), torch.tensor(slopes).double(), rtol=1e-4, atol=1e-6)


def test_a_place_on_the_grid_is_between_its_steps():
    grid = torch.tensor([1.0, 0.6, 0.0])
    found = sigma_at(grid, torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]))
    assert_close(found, torch.tensor([1, 0.8, 0.6, 0.3, 0]))


def test_both_pictures_of_a_pair_get_one_noise_and_time():
    (example,) = batch_of(FlowDPO(), 1)
    assert example.rows == 2 and len(example.advantages) == 1
    assert {len(value) for value in example.data.values()} == {1}


@pytest.fixture
def judged(tmp_path):
    """Eight prompts, each with a brighter picture that is good and a darker one that is not."""
    for one in (found := pairs(8, tmp_path)):
        for path in one.pictures:
            picture(path)
    return found


@pytest.mark.parametrize(("name", "beta"), [("flow_dpo", 100), ("flow_kto", 20)])
def test_a_run_moves_to_what_is_preferred_and_tells_so(name, beta, judged, tmp_path):
    """Without a reward; held-out accuracy is one half of ties at first, then all; a resumed run is
    the same."""
    given = judged if name == "flow_dpo" else marks_of(judged)
    options = (f"algorithm.beta={beta}", "trainer.iterations=4")
    made = {"prompts": given[4:], "held_out_pairs": given[:4]}
    t = trainer(
        name,
        made["prompts"],
        *options,
        run_dir=tmp_path / "run",
        held_out_pairs=made["held_out_pairs"],
    )
    rows = list(t.train())
    looks = [row["pairs/accuracy"] for row in rows if row["kind"] == "eval"]
    assert looks[0] == 0.5 and looks[-1] == 1
    assert float(t.policy.mean.detach().mean()) > 0.01
    first = next(row for row in rows if row["kind"] == "train")
    assert first["loss"] == pytest.approx(math.log(2) if name == "flow_dpo" else 0.5)
    assert not any(key.startswith("reward/") for key in first)
    assert list(t.finish()) == ["bright", "dark"]
    t.run.config.write_text(t.config.to_yaml())
    page = write_page(read_runs([tmp_path / "run"]), tmp_path / "page.html").read_text()
    assert f"Trained on {'pairs' if name == 'flow_dpo' else 'marks'} of none" in page
    assert "The model agrees with people on 100" in page
    t.run.write_results(
        json.loads(t.run.results.read_text()) | {"iteration": 2, "rolled_back_from": 4}
    )
    log = t.run.read_log()
    next(row for row in log if row["kind"] == "eval" and row["iteration"] == 2)[
        "pairs/accuracy"
    ] = 0.75
    t.run.log.write_text("".join(json.dumps(row) + "\n" for row in log))
    page = write_page(read_runs([tmp_path / "run"]), tmp_path / "page.html").read_text()
    assert "The model agrees with people on 75" in page
    again = trainer(
        name,
        made["prompts"],
        *options,
        run_dir=tmp_path / "run",
        held_out_pairs=made["held_out_pairs"],
    )
    again.resume()
    assert torch.equal(again.policy.mean, t.policy.mean)


@pytest.mark.parametrize("name", ["flow_dpo", "flow_kto"])
def test_an_update_is_the_same_in_passes_of_any_size(name, judged):
    """The reference point of KTO is that of the whole update. Sums in another order."""
    given = judged if name == "flow_dpo" else marks_of(judged)
    means = []
    options = ("algorithm.beta=5", "trainer.prompts_per_iteration=4")
    for size in (1, 3, 64):
        own = f"trainer.micro_batch_size={size}"
        t = trainer(name, given, *options, own, policy=Encodes(mean=0.1))
        t.policy._base_mean -= 0.1  # gains differ from 0
        seen = Watched(t)
        t.iterate()
        means.append(torch.cat([g.flatten() for g in seen.gradients[0]]))
    assert float(means[0].abs().max()) > 1e-3
    for other in means[1:]:
        assert_close(other, means[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "given"), [("flow_dpo", pairs(1)), ("flow_kto", marks_of(pairs(1)))]
)
def test_a_loss_has_no_float64_on_a_device_without_it(name, given, monkeypatch):
    monkeypatch.setattr(normal, "NO_FLOAT64", {"cpu"})
    t = trainer(name, given, "trainer.prompts_per_iteration=1")
    examples = t.sample_groups().examples(torch.tensor([[1.0, -1.0]])[:, : t.algorithm.group_size])
    examples = [example.with_group_sum(torch.zeros(())) for example in examples]
    loss = t.updater.loss(examples, t.policy.encode(given), True)
    assert {values.dtype for values in (loss.values, *loss.log.values())} == {torch.float32}


@pytest.mark.parametrize(("name", "rows"), [("flow_dpo", (6, 6)), ("flow_kto", (3, 9))])
def test_plan_and_work_count_what_a_run_evaluates(name, rows, judged):
    """With gradient and without, of three pairs, and of three marks, whose reference point takes
    both again; and of held-out pairs and marks, each at four times, by both models."""
    given = judged if name == "flow_dpo" else marks_of(judged)
    policy = Counting()
    policy.latents_of = Encodes().latents_of
    t = trainer(name, given, "trainer.prompts_per_iteration=3", policy=policy)
    assert t.iterate()["images"] == 0
    found = count(t.config, 3)
    assert (found.mean(COUNTED["training_rows"]), found.mean(COUNTED["reference_rows"])) == rows
    assert (policy.trained, policy.without_gradient) == rows
    assert found.mean(COUNTED["evaluations"]) == found.mean(COUNTED["images"]) == 0
    assert work(t.config, 0) == 3 * rows[0] + rows[1]
    t.judged.judged, before = given[:5], policy.without_gradient
    t.judged.row()
    assert policy.without_gradient - before == rows_of(5, t.algorithm.group_size)
    assert rows_of(7, 2, ranks=2) == 3 * 16 and rows_of(1, 2, ranks=2) == 16
    assert rows_of(1000, 1) == 128 * 8


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompts": ["0", "0.1"]}, "learns from pictures that people judged"),
        ({"policy": GaussianPolicy()}, "a GaussianPolicy has no latents_of"),
    ],
)
def test_strings_and_policies_that_encode_nothing_are_refused(given, words):
    """By the trainer, and for objects that are given before anything is loaded."""
    given = {"prompts": pairs(2), **given}
    with pytest.raises(UserError, match=words):
        trainer("flow_dpo", **given)
    with pytest.raises(UserError, match=words):
        check(config("algorithm.name=flow_dpo"), {**given, "rewards": {}, "heldout": ["0"]})


def test_a_run_from_pairs_needs_a_reward_that_judges():
    """Alarms, the best evaluation and the report go by its scores."""
    with pytest.raises(UserError, match="evaluation.rewards: is empty"):
        check_settings(
            config("algorithm.name=flow_dpo", "rewards.bright=", "evaluation.rewards.dark=")
        )


def test_accuracies():
    """Of margins 1, 0, -1, 2; and of marks by counting the pairs of a good and a bad one."""
    assert share_right(torch.tensor([1.0, 0, -1, 2]), "abcd")[0] == 2.5 / 4
    good = torch.tensor([True, True, False, True, False])
    implicit = torch.tensor([3.0, 1, 0, 2, 2])
    share, error = area(good, implicit, "abcde")
    assert share == pytest.approx((2 + 1 + 1.5) / 6)
    # variances of (1, .5, .75) over 3 and of (1, .5) over 2
    assert error == pytest.approx(math.sqrt(0.0625 / 3 + 0.125 / 2))
    assert math.isnan(area(good[:2], implicit[:2], "ab")[0])


def test_pairs_and_marks_of_one_prompt_count_as_one_for_the_interval():
    """Each three times: the mean and its error are those of one each."""
    margins = torch.tensor([1.0, 0, -1, 2])
    good, implicit = torch.tensor([True, False, True, True, False]), torch.tensor([3.0, 1, 0, 2, 2])
    for found, again in (
        (share_right(margins, "abcd"), share_right(margins.repeat(3), "abcd" * 3)),
        (area(good, implicit, "abcde"), area(good.repeat(3), implicit.repeat(3), "abcde" * 3)),
    ):
        assert found == pytest.approx(again) and found[1] > 0.1


def test_held_out_pairs_are_noised_by_place_and_equally_many_on_every_rank(judged, monkeypatch):
    """Of seven each of two ranks has three; ranks with divided weights make passes together."""
    t = trainer("flow_dpo", judged, policy=Encodes(mean=0.1), held_out_pairs=judged[:7])
    t.policy._base_mean -= 0.1  # gains differ from 0
    whole = t.judged._implicit(dict(enumerate(judged)))
    assert_close(t.judged._implicit({5: judged[5]}), whole[5:6])
    assert len(whole.unique()) == len(whole)
    monkeypatch.setattr(World, "gather", lambda self, own: torch.cat([own, own]))
    for rank in (0, 1):
        t.loop.world = World(rank, 2)
        assert t.judged.row()["pairs/count"] == 6


def test_the_seconds_of_an_evaluation_are_also_those_of_held_out_pairs(judged):
    """`--within` takes the time of the next evaluation from them."""

    class Slow(Encodes):
        def latents_of(self, files):
            time.sleep(0.2)
            return super().latents_of(files)

    t = trainer("flow_dpo", judged, policy=Slow(), held_out_pairs=judged[:3])
    assert t.evaluate()["seconds"] > 0.6


def test_held_out_pairs_that_are_looked_at_are_of_many_prompts():
    every = [one for one in pairs(6) for _ in range(3)]
    assert [*map(str, spread_over_prompts(every)[:7])] == [*map(str, [*pairs(6), pairs(6)[0]])]
