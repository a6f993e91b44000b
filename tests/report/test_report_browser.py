"""The report in a real Chromium: contrast as computed from its styles, and everything that the mouse does from the keyboard."""

import pytest

from g2rpo.report.history import read_runs
from g2rpo.report.page import render
from tests.demo.test_demo_browser import CHROMIUM, NEEDED, browser  # noqa: F401
from tests.report.test_report import make_run

pytestmark = pytest.mark.skipif(CHROMIUM is None and not NEEDED, reason="no Chromium here (Debian: apt-get install chromium)")

# WCAG 2.2, 1.4.3: text against the nearest background behind it; opacity counts, large or bold text needs 3, other text 4.5.
FAINT_TEXT = """() => {
  const parse = colour => { const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a)];
  const light = rgb => rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest("script, style, title")) continue;
    const style = getComputedStyle(element), chain = [];
    for (let at = element; at; at = at.parentElement) chain.unshift(getComputedStyle(at));
    const paper = chain.reduce((below, each) => over(parse(each.backgroundColor), below), [255, 255, 255]);
    const ink = parse(element.closest("svg") ? style.fill : style.color);
    ink[3] *= chain.reduce((product, each) => product * each.opacity, 1);
    const [high, low] = [light(over(ink, paper)), light(paper)].sort((a, b) => b - a), ratio = (high + 0.05) / (low + 0.05);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) found.push(`${walker.currentNode.data.trim()}: ${ratio.toFixed(2)}`);
  }
  return found;
}"""


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
    page.evaluate("document.querySelector('.summary').style.opacity = 0.3")
    assert len(page.evaluate(FAINT_TEXT)) == 1  # it would be found
    page.close()


def test_the_pictures_are_compared_from_the_keyboard(browser, address):  # noqa: F811
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(address)
    order, outlines = [], []
    for _ in range(13):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.getAttribute('href') ?? document.activeElement.className"))
        outlines.append(page.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)"))
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
    assert divider.input_value() == "0.48" and page.evaluate(f"getComputedStyle({shown}).clipPath") != middle
    page.keyboard.press("Home")
    assert page.locator(".pair").first.evaluate("it => it.style.getPropertyValue('--at')") == "0"
    places = (".base-side img", ".tuned-side:not([hidden]) img", ".divide")
    base, tuned, over = (page.locator(place).first.bounding_box() for place in places)
    assert base == tuned and over["y"] == base["y"] and over["height"] == pytest.approx(base["height"], abs=1)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()
