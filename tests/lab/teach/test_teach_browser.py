"""`g2rpo teach` as a person meets it: the real command, in a real Chromium, with mouse, keyboard
and a phone."""

import json
import os
import shlex
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from subprocess import Popen

import pytest

from g2rpo.lab.teach.session import Lesson
from g2rpo.rewards import votes
from tests.lab.demo.test_demo_browser import DESKTOP, MINUTE, PHONE
from tests.lab.demo.test_shown_browser import session as shown
from tests.lab.teach.test_session import session
from tests.support.ports import free_port
from tests.support.processes import Forked
from tests.support.runs import Editing

SHORT = [
    "sampling.num_steps=4",
    "algorithm.group_size=4",
    "algorithm.branch_steps=[0,1]",
    "evaluation.num_prompts=2",
]


TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nproc-per-node=2",
    "--standalone",
    "-m",
    "g2rpo",
]


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["alone", "torchrun"],
)
def taught(request, tmp_path_factory, browser):
    """A session of ten answers and its run directory, of one process or of two; in the end the
    console held no error, the page shows no lost connection, and the printed command repeats the
    run."""
    folder = tmp_path_factory.mktemp("teach")
    run, port, log, errors = folder / "run", free_port(), folder / "out.log", folder / "errors.log"
    start, launch = (
        (Popen, TORCHRUN) if request.param else (Forked, [sys.executable, "-P", "-m", "g2rpo"])
    )
    command = [*launch, "teach", "scenes-fast", *SHORT, "--run-dir", str(run), "--port", str(port)]
    with log.open("wb") as out, errors.open("wb") as err:
        process = start(command, stdout=out, stderr=err, env=dict(os.environ))
    try:
        ends = time.monotonic() + 90
        while not (
            said := [line for line in log.read_text().splitlines() if line.startswith("http")]
        ):
            assert time.monotonic() < ends, errors.read_text()
            time.sleep(0.05)
        context = browser.new_context(viewport=DESKTOP, reduced_motion="reduce")
        page, wrong = context.new_page(), []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.set_default_timeout(MINUTE)
        page.goto(said[0].split()[0])
        page.locator("[data-member]").first.wait_for()
        yield page, run
        page.locator("#finish").click()
        page.get_by_text("Finished.").wait_for()
        assert page.locator("#pair img").count() == 2 and not page.locator("#finish").is_visible()
        code = process.wait(timeout=120)
        assert not page.get_by_text("Connection to the server was lost").is_visible()
        context.close()
        assert code == 0 and wrong == [] and "Traceback" not in errors.read_text(), (
            errors.read_text()
        )
        assert (
            json.loads((run / "results.json").read_text())["rewards"] and (run / "adapter").is_dir()
        )
        if not request.param:
            repeats(log.read_text(), run)
    finally:
        process.terminate()


def repeats(told, run):
    """Runs the printed command: it gives the same answers, and the same weights."""
    (line,) = [line for line in told.splitlines() if line.split()[:2] == ["repeat", "g2rpo"]]
    _, _, *command = shlex.split(line)
    with (run.parent / "again.log").open("wb") as out:
        again = Forked(
            [sys.executable, "-P", "-m", "g2rpo", *command], stdout=out, env=dict(os.environ)
        )
    assert again.wait(timeout=240) == 0, (run.parent / "again.log").read_text()
    (weights,) = (run / "adapter").glob("*.safetensors")
    other = Path(command[-1]) / "adapter" / weights.name
    assert weights.read_bytes() == other.read_bytes()
    assert votes.read(Path(command[-1]) / "votes.jsonl") == votes.read(run / "votes.jsonl")


def answered(page, run, act):
    """Answers by `act`; returns the last line of votes.jsonl once the next group is shown."""
    shown = "() => document.querySelector('#asked img')?.src"
    before = page.evaluate(shown)
    act()
    page.wait_for_function(f"before => ({shown})() !== before", arg=before)
    return votes.read(run / "votes.jsonl")[-1]


def test_a_group_is_answered_by_mouse_keyboard_and_phone(taught):
    page, run = taught
    assert page.locator("[data-member]").count() == 4 and page.locator("#pair img").count() == 2
    assert answered(page, run, lambda: page.locator("[data-member='2']").click()).liked == (2,)
    assert answered(page, run, lambda: page.keyboard.press("4")).liked == (3,)
    assert answered(page, run, lambda: page.keyboard.press("s")).skipped
    page.locator("[data-member='1']").focus()
    assert answered(page, run, lambda: page.keyboard.press("Enter")).liked == (1,)
    for member in (0, 2):
        page.locator(f"#asked input[value='{member}']").check()
    assert answered(page, run, lambda: page.locator("#several").click()).liked == (0, 2)
    before = len(votes.read(run / "votes.jsonl"))
    page.locator("#several").click()
    page.get_by_text("tick the pictures that you like first").wait_for()
    assert (
        len(votes.read(run / "votes.jsonl")) == before
        and page.locator("[data-member]").first.is_visible()
    )
    page.set_viewport_size(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    boxes = [page.locator(f"[data-member='{member}'] img").bounding_box() for member in range(3)]
    assert boxes[0]["y"] == boxes[1]["y"] < boxes[2]["y"] and boxes[0]["width"] > PHONE["width"] / 3
    assert answered(page, run, lambda: page.locator("[data-member='0']").click()).liked == (0,)
    undone = page.locator("#asked b").inner_text()
    assert answered(page, run, lambda: page.locator("#undo").click()).kind == "undo" and undone
    assert "5 answers" not in page.locator("#status").inner_text()
    page.locator("#direct").click()
    page.locator("#direct-sure").wait_for()
    assert not any(vote.kind == "direct" for vote in votes.read(run / "votes.jsonl"))
    page.locator("#direct-sure").click()
    page.get_by_text("learns from the clicks alone").wait_for()
    for _ in range(4):
        answered(page, run, lambda: page.locator("[data-member='0']").click())
    page.locator("#blind").click()
    page.get_by_text("Which is better? Pair 1 of 2").wait_for()
    assert page.locator("[data-member]").count() == 2 and page.locator("#undo").count() == 0
    assert answered(page, run, lambda: page.locator("[data-member='0']").click()).liked in (
        (0,),
        (1,),
    )
    assert answered(page, run, lambda: page.keyboard.press("n")).kind == "blind"
    page.get_by_text("Blind test of 2 pairs").wait_for()
    assert page.locator("[data-member]").count() == 4


@pytest.mark.slow
def test_a_tab_of_the_demo_begins_and_ends_a_session(tmp_path, browser):
    """Keys count only while the tab is shown. A second session can follow."""
    from g2rpo.lab.demo import app
    from g2rpo.lab.teach.page import teach_view
    from g2rpo.lab.web.page import page_of, serve

    @contextmanager
    def opened():
        begun.append(session(tmp_path / str(len(begun)), prompt="0", background=True))
        with begun[-1].begun():
            yield begun[-1]

    begun, lesson = [], Lesson(opened)
    views = {
        "Draw": partial(app.draw_view, shown(Editing(), []), [], ""),
        "Teach": partial(teach_view, lesson, None),
    }
    built = page_of("Any", "demo", "Thing.", views)
    address = serve(built, "127.0.0.1", free_port(), None)
    try:
        page = browser.new_page()
        page.set_default_timeout(MINUTE)
        page.goto(address)
        for number in (1, 2):
            page.get_by_role("tab", name="Teach").click()
            page.locator("#begin").click()
            page.locator("[data-member]").first.wait_for()
            answered(page, tmp_path / str(number - 1), lambda: page.keyboard.press("3"))
            page.get_by_role("tab", name="Draw").click()
            page.locator("#draw").wait_for()  # Gradio shows a tab some milliseconds after the click
            page.keyboard.press("3")
            page.get_by_role("tab", name="Teach").click()
            page.locator("#finish").click()
            page.get_by_text(f"Kept in {tmp_path / str(number - 1)}").wait_for()
            assert (
                lesson.session is None and (tmp_path / str(number - 1) / "results.json").is_file()
            )
            page.get_by_text("shows pictures of a prompt").wait_for()
        page.close()
    finally:
        built.close(verbose=False)
