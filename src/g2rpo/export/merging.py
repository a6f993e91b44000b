"""Whole transformers with the trained weights in them, in the dtype of the base model."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from g2rpo.assembly.pipeline_files import weight_files
from g2rpo.core.errors import UserError, loading
from g2rpo.core.files import add_metadata
from g2rpo.export.weights import Tuned


@dataclass
class Rounding:
    """Sums of squares over all changed weights: of the change by training, and of the rounding error of the stored dtype."""

    trained: float = 0.0
    lost: float = 0.0
    dtype: str = ""

    @property
    def share(self) -> float:
        """The root mean square of the rounding error relative to the change by training."""
        return math.sqrt(self.lost / self.trained) if self.trained else 0.0

    def see(self, before: Tensor, exact: Tensor, stored: Tensor) -> None:
        if exact is not before:
            self.trained += float((exact.double() - before.double()).square().sum())
            self.lost += float((stored.double() - exact.double()).square().sum())
            self.dtype = str(stored.dtype).removeprefix("torch.")


def merge(tuned: Tuned, base: Path, out: Path, *, rounded: bool = True) -> Rounding:
    """Writes the folder of a transformer, file by file as in `base`, with the trained weights in the dtypes that are there, or
    in the one that they were trained in if not `rounded`."""
    rounding, names = Rounding(), set[str]()
    for path in weight_files(base):
        tensors = dict(_merged(tuned, path, rounding, rounded))
        names |= tensors.keys()
        _save(tensors, out / path.name)
    _check(tuned, names, base)
    for path in (base / "config.json", *base.glob("*.safetensors.index.json")):
        shutil.copy(path, out)
    return rounding


def merge_into_one(tuned: Tuned, base: Path, out: Path, rename: Callable[[str], str]) -> Rounding:
    """Writes the same tensors as one file, under other names."""
    rounding = Rounding()
    tensors = {name: value for path in weight_files(base) for name, value in _merged(tuned, path, rounding)}
    _check(tuned, set(tensors), base)
    _save({rename(name): value for name, value in tensors.items()}, out)
    return rounding


def _merged(tuned: Tuned, path: Path, rounding: Rounding, rounded: bool = True) -> Iterator[tuple[str, Tensor]]:
    with loading(f"{path}: cannot be read"), safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            before = file.get_tensor(name)
            exact = tuned.change(name, before)
            stored = exact.to(before.dtype) if rounded else exact
            rounding.see(before, exact, stored)
            yield name, stored


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path)
    add_metadata(path, {"format": "pt"})


def _check(tuned: Tuned, names: set[str], base: Path) -> None:
    if missing := tuned.missing(names):
        raise UserError(f"{base}: is another model than the one that was trained; it has no {min(missing)}")
