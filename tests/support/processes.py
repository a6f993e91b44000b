"""`g2rpo` commands as processes that are forked from one with torch loaded: a tenth of a second
instead of seven."""

import os
import signal
import subprocess
import sys

from g2rpo.cli.main import main
from g2rpo.lab.compare import jobs
from tests.support.ranks import CONTEXT, SLOW_IMPORTS

jobs.PRELOADED[:] = SLOW_IMPORTS  # one process for all forks of a suite


class Forked:
    """In the place of `subprocess.Popen([python, "-P", "-m", "g2rpo", ...], stdout=log)`."""

    def __init__(self, command, *, stdout, env, stderr=subprocess.STDOUT, **_):
        assert command[:4] == [sys.executable, "-P", "-m", "g2rpo"]
        logs = [stdout.name, stdout.name if stderr == subprocess.STDOUT else stderr.name]
        self._process = CONTEXT.Process(target=_command, args=(command[4:], logs, env))
        self._process.start()

    def wait(self, timeout=None):
        self._process.join(timeout)
        return self._process.exitcode

    def terminate(self):
        self._process.terminate()

    def kill(self):
        self._process.kill()

    def interrupt(self):
        os.kill(self._process.pid, signal.SIGINT)

    @property
    def alive(self):
        return self._process.is_alive()


def _command(arguments, logs, environment):
    # a suite in the background has it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream, log in enumerate(logs, start=1):
        with open(log, "ab") as file:
            os.dup2(file.fileno(), stream)
    os.environ |= environment
    main(arguments)
