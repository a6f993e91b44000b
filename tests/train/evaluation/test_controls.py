"""Sampler settings against closed forms: on the Gaussian policy every sampler's result is known."""

import itertools
import math

import pytest
import torch

from g2rpo.config.resolve import resolve_as
from g2rpo.core.errors import UserError
from g2rpo.core.flow import ode_step
from g2rpo.core.noise import generator_for
from g2rpo.core.statistics import RIGHT
from g2rpo.lab.untrained import against_controls, in_figures, in_words
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.models.load import build_policy
from g2rpo.models.options import PolicyConfig
from g2rpo.rollout.guidance import guided_by_hand
from g2rpo.train.evaluation.controls import DRAWS, TUNED, Control, default_controls
from g2rpo.train.evaluation.sampler import Sampler
from tests.support.runs import brightness
from tests.support.tolerances import rounding

PROMPTS = ["0.3", "-0.2", "0.1"]
MEANS = torch.tensor([[0.8], [0.3], [0.6]]).double()[..., None, None]
"""Of the prompts' pictures, as logits."""
REWARDS = {"bright": brightness}


def sampler(steps=10, policy=None, **more):
    options = {"shift": 3.0, "seed": 5, "batch_size": 2, "decode_batch_size": 2, **more}
    return Sampler(policy=policy or GaussianPolicy(mean=0.5), num_steps=steps, **options)


def images_of(sampled_by, prompts, **knobs):
    kept = []
    keep = {"kept": lambda images: kept.append(images) or images, "control": Control(**knobs)}
    sampled_by.evaluate(prompts, REWARDS, **keep)
    return torch.cat(kept)


def latents(steps=10, prompts=PROMPTS, policy=None, **knobs):
    return torch.logit(images_of(sampler(steps, policy), prompts, **knobs).double())


def near(found, wanted):
    """To float32's rounding of latents up to 4 over ten steps."""
    torch.testing.assert_close(found, wanted.expand_as(found), **rounding(10 * 20, size=4.0))


def test_the_best_of_several_is_chosen_prompt_by_prompt():
    """By the rewards that are named: each prompt's brightest picture of those that its draws are,
    whatever the batch."""
    four, three = sampler(4), {"control": Control(best_of=3)}
    draws = [four.evaluate(PROMPTS, REWARDS, control=Control(draw=n)) for n in range(3)]
    scores = torch.stack([draw.scores["bright"] for draw in draws])
    best = four.best(PROMPTS, REWARDS, {"bright": 1.0}, **three)
    assert torch.equal(best.scores["bright"], scores.amax(0))
    assert len({*scores.argmax(0).tolist()}) > 1
    alone = four.best(PROMPTS[1:2], REWARDS, {"bright": 1.0}, first=1, **three)
    assert torch.equal(alone.images[0], best.images[1])


@pytest.mark.parametrize("solver", ["euler", "dpmpp2m", "forecast"])
def test_without_first_noise_every_solver_ends_at_the_mean(solver):
    """From x = 0 the path is (1 - sigma) m, along which the velocity is -m everywhere: no step
    errs."""
    near(latents(noise=0, solver=solver), MEANS)


def test_a_smaller_first_noise_shrinks_the_deviation_from_the_mean():
    """The velocity is linear in the deviation from that path, so half the noise gives half the
    deviation."""
    near(latents(noise=0.5) - MEANS, (latents() - MEANS) / 2)


def test_a_second_order_solver_comes_closer_to_the_odes_end():
    exact = latents(steps=100)
    euler, second = (latents(solver=of) - exact for of in ("euler", "dpmpp2m"))
    assert second.abs().mean() < 0.7 * euler.abs().mean()


@pytest.mark.slow
def test_the_stochastic_solver_keeps_the_marginal():
    """Mean m and standard deviation .6, of 100 x 48 numbers, for any initial noise; to the grid's
    error of a few percent."""
    found = latents(steps=60, prompts=["0"] * 100, solver="sde")
    assert float(found.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(found.std()) == pytest.approx(0.6, rel=0.05)
    assert torch.equal(latents(steps=3, solver="sde"), latents(steps=3, solver="sde"))


@pytest.mark.parametrize(("first", "scales"), [(None, [7.0] * 5), (2, [7.0] * 2 + [3.5] * 3)])
def test_guidance_is_set_while_sampling_only_and_perhaps_in_the_first_steps_alone(first, scales):
    seen = []

    class Guided(GaussianPolicy):
        guidance_scale = 3.5

        def velocity(self, x, sigma, cond):
            seen.append(self.guidance_scale)
            return super().velocity(x, sigma, cond)

    policy = Guided()
    latents(steps=5, prompts=["0.1"], policy=policy, guidance=7.0, guided_steps=first)
    assert seen == scales and policy.guidance_scale == 3.5


@pytest.mark.parametrize("scale", [0.0, 3.0])
@pytest.mark.parametrize("against", ["", "0.4"])
@pytest.mark.parametrize("first", [None, 4])
def test_guidance_by_hand_moves_the_mean_away_from_that_of_the_negative_prompt(
    scale, against, first
):
    """The velocity is affine in the mean m of its prompt, so a guided one is that of m_g = m_neg +
    s (m - m_neg): from x = 0 the path is (1 - sigma) m_g. From step k on it is the prompt's own,
    and an Euler step multiplies the deviation from (1 - sigma) m by 1 + (sigma' - sigma) (sigma -
    (1 - sigma) std^2) / variance."""
    away, start = 0.5 + float(against or 0), first or 10
    guided = away + scale * (MEANS - away)
    sigmas = sampler().sigmas.double()
    deviation = (1 - sigmas[start]) * (guided - MEANS)
    for here, there in itertools.pairwise(sigmas[start:]):
        variance = (1 - here) ** 2 * 0.36 + here**2
        deviation = deviation * (1 + (there - here) * (here - (1 - here) * 0.36) / variance)
    found = latents(noise=0, cfg=scale, negative_prompt=against, guided_steps=first)
    near(found, MEANS + deviation)


def test_guidance_by_hand_of_1_is_none_and_a_draw_is_another_noise():
    plain, drawn = latents(), latents(draw=1)
    near(latents(cfg=1.0), plain)
    assert torch.equal(drawn, latents(draw=1)) and not torch.isclose(drawn, plain).any()


@pytest.mark.parametrize("solver", ["euler", "dpmpp2m", "forecast", "sde"])
@pytest.mark.parametrize(
    "guided", [{}, {"cfg": 2.0}, {"cfg": 2.0, "guided_steps": 3}, {"cfg": 2.0, "guided_steps": 40}]
)
def test_the_price_of_a_control_is_what_the_network_is_given(solver, guided):
    rows = []
    control = Control(solver=solver, steps=7, **guided)
    sampler(on_rows=rows.append).evaluate(["0.1"], REWARDS, control=control)
    assert sum(rows) == control.evaluations(10)


@pytest.mark.parametrize("kind", ["flux", "sd3"])
def test_guidance_of_pipelines_is_by_hand_or_their_own(request, kind):
    """FLUX has none of its own: two calls a step, of the prompt and of the negative one. SD3 has:
    its scale is another in the first steps."""
    path = str(request.getfixturevalue(f"{kind}_directory"))
    options = {"dtype": "float32", "height": 32, "width": 32, "max_sequence_length": 8}
    config = PolicyConfig(path=path, guidance_scale=2.0, **options)
    policy = build_policy(config, tuning="frozen")
    assert guided_by_hand(policy) is (kind == "flux")
    three = sampler(3, policy)
    own = {"cfg": 3.0, "negative_prompt": "blurry"} if kind == "flux" else {"guidance": 5.0}
    found = images_of(three, ["a cat"], **own, guided_steps=2)

    x = policy.noise([generator_for(5, "picture", 0)])
    toward, away = (policy.encode([prompt]) for prompt in ("a cat", "blurry"))
    with torch.no_grad():
        for step, (here, there) in enumerate(itertools.pairwise(three.sigmas)):
            policy.guidance_scale = 5.0 if kind == "sd3" and step < 2 else 2.0
            v = policy.velocity(x, here[None], toward)
            if kind == "flux" and step < 2:
                without = policy.velocity(x, here[None], away)
                v = without + 3.0 * (v - without)
            x = ode_step(x, v, here, there)
        near(found, policy.decode(x))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"negative_prompt": "blurry"}, "negative_prompt is for guidance by hand"),
        ({"guided_steps": 3}, "set guidance or cfg"),
        ({"best_of": 2, "draw": 1}, "leave draw out"),
    ],
)
def test_settings_without_what_they_are_of_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        resolve_as(Control, given, source="a control")


@pytest.mark.parametrize("by_hand", [True, False])
def test_default_controls_turn_one_knob_each(by_hand):
    controls = default_controls(150, 3.5, by_hand)
    assert all(len(control.knobs) == 1 for control in controls)
    assert len({*map(str, controls)}) == len(controls)
    assert [control.draw for control in controls if control.draw] == [*range(1, DRAWS)]
    assert {control.steps for control in controls if control.steps} == {250}
    (first,) = (own for own in controls if own.guided_steps is not None)
    assert first.guided_steps == 45 and (first.cfg is not None) == by_hand
    assert sum(own.guidance is not None and own != first for own in controls) == 4
    assert all(own.guidance is None for own in default_controls(10, None, by_hand))


def compared(base, tuned, controls, **more):
    def scores(values):
        return {"reward": torch.tensor(values), RIGHT: torch.tensor(values).floor()}

    found = {control: scores(values) for control, values in controls.items()}
    return against_controls(found, scores(base), 10, {"reward": 1.0}, scores(tuned), **more)


def test_controls_stand_beside_base_and_tuned_with_what_they_cost():
    """Two prompts, of which the base draws none right, a knob one, one of two draws both, and the
    tuned model both."""
    controls = {Control(steps=20): [1.0, 0.0], Control(noise=0): [0.5, math.nan]}
    controls[Control(draw=1)] = [1.0, 1.0]
    found = compared([0.0, 0.0], [1.0, 1.0], controls)
    for way, *costs in (
        ("base", 10, 0, 0.0),
        ("steps 20", 20, 0, 0.5),
        ("initial noise x 0", 10, 0, 0.5),
        ("best of 2", 20, 2, 1.0),
        ("tuned", 10, 0, 1.0),
    ):
        (own,) = (each for each in found.ways if each.name == way)
        assert [own.evaluations, own.readings, own.means["reward"]] == costs
    lead = found.best["reward"].leads["reward"]
    assert (lead.mean, lead.count) == (0.5, 2)
    (said,) = in_words(found, [RIGHT])
    assert "(steps 20; " in said and "as the best of 2 pictures" in said
    figures = " ".join(in_figures(found, [RIGHT]))
    assert "20 network evaluations and 2 readings of the trained rewards a picture" in figures


@pytest.mark.parametrize(
    ("right", "told"),
    [
        (1, "no clear difference: +11 points, +0 to +37)"),
        (9, "training gained more: +100 points, +100 to +100)"),
    ],
)
def test_controls_on_few_prompts_have_the_interval_of_the_lead(right, told):
    """By hand, of 1 in 9: 1 / 9 ± 2.306 / 9, and no less than none."""
    found = compared([0.0] * 9, [1.0] * right + [0.0] * (9 - right), {Control(steps=20): [0.0] * 9})
    assert f"(steps 20; {told}" in in_words(found, [RIGHT])[0]


@pytest.mark.parametrize(("reached", "clear"), [([1.0, 1.0], True), ([2.5, -0.5], False)])
def test_that_the_tuned_model_is_better_with_less_noise_is_said_where_it_is_clear(reached, clear):
    with_less = {"reward": torch.tensor(reached * 5), RIGHT: torch.zeros(10)}
    controls = {Control(steps=20): [0.0] * 10}
    found = compared([0.0] * 10, [0.5] * 10, controls, tuned_control=with_less)
    said = f"Sampled with {TUNED} the tuned model reaches 1.000 in reward."
    assert (said in in_figures(found, ["reward"])) == clear
