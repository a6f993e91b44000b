"""`g2rpo demo`: serves a run's model, or any pipeline, in the browser. It opens with a held-out prompt
that is chosen from the run's evaluations, and says why."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from g2rpo.config.schema import Config
from g2rpo.core.errors import RewardFailed, UserError, counted
from g2rpo.core.events import Emit, Line, silent
from g2rpo.core.statistics import RIGHT
from g2rpo.data.prompts import build_prompts
from g2rpo.lab.demo.drawing import draw, trace_group
from g2rpo.lab.demo.model import RECIPES, DemoModel, check_demo, open_model, training_of, what_it_is
from g2rpo.lab.report.history import RunHistory, SeedGroup, read_runs, summary_of
from g2rpo.lab.serving import Address, needing_gradio
from g2rpo.models.pipeline_files import check_weights
from g2rpo.train.run.folder import Run

OFFERED_EXAMPLES = 4
"""Held-out prompts that are offered."""
Say = Callable[[str], None]
Opening = tuple[int, str]
"""The number of the held-out prompt with which the demo opens, and why it was chosen."""
FIRST_PROMPT: Opening = 0, "This opens on the first held-out prompt."


def demo(
    run: Path | None,
    config: Config,
    weights: Path | None,
    where: Address,
    *,
    stop: threading.Event | None = None,
    emit: Emit = silent,
) -> None:
    """Serves the demo of a run, or of a model, until interrupted, or until `stop` is set."""
    own = run is not None and weights is None
    if run is not None:
        weights = weights or Run(run).weights
    if weights is not None:
        check_weights(weights)
    check_demo(config)
    where.check()
    with needing_gradio("the demo"):
        from g2rpo.lab.demo import app
        from g2rpo.lab.page import page_of, serve_until

    def say(words: str) -> None:
        emit(Line(words))

    title = f"Run {run.resolve().name}" if run is not None else config.policy.path
    say(f"{title}: building the policy and {counted(len(config.all_rewards), 'reward')} ...")
    model = open_model(config, weights, say, _heldout(config, say))
    facts, (number, rule) = list[str](), FIRST_PROMPT
    try:
        if run is not None:
            (log,) = read_runs([run])
            facts = summary_of(log)[:1]
            if own:
                number, rule = opening_of(log)
    except UserError as error:
        say(f"the run's log tells nothing: {error}")
    examples = [
        str(prompt) for prompt in dict.fromkeys([*model.heldout[number:][:1], *model.heldout])
    ][:OFFERED_EXAMPLES]
    drawn, group = _first_views(model, examples[0], rule, say) if examples else ("", "")
    views = {
        "Draw": partial(app.draw_view, model, examples, drawn),
        "How it learns": partial(app.learn_view, model, examples, group),
    }
    if run is not None:
        views["The run"] = partial(app.run_view, run)
    training = (
        training_of(config) if run else "with and without tuned weights" if weights else "as it is"
    )
    told = " ".join([what_it_is(config, training), *facts])
    page = page_of(title, "g2rpo demo", told, views)
    uploads = model.input_pictures[1] > 0
    serve_until(stop or threading.Event(), page, where, emit, "ends with Ctrl-C", uploads)
    say("stopped")


def opening_of(run: RunHistory) -> Opening:
    """The opening for a run, from its tables of scores; UserError if they are missing or
    damaged."""
    after = SeedGroup((run,)).judged_after
    return opening(run.scores(0), run.scores(*after), run.config.trained) if after else FIRST_PROMPT


def opening(
    base: Mapping[str, Tensor], tuned: Mapping[str, Tensor], names: Sequence[str]
) -> Opening:
    """The first prompt on which training helped: one that was wrong and is right or, if no reward
    defines right pictures, one on which the scores of all these `names` rose."""
    told = [RIGHT] if RIGHT in base and RIGHT in tuned else names
    rises = torch.stack([tuned[name] - base[name] for name in told])
    gained, lost = (rises > 0).all(0), (rises < 0).all(0)
    words, worse = f"on which training raised {' and '.join(names)}", "fell"
    if told == [RIGHT]:
        words, worse = "that the base model draws wrong and the tuned one right", "became wrong"
    count, others = int(gained.sum()), f"{int(lost.sum()) or 'none'} {worse}"
    if not count:
        rule = f"the first of {len(gained)} held-out prompts: there is none {words}, and {others}."
        return 0, f"This opens on {rule}"
    rule = f"the first of the {count} held-out prompts (of {len(gained)}) {words}; {others}."
    return int(gained.nonzero()[0]), f"This opens on {rule}"


def _heldout(config: Config, say: Say) -> Sequence[str]:
    """The held-out prompts; none if their source cannot be read."""
    if not config.evaluation.prompts:
        return []
    try:
        return build_prompts(config.evaluation.prompts, "evaluation.prompts")[
            : config.evaluation.num_prompts
        ]
    except UserError as error:
        say(f"no examples: {error}")
        return []


def _first_views(model: DemoModel, prompt: str, rule: str, say: Say) -> tuple[str, str]:
    """HTML of the drawing and the group that the page opens with; of large models no group, which
    takes minutes."""
    from g2rpo.lab.demo.views import drawing_html, trace_html

    say("drawing a held-out prompt to open with ...")
    drawn = group = ""
    try:
        drawn = drawing_html(draw(model, prompt), rule)
        if model.config.policy.path in RECIPES:
            group = trace_html(trace_group(model, prompt))
    except (UserError, RewardFailed) as error:
        say(f"it was not drawn: {error}")
    return drawn, group
