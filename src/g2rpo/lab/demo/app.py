"""The demo's views: Gradio's controls around the pictures of `views`. Nothing is computed here.

Importing this module imports Gradio. One question at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from g2rpo.core.errors import UserError
from g2rpo.evaluation.controls import CFG, DRAWS, EARLY, Control
from g2rpo.lab.demo import views
from g2rpo.lab.demo.drawing import MAX_STRENGTH, draw
from g2rpo.lab.demo.group import offered_granularities, own_granularities, plan_label, trace_group
from g2rpo.lab.demo.model import MAX_PROMPT, DemoModel
from g2rpo.lab.report.history import read_runs
from g2rpo.lab.web.page import ONE_AT_A_TIME, disclosed, empty, gr, with_messages
from g2rpo.rollout.guidance import guided_by_hand

QUESTION = {**ONE_AT_A_TIME, "trigger_mode": "always_last"}
"""A click during an answer is queued with the settings at that time; Gradio's default drops it silently."""
TO_OUTPUT = """() => {
  const behavior = matchMedia("(prefers-reduced-motion: reduce)").matches ? "instant" : "smooth";
  if (innerWidth < 640) document.getElementById("%s").scrollIntoView({behavior});
}"""
CLEAR = "() => document.querySelectorAll('.toast-close').forEach(button => button.click())"
"""Removes messages about earlier questions."""
MAX_STEPS, MAX_GUIDANCE = 100, 20.0
"""Allowed settings, besides a model's own."""
MAX_SEED = 2**53 - 1
"""The largest exact integer in JavaScript."""
SIDES = ["base model", "after training"]


def draw_view(model: DemoModel, examples: Sequence[str], opening: str, tab: gr.Tab) -> None:
    """A prompt drawn with base and tuned weights; `opening` is HTML of a drawing."""
    count, scale = model.sampler.num_steps, model.policy.guidance_scale
    by_hand = guided_by_hand(model.policy)

    def answer(prompt: str, picture: str | None, seed: Any, steps: int, guidance: float, strength: float, *knobs: Any) -> str:
        cfg, against, early, noise, best_of = knobs
        guided = {"cfg": cfg, "negative_prompt": against, "guided_steps": min(early, steps)} if cfg else {}
        drawing = draw(
            model,
            prompt,
            seed=whole(seed),
            steps=steps,
            guidance=guidance,
            strength=strength,
            control=Control(noise=noise, **guided),
            best_of=best_of,
            images=[picture] if picture else [],
        )
        return views.drawing_html(drawing)

    with gr.Row():
        with gr.Column(scale=4, min_width=300):
            box, picture = _asked(model, examples)
            go = gr.Button("Draw", variant="primary", elem_id="draw")
            _examples(box, examples)
            toggle = gr.Button("Settings", size="sm", elem_id="to-settings")
            with gr.Column(elem_id="settings", elem_classes="g2-closed") as settings:
                seed = _seed(model)
                steps = gr.Slider(1, max(MAX_STEPS, count), count, step=1, label="Steps")
                most = max(MAX_GUIDANCE, scale)
                guidance = gr.Slider(0, most, scale, step=0.1, label="Guidance", visible=model.policy.guidable)
                adapter = model.tuned == "adapter"
                strength = gr.Slider(0, MAX_STRENGTH, 1.0, step=0.05, label="Strength of the adapter", visible=adapter)
            more = gr.Button("Without training", size="sm", elem_id="to-knobs")
            with gr.Column(elem_id="knobs", elem_classes="g2-closed") as knobs:
                gr.HTML('<p class="g2-soft">What the base model draws with these, with its price.</p>')
                cfg = gr.Slider(0, 10, 0, step=0.5, label=f"Guidance by hand (0: none; {CFG:g} is usual)", visible=by_hand)
                against = gr.Textbox("", label="Guided away from this prompt", max_length=MAX_PROMPT, visible=by_hand)
                early = gr.Slider(
                    1, count, max(1, round(EARLY * count)), step=1, label="Guided steps, from the first", visible=by_hand
                )
                noise = gr.Slider(0, 1.5, 1, step=0.05, label="Initial noise, times")
                best_of = gr.Slider(1, DRAWS, 1, step=1, label="Best of several pictures", visible=bool(model.rewards))
        with gr.Column(scale=7, min_width=300):
            words = "Base and tuned, from the same noise, appear here."
            out = gr.HTML(opening or empty(words), elem_id="drawing")
    disclosed(toggle, settings)
    disclosed(more, knobs)
    _asks(
        [go.click, box.submit],
        answer,
        [box, picture, seed, steps, guidance, strength, cfg, against, early, noise, best_of],
        out,
    )


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
            seed=whole(seed),
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
                side = gr.Radio(SIDES, value=SIDES[0], label="Weights", visible=model.tuned != "nothing")
                grains = gr.CheckboxGroup(offered, value=own_granularities(model), label="Granularities", visible=bool(offered))
            go = gr.Button("Branch", variant="primary", elem_id="branch")
    words = "One group of the algorithm appears here: the anchor, its branches, their advantages."
    out = gr.HTML(opening or empty(words), elem_id="group")
    _asks([go.click, box.submit], answer, [box, picture, plan, seed, side, grains], out)


def run_view(run: Path, tab: gr.Tab) -> None:
    """The report of a run, as it is when it is looked at."""

    shown = gr.HTML(empty("Reading the run …"))
    tab.select(with_messages(lambda: views.run_html(read_runs([run])[0])), None, shown, **ONE_AT_A_TIME)


def _asked(model: DemoModel, examples: Sequence[str]) -> tuple[gr.Textbox, gr.Image]:
    """The prompt, and the input picture for models that edit; without one a held-out prompt has its own."""
    box = gr.Textbox(examples[0] if examples else "", label="Prompt", lines=1, max_lines=5, max_length=MAX_PROMPT)
    takes, label = model.input_pictures[1] > 0, "Input picture; held-out prompts have their own"
    return box, gr.Image(type="filepath", sources=["upload"], label=label, height=180, visible=takes, buttons=[])


def whole(seed: float | None) -> int:
    """UserError for a seed that is none; Gradio's own check writes a traceback."""
    if seed is None or not (0 <= seed <= MAX_SEED and seed == int(seed)):
        raise UserError(f"the seed should be a whole number from 0 to {MAX_SEED}")
    return int(seed)


def _seed(model: DemoModel) -> gr.Number:
    return gr.Number(model.sampler.seed, label="Seed")


def _examples(box: gr.Textbox, examples: Sequence[str]) -> None:
    if examples:
        gr.Examples([[example] for example in examples], box, label="Held-out prompts", api_visibility="private")


def _asks(events: Sequence[Any], answer: Any, inputs: Sequence[Any], out: gr.HTML) -> None:
    """Shows in `out` the answer to each of these events."""
    gr.on(events, None, js=CLEAR, api_visibility="private")
    asked = gr.on(events, with_messages(answer), inputs, out, **QUESTION)
    asked.success(None, js=TO_OUTPUT % out.elem_id)
