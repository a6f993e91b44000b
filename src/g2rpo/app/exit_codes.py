"""What a command ends with after a signal. Imports nothing that takes time, so that signals are handled from the start."""

import os
import signal
from typing import NoReturn

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 75}
"""130 is the shells' code for Ctrl-C; 75 (EX_TEMPFAIL) lets schedulers requeue after SIGTERM."""


def stopped_by(number: int) -> str:
    """The message of a command that a signal ended and that kept nothing."""
    return f"stopped by {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'}"


def end_at_once(number: int, message: str = "") -> NoReturn:
    """Ends the process from a signal handler, for moments at which an exception would be swallowed or abort the process."""
    try:
        os.write(2, f"g2rpo: {message or stopped_by(number)}\n".encode())
    finally:  # stderr may be closed
        os._exit(EXIT_CODES[signal.Signals(number)])
