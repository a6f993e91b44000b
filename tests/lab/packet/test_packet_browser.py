"""A packet in a real Chromium, from the first pair to the file that opens the key."""

import pytest

from g2rpo.lab.packet.answers import open_key
from tests.lab.packet.packets import packet, side_of
from tests.support.contrast import FAINT_TEXT

KEYS = {"left": "ArrowLeft", "right": "ArrowRight", "same": "Space", "cannot tell": "c"}
SCREENS = {
    "desktop": {"viewport": {"width": 1280, "height": 800}},
    "phone": {"viewport": {"width": 390, "height": 844}, "has_touch": True, "color_scheme": "dark"},
}


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
