"""Free knobs against closed forms: on the Gaussian policy every sampler's result is known."""

import itertools
import math

import pytest
import torch

from g2rpo.assembly.components import build_policy
from g2rpo.config.resolve import resolve_as
from g2rpo.core.errors import UserError
from g2rpo.core.flow import ode_step
from g2rpo.core.seeding import generator_for
from g2rpo.evaluation.controls import DRAWS, TUNED, Control, default_controls, evaluations_of
from g2rpo.evaluation.sampler import Sampler
from g2rpo.evaluation.untrained import RIGHT, against_controls, in_figures, in_words
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.policies.options import PolicyConfig
from g2rpo.rollout.guidance import guided_by_hand
from tests.support.runs import brightness

PROMPTS = ["0.3", "-0.2", "0.1"]
OPTIONS = {"shift": 3.0, "seed": 5, "batch_size": 2, "decode_batch_size": 2}


def latents(steps=10, prompts=PROMPTS, policy=None, **knobs):
    kept = []
    Sampler(policy=policy or GaussianPolicy(mean=0.5), num_steps=steps, **OPTIONS).evaluate(
        prompts,
        {"bright": brightness},
        kept=lambda images: kept.append(torch.logit(images.double())) or images,
        control=Control(**knobs),
    )
    return torch.cat(kept)


def test_the_best_of_several_is_chosen_prompt_by_prompt():
    """By the rewards that are named: each prompt's brightest picture of those that its draws are,
    whatever the batch."""
    sampler, rewards = (
        Sampler(policy=GaussianPolicy(mean=0.5), num_steps=4, **OPTIONS),
        {"bright": brightness},
    )
    draws = torch.stack(
        [
            sampler.evaluate(PROMPTS, rewards, control=Control(draw=n)).scores["bright"]
            for n in range(3)
        ]
    )
    best = sampler.best(PROMPTS, rewards, {"bright": 1.0}, control=Control(best_of=3))
    assert (
        torch.equal(best.scores["bright"], draws.amax(0)) and len({*draws.argmax(0).tolist()}) > 1
    )
    alone = sampler.best(
        PROMPTS[1:2], rewards, {"bright": 1.0}, first=1, control=Control(best_of=3)
    )
    assert torch.equal(alone.images[0], best.images[1])


@pytest.mark.parametrize("solver", ["euler", "dpmpp2m", "forecast"])
def test_without_first_noise_every_solver_ends_at_the_mean(solver):
    """From x = 0 the path is (1 - sigma) m, along which the velocity is -m everywhere: no step
    errs."""
    means = torch.tensor([0.5 + float(prompt) for prompt in PROMPTS]).double()
    found = latents(noise=0, solver=solver)
    torch.testing.assert_close(
        found, means[:, None, None, None].expand_as(found), atol=1e-5, rtol=0
    )


def test_a_smaller_first_noise_shrinks_the_deviation_from_the_mean():
    """The velocity is linear in the deviation from that path, so half the noise gives half the
    deviation."""
    means = torch.tensor([0.5 + float(prompt) for prompt in PROMPTS]).double()[:, None, None, None]
    torch.testing.assert_close(
        latents(noise=0.5) - means, (latents() - means) / 2, atol=1e-5, rtol=0
    )


def test_a_second_order_solver_comes_closer_to_the_odes_end():
    exact = latents(steps=250)
    errors = {
        solver: float((latents(solver=solver) - exact).abs().mean())
        for solver in ("euler", "dpmpp2m")
    }
    assert errors["dpmpp2m"] < 0.7 * errors["euler"]


def test_the_stochastic_solver_keeps_the_marginal():
    """Mean m and standard deviation .6, of 100 x 48 numbers, for any initial noise; to the grid's
    error of a few percent."""
    found = latents(steps=60, prompts=["0"] * 100, solver="sde")
    assert float(found.mean()) == pytest.approx(0.5, abs=0.02) and float(
        found.std()
    ) == pytest.approx(0.6, rel=0.05)
    one, again = (latents(steps=3, solver="sde") for _ in range(2))
    assert torch.equal(one, again)


def test_guidance_is_set_while_sampling_only():
    seen = []

    class Guided(GaussianPolicy):
        guidance_scale = 3.5

        def velocity(self, x, sigma, cond):
            seen.append(self.guidance_scale)
            return super().velocity(x, sigma, cond)

    policy = Guided()
    latents(policy=policy, guidance=7.0)
    assert set(seen) == {7.0} and policy.guidance_scale == 3.5


@pytest.mark.parametrize("scale", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("against", ["", "0.4"])
@pytest.mark.parametrize("first", [None, 4])
def test_guidance_by_hand_moves_the_mean_away_from_that_of_the_negative_prompt(
    scale, against, first
):
    """The velocity is affine in the mean m of its prompt, so a guided one is that of m_g = m_neg +
    s (m - m_neg): from x = 0 the path is (1 - sigma) m_g. From step k on it is the prompt's own,
    and an Euler step multiplies the deviation from (1 - sigma) m by 1 + (sigma' - sigma) (sigma -
    (1 - sigma) std^2) / variance."""
    policy = GaussianPolicy(mean=0.5)
    own = torch.tensor([0.5 + float(prompt) for prompt in PROMPTS]).double()
    away = 0.5 + float(against or 0)
    guided = away + scale * (own - away)
    sigmas = Sampler(policy=policy, num_steps=10, **OPTIONS).sigmas.double()
    deviation = (1 - sigmas[first or 10]) * (guided - own)
    for here, there in zip(sigmas[first or 10 : -1], sigmas[(first or 10) + 1 :], strict=True):
        variance = (1 - here) ** 2 * 0.36 + here**2
        deviation = deviation * (1 + (there - here) * (here - (1 - here) * 0.36) / variance)
    found = latents(policy=policy, noise=0, cfg=scale, negative_prompt=against, guided_steps=first)
    torch.testing.assert_close(
        found, (own + deviation)[:, None, None, None].expand_as(found), atol=1e-5, rtol=0
    )


def test_guidance_by_hand_of_1_is_none_and_a_draw_is_another_noise():
    torch.testing.assert_close(latents(cfg=1.0), latents(), atol=1e-6, rtol=0)
    plain, one, again = latents(), latents(draw=1), latents(draw=1)
    assert torch.equal(one, again) and not torch.isclose(one, plain).any()


@pytest.mark.parametrize("solver", ["euler", "dpmpp2m", "forecast", "sde"])
@pytest.mark.parametrize(
    "guided", [{}, {"cfg": 2.0}, {"cfg": 2.0, "guided_steps": 3}, {"cfg": 2.0, "guided_steps": 40}]
)
def test_the_price_of_a_control_is_what_the_network_is_given(solver, guided):
    rows = []
    control = Control(solver=solver, steps=7, **guided)
    policy = GaussianPolicy()
    options = {**OPTIONS, "on_rows": rows.append}
    Sampler(policy=policy, num_steps=10, **options).evaluate(
        ["0.1"], {"bright": brightness}, control=control
    )
    assert sum(rows) == control.evaluations(10)


def test_guidance_may_be_of_the_first_steps_alone():
    seen = []

    class Guided(GaussianPolicy):
        guidance_scale = 3.5

        def velocity(self, x, sigma, cond):
            seen.append(self.guidance_scale)
            return super().velocity(x, sigma, cond)

    latents(steps=5, prompts=["0.1"], policy=Guided(), guidance=7.0, guided_steps=2)
    assert seen == [7.0, 7.0, 3.5, 3.5, 3.5]


@pytest.mark.parametrize("kind", ["flux", "sd3"])
def test_guidance_of_pipelines_is_by_hand_or_their_own(request, kind):
    """FLUX has none of its own: two calls a step, of the prompt and of the negative one. SD3 has:
    its scale is another in the first steps."""
    path = str(request.getfixturevalue(f"{kind}_directory"))
    options = {
        "dtype": "float32",
        "height": 32,
        "width": 32,
        "max_sequence_length": 8,
        "guidance_scale": 2.0,
    }
    policy = build_policy(PolicyConfig(path=path, **options), tuning="frozen")
    own = {"cfg": 3.0, "negative_prompt": "blurry"} if kind == "flux" else {"guidance": 5.0}
    assert guided_by_hand(policy) is (kind == "flux")
    sampler, found = Sampler(policy=policy, num_steps=3, **OPTIONS), []
    rewards = {"bright": brightness}
    sampler.evaluate(
        ["a cat"],
        rewards,
        control=Control(**own, guided_steps=2),
        kept=lambda images: found.append(images) or images,
    )

    x = policy.noise([generator_for(OPTIONS["seed"], "picture", 0)])
    toward, away = (policy.encode([prompt]) for prompt in ("a cat", "blurry"))
    with torch.no_grad():
        for step, (here, there) in enumerate(itertools.pairwise(sampler.sigmas)):
            policy.guidance_scale = 5.0 if kind == "sd3" and step < 2 else 2.0
            v = policy.velocity(x, here[None], toward)
            if kind == "flux" and step < 2:
                without = policy.velocity(x, here[None], away)
                v = without + 3.0 * (v - without)
            x = ode_step(x, v, here, there)
        torch.testing.assert_close(found[0], policy.decode(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"negative_prompt": "blurry"}, "negative_prompt is for guidance by hand"),
        ({"guided_steps": 3}, "set guidance or cfg"),
    ],
)
def test_settings_without_the_guidance_that_they_are_of_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        resolve_as(Control, given, source="a control")


@pytest.mark.parametrize(("steps", "early"), [(10, 3), (28, 8), (1, 1)])
@pytest.mark.parametrize(("guidance", "by_hand"), [(None, True), (3.5, True), (4.5, False)])
def test_default_controls_turn_one_knob_each(steps, early, guidance, by_hand):
    controls = default_controls(steps, guidance, by_hand)
    assert all(len(control.knobs) == 1 for control in controls) and len(
        {str(control) for control in controls}
    ) == len(controls)
    assert [control.draw for control in controls if control.draw] == list(range(1, DRAWS))
    scales = {control.guidance for control in controls if control.guided_steps is None} - {None}
    assert scales == ({times * guidance for times in (0.5, 1.5, 2, 3)} if guidance else set())
    at_first = [
        (control.cfg, control.guidance) for control in controls if control.guided_steps == early
    ]
    assert at_first == ([(3.0, None)] if by_hand else [(None, 9.0)])


@pytest.mark.parametrize("steps", [100, 150, 250])
def test_no_control_is_there_twice_or_the_base_itself(steps):
    controls = default_controls(steps, 3.5, by_hand=True)
    assert len(set(map(str, controls))) == len(controls) and all(
        c.steps is None or steps < c.steps <= 250 for c in controls
    )


def compared(**more):
    """Two prompts, of which the base draws none right, a knob one, one of two draws both, and the
    tuned model both."""
    rewards = {
        Control(steps=20): [1.0, 0.0],
        Control(noise=0): [0.5, math.nan],
        Control(draw=1): [1.0, 1.0],
        "base": [0.0, 0.0],
        "tuned": [1.0, 1.0],
    }
    scores = {
        of: {"reward": torch.tensor(own), RIGHT: torch.tensor(own).floor()}
        for of, own in rewards.items()
    }
    base, tuned = scores.pop("base"), scores.pop("tuned")
    return against_controls(scores, base, 10, {"reward": 1.0}, tuned, **more)


def test_controls_stand_beside_base_and_tuned_with_what_they_cost():
    found = compared(training=401)
    assert [
        (way.name, way.evaluations, way.readings, way.means["reward"]) for way in found.ways
    ] == [
        ("base", 10, 0, 0.0),
        ("steps 20", 20, 0, 0.5),
        ("initial noise x 0", 10, 0, 0.5),
        ("best of 2", 20, 2, 1.0),
        ("tuned", 10, 0, 1.0),
    ]
    best, several = found.best["reward"], found.best_of["reward"]
    lead = best.leads["reward"]
    assert (best.name, best.means["reward"], lead.mean, lead.count) == ("steps 20", 0.5, 0.5, 2)
    assert (several.name, several.means["reward"], several.leads["reward"].mean) == (
        "best of 2",
        1.0,
        0.0,
    )
    (said,) = in_words([found], [RIGHT])
    assert said.replace("\N{NO-BREAK SPACE}", " ") == (
        "On 2 of these prompts 0 % are right without training, 50 % with the best free knob (steps 20), "
        "100 % as the best of 2 pictures, and 100 % after training."
    )
    assert in_words([found], ["reward"])[0].startswith(
        "On 2 of these prompts reward is 0.000 without training, 0.500 with"
    )
    figures = " ".join(in_figures([found], [RIGHT]))
    assert (
        "Steps 20: 20 network evaluations a picture instead of 10; no clear difference (+50 points)."
        in figures
    )
    assert (
        "Best of 2: 20 network evaluations and 2 readings of the trained rewards a picture instead of 10;"
        in figures
    )
    assert (
        "Training took 401 network evaluations" in figures
        and "costs more from 41 pictures on" in figures
    )


def test_that_the_tuned_model_is_better_with_less_noise_is_said_where_it_is_clear():
    base = {"reward": torch.zeros(10)}
    clear, none = (
        against_controls(
            {Control(steps=20): base},
            base,
            10,
            {"reward": 1.0},
            {"reward": torch.full((10,), 0.5)},
            {"reward": of},
        )
        for of in (torch.ones(10), torch.full((10,), 0.5))
    )
    said = f"Sampled with {TUNED} the tuned model reaches 1.000 in reward."
    assert said in in_figures([clear], ["reward"]) and said not in in_figures([none], ["reward"])


def test_a_runs_controls_cost_what_they_and_that_of_the_tuned_model_take():
    assert (
        evaluations_of([Control(steps=20), Control(draw=1), Control(cfg=3, guided_steps=3)], 10)
        == 20 + 10 + 13 + 10
    )
    assert evaluations_of([], 10) == 0
