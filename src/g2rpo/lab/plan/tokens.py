"""How many tokens a run's own prompts have, where a model does not pad them to one length."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.config.schema import PolicyConfig
from g2rpo.core.errors import UserError
from g2rpo.core.files import is_hub_id, local
from g2rpo.models import hub, load
from g2rpo.models.blueprint import build_shallow, read_blueprint
from g2rpo.models.spec import PipelineSpec
from g2rpo.models.text import Answer, TextEncoders

LONGEST_PROMPTS = 32
"""Prompts whose tokens are counted: those with the most characters."""


def longest_prompt(config: PolicyConfig, prompts: Sequence[str]) -> int | None:
    """The tokens of the longest prompt, as the pipeline's own call encodes it with the tokenizer on
    this machine. None where the model pads (or reads input pictures, whose tokens are assumed), is
    not on this machine, or needs more than zeros in the place of its text encoder; UserError if the
    pipeline or its tokenizer fails."""
    path, index = local(config.path), None
    if os.path.isdir(path):
        index = path / "model_index.json"
    elif is_hub_id(config.path):
        index = hub.cached(config.path, "model_index.json")
    if index is None or not prompts:
        return None
    _, kind = load.locate_pipeline(config.path, config.pipeline, config.kind)
    spec = load.policy_class(config, kind).spec
    if (
        spec.pictured
        or not (spec.masks or spec.lists or spec.ragged)
        or not (index.parent / "tokenizer").is_dir()
    ):
        return None
    try:
        return _counted(
            config, spec, index.parent, sorted(set(prompts), key=len)[-LONGEST_PROMPTS:]
        )
    except Exception as error:  # of tokenizers and pipelines, which are the library's or the user's
        raise UserError(
            f"{config.path}: the tokens of the prompts cannot be counted ({error})"
        ) from error


def _counted(config: PolicyConfig, spec: PipelineSpec, folder: Path, prompts: Sequence[str]) -> int:
    from transformers import AutoTokenizer

    policy, _ = build_shallow(read_blueprint(config), config)
    parts = {
        place.name: AutoTokenizer.from_pretrained(str(place))
        for place in folder.glob("tokenizer*")
        if place.is_dir()
    }
    parts |= {place.name: _Zeros() for place in folder.glob("text_encoder*") if place.is_dir()}
    policy.pipeline.register_modules(**parts)
    encoders = TextEncoders(policy.pipeline, spec, config, "cpu")
    rows = [encoders.encode([prompt], guided=False).ragged for prompt in prompts]
    return max(
        len(values[0]) for row in rows for name, values in row.items() if name in spec.widths
    )


class _Zeros(nn.Module):
    """In the place of a text encoder: a zero for every token."""

    dtype, device = torch.float32, torch.device("cpu")

    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        return Answer(torch.zeros(*input_ids.shape, 1))
