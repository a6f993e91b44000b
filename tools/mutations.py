"""Changes one formula or rule at a time in a copy of the repository, as mutations.toml says, and runs
the fast tests that should fail then.

    python -m tools.mutations                # all: a quarter of an hour; exits with 1 if a change survives
    python -m tools.mutations flow updater   # those whose file has one of these words in its path

A change that survives is a behaviour that no named test guards. Each is tried in a process that is
forked before g2rpo is imported, so libraries are loaded once.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src/g2rpo")
LIMIT = 600
"""Seconds after which a change counts as noticed: it may keep a loop from ending."""


@dataclass(frozen=True)
class Mutation:
    """`old`, which stands once in `file`, becomes `new`; `tests` are arguments of pytest."""

    file: str
    old: str
    new: str
    tests: str

    def applied(self, text: str) -> str:
        """`text` with the change, whatever the formatter did to its lines."""
        parts = [re.escape(part) for part in re.findall(r"\w+|[^\w\s]", self.old)]
        pattern = r"\s*".join(
            rf",?\s*{part}" if part in (r"\)", r"\]", r"\}") else part for part in parts
        )
        found = re.findall(pattern, text)
        if len(found) != 1:
            raise SystemExit(f"{self.file}: {len(found)} times, not once: {self.old}")
        return text.replace(found[0], self.new.strip())


MUTATIONS = [
    Mutation(file, *change)
    for file, changes in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
    for change in changes
]


def copied(folder: Path) -> Path:
    """The repository at `folder`, but for what tests do not read."""
    made = {"runs", "build", "dist", "site"}

    def unread(place: str, names: list[str]) -> set[str]:
        return {
            name
            for name in names
            if name[0] == "." or name == "__pycache__" or (Path(place) == ROOT and name in made)
        }

    return Path(shutil.copytree(ROOT, folder / "copy", ignore=unread))


def outcome(copy: Path, tests: str) -> int:
    """The exit code of pytest in `copy`: 0 passed, 1 failed; anything else is no verdict."""
    child = os.fork()
    if child == 0:
        os._exit(_tested(copy, tests))
    ends = time.monotonic() + LIMIT
    while time.monotonic() < ends:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return 1


def _tested(copy: Path, tests: str) -> int:
    import pytest

    said = os.open(copy / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.chdir(copy)
    sys.path[:] = [
        str(copy),
        str(copy / "src"),
        *(place for place in sys.path if Path(place or ".").resolve() not in (ROOT, ROOT / "src")),
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    fast = "not slow and not apart"
    return int(pytest.main(["-q", "-x", "-m", fast, "-p", "no:cacheprovider", *tests.split()]))


def main(words: list[str]) -> int:
    # a change within a second has the modification time of what it replaces
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    import diffusers.pipelines.flux  # noqa: F401
    import peft  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401

    chosen = [
        mutation
        for mutation in MUTATIONS
        if not words or any(word in mutation.file for word in words)
    ]
    if not chosen:
        raise SystemExit(f"no file that is changed has {' or '.join(words)} in its path")
    survived = []
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        for tests in dict.fromkeys(mutation.tests for mutation in chosen):
            if code := outcome(copy, tests):
                raise SystemExit(
                    f"without any change, {tests} ends with {code}:\n{(copy / 'said.txt').read_text()[-2000:]}"
                )
        for mutation in chosen:
            file = copy / PACKAGE / mutation.file
            text = file.read_text(encoding="utf-8")
            file.write_text(mutation.applied(text), encoding="utf-8")
            code = outcome(copy, mutation.tests)
            file.write_text(text, encoding="utf-8")
            verdict = {0: "SURVIVED", 1: "killed"}.get(code, f"BROKEN ({code})")
            if code != 1:
                survived.append(mutation)
            print(
                f"{verdict:9} {mutation.file}: {mutation.old.strip()}  ->  {mutation.new.strip()}",
                flush=True,
            )
    print(f"{len(chosen) - len(survived)} of {len(chosen)} killed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
