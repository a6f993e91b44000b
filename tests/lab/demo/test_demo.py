"""What the demo computes is what sampling and training compute; and what it shows is that."""

import math
import re
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import gradio as gr
import pytest
import torch

from g2rpo.config.algorithms import ALGORITHMS
from g2rpo.config.read import load_config
from g2rpo.core.data import Precision
from g2rpo.core.errors import UserError
from g2rpo.core.flow import sigma_grid
from g2rpo.core.noise import generator_for
from g2rpo.core.statistics import RIGHT
from g2rpo.core.types import no_kernel
from g2rpo.lab.demo.app import only_uploads
from g2rpo.lab.demo.command import FIRST_PROMPT, demo, opening, opening_of
from g2rpo.lab.demo.drawing import draw, offered_granularities, plan_label, trace_group
from g2rpo.lab.demo.model import MAX_PROMPT, config_of_model, open_model
from g2rpo.lab.demo.views import change, drawing_html, trace_html, written_score
from g2rpo.lab.report.history import SeedGroup, read_runs
from g2rpo.lab.serving import Address
from g2rpo.models import load
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.guidance import guidance_of
from g2rpo.train.build import Request, build
from g2rpo.train.collector import Stopwatch
from g2rpo.train.evaluation.controls import Control
from g2rpo.train.evaluation.heldout import read_rows, scores_of
from g2rpo.train.evaluation.sampler import Sampler
from g2rpo.train.run.folder import Run
from tests.lab.demo.trained import BRIGHT, train_tiny
from tests.lab.report.pages import words
from tests.support.commands import refused
from tests.support.ports import free_port
from tests.support.runs import fits, picture
from tests.support.tables import rows
from tests.support.tolerances import network
from tests.support.variants import few

PROMPT = "a red circle"
DRAWN = network(1.0, passes=2)
"""Of pictures, and of their scores, that were computed in batches of other shapes: the steps, whose
lengths add up to 1, and the VAE."""
TWO_STEPS = Control(steps=2, guidance=3.5)


def opened(run, heldout=()):
    return open_model(run.read_config(mention=False), run.weights, print, heldout)


@pytest.fixture(scope="module")
def session(run):
    return opened(run)


def opened_model(name, rewards=None):
    return open_model(config_of_model(name, None, None, rewards), None, print)


@pytest.fixture(scope="module")
def testbed():
    return opened_model("testbed")


def near(shown, own):
    """Are pictures in 8 bit those in [0, 1]?"""
    return (shown / 255 - own).abs().max() < 0.5 / 255 + DRAWN["atol"]


# --- a drawing ------------------------------------------------------------------------------------


def test_a_drawing_is_what_sample_draws_with_its_settings(run, session):
    asked = {"seed": 4, "control": Control(steps=2, guidance=1.0)}
    drawing = draw(session, f"  {PROMPT}\n", strength=0.5, **asked)
    config = session.config.policy.model_copy(update={"guidance_scale": 1.0})
    for drawn, strength in ((drawing.base, 0), (drawing.tuned, 0.5)):
        policy = load.build_policy(config, tuning="frozen")
        if strength:
            policy.load(run.weights, strength)
        sampler = Sampler(policy=policy, shift=3.0, num_steps=2, seed=4)
        assert near(drawn.picture, sampler.pictures([PROMPT])[0])
        for name, reward in {**session.rewards, **session.judges}.items():
            assert drawn.scores[name] == float(reward(drawn.picture[None] / 255, [PROMPT]))
    assert (drawing.base.picture / 255 - drawing.tuned.picture / 255).abs().max() > 0.01
    assert drawing.prompt == PROMPT and session.tuned == "adapter"
    assert session.policy.guidance_scale == 3.5  # as before
    without = draw(session, PROMPT, strength=0, **asked)
    assert torch.equal(without.base.picture, without.tuned.picture)


@pytest.mark.parametrize("tuning", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_a_held_out_prompt_is_drawn_as_the_run_evaluated_it(run, tuning, tmp_path, flux_directory):
    """From the noise of its number: the scores are those of the run's log, but for the order of
    sums in batches of other shapes."""
    if tuning == "full":
        run = train_tiny(tmp_path, flux_directory, "policy.tuning=full")
    heldout = ["a red circle", "two blue squares"]
    model = opened(run, heldout)
    (after,) = SeedGroup((*read_runs([run.path]),)).judged_after
    for number, prompt in enumerate(heldout):
        drawing = draw(model, prompt)
        for drawn, iteration in ((drawing.base, 0), (drawing.tuned, after)):
            stored = scores_of(read_rows(run.scores(iteration)))
            for name, value in drawn.scores.items():
                logged = float(stored[name][number])
                assert value == pytest.approx(logged, abs=DRAWN["atol"], nan_ok=True)
        assert drawing.settings.startswith(f"held-out prompt {number + 1} · seed ")
    assert "held-out" not in draw(model, "three green stars").settings


def test_the_base_model_is_drawn_once_more_with_free_knobs_and_their_price():
    """Guidance by hand in the first steps, and the best of some: what evaluations sample, and what
    it cost."""
    session, prompt = opened_model("words", {"brightness": {}}), "'tiger' in red"
    control = Control(steps=3, cfg=3.0, guided_steps=2, best_of=3)
    drawing = draw(session, prompt, control=control)
    assert drawing.tuned is None and drawing.base.price == "3 evaluations"
    assert drawing.free.price == "15 evaluations, 3 readings"
    assert drawing.free.knobs == "guidance by hand 3 in the first 2 steps, best of 3"
    sampler = replace(session.sampler, num_steps=3)
    draws = [control.model_copy(update={"draw": number}) for number in range(3)]
    several = [sampler.evaluate([prompt], session.rewards, control=one) for one in draws]
    best = max(several, key=lambda one: one.scores["brightness"])
    assert torch.equal(drawing.free.picture, best.images[0])
    plain = draw(session, prompt, control=Control(steps=3))
    assert plain.free is None and torch.equal(plain.base.picture, drawing.base.picture)
    html = drawing_html(plain)
    assert html.count("<img") == 1 and "After training" not in html and "▲" not in html
    assert "Base model, other sampler settings" in drawing_html(drawing)


@pytest.mark.parametrize(
    ("model", "prompt"), [("testbed", "two blue squares"), ("words", "'tiger' in red")]
)
def test_guidance_is_told_where_pictures_depend_on_it(model, prompt):
    """The embedded scenes have a network that takes the scale; that of words does not."""
    session = opened_model(model, {"brightness": {}})
    low, high = (draw(session, prompt, control=Control(steps=1, guidance=g)) for g in (1.0, 7.0))
    depends = bool((low.base.picture != high.base.picture).any())
    assert depends is (model == "testbed") is ("guidance" in low.settings)
    assert depends is session.acts("own guidance") is (guidance_of(session.policy) is not None)


def test_a_drawing_says_what_scores_mean_whether_it_is_right_and_why_it_has_none(testbed):
    drawing = draw(testbed, "two blue squares", seed=1, control=TWO_STEPS)
    rewards = ["scene_accuracy", "scene_correct", "scene_clip", "scene_preference"]
    assert list(drawing.base.scores) == rewards and not drawing.missing
    html, mark = drawing_html(drawing, "why not"), "✓ right" if drawing.base.right else "✗ wrong"
    assert mark in html and "why not" in html and "no score" not in html.lower()
    assert "<b>scene_accuracy</b>: Whether the picture shows the asked objects" in html
    html = drawing_html(draw(testbed, "a <i>dog</i>", seed=1, control=TWO_STEPS))
    assert html.count('<b class="g2-soft">no score</b>') == 4 and "expected a colour" in html
    assert "a &lt;i&gt;dog" in html and "<i>dog" not in html  # what people type stays text
    assert "✓" not in html and "✗" not in html


def test_changes_are_signed_and_as_exact_as_their_scores(session):
    nan = float("nan")
    scores = [*map(written_score, (0.5, 73.65, 2000.0, nan))]
    assert scores == ["0.500", "73.65", "2,000", "no score"]
    assert [change(0.25, 0.5), change(75.0, 73.65), change(nan, 1.0)] == ["−0.250", "+1.35", ""]
    shown = words(drawing_html(draw(session, PROMPT, control=TWO_STEPS)))
    assert re.search(r"After training .*brightness trained on [\d.]+ [▲▼] [+−][\d.]+", shown)


# --- a group --------------------------------------------------------------------------------------


def test_a_group_is_the_first_iteration_of_the_run(run, session):
    """The trainer's own noise, latents and scores; in batches of other shapes, so not to the last
    bit. Advantages are exactly those of the group's scores."""
    trainer = build(Request(config=session.config))
    policy, collector = trainer.policy, trainer.collector
    (prompt,) = asked = trainer.order.batch(0, 1)
    spec, cond = collector.own_spec(trainer.algorithm, 0), policy.encode(asked)
    sampled = collector.collect(spec, cond, asked, Stopwatch())
    assert session.plans == [rollout.plan for rollout in sampled.rollouts]
    assert [plan_label(plan) for plan in session.plans] == ["step 0", "step 1"]
    for plan, rollout in enumerate(sampled.rollouts):
        hear = Mock()
        own = {"seed": trainer.config.trainer.seed, "plan": plan}
        group = trace_group(session, prompt, **own, on_progress=hear)
        assert near(group.finals.flatten(0, 1), policy.decode(rollout.finals.flatten(0, 1)))
        assert near(group.noised, policy.decode(rollout.transitions[-1].x_next))
        rewards = sampled.rewards[plan]
        torch.testing.assert_close(group.rewards, rewards, **DRAWN, equal_nan=True)
        advantages = trainer.algorithm.advantages(group.rewards[None], trainer.reward_weights)
        assert torch.equal(group.advantages, advantages[0])
        done, total = hear.call_args.args
        assert done == total  # what was announced is what was needed
    tuned = trace_group(session, prompt, **own, tuned=True)
    assert (tuned.finals / 255 - group.finals / 255).abs().max() > 0.01


def test_a_group_is_sampled_with_the_dtypes_and_the_guidance_of_training(run, session, tmp_path):
    """A group in others is not the one that the run learnt from."""
    text = run.config.read_text().replace("precision: float32", "precision: published")
    (tmp_path / "config.yaml").write_text(text)
    other = open_model(Run(tmp_path).read_config(mention=False), None, print)
    narrow = Precision(torch.float32, anchor=torch.bfloat16, step=torch.bfloat16)
    assert other.config.precision == narrow
    assert trace_group(other, PROMPT, plan=1).rewards.isfinite().all()
    sampling = session.config.sampling.model_copy(update={"guidance_scale": 1.0})
    other = replace(session, config=session.config.model_copy(update={"sampling": sampling}))
    plain, guided = (trace_group(one, PROMPT, plan=1).finals for one in (other, session))
    assert plain.ne(guided).any() and session.policy.guidance_scale == 3.5


def test_a_group_may_look_at_other_granularities(session):
    own = trace_group(session, PROMPT, plan=1)
    assert offered_granularities(session) == [1, 2, 3] and own.plan.tail_names == (1, 2)
    other = trace_group(session, PROMPT, plan=1, granularities=[3, 1])
    algorithm = replace(session.config.algorithm, granularities=(1, 3))
    assert other.plan == algorithm.plans(4)[1] and len(other.finals) == 2
    assert torch.equal(other.noised, own.noised)
    levels = other.finals[0].int() - own.finals[0].int()
    assert levels.abs().max() <= 1  # of 8 bits, where rounding to them differs
    advantages = algorithm.advantages(other.rewards[None], session.weights)[0]
    assert torch.equal(other.advantages, advantages)


def test_predictions_end_where_the_plain_walk_ends(session):
    group = trace_group(session, PROMPT, seed=5, plan=1)
    policy, sigmas = session.policy, sigma_grid(4, 3.0)
    with session.policy.base(), torch.no_grad():
        cond = policy.encode([PROMPT])
        x = policy.noise([generator_for(5, "rollout", 0, 0, "initial")])
        final = policy.decode(Engine(policy=policy, cond=cond, sigmas=sigmas).sample(x))
        first = policy.decode(x - policy.velocity(x, sigmas[:1], cond))
    assert group.predictions.shape == (4, 3, 32, 32)
    assert near(group.predictions[-1:], final) and near(group.predictions[:1], first)


def learning(tiny_config, name, *overrides):
    words = [f"algorithm.name={name}", "algorithm.group_size=3", *BRIGHT, *overrides]
    return open_model(load_config(str(tiny_config), words), None, print)


def test_what_cannot_be_drawn_or_traced_is_named(session, tiny_config, tmp_path):
    def learnt(name):
        return learning(tiny_config, name, "sampling.num_steps=6")

    testbed = config_of_model("testbed", None, 3.5, None)
    best = {"control": Control(best_of=2)}
    for message, call in {
        "write a prompt": lambda: draw(session, " \n"),
        "501 characters; 500 are allowed": lambda: draw(session, "a" * (MAX_PROMPT + 1)),
        "needs a reward": lambda: draw(replace(session, rewards={}), PROMPT, **best),
        "choose granularities of 1, 2, 3": lambda: trace_group(session, PROMPT, granularities=[]),
        "no stochastic step": lambda: trace_group(learnt("diffusion_nft"), PROMPT),
        "no group to compare": lambda: trace_group(learnt("refl"), PROMPT),
        "the weights do not fit testbed": lambda: open_model(testbed, tmp_path, print),
    }.items():
        with pytest.raises(UserError, match=message):
            call()


STOCHASTIC = [
    name
    for name, kind in ALGORITHMS.items()
    if kind().kernel(sigma_grid(8)) is not no_kernel and not kind.uses_rewards
]


@pytest.mark.parametrize("name", few(STOCHASTIC, ("g2rpo", "flow_grpo", "mixgrpo").__contains__))
def test_every_algorithm_with_stochastic_steps_has_a_group_of_the_plans_of_its_seed(
    tiny_config, name
):
    session = learning(tiny_config, name, "sampling.num_steps=8", "trainer.seed=2", *fits(name))
    assert session.plans == session.config.algorithm.plans(8, 0, 2)
    group = trace_group(session, PROMPT, plan=len(session.plans) - 1)
    shared = group.plan.shared_noise
    assert (group.predictions is not None) == shared
    assert group.noised.shape == (3, 3, 32, 32) and group.finals.shape[1:] == (3, 3, 32, 32)
    assert group.advantages.shape == (3,) and group.advantages.abs().sum() > 0
    assert group.noised_at == max(step for step in group.plan.stochastic if group.plan.trains(step))
    html = trace_html(group)
    assert html.count("<li") == 3 + 8 * shared and ("No anchor" in html) != shared


@pytest.fixture(scope="module")
def group(testbed):
    return trace_group(testbed, "two blue squares", seed=1)


@pytest.mark.parametrize(
    ("scores", "marks"),
    [
        (torch.arange(12.0).roll(3).tolist(), ["best", *[""] * 10, "worst"]),
        ([1.0] * 5 + [0.0] * 7, ["best"] * 5 + ["worst"] * 7),
        ([1.0] * 12, [""] * 12),
    ],
    ids=["all differ", "ties", "silent"],
)
def test_members_are_ranked_and_the_ends_are_marked(testbed, group, scores, marks):
    rewards = torch.tensor(scores).expand_as(group.rewards)
    advantages = testbed.config.algorithm.advantages(rewards[None], testbed.weights)[0]
    html = trace_html(replace(group, rewards=rewards, advantages=advantages))
    cards = re.findall(r'<li class="(?:g2-(\w+))?">\n<header><span>member (\d+)', html)
    order = sorted(range(12), key=lambda member: -scores[member])
    assert cards == [(mark, str(member + 1)) for mark, member in zip(marks, order, strict=True)]
    told = re.findall(r"<dt>advantage</dt><dd[^>]*><b>([^<]*)", html)
    # two decimals are written
    expected = pytest.approx(advantages[order].tolist(), abs=0.005)
    assert [float(text.replace("−", "-")) for text in told] == expected
    assert ("A silent group" in html) == (not any(marks))


def test_a_group_without_a_score_says_so_and_has_no_best(testbed):
    group = trace_group(testbed, "a <i>dog</i>", seed=1)
    assert group.rewards.isnan().all() and (group.advantages == 0).all()
    html = trace_html(group)
    assert "<b>No score</b> by scene_accuracy" in html and "all advantages are 0" in html
    assert "<i>dog" not in html and "▲ best" not in html


# --- what it opens with, and the command ----------------------------------------------------------


def values(right=None, **scores):
    """Scores by reward, and verdicts."""
    every = {**scores, **({} if right is None else {RIGHT: right})}
    return {name: torch.tensor(own, dtype=torch.float32) for name, own in every.items()}


OPENINGS = """
0 1 0 0 1 -> 0 1 1 1 0 -> 2 -> the first of the 2 held-out prompts (of 5) that the base model draws wrong
nan 0 0 1 1 -> 1 nan 0 1 1 -> 0 -> the first of 5 held-out prompts: there is none that the base
1 1 1 1 0 -> 0 0 1 1 1 -> 4 -> the tuned one right; 2 became wrong.
"""


@pytest.mark.parametrize(("base", "tuned", "number", "rule"), rows(OPENINGS))
def test_the_demo_opens_on_the_first_prompt_that_became_right(base, tuned, number, rule):
    scored = [values([*map(float, of.split())], a=[0.0] * 5) for of in (base, tuned)]
    chosen, said = opening(*scored, ["a"])
    assert str(chosen) == number and said.startswith("This opens on ") and rule in said


def test_without_right_and_wrong_it_opens_where_every_trained_score_rose(run, tmp_path):
    base = values(a=[0, 0, 0, 0], b=[5, 5, 5, 5], judge=[1, 1, 1, 1])
    tuned = values(a=[1, math.nan, 0.1, 0.2], b=[4, 6, 5.1, 6], judge=[2, 2, 0, 0])
    number, said = opening(base, tuned, ["a", "b"])
    assert number == 2 and said.endswith("on which training raised a and b; none fell.")
    copy = Run(shutil.copytree(run.path, tmp_path / "copy"))
    shutil.rmtree(copy.path / "scores")
    assert opening_of(read_runs([copy.path])[0]) == FIRST_PROMPT


def test_a_run_with_a_damaged_table_of_scores_is_shown(run, session, tmp_path, monkeypatch):
    copy, said = Run(shutil.copytree(run.path, tmp_path / "copy")), []
    copy.scores(0).write_bytes(b"no\n")
    monkeypatch.setattr("g2rpo.lab.demo.command.open_model", lambda *asked: session)
    monkeypatch.setattr("g2rpo.lab.page.serve_until", lambda *asked: None)
    where = Address("127.0.0.1", free_port())
    demo(copy.path, copy.read_config(), None, where, emit=lambda event: said.append(event.text))
    assert any("log tells nothing" in line for line in said) and said[-1] == "stopped"


REFUSED = """
--host 127.0.0.1 -> name a run, or a pipeline with --model
runs/one MODEL -> name a run, or a pipeline with --model
nowhere -> nowhere is no run directory
begun -> has no weights yet
runs/one --rewards brightness -> --rewards is for --model
MODEL --guidance -1 -> guidance_scale: input should be greater than or equal to 0
--model /no/such -> /no/such: is no directory
MODEL --rewards brigthness -> Did you mean 'brightness'?
MODEL --rewards bad.yaml -> rewards.brightness.wieght
MODEL --host 0.0.0.0 -> without a token
MODEL --token-env BLANK -> is not set
MODEL -> cannot serve on 127.0.0.1:
MODEL --weights /no/such -> /no/such: is no folder and no .safetensors file
"""


@pytest.mark.parametrize(("words", "message"), rows(REFUSED))
def test_wrong_input_is_one_message_before_anything_is_loaded(
    refuses, run, tmp_path, monkeypatch, words, message
):
    monkeypatch.setenv("BLANK", " \n")
    monkeypatch.setattr("g2rpo.lab.demo.command.open_model", lambda *asked: pytest.fail("loaded"))
    (tmp_path / "bad.yaml").write_text("brightness: {wieght: 2}")
    (tmp_path / "begun").mkdir()
    shutil.copy(run.config, tmp_path / "begun")
    words = words.replace("MODEL", "--model testbed")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert message in refuses(f"demo {words} --port {taken.getsockname()[1]}")


@pytest.mark.parametrize(
    ("model", "message"), [("testbed", "pip install gradio"), ("/no/such", "is no directory")]
)
def test_without_gradio_the_extra_is_named_after_all_other_mistakes(
    capsys, monkeypatch, model, message
):
    monkeypatch.setitem(sys.modules, "gradio", None)
    # if another test has imported them
    for module in ("demo.app", "teach.page", "page"):
        monkeypatch.delitem(sys.modules, f"g2rpo.lab.{module}", raising=False)
        monkeypatch.delattr(f"g2rpo.lab.{module}", raising=False)
    assert message in refused(capsys, "demo", "--model", model, "--port", free_port())


def test_an_input_picture_is_an_uploaded_one(tmp_path, monkeypatch):
    """Gradio checks only paths that are marked as files, which a question need not do."""
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "uploads"))
    from gradio.data_classes import ImageData

    box = gr.Image(type="filepath")
    only_uploads(box)
    Path(box.GRADIO_CACHE).mkdir()
    inside = picture(Path(box.GRADIO_CACHE) / "white.png")
    assert box.preprocess(None) is None
    assert Path(box.preprocess(ImageData(path=inside))).exists()
    for path in (picture(tmp_path / "private.png"), f"{box.GRADIO_CACHE}/../private.png", None):
        with pytest.raises(gr.Error, match="uploaded"):
            box.preprocess(ImageData(path=path))
