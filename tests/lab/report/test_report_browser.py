"""The report in a real Chromium: contrast as computed from its styles, everything that the mouse
does from the keyboard, and printed."""

from g2rpo.lab.report.history import read_runs
from g2rpo.lab.report.page import render
from g2rpo.train.run.folder import Run
from tests.lab.report.pages import make_run, write_log
from tests.support.contrast import FAINT_TEXT

DIVIDED = "getComputedStyle(document.querySelector('.tuned-side:not([hidden]) img')).clipPath"
HIDDEN = "[...document.querySelectorAll('.scroll')].map(it => it.scrollWidth - it.clientWidth)"


def test_the_report_is_read_by_keyboard_on_a_phone_in_the_dark_and_on_paper(browser, tmp_path):
    run = make_run(tmp_path / "run")
    rows = Run(run).read_log()
    rows[-1]["alarms"] = {"drift": "log_prob_drift 0.0123 ± 0.0045 since iteration 0"}
    write_log(run, rows)
    (tmp_path / "page.html").write_text(render(read_runs([run])))
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(f"file://{tmp_path / 'page.html'}")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(FAINT_TEXT) == []

    focused, order, outlines = "document.activeElement", [], []
    while "slide" not in order and len(order) < 14:
        page.keyboard.press("Tab")
        order.append(page.evaluate(f"{focused}.getAttribute('href') ?? {focused}.className"))
        outlines.append(page.evaluate(f"parseFloat(getComputedStyle({focused}).outlineWidth)"))
    assert order[:2] == ["#pictures", "#results"] and "#learning" in order and order[-1] == "slide"
    assert min(outlines) >= 1
    page.keyboard.press("Space")
    page.keyboard.press("Tab")
    divider, middle = page.locator(".divide input").first, page.evaluate(DIVIDED)
    # Firefox would put its place back after a reload, and not the picture's
    assert divider.get_attribute("autocomplete") == "off"
    page.keyboard.press("ArrowLeft")
    assert divider.input_value() == "0.49" and page.evaluate(DIVIDED) != middle
    page.keyboard.press("Home")
    assert page.locator(".pair").first.evaluate("it => it.style.getPropertyValue('--at')") == "0"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("#alarms tbody td").nth(1).bounding_box()["width"] > 150  # a sentence

    page.set_viewport_size({"width": 720, "height": 1000})
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert max(page.evaluate(HIDDEN)) <= 0  # nothing is cut off
    page.evaluate("document.querySelector('.sentence').style.opacity = 0.3")
    assert len(page.evaluate(FAINT_TEXT)) == 1  # it would be found
    page.close()
