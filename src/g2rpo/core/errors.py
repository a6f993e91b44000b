"""Errors that end a command with a message instead of a traceback, and what messages share."""

from __future__ import annotations

import difflib
import re
import sysconfig
import traceback
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

LIBRARIES = (
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    str(Path(__file__).parents[1]),
    "<frozen",
)
"""Path prefixes of the standard library, installed packages and this package."""

SHORTEST_PART = 3
"""The fewest characters of a word for which names that contain it are suggested."""


LONGEST_QUOTE, LONGEST_WORD, LONGEST_LINE = 100, 400, 1000
"""Letters that a message shows of a quotation, a word (paths are long) and a line."""
_QUOTED = re.compile(rf"(?<!\w)(['\"])(?:(?!\1)[^\n]){{{LONGEST_QUOTE + 20},}}\1(?!\w)")
_SECRET = re.compile(
    r"(?<=://)[^\s/]*(?=@)|(?<=:/)[^\s/]+(?=@)|(?<=Bearer )[^\s'\"]{8,}|"
    r"\b(?:sk|pk|gsk|hf|gh[opsu]|xai|nvapi|pplx)[-_](?=[\w-]*\d)[\w-]{12,}|\bAIza[\w-]{20,}|"
    r"(?:(?<=[?&]key=)|(?<=api_key=)|(?<=token=)|(?<=password=))[^\s&'\"]{8,}"
)
"""What is, or may well be, a token or a password: of the forms that services give, and in URLs."""


def without_secrets(text: str) -> str:
    """`text` with "***" in the place of what may be a token or a password."""
    return _SECRET.sub("***", text)


def in_short(message: str) -> str:
    """A message without secrets, and without the greatest part of a long input that it repeats."""
    lines = [_line_in_short(line) for line in without_secrets(message).split("\n")]
    return middle_cut("\n".join(lines), 5 * LONGEST_LINE)


def _line_in_short(line: str) -> str:
    if len(line) <= LONGEST_QUOTE:
        return line
    line = re.sub(rf"\S{{{LONGEST_WORD},}}", lambda found: cut(found[0], LONGEST_QUOTE), line)
    line = middle_cut(line, 10 * LONGEST_LINE)  # a quotation is looked for from each mark on
    line = _QUOTED.sub(lambda found: cut(found[0], LONGEST_QUOTE) + found[1], line)
    return middle_cut(line, LONGEST_LINE)


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def middle_cut(text: str, most: int) -> str:
    """`text`, or its begin and its end, where the advice stands."""
    return text if len(text) <= most else f"{text[: most // 4]} ... {text[-most // 4 :]}"


def shown(value: object) -> str:
    """`value` as a message quotes it."""
    return cut(without_secrets(repr(value)), LONGEST_QUOTE)


class _Told(Exception):
    """An exception whose message is for the user, in short."""

    def __init__(self, message: object = "") -> None:
        super().__init__(in_short(str(message)))


class UserError(_Told):
    """Wrong input. The message says what is wrong, where, and what would be right; the command line
    exits with 2."""


class Stopped(_Told):
    """A run that ended early although its input is valid; exit code 1. The message says why."""

    exit_code = 1


class Preempted(Stopped):
    """A signal ended the run after a checkpoint; exit code 75 (EX_TEMPFAIL: try again)."""

    exit_code = 75


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM ended the command at once. A BaseException, so that no `except Exception`
    in a library catches it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RankLost(Stopped):
    """Another rank has died, or did not answer in time."""


class RewardFailed(Stopped):
    """A reward raised an exception or returned a wrong result. Its cause, if any, has the
    traceback."""


def refuse(faults: Iterable[str], kind: type[Exception] = UserError) -> None:
    """Raises `kind` with the first of these faults, if there is any."""
    for fault in faults:
        raise kind(fault)


def at_least_one(**numbers: int) -> None:
    """ValueError that names the first of these numbers that is below 1."""
    wrong = {name: number for name, number in numbers.items() if number < 1}
    refuse(
        (f"{name} must be at least 1, got {number}" for name, number in wrong.items()), ValueError
    )


NO_ROOM = re.compile(
    r"\bCU(BLAS|DNN)_STATUS_(\w+_)?(ALLOC|ALLOCATION)_FAILED\b|\bMPS backend out of memory\b"
)
"""Messages that a device has no memory: of cuBLAS and cuDNN for their workspace, and of Apple's
GPUs. torch raises them as RuntimeError."""


def out_of_device_memory(error: BaseException) -> bool:
    """Whether torch, cuBLAS or cuDNN ran out of device memory."""
    return type(error).__name__ == "OutOfMemoryError" or (
        isinstance(error, RuntimeError) and bool(NO_ROOM.search(str(error)))
    )


def without_operator(error: BaseException) -> str | None:
    """What to say where torch has no kernel of an operator for Apple's GPUs; None for any other
    error."""
    missing = re.search(
        r"operator '([\w:.]+)' is not currently implemented for the MPS device", str(error)
    )
    if missing is None:
        return None
    return (
        f"policy.device=mps: torch has no {missing[1]} for Apple's GPUs; PYTORCH_ENABLE_MPS_FALLBACK=1 computes it on the CPU, "
        "policy.device=cpu everything"
    )


def out_of_memory(error: BaseException) -> bool:
    """Whether Python or torch ran out of memory; does not import torch, so that `g2rpo --help`
    stays fast."""
    return (
        isinstance(error, MemoryError)
        or out_of_device_memory(error)
        or "DefaultCPUAllocator" in str(error)
    )


@contextmanager
def placed(
    before: str, *errors: type[Exception], kind: type[Exception] = UserError, after: str = ""
) -> Iterator[None]:
    """Turns `errors` (default ValueError) inside into `kind`, with words before and after the
    reason."""
    caught = errors or (ValueError,)
    try:
        yield
    except caught as error:
        reason = getattr(error, "strerror", None) or error
        raise kind(f"{before}{reason}{after}") from None


@contextmanager
def loading(what: str, hint: str = "") -> Iterator[None]:
    """Turns any exception while files from outside are read into UserError "WHAT: REASON HINT".

    Libraries do not document the exceptions for damaged or wrong files.
    """
    try:
        yield
    except (UserError, Stopped):
        raise
    except Exception as error:
        if out_of_memory(error) or without_operator(error):
            raise
        reason = (
            str(error)
            if isinstance(error, OSError | ValueError)
            else f"{type(error).__name__}: {error}"
        )
        if isinstance(error, UnpicklingError):
            reason = "a file holds more than tensors, and unpickling it could run any code; save its tensors with safetensors"
        raise UserError(f"{what}: {reason}{hint}") from error


def where(error: BaseException) -> str:
    """ " (in NAME, FILE:LINE: CODE)" of the innermost traceback frame outside libraries; "" if
    there is none."""
    stack = traceback.extract_tb(error.__traceback__)
    # generated code has no line
    frames = [frame for frame in stack if frame.line and not frame.filename.startswith(LIBRARIES)]
    return (
        f" (in {frames[-1].name}, {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})"
        if frames
        else ""
    )


def counted(number: int, noun: str) -> str:
    """ "1 reward", "2 rewards"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _letters(name: str) -> str:
    """A name without what people write in several ways: "G²RPO" is "g2rpo", "Flow-GRPO" "flow_grpo"."""
    return re.sub(r"[-_ ]+", "_", unicodedata.normalize("NFKC", name).casefold())


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a message: " Did you mean 'x' or 'y'?" for near matches of `word`, with `prefix`,
    else for words that contain it, else all known words."""
    known = sorted(known)
    by_letters = {_letters(name): name for name in known}
    asked = _letters(word)
    near = [asked] if asked in by_letters else []
    near = near or difflib.get_close_matches(asked, by_letters, n=3, cutoff=0.6)
    if not near and len(asked) >= SHORTEST_PART:
        near = [name for name in by_letters if asked in name][:3]
    if near:
        return f" Did you mean {' or '.join(repr(prefix + by_letters[name]) for name in near)}?"
    return f" Known: {', '.join(known)}." if known else " There are none."
