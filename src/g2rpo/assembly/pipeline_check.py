"""Checks of a pipeline by its small files, before anything large is loaded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from g2rpo.assembly import hub
from g2rpo.assembly.meta import on_meta
from g2rpo.core.errors import UserError
from g2rpo.core.plain import parse_json, read_text
from g2rpo.policies.tuning import check_targets

MOST_LAYERS = 1000
"""More than any model has."""
FEW_STEPS = re.compile(r"schnell|turbo|lightning|hyper|distill|klein(?!-base)", re.IGNORECASE)
"""In the names of models that are distilled to few steps."""


def check_files(name: str, folder: str, optional: Sequence[str] = ()) -> None:
    """UserError for a pipeline without a part that it needs (of text encoders, all but `optional`), without flow
    matching, or with numbers in its config files that no model has. Plans, training and sampling begin with it."""
    index = _read(folder, "model_index.json")
    for part in parts_in(index):
        if part in ("transformer", "vae") and index[part] == [None, None]:
            raise UserError(f"policy.path={name}: its model_index.json leaves {part} empty; download the whole pipeline")
        _check_layers(name, f"{part}/config.json", _read(folder, f"{part}/config.json"))
        lies = index[part] != [None, None] and ((Path(folder) / part).is_dir() or not Path(folder).is_dir())
        if part.startswith("text_encoder") and part not in optional and not lies:
            raise UserError(f"policy.path={name}: has no {part}, which encodes prompts; download the whole pipeline")
    scheduler = _read(folder, "scheduler/scheduler_config.json")
    _check_numbers(name, "scheduler/scheduler_config.json", scheduler, "shift", "num_train_timesteps")
    _check_numbers(name, "vae/config.json", _read(folder, "vae/config.json"), "scaling_factor")
    if scheduler and not is_flow(scheduler):
        kind, predicts = scheduler.get("_class_name"), scheduler.get("prediction_type", "epsilon")
        raise UserError(
            f"policy.path={name}: its scheduler, {kind} with prediction_type={predicts}, is not for flow matching; "
            "this trains flow models alone"
        )


def check_adapters(folder: str, targets: Sequence[str]) -> None:
    """UserError for a transformer without the layers that a LoRA would change."""
    library, name = (_read(folder, "model_index.json").get("transformer") or [None, None])[:2]
    config = _read(folder, "transformer/config.json")
    if library == "diffusers" and config:
        check_targets(on_meta((f"diffusers:{name}", config)), targets)


def _check_numbers(name: str, file: str, config: Mapping[str, Any], *keys: str) -> None:
    """Refuses values of `keys` that are there and are no positive numbers."""
    for key in keys:
        value = config.get(key, 1)
        if not (isinstance(value, int | float) and 0 < value < math.inf):
            raise UserError(f"policy.path={name}: its {file} has {key}={json.dumps(value)[:80]}; it should be a number above 0")


def _check_layers(name: str, file: str, config: Mapping[str, Any]) -> None:
    """Refuses a number of layers that would take minutes to build, before any message."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check_layers(name, file, value)
        elif str(key).endswith("layers") and isinstance(value, int) and value > MOST_LAYERS:
            raise UserError(f"policy.path={name}: its {file} has {key}={value}; at most {MOST_LAYERS} are built")


def parts_in(index: Mapping[str, Any]) -> list[str]:
    """The names of a pipeline's parts in its index, each with its library and class."""
    pairs = {name: entry for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2}
    return [name for name, entry in pairs.items() if all(each is None or isinstance(each, str) for each in entry)]


def is_flow(scheduler: Mapping[str, Any]) -> bool:
    """Whether a scheduler with this config integrates a flow's velocity."""
    named = str(scheduler.get("_class_name", "")).startswith("FlowMatch")
    return named or bool(scheduler.get("use_flow_sigmas")) or scheduler.get("prediction_type") == "flow_prediction"


def caution(name: str, folder: str) -> str | None:
    """What to say of a model that is distilled to few steps."""
    if not _read(folder, "model_index.json").get("is_distilled", FEW_STEPS.search(name) is not None):
        return None
    return (
        f"policy.path={name}: is distilled to few steps. Users of other trainers report that RL blurs such models; "
        "tune the base model (docs/models.md)"
    )


def _read(folder: str, file: str) -> dict[str, Any]:
    """A JSON file of a pipeline's folder, or of the hub's local cache; empty if it is not there."""
    path = Path(folder) / file if Path(folder).is_dir() else hub.cached(folder, file)
    try:
        return dict(parse_json(read_text(path))) if path is not None and path.is_file() else {}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"policy.path={folder}: its {file} cannot be read: {error}") from None
