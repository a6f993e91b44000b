"""The report in a real Chromium: contrast as computed from its styles, and everything that the
mouse does from the keyboard."""

import pytest

from g2rpo.lab.report.history import read_runs
from g2rpo.lab.report.page import render
from tests.lab.demo.test_demo_browser import CHROMIUM, NEEDED, browser  # noqa: F401
from tests.lab.report.test_report import make_run
from tests.support.contrast import FAINT_TEXT

pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not NEEDED, reason="no Chromium here (Debian: apt-get install chromium)"
)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    (folder / "page.html").write_text(render(read_runs([make_run(folder / "run")])))
    return f"file://{folder / 'page.html'}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(browser, address, scheme):  # noqa: F811
    page = browser.new_page(color_scheme=scheme)
    page.goto(address)
    assert page.evaluate(FAINT_TEXT) == []
    page.evaluate("document.querySelector('.sentence').style.opacity = 0.3")
    assert len(page.evaluate(FAINT_TEXT)) == 1  # it would be found
    page.close()


def test_the_pictures_are_compared_from_the_keyboard(browser, address):  # noqa: F811
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(address)
    order, outlines = [], []
    for _ in range(14):
        page.keyboard.press("Tab")
        order.append(
            page.evaluate(
                "document.activeElement.getAttribute('href') ?? document.activeElement.className"
            )
        )
        outlines.append(
            page.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)")
        )
        if order[-1] == "slide":
            break
    assert order[:2] == ["#pictures", "#results"] and "#learning" in order and order[-1] == "slide"
    assert min(outlines) >= 1
    page.keyboard.press("Space")
    page.keyboard.press("Tab")
    divider = page.locator(".divide input").first
    assert divider.evaluate("it => it === document.activeElement")
    shown = "document.querySelector('.tuned-side:not([hidden]) img')"
    middle = page.evaluate(f"getComputedStyle({shown}).clipPath")
    for key in ("ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
    assert (
        divider.input_value() == "0.48"
        and page.evaluate(f"getComputedStyle({shown}).clipPath") != middle
    )
    page.keyboard.press("Home")
    assert page.locator(".pair").first.evaluate("it => it.style.getPropertyValue('--at')") == "0"
    places = [".base-side img", ".tuned-side:not([hidden]) img", ".divide"]
    boxes = "places => places.map(place => document.querySelector(place).getBoundingClientRect().toJSON())"
    base, tuned, over = page.evaluate(boxes, places)  # at once: the page may still be scrolling
    assert (
        base == tuned
        and over["y"] == base["y"]
        and over["height"] == pytest.approx(base["height"], abs=1)
    )
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()


def test_a_printed_page_is_light_and_nothing_is_cut_off(browser, address):  # noqa: F811
    page = browser.new_page(viewport={"width": 720, "height": 1000}, color_scheme="dark")
    page.emulate_media(media="print")
    page.goto(address)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    tables = "[...document.querySelectorAll('.scroll')].map(it => it.scrollWidth - it.clientWidth)"
    assert max(page.evaluate(tables)) <= 0
    page.close()
