"""The first hour with a GPU: four commands of at most ten minutes each that measure what is otherwise computed or assumed.

    python -m benchmarks.first_gpu shapes --out FOLDER       # every kind of model, few blocks: does it run, and in what memory
    python -m benchmarks.first_gpu speed --out FOLDER        # seconds of calls and iterations at full depth, by option
    python -m benchmarks.first_gpu exactness --out FOLDER    # CPU against GPU, run against run, rollout against training pass
    python -m benchmarks.first_gpu training --out FOLDER     # `g2rpo train scenes`: twice, killed and resumed, beside a CPU
    python -m benchmarks.first_gpu shapes --tiny --device cpu --out FOLDER     # a rehearsal on any machine

Weights are random, so nothing is downloaded. Each case (`PARTS`, by worth) is a process with a time limit; FOLDER/PART.json is
written after every case, and FOLDER/summary.md, with what `g2rpo plan` says of the same figures, at the end. The same command
again goes on with cases that were not reached. Exit code 1: a case failed, or a check is beyond its limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Case = dict[str, Any]
LEAST = 20
"""Seconds with which a case is begun."""
LATE = "failed: not done after"
OFF = 0.25
"""How far a measured figure may be from the plan's before the summary says so."""


def of(recipe: str, *overrides: str, kind: str = "model", **changes: Any) -> Case:
    """A case of a recipe; `blocks`: of every kind, None for all; `large` ones are not rehearsed."""
    name = " ".join([*([kind] if kind != "model" else []), recipe, *overrides])
    usual = {"blocks": 2, "iterations": 2, "again": False, "loop": False, "large": False, "limit": 150}
    return {"name": name, "kind": kind, "recipe": recipe, "overrides": overrides, **usual, **changes}


FLUX, KLEIN, EAGER = "flux1-dev-lora", "flux2-klein-lora", "policy.autocast=false"
RECIPES = (FLUX, KLEIN, "sd35-medium-lora", "qwen-image-lora", "z-image-lora", "wan-lora")
COMPILED = {"blocks": None, "limit": 280}
CALLS = {"blocks": None, "iterations": 0}
PARTS: dict[str, list[Case]] = {
    "shapes": [
        *(of(recipe) for recipe in RECIPES),
        of(KLEIN, "policy.tuning=full", "optim.learning_rate=1e-5"),
        *(of(recipe, large=True) for recipe in ("kontext-lora", "qwen-image-edit-lora")),  # whose input pictures are
    ],
    "speed": [
        of(FLUX, blocks=None),
        of(FLUX, EAGER, "policy.compile=true", **COMPILED),
        of(KLEIN, blocks=None),
        of(FLUX, EAGER, "policy.compile=true", "policy.quantize=fp8", **COMPILED),
        of("z-image-lora", **CALLS),
        of(FLUX, EAGER, "policy.attention=cudnn", **CALLS),
        of("qwen-image-lora", **CALLS),
        of("sd35-medium-lora", **CALLS),
        of("wan-lora", **CALLS),
        of(FLUX, EAGER, **CALLS),
        of(FLUX, EAGER, "policy.quantize=fp8", **CALLS),
        of(FLUX, EAGER, "policy.quantize=int8", **CALLS),
        of(FLUX, EAGER, "policy.quantize=nf4", **CALLS),
        of(FLUX, EAGER, "policy.attention=flash3", **CALLS),
        of(FLUX, "sampling.tails.forecast=true", blocks=None, loop=True, limit=240),
    ],
    "exactness": [
        *(of(recipe, kind="exact", blocks=1) for recipe in RECIPES),
        *(
            of(FLUX, *overrides, iterations=1, again="policy.compile=true" not in overrides)
            for overrides in (
                (),
                (EAGER,),
                (EAGER, "policy.quantize=fp8"),
                (EAGER, "policy.quantize=int8"),
                ("policy.attention=math",),
                (EAGER, "policy.attention=cudnn"),
                ("policy.attention=efficient",),
                (EAGER, "policy.compile=true"),
                (EAGER, "policy.quantize=nf4"),
            )
        ),
    ],
    "training": [
        of("", kind="twice", limit=200),
        of("", kind="resumed", limit=200),
        of("", kind="beside_cpu", limit=200),
        of("", "policy.dtype=bfloat16", "policy.tuning=lora", kind="twice"),
    ],
}


def start(given: Sequence[str], log: Path, **environment: str) -> Any:
    """A process of `benchmarks.gpu_cases` in a group of its own, so that it ends with all that it started."""
    command = [sys.executable, "-m", "benchmarks.gpu_cases", *given]
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, process_group=0, env=os.environ | environment)


@contextlib.contextmanager
def ending(process: Any) -> Iterator[Any]:
    """Ends a process and its own at exit."""
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ran(case: Case, folder: Path, seconds: float) -> dict[str, Any]:
    """What a case found in at most so many seconds, and how it ended."""
    given, left, log = (folder / name for name in ("case.json", "found.json", "log"))
    left.unlink(missing_ok=True)
    given.write_text(json.dumps({**case, "folder": str(folder)}))
    began, state = time.monotonic(), ""
    with ending(start([str(given), str(left)], log, HF_HUB_OFFLINE="1")) as process:
        try:
            if code := process.wait(seconds):
                state = f"failed: ended with {code}"
        except subprocess.TimeoutExpired:
            state = f"{LATE} {seconds:.0f} s"
    found = json.loads(left.read_text()) if left.is_file() else {"notes": {}, "errors": {"start": "nothing was found"}}
    if not state:
        state = "refused" if "refused" in found["notes"] else "failed" if found["errors"] else "done"
    said = {"log": log.read_text(errors="replace")[-3000:]} if state.startswith("failed") else {}
    return {"state": state, "seconds": round(time.monotonic() - began, 1), **found, **said}


def run(args: argparse.Namespace, result: dict[str, Any], folder: Path) -> None:
    """The cases of a part that have no answer yet."""
    path, ends, cases = args.out / f"{args.part}.json", time.monotonic() + 60 * args.minutes, result["cases"]

    def save() -> None:
        path.with_suffix(".new").write_text(json.dumps(result, indent=1) + "\n")
        os.replace(path.with_suffix(".new"), path)

    def absorb() -> None:
        """Takes over what the planning process has found, which runs beside the cases and needs no GPU."""
        plans = json.loads(planned.read_text()) if planned.is_file() else {"notes": {}, "errors": {}}
        for name, figures in plans["notes"].items():
            cases[name]["planned"] = figures
        for name, error in plans["errors"].items():
            cases[name].setdefault("errors", {})["plan"] = error
        save()

    given = {"tiny": args.tiny, "device": args.device}
    every = [case | given for case in PARTS[args.part] if args.only in case["name"] and not (args.tiny and case["large"])]
    todo = [case for case in every if cases.get(case["name"], {}).get("state") not in ("done", "refused")]
    cases |= {case["name"]: {"state": "not reached"} for case in todo}
    result["machine"] = ran({"kind": "machine", **given}, folder, 120)
    save()
    if "refused" in result["machine"].get("notes", {}):
        raise SystemExit(f"--device {args.device}: {result['machine']['notes']['refused']}")
    planned, plans = folder / "planned.json", folder / "plans.json"
    plans.write_text(json.dumps([c for c in every if c["kind"] == "model" and "planned" not in cases[c["name"]]]))
    card = result["machine"].get("notes", {}).get("device", "")
    with ending(start([str(plans), str(planned), card], folder / "plans.log", CUDA_VISIBLE_DEVICES="")) as planning:
        for case in todo:
            if (left := ends - time.monotonic()) > (0 if args.tiny else LEAST):
                cases[case["name"]] = found = ran(case, folder, min(case["limit"], left))
                if found["state"].startswith(LATE) and left < case["limit"]:
                    found["state"] = "not finished"
                print(case["name"], found["state"], flush=True)
                absorb()
        with contextlib.suppress(subprocess.TimeoutExpired):
            planning.wait(max(1.0, ends + 20 - time.monotonic()))
    absorb()


def beyond(case: dict[str, Any]) -> list[str]:
    """The checks of a case that failed."""
    checks = case.get("checks", {}).items()
    return [f"{name}: {float(value):.3g}, at most {limit:g}" for name, (value, limit) in checks if not float(value) <= limit]


def shown(name: str, value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if name.endswith("bytes") else f"{value:.4g}"


def summary(out: Path) -> str:
    """All parts in a folder, in Markdown."""
    parts = {name: json.loads(path.read_text()) for name in PARTS if (path := out / f"{name}.json").is_file()}
    lines, off, bad, tables = ["# The first hour with a GPU", ""], [], [], []
    for part, result in parts.items():
        notes = result["machine"].get("notes", {})
        lines.append(f"- `{result['command']}`, {result['date']}: {notes.get('device')}, torch {notes.get('torch')}")
        tables += ["", f"## {part}", "", "| case | figure | measured | planned | measured / planned |", "|---|---|---|---|---|"]
        plan = {"planned": notes.get("planned", {})}
        for name, case in {"machine": result["machine"] | plan, **result["cases"]}.items():
            where = f"{part}, {name}"
            bad += [f"- {where}: {case['state']}"] if case["state"] != "done" else []
            bad += [f"- {where}: {step}: {error}" for step, error in case.get("errors", {}).items()]
            bad += [f"- {where}: {check}" for check in beyond(case)]
            for figure, value in case.get("measured", {}).items():
                expected = case.get("planned", {}).get(figure)
                ratio = value / expected if expected else None
                tables.append(
                    f"| {name} | {figure} | {shown(figure, value)} | {shown(figure, expected) if ratio else ''} | "
                    f"{f'{ratio:.2f}' if ratio else ''} |"
                )
                if ratio and abs(ratio - 1) > OFF:
                    off.append(f"- {where}: {figure}: {ratio:.2f} times the plan's")
            for check, (value, limit) in case.get("checks", {}).items():
                tables.append(f"| {name} | {check} | {float(value):.3g} | at most {limit:.3g} | |")
    lines += ["", f"## More than {OFF:.0%} beside the plan", "", *(off or ["- nothing"])]
    lines += ["", "## Failed, refused, not reached, or beyond a limit", "", *(bad or ["- nothing"]), *tables]
    return "\n".join(lines) + "\n"


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `ending` is reached
    args.out.mkdir(parents=True, exist_ok=True)
    failed = False
    if args.part != "summary":
        path, asked = args.out / f"{args.part}.json", {"tiny": args.tiny, "device": args.device}
        result = json.loads(path.read_text()) if path.is_file() else {"cases": {}, "arguments": asked}
        if result["arguments"] != asked:
            raise SystemExit(f"{path}: was made with {result['arguments']}; take another folder")
        command = f"python -m benchmarks.first_gpu {' '.join(sys.argv[1:] if given is None else given)}"
        result |= {"command": command, "date": datetime.now(UTC).isoformat(timespec="seconds")}
        with tempfile.TemporaryDirectory(prefix="first_gpu_") as folder:
            run(args, result, Path(folder))
        every = [result["machine"], *result["cases"].values()]
        failed = any(case["state"].startswith("failed") or case.get("errors") or beyond(case) for case in every)
    (args.out / "summary.md").write_text(text := summary(args.out))
    print(text.partition("\n## shapes")[0].partition("\n## speed")[0])
    if failed:
        raise SystemExit(1)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "summary"])
    parser.add_argument("--out", type=Path, required=True, help="a folder for the results")
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole part; cases are cut off then")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and pictures, for a rehearsal")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names contain this")
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
