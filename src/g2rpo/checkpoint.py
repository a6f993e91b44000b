"""Checkpoints: complete or absent, checked before they are used, and free of pickled code.

A checkpoint is a directory `iteration_000050/` with a manifest of every file's SHA-256. It is written under another name and
renamed when everything is on disk, so a directory with the final name is a finished one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from g2rpo.errors import Stopped, UserError
from g2rpo.plain import parse_json, read_text

MANIFEST = "manifest.json"


class BrokenCheckpoint(UserError):
    """A checkpoint whose files are missing or not what was written."""


def save_checkpoint(root: Path, iteration: int, tensors: dict[str, list[Tensor]], state: dict[str, Any], keep: int) -> Path:
    """Writes `root/iteration_NNNNNN` atomically and removes all but the newest `keep`.

    `tensors` are named lists (weights, averages), one safetensors file each; `state` is nested plain data and tensors such as
    an optimizer's state dict, stored by torch.save and read back with weights_only=True. Raises `Stopped` if it cannot be
    written, and leaves nothing of it.
    """
    root.mkdir(parents=True, exist_ok=True)
    final = root / _name(iteration)
    unfinished = root / f".unfinished_{iteration:06d}_{os.getpid()}"
    for left in root.glob(".unfinished_*"):  # by a process that was killed: a run has one writer at a time
        shutil.rmtree(left)
    unfinished.mkdir()
    try:
        _write(unfinished, iteration, tensors, state)
    except Exception as error:  # of a full disk, say: safetensors and torch have errors of their own for it
        shutil.rmtree(unfinished)
        raise Stopped(f"checkpoint {final}: cannot be written ({error}); the one before it is good") from error
    if final.exists():
        shutil.rmtree(final)
    unfinished.rename(final)
    _sync(root)
    for old in checkpoints(root)[:-keep]:
        shutil.rmtree(old)
    return final


def _write(folder: Path, iteration: int, tensors: dict[str, list[Tensor]], state: dict[str, Any]) -> None:
    for name, values in tensors.items():
        save_file({f"{i:05d}": v.detach().contiguous().cpu() for i, v in enumerate(values)}, folder / f"{name}.safetensors")
    torch.save(state, folder / "state.pt")
    files = {path.name: _digest(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"iteration": iteration, "files": files}, indent=1))
    for path in folder.iterdir():
        _sync(path)


def checkpoints(root: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    found = root.glob("iteration_*") if root.is_dir() else []
    return sorted(path for path in found if re.fullmatch(r"iteration_\d{6}", path.name))


def load_checkpoint(path: Path) -> tuple[int, dict[str, list[Tensor]], dict[str, Any]]:
    """(iteration, tensors, state) as `save_checkpoint` was given them; `BrokenCheckpoint` names the file that is wrong.

    Tensors are read from disk when they are used, so that ranks which need pieces of them do not each hold the whole; what is
    kept is to be copied.
    """
    try:
        manifest = parse_json(read_text(path / MANIFEST))
        files, iteration = dict(manifest["files"]), int(manifest["iteration"])
        if path.name != _name(iteration) or not {"state.pt", "weights.safetensors"} <= files.keys():
            raise ValueError("it is another checkpoint's")
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenCheckpoint(f"checkpoint {path}: its {MANIFEST} is missing or damaged ({error})") from None
    for name, digest in files.items():
        file = path / name
        if not file.is_file():
            raise BrokenCheckpoint(f"checkpoint {path}: {name} is missing")
        if _digest(file) != digest:
            raise BrokenCheckpoint(f"checkpoint {path}: {name} is truncated or changed ({file.stat().st_size} bytes)")
    tensors = {}
    try:  # the digests agree, so this is not the disk: someone wrote it so
        for name in files:
            if name.endswith(".safetensors"):
                stored = load_file(path / name)
                tensors[name.removesuffix(".safetensors")] = [stored[key] for key in sorted(stored)]
        return iteration, tensors, torch.load(path / "state.pt", weights_only=True, mmap=True)
    except Exception as error:  # neither library promises particular ones
        reason = str(error).splitlines()[0] if str(error) else ""
        raise BrokenCheckpoint(f"checkpoint {path}: is no checkpoint ({type(error).__name__}: {reason})") from error


def latest_checkpoint(root: Path) -> tuple[tuple[int, dict[str, list[Tensor]], dict[str, Any]] | None, list[str]]:
    """The newest checkpoint that is intact (None if there is none at all), and complaints about newer ones that are not.

    Raises `BrokenCheckpoint` if checkpoints exist but none is intact.
    """
    complaints: list[str] = []
    for path in reversed(checkpoints(root)):
        try:
            return load_checkpoint(path), complaints
        except BrokenCheckpoint as error:
            complaints.append(str(error))
    if complaints:
        raise BrokenCheckpoint("\n".join([*complaints, "No intact checkpoint is left; start anew in another --run-dir."]))
    return None, complaints


def _name(iteration: int) -> str:
    return f"iteration_{iteration:06d}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
