"""Checks of a pipeline by its small files, before anything large is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from g2rpo.assembly.meta import on_meta
from g2rpo.assembly.pipeline_files import INDEX, parts_in, read_file
from g2rpo.core.errors import UserError
from g2rpo.policies.lora_layers import check_targets

FEW_STEPS = re.compile(r"schnell|turbo|lightning|hyper|distill|klein(?!-base)", re.IGNORECASE)
"""In the names of models that are distilled to few steps."""


def check_files(name: str, folder: str, optional: Sequence[str] = ()) -> None:
    """UserError for a pipeline without a part that it needs (of text encoders, all but `optional`), without flow
    matching, or with numbers in its config files that no model has. Plans, training and sampling begin with it."""
    index = read_file(folder, INDEX)
    parts = {"transformer": (None, None), **parts_in(index)}
    for part, (library, _) in parts.items():
        if part in ("transformer", "vae") and library is None:
            raise UserError(f"policy.path={name}: its model_index.json leaves {part} empty; download the whole pipeline")
        read_file(folder, f"{part}/{'tokenizer_config' if part.startswith('tokenizer') else 'config'}.json")
        lies = library is not None and ((Path(folder) / part).is_dir() or not Path(folder).is_dir())
        if part.startswith("text_encoder") and part not in optional and not lies:
            raise UserError(f"policy.path={name}: has no {part}, which encodes prompts; download the whole pipeline")
    scheduler = read_file(folder, "scheduler/scheduler_config.json")
    if scheduler and not is_flow(scheduler):
        kind, predicts = scheduler.get("_class_name"), scheduler.get("prediction_type", "epsilon")
        raise UserError(
            f"policy.path={name}: its scheduler, {kind} with prediction_type={predicts}, is not for flow matching; "
            "this trains flow models alone"
        )


def check_adapters(folder: str, targets: Sequence[str]) -> None:
    """UserError for a transformer without the layers that a LoRA would change."""
    library, name = parts_in(read_file(folder, INDEX)).get("transformer", (None, None))
    config = read_file(folder, "transformer/config.json")
    if library == "diffusers" and config:
        check_targets(on_meta((f"diffusers:{name}", config)), targets)


def is_flow(scheduler: Mapping[str, Any]) -> bool:
    """Whether a scheduler with this config integrates a flow's velocity."""
    named = str(scheduler.get("_class_name", "")).startswith("FlowMatch")
    return named or bool(scheduler.get("use_flow_sigmas")) or scheduler.get("prediction_type") == "flow_prediction"


def caution(name: str, folder: str) -> str | None:
    """What to say of a model that is distilled to few steps."""
    if not read_file(folder, INDEX).get("is_distilled", FEW_STEPS.search(name) is not None):
        return None
    return (
        f"policy.path={name}: is distilled to few steps. Users of other trainers report that RL blurs such models; "
        "tune the base model (docs/models.md)"
    )
