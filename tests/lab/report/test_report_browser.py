"""The report in a real Chromium: contrast as computed from its styles, and everything that the
mouse does from the keyboard."""

import pytest

from g2rpo.lab.report.history import read_runs
from g2rpo.lab.report.page import render
from g2rpo.train.run.folder import Run
from tests.lab.report.pages import make_run, write_log
from tests.support.contrast import FAINT_TEXT
from tests.support.variants import few


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    run = make_run(folder / "run")
    rows = Run(run).read_log()
    rows[-1]["alarms"] = {"drift": "log_prob_drift 0.0123 ± 0.0045 since iteration 0"}
    write_log(run, rows)
    (folder / "page.html").write_text(render(read_runs([run])))
    return f"file://{folder / 'page.html'}"


@pytest.fixture
def opened(browser, address):
    """Opens the page with options of the browser."""
    pages = []

    def open_page(**options):
        pages.append(browser.new_page(**options))
        pages[-1].goto(address)
        return pages[-1]

    yield open_page
    for page in pages:
        page.close()


@pytest.mark.parametrize("scheme", few(["light", "dark"], "dark".__eq__))
def test_text_stands_out_from_what_is_behind_it(opened, scheme):
    page = opened(color_scheme=scheme)
    assert page.evaluate(FAINT_TEXT) == []
    page.evaluate("document.querySelector('.sentence').style.opacity = 0.3")
    assert len(page.evaluate(FAINT_TEXT)) == 1  # it would be found


def test_the_pictures_are_compared_from_the_keyboard(opened):
    page = opened(viewport={"width": 390, "height": 844})
    focused = "document.activeElement"
    order, outlines = [], []
    while "slide" not in order and len(order) < 14:
        page.keyboard.press("Tab")
        order.append(page.evaluate(f"{focused}.getAttribute('href') ?? {focused}.className"))
        outlines.append(page.evaluate(f"parseFloat(getComputedStyle({focused}).outlineWidth)"))
    assert order[:2] == ["#pictures", "#results"] and "#learning" in order and order[-1] == "slide"
    assert min(outlines) >= 1
    page.keyboard.press("Space")
    page.keyboard.press("Tab")
    divider = page.locator(".divide input").first
    assert divider.evaluate("it => it === document.activeElement")
    # Firefox would put its place back after a reload, and not the picture's
    assert divider.get_attribute("autocomplete") == "off"
    clipped = "getComputedStyle(document.querySelector('.tuned-side:not([hidden]) img')).clipPath"
    middle = page.evaluate(clipped)
    page.keyboard.press("ArrowLeft")
    assert divider.input_value() == "0.49" and page.evaluate(clipped) != middle
    page.keyboard.press("Home")
    assert page.locator(".pair").first.evaluate("it => it.style.getPropertyValue('--at')") == "0"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("#alarms tbody td").nth(1).bounding_box()["width"] > 150  # a sentence


@pytest.mark.slow
def test_a_printed_page_is_light_and_nothing_is_cut_off(opened):
    page = opened(viewport={"width": 720, "height": 1000}, color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    tables = "[...document.querySelectorAll('.scroll')].map(it => it.scrollWidth - it.clientWidth)"
    assert max(page.evaluate(tables)) <= 0
