"""The page of `g2rpo teach`: a group to choose in, and beside it what has changed.

Importing this module imports Gradio.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from html import escape
from typing import Any

from torch import Tensor

from g2rpo.core.errors import RewardFailed, UserError, counted
from g2rpo.core.statistics import percent
from g2rpo.lab.page import ONE_AT_A_TIME, gr
from g2rpo.lab.report.page import templates_of
from g2rpo.lab.report.pictures import input_uris, picture_uri
from g2rpo.lab.teach.session import FIRST_ANSWERS, Session

USUAL_ANSWERS = 12
"""Answers of a session of usual length, which is the one that was measured (docs/teach.md)."""
SHOWN_SIDE = 320
"""Pixels a side, at most, of the pictures within the page."""
CLICKS = """
const say = (act, liked) => {
  const {round, digest} = element.querySelector("[data-round]").dataset;
  trigger("click", {act, liked, round: Number(round), digest});
};
element.addEventListener("click", event => {
  if (event.detail > 1) return;  // the second of a double click is of the group before
  const button = event.target.closest("button");
  if (!button) return;
  if (!button.dataset.member) return say(button.id, []);
  if (event.shiftKey) return button.classList.toggle("teach-liked");
  button.classList.add("teach-liked");
  say("answer", [...element.querySelectorAll(".teach-liked")].map(one => Number(one.dataset.member)));
});
document.addEventListener("keydown", event => {
  if (event.repeat || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea")) return;
  const place = "1234567890-=".indexOf(event.key), named = {n: "#answer", u: "#undo"}[event.key];
  element.querySelector(named ?? `[data-member="${place}"]`)?.click();
});
"""
"""A click on a picture or a button of the group, or its key; with Shift a picture waits for another
click."""

environment = templates_of("g2rpo.lab.teach")
environment.filters["input_uris"] = partial(input_uris, size=SHOWN_SIDE)


def teach_view(session: Session, stop: Callable[[], None], tab: gr.Tab) -> None:
    """A session that has begun; "Finish" calls `stop`."""
    with gr.Row(equal_height=False):
        with gr.Column(scale=7, min_width=320):
            grid = gr.HTML(js_on_load=CLICKS, elem_id="asked")
        with gr.Column(scale=4, min_width=280):
            beside, finish = gr.HTML(elem_id="beside"), gr.Button("Finish", elem_id="finish")
    timer = gr.Timer(1.0, active=False)
    outputs = [grid, beside, timer]

    def now() -> tuple[Any, ...]:
        """What is beside the group; it is asked again while the session learns."""
        learning = session.learning  # before what it stands for
        return beside_html(session, status(session, learning)), gr.Timer(active=learning)

    def everything() -> tuple[Any, ...]:
        return choice_html(session), *now()

    def told(event: gr.EventData) -> Any:
        """After an answer; another tab may have gone on."""
        try:
            session.hear(event._data)
        except (RewardFailed, UserError) as error:
            gr.Warning(escape(str(error)))
        return everything()

    gr.on(None, everything, None, outputs, **ONE_AT_A_TIME)
    grid.click(told, None, outputs, **ONE_AT_A_TIME)
    timer.tick(now, None, outputs[1:], show_progress="hidden", api_visibility="private")
    said = f"Finished. The terminal compares base and taught, and keeps {session.trainer.run.path}."
    ended = finish.click(lambda: beside_html(session, said), None, beside, **ONE_AT_A_TIME)
    ended.then(stop, **ONE_AT_A_TIME)


def choice_html(session: Session) -> str:
    """The group that is asked, each picture with its number."""
    group, usual = session.group, session.asked >= USUAL_ANSWERS
    guide = "Click the best picture. If several are good, hold Shift for all but the last. "
    guide += f"Group {session.asked + 1} of about {USUAL_ANSWERS}."
    return environment.get_template("choice.html").render(
        group=group,
        guide='Press "Finish", or click the best picture and go on.' if usual else guide,
        pictures=[_uri_of(session, image) for image in group.images],
    )


def beside_html(session: Session, said: str) -> str:
    """What has changed so far, and what is `said` of the session."""
    changed = [
        (prompt, *(_uri_of(session, image.float() / 255) for image in both))
        for prompt, *both in session.changed()
    ]
    return environment.get_template("beside.html").render(
        headline=session.headline, changed=changed, status=said
    )


def status(session: Session, learning: bool) -> str:
    """What the session does, and why, in a sentence or two."""
    learnt = session.learnt
    answers, head = len(learnt.choices), learnt.head
    if answers < FIRST_ANSWERS or head is None:
        return f"Learning begins after {FIRST_ANSWERS} answers."
    agrees = f"Its guess of your choice is right in {percent(head.agreed)} of pairs it has not seen; 50 % is chance."
    if learning:
        return f"Learning ... {agrees}"
    if not head.trusted:
        return f"{agrees} That is too little to learn from: answer on."
    if learnt.enough:
        return f"{agrees} Held-out pictures have changed enough: finish."
    said = f" On held-out pictures: {learnt.said}." if learnt.said else ""
    return f"{counted(answers, 'answer')}. {agrees}{said}"


def _uri_of(session: Session, image: Tensor) -> str:
    """A picture or a clip within the page."""
    return picture_uri(image, SHOWN_SIDE, session.trainer.policy)
