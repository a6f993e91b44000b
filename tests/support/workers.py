"""Workers of pytest-xdist that are forked from what ranks are forked from, so that a suite imports
torch and the model libraries once."""

import os
import sys
from multiprocessing import forkserver

from execnet.gateway_base import Popen2IO

from tests.support.ranks import CONTEXT


class Forked(Popen2IO):
    """In the place of execnet's `Popen2IOMaster`, which starts a new interpreter."""

    def __init__(self, command, execmodel):
        theirs, to_them = CONTEXT.Pipe(duplex=False)
        from_them, their_answers = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=_run, args=(command[-1], theirs, their_answers))
        self._process.start()
        theirs.close()
        their_answers.close()
        files = (
            os.fdopen(os.dup(to_them.fileno()), "wb"),
            os.fdopen(os.dup(from_them.fileno()), "rb"),
        )
        super().__init__(*files, execmodel)
        to_them.close()
        from_them.close()

    def wait(self):
        self._process.join()
        return self._process.exitcode

    def kill(self):
        self._process.kill()


def _run(code, *streams):
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin = os.fdopen(0, closefd=False)
    # Ranks come from the server that this process comes from. Python means to do that by itself,
    # and starts another one.
    forkserver._forkserver.ensure_running = lambda: None
    exec(code, {})
