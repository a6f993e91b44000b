"""Every call of a short run by which it writes a file, talks to a reward server or allocates a
tensor while it saves, fails in turn, by an error or by SIGKILL. Then the run is resumed.

    python -m tools.each_call_fails [--every N] [--error ENOSPC,EIO,KILL] [--out FILE.json]

The resumed run must have the weights, log and results of one that was never disturbed, or end with
code 1 or 2 and one message. Needs gcc and Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import importlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
NONE, LISTED = -2, -1  # in place of the number of the call that fails
RUN = """
policy: {path: testbed, height: 64, width: 64, guidance_scale: 3.5, max_sequence_length: 16, lora_rank: 2}
algorithm: {group_size: 3, branch_steps: [0, 1], granularities: [1, 2]}
rewards: {scene_accuracy: 1.0, far: {kind: http, options: {url: "http://127.0.0.1:PORT"}}}
prompts: {train: "testbed:train", cache: "off"}
sampling: {num_steps: 4}
optim: {learning_rate: 1.0e-3, ema_decay: 0.9}
trainer: {iterations: 3, prompts_per_iteration: 1, checkpoint_every: 1}
evaluation: {prompts: "testbed:heldout", num_prompts: 2, every: 2}
"""


def call(library: ctypes.CDLL, folder: Path, fails: int, error: str, *arguments: str) -> int:
    """Runs a command of g2rpo in a forked process in which call number `fails` into `folder` fails;
    returns its exit code, negative for a signal. What it prints goes to a file beside `folder`."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = os.open(folder.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1), os.dup2(said, 2)
    from g2rpo.cli.main import main
    from g2rpo.core.process import steady_streams
    from g2rpo.train.run import checkpoint

    steady_streams()  # as the command g2rpo does
    saving, memory = checkpoint.save_checkpoint, ctypes.c_int.in_dll(library, "each_memory")

    def saved(*values, **options):  # type: ignore[no-untyped-def]
        memory.value = 1
        try:
            return saving(*values, **options)
        finally:
            memory.value = 0

    for module in list(sys.modules.values()):
        if getattr(module, "save_checkpoint", None) is saving:
            module.save_checkpoint = saved  # type: ignore[attr-defined]
    ctypes.c_long.in_dll(library, "each_fails").value = fails
    ctypes.c_int.in_dll(library, "each_error").value = getattr(errno, error, 0)
    if fails == LISTED:
        log = os.open(folder.with_suffix(".calls"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        ctypes.c_int.in_dll(library, "each_log").value = log
    (ctypes.c_char * 4096).in_dll(library, "each_folder").value = os.fsencode(folder)
    code = 0
    try:
        main([*arguments])
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else 1
    finally:
        if fails == LISTED:
            folder.with_suffix(".modules").write_text(" ".join(sys.modules))
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def left(folder: Path) -> dict[str, object]:
    """What a run leaves that a resumed one must leave too."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "weights": (folder / "adapter" / "pytorch_lora_weights.safetensors").read_bytes(),
        "results": (folder / "results.json").read_text(),
        **{f"{row['kind']} {row['iteration']} {k}": v for row in rows for k, v in row.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="try every Nth call")
    parser.add_argument("--error", default="ENOSPC,EIO,KILL")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    work = Path(tempfile.mkdtemp())
    preloaded = os.environ.get("LD_PRELOAD", "")
    if SOURCE.stem not in preloaded:
        built = work / f"{SOURCE.stem}.so"
        build = ["gcc", "-O1", "-shared", "-fPIC", "-o", str(built), str(SOURCE), "-ldl"]
        subprocess.run(build, check=True)
        again = [sys.executable, "-m", f"tools.{SOURCE.stem}", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | {"LD_PRELOAD": str(built)})
    library = ctypes.CDLL(preloaded)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = [sys.executable, "-m", "g2rpo", "serve-reward", "brightness", "--port", str(port)]
    server = subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        config = work / "run.yaml"
        config.write_text(RUN.replace("PORT", str(port)))
        sweep(library, work, config, given)
    finally:
        server.terminate()
        shutil.rmtree(work)


def sweep(library: ctypes.CDLL, work: Path, config: Path, given: argparse.Namespace) -> None:
    def train(name: str, fails: int, error: str = "") -> tuple[int, str]:
        arguments = ("train", str(config), "--run-dir", str(work / name), "--resume")
        code = call(library, work / name, fails, error, *arguments)
        return code, (work / name).with_suffix(".txt").read_text()

    for attempt in range(60):
        code, said = train("first", LISTED)
        if code == 0:
            break
        if attempt == 59:
            sys.exit(said)
        time.sleep(1)  # the server is not up yet
    for name in (work / "first.modules").read_text().split():  # once, not in each process
        if not name.startswith("__"):
            importlib.import_module(name)
    assert train("again", LISTED)[0] == 0
    calls = (work / "again.calls").read_text().split()
    first, second = left(work / "first"), left(work / "again")
    same = {key for key in first if first[key] == second.get(key)}  # not seconds
    tried = []
    for number in range(0, len(calls), given.every):
        if calls[number] != "posix_memalign":
            tried += [(error, number) for error in given.error.split(",")]
        elif number % 10 == 0:
            tried.append(("ENOMEM", number))
    random.Random(0).shuffle(tried)  # so that the remaining time is known
    print(f"{len(tried)} of {Counter(calls)}, {len(same)} of {len(first)} values compared")

    found, outcomes, began = [], Counter[str](), time.monotonic()
    for done, (error, number) in enumerate(tried, 1):
        shutil.rmtree(work / "run", ignore_errors=True)
        code, said = train("run", number, error)
        again, resumed = train("run", NONE)
        outcome = outcome_of(code, said, again, resumed)
        if outcome == "the same":
            end = left(work / "run")
            if differs := [key for key in same if end.get(key) != first[key]]:
                outcome = f"bad: another {differs[0]}"
        outcomes[outcome] += 1
        if outcome != "the same":
            end_of = {"said": said[-6000:], "resumed": resumed[-1500:]}
            case = {"call": calls[number], "number": number, "error": error, "code": code}
            found.append({"outcome": outcome, **case, **end_of})
        if given.out:
            result = {"calls": Counter(calls), "tried": done, "outcomes": outcomes, "found": found}
            given.out.write_text(json.dumps(result, indent=1))
        if done % 20 == 0:
            rest = (time.monotonic() - began) / done * (len(tried) - done) / 60
            print(f"{done} of {len(tried)}: {dict(outcomes)}, {rest:.0f} min to go", flush=True)
    print(dict(outcomes))
    sys.exit(any(outcome.startswith("bad") for outcome in outcomes))


def outcome_of(code: int, said: str, again: int, resumed: str) -> str:
    """In words, but for what the run left."""
    if "Traceback" in said + resumed:
        return "bad: a traceback"
    if code not in (0, 1, 2, 75, -signal.SIGKILL) or again not in (0, 1, 2):
        return f"bad: codes {code} and {again}"
    return "refused when resumed" if again else "the same"


if __name__ == "__main__":
    main()
