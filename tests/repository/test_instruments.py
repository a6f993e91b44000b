"""The study's instruments against what they should find: known signal, closed forms, known shares
of variance."""

import json
import math
from itertools import product

import numpy as np
import pytest
import torch

from g2rpo.algorithms.flow_grpo import window
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.core.errors import UserError
from g2rpo.core.flow import ode_step, sigma_grid
from g2rpo.core.objectives import group_normalize
from g2rpo.core.seeding import generator_for
from g2rpo.lab.compare import workflow
from g2rpo.lab.compare.study import StudyDirectory
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.rewards.taste import Choice, fit
from g2rpo.rollout.engine import Engine
from studies import find_rate, floors, registered, teach_choice
from studies.credit import alignment_of, explained, gradients, repeat_the_rest, signal_of
from studies.teach_choice import DRAWS, Belief, information
from tests.support.runs import trainer

SIGMAS = sigma_grid(6, 3.0)


@pytest.mark.parametrize("signal", [0.0, 0.05, 0.6])
def test_the_signal_and_its_error_are_what_they_should_be(signal):
    """12 vectors of 200 entries, |mean|^2 = signal and E|g|^2 = 1, 600 times. Their mean may miss
    the truth by 4 standard errors (the ratio's own bias is of the order 1/(12 * 200)); their
    spread, known to 1 / sqrt(2 * 600) = 3 %, is to agree with the mean of the stated variances,
    themselves noisy at n = 12, to 15 %; without signal zeta_1's cut at 0 makes the stated ones
    larger, by a fifth here."""
    random = np.random.default_rng(0)
    mean = random.normal(size=200)
    mean *= math.sqrt(signal) / np.linalg.norm(mean)
    found = []
    for _ in range(600):
        vectors = mean + random.normal(size=(12, 200)) * math.sqrt((1 - signal) / 200)
        found.append(signal_of(vectors @ vectors.T))
    shares = np.array([one.share for one in found])
    assert abs(shares.mean() - signal) < 4 * shares.std() / math.sqrt(600) + 1 / (12 * 200)
    stated = math.sqrt(np.mean([one.error**2 for one in found]))
    # where it is large, the error of |g|^2, which is not stated, makes part of the spread up for
    if signal < 0.5:
        assert 0.85 < stated / shares.std() < (1.15 if signal else 1.3)


def test_a_cosine_is_with_the_sum_of_all_others():
    vectors = np.random.default_rng(0).normal(size=(5, 7)) + 0.5
    found = signal_of(vectors @ vectors.T)
    others = vectors.sum(0) - vectors
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(others, axis=1)
    cosines = (vectors * others).sum(1) / lengths
    assert found.cosine == pytest.approx(cosines.mean()) and found.groups(0.2) == pytest.approx(4)
    vectors[:2] = 0
    assert signal_of(vectors @ vectors.T).silent == 0.4
    nothing = signal_of(np.zeros((4, 4)))
    assert nothing.silent == 1 and nothing.groups() == math.inf


def test_an_alignment_is_with_the_direction_of_the_others():
    """0.3 along a direction and unit noise in 100 dimensions, against that direction itself: 0.3 /
    sqrt(1.09), by the stated error; against its own noise none is left, because a prompt's own
    vector is taken out."""
    random = torch.Generator().manual_seed(0)
    noise = torch.randn(400, 100, generator=random, dtype=torch.float64) / 10
    direction = torch.zeros(100, dtype=torch.float64)
    direction[3] = 1
    found, error = alignment_of(0.3 * direction + noise, direction.expand(400, -1))
    expected = 0.3 / math.sqrt(1.09) * 399 / 400
    assert abs(found - expected) < 4 * error
    assert error == pytest.approx(0.1 / math.sqrt(1.09) / 20, rel=0.2)
    found, error = alignment_of(noise, noise)
    assert abs(found) < 4 * error
    vectors, common = torch.randn(2, 3, 4, generator=random, dtype=torch.float64)
    by_hand = [float(vectors[i] @ (common.sum(0) - common[i])) for i in range(3)]
    scale = float(vectors.square().sum(1).mean().sqrt() * common.sum(0).norm())
    assert alignment_of(vectors, common)[0] == pytest.approx(sum(by_hand) / 3 / scale)
    assert alignment_of(torch.zeros(3, 4), common) == (0, 0)


def mean_slope(sigma, sigma_next, g, std):
    """d mean / d policy.mean of one SDE step, entry by entry, by hand."""
    variance = (1 - sigma) ** 2 * std**2 + sigma**2
    velocity = -(1 - sigma) / variance * (sigma - (1 - sigma) * std**2) - 1
    return (1 + g**2 * (1 - sigma) / (2 * sigma)) * (sigma_next - sigma) * velocity


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 2])
def test_gradients_and_their_signal_are_the_gaussians(step):
    """Where rewards are linear in the latent, r = <w, x'> + const, all is known. Each gradient is
    the mean over members of A z slope / (std D), exactly. Along u = w / |w| its mean is c4 (G - 1)
    / G, c4 that of a normal sample's std, and its mean square ((G - 1) / G)^2; across it the D - 1
    other entries have mean square (G - 1) / G^2 each. 5 standard errors."""
    policy, size, groups, entries = GaussianPolicy(size=2), 12, 300, 12
    kernel = GranularGRPO(branch_steps=(step,), granularities=(1,)).kernel(SIGMAS)
    plan = window(step, step + 1, 6, shared_noise=True)
    weights = torch.linspace(-1, 2, entries)
    found = []
    for number in range(groups):
        engine = Engine(policy=policy, cond=policy.encode(["0.1"]), sigmas=SIGMAS)
        (rollout,) = engine.rollout(
            [plan], size, kernel, lambda prompt, *key, n=number: generator_for("test", n, *key)
        )
        advantages = group_normalize(rollout.finals[0].flatten(1) @ weights)
        (gradient,) = gradients(policy, kernel, SIGMAS, rollout, advantages[None], "0.1")
        (t,) = rollout.transitions
        sigma, sigma_next = float(SIGMAS[step]), float(SIGMAS[step + 1])
        std = float(kernel(t.x, t.x, SIGMAS[step], SIGMAS[step + 1]).std)
        slope = mean_slope(sigma, sigma_next, std / math.sqrt(sigma - sigma_next), policy.std)
        z = ((t.x_next - t.old_mean) / std).flatten(1)
        expected = (advantages[:, None] * z).mean(0) * slope / (std * entries)
        rounding = 1e-6 * float(expected.abs().max()) + 1e-7
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=rounding)
        found.append(gradient.double().numpy())
    vectors = np.stack(found)
    signal = signal_of(vectors @ vectors.T)
    c4 = math.sqrt(2 / (size - 1)) * math.gamma(size / 2) / math.gamma((size - 1) / 2)
    along, across = ((size - 1) / size) ** 2, (size - 1) / size**2 * (entries - 1)
    assert signal.share == pytest.approx(c4**2 * along / (along + across), abs=5 * signal.error)
    assert signal.error < 0.02


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_explained_is_the_intraclass_correlation(share):
    """100 prompts of 40 by 4 normal values around means that must not matter. The interval is of 95
    %, about 4 standard errors wide; 5 of them are allowed."""
    random = np.random.default_rng(1)
    rows = random.normal(0, math.sqrt(share), (100, 40, 1))
    rest = random.normal(0, math.sqrt(1 - share), (100, 40, 4))
    found = explained(random.normal(0, 9, (100, 1, 1)) + rows + rest)
    assert abs(found.mean - share) < 5 / 4 * (found.high - found.low) < 0.12
    assert math.isnan(explained(np.ones((2, 3, 3))).mean)


def test_each_steps_noise_explains_its_share_of_a_linear_reward():
    """The Gaussian's walk is linear, so a step explains (its noise's way into the reward)^2 over
    the sum of those of all: found here by pushing a unit of noise through. 300 draws by 3 repeats;
    the error of a share is below sqrt(2 / 300) = .08 of it, and at most .05; 4 of those."""

    def linear(images, prompts):
        return torch.logit(images.double()).flatten(1).mean(1).float()

    t = trainer(None, "sampling.num_steps=4", "sampling.shift=2", rewards={"bright": linear})
    noisy, cond = 3, t.policy.encode(["0"])

    def reward(push):
        x = torch.zeros(1, 3, 4, 4)
        with torch.no_grad():
            for at in range(4):
                v = t.policy.velocity(x, t.sigmas[at : at + 1], cond)
                here, after = t.sigmas[at], t.sigmas[at + 1]
                if at < noisy:
                    noise = torch.full_like(x, float(at == push))
                    x = t.algorithm.kernel(t.sigmas)(x, v, here, after).sample(noise)
                else:
                    x = ode_step(x, v, here, after)
        return float(x.mean())

    ways = np.array([reward(step) - reward(None) for step in range(noisy)]) ** 2
    for step in range(noisy):
        values = repeat_the_rest(t, 0, step, noisy, 300, 3).double().numpy()
        assert explained(values).mean == pytest.approx(ways[step] / ways.sum(), abs=0.2), step
    assert max(ways / ways.sum()) > 0.5  # so that a wrong step would be seen
    # nothing else is noisy
    assert np.ptp(repeat_the_rest(t, 0, 0, 1, 4, 3)[0].numpy(), axis=1).max() < 1e-5


def test_what_a_click_tells_of_heads_that_contradict_each_other_or_agree():
    """Of two pictures, a tenth of the clicks at random: ln 2 less the entropy of (.95, .05)."""
    sure = 50 * np.eye(2)
    noise = -0.95 * math.log(0.95) - 0.05 * math.log(0.05)
    assert information(sure) == pytest.approx(math.log(2) - noise, rel=1e-9)
    assert information(sure[[0, 0]]) == pytest.approx(0, abs=1e-12)
    assert information(sure, np.array([1.0, 0.0])) == pytest.approx(0, abs=1e-12)


def test_the_belief_of_a_study_is_the_posterior_of_the_head():
    """Utilities in the head's unit; the sum of variances of `DRAWS` drawn heads over 12 pictures in
    some two directions has a relative deviation of sqrt(2 / DRAWS / 2) = .13, of which 4."""
    choices = []
    for round in range(8):
        z = torch.randn(12, 3, generator=generator_for(round, "belief"))
        choices.append(Choice({"right": z}, (int(z[:, 0].argmax()),)))
    belief, head, seen = Belief(choices), fit(choices), choices[0].features
    own, utilities = belief.utilities(seen), head(seen).double().numpy()
    unit = own.std() / utilities.std()
    np.testing.assert_allclose(own - own.mean(), unit * (utilities - utilities.mean()), atol=1e-4)
    z = seen["right"].double() - seen["right"].double().mean(0)
    variance = float((z @ head.root).square().sum()) * unit**2
    assert belief.uncertainty(seen) == pytest.approx(variance, rel=1e-4)
    drawn = belief.draws(seen, np.random.default_rng(0))
    assert drawn.shape == (DRAWS, 12)
    assert drawn.var(0).sum() == pytest.approx(variance, rel=0.5)


@pytest.mark.parametrize("people", [1, 2])
def test_a_table_of_choices_has_the_arms_that_have_run(people):
    def sessions(*arms):
        each = product(teach_choice.TASTED["scenes"], arms, range(people))
        return {f"{taste}/{arm}/{seed}": [0.5, 0.5, 0.5] for taste, arm, seed in each}

    begun = {"warm/change/0": [0.1, 0.1, 0.1]}
    rows = teach_choice.table(sessions("today", "first") | begun, "scenes").splitlines()[2:]
    assert [row.split()[1] for row in rows] == ["today", "first"]
    alone = teach_choice.table(sessions("first"), "scenes").splitlines()[2:]
    assert [row.split()[1] for row in alone] == ["first"]


def test_a_summary_of_no_pilots_and_runs_is_refused(tmp_path, monkeypatch):
    words = ["find_rate", "--whole", "0", "--pilots", "0", "--out", str(tmp_path / "no")]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit, match="holds no runs"):
        find_rate.main()
    assert not any(tmp_path.iterdir())


def test_floors_have_their_folder_before_the_first_cell_is_trained(tmp_path, monkeypatch):
    names = {name for shown in floors.SHOWN.values() for name in shown}
    monkeypatch.setattr(
        floors, "cell", lambda *_: {name: {"base": 0.0, "tuned": 1.0} for name in names}
    )
    out = tmp_path / "new" / "floors.json"
    monkeypatch.setattr("sys.argv", ["floors", "--seeds", "42", "--out", str(out)])
    floors.main()
    assert len(json.loads(out.read_text())["cells"]) == 8


@pytest.mark.parametrize("stale", [False, True])
def test_a_refused_study_has_no_results_of_an_earlier_one(tmp_path, monkeypatch, stale):
    """Though all cells of the earlier one were trained."""

    def refuse(*_, **__):
        raise UserError("holds another study")

    monkeypatch.setattr(registered, "compare", refuse)
    folder = StudyDirectory(tmp_path / "words-priced")
    folder.path.mkdir()
    if stale:
        trained = dict.fromkeys(registered.cells("words-priced", [16]), 1)
        folder.results.write_text(json.dumps({"spent": trained, "controls": {}}))
    with pytest.raises(UserError, match="another study"):
        registered.study("words-priced", [16], 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world", registered.WORLDS)
def test_cells_of_registered_questions_can_be_compared(tmp_path, monkeypatch, world):
    """All that is refused is refused before the first run."""

    class Begins(Exception):
        pass

    def begin(*_):
        raise Begins

    monkeypatch.setattr(workflow, "working", begin)
    for number in registered.WORLDS[world]["questions"]:
        with pytest.raises(Begins):
            registered.study(world, [number], 1, tmp_path / str(number))
