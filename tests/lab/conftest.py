"""A real Chromium for the pages of the laboratory."""

import os
import shutil

import pytest

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    names = "chromium", "chromium-browser", "google-chrome"
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        needed = os.environ.get("G2RPO_NEEDS_CHROMIUM")  # set by .ci/run
        assert not needed, "G2RPO_NEEDS_CHROMIUM is set, and there is no Chromium"
        pytest.skip("no Chromium here (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()
