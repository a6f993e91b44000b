"""Output folders: one process at a time in each, fresh names for new ones, and the runs that there
are."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from g2rpo.config import recipes
from g2rpo.core.errors import UserError, shown
from g2rpo.core.files import LOCK, is_empty, open_regular, real, remove_unfinished
from g2rpo.core.plain import read_as

MOST_ATTEMPTS = 100  # attempts to enter a folder that others create and remove meanwhile


class InUse(UserError):
    """Another process holds a folder."""


@dataclass
class _Hold:
    descriptor: int
    process: int
    depth: int = 1


@dataclass(frozen=True)
class Owner:
    """The process that entered a folder last."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


_HOLDS: dict[Path, _Hold] = {}


@contextmanager
def held(folder: Path, notify: Callable[[str], None] = print) -> Iterator[int]:
    """While entered, other processes cannot enter `folder`, which is created if needed; this
    process may enter it again.

    The lock is the kernel's (flock) and ends with the process; the file `.lock` names its holder.
    NFS (since Linux 2.6.12) and the usual cluster file systems share it between machines; `notify`
    is called for a file system without locks. A folder that was created here and is still empty is
    removed on leaving. Yields a file descriptor: a child process that inherits it keeps the lock.
    Raises `InUse`, which names the holder, and UserError if the folder cannot be written.
    """
    place = real(folder)
    hold = _HOLDS.get(place)
    # a forked child does not hold its parent's lock
    if hold is not None and hold.process == os.getpid():
        hold.depth += 1
        try:
            yield hold.descriptor
        finally:
            hold.depth -= 1
        return
    try:
        descriptor, made = _make_and_lock(folder, notify)
        hold = _HOLDS[place] = _Hold(descriptor, os.getpid())
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
    try:
        yield hold.descriptor
    finally:
        del _HOLDS[place]
        if made and folder.is_dir() and is_empty(folder):
            _remove_empty(folder, made)
        os.close(hold.descriptor)


def _make_and_lock(folder: Path, notify: Callable[[str], None]) -> tuple[int, list[Path]]:
    """The descriptor of the lock file, and the folders that were created, the innermost first."""
    made: list[Path] = []
    for left in reversed(range(MOST_ATTEMPTS)):
        made = made or [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = _lock(folder, notify)
        except (FileNotFoundError, FileExistsError):
            if not left or folder.is_file():
                raise
        else:
            if _is_at(descriptor, folder / LOCK):
                os.ftruncate(descriptor, 0)
                owner = Owner(os.getpid(), platform.node())
                os.pwrite(descriptor, json.dumps(asdict(owner)).encode(), 0)
                return descriptor, made
            os.close(descriptor)  # the lock file was removed before it was locked
    raise InUse(
        f"{folder} is repeatedly created and removed by another process; name another folder"
    )


def _lock(folder: Path, notify: Callable[[str], None]) -> int:
    """The descriptor of the lock file."""
    file = folder / LOCK
    descriptor = open_regular(file, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            holder = _holder(file)
            os.close(descriptor)
            raise InUse(
                f"{folder} is in use by {holder}; wait for it, stop it, or name another folder"
            ) from None
        notify(
            f"{folder}: its file system has no locks ({error.strerror}); make sure that no other process writes there"
        )
    return descriptor


def _is_at(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _holder(file: Path) -> str:
    """A description of the process that holds the lock."""
    try:
        owner = read_as(Owner, file)
        since = datetime.fromtimestamp(file.stat().st_mtime)
        return f"{owner}, or one that it started, since {since:%Y-%m-%d %H:%M}"
    except (OSError, UserError):  # not written yet
        return "another process"


def _remove_empty(folder: Path, made: list[Path]) -> None:
    remove_unfinished(folder)
    (folder / LOCK).unlink(missing_ok=True)
    for path in made:
        try:
            path.rmdir()
        except OSError:  # another process uses it already
            return


def enter_fresh(
    stack: ExitStack, root: Path, name: str, notify: Callable[[str], None] = print
) -> Path:
    """Enters the first of ROOT/NAME, ROOT/NAME-2, ... that does not exist; concurrent commands get
    different ones."""
    while True:
        directory = fresh_directory(root, name)
        with ExitStack() as attempt:
            try:
                attempt.enter_context(held(directory, notify))
            except InUse:
                continue
            if is_empty(directory):  # else another run has come and gone
                stack.enter_context(attempt.pop_all())
                return directory


def first_usable(name: str, check: Callable[[Path], None]) -> Path:
    """NAME, or the first of NAME-2, NAME-3 ... that `check` does not refuse."""
    for candidate in _numbered(Path(name)):
        with suppress(UserError):
            check(candidate)
            break
    return candidate


def fresh_directory(root: Path, name: str) -> Path:
    """`root/NAME`, or the first of `root/NAME-2`, `root/NAME-3` ... that does not exist."""
    stem = re.sub(r"[^\w.-]+", "-", name)
    if not stem.strip("."):
        raise UserError(
            f"recipe: {shown(name)} cannot name a folder below {root}/; name one with --run-dir"
        )
    return next(folder for folder in _numbered(root / stem) if not folder.exists())


def _numbered(path: Path) -> Iterator[Path]:
    """PATH, PATH-2, PATH-3 ... without end."""
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in count(2))


MOST_LISTED_RUNS = 5
"""The most runs that a message names."""


def runs_in(folder: Path) -> list[Path]:
    """The runs that lie in a folder, the one that was written last at the end."""
    found = [config.parent for config in folder.glob("*/config.yaml")]
    return sorted(found, key=lambda run: run.stat().st_mtime)


def newest_run() -> Path | None:
    """Of the runs below runs/, for a command that names none."""
    return next(reversed(runs_in(Path("runs"))), None)


def no_run(path: str | Path) -> str:
    """The message about a path that is no run: what it is, the runs that it holds, or the newest
    one."""
    # os.path takes a text that is too long for a name
    found = runs_in(Path(path))[-MOST_LISTED_RUNS:] if os.path.isdir(path) else []
    whole = [folder for folder in Path(path).parents if os.path.isfile(folder / "config.yaml")]
    newest = newest_run()
    others = ""
    if found:
        others = f"; it holds the runs {', '.join(map(str, found))}"
    elif whole and os.path.exists(path):
        others = f"; it is a part of the run {whole[0]}"
    elif str(path) in recipes.names():
        others = f"; it is a recipe, and `g2rpo train {path}` makes a run"
    elif newest is not None:
        others = f"; the newest run is {newest}"
    return f"{path} is no run directory (no config.yaml){others}"
