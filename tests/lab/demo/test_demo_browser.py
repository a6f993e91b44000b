"""The demo as a person meets it: the real command, in a real Chromium."""

import json
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from g2rpo.cli.main import main
from tests.support.contrast import FAINT_TEXT
from tests.support.ports import free_port
from tests.support.processes import Forked

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
NEEDED = bool(os.environ.get("G2RPO_NEEDS_CHROMIUM"))  # set by .ci/run
pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not NEEDED, reason="no Chromium here (Debian: apt-get install chromium)"
)

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
SHORT = [
    "policy.tuning=lora", "optim.learning_rate=0.01", "sampling.num_steps=4", "algorithm.group_size=3",
    "algorithm.branch_steps=[1]", "algorithm.granularities=[1,2]", "trainer.iterations=2",
    "evaluation.every=1", "evaluation.num_prompts=2",
]  # fmt: skip
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
MINUTE = 60_000


@contextmanager
def served(folder, *arguments, **environment):
    """The address of `g2rpo demo`, run until the end of the block and then interrupted."""
    port, log, errors = free_port(), folder / "demo.log", folder / "errors.log"
    command = [
        sys.executable,
        "-P",
        "-m",
        "g2rpo",
        "demo",
        *map(str, arguments),
        "--port",
        str(port),
    ]
    with log.open("wb") as out, errors.open("wb") as err:
        process = Forked(command, stdout=out, stderr=err, env={**os.environ, **environment})
    try:
        ends = time.monotonic() + 60
        while not (
            said := [line for line in log.read_text().splitlines() if line.startswith("http")]
        ):
            assert time.monotonic() < ends and process.alive, errors.read_text()
            time.sleep(0.05)
        assert said[0].startswith(f"http://127.0.0.1:{port}/")
        yield said[0].split()[0]
        process.interrupt()
        code, told, wrong = process.wait(timeout=60), log.read_text(), errors.read_text()
        assert code == 0 and told.endswith(f"{said[0]}\nstopped\n") and "Traceback" not in wrong, (
            code,
            told,
            wrong,
        )
    finally:
        process.terminate()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "short"
    with pytest.raises(SystemExit) as stop:
        main(["train", "scenes", *SHORT, "--run-dir", str(directory)])
    assert not stop.value.code
    return directory


@pytest.fixture(scope="module")
def address(run, tmp_path_factory):
    with served(tmp_path_factory.mktemp("demo"), run) as where:
        yield where


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    assert CHROMIUM, "G2RPO_NEEDS_CHROMIUM is set, and there is no Chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, address):
    """The demo, just opened on a phone. In the end: nothing was asked of any other host, and the
    console holds no error."""
    # a click on what still moves may miss it
    context = browser.new_context(viewport=PHONE, reduced_motion="reduce")
    page = context.new_page()
    asked, errors = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console", lambda message: errors.append(message.text) if message.type == "error" else None
    )
    page.goto(address)
    page.wait_for_selector("#draw", timeout=MINUTE)
    yield page
    assert asked and all(url.startswith((address, "data:", "blob:", "about:")) for url in asked)
    assert errors == []
    context.close()


def on_each(page, expression):
    """What an expression of JavaScript is on a phone and on a desktop; the page ends on the phone
    again."""
    found = []
    for viewport in (DESKTOP, PHONE):
        page.set_viewport_size(viewport)
        found.append(page.evaluate(expression))
    return found


def fits(page):
    """Whether nothing is wider than the window, on either."""
    return all(on_each(page, "document.documentElement.scrollWidth <= innerWidth"))


def write(page, prompt):
    page.locator("textarea:visible").fill(prompt)


def visible(locator):
    return locator.locator("visible=true")


LATE_FRAMES = """
const frame = window.requestAnimationFrame;
window.requestAnimationFrame = callback => frame(() => setTimeout(() => callback(performance.now()), 400));
"""


def test_what_is_typed_as_soon_as_it_can_be_stays(browser, address):
    """On a machine that draws frames late: what comes with a frame must not undo what was typed
    before it."""
    context = browser.new_context(viewport=PHONE)
    context.add_init_script(LATE_FRAMES)
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector("#draw", timeout=MINUTE)
    page.get_by_role("button", name="Settings").click()
    seed, strength = (
        visible(page.get_by_label("Seed")),
        page.get_by_role("spinbutton", name="Strength of the adapter"),
    )
    seed.fill("7")
    strength.fill("0")
    page.wait_for_timeout(1000)  # more than two late frames
    assert (seed.input_value(), strength.input_value()) == ("7", "0")
    page.get_by_role("tab", name="How it learns").click()
    page.wait_for_selector("#branch", timeout=MINUTE)  # the view changes with a late frame too
    write(page, "three blue stars")
    page.wait_for_timeout(1000)
    assert page.locator("textarea:visible").input_value() == "three blue stars"
    context.close()


def test_a_click_during_a_drawing_counts(page):
    """The first question is held back until the second was asked with another setting."""
    held, asked = [], []

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
    page.get_by_text("guidance 3.5 · strength 0").wait_for(timeout=MINUTE)
    assert [data[5] for data in asked] == [1, 0]  # the strength


def draw(page, prompt):
    """Asks for a drawing, and waits until it is there."""
    write(page, prompt)
    page.click("#draw")
    shown = "document.querySelector('#drawing .g2-prompt')?.firstChild.textContent.trim()"
    page.wait_for_function(f"prompt => {shown} == prompt", arg=prompt, timeout=MINUTE)


def test_the_page_opens_with_a_drawing_and_says_why_this_one(page):
    assert page.locator("#drawing img").count() == 2
    rule = page.locator("#drawing p.g2-note").inner_text()
    assert rule.startswith("This opens on the first of ") and "held-out prompts" in rule
    prompt = page.locator("#drawing .g2-prompt").inner_text().split("\n")[0]
    assert page.locator("textarea:visible").input_value() == prompt
    assert page.locator("#drawing .g2-prompt span").inner_text().startswith("held-out prompt ")
    assert all(
        mark in ("✓ right", "✗ wrong")
        for mark in page.locator("#drawing .g2-verdict").all_inner_texts()
    )
    before = page.evaluate("[...document.querySelectorAll('#drawing img')].map(it => it.src)")
    page.click("#draw")  # the same again, without the rule
    page.wait_for_function("!document.querySelector('#drawing p.g2-note')", timeout=MINUTE)
    assert (
        page.evaluate("[...document.querySelectorAll('#drawing img')].map(it => it.src)") == before
    )
    facts = page.locator(".g2-facts").inner_text()
    assert facts.startswith(
        "The tiny FLUX that comes with g2rpo, before and after training an adapter with G²RPO. Trained on scene_accuracy "
    )


def test_draw_two_pictures_with_their_scores(page):
    draw(page, "two red circles")
    assert page.locator("#drawing h3").all_inner_texts() == ["Base model", "After training"]
    base, tuned = page.locator("#drawing img").all()
    assert base.get_attribute("src") != tuned.get_attribute("src")
    assert all(picture.evaluate("it => it.naturalWidth") == 64 for picture in (base, tuned))
    tops = (
        "[...document.querySelectorAll('#drawing img')].map(it => it.getBoundingClientRect().top)"
    )
    assert all(base == tuned for base, tuned in on_each(page, tops))  # side by side, on a phone too
    names = [text.split()[0] for text in page.locator("#drawing .g2-name").all_inner_texts()]
    assert names == 2 * ["scene_accuracy", "scene_correct", "scene_clip", "scene_preference"]
    scores = [float(text) for text in page.locator("#drawing .g2-scores b").all_inner_texts()]
    changes = page.locator("#drawing .g2-change").all_inner_texts()
    assert len(scores) == 8 and len(changes) == 4
    for before, after, change in zip(scores[:4], scores[4:], changes, strict=True):
        told = float(change.split()[-1].replace("−", "-"))
        # each of the three is rounded to two decimals or more
        assert told == pytest.approx(after - before, abs=0.011)
    assert fits(page)
    page.get_by_label("One over the other, with a slider").check()
    divider = page.locator("#drawing .divide input")
    divider.focus()
    page.keyboard.press("ArrowLeft")
    over = "getComputedStyle(document.querySelector('#drawing .tuned-side img')).clipPath"
    assert divider.input_value() == "0.49" and "49%" in page.evaluate(over)
    places = [".base-side img", ".tuned-side img", ".divide"]
    box = "document.querySelector(`#drawing ${place}`).getBoundingClientRect().toJSON()"
    # at once: the page may still move
    base, tuned, divide = page.evaluate(f"places => places.map(place => {box})", places)
    assert (
        base == tuned
        and divide["y"] == base["y"]
        and divide["height"] == pytest.approx(base["height"], abs=1)
    )
    assert fits(page)


@pytest.mark.slow  # in a browser; what it shows is tested without one
def test_settings_are_used_and_mistakes_are_told(page):
    sources = "[...document.querySelectorAll('#drawing img')].map(it => it.src)"
    draw(page, "three blue stars")
    base, tuned = page.evaluate(sources)
    assert base != tuned
    page.get_by_role("button", name="Settings").click()
    strength = page.get_by_role("spinbutton", name="Strength of the adapter")
    strength.fill("0")
    strength.press("Enter")
    page.click("#draw")
    page.wait_for_function(f"base => {sources}.every(src => src == base)", arg=base, timeout=MINUTE)
    seed, steps = visible(page.get_by_label("Seed")), page.get_by_role("spinbutton", name="Steps")
    for field, wrong, right, message in (
        (page.locator("textarea:visible"), "  ", "three blue stars", "write a prompt first"),
        (seed, "99999999999999999999", "7", "the seed should be a whole number from 0 to"),
        (seed, "", "7", "the seed should be"),
    ):
        field.fill(wrong)
        page.click("#draw")
        page.get_by_text(message).first.wait_for(timeout=MINUTE)
        assert page.locator("#drawing img").count() == 2  # what was there stays
        field.fill(right)
        page.click("#draw")  # the message goes with the next question
        page.get_by_text(message).first.wait_for(state="detached", timeout=5000)
    # the nearest that may be, and the page says so
    for wrong, said in (("0", "1 step"), ("1000", "100 steps")):
        steps.fill(wrong)
        page.click("#draw")
        page.get_by_text(f"seed 7 · {said} · guidance 3.5 · strength 0").wait_for(timeout=MINUTE)


@pytest.mark.slow  # in a browser; what it shows is tested without one
def test_a_prompt_outside_the_grammar_is_drawn_without_scores(page):
    write(page, "a dog <img src=x onerror=alert(1)>")
    page.locator("textarea:visible").press("Enter")
    page.get_by_text("expected a colour").wait_for(timeout=MINUTE)
    assert (
        page.locator("#drawing img").count() == 2
        and page.get_by_text("no score", exact=True).count() == 8
    )
    assert (
        page.locator("#drawing .g2-prompt").inner_text().split("\n")[0]
        == "a dog <img src=x onerror=alert(1)>"
    )


@pytest.mark.slow  # in a browser; what it shows is tested without one
def test_how_it_learns_shows_anchor_members_and_advantages(page):
    page.get_by_role("tab", name="How it learns").click()
    page.wait_for_selector("#branch", timeout=MINUTE)
    write(page, "two red circles left of a blue star")
    # of the prompt that the page opens with
    assert page.locator("#group .g2-members > li").count() == 3
    page.click("#branch")
    page.locator("#group").get_by_text("two red circles left of a blue star").wait_for(
        timeout=MINUTE
    )
    assert page.locator("#group .g2-walk img").count() == 4  # steps
    assert page.locator("#group .g2-here").inner_text().split()[:2] == ["step", "1"]
    assert page.locator("#group .g2-members > li").count() == 3
    # the noise, and the run's two granularities
    assert page.locator("#group .g2-members img").count() == 3 * (1 + 2)
    advantages = page.locator("#group dd b").all_inner_texts()
    assert len(advantages) == 3
    values = [float(text.replace("−", "-")) for text in advantages]
    assert values == sorted(values, reverse=True) and sum(values) == pytest.approx(0, abs=0.02)
    assert fits(page)
    visible(page.get_by_label("3", exact=True)).check()
    page.click("#branch")
    page.wait_for_function(
        "() => document.querySelectorAll('#group .g2-members img').length == 3 * (1 + 3)",
        timeout=MINUTE,
    )
    assert fits(page)
    page.get_by_label("after training").check()
    before = page.locator("#group .g2-walk img").last.get_attribute("src")
    page.click("#branch")
    page.wait_for_function(
        "before => [...document.querySelectorAll('#group .g2-walk img')].at(-1)?.src != before",
        arg=before,
    )


def test_the_run_is_shown(page, run):
    page.get_by_role("tab", name="The run").click()
    frame = page.frame_locator("iframe.g2-report")
    frame.get_by_role("heading", name=run.name).wait_for(timeout=MINUTE)
    assert frame.locator("svg.chart").count() > 4 and frame.locator(".pictures img").count() >= 4
    frame.get_by_role("link", name="What ran").click()
    # the frame is as long as its page, and stays
    page.wait_for_function("scrollY > 500", timeout=MINUTE)
    assert frame.get_by_role("heading", name=run.name).count() == 1
    assert fits(page)


@pytest.mark.slow  # in a browser; what it shows is tested without one
def test_it_follows_light_and_dark_and_is_legible_in_both(browser, address):
    def brightness(scheme):
        context = browser.new_context(color_scheme=scheme)
        page = context.new_page()
        page.goto(address)
        page.wait_for_selector("#draw", timeout=MINUTE)
        red, green, blue = page.evaluate(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
        )
        for view in ("Draw", "How it learns"):
            page.get_by_role("tab", name=view).click()
            page.wait_for_timeout(300)  # colours fade in
            assert page.evaluate(FAINT_TEXT) == [], (scheme, view)
        context.close()
        return (red + green + blue) / 3

    assert brightness("light") > 200 > 60 > brightness("dark")


def test_nothing_is_open_but_the_page(address):
    """No API to call around the page's queue, no telemetry asked for; nothing for other sites,
    names or large bodies."""
    config = json.load(urllib.request.urlopen(f"{address}config"))
    assert config["analytics_enabled"] is False
    (index,) = [each["id"] for each in config["dependencies"] if each["api_name"] == "answer"]
    question = json.dumps({"data": ["a red circle", 1, 2, 3.5, 1], "fn_index": index}).encode()
    info = json.load(urllib.request.urlopen(f"{address}gradio_api/info"))
    assert info == {"named_endpoints": {}, "unnamed_endpoints": {}}
    for path, body, headers, status in (
        ("gradio_api/run/predict", question, {}, 404),
        (f"gradio_api/file={__file__}", None, {}, 403),
        ("gradio_api/queue/join", question, {"Origin": "http://evil.example"}, 403),
        ("config", None, {"Host": "evil.example"}, 421),
        ("gradio_api/queue/join", b" " * 100_000, {}, 413),
    ):
        request = urllib.request.Request(
            f"{address}{path}", body, {"Content-Type": "application/json", **headers}
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        assert refused.value.code == status


def test_a_token_is_asked_for(browser, tmp_path):
    with served(
        tmp_path, "--model", "testbed", "--token-env", "DEMO_TOKEN", DEMO_TOKEN="tell no one, never"
    ) as address:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{address}config")
        assert refused.value.code == 401
        page = browser.new_page()
        page.goto(address)
        for word in ("guess", "tell no one, never"):
            page.get_by_label("username").fill("me", timeout=MINUTE)
            page.get_by_label("password").fill(word)
            page.get_by_role("button", name="Login").click()
            if word == "guess":
                page.get_by_text("Incorrect Credentials").wait_for(timeout=MINUTE)
        page.wait_for_selector("#draw", timeout=MINUTE)
        assert page.get_by_role("tab", name="The run").count() == 0  # there is none
        page.click("#draw")
        page.wait_for_selector("#drawing img", timeout=MINUTE)
        assert page.locator("#drawing img").count() == 1
        page.close()
