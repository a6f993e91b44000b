"""The documentation site: it builds without a warning, and its generated pages have what the code
has."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.tables import rows
from tools import docs_site

ROOT = Path(__file__).parents[2]
pytest.importorskip("mkdocs", reason="the extra `docs`")


@pytest.mark.slow  # as `make docs` in its own workflow, at every change
def test_the_site_builds_without_a_warning(tmp_path):
    """Links, anchors and the navigation are checked by mkdocs."""
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {page.parent.relative_to(site).as_posix() for page in site.rglob("index.html")}
    assert {"tutorial", "reference/config", "reference/api-types", "results/teach"} <= pages
    assert "GranularGRPO" not in (site / "reference/config/index.html").read_text()
    assert "sde_step" in (site / "reference/api-flow/index.html").read_text()


LINKS = """
models.md#x docs/rewards.md rewards.md -> models.md#x
../src/g2rpo/core/flow.py docs/a.md a.md -> REPOSITORY/blob/main/src/g2rpo/core/flow.py
../README.md#train docs/a.md a.md -> index.md#train
../studies/teach.md docs/a.md a.md -> results/teach.md
#y docs/a.md a.md -> #y
https://a.b docs/a.md a.md -> https://a.b
docs/models.md README.md index.md -> models.md
../docs/models.md studies/teach.md results/teach.md -> ../models.md
"""


@pytest.mark.parametrize(("words", "moved"), rows(LINKS))
def test_links_lead_to_the_sites_pages_or_to_the_repository(words, moved):
    link, source, page = words.split()
    moved = moved.replace("REPOSITORY", docs_site.REPOSITORY)
    assert docs_site.moved_links(f"[a]({link})", source, page) == f"[a]({moved})"


def test_modules_of_the_reference_exist():
    """Building the site finds a lost one too, but is slow."""
    for modules in docs_site.API.values():
        for module in modules:
            assert find_spec(f"g2rpo.{module}"), module
