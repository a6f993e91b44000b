"""Models without weights: pipelines and the real policies around them on torch's meta device, where tensors have no data.

The policies' own constructors are used, so dtypes, frozen weights and adapters are those of a run.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from g2rpo.build import components, pipeline_check
from g2rpo.config.schema import PolicyConfig
from g2rpo.cost import published
from g2rpo.errors import UserError, loading
from g2rpo.plain import parse_json, read_text, refuse_hub_kernels
from g2rpo.policies.pipelines import PipelinePolicy, Shapes, thin

LIBRARIES = ("diffusers", "transformers")
Part = tuple[str, dict[str, Any]]
"""A class, as "library:Name", and its config."""


@dataclass(frozen=True)
class Blueprint:
    """A pipeline's class and its models by name; `clip_tokens` is the length to which the CLIP tokenizers pad."""

    kind: str
    parts: Mapping[str, Part]
    clip_tokens: int = 77
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values of its index that are no parts, such as is_distilled."""


def read_blueprint(config: PolicyConfig) -> Blueprint:
    """The blueprint of `config.path`: a known hub id's published one, or the one in the config.json files of a folder or hub
    repository."""
    if config.path in PUBLISHED:
        known = PUBLISHED[config.path]
        components.check_pipeline(config.path, known.kind, config.pipeline, config.kind)
        return known
    path, kind = components.locate_pipeline(config.path, config.pipeline, config.kind)
    if config.kind is None:
        pipeline_check.check_files(config.path, path)
    index = _read(path, "model_index.json")
    models = {
        name: index[name] for name in pipeline_check.parts_in(index) if name.startswith(("transformer", "vae", "text_encoder"))
    }
    parts = {
        name: (f"{library}:{kind}", _read(path, f"{name}/config.json"))
        for name, (library, kind) in models.items()
        if library is not None
    }
    options = {name: value for name, value in index.items() if name[0] != "_" and name not in pipeline_check.parts_in(index)}
    return Blueprint(kind, parts, _read(path, "tokenizer/tokenizer_config.json").get("model_max_length", 77), options)


def _read(pipeline: str, file: str) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download

    folder = Path(pipeline)
    try:
        local = folder / file if folder.is_dir() else Path(hf_hub_download(pipeline, file))
        return dict(parse_json(read_text(local)))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"policy.path={pipeline}: its {file} cannot be read: {error}") from None


class Uninitialised(TorchFunctionMode):
    """While entered, torch's initialisers do nothing: on the meta device they take time and have no effect."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(func, "__module__", None) == nn.init.__name__ or func in RANDOM:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


RANDOM = (torch.Tensor.normal_, torch.Tensor.uniform_)


def on_meta(part: Part) -> nn.Module:
    """The module of a part, on the meta device."""
    target, config = part
    library, _, name = target.partition(":")
    if library not in LIBRARIES:  # importing a library named by a downloaded file would run its code
        raise UserError(
            f"policy.path: its model_index.json names a part of '{library}'; only {' and '.join(LIBRARIES)} are loaded"
        )
    kind: Any = getattr(importlib.import_module(library), name, None)
    if nn.Module not in getattr(kind, "__mro__", ()):
        raise UserError(f"policy.path: its model_index.json names {name}, which is no model of the {library} installed here")
    try:
        refuse_hub_kernels(config, f"the config.json of its {name}")
    except ValueError as error:
        raise UserError(f"policy.path: {error}") from None
    with loading(f"policy.path: its config files describe no {name}"), torch.device("meta"), Uninitialised():
        return kind.from_config(config) if library == "diffusers" else kind(kind.config_class.from_dict(config))


def build_on_meta(blueprint: Blueprint, config: PolicyConfig) -> PipelinePolicy:
    """The policy that a run of `config` would build, on the meta device. UserError for a size or option it refuses."""
    return _built(blueprint, config, {name: on_meta(part) for name, part in blueprint.parts.items()})


def build_shallow(blueprint: Blueprint, config: PolicyConfig, whole: bool = False) -> tuple[PipelinePolicy, list[int]]:
    """The same without text encoders and with two blocks of every kind (`whole`: all), and how many blocks each of these stands
    for."""
    modules = {name: on_meta(part) for name, part in blueprint.parts.items() if name in ("transformer", "vae")}
    times = [] if whole else thin(modules["transformer"])
    return _built(blueprint, config, modules), times


def _built(blueprint: Blueprint, config: PolicyConfig, modules: Mapping[str, nn.Module]) -> PipelinePolicy:
    import diffusers

    pipeline_class = getattr(diffusers, blueprint.kind)
    parameters = inspect.signature(pipeline_class).parameters.values()
    absent = {each.name: None for each in parameters if each.default is inspect.Parameter.empty}  # tokenizers, and the like
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    with loading(f"policy.path={config.path}: its parts make no {blueprint.kind}"):
        pipeline = pipeline_class(**{**absent, **blueprint.options, **modules, "scheduler": scheduler})
    config = config.model_copy(update={"attention": "auto", "compile": False})  # no kernel runs here
    policy, options = components.policy_options(config, blueprint.kind, device="meta")
    with loading(f"policy.path={config.path}"), Uninitialised():
        return policy(pipeline, **options)


def shapes_of(policy: PipelinePolicy, blueprint: Blueprint) -> Shapes:
    """The shapes of a policy's calls."""
    return policy.shapes(blueprint.clip_tokens)


def size_of(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers, shared ones once."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


_CLIP_L = {
    "vocab_size": 49408, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "max_position_embeddings": 77, "projection_dim": 768, "hidden_act": "quick_gelu",
}  # fmt: skip
_CLIP_G = {
    **_CLIP_L, "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
    "projection_dim": 1280, "hidden_act": "gelu",
}  # fmt: skip
_T5_XXL = {
    "vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip
_VAE = {
    "sample_size": 1024, "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16,
    "norm_num_groups": 32, "use_quant_conv": False, "use_post_quant_conv": False, "scaling_factor": 0.3611,
    "shift_factor": 0.1159, "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
}  # fmt: skip
_FLUX = {
    "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128, "num_attention_heads": 24,
    "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True, "axes_dims_rope": (16, 56, 56),
}  # fmt: skip
_SD3 = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "out_channels": 16, "attention_head_dim": 64,
    "joint_attention_dim": 4096, "pooled_projection_dim": 2048, "qk_norm": "rms_norm",
}  # fmt: skip
_SD35_MEDIUM = {
    **_SD3, "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)),
}  # fmt: skip
_SD35_LARGE = {
    **_SD3, "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192,
}  # fmt: skip


def _flux(**changes: Any) -> Blueprint:
    return Blueprint(
        "FluxPipeline",
        {
            "transformer": ("diffusers:FluxTransformer2DModel", {**_FLUX, **changes}),
            "text_encoder": ("transformers:CLIPTextModel", _CLIP_L),
            "text_encoder_2": ("transformers:T5EncoderModel", _T5_XXL),
            "vae": ("diffusers:AutoencoderKL", _VAE),
        },
    )


def _sd3(transformer: dict[str, Any]) -> Blueprint:
    return Blueprint(
        "StableDiffusion3Pipeline",
        {
            "transformer": ("diffusers:SD3Transformer2DModel", transformer),
            "text_encoder": ("transformers:CLIPTextModelWithProjection", _CLIP_L),
            "text_encoder_2": ("transformers:CLIPTextModelWithProjection", _CLIP_G),
            "text_encoder_3": ("transformers:T5EncoderModel", _T5_XXL),
            "vae": ("diffusers:AutoencoderKL", {**_VAE, "scaling_factor": 1.5305, "shift_factor": 0.0609}),
        },
    )


def _open(kind: str, parts: published.Parts, options: dict[str, Any]) -> Blueprint:
    return Blueprint(kind, {"vae": ("diffusers:AutoencoderKL", _VAE), **parts}, options=options)


PUBLISHED = {
    "black-forest-labs/FLUX.1-Kontext-dev": replace(_flux(), kind="FluxKontextPipeline"),
    **{name: _open(*entry) for name, entry in published.PUBLISHED.items()},
    "black-forest-labs/FLUX.1-dev": _flux(),
    "black-forest-labs/FLUX.1-schnell": _flux(guidance_embeds=False),
    "stabilityai/stable-diffusion-3.5-medium": _sd3(_SD35_MEDIUM),
    "stabilityai/stable-diffusion-3.5-large": _sd3(_SD35_LARGE),
}
"""The size-relevant parts of the published configs of gated models, so that planning needs no download."""
