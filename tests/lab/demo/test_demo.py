"""What the demo computes is what sampling and training compute; and what it shows is that."""

import dataclasses
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from functools import partial

import pytest
import torch
import yaml
from starlette.datastructures import Headers

from g2rpo.app.build import Request
from g2rpo.app.build import build as built
from g2rpo.assembly import components
from g2rpo.assembly.config import load_config
from g2rpo.assembly.prompts import build_prompts
from g2rpo.cli.main import main
from g2rpo.config.algorithms import ALGORITHMS
from g2rpo.config.resolve import resolve
from g2rpo.config.schema import Config
from g2rpo.core.capabilities import differentiates_rewards
from g2rpo.core.data import Precision
from g2rpo.core.errors import UserError
from g2rpo.core.flow import sigma_grid
from g2rpo.core.seeding import generator_for
from g2rpo.core.types import Plan, no_kernel
from g2rpo.evaluation.controls import Control
from g2rpo.evaluation.sampler import Sampler
from g2rpo.evaluation.untrained import utility
from g2rpo.lab.demo.drawing import draw
from g2rpo.lab.demo.group import offered_granularities, plan_label, trace_group
from g2rpo.lab.demo.model import (
    MAX_PROMPT,
    config_of_model,
    open_model,
    training_of,
    what_it_is,
    why_no_word,
)
from g2rpo.lab.demo.opening import FIRST, opening, opening_of
from g2rpo.lab.demo.views import digits, drawing_html, run_html, trace_html
from g2rpo.lab.report.history import SeedGroup, read_runs
from g2rpo.lab.web import without_proxies
from g2rpo.monitor.scores import read_rows, scores_of
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.guidance import guidance_of
from g2rpo.run.run import Run
from g2rpo.training.stopwatch import Stopwatch
from tests.support.commands import TINY, g2rpo
from tests.support.ports import free_port
from tests.support.runs import fits
from tests.support.variants import few

PROMPT = "a red circle"
ROUNDED = 0.5 / 255 + 1e-4
"""Of pictures in 8 bit that were computed in batches of other shapes."""


def tiny(flux_directory, prompts, *overrides) -> Config:
    policy = {
        "path": str(flux_directory),
        "height": 32,
        "width": 32,
        "max_sequence_length": 12,
        "lora_rank": 2,
    }
    data = {
        **TINY,
        "rewards": {"brightness": 1},
        "policy": policy,
        "prompts": {"train": str(prompts), "cache": "off"},
    }
    evaluation = {**TINY["evaluation"], "prompts": str(prompts), "rewards": {"scene_accuracy": 1}}
    return resolve({**data, "evaluation": evaluation}, overrides)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("a red circle\ntwo blue squares\n")
    return path


@pytest.fixture(scope="module", params=few(["lora", "full"], "lora".__eq__))
def run(request, tmp_path_factory, flux_directory, prompts):
    """A finished run of the tiny FLUX, trained hard enough to draw something else."""
    directory = tmp_path_factory.mktemp("runs") / request.param
    config = directory.with_suffix(".yaml")
    overrides = [f"policy.tuning={request.param}", "optim.learning_rate=0.05"]
    config.write_text(
        yaml.safe_dump(tiny(flux_directory, prompts, *overrides).model_dump(mode="json"))
    )
    with pytest.raises(SystemExit) as stop:
        main(["train", str(config), "--run-dir", str(directory)])
    assert not stop.value.code
    return directory


def config_of(run) -> Config:
    return Run(run).read_config(mention=False)


@pytest.fixture(scope="module")
def session(run):
    return open_model(
        config_of(run), run / ("adapter" if run.name == "lora" else "transformer"), print
    )


def pictures(policy_config, weights, *, seed=3, steps=4, guidance=3.5, strength=1.0):
    """As `g2rpo sample` draws."""
    policy = components.build_policy(
        policy_config.model_copy(update={"guidance_scale": guidance}), tuning="frozen"
    )
    if weights is not None:
        policy.load(weights, strength)
    return Sampler(policy=policy, shift=3.0, num_steps=steps, seed=seed).pictures([PROMPT])


def test_a_drawing_is_what_sample_draws_with_and_without_the_weights(run, session):
    weights = run / ("adapter" if run.name == "lora" else "transformer")
    for settings in (
        {},
        {"guidance": 1.0},
        {"steps": 2, "seed": 4},
        *([{"strength": 0.5}] if run.name == "lora" else []),
    ):
        given = {"steps": 4, "guidance": 3.5, **settings}
        control = Control(steps=given.pop("steps"), guidance=given.pop("guidance"))
        drawing = draw(session, f"  {PROMPT}\n", **{"seed": 3, **given}, control=control)
        base = {name: value for name, value in settings.items() if name != "strength"}
        expected = (
            pictures(config_of(run).policy, None, **base),
            pictures(config_of(run).policy, weights, **settings),
        )
        for evaluation, images in zip(
            (drawing.base.evaluation, drawing.tuned.evaluation), expected, strict=True
        ):
            # weights loaded twice lie elsewhere in memory, and some processors then add up in
            # another order
            torch.testing.assert_close(
                evaluation.images / 255, images, atol=0.5 / 255 + 1e-5, rtol=0
            )
            for name, reward in {**session.rewards, **session.judges}.items():
                assert torch.equal(
                    evaluation.scores[name], reward(evaluation.images / 255, [PROMPT])
                )
        assert (drawing.base.picture / 255 - drawing.tuned.picture / 255).abs().max() > 0.01
        assert drawing.prompt == PROMPT
        assert session.policy.guidance_scale == 3.5  # as before
    assert session.tuned == {"lora": "adapter", "full": "all weights"}[run.name]


def test_a_held_out_prompt_is_drawn_as_the_run_evaluated_it(run):
    """From the noise of its number: the scores are those of the run's log."""
    config = config_of(run)
    heldout = build_prompts(config.evaluation.prompts, "evaluation.prompts")[
        : config.evaluation.num_prompts
    ]
    session = open_model(
        config, run / ("adapter" if run.name == "lora" else "transformer"), print, heldout
    )
    (after,) = SeedGroup((read_runs([run])[0],)).judged_after
    for number, prompt in enumerate(heldout):
        drawing = draw(session, prompt)
        for evaluation, iteration in (
            (drawing.base.evaluation, 0),
            (drawing.tuned.evaluation, after),
        ):
            stored = scores_of(read_rows(Run(run).scores(iteration)))
            for name, value in evaluation.scores.items():  # other batches, so not to the last bit
                torch.testing.assert_close(
                    value, stored[name][number : number + 1], atol=1e-4, rtol=0, equal_nan=True
                )
        assert drawing.settings.startswith(
            f"held-out prompt {number + 1} · seed {session.sampler.seed} · {session.sampler.num_steps} steps"
        )
    assert "held-out" not in draw(session, "three green stars").settings


def test_an_adapter_without_strength_is_the_base_model(run, session):
    if session.tuned == "adapter":
        drawing = draw(session, PROMPT, seed=3, control=Control(steps=4, guidance=3.5), strength=0)
        assert torch.equal(drawing.base.picture, drawing.tuned.picture)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [(" \n", "write a prompt"), ("a" * (MAX_PROMPT + 1), "501 characters; 500 are allowed")],
)
def test_a_prompt_that_is_none_is_named(session, prompt, message):
    with pytest.raises(UserError, match=message):
        draw(session, prompt)


def test_a_model_alone_has_no_tuned_side(flux_directory):
    session = open_model(
        config_of_model(str(flux_directory), 32, 3.5, {"brightness": {}}), None, print
    )
    drawing = draw(session, PROMPT, seed=0, control=Control(steps=2, guidance=3.5))
    assert drawing.tuned is None and list(drawing.base.scores) == ["brightness"]
    html = drawing_html(drawing)
    assert html.count("<img") == 1 and "After training" not in html and "▲" not in html


def test_a_group_is_the_first_iteration_of_the_run(run, session):
    """The trainer's own noise, latents, scores and advantages; in batches of other shapes, so not
    to the last bit."""
    trainer = built(Request(config=load_config(str(run / "config.yaml"), [])))
    asked = trainer.loop.order.batch(0, trainer.config.trainer.prompts_per_iteration)
    sampled = trainer.collector.collect(
        trainer.collector.own_spec(trainer.algorithm, 0),
        trainer.policy.encode(asked),
        asked,
        Stopwatch(),
    )
    rollouts, rewards = sampled.rollouts, sampled.rewards
    advantages = trainer.algorithm.advantages(rewards, trainer.loop.weights)
    assert session.plans == [rollout.plan for rollout in rollouts] and list(
        map(plan_label, session.plans)
    ) == [
        "step 0",
        "step 1",
    ]
    for plan, rollout in enumerate(rollouts):
        heard: list[tuple[int, ...]] = []
        more = {"seed": trainer.config.trainer.seed, "plan": plan}
        group = trace_group(
            session,
            asked[0],
            **more,
            tuned=False,
            on_progress=lambda *both, to=heard: to.append(both),
        )
        finals = trainer.policy.decode(rollout.finals.flatten(0, 1)).unflatten(
            0, rollout.finals.shape[:2]
        )
        noised = trainer.policy.decode(rollout.transitions[-1].x_next)
        for shown, own in ((group.finals, finals), (group.noised, noised)):  # in 8 bit
            assert (shown / 255 - own).abs().max() < ROUNDED
        assert torch.allclose(group.rewards, rewards[plan], atol=1e-4, equal_nan=True)
        assert torch.allclose(group.advantages, advantages[plan], atol=1e-3)
        assert heard[-1][0] == heard[-1][1]  # what was announced is what was needed
    tuned = trace_group(session, asked[0], **more, tuned=True)
    assert (tuned.finals / 255 - group.finals / 255).abs().max() > 0.01


def test_a_group_is_rolled_out_in_the_dtypes_of_training(run, tmp_path):
    """The run's own; a group in others is not the one that the run learnt from."""
    text = (run / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(
        text.replace("precision: float32", "precision: published")
    )
    session = open_model(config_of(tmp_path), None, print)
    narrow = Precision(torch.float32, anchor=torch.bfloat16, step=torch.bfloat16)
    assert session.config.precision == narrow
    assert trace_group(session, PROMPT, plan=1).rewards.isfinite().all()


def test_a_group_is_sampled_with_the_guidance_of_training(session):
    sampling = session.config.sampling.model_copy(update={"guidance_scale": 1.0})
    other = replace(session, config=session.config.model_copy(update={"sampling": sampling}))
    plain, guided = (
        trace_group(one, PROMPT, seed=0, plan=1, tuned=False).finals for one in (other, session)
    )
    assert plain.ne(guided).any() and session.policy.guidance_scale == 3.5


def test_a_group_may_look_at_other_granularities(session):
    own = trace_group(session, PROMPT, seed=0, plan=1, tuned=False)
    assert offered_granularities(session) == [1, 2, 3] and own.plan.tail_names == (1, 2)
    other = trace_group(session, PROMPT, seed=0, plan=1, tuned=False, granularities=[3, 1])
    assert other.plan.tail_names == (1, 3) and len(other.finals) == 2
    assert (
        torch.equal(other.noised, own.noised)
        and (other.finals[0] / 255 - own.finals[0] / 255).abs().max() < 2 * ROUNDED
    )
    algorithm = replace(session.config.algorithm, granularities=(1, 3))
    assert other.plan == algorithm.plans(4)[1]
    assert torch.equal(
        other.advantages, algorithm.advantages(other.rewards[None], session.weights)[0]
    )
    with pytest.raises(UserError, match="choose granularities of 1, 2, 3"):
        trace_group(session, PROMPT, granularities=[])


def test_predictions_end_where_the_plain_walk_ends(session):
    group = trace_group(session, PROMPT, seed=5, plan=1, tuned=False)
    policy, sigmas = session.policy, sigma_grid(4, 3.0)
    with session.policy.base(), torch.no_grad():
        cond = policy.encode([PROMPT])
        x = policy.noise([generator_for(5, "rollout", 0, 0, "initial")])
        final = policy.decode(Engine(policy=policy, cond=cond, sigmas=sigmas).sample(x))
        first = policy.decode(x - policy.velocity(x, sigmas[:1], cond))
    assert group.predictions.shape == (4, 3, 32, 32)
    for shown, own in ((group.predictions[-1:], final), (group.predictions[:1], first)):
        assert (shown / 255 - own).abs().max() < ROUNDED


def learning(flux_directory, config):
    """The tiny FLUX alone, with the algorithm of a config."""
    own = {"algorithm": config.algorithm, "sampling": config.sampling, "trainer": config.trainer}
    return config_of_model(str(flux_directory), 32, 3.5, {"brightness": {}}).model_copy(update=own)


@pytest.mark.parametrize(
    ("name", "message"), [("diffusion_nft", "no stochastic step"), ("refl", "no group to compare")]
)
def test_an_algorithm_without_stochastic_steps_has_no_group(flux_directory, prompts, name, message):
    small = ["algorithm.group_size=3", "sampling.num_steps=6", *fits(name)]
    config = tiny(flux_directory, prompts, f"algorithm.name={name}", *small)
    session = open_model(learning(flux_directory, config), None, print)
    with pytest.raises(UserError, match=message):
        trace_group(session, PROMPT, seed=0, plan=0, tuned=False)


STOCHASTIC = [
    name
    for name, kind in ALGORITHMS.items()
    if kind().kernel(sigma_grid(8)) is not no_kernel and not differentiates_rewards(kind())
]


@pytest.mark.parametrize("name", STOCHASTIC)
def test_every_algorithm_with_stochastic_steps_has_a_group(flux_directory, prompts, name):
    count = 11 if name == "e_grpo" else 8  # its merged steps end at 10
    config = tiny(
        flux_directory,
        prompts,
        f"algorithm.name={name}",
        "algorithm.group_size=3",
        f"sampling.num_steps={count}",
    )
    assert config.algorithm.name == name
    session = open_model(learning(flux_directory, config), None, print)
    group = trace_group(session, PROMPT, seed=0, plan=len(session.plans) - 1, tuned=False)
    assert (group.predictions is None) == (not group.plan.shared_noise)
    assert group.noised.shape == (3, 3, 32, 32) and group.finals.shape[1:] == (3, 3, 32, 32)
    assert group.advantages.shape == (3,) and group.advantages.abs().sum() > 0
    assert group.noised_at == max(step for step in group.plan.stochastic if group.plan.trains(step))
    html = trace_html(group)
    assert html.count("<li") == 3 + (count if group.plan.shared_noise else 0)
    assert ("No anchor" in html) == (not group.plan.shared_noise)


@pytest.mark.parametrize("seed", [2])
def test_plans_by_chance_are_those_of_the_seed(flux_directory, prompts, seed):
    short = [
        "algorithm.name=dancegrpo",
        "algorithm.group_size=3",
        "sampling.num_steps=8",
        f"trainer.seed={seed}",
    ]
    config = tiny(flux_directory, prompts, *short)
    session = open_model(learning(flux_directory, config), None, print)
    assert (
        session.plans
        == config.algorithm.plans(8, 0, seed)
        != config.algorithm.plans(8, 0, seed + 1)
    )
    group = trace_group(session, PROMPT, seed=0, plan=0, tuned=False)
    assert group.plan == session.plans[0] and f"just after step {group.noised_at};" in trace_html(
        group
    )


@pytest.fixture(scope="module")
def testbed():
    return open_model(config_of_model("testbed", None, 3.5, None), None, print)


def test_the_testbed_alone_is_scored_by_its_own_rewards(testbed):
    drawing = draw(testbed, "two blue squares", seed=1, control=Control(steps=10, guidance=3.5))
    assert list(drawing.base.scores) == [
        "scene_accuracy",
        "scene_correct",
        "scene_clip",
        "scene_preference",
    ]
    assert not drawing.missing and testbed.explain(drawing.prompt) == ""
    html = drawing_html(drawing)
    assert "no score" not in html.lower() and "not learnt such prompts" not in html
    assert "<b>scene_accuracy</b>: Whether the picture shows the asked objects" in html


def drawn_view(session):
    """The page with the view that draws."""
    pytest.importorskip("gradio")
    from g2rpo.lab.demo.app import draw_view
    from g2rpo.lab.web.page import page_of

    return page_of("Any", "demo", "", {"Draw": partial(draw_view, session, [], "")})


def test_the_base_model_is_drawn_once_more_with_free_knobs_and_their_price():
    """Guidance by hand in the first steps, and the best of some: what evaluations sample, and what
    it cost."""
    session = open_model(config_of_model("words", None, None, None), None, print)
    control, prompt = Control(steps=4, cfg=3.0, guided_steps=2, best_of=3), "'tiger' in red"
    drawing = draw(session, prompt, control=control)
    assert (
        drawing.free.price == "18 evaluations, 3 readings" and drawing.base.price == "4 evaluations"
    )
    assert drawing.free.knobs == "guidance by hand 3 in the first 2 steps, best of 3"
    sampler, rewards = replace(session.sampler, num_steps=4), {**session.rewards, **session.judges}
    several = [
        sampler.evaluate([prompt], rewards, control=control.model_copy(update={"draw": n}))
        for n in range(3)
    ]
    found = [torch.equal(drawing.free.picture, one.images[0]) for one in several]
    assert sum(found) == 1 and not torch.equal(several[0].images, drawing.base.evaluation.images)
    weights = {name: entry.weight for name, entry in session.config.rewards.items()}
    by = utility(
        {name: torch.stack([one.scores[name] for one in several], -1) for name in session.rewards},
        weights,
    )
    assert found[int(by[0].argmax())]
    plain = draw(session, prompt, control=Control(steps=4))
    assert plain.free is None and torch.equal(plain.base.picture, drawing.base.picture)
    html = drawing_html(drawing)
    assert (
        html.count("<img") == 2
        and "Base model, with free knobs" in html
        and "18 evaluations" in html
    )
    nothing = replace(session, rewards={})
    with pytest.raises(UserError, match="needs a reward"):
        draw(nothing, prompt, control=Control(best_of=2))


@pytest.mark.parametrize("model", ["testbed", "words"])
def test_guidance_is_offered_where_pictures_depend_on_it(model):
    """The embedded scenes have a network that takes the scale; that of words does not."""
    session = open_model(config_of_model(model, None, None, {"brightness": {}}), None, print)
    prompt = {"testbed": "two blue squares", "words": "'tiger' in red"}[model]
    low, high = (
        draw(session, prompt, seed=1, control=Control(steps=2, guidance=scale))
        for scale in (1.0, 7.0)
    )
    depends = bool((low.base.picture != high.base.picture).any())
    (slider,) = [
        block
        for block in drawn_view(session).blocks.values()
        if getattr(block, "label", "") == "Guidance"
    ]
    assert (
        slider.visible
        is depends
        is ("guidance" in low.settings)
        is (guidance_of(session.policy) is not None)
    )


def test_words_say_what_they_can_spell():
    assert why_no_word("'tiger' in red") == "" and "three to six letters" in why_no_word(
        "a cat"
    ) == why_no_word("'hippo'")


def test_a_prompt_without_a_score_says_so_and_why(testbed):
    drawing = draw(testbed, "a <i>dog</i>", seed=1, control=Control(steps=2, guidance=3.5))
    html = drawing_html(drawing)
    assert html.count('<b class="g2-soft">no score</b>') == 4 and "expected a colour" in html
    assert "a &lt;i&gt;dog" in html and "<i>dog" not in html  # what people type stays text
    group = trace_group(testbed, "a <i>dog</i>", seed=1, plan=0, tuned=False)
    assert group.rewards.isnan().all() and (group.advantages == 0).all()
    html = trace_html(group)
    assert (
        "<b>No score</b> by scene_accuracy" in html
        and "all advantages are 0" in html
        and "<i>dog" not in html
    )
    assert "best" not in re.findall(r"<header>.*?</header>", html)[0]


def group_of(testbed, rewards):
    """A group with other scores: [1, 1, 12] or [1, 2, 12]."""
    group = trace_group(testbed, "two blue squares", seed=1, plan=0, tuned=False)
    finals = group.finals.expand(rewards.shape[1], -1, -1, -1, -1)
    tails = tuple((1, *range(g + 1, 11)) for g in range(1, rewards.shape[1] + 1))
    return dataclasses.replace(
        group,
        plan=Plan(0, 1, tails),
        finals=finals,
        rewards=rewards,
        advantages=testbed.config.algorithm.advantages(rewards[None], testbed.weights)[0],
    )


def test_members_are_ranked_and_the_ends_are_marked(testbed):
    rewards = torch.arange(12.0).roll(3).expand(1, 2, 12).clone()  # member 4 has 0, member 3 has 11
    html = trace_html(group_of(testbed, rewards))
    cards = re.findall(r'<li class="(?:g2-(\w+))?">\n<header><span>member (\d+)', html)
    assert [int(number) for _, number in cards] == [3, 2, 1, 12, 11, 10, 9, 8, 7, 6, 5, 4]
    assert [mark for mark, _ in cards] == ["best", *[""] * 10, "worst"]
    advantages = [
        float(a.replace("−", "-"))
        for a in re.findall(r"<dt>advantage</dt><dd[^>]*><b>([^<]*)", html)
    ]
    expected = 2 * (torch.arange(11.0, -1, -1) - 5.5) / torch.arange(12.0).std()
    assert advantages == [pytest.approx(float(a), abs=0.005) for a in expected]
    widths = [float(w) for w in re.findall(r"width:([\d.]+)%", html)]
    assert widths[0] == widths[-1] == 50 and widths[5] == pytest.approx(50 * 0.5 / 5.5, abs=0.05)
    assert (
        "g = 1: 9 steps, g = 2: 8 steps" in html.replace("&nbsp;", " ") and "0.000 · 0.000" in html
    )


def test_ties_share_their_mark_and_a_silent_group_has_none(testbed):
    html = trace_html(group_of(testbed, torch.tensor([[[1.0] * 5 + [0.0] * 7]])))
    assert html.count("▲ best") == 5 and html.count("▼ worst") == 7
    html = trace_html(group_of(testbed, torch.ones(1, 1, 12)))
    assert "best</b>" not in html and "A silent group" in html and html.count("<b>0</b>") == 12


def test_changes_are_signed_and_as_exact_as_their_scores(session):
    drawing = draw(session, PROMPT, seed=3, control=Control(steps=2, guidance=3.5))

    def scored(drawn, one, other):
        scores = {"brightness": torch.tensor([one]), "scene_accuracy": torch.tensor([other])}
        return replace(drawn, evaluation=replace(drawn.evaluation, scores=scores))

    drawing = dataclasses.replace(
        drawing,
        base=scored(drawing.base, 0.5, 73.65),
        tuned=scored(drawing.tuned, 0.25, float("nan")),
    )
    html = " ".join(re.sub(r"<[^>]*>", " ", drawing_html(drawing)).split())
    assert "brightness trained on 0.500 scene_accuracy judged only 73.65 After training" in html
    assert "brightness trained on 0.250 ▼ −0.250 scene_accuracy judged only no score" in html
    assert [digits(0.1234), digits(73.65), digits(2000.0), digits(float("nan"))] == [3, 2, 0, 3]


def test_the_run_is_its_report_in_a_frame(run):
    html = run_html(read_runs([run])[0])
    page = re.fullmatch(r'<iframe [^>]*srcdoc="([^"]*)"></iframe>', html)
    assert page and "&lt;!doctype html&gt;" in page[1] and "scene_accuracy" in page[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a run, or a pipeline with --model"),
        (["runs/one", "--model", "testbed"], "name a run, or a pipeline with --model"),
        (["nowhere"], "nowhere is no run directory"),
        (["runs/one", "--rewards", "brightness"], "--rewards is for --model"),
        (["runs/one", "--guidance", "1"], "--guidance is for --model"),
        (
            ["--model", "testbed", "--guidance", "-1"],
            "guidance_scale: input should be greater than or equal to 0",
        ),
        (["--model", "testbed", "--size", "0"], "height: input should be greater than 0"),
        (["--model", "/no/such"], "/no/such: is no directory"),
        (["--model", "testbed", "--rewards", "brigthness"], "Did you mean 'brightness'?"),
        (["--model", "testbed", "--rewards", "bad.yaml"], "rewards.brightness.wieght"),
        (["--model", "testbed", "--host", "0.0.0.0"], "without a token"),
        (["--model", "testbed", "--token-env", "NOT_SET"], "is not set"),
        (["--model", "testbed", "--token-env", "BLANK"], "is not set"),
        (["--model", "testbed"], "cannot serve on 127.0.0.1:"),
        (
            ["--model", "testbed", "--weights", "/no/such"],
            "/no/such: is no folder and no .safetensors file; name an adapter/ or a transformer/",
        ),
    ],
)
def test_wrong_input_is_one_message_and_exit_2(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BLANK", " \n")
    (tmp_path / "bad.yaml").write_text("brightness: {wieght: 2}")
    # what is not refused would be served, without end
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, out, err = g2rpo(capsys, "demo", *arguments, "--port", taken.getsockname()[1])
    assert code == 2 and message in " ".join(err.split()) and "Traceback" not in err
    assert "building" not in out  # loading a model takes minutes


def test_a_run_without_weights_is_named(capsys, run, tmp_path):
    (tmp_path / "begun").mkdir()
    shutil.copy(run / "config.yaml", tmp_path / "begun")
    code, _, err = g2rpo(capsys, "demo", tmp_path / "begun")
    assert code == 2 and "has no weights yet" in err


def test_weights_that_do_not_fit_are_named(tmp_path):
    with pytest.raises(UserError, match="the weights do not fit testbed"):
        open_model(config_of_model("testbed", None, 3.5, None), tmp_path, print)


@pytest.mark.parametrize(
    ("model", "message"), [("testbed", "pip install gradio"), ("/no/such", "is no directory")]
)
def test_without_gradio_the_extra_is_named_after_all_other_mistakes(
    capsys, monkeypatch, model, message
):
    monkeypatch.setitem(sys.modules, "gradio", None)
    # if another test has imported them
    for room, module in (("demo", "app"), ("teach", "page"), ("web", "page")):
        monkeypatch.delitem(sys.modules, f"g2rpo.lab.{room}.{module}", raising=False)
        monkeypatch.delattr(f"g2rpo.lab.{room}.{module}", raising=False)
    code, _, err = g2rpo(capsys, "demo", "--model", model, "--port", free_port())
    assert code == 2 and message in err and "Traceback" not in err


LOCAL = {"host": "127.0.0.1:7860", "content-length": "100"}


@pytest.mark.parametrize(
    ("headers", "local", "status"),
    [
        *(
            ({"host": host, "origin": f"http://{host}"}, True, None)
            for host in ("localhost", "[::1]:7860", "127.0.0.1:1")
        ),
        ({"host": "demo.example", "origin": "https://demo.example"}, False, None),
        ({"content-length": str(2**16)}, True, None),
        *(
            ({"host": host}, True, 421)
            for host in ("evil.example:7860", "", "127.0.0.1.evil.example", "192.168.1.2", "[::1")
        ),
        *(
            ({"origin": it}, True, 403)
            for it in ("http://evil.example", "null", "http://localhost:7860", "http://[::1")
        ),
        ({"host": "demo.example", "origin": "http://evil.example"}, False, 403),
        ({"content-length": str(2**16 + 1)}, True, 413),
        ({"content-length": "9" * 5000}, True, 413),
        *(({"content-length": length}, True, 411) for length in ("-1", "²", "")),
        ({"transfer-encoding": "chunked"}, True, 411),
    ],
)
def test_requests_of_other_sites_and_large_ones_are_refused(headers, local, status):
    page = pytest.importorskip("g2rpo.lab.web.page")
    raw = [(name.encode(), value.encode("latin-1")) for name, value in {**LOCAL, **headers}.items()]
    refused = page.refusal(Headers(raw=raw), local, page.MAX_BODY)
    assert (refused and refused[0]) == status


SERVED = """
import os, sys
import httpx
from g2rpo.lab.web import needing_gradio
with needing_gradio("the demo"):
    import gradio
    from g2rpo.lab.web.page import serve
with gradio.Blocks(analytics_enabled=False) as page:
    gradio.Markdown("hello")
address = serve(page, "127.0.0.1", int(sys.argv[1]), None)
print(httpx.get(address, trust_env=False).status_code, os.environ.get("no_proxy"), os.environ.get("NO_PROXY"))
"""


def test_gradio_sees_no_proxies_and_others_do(monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with without_proxies():
        assert (
            urllib.request.proxy_bypass_environment("127.0.0.1") and os.environ["NO_PROXY"] == "*"
        )
    assert "no_proxy" not in os.environ and not urllib.request.proxy_bypass_environment("127.0.0.1")


@pytest.mark.parametrize("proxy", ["socks", "socks5"])
def test_the_page_is_served_whatever_proxies_the_environment_has(proxy):
    """In a process of its own: socks:// is an error when Gradio is imported, a dead proxy when it
    starts."""
    clean = {
        name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")
    }
    proxies = {
        "ALL_PROXY": f"{proxy}://127.0.0.1:9",
        "HTTP_PROXY": "http://127.0.0.1:9",
        "NO_PROXY": "example.org",
    }
    command = [sys.executable, "-c", SERVED, str(free_port())]
    done = subprocess.run(
        command, env={**clean, **proxies}, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == ["200", "None", "example.org"], done.stderr


@pytest.fixture(scope="module", params=[None, "secret"])
def served(request):
    """(address, token) of a page with one question, without a token and with one."""
    gradio = pytest.importorskip("gradio")
    from g2rpo.lab.web.page import serve

    with gradio.Blocks(analytics_enabled=False) as page:
        box = gradio.Textbox()
        box.submit(lambda words: words, box, box, api_visibility="private")
    page.queue(max_size=16, api_open=False)
    yield serve(page, "127.0.0.1", free_port(), request.param), request.param
    page.close(verbose=False)


def status_of(client, address, path, body=None, **headers):
    request = urllib.request.Request(
        f"{address}{path}", body, {"Content-Type": "application/json", **headers}
    )
    try:
        with client.open(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read()


def test_what_gradio_gives_out_is_the_page_alone(served, tmp_path):
    """By Gradio's own means: no file, no proxy, nothing without the login; also for who is let
    in."""
    address, token = served
    (tmp_path / "own.txt").write_text("words")
    question = json.dumps({"data": ["a"], "fn_index": 0, "session_hash": "x"}).encode()
    ways = [
        *(
            f"gradio_api/file={path}"
            for path in (
                __file__,
                "/etc/passwd",
                "/proc/self/environ",
                tmp_path / "own.txt",
                "Makefile",
            )
        ),
        *(
            "gradio_api/file/../../../etc/passwd",
            "static/..%2f..%2f..%2fetc/passwd",
            "assets/..%2f..%2f..%2fetc/passwd",
        ),
        *(
            "gradio_api/proxy=http://127.0.0.1:1/x",
            "gradio_api/proxy=https://a.hf.space/x",
            "monitoring",
            "gradio_api/runs",
        ),
        "gradio_api/vibe-code",
    ]
    client = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    if token:
        for path, body in (
            ("config", None),
            ("gradio_api/info", None),
            ("gradio_api/queue/join", question),
            (ways[0], None),
        ):
            assert status_of(client, address, path, body)[0] == 401
        client.open(f"{address}login", f"username=a&password={token}".encode(), timeout=60).close()
    for path in ways:
        assert status_of(client, address, path)[0] in (400, 401, 403, 404), path
    assert status_of(client, address, "gradio_api/queue/join", question)[0] == 200
    assert status_of(client, address, "gradio_api/run/predict", question)[0] == 404
    assert (
        status_of(client, address, "gradio_api/queue/join", question, Origin="http://evil.example")[
            0
        ]
        == 403
    )
    file = b'--X\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\nwords\r\n--X--\r\n'
    form = {"Content-Type": "multipart/form-data; boundary=X", "Origin": "http://evil.example"}
    assert status_of(client, address, "gradio_api/upload", file, **form)[0] == 403
    assert status_of(client, address, "config", None, Host="evil.example")[0] == (
        200 if token else 421
    )


def rows(scores, right=None):
    """Tables of scores by reward, and verdicts."""
    told = [
        {"scores": dict(zip(scores, values, strict=True))}
        for values in zip(*scores.values(), strict=True)
    ]
    return (
        [row | {"right": verdict} for row, verdict in zip(told, right, strict=True)]
        if right
        else told
    )


@pytest.mark.parametrize(
    ("base", "tuned", "number", "rule"),
    [
        (
            [0, 1, 0, 0, 1],
            [0, 1, 1, 1, 0],
            2,
            "the first of the 2 held-out prompts (of 5) that the base model draws wrong",
        ),
        (
            [None, 0, 0, 1, 1],
            [1, None, 0, 1, 1],
            0,
            "the first of 5 held-out prompts: there is none that the base",
        ),
        ([1, 1, 1, 1, 0], [0, 0, 1, 1, 1], 4, "the tuned one right; 2 became wrong."),
    ],
)
def test_the_demo_opens_on_the_first_prompt_that_became_right(base, tuned, number, rule):
    chosen = opening(rows({"a": [0.0] * 5}, base), rows({"a": [0.0] * 5}, tuned), ["a"])
    assert chosen[0] == number and chosen[1].startswith("This opens on ") and rule in chosen[1]


def test_without_right_and_wrong_it_opens_where_every_trained_score_rose():
    base = rows({"a": [0.0, 0, 0, 0], "b": [5.0, 5, 5, 5], "judge": [1.0, 1, 1, 1]})
    tuned = rows({"a": [1.0, None, 0.1, 0.2], "b": [4.0, 6, 5.1, 6], "judge": [2.0, 2, 0, 0]})
    assert opening(base, tuned, ["a", "b"]) == (
        2,
        "This opens on the first of the 2 held-out prompts (of 4) on which training raised a and b; none fell.",
    )


def test_a_run_without_scores_opens_on_its_first_prompt(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    assert opening_of(read_runs([copy])[0]) == opening_of(read_runs([run])[0])
    shutil.rmtree(copy / "scores")
    assert opening_of(read_runs([copy])[0]) == FIRST


def test_what_the_page_is_about_is_said_for_outsiders(run):
    said = what_it_is(config_of(run), training_of(config_of(run)))
    weights = {"lora": "an adapter", "full": "all weights"}[run.name]
    assert f", before and after training {weights} with G²RPO." in said
    alone = config_of_model("testbed", None, 3.5, None)
    assert what_it_is(alone, "as it is") == "The tiny FLUX that comes with g2rpo, as it is."


def test_a_drawing_is_marked_where_a_reward_can_tell(testbed, session):
    drawing = draw(testbed, "two blue squares", seed=1, control=Control(steps=10, guidance=3.5))
    right = float(drawing.base.scores["scene_correct"]) == 1
    assert ("✓ right" if right else "✗ wrong") in drawing_html(
        drawing
    ) and "why not" in drawing_html(drawing, "why not")
    unparsed = drawing_html(draw(testbed, "a dog", seed=1, control=Control(steps=2, guidance=3.5)))
    assert "✓" not in unparsed and "✗" not in unparsed
