"""Runs what is hosted elsewhere from a wheel in an empty environment: the Space of examples/space
and the notebook examples/teach.ipynb (needs a Chromium).

    python -m build && python -m tools.check_hosted dist/g2rpo-*-py3-none-any.whl

Installs the wheel, starts both pages of the Space by the name of their proxy, and clicks on a picture
of the one that teaches; then runs the notebook's cells as a script, clicking in its page. Prints the
seconds from the wheel to each page.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import sync_playwright

MINUTE = 60_000
FLAGS = ["--no-sandbox", "--disable-gpu", "--hide-scrollbars"]

ROOT = Path(__file__).parents[1]
HOSTS = "--host-resolver-rules=MAP space.example 127.0.0.1"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def installed(wheel: Path, folder: Path) -> str:
    """The Python of a new environment that has the wheel, as the Space's requirements ask for."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(folder / "bin" / "python")
    own = ["--quiet", "--constraint", str(ROOT / "constraints.txt"), "torch==2.13.0"]
    own += [f"g2rpo[demo,ocr] @ {wheel.resolve().as_uri()}"]
    subprocess.run([python, "-m", "pip", "install", *own], check=True)
    return python


def wait(address: str, runs: Callable[[], bool]) -> None:
    """Until a page answers, while its process runs."""
    local = f"http://127.0.0.1:{address.rsplit(':', 1)[1]}"
    while True:
        try:
            urllib.request.urlopen(local).close()
            break
        except urllib.error.HTTPError:
            break  # it asks for the name of its proxy
        except urllib.error.URLError:
            if not runs():
                sys.exit("the page did not open")
            time.sleep(0.5)


def click(address: str) -> None:
    """Clicks on the first picture of the first group of a page that teaches, and waits for the next group."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=[*FLAGS, HOSTS]
        )
        page = browser.new_page()
        page.set_default_timeout(5 * MINUTE)
        page.goto(address)
        picture = page.locator("[data-member='0']")
        picture.wait_for()
        shown = picture.locator("img").get_attribute("src")
        picture.click()
        page.wait_for_function(
            "shown => { const it = document.querySelector(\"[data-member='0'] img\");"
            " return it && it.src !== shown }",
            arg=shown,
        )
        browser.close()


def check_space(python: str, kind: str, folder: Path) -> None:
    """Starts the Space as a host does: its proxy asks by the Space's own name."""
    port = free_port()
    own = {"SPACE_HOST": f"space.example:{port}", "GRADIO_SERVER_PORT": str(port)}
    environment = {**os.environ, **own, "G2RPO_PAGE": kind, "HOME": str(folder)}
    folder.mkdir()
    app = subprocess.Popen([python, ROOT / "examples/space/app.py"], cwd=folder, env=environment)
    try:
        address = f"http://space.example:{port}"
        wait(address, lambda: app.poll() is None)
        if kind == "teach":
            click(address)
    finally:
        app.terminate()
        app.wait()


def check_notebook(python: str, folder: Path) -> None:
    """Runs the cells of the notebook as a script; a person clicks once while they wait."""
    cells = json.loads((ROOT / "examples/teach.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    clicked = (
        "import pathlib, time\nwhile not pathlib.Path('clicked').exists():\n    time.sleep(0.5)"
    )
    folder.mkdir()
    script = folder / "notebook.py"
    script.write_text("\n".join([*code[:2], clicked, *code[2:]]))
    environment = {**os.environ, "MPLBACKEND": "agg", "HOME": str(folder)}
    run = subprocess.Popen([python, script], cwd=folder, env=environment)

    def person() -> None:
        address = "http://127.0.0.1:7861"
        wait(address, lambda: run.poll() is None)
        click(address)
        (folder / "clicked").touch()

    threading.Thread(target=person, daemon=True).start()
    if run.wait():
        sys.exit("the notebook failed")
    votes = (folder / "taught/votes.jsonl").read_text().splitlines()
    if not any(json.loads(vote)["liked"] for vote in votes):
        sys.exit("the click is not among the answers")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel
    with tempfile.TemporaryDirectory() as work:
        begun = time.monotonic()
        python = installed(wheel, Path(work) / "environment")
        install = time.monotonic() - begun
        print(f"{install:4.0f} s  install", flush=True)
        for kind in ("demo", "teach"):
            begun = time.monotonic()
            check_space(python, kind, Path(work) / kind)
            print(f"{install + time.monotonic() - begun:4.0f} s  Space, {kind}: from the wheel")
        begun = time.monotonic()
        subprocess.run([python, "-m", "pip", "install", "--quiet", "ipython"], check=True)
        check_notebook(python, Path(work) / "notebook")
        print(f"{time.monotonic() - begun:4.0f} s  notebook, all cells")


if __name__ == "__main__":
    main()
