"""Durable and atomic writes of files and folders, digests of their contents, and the names of a
run's files."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from g2rpo.core.errors import Stopped, UserError
from g2rpo.core.plain import LFS_POINTER, read_as

UNFINISHED = ".unfinished_"  # the name prefix of files and folders that are being written
LOCK = ".lock"  # the name of the file by which one process at a time is in a folder


class Inside:
    """A path below that of a folder, as an attribute of a class with a `path`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: Any, kind: type) -> Path:
        path: Path = folder.path / self.name
        return path


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file under another name and renames it: `path` has the new or the old content, never
    a part, also after a loss of power. A link at `path` is replaced, not followed.

    Raises OSError if the disk is full or fails, and then leaves no file.
    """
    with whole_file(path) as unfinished:
        unfinished.write_bytes(content)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path of the same name. On leaving, it is synced to disk and replaces `path`; it
    is removed after an exception. It lies in a folder of its own, where libraries may put temporary
    files beside it.
    """
    folder = path.with_name(f"{UNFINISHED}{uuid.uuid4().hex}")
    folder.mkdir()
    try:
        yield folder / path.name
        settle(folder)
        os.replace(folder / path.name, path)
    finally:  # also after an interrupt
        shutil.rmtree(folder, ignore_errors=True)
    sync(path.parent)


def is_empty(folder: Path) -> bool:
    """Whether a folder is absent, or holds only a lock and unfinished files of a killed process."""
    if not folder.is_dir():
        return not folder.exists()
    return all(path.name == LOCK or path.name.startswith(UNFINISHED) for path in folder.iterdir())


def remove_unfinished(folder: Path) -> None:
    """Removes unfinished files of a killed process from `folder` and its folders; the caller must
    hold its lock. Those that have a lock of their own, such as export/ of a run, are left to the
    next process that enters them: another may be writing there now."""
    for place, folders, files in os.walk(folder):
        if LOCK in files and place != str(folder):
            folders.clear()
            continue
        for name in [*folders, *files]:
            if name.startswith(UNFINISHED):
                # a report is written without a lock, and may be finished by now
                with suppress(FileNotFoundError):
                    remove(Path(place, name))


def remove(path: Path) -> None:
    """Removes a file, a link or a folder with its contents."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """A new folder to write into. On leaving, it is synced to disk and replaces `folder`; after an
    exception it is removed."""
    # not by the process: its number comes again, in a container always
    unfinished = folder.with_name(f"{UNFINISHED}{uuid.uuid4().hex}")
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
        raise Stopped(
            f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})"
        ) from error


def settle(folder: Path) -> None:
    """Syncs a new folder and all in it to disk, and gives its files the mode that the umask gave
    the folder: some libraries write files that only their owner may read."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """fsync of a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some file systems, such as VirtualBox's, cannot sync directories
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def open_regular(path: str | Path, flags: int) -> int:
    """`os.open` for a file that is kept open (an `opener` of `open`); OSError for a link, a pipe or
    a device."""
    refused = OSError(errno.EINVAL, f"{Path(path).name} is a link, or no file")
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        # a link; a pipe without a reader
        raise refused if error.errno in (errno.ELOOP, errno.ENXIO) else error from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refused
    return descriptor


def append_line(path: Path, line: str) -> None:
    """Appends a line to a log, replacing an incomplete last line; OSError as `write_whole`."""
    before = path.read_bytes() if path.exists() else b""
    write_whole(path, before[: before.rfind(b"\n") + 1] + line.encode() + b"\n")


def add_metadata(path: Path, entries: Mapping[str, str]) -> None:
    """Adds text to the header of a safetensors file. All its text is sorted then: the library
    writes it in a random order."""
    with path.open("rb") as file, whole_file(path) as unfinished, unfinished.open("wb") as copy:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        text = sorted({**header.pop("__metadata__", {}), **entries}.items())
        whole_header = {"__metadata__": dict(text), **header}
        content = json.dumps(whole_header, separators=(",", ":")).encode()
        content += b" " * (-len(content) % 8)  # the tensors begin at a multiple of 8
        copy.write(len(content).to_bytes(8, "little") + content)
        shutil.copyfileobj(file, copy)


def is_other(path: Path) -> bool:
    """Whether a path leads to something else than a file: a pipe, a socket or a device, for which
    one could wait without end, or a folder."""
    return path.exists() and not path.is_file()


def refuse_other(path: Path) -> Path:
    """The path of a file from outside, before it is opened; UserError for what `is_other`."""
    if is_other(path):
        raise UserError(f"{path}: cannot be read (it is no regular file)")
    return path


def is_pointer(path: Path) -> bool:
    """Whether a file is a pointer of git-lfs, which a clone without it has in the place of a large
    file."""
    with path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER


def refuse_pointer(path: Path) -> None:
    """UserError for a pointer of git-lfs, or for what `is_other`."""
    if is_pointer(refuse_other(path)):
        raise UserError(
            f"{path}: is a pointer of git-lfs, not the file; `git lfs pull` fetches the file"
        )


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form OWNER/NAME of a Hugging Face repository and is no local path."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None and not os.path.exists(
        local(name)
    )


def in_bytes(size: float) -> str:
    """3.1 MiB, 44.3 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"


def local(name: str | Path) -> Path:
    """`name` as a path with ~ expanded; ~USER of an unknown user is kept."""
    return Path(os.path.expanduser(name))


def real(path: Path) -> Path:
    """`path` without links; `Path.resolve` raises for one that leads to itself."""
    return Path(os.path.realpath(path))


def cache_root() -> Path:
    """$G2RPO_CACHE, or g2rpo in the user's cache folder ($XDG_CACHE_HOME, ~/.cache)."""
    own = os.environ.get("G2RPO_CACHE")
    return local(own) if own else local(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "g2rpo"


def digest_of(value: Any) -> str:
    """SHA-256 of plain data, the same for equal data whatever the order of its keys."""
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, ensure_ascii=False).encode()
    ).hexdigest()


class FileDigests:
    """SHA-256 of files, cached in `memo` (if given) while a file's size, times and inode are
    unchanged.

    Text encoders are gigabytes: hashing them at every start would take longer than reading the
    embeddings.
    """

    def __init__(self, memo: Path | None) -> None:
        self.memo = memo
        self._known: dict[str, tuple[int, int, int, int, str]] = {}
        if memo is not None and memo.is_file():
            with suppress(UserError):  # only a cache: the files are read again
                self._known = read_as(dict[str, tuple[int, int, int, int, str]], memo)

    def of(self, path: Path) -> str:
        """The digest of one file."""
        place = real(refuse_other(path))
        stat = place.stat()
        state = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        known = self._known.get(str(place))
        if known is not None and known[:-1] == state:
            return known[-1]
        with place.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._known[str(place)] = (*state, digest)
        if self.memo is not None:
            write_whole(self.memo, json.dumps(self._known).encode())
        return digest

    def of_folders(self, root: Path, folders: Iterable[Path]) -> str:
        """One digest for all files in `folders` of `root`: their names below `root` and their
        contents."""
        files = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
        return digest_of([[path.relative_to(root).as_posix(), self.of(path)] for path in files])


@dataclass(frozen=True)
class RunFiles:
    """What the folder of a run holds. Naming a file neither reads nor creates it."""

    folder: Path | None

    @property
    def path(self) -> Path:
        if self.folder is None:
            raise ValueError("this trainer has no run_dir to write to")
        return self.folder

    config = Inside("config.yaml")  # resolved; `g2rpo train runs/NAME/config.yaml` repeats the run
    starts = Inside("starts.jsonl")  # a row per start or resume (`records.Start`)
    plan = Inside("plan.json")  # the plan beside what was measured (`records.PlannedAndMeasured`)
    # a row per iteration and evaluation (`records.TrainingRow`, `EvaluationRow`)
    log = Inside("metrics.jsonl")
    checkpoints = Inside("checkpoints")
    # until the first checkpoint: a run that is killed before begins again
    unsaved = Inside(".unsaved")
    # weights of the best evaluation, where one is better than the base's
    best = Inside("checkpoints/best")
    # the base's evaluation; so no second copy of the weights is needed
    baseline = Inside("baseline.safetensors")
    first_group = Inside("samples/first_group")  # pictures of one group of the first iteration
    group_scores = Inside("samples/first_group/scores.jsonl")
    group_grid = Inside("samples/first_group.png")
    before_after = Inside("samples/before_after.png")
    curves = Inside("curves.png")
    # base against tuned; written when a run finishes (`records.RunResults`)
    results = Inside("results.json")
    adapter = Inside("adapter")  # trained weights of a LoRA
    transformer = Inside("transformer")  # and of full fine-tuning
    votes = Inside("votes.jsonl")  # a line per answer of `g2rpo teach` (`lab.teach.rounds`)
    pairs = Inside("pairs.jsonl")  # the answers as pairs, once it is finished
    report = Inside("report.html")
    exports = Inside("export")

    def scores(self, iteration: int) -> Path:
        """The table of held-out scores after an iteration (`train.evaluation.heldout`)."""
        return self.path / "scores" / f"{iteration_name(iteration)}.jsonl"

    def pictures(self, iteration: int) -> Path:
        """The folder of the held-out pictures that are kept after an iteration."""
        return self.path / "samples" / iteration_name(iteration)

    def grid(self, iteration: int) -> Path:
        """The first of them side by side."""
        return self.pictures(iteration).with_suffix(".png")


def iteration_name(iteration: int) -> str:
    """The name of what a run keeps of an iteration, in files and folders."""
    return f"iteration_{iteration:06d}"
