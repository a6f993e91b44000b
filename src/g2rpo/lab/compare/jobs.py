"""Runs `g2rpo` commands as processes, several at a time, in a locked folder."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from g2rpo.app.events import Emit, Line, silent
from g2rpo.app.stopping import stoppable
from g2rpo.core import plugins
from g2rpo.core.errors import Stopped, UserError
from g2rpo.core.files import open_regular
from g2rpo.run.lock import held


@dataclass(frozen=True)
class Job:
    """A `g2rpo` command as a process; its output goes to `log`."""

    title: str
    arguments: list[str]
    log: Path


@dataclass
class Workers:
    """Runs jobs, `count` at a time, each with its share of the CPU's cores and the GPUs in turn, and with the code that this
    process may import."""

    count: int
    lock: int
    """The lock's file descriptor, inherited by jobs: the folder stays locked until the last of them has ended."""
    emit: Emit = silent
    running: set[subprocess.Popen[bytes]] = field(default_factory=set)

    def run(self, asked: Iterable[Job | None]) -> None:
        """Runs all jobs but those that are finished (None). After a failure no further job is started; running ones finish, and
        their results are kept."""
        jobs = [job for job in asked if job is not None]
        slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(self.count):
            slots.put(slot)
        with ThreadPoolExecutor(self.count) as pool:
            futures = {pool.submit(self._do, job, slots): job for job in jobs}
            try:
                for done, future in enumerate(as_completed(futures), 1):
                    future.result()
                    self.emit(Line(f"{done:>4} of {len(jobs)}  {futures[future].title}"))
            except Exception:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            except BaseException:  # interrupted: do not wait for running jobs
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self.running):
                    process.terminate()
                raise

    def _do(self, job: Job, slots: queue.SimpleQueue[int]) -> None:
        slot = slots.get()
        job.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(job.log, "ab", opener=open_regular) as log:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "g2rpo", *plugins.repeated(), *job.arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment_of(slot, self.count)},
                    pass_fds=(self.lock,),
                )
            self.running.add(process)
            code = process.wait()
            self.running.discard(process)
        finally:
            slots.put(slot)
        if code:
            tail = "\n".join(job.log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:])
            message = f"{job.title} failed (exit code {code}); its output is in {job.log}:\n{tail}"
            raise UserError(message) if code == 2 else Stopped(message)


def environment_of(slot: int, count: int) -> dict[str, str]:
    """The environment of worker `slot` of `count`: an equal share of the cores, unless OMP_NUM_THREADS is larger, and one
    GPU."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    use = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // count)))}
    if torch.cuda.device_count() > 1:
        named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        devices = named.split(",")
        use["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    return use


@contextmanager
def locked(out: Path) -> Iterator[int]:
    """One study at a time in a folder; Ctrl-C and SIGTERM end the jobs too, which save first."""
    with held(out) as descriptor, stoppable("stopped; what is done is kept, and the same command does what is missing"):
        yield descriptor
