"""`g2rpo teach` as a person meets it: the real command, in a real Chromium, with mouse, keyboard
and a phone."""

import json
import os
import sys

from g2rpo.lab.teach import rounds
from tests.lab.demo.test_demo_browser import DESKTOP, PATIENCE_MS, PHONE
from tests.support.ports import free_port
from tests.support.processes import Forked
from tests.support.waiting import PATIENCE_S, until

SHORT = """scenes-fast sampling.num_steps=4 algorithm.group_size=4 algorithm.branch_steps=[0,1]
    evaluation.num_prompts=3"""


def test_a_session_by_mouse_keyboard_and_phone(tmp_path, browser):
    """From the first group to the files of a finished run; the console held no error."""
    run, port, log, errors = (tmp_path / "run", free_port(), tmp_path / "log", tmp_path / "errors")
    command = [*(sys.executable, "-P", "-m", "g2rpo", "teach"), *SHORT.split()]
    command += ["--run-dir", str(run), "--port", str(port)]
    with log.open("wb") as out, errors.open("wb") as err:
        process = Forked(command, stdout=out, stderr=err, env=dict(os.environ))
    try:
        address = f"http://127.0.0.1:{port}/"
        until(lambda: address in log.read_text(), what=errors.read_text)
        page, wrong = browser.new_context(viewport=DESKTOP, reduced_motion="reduce").new_page(), []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.set_default_timeout(PATIENCE_MS)
        page.goto(address)
        page.locator("[data-member]").first.wait_for()

        def answered(act):
            """Answers by `act`; the last line of votes.jsonl once the next group is shown."""
            shown = "() => document.querySelector('#asked img')?.src"
            before = page.evaluate(shown)
            act()
            page.wait_for_function(f"before => ({shown})() !== before", arg=before)
            return rounds.read_votes(run / "votes.jsonl")[-1]

        def click(place):
            return lambda: page.locator(place).first.click()

        assert page.locator("[data-member]").count() == 4
        for place in (0, 1, 1):  # the second time it is taken back
            page.locator(f"[data-member='{place}']").click(modifiers=["Shift"])
        assert answered(click("[data-member='2']")).liked == (0, 2)
        assert answered(lambda: page.keyboard.press("4")).liked == (3,)
        page.locator("[data-member='0']").focus()
        assert answered(lambda: page.keyboard.press("Enter")).liked == (0,)
        assert "Group 4 of" in page.locator("#asked [role=status]").inner_text()
        # neither a double click nor a held key answers the next group as well
        assert answered(lambda: page.locator("[data-member='1']").dblclick()).liked == (1,)
        assert answered(lambda: [page.keyboard.down("2") for _ in range(3)]).liked == (1,)
        page.keyboard.up("2")
        assert len(rounds.read_votes(run / "votes.jsonl")) == 5
        other = page.context.new_page()
        other.goto(page.url)
        other.locator("[data-member='0']").wait_for()
        assert answered(lambda: page.keyboard.press("n")).liked == ()
        other.locator("[data-member='0']").click()  # of a group that is answered: it shows the next
        other.get_by_text("is not the one that is asked").first.wait_for()
        other.close()
        assert answered(click("#undo")).kind == "undo"
        page.set_viewport_size(PHONE)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        first, second, third = (
            page.locator(f"[data-member='{member}'] img").bounding_box() for member in range(3)
        )
        assert first["y"] == second["y"] < third["y"] and first["width"] > PHONE["width"] / 3
        page.get_by_role("button", name="Finish").click()
        page.get_by_text("Finished.").wait_for()
        assert process.wait(timeout=PATIENCE_S) == 0
        page.context.close()
        assert wrong == [] and "Traceback" not in errors.read_text(), errors.read_text()
        assert json.loads((run / "results.json").read_text())["rewards"]
        assert (run / "adapter").is_dir() and (run / "pairs.jsonl").is_file()
    finally:
        process.terminate()
