"""The demo's views: Gradio's controls around the pictures of `views`. Nothing is computed here.

Importing this module imports Gradio. One question at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from g2rpo.core.errors import UserError
from g2rpo.lab.demo import views
from g2rpo.lab.demo.drawing import (
    draw,
    offered_granularities,
    own_granularities,
    plan_label,
    trace_group,
)
from g2rpo.lab.demo.model import MAX_PROMPT, DemoModel
from g2rpo.lab.page import ONE_AT_A_TIME, disclosed, empty, gr, with_messages
from g2rpo.lab.report.history import read_runs
from g2rpo.train.evaluation.controls import EARLY, Control, offers
from g2rpo.train.evaluation.sampler import Drawing

LATEST_QUESTION = {**ONE_AT_A_TIME, "trigger_mode": "always_last"}
"""A click during an answer is queued with the settings at that time; Gradio's default drops it
silently."""
TO_OUTPUT = """() => {
  const behavior = matchMedia("(prefers-reduced-motion: reduce)").matches ? "instant" : "smooth";
  if (innerWidth < 640) document.getElementById("%s").scrollIntoView({behavior});
}"""
CLEAR_MESSAGES = "() => document.querySelectorAll('.toast-close').forEach(button => button.click())"
"""Removes messages about earlier questions."""
OFFERED_SETTINGS = {**offers(), **offers(Drawing)}
OF_ALL = ("steps", "guidance", "strength")
"""The settings of all pictures; the others are of the base model's further one."""
FIRST_VALUES = {"strength": 1, "noise": 1}
"""The values of settings that do not begin with their smallest one."""
MAX_SEED = 2**53 - 1
"""The largest exact integer in JavaScript."""
SIDES = ["base model", "after training"]


def draw_view(model: DemoModel, examples: Sequence[str], opening: str, tab: gr.Tab) -> None:
    """A prompt drawn with base and tuned weights; `opening` is HTML of a drawing."""

    def answer(prompt: str, picture: str | None, seed: Any, *values: Any) -> str:
        given = dict(zip(shown, values, strict=True))
        strength = given.pop("strength")
        drawn = draw(
            model,
            prompt,
            seed=whole_number(seed),
            strength=strength,
            control=control_of(given, model),
            images=[picture] if picture else [],
        )
        return views.drawing_html(drawn)

    shown: dict[str, gr.Component] = {}
    with gr.Row():
        with gr.Column(scale=4, min_width=300):
            box, picture = _asked(model, examples)
            go = gr.Button("Draw", variant="primary", elem_id="draw")
            _examples(box, examples)
            with _folded("Settings", "settings"):
                seed = _seed(model)
                shown |= {name: _setting(model, name) for name in OF_ALL}
            with _folded("Without training", "knobs"):
                gr.HTML(
                    '<p class="g2-soft">The base model draws once more with these, and the price is shown.</p>'
                )
                free = [name for name in OFFERED_SETTINGS if name not in OF_ALL]
                shown |= {name: _setting(model, name) for name in free}
        with gr.Column(scale=7, min_width=300):
            words = "Base and tuned, from the same noise, appear here."
            out = gr.HTML(opening or empty(words), elem_id="drawing")
    _asks([go.click, box.submit], answer, [box, picture, seed, *shown.values()], out)


def control_of(given: Mapping[str, Any], model: DemoModel) -> Control:
    """The settings that a page sent; without guidance by hand nothing of it."""
    if not given["cfg"]:
        given = {
            name: value
            for name, value in given.items()
            if OFFERED_SETTINGS[name].needs != "guidance by hand"
        }
    own = {} if model.acts("own guidance") else {"guidance": None}
    return Control.model_validate({**given, **own}, strict=False)


def _setting(model: DemoModel, name: str) -> gr.Component:
    """The slider or the text field of a setting, hidden where it does not act."""
    offer, count = OFFERED_SETTINGS[name], model.sampler.num_steps
    own = {
        "steps": count,
        "guidance": model.policy.guidance_scale,
        "guided_steps": max(1, round(EARLY * count)),
    }
    shown = {"label": offer.label, "info": offer.help, "visible": model.acts(offer.needs)}
    if offer.range is None:
        return gr.Textbox("", max_length=MAX_PROMPT, **shown)
    low, high, step = offer.range
    value = own.get(name, FIRST_VALUES.get(name, low))
    high = count if name == "guided_steps" else max(high, value)
    return gr.Slider(low, high, value, step=step, **shown)


@contextmanager
def _folded(label: str, name: str) -> Iterator[None]:
    """A button, and below it what it makes appear."""
    button = gr.Button(label, size="sm", elem_id=f"to-{name}")
    with gr.Column(elem_id=name, elem_classes="g2-closed") as content:
        yield
    disclosed(button, content)


def learn_view(model: DemoModel, examples: Sequence[str], opening: str, tab: gr.Tab) -> None:
    """One group of the algorithm; `opening` is HTML of one."""
    plans = [(plan_label(plan), number) for number, plan in enumerate(model.plans)]
    offered = offered_granularities(model)

    def answer(
        prompt: str,
        picture: str | None,
        plan: int,
        seed: Any,
        side: str,
        grains: list[int],
        progress: Any = gr.Progress(),  # noqa: B008
    ) -> str:
        group = trace_group(
            model,
            prompt,
            seed=whole_number(seed),
            plan=plan,
            tuned=side == SIDES[1],
            granularities=grains if offered else None,
            images=[picture] if picture else [],
            on_progress=lambda done, total: progress((done, total), unit="evaluations"),
        )
        return views.trace_html(group)

    with gr.Row(equal_height=False):
        with gr.Column(scale=4, min_width=300):
            box, picture = _asked(model, examples)
            _examples(box, examples)
        with gr.Column(scale=6, min_width=300):
            with gr.Row():
                plan = gr.Dropdown(plans, value=0, label="Noise enters at")
                seed = _seed(model)
                side = gr.Radio(
                    SIDES, value=SIDES[0], label="Weights", visible=model.tuned != "nothing"
                )
                grains = gr.CheckboxGroup(
                    offered,
                    value=own_granularities(model),
                    label="Granularities",
                    visible=bool(offered),
                )
            go = gr.Button("Branch", variant="primary", elem_id="branch")
    words = "One group of the algorithm appears here: the anchor, its branches, their advantages."
    out = gr.HTML(opening or empty(words), elem_id="group")
    _asks([go.click, box.submit], answer, [box, picture, plan, seed, side, grains], out)


def run_view(run: Path, tab: gr.Tab) -> None:
    """The report of a run, as it is when it is looked at."""

    shown = gr.HTML(empty("Reading the run …"))
    tab.select(
        with_messages(lambda: views.run_html(read_runs([run])[0])), None, shown, **ONE_AT_A_TIME
    )


def _asked(model: DemoModel, examples: Sequence[str]) -> tuple[gr.Textbox, gr.Image]:
    """The prompt, and the input picture for models that edit; without one a held-out prompt has its
    own."""
    box = gr.Textbox(
        examples[0] if examples else "",
        label="Prompt",
        info=f"The model knows {model.knows}." if model.knows else None,
        lines=1,
        max_lines=5,
        max_length=MAX_PROMPT,
    )
    takes, label = model.input_pictures[1] > 0, "Input picture; held-out prompts have their own"
    picture = gr.Image(
        type="filepath", sources=["upload"], label=label, height=180, visible=takes, buttons=[]
    )
    only_uploads(picture)
    return box, picture


def only_uploads(box: gr.Image) -> None:
    """Gradio opens any path that a question names, unless the question says that it is a file's;
    `box` takes uploaded pictures only."""
    read = box.preprocess

    def preprocess(payload: Any) -> Any:
        folder = Path(box.GRADIO_CACHE).resolve()
        if payload and not Path(payload.path or "/").resolve().is_relative_to(folder):
            raise gr.Error("An input picture is uploaded.", print_exception=False)
        return read(payload)

    # a subclass would write its own stub file into the package
    box.preprocess = preprocess


def whole_number(seed: float | None) -> int:
    """UserError for a seed that is none; Gradio's own check writes a traceback."""
    if seed is None or not (0 <= seed <= MAX_SEED and seed == int(seed)):
        raise UserError(f"the seed should be a whole number from 0 to {MAX_SEED}")
    return int(seed)


def _seed(model: DemoModel) -> gr.Number:
    return gr.Number(model.sampler.seed, label="Seed")


def _examples(box: gr.Textbox, examples: Sequence[str]) -> None:
    if examples:
        gr.Examples(
            [[example] for example in examples],
            box,
            label="Held-out prompts",
            api_visibility="private",
        )


def _asks(events: Sequence[Any], answer: Any, inputs: Sequence[Any], out: gr.HTML) -> None:
    """Shows in `out` the answer to each of these events."""
    gr.on(events, None, js=CLEAR_MESSAGES, api_visibility="private")
    asked = gr.on(events, with_messages(answer), inputs, out, **LATEST_QUESTION)
    asked.success(None, js=TO_OUTPUT % out.elem_id)
