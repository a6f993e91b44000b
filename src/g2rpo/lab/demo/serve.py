"""Serves a run's model, or any pipeline, in the browser."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path

import torch

from g2rpo.app.events import Emit, Line, silent
from g2rpo.app.serving import check_address, token_for
from g2rpo.assembly import components
from g2rpo.assembly.prompts import build_prompts
from g2rpo.assembly.rewards import build_rewards
from g2rpo.core.errors import RewardFailed, UserError
from g2rpo.core.statistics import Comparison
from g2rpo.evaluation.sampler import Sampler
from g2rpo.lab.demo.opening import Opening, opening_of
from g2rpo.lab.demo.session import DemoModel, Tuned, draw_pair, trace_group
from g2rpo.lab.demo.settings import RECIPES, TAUGHT, DemoSettings, demo_facts
from g2rpo.lab.report.history import RunHistory, read_runs
from g2rpo.lab.teach.background import Lesson
from g2rpo.lab.teach.commands import opened, teach_config
from g2rpo.lab.teach.session import Session as Taught
from g2rpo.lab.web import needing_gradio
from g2rpo.run.run import Run, check_weights
from g2rpo.runtime.memory import batch_sizes
from g2rpo.training.reward_states import take_stored

EXAMPLES = 4
Say = Callable[[str], None]


def open_session(settings: DemoSettings, weights: Path | None, notify: Say, heldout: Sequence[str] = ()) -> DemoModel:
    """Builds the objects of `settings`, and loads tuned weights."""
    device = components.pick_device(settings.policy.device)
    rewards, judges = (build_rewards(table, device) for table in (settings.rewards, settings.judges))
    policy = components.build_policy(settings.policy, tuning="frozen", keep_base=True)
    policy.text.park()  # they are on the device only while they encode
    tuned: Tuned = "nothing"
    if weights is not None:
        components.load_weights(policy, weights, settings.policy.path)
        take_stored({**rewards, **judges}, weights.parent, notify)
        tuned = "adapter" if policy.tuning.own else "all weights"
    steps = settings.steps or settings.sampling.num_steps
    shift = settings.sampling.shift
    return DemoModel(
        sampler=Sampler(policy=policy, shift=shift, num_steps=steps, seed=settings.seed, batch_size=1, decode_batch_size=1),
        algorithm=settings.algorithm,
        sampling=settings.sampling,
        precision=settings.precision,
        sizes=batch_sizes(settings.sampling.batch_size, settings.sampling.decode_batch_size, 1, policy.device, notify),
        rewards=rewards,
        weights=torch.tensor([entry.weight for entry in settings.rewards.values()]),
        judges=judges,
        tuned=tuned,
        heldout=heldout,
        **({"explain": EXPLAIN[settings.policy.path]} if settings.policy.path in EXPLAIN else {}),
    )


def _grammar(prompt: str) -> str:
    """Why a prompt is none of the testbed's scenes; "" if it is one."""
    from g2rpo.testbed.grammar import parse

    try:
        parse(prompt)
    except ValueError as error:
        return str(error)
    return ""


def _spelling(prompt: str) -> str:
    """The same for its words."""
    from g2rpo.testbed.words.language import INK_COLOURS, parse_word

    wanted = "a word of three to six letters in quotes and a colour, such as 'tiger' in red"
    return "" if parse_word(prompt) else f"it takes {wanted} ({', '.join(INK_COLOURS)})"


EXPLAIN = {"testbed": _grammar, "words": _spelling}


def demo(
    run: Path | None,
    settings: DemoSettings,
    weights: Path | None,
    *,
    host: str,
    port: int,
    token_env: str | None,
    stop: threading.Event | None = None,
    emit: Emit = silent,
) -> None:
    """Serves the demo until interrupted, or until `stop` is set."""
    token = token_for(host, token_env)
    own_weights = run is not None and weights is None
    if run is not None:
        weights = weights or Run(run).weights
    if weights is not None:
        check_weights(weights)
    settings.check()
    check_address(host, port)
    with needing_gradio("the demo"):
        from g2rpo.lab.demo import app
        from g2rpo.lab.web.page import serve_until
    from g2rpo.lab.demo.views import run_html

    def say(words: str) -> None:
        emit(Line(words))

    say(f"{settings.title}: building the policy and {len(settings.rewards) + len(settings.judges)} rewards ...")
    heldout = _heldout(settings, say)
    session = open_session(settings, weights, say, heldout)
    log, opening = _history(run, session if own_weights else None, say)
    if run is None and weights is not None:
        settings = replace(settings, training="with and without tuned weights")
    examples = [str(prompt) for prompt in dict.fromkeys([*heldout[opening.number :][:1], *heldout])][:EXAMPLES]
    drawn, group = _first_views(settings, session, examples[0], opening, say) if examples else ("", "")
    report = (lambda: run_html(read_runs([run])[0])) if run is not None else None
    lesson, teaching = _lesson(settings.policy.path, emit)
    page = app.demo_page(
        app.Content(session, settings.title, demo_facts(settings, log), examples, drawn, group, teaching, report)
    )
    uploads = session.input_pictures[1] > 0
    try:
        serve_until(stop or threading.Event(), page, host, port, token, emit, "ends with Ctrl-C", uploads)
        say("stopped")
    finally:
        if lesson is not None:
            lesson.finish()


def _lesson(path: str, emit: Emit) -> tuple[Lesson | None, Callable[[], None] | None]:
    """A session of `g2rpo teach` on an embedded model, and what adds its tab; none of other models, which would be in memory
    twice."""
    if path not in RECIPES:
        return None, None
    from g2rpo.lab.teach.page import teach_tab

    recipe, unguarded = RECIPES[path][1], TAUGHT[path]
    lesson = Lesson(partial(opened, recipe, unguarded, emit=emit))

    def kept(taught: Taught, table: dict[str, Comparison]) -> str:
        folder = taught.trainer.run.path
        changes = ", ".join(f"{name} {one.base:.3g} → {one.tuned:.3g} ± {one.error:.2g}" for name, one in table.items())
        return f'<div class="g2"><p>Kept in {escape(str(folder))}: {escape(changes)}.</p></div>'

    return lesson, partial(teach_tab, lesson, teach_config(recipe, unguarded, lambda words: None).algorithm.group_size, kept)


def _heldout(settings: DemoSettings, say: Say) -> Sequence[str]:
    """The held-out prompts of `settings`; none if their source cannot be read."""
    if not settings.prompts:
        return []
    try:
        return build_prompts(settings.prompts, "evaluation.prompts")[: settings.num_prompts]
    except UserError as error:
        say(f"no examples: {error}")
        return []


def _history(run: Path | None, session: DemoModel | None, say: Say) -> tuple[RunHistory | None, Opening]:
    """The log of a run, and what a page about its own weights in `session` opens with."""
    if run is None:
        return None, Opening()
    log = None
    try:
        log = read_runs([run])[0]
        if session is not None:
            return log, opening_of(log, {**session.rewards, **session.judges}, list(session.rewards))
    except UserError as error:
        say(f"the run's log tells nothing: {error}")
    return log, Opening()


def _first_views(settings: DemoSettings, session: DemoModel, prompt: str, opening: Opening, say: Say) -> tuple[str, str]:
    """HTML of the drawing and the group that the page opens with; of large models no group, which takes minutes."""
    from g2rpo.lab.demo.views import drawing_html, trace_html

    say("drawing a held-out prompt to open with ...")
    scale, seed, steps = session.policy.guidance_scale, session.sampler.seed, session.sampler.num_steps
    drawn = group = ""
    try:
        drawing = draw_pair(session, prompt, seed=seed, steps=steps, guidance=scale)
        drawn = drawing_html(drawing, opening.rule)
        if settings.policy.path in RECIPES:
            group = trace_html(trace_group(session, prompt, seed=seed, plan=0, tuned=False))
    except (UserError, RewardFailed) as error:
        say(f"it was not drawn: {error}")
    return drawn, group
