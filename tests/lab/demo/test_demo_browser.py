"""The demo as a person meets it, in a real Chromium."""

import os
import sys
import threading

import pytest

from g2rpo.core.events import Serving
from g2rpo.lab.demo.command import demo
from g2rpo.lab.serving import Address
from tests.support.contrast import FAINT_TEXT
from tests.support.ports import free_port
from tests.support.processes import Forked
from tests.support.waiting import PATIENCE_S, until

PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
PATIENCE_MS = 1000 * PATIENCE_S
SOURCES = "[...document.querySelectorAll('#drawing img')].map(it => it.src)"


@pytest.fixture(scope="module")
def address(run):
    pytest.importorskip("gradio")
    told, ready, stop = [], threading.Event(), threading.Event()

    def hear(event):
        if isinstance(event, Serving):
            told.append(event.text.split()[0])
            ready.set()

    where = Address("127.0.0.1", free_port())
    served = threading.Thread(
        target=demo,
        args=(run.path, run.read_config(mention=False), None, where),
        kwargs={"stop": stop, "emit": hear},
    )
    served.start()
    assert ready.wait(PATIENCE_S)
    yield told[0]
    stop.set()
    served.join(PATIENCE_S)
    assert not served.is_alive()


@pytest.fixture
def opened(browser, address):
    """Opens the demo on a phone. In the end: nothing was asked of any other host, and the console
    holds no error."""
    asked, errors, contexts = [], [], []

    def open_page(script="", **options):
        # a click on what still moves may miss it
        still = {"viewport": PHONE, "reduced_motion": "reduce"}
        contexts.append(browser.new_context(**still | options))
        contexts[-1].add_init_script(script)
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.goto(address)
        page.wait_for_selector("#draw")
        return page

    yield open_page
    assert asked and all(url.startswith((address, "data:", "blob:", "about:")) for url in asked)
    assert errors == []
    for context in contexts:
        context.close()


def fits(page):
    """Whether nothing is wider than the window and pictures stand side by side, on a desktop and on
    a phone; the page ends on the phone again."""
    for viewport in (DESKTOP, PHONE):
        page.set_viewport_size(viewport)
        if not page.evaluate(f"document.documentElement.scrollWidth <= innerWidth && {BESIDE}"):
            return False
    return True


BESIDE = "new Set([...document.querySelectorAll('#drawing img')].map(it => it.offsetTop)).size <= 1"


SCHEMES = {"light": lambda paper: paper > 200, "dark": lambda paper: paper < 60}


PAPER = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g)[0]"


def legible(page):
    """Whether text stands out from its paper, in the light and in the dark."""
    faint = []
    for scheme, own in SCHEMES.items():
        page.emulate_media(color_scheme=scheme)
        page.wait_for_function(STILL)  # colours fade in
        faint += page.evaluate(FAINT_TEXT)
        assert own(int(page.evaluate(PAPER))), scheme
    return faint == []


def write(page, prompt):
    page.locator("textarea:visible").fill(prompt)


def visible(locator):
    return locator.locator("visible=true")


def draw(page, prompt):
    """Asks for a drawing, and waits until it is there."""
    write(page, prompt)
    page.click("#draw")
    shown = "document.querySelector('#drawing .g2-prompt')?.firstChild.textContent.trim()"
    page.wait_for_function(f"prompt => {shown} == prompt", arg=prompt)


def test_a_person_draws_learns_and_reads_on_a_desktop_and_on_a_phone(opened, run):
    page = opened()
    assert page.locator("#drawing p.g2-note").first.inner_text().startswith("This opens on the ")
    prompt = page.locator("#drawing .g2-prompt").inner_text().split("\n")[0]
    assert page.locator("textarea:visible").input_value() == prompt == "a red circle"
    before = page.evaluate(SOURCES)
    page.click("#draw")  # the same again, without the rule
    page.wait_for_function("!document.querySelector('#drawing p.g2-note')")
    assert page.evaluate(SOURCES) == before
    draw(page, "three blue stars")
    assert page.locator("#drawing h3").all_inner_texts() == ["Base model", "After training"]
    base, tuned = page.evaluate(SOURCES)
    assert base != tuned and base not in before and fits(page) and legible(page)

    page.get_by_role("button", name="Settings", expanded=False).click()
    page.get_by_role("button", name="Settings", expanded=True).wait_for()
    page.get_by_role("spinbutton", name="Strength of the adapter").fill("0")
    page.click("#draw")
    page.wait_for_function(f"base => {SOURCES}.every(src => src == base)", arg=base)
    seed = visible(page.get_by_label("Seed"))
    for field, wrong, right, message in (
        (page.locator("textarea:visible"), "  ", "three blue stars", "write a prompt first"),
        (seed, "", "7", "the seed should be a whole number from 0 to"),
    ):
        field.fill(wrong)
        page.click("#draw")
        page.get_by_text(message).first.wait_for()
        assert page.locator("#drawing img").count() == 2  # what was there stays
        field.fill(right)
        page.click("#draw")  # the message goes with the next question
        page.get_by_text(message).first.wait_for(state="detached")
    page.get_by_role("spinbutton", name="Steps").fill("0")  # the nearest that may be
    page.click("#draw")
    page.get_by_text("seed 7 · 1 step · guidance 3.5 · strength 0").wait_for()

    page.get_by_role("tab", name="How it learns").click()
    write(page, "two red circles")
    page.click("#branch")
    group = page.locator("#group")
    group.get_by_text("two red circles").wait_for()
    assert group.locator(".g2-walk img").count() == 4  # steps
    # three members: the noise, and the run's two granularities
    assert group.locator(".g2-members img").count() == 3 * (1 + 2)
    visible(page.get_by_label("3", exact=True)).check()
    page.get_by_label("after training").check()
    last = group.locator(".g2-walk img").last
    before = last.get_attribute("src")
    page.click("#branch")
    group.get_by_text("after training").wait_for()
    assert group.locator(".g2-members img").count() == 3 * (1 + 3)
    assert last.get_attribute("src") != before and fits(page) and legible(page)

    page.get_by_role("tab", name="The run").click()
    frame = page.frame_locator("iframe.g2-report")
    frame.get_by_role("heading", name=run.path.name, exact=True).wait_for()
    frame.get_by_role("link", name="What ran").click()
    page.wait_for_function("scrollY > 500")  # the frame is as long as its page, and stays
    assert frame.locator("svg.chart").count() > 4 and fits(page)


LATE_FRAMES = """
const frame = window.requestAnimationFrame;
window.requestAnimationFrame = callback => frame(() => setTimeout(() => callback(performance.now()), 400));
"""


@pytest.mark.slow
def test_what_is_typed_as_soon_as_it_can_be_stays(opened):
    """On a machine that draws frames late: what comes with a frame must not undo what was typed
    before it."""
    page = opened(LATE_FRAMES, reduced_motion="no-preference")
    page.get_by_role("button", name="Settings").click()
    seed = visible(page.get_by_label("Seed"))
    seed.fill("7")
    page.wait_for_timeout(1000)  # more than two late frames
    assert seed.input_value() == "7"
    page.get_by_role("tab", name="How it learns").click()
    page.wait_for_selector("#branch")  # the view changes with a late frame too
    write(page, "three blue stars")
    page.wait_for_timeout(1000)
    assert page.locator("textarea:visible").input_value() == "three blue stars"


@pytest.mark.slow
def test_a_click_during_a_drawing_counts(opened):
    """The first question is held back until the second was asked with another setting."""
    page, held, asked = opened(), [], []

    def hold(route):
        asked.append(route.request.post_data_json["data"])
        held.append(route) if len(asked) == 1 else route.continue_()

    page.route("**/queue/join*", hold)
    write(page, "three blue stars")
    page.click("#draw")
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("spinbutton", name="Strength of the adapter").fill("0")
    page.click("#draw")
    page.wait_for_timeout(300)
    held[0].continue_()
    page.get_by_text("guidance 3.5 · strength 0").wait_for()
    assert [data[5] for data in asked] == [1, 0]  # the strength


STILL = """document.getAnimations().every(
    one => one.playState !== "running" || one.effect.getComputedTiming().endTime === Infinity
)"""


@pytest.mark.slow
def test_the_command_asks_for_a_token_and_ends_with_ctrl_c(browser, tmp_path):
    port, log, errors = free_port(), tmp_path / "demo.log", tmp_path / "errors.log"
    words = f"demo --model testbed --token-env DEMO_TOKEN --port {port}"
    command, token = [sys.executable, "-P", "-m", "g2rpo", *words.split()], "tell no one, never"
    with log.open("wb") as out, errors.open("wb") as err:
        environment = {**os.environ, "DEMO_TOKEN": token}
        process = Forked(command, stdout=out, stderr=err, env=environment)
    try:
        address = f"http://127.0.0.1:{port}/"
        until(lambda: address in log.read_text(), lambda: process.alive, errors.read_text)
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(address)
        for word, then in (("guess", "Incorrect Credentials"), (token, "Draw")):
            page.get_by_label("username").fill("me")
            page.get_by_label("password").fill(word)
            page.get_by_role("button", name="Login").click()
            page.get_by_text(then).first.wait_for()
        assert page.get_by_role("tab", name="The run").count() == 0  # there is none
        page.click("#draw")
        page.wait_for_selector("#drawing img")
        page.close()
        process.interrupt()
        assert process.wait(PATIENCE_S) == 0 and log.read_text().endswith("\nstopped\n")
        assert "Traceback" not in errors.read_text()
    finally:
        process.terminate()
