"""The size of what a run trains, from the headers of files, without loading weights."""

from __future__ import annotations

import math
from pathlib import Path

from g2rpo.assembly.components import locate_pipeline
from g2rpo.assembly.pipeline_files import weight_files
from g2rpo.config.schema import PolicyConfig
from g2rpo.core.errors import loading
from g2rpo.policies import catalogue


def trained_parameters(config: PolicyConfig, pipeline: Path) -> int:
    """The number of trained parameters, including buffers, from the headers of the transformer's files."""
    from safetensors import safe_open

    shapes: dict[str, list[int]] = {}
    for file in weight_files(pipeline / "transformer"):
        with loading(f"policy.path={config.path}: {file.name} cannot be read"), safe_open(file, "pt") as tensors:
            shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    if config.tuning == "full":
        return sum(math.prod(shape) for shape in shapes.values())
    spec = catalogue.spec_of(locate_pipeline(config.path)[1])
    assert spec is not None  # a built-in
    targets = config.lora_targets or spec.lora_targets
    ends = tuple(f".{target}.weight" for target in targets)
    return sum(config.lora_rank * sum(shape) for name, shape in shapes.items() if len(shape) == 2 and f".{name}".endswith(ends))
