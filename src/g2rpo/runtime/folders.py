"""Output folders: locked for one process, written whole or not at all, with a message for disk errors."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from safetensors import SafetensorError

from g2rpo.core.errors import Stopped, UserError
from g2rpo.core.files import UNFINISHED, open_regular, settle, sync
from g2rpo.core.plain import read_as

LOCK = ".lock"
ATTEMPTS = 100  # attempts to enter a folder that others create and remove meanwhile


class InUse(UserError):
    """Another process holds a folder."""


@dataclass
class _Hold:
    descriptor: int
    process: int
    depth: int = 1


@dataclass(frozen=True)
class _Owner:
    pid: int
    host: str


_HOLDS: dict[Path, _Hold] = {}


@contextmanager
def held(folder: Path, notify: Callable[[str], None] = print) -> Iterator[int]:
    """While entered, other processes cannot enter `folder`, which is created if needed; this process may enter it again.

    The lock is the kernel's (flock) and ends with the process; the file `.lock` names its holder. NFS (since Linux 2.6.12) and
    the usual cluster file systems share it between machines; `notify` is called for a file system without locks. A folder that
    was created here and is still empty is removed on leaving. Yields a file descriptor: a child process that inherits it keeps
    the lock. Raises `InUse`, which names the holder, and UserError if the folder cannot be written.
    """
    place = folder.resolve()
    hold = _HOLDS.get(place)
    if hold is not None and hold.process == os.getpid():  # a forked child does not hold its parent's lock
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
        if made and folder.is_dir() and not _contents(folder):
            _remove_empty(folder, made)
        os.close(hold.descriptor)


def is_empty(folder: Path) -> bool:
    """Whether a folder is absent, or holds only a lock and unfinished files of a killed process."""
    return not folder.exists() or (folder.is_dir() and not _contents(folder))


def remove_unfinished(folder: Path) -> None:
    """Removes unfinished files of a killed process from `folder` and its folders; the caller must hold its lock."""
    for left in sorted(folder.rglob(f"{UNFINISHED}*"), reverse=True):  # innermost first
        remove(left)


def remove(path: Path) -> None:
    """Removes a file, a link or a folder with its contents."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """A new folder to write into. On leaving, it is synced to disk and replaces `folder`; after an exception it is removed."""
    unfinished = folder.with_name(f"{UNFINISHED}{folder.name}_{os.getpid()}")
    replaced = folder.with_name(f"{unfinished.name}_replaced")
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        settle(unfinished)
        if folder.exists():
            folder.rename(replaced)  # not removed: a kill must not leave neither
        unfinished.rename(folder)
    except BaseException:  # an interrupt too must leave nothing behind
        with suppress(OSError):  # a disk that fails here too must not hide the first error
            if replaced.exists() and not folder.exists():
                replaced.rename(folder)
            shutil.rmtree(unfinished)
        raise
    if replaced.exists():
        remove(replaced)
    sync(folder.parent)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns disk errors while `path` is written into `Stopped`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise Stopped(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})") from error


def _contents(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name != LOCK and not path.name.startswith(UNFINISHED)]


def _make_and_lock(folder: Path, notify: Callable[[str], None]) -> tuple[int, list[Path]]:
    """The descriptor of the lock file, and the folders that were created, the innermost first."""
    made: list[Path] = []
    for left in reversed(range(ATTEMPTS)):
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
                os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": platform.node()}).encode(), 0)
                return descriptor, made
            os.close(descriptor)  # the lock file was removed before it was locked
    raise InUse(f"{folder} is repeatedly created and removed by another process; name another folder")


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
            raise InUse(f"{folder} is in use by {holder}; wait for it, stop it, or name another folder") from None
        notify(f"{folder}: its file system has no locks ({error.strerror}); make sure that no other process writes there")
    return descriptor


def _is_at(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _holder(file: Path) -> str:
    """A description of the process that holds the lock."""
    try:
        owner = read_as(_Owner, file)
        since = datetime.fromtimestamp(file.stat().st_mtime)
        return f"process {owner.pid} on {owner.host}, or one that it started, since {since:%Y-%m-%d %H:%M}"
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
