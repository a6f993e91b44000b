"""What a process does before heavy libraries are imported: how signals and closed streams end it,
and that libraries are quiet.

Imports nothing that takes time, so that signals are handled from the start.
"""

import errno
import io
import os
import signal
import stat
import sys
from types import FrameType
from typing import Any, NoReturn

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGHUP: 75}
"""Of a command that can go on later: 130 is the shells' code for Ctrl-C; 75 (EX_TEMPFAIL) lets
schedulers requeue. SIGHUP comes when the terminal, its connection or a pipe behind is closed."""
NOTHING_KEPT = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
"""Of one that kept nothing: the shells' codes for these signals."""


def stop_signals() -> list[signal.Signals]:
    """The signals that end a command; not SIGHUP where it is ignored, as `nohup` asks."""
    return [
        number
        for number in EXIT_CODES
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]


class Stream(io.FileIO):
    """stdout or stderr. What cannot be written, as on a full disk, is left out, and ends nothing.
    Where nobody reads any more, because a pipe or the terminal is gone, the command is sent SIGHUP,
    once, while it handles that."""

    hung_up = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            terminal = error.errno == errno.EIO and stat.S_ISCHR(os.fstat(self.fileno()).st_mode)
            if terminal or error.errno in (errno.EPIPE, errno.ECONNRESET):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.fileno())
                os.close(null)
                handler = signal.getsignal(signal.SIGHUP)
                if callable(handler) and handler is not while_imported and not Stream.hung_up:
                    Stream.hung_up = True
                    os.kill(os.getpid(), signal.SIGHUP)
            return len(data)


def steady_streams() -> None:
    """Makes stdout and stderr such streams. Closed ones, as services have them, become /dev/null;
    else the next file that is opened would get what is printed."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    for descriptor, name in enumerate(("stdout", "stderr"), start=1):
        stream = getattr(sys, name)
        buffer = io.BufferedWriter(Stream(descriptor, "w", closefd=False))
        by_line = stream is not None and (stream.line_buffering or stream.write_through)
        encoding, errors = (stream.encoding, stream.errors) if stream else ("utf-8", "replace")
        setattr(sys, name, io.TextIOWrapper(buffer, encoding, errors, line_buffering=by_line))


def exit_code(number: int, message: str) -> int:
    """The exit code of a command that a signal ended; `message` says what it kept, "" if it kept
    nothing."""
    return (EXIT_CODES if message else NOTHING_KEPT)[signal.Signals(number)]


def stopped_by(number: int) -> str:
    """The message of a command that a signal ended and that kept nothing."""
    words = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "SIGHUP: its terminal or a pipe was closed"}
    return f"stopped by {words.get(signal.Signals(number), signal.Signals(number).name)}"


def end_at_once(number: int, message: str = "") -> NoReturn:
    """Ends the process from a signal handler, for moments at which an exception would be swallowed
    or abort the process."""
    try:
        os.write(2, f"g2rpo: {message or stopped_by(number)}\n".encode())
    finally:  # stderr may be closed
        os._exit(exit_code(number, message))


def while_imported(number: int, frame: FrameType | None) -> NoReturn:
    """The signal handler before the command line is imported."""
    end_at_once(number)


def quiet_libraries() -> None:
    """Before model libraries are imported: they show errors only, unless the environment says
    otherwise."""
    import logging
    import warnings

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for library in ("TRANSFORMERS", "DIFFUSERS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    # about kernels for other devices, at every import
    for library in ("torchao", "bitsandbytes", "torch.utils._pytree", "matplotlib"):
        logging.getLogger(library).setLevel(logging.ERROR)
    # several adapters are wanted
    warnings.filterwarnings("ignore", "Already found a `peft_config`")
