"""The demo's page: Gradio's controls around the pictures of `views`. Nothing is computed here.

Importing this module imports Gradio. One question at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from g2rpo.lab.demo import views
from g2rpo.lab.demo.session import MAX_PROMPT, MAX_STRENGTH, DemoModel, draw_pair, plan_labels, trace_group
from g2rpo.lab.web.page import ONE_AT_A_TIME, gr, with_messages

QUESTION = {**ONE_AT_A_TIME, "trigger_mode": "always_last"}
"""A click during an answer is queued with the settings at that time; Gradio's default drops it silently."""
TO_VIEW = "() => { document.getElementById('views').dataset.view = '%s' }"
TO_SETTINGS = """() => {
  const open = document.getElementById("settings").toggleAttribute("data-open");
  document.getElementById("to-settings").setAttribute("aria-expanded", open);
}"""
TO_OUTPUT = """() => {
  const behavior = matchMedia("(prefers-reduced-motion: reduce)").matches ? "instant" : "smooth";
  if (innerWidth < 640) document.getElementById("%s").scrollIntoView({behavior});
}"""
CLEAR = "() => document.querySelectorAll('.toast-close').forEach(button => button.click())"
"""Removes messages about earlier questions."""
WAITING = 16  # questions in the queue; more are refused


@dataclass(frozen=True)
class Content:
    """The content of the page: a session and its texts."""

    session: DemoModel
    title: str
    facts: str
    examples: Sequence[str] = ()
    """Prompts to try; the first is in the prompt's field."""
    opening: str = ""
    """HTML of the drawing shown when the page opens."""
    group: str = ""
    """HTML of the group shown below "How it learns" when the page opens."""
    lesson: Callable[[], None] | None = None
    """Adds the content of the tab "Teach", if the model can be taught here."""
    report: Callable[[], str] | None = None
    """Renders the run's report, if there is a run."""


def demo_page(content: Content) -> gr.Blocks:
    """The page, not yet served."""
    session = content.session
    prompt = content.examples[0] if content.examples else ""
    with gr.Blocks(title=f"{content.title} · g2rpo demo", analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.HTML(f'<div class="g2"><h1>{escape(content.title)}</h1><p class="g2-facts">{escape(content.facts)}</p></div>')
        names = {"draw": "Draw", "learn": "How it learns"}
        names |= ({"run": "The run"} if content.report else {}) | ({"teach": "Teach"} if content.lesson else {})
        with gr.Tabs(elem_id="views"):
            tabs = {name: gr.Tab(label) for name, label in names.items()}
        with _view(tabs["draw"], "draw"):
            _draw_view(content, session, prompt)
        with _view(tabs["learn"], "learn"):
            _learn_view(content, session, prompt)
        if content.lesson is not None:
            with _view(tabs["teach"], "teach"):
                content.lesson()
        if content.report is not None:
            with _view(tabs["run"], "run"):
                shown = gr.HTML(_empty("Reading the run …"))
            tabs["run"].select(with_messages(content.report), None, shown, **ONE_AT_A_TIME)
    page.queue(max_size=WAITING, api_open=False)
    return page


def _view(tab: gr.Tab, name: str) -> gr.Column:
    """The content that is shown while `tab` is selected.

    It is not the tab's own content because Gradio (6.31) renders that, and what a closed accordion holds, only when it is
    opened, and one frame later sets every value in it back to the first: on a slow machine that undoes what was typed. The
    style sheet hides it instead.
    """
    tab.select(None, js=TO_VIEW % name, api_visibility="private")
    return gr.Column(elem_id=f"view-{name}")


def _draw_view(content: Content, session: DemoModel, prompt: str) -> None:
    with gr.Row():
        with gr.Column(scale=4, min_width=300):
            box = _prompt(prompt)
            picture = _picture(session)
            go = gr.Button("Draw", variant="primary", elem_id="draw")
            _examples(content, box)
            toggle = gr.Button("Settings", size="sm", elem_id="to-settings")
            toggle.click(None, js=TO_SETTINGS, api_visibility="private")
            with gr.Column(elem_id="settings"):
                seed = _seed(session.sampler.seed)
                steps = gr.Slider(1, session.most_steps, session.sampler.num_steps, step=1, label="Steps")
                scale, most = session.policy.guidance_scale, session.most_guidance
                guidance = gr.Slider(0, most, scale, step=0.1, label="Guidance", visible=session.policy.guidable)
                strength = gr.Slider(
                    0, MAX_STRENGTH, 1.0, step=0.05, label="Strength of the adapter", visible=session.tuned == "adapter"
                )
        with gr.Column(scale=7, min_width=300):
            empty = _empty("Base and tuned, from the same noise, appear here.")
            out = gr.HTML(content.opening or empty, elem_id="drawing")

    def answer(prompt: str, picture: str | None, seed: Any, steps: Any, guidance: Any, strength: Any) -> str:
        settings = {"seed": seed, "steps": steps, "guidance": guidance, "strength": strength}
        return views.drawing_html(draw_pair(session, prompt, images=[picture] if picture else [], **settings))

    gr.on([go.click, box.submit], None, js=CLEAR, api_visibility="private")
    asks = gr.on(
        [go.click, box.submit], with_messages(answer), [box, picture, seed, steps, guidance, strength], out, **QUESTION
    )
    asks.success(None, js=TO_OUTPUT % "drawing")


def _learn_view(content: Content, session: DemoModel, prompt: str) -> None:
    labels = plan_labels(session.plans)
    sides = ["base model", "after training"]
    with gr.Row(equal_height=False):
        with gr.Column(scale=4, min_width=300):
            box = _prompt(prompt)
            picture = _picture(session)
            _examples(content, box)
        with gr.Column(scale=6, min_width=300):
            with gr.Row():
                plan = gr.Dropdown(list(zip(labels, range(len(labels)), strict=True)), value=0, label="Noise enters at")
                seed = _seed(session.sampler.seed)
                side = gr.Radio(sides, value=sides[0], label="Weights", visible=session.tuned != "nothing")
                grains = gr.CheckboxGroup(
                    session.offered, value=list(session.granularities), label="Granularities", visible=bool(session.offered)
                )
            go = gr.Button("Branch", variant="primary", elem_id="branch")
    empty = _empty("One group of the algorithm appears here: the anchor, its branches, their advantages.")
    out = gr.HTML(content.group or empty, elem_id="group")

    def answer(
        prompt: str,
        picture: str | None,
        plan: Any,
        seed: Any,
        side: str,
        grains: list[int],
        progress: Any = gr.Progress(),  # noqa: B008
    ) -> str:
        def report(done: int, total: int) -> None:
            progress((done, total), unit="evaluations")

        tuned, chosen = side == sides[1], grains if session.offered else None
        images = [picture] if picture else []
        asked = {"seed": seed, "plan": plan, "tuned": tuned, "granularities": chosen, "images": images}
        group = trace_group(session, prompt, **asked, on_progress=report)
        return views.trace_html(group)

    gr.on([go.click, box.submit], None, js=CLEAR, api_visibility="private")
    asks = gr.on([go.click, box.submit], with_messages(answer), [box, picture, plan, seed, side, grains], out, **QUESTION)
    asks.success(None, js=TO_OUTPUT % "group")


def _prompt(value: str) -> gr.Textbox:
    return gr.Textbox(value, label="Prompt", lines=1, max_lines=5, max_length=MAX_PROMPT)


def _picture(session: DemoModel) -> gr.Image:
    """The input picture, for models that edit; without one a held-out prompt has its own."""
    takes = session.input_pictures[1] > 0
    return gr.Image(
        type="filepath",
        sources=["upload"],
        label="Input picture; held-out prompts have their own",
        height=180,
        visible=takes,
        buttons=[],
    )


def _seed(value: int) -> gr.Number:
    return gr.Number(value, label="Seed")  # without bounds, because `session.checked` has the better message


def _examples(content: Content, box: gr.Textbox) -> None:
    if content.examples:
        gr.Examples([[example] for example in content.examples], box, label="Held-out prompts", api_visibility="private")


def _empty(words: str) -> str:
    return f'<div class="g2"><p class="g2-empty">{escape(words)}</p></div>'
