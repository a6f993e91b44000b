"""`g2rpo export`: a run's weights as other programs read them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from g2rpo.core.errors import UserError, did_you_mean
from g2rpo.core.files import whole_file
from g2rpo.export.adapter import PREFIX
from g2rpo.export.comfyui import for_comfyui, names_for, whole_names
from g2rpo.export.merging import Rounding, merge, merge_into_one
from g2rpo.export.weights import Tuned, final, from_checkpoint, transformer_folder
from g2rpo.policies.tuning import ADAPTER
from g2rpo.runs.directory import RunDirectory
from g2rpo.runs.lifecycle import read_config
from g2rpo.runtime.folders import is_empty, whole, writing
from g2rpo.training.model_card import copy_card

FORMATS = ("diffusers", "comfyui", "merged")


def export(run: Path, format: str, checkpoint: str | None, out: Path | None) -> tuple[Path, Rounding | None]:
    """Writes a new folder, for ComfyUI a new file; returns where, and what rounding has cost merged weights. The base model is
    read only where its weights are needed. UserError for a run without weights, and for models and modules that a format has no
    names for."""
    if not format:
        raise UserError(f"say which --format: {', '.join(FORMATS)}")
    if format not in FORMATS:
        raise UserError(f"--format {format}: is no format.{did_you_mean(format, FORMATS)}")
    config = read_config(run)
    out = out or _place(run, format, checkpoint)
    _check_new(out, format)
    tuned = final(run, config) if checkpoint is None else from_checkpoint(run, config, checkpoint)
    finished = RunDirectory(run).weights if checkpoint is None else None
    base = partial(transformer_folder, config.policy)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(out) if format == "comfyui" else whole(out) as unfinished:
            rounding = _write(format, tuned, base, unfinished, finished, config.policy.kind)
    return out, rounding


def _place(run: Path, format: str, checkpoint: str | None) -> Path:
    suffix = f"-{checkpoint}" if checkpoint else ""
    return RunDirectory(run).exports / (
        f"{run.resolve().name}{suffix}.safetensors" if format == "comfyui" else f"{format}{suffix}"
    )


def _check_new(out: Path, format: str) -> None:
    if format == "comfyui" and out.suffix != ".safetensors":
        raise UserError(
            f"--out {out}: ComfyUI reads one file; name it NAME.safetensors, in models/loras or models/diffusion_models"
        )
    if out.exists() if format == "comfyui" else not is_empty(out):
        raise UserError(f"{out} exists; name another --out")


def _write(
    format: str, tuned: Tuned, base: Callable[[], Path], out: Path, finished: Path | None, kind: str | None
) -> Rounding | None:
    """Writes a format; `finished` are the final weights of a run, where they are what is exported."""
    if format == "merged":
        return merge(tuned, base(), out)
    if format == "comfyui":
        names = names_for(tuned.kind, kind)
        if tuned.adapter is None:
            return merge_into_one(tuned, base(), out, whole_names(names))
        for_comfyui(tuned.adapter, names).write(out)
        return None
    if tuned.adapter is not None:
        tuned.adapter.write(out / ADAPTER, PREFIX)
    elif finished is None:
        merge(tuned, base(), out, rounded=False)
    else:
        shutil.copytree(finished, out, dirs_exist_ok=True)
    if finished is not None:
        copy_card(finished, out)
    return None
