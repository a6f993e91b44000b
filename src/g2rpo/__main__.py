"""The command `g2rpo`, which is also `python -m g2rpo`."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Runs the command line. Signals are handled before its libraries are imported, which takes
    half a second."""
    if sys.platform == "win32":
        print("g2rpo: runs on Linux, macOS and WSL, not on Windows itself", file=sys.stderr)
        sys.exit(2)
    # torch's threads leave their processors to others while they wait, with GNU's OpenMP after about
    # a tenth of a millisecond; read as torch is loaded
    waiting = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}
    if not waiting.keys() & os.environ.keys():
        os.environ |= waiting
    from g2rpo.core.process import steady_streams, stop_signals, while_imported

    steady_streams()
    for number in stop_signals():
        signal.signal(number, while_imported)
    from g2rpo.cli.main import main as command_line

    command_line()


if __name__ == "__main__":
    main()
