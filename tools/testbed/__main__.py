"""Rebuilds a tiny FLUX, and the learned rewards of scenes, from nothing.

    python -m tools.testbed scenes --out DIR    # about an hour on two CPU cores
    python -m tools.testbed words --out DIR     # about 20 minutes on one

Each stage is skipped where its output already exists, so an interrupted build continues where it
stopped. The folder `work` in DIR holds what only the builder needs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.testbed.pipeline import build
from tools.testbed.scenes import Scenes
from tools.testbed.words import Words

TASKS = {"scenes": Scenes, "words": Words}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.testbed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="a few steps of every stage, to see that it runs"
    )
    given = parser.parse_args(words)
    build(TASKS[given.task](), given.out, seed=given.seed, quick=given.quick)


if __name__ == "__main__":
    main()
