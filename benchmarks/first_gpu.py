"""The first minutes with a GPU: one command that measures what is otherwise computed or assumed.

    python -m benchmarks.first_gpu first                                        # at most 25 minutes
    python -m benchmarks.first_gpu first --tiny --device cpu --minutes 60 --out FOLDER   # a rehearsal on any machine

Weights are random, so nothing is downloaded. Cases follow by worth (`CASES`), each in a process of
its own. One whose expected seconds are not left is skipped. benchmarks/results/gpu_CARD_DATE.json
is replaced after every case, so that a stop at any moment keeps what was measured; the same command
again goes on with what it lacks. At the end measured.jsonl beside it gets a line for each case that
has figures, with card and commit. Beside the figures is what `g2rpo plan` says of them, and what
measured.jsonl has of the same card. Exit code 1: a case failed, or a check is beyond its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# the second: no CUDA in the process that forks
os.environ |= {"HF_HUB_OFFLINE": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
BEGAN = time.monotonic()

from benchmarks import gpu_cases  # noqa: E402, F401  imported for the forks
from benchmarks.forked import Forked  # noqa: E402

Case = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
MODULE = "benchmarks.gpu_cases"
LATE = "failed: not done after"
PATIENCE = 3
"""A case is ended after so many times its expected seconds."""
PLANNED = ("model", "ways", "limited")
"""Kinds of cases that `g2rpo plan` knows figures of."""
TOLERANCE = 0.25
"""How far a measured figure may be from the plan's before it is listed."""


def case(
    recipe: str, *overrides: str, kind: str = "model", seconds: int = 40, **changes: Any
) -> Case:
    """A case of a recipe, with its expected seconds. `blocks`: of every kind, None for all.
    `rehearsed`: also with --tiny."""
    what = "whole" if kind == "model" and changes.get("blocks", 2) is None else kind
    name = " ".join([what, recipe, *overrides])
    usual = {"blocks": 2, "iterations": 2, "passes": True, "again": False, "loop": False}
    # a compiler for the CPU takes minutes
    usual["rehearsed"] = COMPILED not in overrides
    return {
        "name": name,
        "kind": kind,
        "recipe": recipe,
        "overrides": overrides,
        "seconds": seconds,
        **usual,
        **changes,
    }


FLUX, KLEIN = "flux1-dev-lora", "flux2-klein-lora"
COMPILED = "policy.compile=true"
WHOLE: dict[str, Any] = {"blocks": None, "iterations": 0}
RECIPES = (FLUX, KLEIN, "sd35-medium-lora", "qwen-image-lora", "z-image-lora", "wan-lora")
CASES = [
    # whether what follows is true
    case(FLUX, kind="layouts", seconds=10),
    case(FLUX, kind="drift", seconds=40),
    # (a) three of the eight branch steps of the published iteration, beside its order of calls
    case("flux1-dev-hps", "policy.tuning=lora", "policy.lora_rank=64", "policy.autocast=false",
         "algorithm.update_every=rollout", "algorithm.branch_steps=[0,3,6]", "algorithm.group_size=12",
         kind="ways", seconds=420, loop=True, **WHOLE),
    # (b) the same of MixGRPO
    case(FLUX, "algorithm.name=mixgrpo", "algorithm.update_every=rollout", "sampling.num_steps=25",
         "algorithm.group_size=12", kind="ways", seconds=180, loop=True, **WHOLE),
    # (c) blocks in host memory, within so much
    case("flux1-dev-evening-16gb", "algorithm.group_size=12", kind="limited", seconds=200, **WHOLE),
    # (d) compiled: calls, gradients, drift, a resumed run; attention; memory without checkpointing
    case(FLUX, kind="ways", seconds=200, **WHOLE),
    case("scenes", COMPILED, "policy.tuning=lora", kind="resumed", seconds=180),
    case(FLUX, "policy.attention=cudnn", seconds=30, passes=False, **WHOLE),
    *(case(name, "policy.gradient_checkpointing=false", **WHOLE) for name in ("sd35-medium-lora", "wan-lora")),
    # (f) the rest; (e), a study of learning, is a command of its own (studies/README.md)
    case("scenes", kind="beside_cpu", seconds=100),
    case("scenes", kind="resumed", seconds=60),
    case(FLUX, seconds=70, blocks=None),
    case(FLUX, kind="exact", seconds=30, blocks=1),
    case("scenes", kind="twice", seconds=25),
    case(KLEIN, seconds=60, blocks=None),
    *(case(recipe, seconds=30) for recipe in RECIPES[2:]),
    *(case(recipe, kind="exact", seconds=30, blocks=1) for recipe in RECIPES[1:]),
    case(KLEIN, "policy.autocast=true", "policy.tuning=full", "optim.learning_rate=1e-5"),
    *(case(FLUX, f"policy.quantize={kind}", **WHOLE) for kind in ("int8", "nf4")),
    *(case(recipe, **WHOLE) for recipe in RECIPES[2:]),
    *(
        # flash, which torch takes by itself, adds gradients in an order that varies
        case(FLUX, option, iterations=1, again=option.startswith("policy.attention"))
        for option in (
            "policy.attention=math",
            "policy.quantize=int8",
            "policy.quantize=nf4",
        )
    ),
    case("scenes", "policy.dtype=bfloat16", "policy.tuning=lora", kind="twice"),
    # whose input pictures are large
    *(case(recipe, rehearsed=False) for recipe in ("kontext-lora", "qwen-image-edit-lora")),
]  # fmt: skip


def ran(given: Case, folder: Path, seconds: float) -> dict[str, Any]:
    """What a case found in at most so many seconds, and how it ended."""
    asked, left, log = (folder / name for name in ("case.json", "found.json", "log"))
    for old in (left, log):
        old.unlink(missing_ok=True)
    asked.write_text(json.dumps({**given, "folder": str(folder)}))
    began, state = time.monotonic(), ""
    process = Forked(MODULE, [str(asked), str(left)], log, group=True)
    try:
        if code := process.wait(seconds):
            state = f"failed: ended with {code}"
    except subprocess.TimeoutExpired:
        state = f"{LATE} {seconds:.0f} s"
    finally:
        process.kill()
    found = (
        json.loads(left.read_text())
        if left.is_file()
        else {"notes": {}, "errors": {"start": "nothing was found"}}
    )
    if not state:
        state = (
            "refused" if "refused" in found["notes"] else "failed" if found["errors"] else "done"
        )
    said = {"log": log.read_text(errors="replace")[-3000:]} if state.startswith("failed") else {}
    return {"state": state, "seconds": round(time.monotonic() - began, 1), **found, **said}


class Session:
    """The result file of a card and a day."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.folder = folder
        given = {"tiny": args.tiny, "device": args.device}
        machine = ran({"kind": "machine", **given}, folder, 120)
        if "refused" in machine["notes"]:
            raise SystemExit(f"--device {args.device}: {machine['notes']['refused']}")
        self.card, now = machine["notes"].get("device", "unknown"), datetime.now(UTC)
        self.path = (
            args.out
            / f"gpu_{re.sub(r'[^a-z0-9]+', '-', self.card.lower()).strip('-')}_{now:%Y-%m-%d}.json"
        )
        self.cases: dict[str, Any] = (
            json.loads(self.path.read_text())["cases"] if self.path.is_file() else {}
        )
        self.about = {
            "card": self.card,
            "date": now.isoformat(timespec="seconds"),
            "commit": commit(),
            "machine": machine,
            **given,
        }
        every = [
            each | given
            for each in CASES
            if args.only in each["name"] and (each["rehearsed"] or not args.tiny)
        ]
        self.todo = [
            each
            for each in every
            if self.cases.get(each["name"], {}).get("state") not in ("done", "refused")
        ]
        print(
            f"{self.card}, {self.about['date']}, commit {self.about['commit']}: {self.path}",
            flush=True,
        )

    def save(self) -> None:
        """Replaces the file, with what the process that plans has found so far."""
        planned = self.folder / "planned.json"
        plans = (
            json.loads(planned.read_text()) if planned.is_file() else {"notes": {}, "errors": {}}
        )
        for name, found in self.cases.items():
            if name in plans["notes"]:
                found["planned"] = plans["notes"][name]
            if name in plans["errors"]:
                found.setdefault("errors", {})["plan"] = plans["errors"][name]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.with_suffix(".new").write_text(
            json.dumps({**self.about, "cases": self.cases}, indent=1) + "\n"
        )
        os.replace(self.path.with_suffix(".new"), self.path)

    def run(self, minutes: float, tiny: bool) -> None:
        """The cases that have no answer yet and fit into the minutes since the command began."""
        ends = BEGAN + 60 * minutes
        plans = self.folder / "plans.json"
        plans.write_text(json.dumps([each for each in self.todo if each["kind"] in PLANNED]))
        given = [str(plans), str(self.folder / "planned.json"), self.card]
        planning = Forked(
            MODULE, given, self.folder / "plans.log", group=True, CUDA_VISIBLE_DEVICES=""
        )
        try:
            for each in self.todo:
                left, name = ends - time.monotonic(), each["name"]
                if left < each["seconds"]:
                    self.cases[name] = {"state": "skipped", "seconds": 0}
                    print(
                        f"{name}: skipped, is expected to take {each['seconds']} s of {max(left, 0):.0f} left",
                        flush=True,
                    )
                else:
                    limit = left if tiny else min(left, PATIENCE * each["seconds"])
                    self.cases[name] = found = ran(each, self.folder, limit)
                    spent = time.monotonic() - BEGAN
                    print(
                        f"{name}: {found['state']}, {found['seconds']} s, {spent:.0f} of {60 * minutes:.0f} s",
                        flush=True,
                    )
                self.save()
            planning.wait(max(1.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            print("the plan of the last cases was not finished")
        finally:
            planning.kill()
            self.save()


def commit() -> str:
    """The commit of the code, or "unknown" where it is no checkout."""
    asked = ["git", "-C", str(RESULTS), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def earlier(path: Path, card: str) -> dict[str, dict[str, Any]]:
    """The last line of each case on this card."""
    lines = path.read_text().splitlines() if path.is_file() else []
    rows = [row for row in map(json.loads, lines) if row["card"] == card]
    return {row["case"]: row for row in rows}


def add(path: Path, about: dict[str, Any], cases: dict[str, Any]) -> None:
    """Appends a line for each case with figures."""
    known = {name: about[name] for name in ("card", "date", "commit")}
    with path.open("a") as file:
        for name, found in cases.items():
            if figures := found.get("measured"):
                row = {**known, "case": name, "state": found["state"], "measured": figures}
                file.write(json.dumps(row) + "\n")


def beyond(found: dict[str, Any]) -> list[str]:
    """The checks of a case that failed."""
    checks = found.get("checks", {}).items()
    return [
        f"{name}: {float(value):.3g}, at most {limit:g}"
        for name, (value, limit) in checks
        if not float(value) <= limit
    ]


def written(name: str, value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if name.endswith("bytes") else f"{value:.4g}"


def summary(cases: dict[str, Any], before: dict[str, dict[str, Any]]) -> str:
    """A line for every figure, beside the plan's and the one measured before; for every check; and
    for what is wrong."""
    lines, wrong = [], []
    for name, found in cases.items():
        if found["state"] != "skipped":
            lines.append(f"\n{name}: {found['state']}")
        for figure, value in found.get("measured", {}).items():
            line, expected = (
                f"  {figure}: {written(figure, value)}",
                found.get("planned", {}).get(
                    figure.rpartition(", ")[0] if figure.endswith((" GB", " as it is")) else figure
                ),
            )
            if expected:
                off = " <- beside the plan" if abs(value / expected - 1) > TOLERANCE else ""
                line += f", planned {written(figure, expected)}, ratio {value / expected:.2f}{off}"
            if old := before.get(name, {"measured": {}})["measured"].get(figure):
                line += f", {written(figure, old)} at {before[name]['commit']}"
            lines.append(line)
        lines += [
            f"  {check}: {float(value):.3g}, at most {limit:.3g}"
            for check, (value, limit) in found.get("checks", {}).items()
        ]
        lines += (
            [
                f"  {figure}: {values}"
                for figure, values in found["notes"].get("side by side", {}).items()
            ]
            if "notes" in found
            else []
        )
        wrong += (
            [f"{name}: {found['state']}"]
            if found["state"].startswith(("failed", "refused"))
            else []
        )
        wrong += [f"{name}: {step}: {error}" for step, error in found.get("errors", {}).items()]
        wrong += [f"{name}: {check}" for check in beyond(found)]
    return "\n".join([*lines, "", "Failed, refused, or beyond a limit:", *(wrong or ["nothing"])])


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes are ended
    with tempfile.TemporaryDirectory(prefix="first_gpu_") as folder:
        session = Session(args, Path(folder))
        session.about["command"] = (
            f"python -m benchmarks.first_gpu {' '.join(sys.argv[1:] if given is None else given)}"
        )
        session.run(args.minutes, args.tiny)
    every = {"machine": session.about["machine"], **session.cases}
    log = session.path.with_name("measured.jsonl")
    print(summary(every, earlier(log, session.card)))
    add(log, session.about, {each["name"]: session.cases[each["name"]] for each in session.todo})
    if any(
        found["state"].startswith("failed") or found.get("errors") or beyond(found)
        for found in every.values()
    ):
        raise SystemExit(1)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", choices=["first"], help="the cases by worth, until the minutes are over"
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="of the whole command")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the result file")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names contain this")
    parser.add_argument(
        "--tiny", action="store_true", help="small models and pictures, for a rehearsal"
    )
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
