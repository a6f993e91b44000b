"""Modules without weights, on torch's meta device."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from g2rpo.core.errors import UserError, loading, placed
from g2rpo.core.plain import refuse_hub_kernels
from g2rpo.models.published import Part

MODEL_LIBRARIES = ("diffusers", "transformers")


MOST_MODULES = 20_000
"""Ten times as many as the largest model of the catalogue has, and built in seconds."""


@contextmanager
def few_modules() -> Iterator[None]:
    """While entered, ValueError for a model of more than `MOST_MODULES`: a config could ask for any
    number of layers."""
    built = 0

    def count(module: nn.Module, name: str, child: nn.Module | None) -> None:
        nonlocal built
        built += 1
        if built > MOST_MODULES:
            raise ValueError(f"the config of a part describes more than {MOST_MODULES} modules")

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def on_meta(part: Part) -> nn.Module:
    """The module of a part, on the meta device."""
    target, config = part
    library, _, name = target.partition(":")
    # importing a library named by a downloaded file would run its code
    if library not in MODEL_LIBRARIES:
        raise UserError(
            f"policy.path: its model_index.json names a part of '{library}'; only {' and '.join(MODEL_LIBRARIES)} are loaded"
        )
    kind: Any = getattr(importlib.import_module(library), name, None)
    if nn.Module not in getattr(kind, "__mro__", ()):
        raise UserError(
            f"policy.path: its model_index.json names {name}, which is no model of the {library} installed here"
        )
    with placed("policy.path: "):
        refuse_hub_kernels(config, f"the config.json of its {name}")
    with (
        loading(f"policy.path: its config files describe no {name}"),
        torch.device("meta"),
        few_modules(),
    ):
        return (
            kind.from_config(config)
            if library == "diffusers"
            else kind(kind.config_class.from_dict(config))
        )
