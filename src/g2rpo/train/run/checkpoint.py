"""Checkpoints: complete or absent, checked before they are used, and free of pickled code.

A checkpoint is a directory `iteration_000050/` with a manifest of every file's SHA-256. It is
written under another name and renamed when everything is on disk, so a directory with the final
name is complete.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field
from safetensors.torch import load_file, save_file
from torch import Tensor

from g2rpo import __version__
from g2rpo.core.distributed import ALONE, World
from g2rpo.core.errors import Stopped, UserError, out_of_memory, placed, refuse
from g2rpo.core.files import is_other, iteration_name, remove, remove_unfinished, whole, writing
from g2rpo.core.plain import parse_as, read_text
from g2rpo.models.adapters import ADAPTER_FILE, AdapterFile, write_tensors
from g2rpo.models.sharding import Pieces

MANIFEST, STATE = "manifest.json", "state.pt"
HELD = "adapter_file"
"""In the state: the list that the adapter's file holds, and its factors by key."""

Checkpoint = tuple[int, dict[str, list[Tensor] | list[Pieces]], dict[str, Any]]
"""(iteration, tensors, state), as passed to `save_checkpoint` by all ranks together."""


class _Manifest(BaseModel):
    """Digests by file, and the version of g2rpo that wrote them."""

    g2rpo: Annotated[str, Field(max_length=40)]
    iteration: Annotated[int, Field(ge=0)]
    files: dict[
        Annotated[str, Field(pattern=r"^\w+(\.\d{5})?(\.safetensors|\.pt)$", max_length=100)], str
    ]


class BrokenCheckpoint(UserError):
    """A checkpoint whose files are missing or not what was written."""


def save_checkpoint(
    root: Path,
    iteration: int,
    tensors: Mapping[str, Sequence[Tensor]],
    state: Mapping[str, Any],
    keep: int,
    world: World = ALONE,
    writers: int = 1,
    file: AdapterFile | None = None,
) -> Path:
    """Writes `root/iteration_NNNNNN` atomically, then removes all but the newest `keep` intact
    checkpoints.

    `tensors` are named lists (weights, averages). The first `writers` ranks of `world` have a piece
    of each tensor, divided along its first dimension in the order of ranks; each writes a
    safetensors file for each list, and all of `world` must call this. `state` is nested plain data
    and tensors, rank 0's, stored by torch.save and read back with weights_only=True. With `file` the
    weights, or their average if there is one, are written as an adapter, which other programs load;
    they are written a second time only where the factors in it are not undone bit for bit. Raises
    `Stopped`, on every rank, if a file cannot be written: nothing is left of this checkpoint, and
    earlier ones are unchanged.
    """
    final, unfinished, wrong, digests = root / iteration_name(iteration), "", "", {}
    with ExitStack() as stack:
        try:
            if world.is_main:
                root.mkdir(parents=True, exist_ok=True)
                remove_unfinished(root)  # a run has one writer at a time
                unfinished = stack.enter_context(whole(final)).name
        except OSError as error:
            wrong = str(error)
        folder = root / world.joined_text(unfinished)
        try:
            opened = "average" if "average" in tensors else "weights"
            for name, values in tensors.items() if world.rank < writers and folder != root else ():
                own = [value.detach().contiguous().cpu() for value in values]
                if file is not None and name == opened:
                    written = file.tensors(own)
                    write_tensors(folder / ADAPTER_FILE, written, file.header)
                    digests[ADAPTER_FILE] = _digest(folder / ADAPTER_FILE)
                    if all(map(torch.equal, own, file.values(written))):
                        state = {**state, HELD: (name, dict(file.factors))}
                        continue
                path = folder / f"{name}{f'.{world.rank:05d}' if writers > 1 else ''}.safetensors"
                save_file({f"{i:05d}": value for i, value in enumerate(own)}, path)
                digests[path.name] = _digest(path)
            if unfinished:
                torch.save(state, folder / STATE)
                digests[STATE] = _digest(folder / STATE)
        except Exception as error:  # such as a full disk, for which safetensors and torch have their own error classes
            wrong = str(error) or type(error).__name__  # a MemoryError has no words
        told = [
            json.loads(line)
            for line in world.joined_text(json.dumps([digests, wrong]) + "\n").splitlines()
        ]
        try:
            if any(wrong for _, wrong in told):
                raise OSError("; ".join(wrong for _, wrong in told if wrong))
            if world.is_main:
                files = dict(
                    sorted(
                        (name, digest) for digests, _ in told for name, digest in digests.items()
                    )
                )
                manifest = {"g2rpo": __version__, "iteration": iteration, "files": files}
                (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
            stack.close()  # renames it
        except Exception as error:
            raise Stopped(
                f"checkpoint {final}: cannot be written ({error}); the checkpoints before it are kept"
            ) from error
    if world.is_main:
        rotate(root, iteration, keep)
    return final


def rotate(root: Path, newest: int, keep: int) -> None:
    """Removes checkpoints before `newest`, which has just been written or read, except the last
    `keep` - 1 intact ones.

    Later ones are damaged (otherwise the run would have resumed from them): they are not counted
    and not removed, and the run will overwrite them. `Stopped` if the disk refuses.
    """
    earlier = [path for path in checkpoints(root) if _iteration(path) < newest]
    if len(earlier) < keep:
        return
    kept = 1
    for path in reversed(earlier):
        if kept < keep and _is_intact(path):
            kept += 1
        else:
            with writing(path):
                remove(path)


def checkpoints(root: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    found = root.glob("iteration_*") if root.is_dir() else []
    named = [path for path in found if re.fullmatch(r"iteration_[0-9]{6,}", path.name)]
    own = (
        path for path in named if path.name == iteration_name(_iteration(path)) and path.is_dir()
    )
    return sorted(own, key=_iteration)


def forget_after(root: Path, iteration: int) -> None:
    """Removes checkpoints of later iterations."""
    for path in checkpoints(root):
        if _iteration(path) > iteration:
            remove(path)


def newest_iteration(root: Path) -> int:
    """The iteration of the newest checkpoint, whether it is intact or not; 0 if there is none."""
    return _iteration(found[-1]) if (found := checkpoints(root)) else 0


def load_checkpoint(path: Path) -> Checkpoint:
    """The arguments of `save_checkpoint`; `BrokenCheckpoint` names the damaged file.

    Tensors are memory-mapped, so that a rank which needs shards does not hold them whole; copy what
    you keep.
    """
    iteration, names = _verified(path)
    parts: dict[str, list[list[Tensor]]] = {}
    try:  # the digests agree, so the disk is not at fault
        state = torch.load(path / STATE, map_location="cpu", weights_only=True, mmap=True)
        held, factors = state.pop(HELD, (None, {}))
        for name in sorted(names):
            if name.endswith(".safetensors"):
                stored = load_file(path / name)
                if name != ADAPTER_FILE:
                    values = [stored[key] for key in sorted(stored)]
                    parts.setdefault(name.split(".")[0], []).append(values)
                elif held is not None:
                    parts[held] = [AdapterFile(factors, {}).values(stored)]
                if not all(value.isfinite().all() for value in stored.values()):
                    raise ValueError(f"{name} has values that are not finite")
        tensors = {
            name: [Pieces(of) for of in zip(*lists, strict=True)] if lists[1:] else lists[0]
            for name, lists in parts.items()
        }
        return iteration, tensors, state
    except Exception as error:  # neither library documents which
        if out_of_memory(error):
            raise
        reason = str(error).splitlines()[0] if str(error) else ""
        raise BrokenCheckpoint(
            f"checkpoint {path}: is no checkpoint ({type(error).__name__}: {reason})"
        ) from error


def latest_checkpoint(
    root: Path, take: Callable[[Checkpoint], None] = lambda found: None
) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is intact and that `take` accepts; None if there is none at all.

    `take` raises an exception for another model's checkpoint. The strings describe what is wrong
    with newer ones. Raises `BrokenCheckpoint` if checkpoints exist but none can be used.
    """
    complaints: list[str] = []
    for path in reversed(checkpoints(root)):
        try:
            found = load_checkpoint(path)
            _give(path, found, take)
        except BrokenCheckpoint as error:
            complaints.append(str(error))
        else:
            return found, [f"{complaint}; falling back to an older one" for complaint in complaints]
    if complaints:
        raise BrokenCheckpoint(
            "\n".join([*complaints, "No usable checkpoint is left; start again in another folder."])
        )
    return None, []


def _give(path: Path, found: Checkpoint, take: Callable[[Checkpoint], None]) -> None:
    """Calls `take`; what it raises is a `BrokenCheckpoint`."""
    try:
        take(found)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        raise BrokenCheckpoint(
            f"checkpoint {path}: does not fit this model ({error}){_of_another_version(path)}"
        ) from error


def _of_another_version(path: Path) -> str:
    """The end of a message about an intact checkpoint that another version of g2rpo wrote; "" if
    this one did."""
    wrote = parse_as(_Manifest, read_text(path / MANIFEST)).g2rpo
    return (
        ""
        if wrote == __version__
        else f"; g2rpo {wrote} wrote it and this is {__version__}: install that one to go on"
    )


def _verified(path: Path) -> tuple[int, list[str]]:
    """The iteration and the files of a checkpoint, after comparing the files with its manifest."""
    before = f"checkpoint {path}: its {MANIFEST} is missing or damaged ("
    with placed(before, kind=BrokenCheckpoint, after=")"):
        manifest = parse_as(_Manifest, read_text(path / MANIFEST))
    faults = (f"checkpoint {path}: {fault}" for fault in _faults_of_checkpoint(path, manifest))
    refuse(faults, BrokenCheckpoint)
    return manifest.iteration, list(manifest.files)


def _faults_of_checkpoint(path: Path, manifest: _Manifest) -> Iterator[str]:
    kinds = {name.split(".")[0] for name in manifest.files}
    if path.name != iteration_name(manifest.iteration) or not (
        "state" in kinds and kinds & {"weights", Path(ADAPTER_FILE).stem}
    ):
        yield f"its {MANIFEST} is missing or damaged (it is another checkpoint's)"
    for name, digest in manifest.files.items():
        file = path / name
        try:
            if is_other(file):
                yield f"{name} is no regular file"
            elif _digest(file) != digest:
                yield f"{name} is truncated or changed ({file.stat().st_size} bytes)"
        except FileNotFoundError:
            yield f"{name} is missing"
        except OSError as error:
            yield f"{name} cannot be read ({error.strerror})"


def _is_intact(path: Path) -> bool:
    try:
        _verified(path)
    except BrokenCheckpoint:
        return False
    return True


def _iteration(path: Path) -> int:
    return int(path.name.removeprefix("iteration_"))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
