"""Records a session of `g2rpo teach words` as an animation: `python -m tools.teach_recording`
(needs a Chromium).

A simulated person of studies.teach answers in a browser: those words that are spelt best. A
frame for each answer: the group and what is chosen, the fixed prompt before and now, and what the
page says. Writes teach.gif, the run to `--run-dir`, and a copy of its results to `--results`.
"""

from __future__ import annotations

import argparse
import base64
import io
import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from studies.teach import WORLDS
from studies.teach_people import SPELT, TASTES, click, values_of
from tools.demo_screenshots import FLAGS, MINUTE, served

WINDOW, WIDTH = (1180, 780), 720
SLOW, LAST = 700, 4000
"""Milliseconds of a frame, and of the last."""
SETTLED = "() => !document.querySelector('#status').innerText.includes('Learning …')"
ASKED = (
    "() => [...document.querySelectorAll('#asked [data-member] img')].map(picture => picture.src)"
)


def asked(page: Page) -> tuple[torch.Tensor, str]:
    """The pictures of the group or pair that is asked, [G, 3, H, W] in [0, 1], and their prompt."""
    files = [
        io.BytesIO(base64.b64decode(source.split(",", 1)[1])) for source in page.evaluate(ASKED)
    ]
    pictures = [np.asarray(Image.open(file).convert("RGB")) for file in files]
    stacked = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255
    return stacked, page.locator("#asked b").inner_text()


def shot(page: Page) -> Image.Image:
    page.evaluate("() => window.scrollTo(0, 0)")
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    return picture.resize(
        (WIDTH, WIDTH * picture.height // picture.width), Image.Resampling.LANCZOS
    )


def recorded(
    page: Page, taste: str, person: str, seed: int, groups: int, strength: float
) -> list[Image.Image]:
    """A frame for each answer, when what was learnt from the one before is done, and one for each
    comparison; then the page when all is answered."""
    frames = []
    page.locator("input[type=number]").fill(f"{strength:g}")
    page.keyboard.press("Tab")
    for round in range(groups):
        settle(page)
        frames += compared(page, taste)
        pictures, prompt = asked(page)
        liked = click(pictures, prompt, round, taste, person, seed)
        if len(liked) == 1:
            page.locator(f"[data-member='{liked[0]}']").hover()
        for member in liked if len(liked) > 1 else ():
            page.locator(f"#asked input[value='{member}']").check()
        frames.append(shot(page))
        if not liked:
            answer(page, "#skip")
        elif len(liked) == 1:
            answer(page, f"[data-member='{liked[0]}']")
        else:
            answer(page, "#several")
    settle(page)
    frames += compared(page, taste)
    if not page.locator(".teach-verdict").count():
        answer(page, "#blind")
        frames += compared(page, taste)
    page.mouse.move(0, 0)
    return [*frames, shot(page)]


def compared(page: Page, taste: str) -> list[Image.Image]:
    """Answers a comparison as the person sees it; a frame of its first pair. Empty if none is
    asked."""
    frames = list[Image.Image]()
    while page.locator("[data-pair]").count():
        pictures, prompt = asked(page)
        before, after = values_of(taste, pictures, [prompt] * 2).tolist()
        if not frames:
            frames.append(shot(page))
        answer(page, "#none" if before == after else f"[data-member='{int(after > before)}']")
    return frames


def settle(page: Page) -> None:
    """Waits until what was learnt from the last answer is done."""
    page.wait_for_timeout(1500)  # until the page has noticed that it learns
    page.wait_for_function(SETTLED)


def answer(page: Page, button: str) -> None:
    """Presses it, and waits for the next pictures."""
    shown = page.evaluate(ASKED)
    page.locator(button).click()
    page.wait_for_function(f"shown => ({ASKED})().join() !== shown.join()", arg=shown)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", choices=WORLDS, default="words")
    parser.add_argument("--taste", choices=[*TASTES, SPELT], default=SPELT)
    parser.add_argument("--person", choices=["clicks", "several"], default="several")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--strength", type=float, default=1, help="how far to go")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/taught"))
    parser.add_argument("--out", type=Path, default=Path("docs/images/teach.gif"))
    parser.add_argument(
        "--results", type=Path, default=Path("studies/results/teach_recording.json")
    )
    given = parser.parse_args()
    session = [
        "teach",
        given.world,
        *WORLDS[given.world][0],
        f"trainer.seed={given.seed}",
        "--run-dir",
        str(given.run_dir),
    ]
    with served(*session) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page(viewport={"width": WINDOW[0], "height": WINDOW[1]})
        page.set_default_timeout(2 * MINUTE)
        page.goto(address)
        page.locator("[data-member]").first.wait_for()
        frames = recorded(page, given.taste, given.person, given.seed, given.groups, given.strength)
        page.locator("#finish").click()
        page.get_by_text("Finished.").wait_for()
        browser.close()
    shutil.copy(given.run_dir / "results.json", given.results)
    small = [frame.quantize(64, kmeans=1) for frame in frames]
    times = [SLOW] * (len(small) - 1) + [LAST]
    small[0].save(
        given.out, save_all=True, append_images=small[1:], duration=times, loop=0, optimize=True
    )
    print(f"{given.out}: {given.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
