"""`g2rpo export`: a run's weights as other programs read them, with the names of ComfyUI, kohya's
trainers and ai-toolkit (`models.comfyui`), and whole transformers with the trained weights in
them."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from g2rpo.config.schema import Config
from g2rpo.core.errors import UserError, did_you_mean, loading, refuse
from g2rpo.core.events import doing
from g2rpo.core.files import (
    add_metadata,
    is_empty,
    remove_unfinished,
    whole,
    whole_file,
    writing,
)
from g2rpo.core.statistics import percent
from g2rpo.lab.tuned_weights import TunedWeights, final, from_checkpoint, transformer_folder
from g2rpo.models import catalogue
from g2rpo.models.adapters import ADAPTER_FILE, CONFIG, PREFIX, Adapter, write_tensors
from g2rpo.models.blueprint import adapter_of
from g2rpo.models.comfyui import (
    FLUX,
    JOINT_PARTS,
    ComfyUI,
    order_in_joint,
    part_in_joint,
    replaced_name,
)
from g2rpo.models.pipeline_files import weight_files
from g2rpo.train.model_card import copy_card
from g2rpo.train.run.folder import Run
from g2rpo.train.run.lock import held

EXPORT_FORMATS = ("diffusers", "comfyui", "kohya", "ai-toolkit", "merged")
FILE_FORMATS = ("comfyui", "kohya", "ai-toolkit")
"""Formats that are one file."""


@dataclass
class Rounding:
    """Sums of squares over all changed weights: of the change by training, and of the rounding
    error of the stored dtype."""

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


def export(
    run: Path,
    format: str,
    checkpoint: str | None,
    out: Path | None,
    learnt: bool = False,
    notify: Callable[[str], None] = print,
) -> Path:
    """Writes a new folder or, for `FILE_FORMATS`, a new file; returns where.

    The base model is read only where its weights are needed. Of an adapter that continues another,
    `learnt` leaves that out. `notify` is called with what a
    format cannot say of an adapter, and with what rounding has cost merged weights. UserError for a
    run without weights, and for models and modules that a format has no names for.
    """
    refuse(_faults_of_format(format))
    config = Run(run).read_config()
    which = (f"-{checkpoint}" if checkpoint else "") + "-learnt" * learnt
    own, out = out is None, out or _own_place(run, format, which)
    refuse(_faults_of_out(out, format))
    kept = final(run, config) if checkpoint is None else from_checkpoint(run, config, checkpoint)
    tuned = _learnt(kept, config) if learnt else kept
    try:
        other = _other_names(format, tuned, config)
    except Unfit as refusal:
        raise UserError(
            f"--format {format}: {refusal}; this run can be written with --format {' or '.join(_fitting_formats(tuned, config))}"
        ) from None
    as_final = checkpoint is None and tuned.adapter is kept.adapter
    finished = Run(run).weights if as_final else None  # which its card describes
    base = partial(transformer_folder, config.policy)
    with writing(out), doing(f"writing {out}"), ExitStack() as stack:
        out.parent.mkdir(parents=True, exist_ok=True)
        if own:  # what a killed export has left there goes
            stack.enter_context(held(out.parent, notify))
            remove_unfinished(out.parent)
        with whole_file(out) if format in FILE_FORMATS else whole(out) as unfinished:
            rounding = _write(format, tuned, base, unfinished, finished, other)
    if config.policy.lora_above and format in FILE_FORMATS:
        end = (
            "keyframes of a LoRA hook end it"
            if format == "comfyui"
            else "the card of --format diffusers has what ends it"
        )
        notify(
            f"{_early(config)}; what reads {format} files applies it at all steps, unless told otherwise: {end}"
        )
    if rounding is not None and rounding.dtype:
        cost = f"rounding moves weights by {percent(rounding.share, 2)} of what training did (root mean square)"
        notify(f"stored in {rounding.dtype}: {cost}")
    return out


def _early(config: Config) -> str:
    return (
        f"policy.lora_above={config.policy.lora_above:g}, so the adapter acts at early steps only"
    )


Renamed = dict[str, Tensor] | Callable[[str], str] | None
"""An adapter's tensors under a format's names, or how it names those of a whole model; None where
they are diffusers'."""


def _other_names(format: str, tuned: TunedWeights, config: Config) -> Renamed:
    """`Unfit` for a format that cannot hold these weights."""
    if format == "merged" and config.policy.lora_above:
        raise Unfit(f"{_early(config)}, and merged weights would at all")
    if format not in FILE_FORMATS:
        return None
    if tuned.adapter is None and format != "comfyui":
        raise Unfit("is for adapters, and this run trained all weights")
    names = names_for(tuned.kind, config.policy.kind, format)
    if tuned.adapter is None:
        return whole_names(names)
    return tensors_for(tuned.adapter, names, format)


def _fitting_formats(tuned: TunedWeights, config: Config) -> Iterator[str]:
    """The formats that can hold these weights."""
    for format in EXPORT_FORMATS:
        with suppress(Unfit):
            _other_names(format, tuned, config)
            yield format


def _faults_of_format(format: str) -> Iterator[str]:
    if not format:
        yield f"say which --format: {', '.join(EXPORT_FORMATS)}"
    if format not in EXPORT_FORMATS:
        yield f"--format {format}: is no format.{did_you_mean(format, EXPORT_FORMATS)}"


def _learnt(tuned: TunedWeights, config: Config) -> TunedWeights:
    """The adapter without the one that it continues."""
    if tuned.adapter is None:
        raise UserError("--learnt is for adapters; this run trained all weights")
    start = adapter_of(config.policy)
    return tuned if start is None else replace(tuned, adapter=tuned.adapter.plus(start, -1))


def _own_place(run: Path, format: str, which: str) -> Path:
    name = run.resolve().name if format == "comfyui" else f"{run.resolve().name}-{format}"
    return Run(run).exports / (
        f"{name}{which}.safetensors" if format in FILE_FORMATS else f"{format}{which}"
    )


def _faults_of_out(out: Path, format: str) -> Iterator[str]:
    if format in FILE_FORMATS and out.suffix != ".safetensors":
        place = (
            ", in ComfyUI's models/loras or models/diffusion_models" if format == "comfyui" else ""
        )
        yield f"--out {out}: is one file in this format; name it NAME.safetensors{place}"
    if out.exists() if format in FILE_FORMATS else not is_empty(out):
        yield f"{out} exists; name another --out"


def _write(
    format: str,
    tuned: TunedWeights,
    base: Callable[[], Path],
    out: Path,
    finished: Path | None,
    other: Renamed,
) -> Rounding | None:
    """Writes a format, with its `other` names; `finished` are the final weights of a run, where
    they are what is exported."""
    if isinstance(other, dict):
        assert tuned.adapter is not None
        # of diffusers' names
        header = {key: text for key, text in tuned.adapter.metadata.items() if key != CONFIG}
        write_tensors(out, other, header)
        return None
    if format == "merged" or other is not None:
        return merge(tuned, base(), out, rename=other)
    if tuned.adapter is not None:
        tuned.adapter.write(out / ADAPTER_FILE, PREFIX)
    elif finished is None:
        merge(tuned, base(), out, rounded=False)
    else:
        shutil.copytree(finished, out, dirs_exist_ok=True)
    if finished is not None:
        copy_card(finished, out)
    return None


def merge(
    tuned: TunedWeights,
    base: Path,
    out: Path,
    *,
    rounded: bool = True,
    rename: Callable[[str], str] | None = None,
) -> Rounding:
    """Writes the folder of a transformer, file by file as in `base`, with the trained weights in
    the dtypes that are there, or in the one that they were trained in if not `rounded`; or, with
    `rename`, one file of all tensors under other names."""
    rounding, missing, renamed = Rounding(), set(tuned.names), dict[str, Tensor]()
    for path in weight_files(base):
        tensors = dict(_merged(tuned, path, rounding, rounded))
        missing -= tensors.keys()
        if rename is None:
            _save_tensors(tensors, out / path.name)
        else:
            renamed |= {rename(name): value for name, value in tensors.items()}
    if missing:
        raise UserError(
            f"{base}: is another model than the one that was trained; it has no {min(missing)}"
        )
    if rename is not None:
        _save_tensors(renamed, out)
        return rounding
    for path in (base / "config.json", *base.glob("*.safetensors.index.json")):
        shutil.copy(path, out)
    return rounding


def _merged(
    tuned: TunedWeights, path: Path, rounding: Rounding, rounded: bool
) -> Iterator[tuple[str, Tensor]]:
    with loading(f"{path}: cannot be read"), safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            before = file.get_tensor(name)
            exact = tuned.change(name, before)
            stored = exact.to(before.dtype) if rounded else exact
            rounding.see(before, exact, stored)
            yield name, stored


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path)
    add_metadata(path, {"format": "pt"})


class Unfit(UserError):
    """A format cannot hold a run's weights; the message is why."""


def names_for(transformer: str, kind: str | None = None, format: str = "comfyui") -> ComfyUI:
    """Other programs' names of a class of transformers, those of the spec that `kind` (policy.kind)
    names or the catalogue's; `Unfit` where none are known."""
    for names in (catalogue.names_of(kind), *(spec.comfyui for spec in catalogue.SPECS.values())):
        if names is not None and names.transformer == transformer:
            return names
    has = "ComfyUI has" if format == "comfyui" else "there is"
    raise Unfit(f"{has} no model {transformer}, or its names are not known here")


def whole_names(names: ComfyUI) -> Callable[[str], str]:
    """ComfyUI's names of the tensors of a whole transformer; `Unfit` if it cannot load one."""
    if (changes := names.whole) is None:
        raise Unfit(f"no conversion of a whole {names.transformer} is known")

    def renamed(name: str) -> str:
        for pattern, other in changes.items():
            name = re.sub(pattern, other, name)
        return name

    return renamed


def tensors_for(adapter: Adapter, names: ComfyUI, format: str) -> dict[str, Tensor]:
    """The tensors of an adapter with ComfyUI's keys, or with the original weights' names, as
    kohya's trainers and ai-toolkit write them."""
    key_of: Callable[[str], str | None] = names.key
    if format != "comfyui":
        if (original := names.original) is None or (
            format == "ai-toolkit" and original is FLUX.original
        ):
            raise Unfit(f"no names of a {names.transformer} are known there")
        key_of = partial(replaced_name, original)
    renamed = Adapter(_renamed(adapter, format, names.transformer, key_of))
    if format != "kohya":
        return renamed.tensors("diffusion_model." if format == "ai-toolkit" else "")
    tensors: dict[str, Tensor] = {}
    for key, (down, up) in renamed.layers.items():
        key = "lora_unet_" + key.replace(".", "_")
        alpha = torch.tensor(float(len(down)))
        tensors |= {
            f"{key}.lora_down.weight": down,
            f"{key}.lora_up.weight": up,
            f"{key}.alpha": alpha,
        }
    return tensors


def _renamed(
    adapter: Adapter, format: str, transformer: str, key_of: Callable[[str], str | None]
) -> dict[str, tuple[Tensor, Tensor]]:
    """The factors by other modules' names. Projections that the original weights keep in one matrix
    become one LoRA: the downs below one another, the ups in the blocks of a diagonal, so that up @
    down stacks their changes."""
    grouped: dict[str, list[str]] = {}
    for module in sorted(adapter.layers, key=lambda name: (order_in_joint(name), name)):
        if (key := key_of(module)) is None:
            raise Unfit(
                f"its loader has no key for {module} of {transformer}, which policy.lora_targets trains, and would leave it out"
            )
        grouped.setdefault(key, []).append(module)
    layers = {}
    for key, modules in grouped.items():
        if key.endswith("qkv") and len(modules) != 3:
            raise Unfit(
                f"{key} is one matrix there; train to_q, to_k and to_v, not {modules} alone"
            )
        pairs = [adapter.layers[module] for module in modules]
        # FLUX.1's blocks of one stream; what is absent is zero
        if key.endswith("linear1") and part_in_joint(modules[0]):
            rank, width = pairs[0][0].shape
            found = dict(zip(map(part_in_joint, modules), pairs, strict=True))
            heights = {part: 4 * width if part == "mlp" else width for part in JOINT_PARTS}
            lacks = {
                part: (torch.zeros(rank, width), torch.zeros(height, rank))
                for part, height in heights.items()
            }
            pairs = [found.get(part, lacks[part]) for part in JOINT_PARTS]
        downs, ups = zip(*pairs, strict=True)
        layers[key] = pairs[0] if len(pairs) == 1 else (torch.cat(downs), torch.block_diag(*ups))
    return layers
