"""The wheel holds everything that a user needs, and nothing of ours."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_is_complete(wheel):
    names = set(wheel.namelist())
    shipped = [p for p in (ROOT / "src" / "g2rpo").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    missing = [p for p in shipped if str(p.relative_to(ROOT / "src")) not in names]
    assert not missing
    assert not [name for name in names if name.startswith(("tests", "docs", "tools", "benchmarks"))]


def test_the_wheel_says_who_it_is(wheel):
    (entry,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "g2rpo = g2rpo.cli:main" in wheel.read(entry).decode()
    (metadata,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
    text = wheel.read(metadata).decode()
    assert "License-Expression: Apache-2.0" in text and "Requires-Dist: torch>=2.6" in text
    assert "torchvision" not in text  # its CPU wheel breaks transformers and diffusers


def test_python_m_g2rpo_is_g2rpo():
    told = subprocess.run([sys.executable, "-m", "g2rpo", "recipes"], capture_output=True, text=True, check=False)
    assert told.returncode == 0 and "scenes" in told.stdout
