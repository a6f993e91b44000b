"""A command in a fork of this process, which has already imported what the command needs."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

POLL_S = 0.01


class Forked:
    """`MODULE.main(arguments)`, with what it prints in `log`; with `group`, in a process group that
    ends with it.

    A fork begins at once, where a new process imports torch and diffusers for many seconds. CUDA
    cannot be used in a fork of a process that has used it: there the module is run by a new
    interpreter.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        log: Path,
        group: bool = False,
        **environment: str,
    ) -> None:
        sys.stdout.flush()
        self.group = group
        self.code: int | None = None
        self.pid = os.fork()
        if group:
            # the other process was first, or has ended
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.setpgid(self.pid, self.pid)
        if self.pid == 0:
            self._run(module, list(arguments), log, environment)

    def _run(
        self, module: str, arguments: list[str], log: Path, environment: dict[str, str]
    ) -> None:
        code = 1
        try:
            os.environ.update(environment)
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for stream in (1, 2):
                os.dup2(file, stream)
            sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            if torch.cuda._is_in_bad_fork():
                os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
            importlib.import_module(module).main(arguments)
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self, timeout: float = float("inf")) -> int:
        """The exit code. subprocess.TimeoutExpired if it has not ended in so many seconds."""
        ends = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > ends:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(POLL_S)
        assert self.code is not None
        return self.code

    def kill(self) -> None:
        """Ends it by SIGKILL, and its group."""
        with contextlib.suppress(ProcessLookupError):
            if self.group:
                os.killpg(self.pid, signal.SIGKILL)
            elif self.poll() is None:
                os.kill(self.pid, signal.SIGKILL)
        self.wait()
