"""The wheel holds everything that a user needs, and nothing of ours."""

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from g2rpo import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


@pytest.mark.slow  # builds it
def test_the_wheel_is_complete_and_says_who_it_is(tmp_path):
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path]
    built = subprocess.run([*command, ROOT], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = tmp_path.glob("*.whl")
    wheel = zipfile.ZipFile(path)
    names = wheel.namelist()
    for file in (ROOT / "src" / "g2rpo").rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            assert str(file.relative_to(ROOT / "src")) in names
    assert {re.match("[a-z0-9]+", name)[0] for name in names} == {"g2rpo"}
    entry, metadata = (
        wheel.read(next(name for name in names if name.endswith(end))).decode()
        for end in ("entry_points.txt", "METADATA")
    )
    assert "g2rpo = g2rpo.__main__:main" in entry
    for line in (
        "License-Expression: Apache-2.0",
        "Author: g2rpo contributors",
        "Requires-Dist: torch>=2.7",
    ):
        assert line in metadata
    assert "torchvision" not in metadata  # its CPU wheel breaks transformers and diffusers


def test_the_changelog_and_how_to_cite_have_this_version():
    assert f"\n## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__


def test_workflows_are_well_formed_and_start_what_exists():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text())["jobs"]
        commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
        scripts = [command for command in commands if command.startswith(("tools/", ".ci/"))]
        assert all((ROOT / script).stat().st_mode & 0o100 for script in scripts), path
        publishing = [job for job in jobs.values() if "id-token" in job.get("permissions", {})]
        # off until a maintainer enables it
        assert all("if" in job and "environment" in job for job in publishing), path
        assert not re.search(r"^\w+_(TOKEN|PASSWORD)|secrets\.", path.read_text()), path


def pins(text):
    lines = [line for line in text.splitlines() if "==" in line]
    return {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines}


def needed(wanted, installed):
    """Names of all distributions that requirements lead to, by what is installed; without CUDA's,
    which torch pins itself and a torch for CPUs does not need."""
    seen, left = set(), [Requirement(each) for each in wanted]
    while left:
        requirement = left.pop()
        key = (canonicalize_name(requirement.name), *sorted(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        for inner in map(Requirement, installed[key[0]].requires or ()):
            extras = [{"extra": extra} for extra in requirement.extras or {""}]
            if inner.marker is None or any(map(inner.marker.evaluate, extras)):
                left.append(inner)
    cuda = ("nvidia-", "cuda-", "triton")
    return {name for name, *_ in seen if not name.startswith(cuda)}


def test_constraints_suit_every_python_that_is_supported():
    """A pin that the oldest one cannot have sends pip's resolver through hundreds of versions, for
    half an hour."""
    oldest = PROJECT["requires-python"].removeprefix(">=")
    pinned = pins(CONSTRAINTS)
    for each in distributions():
        if pinned.get(canonicalize_name(each.metadata["Name"])) == each.version:
            asked = SpecifierSet(each.metadata["Requires-Python"] or "")
            assert asked.contains(f"{oldest}.0"), each.metadata["Name"]


def test_constraints_pin_what_tests_need_and_nothing_else():
    """Trackers that no test installs have pins of their own, beside these."""
    extras = PROJECT["optional-dependencies"]
    names = ("data", "demo", "docs", "ocr", "quantized", "video", "dev")
    tested = [each for name in names for each in extras[name] if "g2rpo" not in each]
    wanted = [*PROJECT["dependencies"], *tested]
    installed = {canonicalize_name(each.metadata["Name"]): each for each in distributions()}
    tested, trackers = CONSTRAINTS.split("# Trackers")
    assert needed(wanted, installed) - {"setuptools"} == pins(tested).keys()
    assert not pins(tested).keys() & pins(trackers).keys()
    assert "wandb" in pins(trackers)
