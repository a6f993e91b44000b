"""The command line. Heavy libraries are imported by the command that needs them, so `--help`
answers at once."""

from __future__ import annotations

import errno
import io
import os
import shlex
import sys
import traceback
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import Annotated, NoReturn

import typer
from rich.text import Text

from g2rpo import __version__
from g2rpo.cli import models, serving, train
from g2rpo.cli.life import LIFE
from g2rpo.cli.output import Heard
from g2rpo.core.errors import (
    LONGEST_QUOTE,
    Interrupted,
    Stopped,
    UserError,
    out_of_memory,
    shown,
    without_operator,
    without_secrets,
)
from g2rpo.core.process import quiet_libraries, stop_signals
from g2rpo.core.stopping import Stopping

app = typer.Typer(
    name="g2rpo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (train, models, serving):
    app.add_typer(group.commands)
command_of = cache(typer.main.get_command)  # reading the parameters of all commands takes 18 ms

UNUSABLE = (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EACCES, errno.EROFS)
"""What the name of a file or folder may lead to."""


def print_version(asked: bool) -> None:
    if asked:
        print(f"g2rpo {__version__}")
        raise typer.Exit


@app.callback()
def before_any_command(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version."),
    ] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.py|MODULE",
            help="Code that a config may import. May be given several times, anywhere in the command.",
        ),
    ] = None,
) -> None:
    """Fine-tune an image generator with a reward: G²RPO and other algorithms for flow models.

    Begin with `g2rpo train words --run-dir runs/first`: minutes on a CPU, nothing to download.
    Then `g2rpo report runs/first`. `g2rpo recipes` lists what else can be trained.
    """
    from g2rpo.core.plugins import allow

    for source in plugin or []:
        allow(source)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line: exit code 0 when done, 2 for wrong input (one message, no traceback),
    130 and 75 for a run that Ctrl-C, or SIGTERM or SIGHUP, ended early and that can be resumed, 130,
    143 and 129 for other commands, 1 for anything else. A closed pipe counts as SIGHUP."""
    given = sys.argv[1:] if arguments is None else arguments
    quiet_libraries()
    os.environ.setdefault("TQDM_DISABLE", "1")  # no progress bars of libraries
    if isinstance(sys.stdout, io.TextIOWrapper):
        # what a locale without UTF-8 cannot show must not end a run
        sys.stdout.reconfigure(errors="replace")
    try:
        command, words = command_of(app), plugins_first([from_home(word) for word in given])
        named = [word for word in words if word in getattr(command, "commands", {})]
        work = named[0] if named and not {"-h", "--help"} & set(words) else ""
        # commands that can go on later say so themselves
        with Stopping().handling(*stop_signals()), LIFE.of(work):
            command(words)
    except UserError as error:
        needed = getattr(error, "options", ())
        again = f"\n{shlex.join(['g2rpo', *given, *needed])}" if needed else ""
        _end(f"{error}{again}")
    except OSError as error:
        if error.errno not in UNUSABLE or error.filename is None:
            raise
        name = str(error.filename)[:300]
        _end(f"{name}: cannot be used ({error.strerror}); name another file or folder")
    except (Stopped, Interrupted) as stop:
        _end(str(stop), stop.exit_code, "bold yellow")
    except (MemoryError, RuntimeError) as error:
        if (unable := without_operator(error)) is not None:
            _end(unable)
        if not out_of_memory(error):
            raise
        remedy = "take smaller pictures or batches, policy.dtype=bfloat16, or a device with more memory (see `g2rpo plan`)"
        said = str(error).partition("\n")[0] or "Python has no more"
        _end(f"out of memory: {said}\n{remedy}")


def from_home(word: str) -> str:
    """`--out=~/x` with ~ expanded, which no shell does behind the "="; any other word as it is."""
    option, _, value = word.partition("=")
    if not (option.startswith("--") and value.startswith("~")):
        return word
    return f"{option}={os.path.expanduser(value)}"


def plugins_first(arguments: list[str]) -> list[str]:
    """Moves every `--plugin CODE` to the front, so that it may be given anywhere; UserError for
    what is no text."""
    first: list[str] = []
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        if not word.isascii() and any("\ud800" <= character <= "\udfff" for character in word):
            raise UserError(
                f"{word!a:.80} is no text in this locale; set LC_ALL=C.UTF-8, and write UTF-8"
            )
        named = word.partition("=")[0]
        if len(named) > LONGEST_QUOTE and (word.startswith("--") or not rest):
            raise UserError(f"{shown(named)} is no command or option; `g2rpo --help` lists them")
        if word == "--plugin":
            first += [word, *islice(words, 1)]
        else:
            (first if word.startswith("--plugin=") else rest).append(word)
    return [*first, *rest]


def _end(message: str, code: int = 2, style: str = "bold red") -> NoReturn:
    """Ends the command with a message without markup or control characters, which text from files
    and servers may contain.

    With G2RPO_TRACEBACK=1 the traceback comes before it.
    """
    if os.environ.get("G2RPO_TRACEBACK"):
        traceback.print_exc()
    message = without_secrets(message)
    shown = "".join(
        each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}"
        for each in message
    )
    with suppress(OSError):  # a terminal that is gone must not change the exit code
        Heard(stderr=True).print(
            Text.assemble(("g2rpo:", style), " ", shown), highlight=False, soft_wrap=True
        )
    sys.exit(code)
