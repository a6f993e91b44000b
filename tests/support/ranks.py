"""Several ranks in a test: processes forked from a clean one that has torch loaded, so a rank
starts in a moment."""

import json
import multiprocessing
import os
import signal
import time
import traceback
from pathlib import Path

from tests.support.ports import free_port
from tests.support.waiting import PATIENCE_S

CONTEXT = multiprocessing.get_context("forkserver")
SLOW_IMPORTS = (
    "peft",
    "g2rpo.api",
    "g2rpo.cli.results",
    "g2rpo.lab.plan.plan",
    "g2rpo.lab.page",
    "g2rpo.data.testbed.rewards",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "tests.support.warm",
)
CONTEXT.set_forkserver_preload(list(SLOW_IMPORTS))


def start(size, work, folder: Path, *arguments, timeout_s=PATIENCE_S, device="cpu", prepare=None):
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


def finish(ranks, folder: Path, patience_s=2 * PATIENCE_S):
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


def run(size, work, folder: Path, *arguments, patience_s=2 * PATIENCE_S, **options):
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
        from g2rpo.core.distributed import joined

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
