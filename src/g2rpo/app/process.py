"""What a process does before heavy libraries are imported: how signals end it, and that libraries
are quiet.

Imports nothing that takes time, so that signals are handled from the start.
"""

import os
import signal
import stat
from typing import NoReturn

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGHUP: 75}
"""Of a command that can go on later: 130 is the shells' code for Ctrl-C; 75 (EX_TEMPFAIL) lets
schedulers requeue. SIGHUP comes when the terminal or its connection is closed."""
NOTHING_KEPT = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
"""Of one that kept nothing: the shells' codes for these signals."""


def stop_signals() -> list[signal.Signals]:
    """The signals that end a command; not SIGHUP where it is ignored, as `nohup` asks."""
    return [
        number
        for number in EXIT_CODES
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]


def leave_terminal() -> None:
    """After SIGHUP: standard streams that are the terminal become /dev/null, because to write to
    one that is gone is an error."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        try:
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                os.dup2(null, stream)
        except OSError:  # a closed stream
            continue
    os.close(null)


def exit_code(number: int, message: str) -> int:
    """The exit code of a command that a signal ended; `message` says what it kept, "" if it kept
    nothing."""
    return (EXIT_CODES if message else NOTHING_KEPT)[signal.Signals(number)]


def stopped_by(number: int) -> str:
    """The message of a command that a signal ended and that kept nothing."""
    return f"stopped by {'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name}"


def end_at_once(number: int, message: str = "") -> NoReturn:
    """Ends the process from a signal handler, for moments at which an exception would be swallowed
    or abort the process."""
    try:
        os.write(2, f"g2rpo: {message or stopped_by(number)}\n".encode())
    finally:  # stderr may be closed
        os._exit(exit_code(number, message))


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


def quiet_bars() -> None:
    """Without progress bars of model libraries, which this imports."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
