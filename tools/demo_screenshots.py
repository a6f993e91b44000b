"""Takes the pictures of docs/demo.md: `python -m tools.demo_screenshots runs/quickstart` (needs a
Chromium).

Starts `g2rpo demo` on a finished run of an embedded model, looks at what each tab opens with, on a
desktop and on a phone, and writes demo.png and demo_phone.png.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

DESKTOP, PHONE = (1000, 900), (390, 844)
GAP = 24
MINUTE = 60_000
FLAGS = ["--no-sandbox", "--disable-gpu", "--hide-scrollbars"]


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[str]:
    """The address of the page of a command of g2rpo with these arguments."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "g2rpo", *arguments, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = next(
                (line.split()[0] for line in process.stdout or () if line.startswith("http")), None
            )
            if address is None:
                sys.exit(f"{' '.join(command)} did not start")
            yield address
        finally:
            process.terminate()


def screens(browser: Browser, address: str, size: tuple[int, int]) -> Iterator[Image.Image]:
    """Each tab as it opens, as high as the window and scrolled to what matters."""
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    page.goto(address)
    page.wait_for_selector("#draw", timeout=MINUTE)
    yield _shot(page, "#drawing" if size == PHONE else None)
    page.get_by_role("tab", name="How it learns").click()
    page.wait_for_selector("#group img", timeout=MINUTE)
    yield _shot(page, "#group")
    page.get_by_role("tab", name="The run").click()
    page.frame_locator("iframe.g2-report").get_by_role("heading", name="Pictures").first.wait_for(
        timeout=MINUTE
    )
    yield _shot(page, None)
    page.close()


def _shot(page: Page, top: str | None) -> Image.Image:
    page.wait_for_timeout(1500)  # for what still moves
    page.evaluate("top => top ? document.querySelector(top).scrollIntoView() : scrollTo(0, 0)", top)
    page.wait_for_timeout(500)
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


def beside(pictures: Sequence[Image.Image]) -> Image.Image:
    """The pictures from left to right, on grey."""
    sheet = Image.new(
        "RGB",
        (sum(p.width for p in pictures) + GAP * (len(pictures) + 1), pictures[0].height + 2 * GAP),
        "#c8ccd4",
    )
    left = GAP
    for picture in pictures:
        sheet.paste(picture, (left, GAP))
        left += picture.width + GAP
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    given = parser.parse_args()
    with served("demo", str(given.run)) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for name, size, shown in (("demo", DESKTOP, 2), ("demo_phone", PHONE, 3)):
            pictures = list(screens(browser, address, size))[:shown]
            path = given.out / f"{name}.png"
            beside(pictures).quantize(256, kmeans=3).save(path, optimize=True)
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
        browser.close()


if __name__ == "__main__":
    main()
