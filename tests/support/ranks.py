"""Several ranks in a test: processes forked from a clean one that has torch loaded, so a rank
starts in a moment."""

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from unittest import mock

from g2rpo.runtime.distributed import joined
from tests.support.ports import free_port

CONTEXT = multiprocessing.get_context("forkserver")


def begin_server():
    """Forks the process that ranks are forked from: off this one, which has imported all by now. A
    new interpreter would take as long to start as all tests take to be collected."""
    import tests.support.warm  # noqa: F401

    with mock.patch("multiprocessing.util.spawnv_passfds", _fork):
        ensure_running()


def _fork(path, arguments, handed):
    """In the place of a function that starts an interpreter with `arguments`, of which the last is
    its code, and hands these open files to it."""
    if server := os.fork():
        return server
    try:
        faulthandler.disable()
        kept = sorted({0, 1, 2, *handed, sys.stdout.fileno(), sys.stderr.fileno()})
        for one, other in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(one + 1, other)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", closefd=False) for stream in (1, 2))
        warnings.resetwarnings()
        exec(arguments[-1])
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def start(size, work, folder: Path, *arguments, timeout_s=60.0, device="cpu", prepare=None):
    """`size` processes, each running work(world, folder, *arguments); what it returns or dies of
    goes to folder/RANK.json.

    `prepare()` is called first in each, where the ranks' `device` needs it.
    """
    port = free_port()
    ranks = [
        CONTEXT.Process(
            target=_rank, args=(i, size, port, timeout_s, device, prepare, work, folder, arguments)
        )
        for i in range(size)
    ]
    for each in ranks:
        each.start()
    return ranks


def finish(ranks, folder: Path, patience_s=120.0):
    """What each rank left, in order: {"answer": ...}, {"error": ...}, or {} where it was killed.
    None may outlast patience."""
    ends = time.monotonic() + patience_s
    for each in ranks:
        each.join(max(0.0, ends - time.monotonic()))
    late = [i for i, each in enumerate(ranks) if each.is_alive()]
    for i in late:
        os.kill(ranks[i].pid, signal.SIGKILL)
    assert not late, f"ranks {late} hang"
    left = [folder / f"{i}.json" for i in range(len(ranks))]
    return [json.loads(path.read_text()) if path.exists() else {} for path in left]


def run(size, work, folder: Path, *arguments, patience_s=120.0, **options):
    """The answers of `size` ranks, all of which must have one."""
    folder.mkdir(parents=True, exist_ok=True)
    results = finish(start(size, work, folder, *arguments, **options), folder, patience_s)
    failed = [result.get("trace", "killed") for result in results if "answer" not in result]
    assert not failed, "\n".join(failed)
    return [result["answer"] for result in results]


def _rank(rank, size, port, timeout_s, device, prepare, work, folder, arguments):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        if prepare is not None:
            prepare()
        with joined(device, timeout_s) as world:
            left = {"answer": work(world, folder, *arguments)}
    except BaseException as error:
        left = {
            "error": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc(),
            "at": time.monotonic(),
        }
    (folder / f"{rank}.json").write_text(json.dumps(left))
