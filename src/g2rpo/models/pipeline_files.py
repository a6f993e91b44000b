"""The small files of a pipeline's folder, by schemas, what they say against loading it, and the
weights that are loaded."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from huggingface_hub import file_exists, hf_hub_download
from pydantic import AfterValidator, BaseModel, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from g2rpo.core.errors import UserError, placed
from g2rpo.core.files import is_other, is_pointer
from g2rpo.core.plain import parse_as, read_as, read_text
from g2rpo.models import hub
from g2rpo.models.adapter_names import common_peelings
from g2rpo.models.lora_layers import check_targets
from g2rpo.models.meta import on_meta

T = TypeVar("T")

MODELS = ("transformer", "vae", "text_encoder")
"""Name prefixes of pipeline components with weights."""
INDEX, MODULAR_INDEX = "model_index.json", "modular_model_index.json"
LARGEST_NUMBER = 2**24
"""The largest whole number of a config. Vocabularies and lengths of texts are smaller, and a loop
over more takes minutes."""
UNBOUNDED = ("theta", "model_max_length")
"""Endings of keys whose numbers no loop goes through; some tokenizers have 10^30."""


def bounded(value: T, place: str = "") -> T:
    """The value; ValueError names the first number in it that no config of a model has."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        bounded(inner, f"{place}.{key}" if place else str(key))
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{place}={value} should be a finite number")
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER and not place.endswith(UNBOUNDED):
        raise ValueError(
            f"{place}={value!s:.20} is larger than any number of a model; at most {LARGEST_NUMBER} is read"
        )
    return value


Positive = Annotated[float, Field(gt=0)]
Entries = Annotated[dict[Annotated[str, Field(pattern=r"^\w+$")], Any], AfterValidator(bounded)]
"""model_index.json, or the config of a part."""


class _Scheduler(BaseModel):
    shift: Positive = 1.0
    num_train_timesteps: Annotated[int, Field(gt=0)] = 1000
    prediction_type: str | None = None


class _Vae(BaseModel):
    scaling_factor: Positive = 1.0


class _Tokenizer(BaseModel):
    model_max_length: Annotated[int, Field(gt=0)] = 77


class _Shards(BaseModel):
    weight_map: dict[str, Annotated[str, Field(pattern=r"^[\w.-]+$")]]


SCHEMAS: dict[str, type[BaseModel]] = {
    "scheduler/scheduler_config.json": _Scheduler,
    "vae/config.json": _Vae,
    "tokenizer/tokenizer_config.json": _Tokenizer,
}
"""What is read of a file here; the rest is for diffusers and transformers."""


def read_file(pipeline: str, file: str, *, download: bool = False) -> dict[str, Any]:
    """A JSON file of a pipeline's folder, or of a hub repository: of its local cache, where it may
    be absent and is then empty, or downloaded. UserError for values that it cannot have."""
    with placed(f"policy.path={pipeline}: its {file} cannot be read: ", OSError, ValueError):
        if Path(pipeline).is_dir():
            path: Path | None = Path(pipeline) / file
        else:
            path = Path(hf_hub_download(pipeline, file)) if download else hub.cached(pipeline, file)
        if path is None or not (download or path.is_file()):
            return {}
        text = read_text(path)
        parse_as(SCHEMAS.get(re.sub(r"_\d+/", "/", file), BaseModel), text)
        return parse_as(Entries, text)


def index_of(pipeline: str) -> Path | None:
    """The index in a pipeline's folder or in the hub's local cache, of a modular pipeline its own;
    None: there is none."""
    names = (INDEX, MODULAR_INDEX)
    if not os.path.isdir(pipeline):
        return hub.cached(pipeline, *names)
    return next((path for path in (Path(pipeline, name) for name in names) if path.is_file()), None)


def read_index(pipeline: str, *, download: bool = False) -> dict[str, Any]:
    """The index of a pipeline as `read_file` reads it, each part with its library and class."""
    found = index_of(pipeline)
    name = INDEX if found is None else found.name
    if found is None and download:
        with placed(f"policy.path={pipeline}: ", OSError):
            name = INDEX if file_exists(pipeline, INDEX) else MODULAR_INDEX
    entries = read_file(pipeline, name, download=download)
    return {
        part: entry[2].get("type_hint")
        if isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], dict)
        else entry
        for part, entry in entries.items()
    }


def class_in(pipeline: str) -> str:
    """The class of a pipeline; UserError if its index names none."""
    kind = read_index(pipeline, download=True).get("_class_name")
    if not isinstance(kind, str):
        raise UserError(f"policy.path={pipeline}: its index names no pipeline class")
    return kind


def parts_in(index: dict[str, Any]) -> dict[str, tuple[str | None, str | None]]:
    """A pipeline's parts in its index, each with its library and class."""
    pairs = {
        name: entry for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2
    }
    return {
        name: tuple(pair)
        for name, pair in pairs.items()
        if all(each is None or isinstance(each, str) for each in pair)
    }


def options_in(index: dict[str, Any]) -> dict[str, Any]:
    """The values of an index that are no parts, such as is_distilled."""
    parts = parts_in(index)
    return {
        name: value
        for name, value in index.items()
        if not name.startswith("_") and name not in parts
    }


def missing_parts(pipeline: Path) -> Iterator[str]:
    """What a pipeline's folder lacks of the components in its index: folders, files, or their
    contents."""
    cures = []
    for name, (library, _) in parts_in(read_index(str(pipeline))).items():
        part = pipeline / name
        if library is None:
            continue
        if not part.is_dir():
            yield f"{name}/ is missing"
            continue
        held = [path for path in sorted(part.iterdir()) if not path.is_dir()]
        pointers = [path.name for path in held if path.is_file() and is_pointer(path)]
        if others := [path.name for path in held if is_other(path)]:
            yield f"{name}/{others[0]} is no regular file"
        elif pointers:
            yield f"{name}/{pointers[0]} is a pointer of git-lfs, not the file; `git lfs pull` in {pipeline} fetches the file"
        elif name.startswith(MODELS):
            if not (part / "config.json").is_file():
                yield f"{name}/config.json is missing"
            files, none, cure = _weights_of(part)
            faults = {file.name: _fault_of_weights(file) for file in files}
            yield from (f"{name}/{file} {fault}" for file, fault in faults.items() if fault)
            if not files:
                cures.append(cure)
                yield f"{name}/ {none}"
    yield from dict.fromkeys(filter(None, cures))


def _fault_of_weights(file: Path) -> str:
    """What is wrong with a file of weights, by its header; "" for nothing."""
    if not file.is_file():
        return "is missing"
    try:
        with safe_open(file, "pt"):
            return ""
    except SafetensorError as error:
        return f"is cut short or damaged ({error})"


def weight_files(folder: Path) -> list[Path]:
    """The files of weights that are loaded from a model's folder: of several copies one. UserError
    if there are none."""
    files, none, cure = _weights_of(folder)
    if not files:
        raise UserError("; ".join(filter(None, (f"{folder}: {none}", cure))))
    if absent := [file for file in files if not file.is_file()]:
        raise UserError(f"{absent[0]}: is missing")
    return files


def has_weights(folder: Path) -> bool:
    """Whether all weights of a model's folder are there."""
    files, _, _ = _weights_of(folder)
    return bool(files) and all(file.is_file() for file in files)


def _weights_of(folder: Path) -> tuple[list[Path], str, str]:
    """The files of weights as diffusers and transformers choose them, which may be missing; why
    there are none, and the cure, if one is known."""
    for stem in ("diffusion_pytorch_model", "model"):
        whole, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
        # transformers prefers the whole, diffusers the index
        if index.is_file() and not (stem == "model" and whole.is_file()):
            shards = read_as(_Shards, index).weight_map
            files = [folder / file for file in sorted(set(shards.values()))]
            return files, "its index names no file", ""
        if whole.is_file():
            return [whole], "", ""
    others = sorted(
        path.name
        for path in folder.glob("*")
        if path.suffix in (".safetensors", ".bin", ".pt", ".ckpt")
    )
    for name in others:
        if variant := re.match(r"(?:diffusion_pytorch_)?model\.(\w+)\b.*\.safetensors$", name):
            call = f"DiffusionPipeline.from_pretrained(FOLDER, variant={variant[1]!r}).save_pretrained(NEW)"
            cure = f"write them under the usual names by diffusers' {call}"
            return [], f"has the variant {variant[1]} alone ({name})", cure
    such = f" but {', '.join(others[:2])}" if others else ""
    return [], f"has no weights (*.safetensors){such}", ""


# --- checks before anything large is loaded

FEW_STEPS = re.compile(r"schnell|turbo|lightning|hyper|distill|klein(?!-base)", re.IGNORECASE)
"""In the names of models that are distilled to few steps."""


def faults_of_files(folder: str, optional: Sequence[str] = ()) -> Iterator[str]:
    """Of a pipeline without a part that it needs (of text encoders, all but `optional`), or without
    flow matching. UserError for numbers in its config files that no model has. Plans, training and
    sampling begin with it."""
    index = read_index(folder)
    parts = {"transformer": (None, None), **parts_in(index)}
    for part, (library, _) in parts.items():
        if part in ("transformer", "vae") and library is None:
            yield f"its model_index.json leaves {part} empty; download the whole pipeline"
        read_file(
            folder,
            f"{part}/{'tokenizer_config' if part.startswith('tokenizer') else 'config'}.json",
        )
        lies = library is not None and ((Path(folder) / part).is_dir() or not Path(folder).is_dir())
        if part.startswith("text_encoder") and part not in optional and not lies:
            yield f"has no {part}, which encodes prompts; download the whole pipeline"
        if part.startswith("transformer") and part != "transformer" and library is not None:
            yield f"has a {part} beside its transformer, and models of one are trained (of Wan, 2.1)"
    scheduler = read_file(folder, "scheduler/scheduler_config.json")
    if scheduler and not is_flow(scheduler):
        kind, predicts = scheduler.get("_class_name"), scheduler.get("prediction_type", "epsilon")
        yield (
            f"its scheduler, {kind} with prediction_type={predicts}, is not for flow matching; this trains flow models alone"
        )


def check_adapters(folder: str, targets: Sequence[str], *, each: bool) -> None:
    """UserError for a transformer without the layers that a LoRA would change."""
    library, name = parts_in(read_index(folder)).get("transformer", (None, None))
    config = read_file(folder, "transformer/config.json")
    if library == "diffusers" and config:
        check_targets(on_meta((f"diffusers:{name}", config)), targets, each=each)


def is_flow(scheduler: Mapping[str, Any]) -> bool:
    """Whether a scheduler with this config integrates a flow's velocity."""
    named = str(scheduler.get("_class_name", "")).startswith("FlowMatch")
    return (
        named
        or bool(scheduler.get("use_flow_sigmas"))
        or scheduler.get("prediction_type") == "flow_prediction"
    )


def caution(name: str, folder: str) -> str | None:
    """What to say of a model that is distilled to few steps."""
    if not read_index(folder).get("is_distilled", FEW_STEPS.search(name) is not None):
        return None
    return (
        f"policy.path={name}: is distilled to few steps. Users of other trainers report that RL blurs such models; "
        "tune the base model (docs/models.md)"
    )


WEIGHT_FILES = ("pytorch_lora_weights.safetensors", "config.json")
"""A folder of weights has one of these: of an adapter, or of a transformer."""


def check_weights(path: Path) -> None:
    """UserError for a path that cannot be tuned weights."""
    if not path.is_dir() and not (path.is_file() and path.suffix == ".safetensors"):
        what = "an adapter/ or a transformer/ that training wrote, or a .safetensors file of one"
        raise UserError(f"weights {path}: is no folder and no .safetensors file; name {what}")
    if path.is_dir() and not any((path / name).is_file() for name in WEIGHT_FILES):
        raise UserError(
            f"weights {path}: holds neither {' nor '.join(WEIGHT_FILES)}; of a run, name its adapter/ or transformer/"
        )


def is_adapter(file: Path) -> bool:
    """Whether a file of weights holds an adapter, of whatever kind, and no whole transformer."""
    with safe_open(file, "pt") as tensors:
        return any(re.search(r"lora|\.(lokr|hada|b?oft)_", name) for name in tensors.keys())  # noqa: SIM118  no mapping


def weights_of_file(file: Path, transformer: nn.Module) -> dict[str, Tensor]:
    """The tensors of a whole transformer's file, by its own names, without the prefixes that all of them have;
    UserError for others."""
    tensors = load_file(file)
    own = {name: value.shape for name, value in transformer.state_dict().items()}
    found = max(
        (
            dict(zip(names, tensors.values(), strict=True))
            for names in common_peelings(list(tensors))
        ),
        key=lambda named: len(own.keys() & named.keys()),
    )
    lacks, others = sorted(own.keys() - found.keys()), sorted(found.keys() - own.keys())
    differ = sorted(name for name in own.keys() & found.keys() if found[name].shape != own[name])
    if lacks or others or differ:
        such = ", ".join(names[0] for names in (lacks, others, differ) if names)
        raise UserError(
            f"{file}: is no {type(transformer).__name__} of this size in diffusers' names: {len(lacks)} of its {len(own)} "
            f"tensors are missing, {len(others)} are unknown and {len(differ)} have another shape, such as {such}"
        )
    return found
