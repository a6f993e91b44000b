"""The page of `g2rpo teach`, and the same as a tab of the demo: the pictures of a group as buttons, and a fixed prompt before
and after. Nothing is computed here.

Importing this module imports Gradio.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from g2rpo.core.errors import UserError, counted
from g2rpo.core.input_pictures import read_inputs
from g2rpo.core.statistics import Comparison
from g2rpo.lab.report.pictures import data_uri, picture_uri
from g2rpo.lab.teach.background import InBackground, Lesson
from g2rpo.lab.teach.groups import AskedGroup
from g2rpo.lab.teach.session import AIM, DIRECT, FIRST, USUAL_ANSWERS, Session
from g2rpo.lab.web.page import ONE_AT_A_TIME, gr, with_messages
from g2rpo.monitor.clips import seconds_of

SHOWN_SIDE = 320
"""Pixels a side, at most, of the pictures within the page."""

KEYBOARD = """() => {
  if (window.taught) return;
  window.taught = true;
  const press = member => document.getElementById("member-" + member)?.click();
  document.addEventListener("click", event => {
    const picture = event.target.closest("[data-member]");
    if (picture) press(picture.dataset.member);
  });
  document.addEventListener("keydown", event => {
    if (event.target.closest("input, textarea") || !document.getElementById("asked").offsetParent) return;
    const picture = event.target.closest("[data-member]");
    const place = "1234567890-=".indexOf(event.key);
    if (picture && event.key === "Enter") press(picture.dataset.member);
    else if (place >= 0) press(place);
    else if (event.key === "n") document.getElementById("none").click();
    else if (event.key === "s") document.getElementById("skip").click();
    else if (event.key === "u") document.getElementById("undo").click();
  });
}"""
"""A click on a picture, or its key, presses its button, which lies outside the page: Gradio's HTML has no events of its own."""

FINISHED = """() => {
  document.body.toggleAttribute("data-finished", true);
  document.getElementById("status").textContent = "Finished. The terminal compares the model before and after on held-out "
    + "pictures and names the run's folder; this page can be closed.";
}"""
"""The style sheet hides what can no longer be used, and Gradio's message that the connection was lost."""
ASK_FIRST = """() => { document.getElementById("sure").toggleAttribute("data-open"); }"""
DIRECTLY = (
    "The model then learns from each click itself and no longer from a guess of your taste. That takes more clicks, "
    f"{DIRECT} groups for an update, and it learns from clicks at random too. Undo takes it back with the last answer."
)
BEGIN = f'"Begin" shows pictures of a prompt, of which you choose the best, some {USUAL_ANSWERS} times.'
EMPTY = f'<div class="g2"><p class="g2-empty">{BEGIN}</p></div>'


def teach_page(lesson: Lesson, title: str, stop: Callable[[], None]) -> gr.Blocks:
    """The page of a session that has begun, not yet served; its button "Finish" calls `stop`."""
    assert lesson.taught is not None
    size = lesson.taught.session.trainer.algorithm.group_size
    with gr.Blocks(title=f"{title} · g2rpo teach", analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.HTML(f'<div class="g2"><h1>{escape(title)}</h1></div>')
        everything, outputs, finish, _ = panel(lesson, size)
        finish.click(None, js=FINISHED, api_visibility="private")  # at once: the server ends before it could answer
        finish.click(stop, **ONE_AT_A_TIME)
        page.load(everything, None, outputs, js=KEYBOARD, **ONE_AT_A_TIME)
    page.queue(max_size=16, api_open=False)
    return page


def teach_tab(lesson: Lesson, size: int, kept: Callable[[Session, dict[str, Comparison]], str]) -> None:
    """The same within another page, in groups of `size`: a session that begins and ends with a button. `kept` tells what became
    of it."""
    with gr.Row():
        begin = gr.Button("Begin", variant="primary", scale=0, elem_id="begin")
    everything, outputs, finish, timer = panel(lesson, size)

    def begun() -> tuple[Any, ...]:
        if lesson.taught is None:
            lesson.begin()
        return *everything(), gr.Timer(active=True)

    def finished() -> tuple[Any, ...]:
        ended = lesson.finish()
        group, round, pair, _, version = everything()
        return group, round, pair, "" if ended is None else kept(*ended), version, gr.Timer(active=False)

    begin.click(with_messages(begun), None, [*outputs, timer], js=KEYBOARD, **ONE_AT_A_TIME)
    finish.click(with_messages(finished), None, [*outputs, timer], **ONE_AT_A_TIME)


def panel(lesson: Lesson, size: int) -> tuple[Callable[[], tuple[Any, ...]], list[Any], gr.Button, gr.Timer]:
    """The pictures and buttons of a session: the values of its outputs as they are now, these outputs, the button that is to
    finish it, and the timer that renews what changes while it learns, active if it has begun."""
    asked_at = time.monotonic()

    def everything() -> tuple[Any, ...]:
        nonlocal asked_at
        asked_at, taught = time.monotonic(), lesson.taught
        if taught is None:
            return EMPTY, 0, "", "", (-1, False)
        group = taught.group
        return choice_html(taught.session, group), group.round, *beside(taught)

    def beside(taught: InBackground) -> tuple[Any, ...]:
        version = taught.version  # before what it stands for
        return pair_html(taught), status(taught.session, taught.learning), (version, taught.learning)

    def renewed(shown: tuple[int, bool]) -> Any:
        taught = lesson.taught
        return gr.skip() if taught is None or tuple(shown) == (taught.version, taught.learning) else beside(taught)

    def acting(act: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        def acted(*arguments: Any) -> tuple[Any, ...]:
            if lesson.taught is None:
                raise UserError('nothing is asked; press "Begin"')
            act(lesson.taught, *arguments)
            return everything()

        return asking_again(acted)

    def voted(liked: Sequence[int], skipped: bool = False) -> Callable[..., tuple[Any, ...]]:
        def vote(taught: InBackground, round: int) -> None:
            seconds = time.monotonic() - asked_at
            taught.answer(liked, round=round, skipped=skipped, seconds=float(f"{seconds:.1f}"))

        return acting(vote)

    first, begun = everything(), lesson.taught
    asked, version = gr.State(first[1]), gr.State((-1, False))
    with gr.Row(equal_height=False):
        with gr.Column(scale=7, min_width=320, elem_id="choice"):
            grid = gr.HTML(first[0], elem_id="asked")
            with gr.Row(elem_id="members"):
                best = [gr.Button(str(member + 1), size="sm", elem_id=f"member-{member}") for member in range(size)]
            several = gr.CheckboxGroup([str(member + 1) for member in range(size)], label="or several", elem_id="several")
            with gr.Row():
                like = gr.Button("I like these", size="sm", min_width=120)
                none = gr.Button("None (n)", size="sm", min_width=120, elem_id="none")
                skip = gr.Button("Skip (s)", size="sm", min_width=120, elem_id="skip")
                undo = gr.Button("Undo (u)", size="sm", min_width=120, elem_id="undo")
        with gr.Column(scale=4, min_width=280):
            pair = gr.HTML(first[2], elem_id="pair")
            said = gr.HTML(first[3], elem_id="status")
            far = begun.session.strength if begun else 1.0
            strength = gr.Slider(0, 4, far, step=0.25, label="How far to go", elem_id="strength")
            direct = gr.Button("Clicks alone …", size="sm", elem_id="direct")
            with gr.Column(elem_id="sure"):
                gr.HTML(f'<div class="g2"><p>{escape(DIRECTLY)}</p></div>')
                with gr.Row():
                    sure = gr.Button("Learn from clicks alone", size="sm", min_width=140, elem_id="direct-sure")
                    keep = gr.Button("Keep the guess", size="sm", min_width=140)
            finish = gr.Button("Finish", size="sm", elem_id="finish")
    outputs = [grid, asked, pair, said, version]
    for member, button in enumerate(best):
        button.click(voted([member]), asked, outputs, **ONE_AT_A_TIME)
    none.click(voted([]), asked, outputs, **ONE_AT_A_TIME)
    skip.click(voted([], skipped=True), asked, outputs, **ONE_AT_A_TIME)
    undo.click(acting(InBackground.undo), None, outputs, **ONE_AT_A_TIME)
    gr.on([direct.click, sure.click, keep.click], None, js=ASK_FIRST, api_visibility="private")
    sure.click(acting(InBackground.learn_directly), None, outputs, **ONE_AT_A_TIME)
    strength.release(acting(InBackground.set_strength), strength, outputs, **ONE_AT_A_TIME)

    def liked(round: int, chosen: list[str]) -> tuple[Any, ...]:
        if not chosen:
            raise UserError('tick the pictures that you like first; "None (n)" says that none is good')
        return *voted([int(number) - 1 for number in chosen])(round), []

    like.click(asking_again(liked), [asked, several], [*outputs, several], **ONE_AT_A_TIME)
    timer = gr.Timer(1.0, active=begun is not None)
    timer.tick(renewed, version, outputs[2:], show_progress="hidden", api_visibility="private")
    return everything, outputs, finish, timer


def asking_again(act: Callable[..., Any]) -> Callable[..., Any]:
    """`act`, with `UserError` as a message beside which all stays as it is: an error's mark would cover the pictures."""

    @functools.wraps(act)
    def asked(*arguments: Any) -> Any:
        try:
            return act(*arguments)
        except UserError as error:
            gr.Warning(escape(str(error)))
            return gr.skip()

    return with_messages(asked)


def choice_html(session: Session, group: AskedGroup) -> str:
    """The group that is asked, each picture with its number."""
    pictures = "".join(
        f'<figure data-member="{member}" tabindex="0" role="button" aria-label="picture {member + 1}">'
        f'<img src="{_shown(session, image)}" alt=""><figcaption>{member + 1}</figcaption></figure>'
        for member, image in enumerate(group.images)
    )
    asked = f'<p class="g2-lead">{escape(guide(session))}</p><p class="g2-prompt"><b>{escape(str(group.prompt))}</b></p>'
    inputs = "".join(
        f'<img src="{data_uri(picture, SHOWN_SIDE)}" alt="input picture">' for picture in read_inputs(group.prompt)
    )
    given = f'<div class="teach-inputs">{inputs}</div>' if inputs else ""
    return f'<div class="g2">{asked}{given}<div class="teach">{pictures}</div></div>'


def pair_html(taught: InBackground) -> str:
    """A prompt by the base model and by the weights as they are."""
    sides = zip(("before", "now"), taught.pair, strict=True)
    figures = "".join(
        f'<figure><img src="{_shown(taught.session, image)}" alt=""><figcaption>{name}</figcaption></figure>'
        for name, image in sides
    )
    about = f"<p>Not trained on: {escape(str(taught.prompt))}</p>"
    return f'<div class="g2">{about}<div class="teach-pair">{figures}</div></div>'


def guide(session: Session) -> str:
    """What to do, how long it takes and what comes next, as one line."""
    if session.next >= USUAL_ANSWERS:
        return f'After {USUAL_ANSWERS} groups "Finish" compares before and after; or click the best picture, and go on.'
    return (
        f"Click the best picture. Group {session.next + 1} of about {USUAL_ANSWERS}, five minutes in all with a model of the "
        f'package; it learns from answer {FIRST} on. Then "Finish" compares before and after.'
    )


def status(session: Session, learning: bool) -> str:
    """What has been learnt so far, as text."""
    answers, changes = counted(session.answered, "answer"), counted(session.changes, "change")
    lines = [f"{answers}, {changes} of the weights." + " Learning …" * learning]
    if guards := [name for name in session.trainer.rewards if name != "clicks"]:
        lines.append(f"Trained on beside your clicks: {', '.join(guards)}. This moves pictures too.")
    head = session.head
    if session.answered < FIRST:
        lines.append(f"Learning begins after {FIRST} answers.")
    elif session.learnt.direct:
        lines.append("The model learns from the clicks alone, four groups at a time.")
    elif head is not None:
        a = head.agreement
        lines.append(
            f"Its guess of your taste agrees with you in {100 * a.mean:.0f} % of pairs "
            f"[{100 * max(0, a.low):.0f}, {100 * min(1, a.high):.0f}], in groups that it has not seen; 50 % is chance."
        )
        if head.trust == 0:
            lines.append('That is too little to learn from. "Clicks alone" learns without it.')
    if session.moved and not session.learnt.direct:
        lines.append(
            f"By this guess held-out pictures rose by {session.moved:.1f} of {AIM * session.strength:.2g} "
            "deviations; a person has not confirmed it."
        )
        if session.reached:
            lines.append('Learning pauses: look at "before" and "now". "How far to go" lets it learn on, "Finish" ends.')
    for look in session.brake.looks[-1:]:
        scores = ", ".join(f"{name} {one.base:.3g} → {one.tuned:.3g} ± {one.error:.2g}" for name, one in look.judges.items())
        lines.append(f"Held-out pictures: {scores}." + (f" Undone: {look.wrong}." if look.wrong else ""))
    return f'<div class="g2">{"".join(f"<p>{escape(line)}</p>" for line in lines)}</div>'


def _shown(session: Session, image: Any) -> str:
    """A picture or a clip within the page."""
    return picture_uri(image, SHOWN_SIDE, seconds_of(session.trainer.policy, len(image)))
