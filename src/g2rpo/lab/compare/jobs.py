"""Runs `g2rpo` commands, several at a time, in forks of one process that has imported torch and the
model libraries."""

from __future__ import annotations

import multiprocessing
import os
import queue
import runpy
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from g2rpo.core import plugins
from g2rpo.core.devices import usable_cores
from g2rpo.core.events import Emit, Line, cautions, doing, silent
from g2rpo.core.files import open_regular
from g2rpo.core.stopping import stoppable
from g2rpo.train.run.lock import held

PRELOADED = ["g2rpo.lab.compare.imported"]
"""What is imported in the process that jobs are forked from."""
LAST_LINES = 8
"""Of a failed job's output, that its message has."""
STOPPED = "stopped; what is done is kept, and the same command does what is missing"


@dataclass(frozen=True)
class Job:
    """A `g2rpo` command; its output is added to `log`."""

    title: str
    arguments: tuple[str, ...]
    log: Path

    def failed(self, code: int) -> str:
        """What is to be said when it ends with this exit code."""
        self.log.touch()  # it may have ended before it wrote
        last = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        said = f"{self.title} failed (exit code {code}); its output is in {self.log}:"
        return "\n".join([said, *last])


@dataclass(frozen=True)
class Workers:
    """Runs jobs, `count` at a time, each with its share of the CPU's cores and the GPUs in turn,
    and with the code that this process may import."""

    count: int
    emit: Emit = silent

    def run(self, asked: Iterable[Job | None]) -> dict[Job, int]:
        """Runs all jobs but those that are finished (None); the exit codes of those that fail,
        which ends no other: not even one that crashes or is killed, as each is a process."""
        jobs = [job for job in asked if job is not None]
        slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(self.count):
            slots.put(slot)
        running: set[Any] = set()
        stopped = threading.Event()
        failed: dict[Job, int] = {}
        with ThreadPoolExecutor(self.count) as pool:
            try:
                futures = {
                    pool.submit(self._run, job, slots, running, stopped): job for job in jobs
                }
                for done, future in enumerate(as_completed(futures), 1):
                    job, code = futures[future], future.result()
                    if code:
                        failed[job] = code
                    self.emit(
                        Line(f"{done:>4} of {len(jobs)}  {job.title}{' failed' if code else ''}")
                    )
            except BaseException:  # interrupted: what runs saves, and nothing more begins
                pool.shutdown(wait=False, cancel_futures=True)
                stopped.set()
                for process in list(running):
                    process.terminate()
                raise
        return failed

    def _run(
        self,
        job: Job,
        slots: queue.SimpleQueue[int],
        running: set[Any],
        stopped: threading.Event,
    ) -> int:
        slot = slots.get()
        try:
            job.log.parent.mkdir(parents=True, exist_ok=True)
            words = [*plugins.repeated(), *job.arguments]
            process = begin(
                run_command, words, str(job.log), {**os.environ, **environment_of(slot, self.count)}
            )
            running.add(process)
            if stopped.is_set():  # while it began, which takes seconds
                process.terminate()
            with doing(f"running {job.title}"):
                process.join()
            running.discard(process)
            return int(process.exitcode)
        finally:
            slots.put(slot)


_START = threading.Lock()


def begin(target: Any, *arguments: Any) -> Any:
    """A process that calls `target`. It runs nothing of the caller's own script, which so needs no
    `if __name__ == "__main__"`, and imports nothing of the current folder. It is forked from one
    that has imported `PRELOADED`; with a GPU it is spawned, because bitsandbytes initialises CUDA
    when it is imported, and CUDA does not survive a fork."""
    import torch

    context: Any = multiprocessing.get_context(
        "spawn" if torch.cuda.device_count() else "forkserver"
    )
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=target, args=arguments)
    with _START:
        script, safe = sys.modules["__main__"], os.environ.get("PYTHONSAFEPATH", "")
        sys.modules["__main__"], os.environ["PYTHONSAFEPATH"] = ModuleType("__main__"), "1"
        try:
            process.start()
        finally:
            sys.modules["__main__"], os.environ["PYTHONSAFEPATH"] = script, safe
    return process


def run_command(arguments: Sequence[str], log: str, environment: Mapping[str, str]) -> None:
    """`g2rpo` with these arguments in this process, in an environment; its output is added to
    `log`."""
    with open(log, "ab", opener=open_regular) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.clear()  # of when the process was begun from which this one is forked
    os.environ.update(environment)
    import torch

    # the variable was read when torch was imported
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.argv = ["g2rpo", *arguments]
    runpy.run_module("g2rpo", run_name="__main__")


def environment_of(slot: int, count: int) -> dict[str, str]:
    """The environment of job `slot` of `count`: an equal share of the cores, unless OMP_NUM_THREADS
    is set, and one GPU."""
    import torch

    threads = str(max(1, usable_cores() // count))
    use = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    if torch.cuda.device_count() > 1:
        named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
            map(str, range(torch.cuda.device_count()))
        )
        devices = named.split(",")
        use["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    return use


@contextmanager
def working(out: Path, count: int, emit: Emit = silent) -> Iterator[Workers]:
    """`count` workers for the study in `out`, of which there is one at a time. Ctrl-C and SIGTERM
    end the jobs too, which save first."""
    with held(out, cautions(emit)), stoppable(STOPPED):
        yield Workers(count, emit)
