"""The contents of a pipeline's folder, from file names and headers, without loading weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from g2rpo.assembly.components import locate_pipeline
from g2rpo.config.schema import PolicyConfig
from g2rpo.core.errors import loading
from g2rpo.core.plain import parse_json, read_text
from g2rpo.policies import catalogue

MODELS = ("transformer", "vae", "text_encoder")
"""Name prefixes of pipeline components with weights."""


def missing_parts(pipeline: Path) -> Iterator[str]:
    """The components of model_index.json, or their files, that a pipeline's folder lacks."""
    for name, entry in parse_json(read_text(pipeline / "model_index.json")).items():
        part = pipeline / name
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)):
            continue
        if not part.is_dir():
            yield f"{name}/ is missing"
        elif name.startswith(MODELS):
            yield from _missing_files(part)


def _missing_files(model: Path) -> Iterator[str]:
    if not (model / "config.json").is_file():
        yield f"{model.name}/config.json is missing"
    wanted = set[str]()
    for index in model.glob("*.safetensors.index.json"):
        with suppress(ValueError, TypeError, KeyError):  # reported when it is loaded
            wanted |= set(parse_json(read_text(index))["weight_map"].values())
    yield from (f"{model.name}/{file} is missing" for file in sorted(wanted) if not (model / file).is_file())
    if not wanted and not any(path.is_file() for path in model.glob("*.safetensors")):
        yield f"{model.name}/ has no weights (*.safetensors)"


def trained_parameters(config: PolicyConfig, pipeline: Path) -> int:
    """The number of trained parameters, including buffers, from the headers of the transformer's files."""
    from safetensors import safe_open

    shapes: dict[str, list[int]] = {}
    for file in sorted((pipeline / "transformer").glob("*.safetensors")):
        with loading(f"policy.path={config.path}: {file.name} cannot be read"), safe_open(file, "pt") as tensors:
            shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    if config.tuning == "full":
        return sum(math.prod(shape) for shape in shapes.values())
    spec = catalogue.spec_of(locate_pipeline(config.path)[1])
    assert spec is not None  # a built-in
    targets = config.lora_targets or spec.lora_targets
    ends = tuple(f".{target}.weight" for target in targets)
    return sum(config.lora_rank * sum(shape) for name, shape in shapes.items() if len(shape) == 2 and f".{name}".endswith(ends))
