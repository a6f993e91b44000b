"""A packet in a real Chromium, from the first pair to the file that opens the key."""

import pytest

from g2rpo.lab.packet.answers import open_key
from g2rpo.lab.packet.make import write_packet
from g2rpo.policies.gaussian import GaussianPolicy
from tests.lab.packet.packets import judged, packet, side_of
from tests.support.contrast import FAINT_TEXT

KEYS = {"left": "ArrowLeft", "right": "ArrowRight", "same": "Space", "cannot tell": "c"}
SCREENS = {
    "desktop": {"viewport": {"width": 1280, "height": 800}},
    "phone": {"viewport": {"width": 390, "height": 844}, "has_touch": True, "color_scheme": "dark"},
}


class Odd(GaussianPolicy):
    """Takes any text for a prompt."""

    def encode(self, prompts):
        return super().encode(["0"] * len(prompts))


def see(page, number):
    """Waits until a pair can be answered."""
    page.wait_for_selector(
        f'main:has(#progress:text-is("Pair {number} of 12")) .two[aria-busy=false]'
    )


def fill_in(page, says, answer):
    """Answers all pairs as `says`; the page is loaded again in between, and one answer is mended."""
    for number, said in enumerate(says, 1):
        see(page, number)
        if number == 4:
            page.reload()
            see(page, 4)
            answer("same")
            see(page, 5)
            page.click("#back")
            see(page, 4)
            assert page.locator("[aria-pressed=true]").get_attribute("data-answer") == "same"
        answer(said)
    page.wait_for_selector("#end:not([hidden])")


@pytest.mark.slow
@pytest.mark.parametrize("screen", SCREENS)
def test_a_person_fills_in_a_packet_and_its_key_is_opened(browser, tmp_path, screen):
    """By the keyboard, or by taps; who prefers tuned pictures, and cannot tell once."""
    made = packet(tmp_path)
    says = [side_of(pair, "tuned") for pair in made.key.pairs]
    unsure = says.index("left")
    says[unsure] = "cannot tell"
    page = browser.new_page(accept_downloads=True, **SCREENS[screen])
    asked, wrong = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(made.page.as_uri())
    see(page, 1)
    assert page.evaluate(FAINT_TEXT) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    def answer(said):
        if screen == "phone":
            page.tap(f'[data-answer="{said}"]')
        else:
            page.keyboard.press(KEYS[said])

    fill_in(page, says, answer)
    assert page.evaluate(FAINT_TEXT) == []
    page.fill("#name", "Zoë")
    with page.expect_download() as saved:
        page.click("#save")
    saved.value.save_as(tmp_path / "zoe.json")
    assert page.input_value("#text") == (tmp_path / "zoe.json").read_text()
    assert "among your downloads" in page.inner_text("#end") and "Thank you" in page.inner_text(
        "#end"
    )
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("#again")
    see(page, 1)
    page.click("#stop")
    assert page.locator("#save").is_disabled()
    page.close()
    assert not wrong and all(url.startswith(("file:", "data:", "blob:")) for url in asked)

    (person,) = open_key(tmp_path / "mine", [tmp_path / "zoe.json"])[0].people
    assert person.name == "Zoë" and (person.answered, person.tuned, person.cannot_tell) == (
        10,
        9,
        1,
    )
    assert (person.base, person.controls_same) == (0, 2)


@pytest.mark.slow
def test_two_tabs_are_one_person_and_lose_nothing(browser, tmp_path):
    """Both were opened before the first answer."""
    made = packet(tmp_path)
    context = browser.new_context(accept_downloads=True)
    tabs = [context.new_page() for _ in range(2)]
    for tab in tabs:
        tab.goto(made.page.as_uri())
        see(tab, 1)
    for number in (1, 2, 3):
        see(tabs[0], number)
        tabs[0].keyboard.press("ArrowLeft")
    see(tabs[0], 4)
    for number in (1, 2):
        see(tabs[1], number)
        tabs[1].keyboard.press("c")
    files = []
    for place, tab in enumerate(tabs):
        tab.click("#stop")
        with tab.expect_download() as saved:
            tab.click("#save")
        files.append(tmp_path / f"{place}.json")
        saved.value.save_as(files[-1])
    context.close()
    assert files[0].read_text() == files[1].read_text()
    (person,) = open_key(tmp_path / "mine", files[:1])[0].people
    assert person.answered + person.controls == 3


@pytest.mark.slow
def test_a_browser_that_keeps_nothing_asks_before_the_page_is_left(browser, tmp_path):
    made = packet(tmp_path)
    page = browser.new_page()
    page.add_init_script("Storage.prototype.setItem = () => { throw new Error('full'); }")
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(made.page.as_uri())
    see(page, 1)
    assert not page.is_visible("#kept")
    page.keyboard.press("ArrowLeft")
    see(page, 2)
    page.keyboard.press("ArrowRight")
    see(page, 3)
    page.click("#stop")
    assert "answered 2 of 12" in page.inner_text("#count")
    with page.expect_event("dialog") as asked:
        page.evaluate("setTimeout(() => location.reload())")
    assert asked.value.type == "beforeunload"
    page.close()


@pytest.mark.slow
def test_any_prompt_is_shown_as_it_is_and_leaves_room_for_the_pictures(browser, tmp_path):
    """Markup, quotes, an end of the script, right to left, and very long."""
    odd = [
        "</script><b onclick='x'>\u2028\"`${1}`",
        "\u05e9\u05dc\u05d5\u05dd!",
        "very long " * 300,
    ]
    judging, run = judged(tmp_path / "mine", Odd(), odd)
    made = write_packet(judging, run, tmp_path / "out", 24, 0)
    page = browser.new_page(**SCREENS["phone"])
    page.goto(made.page.as_uri())
    for number, pair in enumerate(made.key.pairs, 1):
        page.wait_for_selector(f'#progress:text-is("Pair {number} of 3")')
        page.wait_for_selector(".two[aria-busy=false]")
        assert page.evaluate("document.querySelector('#prompt').textContent") == pair.prompt
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        box = page.locator(".two").bounding_box()
        assert box["y"] + box["height"] < SCREENS["phone"]["viewport"]["height"]
        side = page.evaluate("getComputedStyle(document.querySelector('#prompt')).direction")
        assert side == ("rtl" if "\u05e9" in pair.prompt else "ltr")
        page.keyboard.press("c")
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize("cut", [True, False])
def test_a_page_that_cannot_run_says_so(browser, tmp_path, cut):
    page, made = browser.new_page(java_script_enabled=cut), packet(tmp_path).page
    if cut:  # as a download that broke off
        made.write_bytes(made.read_bytes()[:-3000])
    page.goto(made.as_uri())
    assert page.is_visible("text=the file is incomplete")
    page.close()
