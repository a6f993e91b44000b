"""The view of `g2rpo teach` and of the demo's tab: a group to choose in, and a fixed prompt before
and after.

Importing this module imports Gradio.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from html import escape
from typing import Any

from torch import Tensor

from g2rpo.core.errors import RewardFailed, UserError, counted
from g2rpo.core.input_pictures import read_inputs
from g2rpo.core.statistics import Comparison
from g2rpo.lab.report.page import templates_of
from g2rpo.lab.report.pictures import data_uri, picture_uri
from g2rpo.lab.teach.blind import PAIRS
from g2rpo.lab.teach.pupil import AIM, DIRECT, ENOUGH, FIRST
from g2rpo.lab.teach.session import Lesson, Session
from g2rpo.lab.teach.told import Told
from g2rpo.lab.web.page import ONE_AT_A_TIME, disclosed, empty, gr
from g2rpo.monitor.clips import seconds_of

USUAL_ANSWERS = 20
"""Answers of a session of usual length, which is the one that was measured (docs/teach.md)."""
SHOWN_SIDE = 320
"""Pixels a side, at most, of the pictures within the page."""

SAYING = """
const ticked = () => [...element.querySelectorAll("input:checked")].map(box => {
  box.checked = false;  // the next group has the same boxes
  return Number(box.value);
});
const say = (act, liked) => {
  const {round, digest, pair} = element.querySelector("[data-round]").dataset;
  trigger("click", {act, liked, round: Number(round), digest, pair: pair !== undefined});
};
element.addEventListener("click", event => {
  if (event.detail > 1) return;  // the second of a double click is of the group before
  const button = event.target.closest("button");
  if (!button) return;
  const liked = ticked();  // also where they do not count: they would for the next group
  if (button.dataset.member) say("best", [Number(button.dataset.member)]);
  else say(button.id, button.id === "several" ? liked : []);
});
document.addEventListener("keydown", event => {
  const typing = event.target.closest("input:not([type=checkbox]), textarea");
  if (typing || event.repeat || event.ctrlKey || event.metaKey || event.altKey || !element.offsetParent) return;
  const place = "1234567890-=".indexOf(event.key), named = {n: "#none", s: "#skip", u: "#undo"}[event.key];
  element.querySelector(named ?? `[data-member="${place}"]`)?.click();
});
"""
"""A click on a picture or a button of the group, or its key."""
DIRECTLY = (
    "The model then learns from each click itself and no longer from a guess of your taste. That takes more clicks, "
    f"{DIRECT} groups for an update, and it learns from clicks at random too. Undo takes it back with the last answer."
)
BEGIN = (
    f'"Begin" shows pictures of a prompt, of which you choose the best, some {USUAL_ANSWERS} times.'
)

environment = templates_of("g2rpo.lab.teach")
environment.filters["quoted"] = lambda path: shlex.quote(str(path))
environment.filters["input_uris"] = lambda prompt: [
    data_uri(picture, SHOWN_SIDE) for picture in read_inputs(prompt)
]


def teach_view(lesson: Lesson, stop: Callable[[], None] | None, tab: gr.Tab) -> None:
    """A session that begins and ends with buttons; or has begun, and ends with the page, by
    `stop`."""
    with gr.Row():
        begin = gr.Button(
            "Begin", variant="primary", scale=0, elem_id="begin", visible=stop is None
        )
    with gr.Row(equal_height=False):
        with gr.Column(scale=7, min_width=320, elem_id="choice"):
            grid = gr.HTML(empty(BEGIN), js_on_load=SAYING, elem_id="asked")
        with gr.Column(scale=4, min_width=280):
            pair, said = gr.HTML(elem_id="pair"), gr.HTML(elem_id="status")
            far = f"1: {AIM:g} of a deviation beyond the error of the guess; then learning pauses."
            strength = gr.Slider(
                0, 4, 1, step=0.25, label="How far to go", info=far, elem_id="strength"
            )
            blind = gr.Button("Compare before and now", size="sm", elem_id="blind")
            direct = gr.Button("Clicks alone", size="sm", elem_id="direct")
            with gr.Column(elem_id="sure", elem_classes="g2-closed") as sure:
                gr.HTML(f'<div class="g2"><p>{escape(DIRECTLY)}</p></div>')
                directly = gr.Button("Learn from clicks alone", size="sm", elem_id="direct-sure")
            finish = gr.Button("Finish", size="sm", elem_id="finish")
    timer = gr.Timer(1.0, active=False)
    beside, outputs = [pair, said, timer], [grid, finish, pair, said, timer]

    def now() -> tuple[Any, ...]:
        """What is beside the group; it is asked again while the session learns."""
        session = lesson.session
        if session is None:
            shown = (
                (pair_html(lesson.ended[0]), kept_html(*lesson.ended)) if lesson.ended else ("", "")
            )
            return *shown, gr.Timer(active=False)
        learning = session.learning  # before what it stands for
        return pair_html(session), status(session, learning), gr.Timer(active=learning)

    def everything() -> tuple[Any, ...]:
        session = lesson.session
        ends = "Finish without comparing" if session and session.comparing else "Finish"
        shown = empty(BEGIN) if session is None else choice_html(session)
        return shown, gr.Button(ends), *now()

    def loaded() -> tuple[Any, ...]:
        """What a page shows that is just loaded: a session may have begun, with a strength of its
        own."""
        return *everything(), lesson.session.pupil.strength if lesson.session else 1

    def asked() -> Session:
        if lesson.session is None:
            raise UserError('nothing is asked; press "Begin"')
        return lesson.session

    def after(act: Callable[[], Any]) -> Any:
        """What is shown after `act`, with a message if that fails: another tab may have gone on."""
        try:
            act()
        except RewardFailed as error:
            gr.Warning(escape(str(error)))
            return gr.skip()
        except UserError as error:
            gr.Warning(escape(str(error)))
        return everything()

    def told(event: gr.EventData) -> Any:
        def act() -> None:
            session = asked()
            if event.act == "undo":
                session.undo()
            elif event.act == "back":
                session.go_back()
            elif event.pair:
                session.compare(event.liked, pair=event.round)
            elif session.comparing:  # begun since this tab showed its group
                raise UserError(
                    "a comparison comes first; this click does not count, and its group is asked again"
                )
            elif event.act == "several" and not event.liked:
                raise UserError(
                    'tick the pictures that you like first; "None (n)" says that none is good'
                )
            else:
                skipped = event.act == "skip"
                session.answer(event.liked, round=event.round, skipped=skipped, digest=event.digest)

        return after(act)

    def end() -> None:
        """Ends the session; a person is asked first whether it became better, unless they leave
        that."""
        session = lesson.session
        if session and not session.comparing and session.unconfirmed:
            session.begin_blind()
        else:
            lesson.finish()

    disclosed(direct, sure)
    gr.on(None, loaded, None, [*outputs, strength], **ONE_AT_A_TIME)
    begin.click(lambda: after(lesson.begin), None, outputs, **ONE_AT_A_TIME)
    grid.click(told, None, outputs, **ONE_AT_A_TIME)
    blind.click(lambda: after(lambda: asked().begin_blind()), None, outputs, **ONE_AT_A_TIME)
    directly.click(lambda: after(lambda: asked().learn_directly()), None, outputs, **ONE_AT_A_TIME)
    strength.release(
        lambda far: after(lambda: asked().set_strength(far)), strength, outputs, **ONE_AT_A_TIME
    )
    timer.tick(now, None, beside, show_progress="hidden", api_visibility="private")
    ended = finish.click(lambda: after(end), None, outputs, **ONE_AT_A_TIME)

    def close() -> None:
        if stop is not None and lesson.ended is not None:
            stop()

    if stop is not None:
        ended.then(close, **ONE_AT_A_TIME)


def choice_html(session: Session) -> str:
    """The group that is asked, each picture with its number; or the pair of a comparison."""
    test, said = session.comparing, ""
    if test is not None:
        number = len(test.answers)
        words = f"Which is better? Pair {number + 1} of {len(test.prompts)}, a minute in all; one is from before, one from now."
        prompt, images = test.prompts[number], test.pair()
    else:
        number, words, said = session.group.round, guide(session), verdict(session)
        prompt, images = session.group.prompt, list(session.group.images)
    return environment.get_template("choice.html").render(
        blind=test is not None,
        verdict=said,
        back=bool(said) and session.blind is not None and session.blind.verdict == "worse",
        round=number,
        digest="" if test else session.group.digest,
        prompt=prompt,
        guide=words,
        pictures=[_shown(session, image) for image in images],
    )


def pair_html(session: Session) -> str:
    """A prompt by the base model and by the weights as they are."""
    figures = "".join(
        f'<figure><img src="{_shown(session, image)}" alt=""><figcaption>{name}</figcaption></figure>'
        for name, image in zip(("before", "now"), session.pair, strict=True)
    )
    about = f"<p>Not trained on: {escape(str(session.prompt))}</p>"
    return f'<div class="g2">{about}<div class="teach-pair">{figures}</div></div>'


def kept_html(session: Session, table: dict[str, Comparison]) -> str:
    """What became of a session."""
    trainer = session.trainer
    return environment.get_template("kept.html").render(
        table=table,
        trained=trainer.rewards,
        folder=trainer.run.path,
        blind=session.told_of_blind,
        told=Told.of(session.pupil.learnt),
        unconfirmed=session.pupil.unconfirmed,
    )


def guide(session: Session) -> str:
    """What to do, how long it takes and what comes next, as one line."""
    if session.asked >= USUAL_ANSWERS:
        return f'{USUAL_ANSWERS} groups are enough: press "Finish", or click the best picture, and go on.'
    return (
        f"Click the best picture. Group {session.asked + 1} of about {USUAL_ANSWERS}, five minutes in all with a model of the "
        f'package. Then "Finish" asks in {PAIRS} pairs whether it became better.'
    )


def verdict(session: Session) -> str:
    """What the comparison said of the weights as they are; "" without one."""
    test = session.blind
    if test is None or session.pupil.unconfirmed or session.pupil.compared != test.version:
        return ""
    now, before = test.answers.count((1,)), test.answers.count((0,))
    said = {
        "better": 'You like it better now. "Finish" keeps it; or teach on.',
        "worse": "You liked it better before.",
        "no clear difference": "There is no clear difference yet. Teach on, or finish.",
    }
    return f"{said[test.verdict]} Better now in {now} of {len(test.answers)} pairs, before in {before}."


def status(session: Session, learning: bool) -> str:
    """What has been learnt so far, as text."""
    pupil, learnt = session.pupil, session.pupil.learnt
    answers, changes, head = (
        counted(pupil.answered, "answer"),
        counted(pupil.changes, "change"),
        learnt.head,
    )
    lines = [f"{answers}, {changes} of the weights." + " Learning …" * learning]
    if guards := [name for name in session.trainer.rewards if name != "clicks"]:
        lines.append(
            f"Trained on beside your clicks: {', '.join(guards)}. This moves pictures too."
        )
    told = Told.of(learnt)
    if told and told.taste:
        lines.append(f"You seem to prefer: {told.taste}.")
    if pupil.answered < FIRST:
        lines.append(f"Learning begins after {FIRST} answers.")
    elif learnt.direct:
        lines.append(f"The model learns from the clicks alone, {DIRECT} groups at a time.")
    elif head is not None:
        a = head.agreement
        lines.append(
            f"Its guess of your taste agrees with you in {100 * head.agreed:.0f} % of pairs "
            f"[{100 * a.low:.0f}, {100 * a.high:.0f}], in groups that it has not seen; 50 % is chance."
        )
        if head.trust == 0:
            without = (
                '; "Clicks alone" learns without it'
                if pupil.answered >= ENOUGH
                else " yet: answer on"
            )
            lines.append(f"That is too little to learn from{without}.")
    if pupil.hard_to_teach:
        lines.append(
            f"After {session.trainer.iteration} iterations pictures hardly move towards your taste, though the guess of it "
            "agrees with you. Some tastes cannot be taught so: in the package's models, which colour and where."
        )
    rise, error = pupil.moved
    if rise and not learnt.direct:
        unconfirmed = "; you have not confirmed it" if pupil.unconfirmed else ""
        lines.append(
            f"By this guess held-out pictures rose by {rise:.1f} ± {error:.1f} deviations{unconfirmed}."
        )
        if told and told.unasked:
            lines.append(f"What changed most though you did not ask for it: {told.unasked}.")
        if pupil.reached:
            lines.append(
                'That is enough, so learning pauses. "How far to go" lets it learn on, "Finish" ends.'
            )
    if learnt.looks:
        look = learnt.looks[-1]
        judges = [
            f"{name} {one.base:.3g} → {one.tuned:.3g}{one.within}"
            for name, one in look.judges.items()
        ]
        lines.append(
            f"Held-out pictures: {', '.join(judges)}."
            + (f" Undone: {look.wrong}." if look.wrong else "")
        )
    if session.blind is not None and session.blind.done:
        lines.append(session.told_of_blind)
    return f'<div class="g2">{"".join(f"<p>{escape(line)}</p>" for line in lines)}</div>'


def _shown(session: Session, image: Tensor) -> str:
    """A picture or a clip within the page."""
    return picture_uri(image, SHOWN_SIDE, seconds_of(session.trainer.policy, len(image)))
