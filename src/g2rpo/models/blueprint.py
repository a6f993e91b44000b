"""Models without weights: pipelines and the real policies around them on torch's meta device, where
tensors have no data.

The policies' own constructors are used, so dtypes, frozen weights and adapters are those of a run.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from g2rpo.core.errors import loading, refuse
from g2rpo.models import catalogue, hub
from g2rpo.models.adapter_files import read_adapter
from g2rpo.models.adapters import Adapter, check_fit
from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.models.load import Pipeline, check_pipeline, find_pipeline, policy_class
from g2rpo.models.meta import on_meta
from g2rpo.models.modular import pipeline_class
from g2rpo.models.options import PolicyConfig
from g2rpo.models.pipeline_files import (
    LARGEST_NUMBER,
    MODELS,
    options_in,
    parts_in,
    read_file,
    read_index,
)
from g2rpo.models.pipelines import Shapes, keep_two_blocks
from g2rpo.models.published import Part
from g2rpo.models.tuning import tuned


@dataclass(frozen=True)
class Blueprint:
    """A pipeline's class and its models by name; `clip_tokens` is the length to which the CLIP
    tokenizers pad, `text_tokens` that of the prompts, where it is known and they are not padded."""

    kind: str
    parts: Mapping[str, Part]
    clip_tokens: int = 77
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values of its index that are no parts, such as is_distilled."""
    text_tokens: int | None = None
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    """The config of its scheduler, if it is known."""


def read_blueprint(config: PolicyConfig) -> Blueprint:
    """The blueprint of `config.path`: a known hub id's published one, or that of its files."""
    if (known := published(config.path, config.kind)) is None:
        # an adapter that was continued need not be there any more
        return blueprint_of(find_pipeline(config.model_copy(update={"adapter": None})))
    check_pipeline(config.path, known.kind, config.pipeline, config.kind)
    return known


def blueprint_of(found: Pipeline) -> Blueprint:
    """The blueprint in the config.json files of a folder or hub repository; a known hub id's
    published one."""
    if (known := published(found.name, found.options.kind)) is not None:
        return known
    path, kind = found.path, found.kind
    if found.default_policy:
        refuse(found.faults_of_files())
    index = read_index(path, download=True)
    models = {name: entry for name, entry in parts_in(index).items() if name.startswith(MODELS)}
    parts = {
        name: (f"{library}:{kind}", read_file(path, f"{name}/config.json", download=True))
        for name, (library, kind) in models.items()
        if library is not None
    }
    words, scheduler = (
        read_file(path, f"{part}/{part}_config.json", download=True) if part in index else {}
        for part in ("tokenizer", "scheduler")
    )
    clip_tokens = min(words.get("model_max_length", 77), LARGEST_NUMBER)  # some say 10^30
    return Blueprint(kind, parts, clip_tokens, options_in(index), scheduler=scheduler)


def published(path: str, kind: str | None = None) -> Blueprint | None:
    """The blueprint of published weights by their hub id, where the spec of their pipeline has
    their parts."""
    spec, model = catalogue.model_of(path, kind) or (None, None)
    if spec is None or model is None or model.parts is None:
        return None
    return Blueprint(spec.pipeline_class, model.parts, options=model.options)


def build_shallow(blueprint: Blueprint, config: PolicyConfig) -> tuple[DiffusersPolicy, list[int]]:
    """`built_on_meta` without text encoders and with two blocks of every kind, and how many blocks
    each of these represents."""
    modules = {
        name: on_meta(part)
        for name, part in blueprint.parts.items()
        if name.startswith(("transformer", "vae"))
    }
    ends = tuple(f".{target}" for target in config.lora_targets or ())

    def changed(module: str) -> bool:
        return f".{module}".endswith(ends)

    times = keep_two_blocks(modules["transformer"], changed)
    return built_on_meta(blueprint, config, modules), times


class _Anything:
    """A stand-in for a part that a constructor reads numbers of texts from, which plans do not
    need."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    __getitem__ = __call__

    def __len__(self) -> int:
        return 0


def built_on_meta(
    blueprint: Blueprint, config: PolicyConfig, modules: Mapping[str, nn.Module]
) -> DiffusersPolicy:
    """The policy that a run of `config` would build of `modules` without weights. UserError for a
    size or option that it refuses."""
    import diffusers

    made = pipeline_class(blueprint.kind)
    parameters = inspect.signature(made).parameters.values()
    absent: dict[str, Any] = {
        each.name: None for each in parameters if each.default is inspect.Parameter.empty
    }  # tokenizers, and the like
    stand_ins = {"guider": diffusers.ClassifierFreeGuidance, "processor": _Anything}
    absent |= {name: stand_ins[name]() for name in stand_ins.keys() & absent.keys()}
    with loading(f"policy.path={config.path}: its parts make no {blueprint.kind}"):
        if "scheduler" in absent or blueprint.scheduler:  # a modular pipeline may have its own
            config_of = {"_class_name": "FlowMatchEulerDiscreteScheduler", **blueprint.scheduler}
            kind_of = getattr(diffusers, config_of["_class_name"])
            absent["scheduler"] = kind_of.from_config(config_of)
        pipeline = made(**{**absent, **blueprint.options, **modules})
    # no kernel runs here, but "math" has the scores as a tensor
    kind = "math" if config.attention == "math" else "auto"
    config = config.model_copy(update={"attention": kind, "compile": False})
    policy = policy_class(config, blueprint.kind)
    with loading(f"policy.path={config.path}"):
        return policy(pipeline, hub.located(config), device="meta")


def shapes_of(policy: DiffusersPolicy, blueprint: Blueprint) -> Shapes:
    """The shapes of a policy's calls."""
    return policy.shapes(blueprint.clip_tokens, blueprint.text_tokens)


def transformer_of(options: PolicyConfig) -> nn.Module:
    """The transformer of a config, without weights."""
    return on_meta(read_blueprint(options).parts["transformer"])


def adapter_of(options: PolicyConfig) -> Adapter | None:
    """The adapter of a config, which fits its model; None if it has none."""
    if options.adapter is None:
        return None
    import diffusers

    file, blueprint = hub.find_adapter(options.adapter), read_blueprint(options)
    transformer = on_meta(blueprint.parts["transformer"])
    pipeline = getattr(diffusers, blueprint.kind, None)
    names = catalogue.names_of(options.kind)
    adapter = read_adapter(file, pipeline, transformer, names)
    check_fit(f"policy.adapter={options.adapter}", adapter, transformer)
    return adapter


def size_of(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers, shared ones once."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def trained_on_meta(
    blueprint: Blueprint, config: PolicyConfig
) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """The transformer of a run of `config`, and its trained parameters by name, in order."""
    targets = policy_class(config, blueprint.kind).spec.lora_targets
    transformer = on_meta(blueprint.parts["transformer"])
    plain = config.model_copy(update={"adapter": None, "quantize": "none"})
    return transformer, tuned(
        transformer, plain, config.tuning, targets=targets, device=torch.device("meta")
    ).named()
