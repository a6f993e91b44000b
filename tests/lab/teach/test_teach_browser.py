"""`g2rpo teach` as a person meets it: the real command, in a real Chromium, with mouse, keyboard
and a phone."""

import json
import os
import sys
from contextlib import contextmanager
from functools import partial
from subprocess import Popen

import pytest

from g2rpo.lab.teach.session import Lesson
from g2rpo.rewards import votes
from tests.lab.demo.test_demo_browser import DESKTOP, PATIENCE_MS, PHONE
from tests.lab.demo.test_shown_browser import session as shown
from tests.lab.teach.test_session import begun
from tests.support.ports import free_port
from tests.support.processes import Forked
from tests.support.runs import Editing
from tests.support.waiting import PATIENCE_S, until

SHORT = [
    *("sampling.num_steps=4", "algorithm.group_size=4", "algorithm.branch_steps=[0,1]"),
    "evaluation.num_prompts=3",
]
ALONE = Forked, [sys.executable, "-P", "-m", "g2rpo"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
TWO = Popen, [*TORCHRUN, "-m", "g2rpo"]


@pytest.fixture(params=[ALONE, pytest.param(TWO, marks=pytest.mark.slow)], ids=["alone", "two"])
def taught(request, tmp_path, browser):
    """The page of a session of one process or of two ranks, and its run directory; in the end it is
    finished, the console held no error and the page shows no lost connection."""
    start, launch = request.param
    run, port, log, errors = (tmp_path / "run", free_port(), tmp_path / "log", tmp_path / "errors")
    command = [*launch, "teach", "scenes-fast", *SHORT, "--run-dir", str(run), "--port", str(port)]
    with log.open("wb") as out, errors.open("wb") as err:
        process = start(command, stdout=out, stderr=err, env=dict(os.environ))
    try:
        address = f"http://127.0.0.1:{port}/"
        until(lambda: address in log.read_text(), what=errors.read_text)
        context = browser.new_context(viewport=DESKTOP, reduced_motion="reduce")
        page, wrong = context.new_page(), []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.set_default_timeout(PATIENCE_MS)
        page.goto(address)
        page.locator("[data-member]").first.wait_for()
        yield page, run
        other = context.new_page()
        other.set_default_timeout(PATIENCE_MS)
        other.goto(address)
        other.locator("#asked img").first.wait_for()
        page.locator("#finish").click()
        ended = page.get_by_text("Finished.")
        asked = page.get_by_text("Finish without comparing")
        ended.or_(asked).first.wait_for()
        if asked.is_visible():  # weights that nobody compared
            asked.click()
        ended.wait_for()
        assert page.locator("#pair img").count() == 2 and not page.locator("#finish").is_visible()
        assert process.wait(timeout=PATIENCE_S) == 0
        assert not page.get_by_text("Connection to the server was lost").is_visible()
        other.locator("#none").click()
        lost = other.get_by_text("Connection to the server was lost")
        said = lost.evaluate("toast => getComputedStyle(toast, '::after').content")
        assert "finished in another tab" in said
        context.close()
        assert wrong == [] and "Traceback" not in errors.read_text(), errors.read_text()
        assert json.loads((run / "results.json").read_text())["rewards"]
        assert (run / "adapter").is_dir()
    finally:
        process.terminate()


def said(run):
    return votes.read(run / "votes.jsonl")


def answered(page, run, act):
    """Answers by `act`; returns the last line of votes.jsonl once the next group is shown."""
    shown = "() => document.querySelector('#asked img')?.src"
    before = page.evaluate(shown)
    act()
    page.wait_for_function(f"before => ({shown})() !== before", arg=before)
    return said(run)[-1]


def test_a_group_is_answered_by_mouse_keyboard_and_phone(taught):
    page, run = taught
    click = lambda place: page.locator(place).first.click()  # noqa: E731
    assert page.locator("[data-member]").count() == 4 and page.locator("#pair img").count() == 2
    assert answered(page, run, lambda: click("[data-member='2']")).liked == (2,)
    assert answered(page, run, lambda: page.keyboard.press("4")).liked == (3,)
    # the focus stays on a picture, and what is asked next is read aloud: of an element that stays
    page.evaluate("document.querySelector('#asked [role=status]').stays = true")
    page.locator("[data-member='0']").focus()
    assert answered(page, run, lambda: page.keyboard.press("Enter")).liked == (0,)
    assert page.evaluate("document.activeElement.dataset.member") == "0"
    assert "Group 4 of" in page.locator("#asked [role=status]").inner_text()
    assert page.evaluate("document.querySelector('#asked [role=status]').stays")
    # neither a double click nor a held key answers the next group as well
    assert answered(page, run, lambda: page.locator("[data-member='1']").dblclick()).liked == (1,)
    assert answered(page, run, lambda: [page.keyboard.down("2") for _ in range(3)]).liked == (1,)
    page.keyboard.up("2")
    assert len(said(run)) == 5
    other = page.context.new_page()
    other.goto(page.url)
    other.locator("[data-member='0']").wait_for()
    assert answered(page, run, lambda: page.keyboard.press("s")).skipped
    for member in (0, 2):
        page.locator(f"#asked input[value='{member}']").check()
    assert answered(page, run, lambda: click("#several")).liked == (0, 2)
    page.locator("#asked input[value='3']").check()  # and then another answer
    assert answered(page, run, lambda: click("#none")).liked == ()
    assert page.locator("#asked input:checked").count() == 0  # of the next group
    before = said(run)
    other.locator("[data-member='0']").click()  # of a group that is answered: it shows the next
    other.get_by_text("is not the one that is asked").first.wait_for()
    asked = page.locator("[data-round]").get_attribute("data-round")
    other.locator(f"[data-round='{asked}']").wait_for()
    click("#several")
    page.get_by_text("tick the pictures that you like first").wait_for()
    assert said(run) == before
    page.set_viewport_size(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    first, second, third = (
        page.locator(f"[data-member='{member}'] img").bounding_box() for member in range(3)
    )
    assert first["y"] == second["y"] < third["y"] and first["width"] > PHONE["width"] / 3
    assert answered(page, run, lambda: click("[data-member='0']")).liked == (0,)
    assert answered(page, run, lambda: click("#undo")).kind == "undo"
    click("#direct")
    page.locator("#direct-sure").wait_for()
    assert not any(vote.kind == "direct" for vote in said(run))
    click("#direct-sure")
    page.get_by_text("learns from the clicks alone").wait_for()
    for _ in range(4):
        answered(page, run, lambda: click("[data-member='0']"))
    click("#finish")  # asks first whether it became better
    page.get_by_text("Which is better? Pair 1 of 2").wait_for()
    before = said(run)
    other.locator("[data-member='0']").click()  # it shows a group still
    other.get_by_text("a comparison comes first").first.wait_for()
    other.get_by_text("Which is better? Pair 1 of 2").wait_for()
    other.close()
    assert said(run) == before
    assert page.locator("[data-member]").count() == 2
    assert not page.locator("#status").is_visible() and not page.locator("#pair").is_visible()
    widths = [
        page.locator(f"[data-member='{side}'] img").bounding_box()["width"] for side in (0, 1)
    ]
    assert min(widths) > PHONE["width"] / 3
    assert len(answered(page, run, lambda: click("[data-member='0']")).liked) == 1
    assert answered(page, run, lambda: click("#undo")).kind == "undo"
    for _ in range(2):
        assert answered(page, run, lambda: page.keyboard.press("n")).kind == "blind"
    page.locator(".teach-verdict", has_text="no clear difference").wait_for()
    assert page.locator("[data-member]").count() == 4


@pytest.mark.slow
def test_a_tab_of_the_demo_begins_and_ends_a_session(tmp_path, browser):
    """Keys count only while the tab is shown. A second session can follow."""
    from g2rpo.app.serving import Address
    from g2rpo.lab.demo import app
    from g2rpo.lab.teach.page import teach_view
    from g2rpo.lab.web.page import page_of, serve

    opened = []

    @contextmanager
    def another():
        opened.append(tmp_path / str(len(opened)))
        with begun(opened[-1], prompt="0", background=True) as session:
            yield session

    lesson = Lesson(another)
    draw = partial(app.draw_view, shown(Editing(), []), [], "")
    views = {"Draw": draw, "Teach": partial(teach_view, lesson, None)}
    built = page_of("Any", "demo", "Thing.", views)
    address = serve(built, Address("127.0.0.1", free_port()))
    try:
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(address)
        for _ in range(2):
            page.get_by_role("tab", name="Teach").click()
            page.locator("#begin").click()
            page.locator("[data-member]").first.wait_for()
            answered(page, opened[-1], lambda: page.keyboard.press("3"))
            page.get_by_role("tab", name="Draw").click()
            page.locator("#draw").wait_for()  # Gradio shows a tab some milliseconds after the click
            page.keyboard.press("3")
            page.get_by_role("tab", name="Teach").click()
            page.locator("#finish").click()
            page.get_by_text(f"Kept in {opened[-1]}").wait_for()
            assert lesson.session is None and (opened[-1] / "results.json").is_file()
            assert len(said(opened[-1])) == 1
        assert len(opened) == 2
        page.close()
    finally:
        built.close(verbose=False)
