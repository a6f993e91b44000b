"""Names of modules that ComfyUI's LoRA loader has keys for (github.com/comfyanonymous/ComfyUI, comfy/lora.py, comfy/utils.py).

For some models it knows diffusers' own names after "transformer."; for others only those of the original weights after
"diffusion_model.". `tools/check_comfyui.py` compares these tables with a checkout of ComfyUI.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from g2rpo.errors import UserError
from g2rpo.export.adapter import CONFIG, Adapter

Entry = TypeVar("Entry")
SAME = r"\g<0>"
_JOINT = r"attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
_FF = r"net\.(0\.proj|2)"


@dataclass(frozen=True)
class Keys:
    """ComfyUI's keys for a transformer: `prefix`, then what a pattern that matches a module's whole name makes of it."""

    prefix: str
    names: Mapping[str, str]

    def of(self, module: str) -> str | None:
        """The key of a module; None if there is none."""
        for pattern, name in self.names.items():
            if found := re.fullmatch(pattern, module):
                return self.prefix + found.expand(name)
        return None


def _same(*patterns: str) -> Keys:
    return Keys("transformer.", dict.fromkeys(patterns, SAME))


_FLUX_BLOCKS = (
    rf"transformer_blocks\.\d+\.({_JOINT}|ff(_context)?\.{_FF})",
    r"single_transformer_blocks\.\d+\.(attn\.to_[qkv]|proj_mlp|proj_out)",
    r"x_embedder|context_embedder|proj_out",
)

KEYS = {
    "FluxTransformer2DModel": _same(
        *_FLUX_BLOCKS,
        r"transformer_blocks\.\d+\.norm1(_context)?\.linear|single_transformer_blocks\.\d+\.norm\.linear",
        r"norm_out\.linear|time_text_embed\.(timestep|text|guidance)_embedder\.linear_[12]",
    ),
    "ChromaTransformer2DModel": _same(*_FLUX_BLOCKS),
    "Flux2Transformer2DModel": _same(
        rf"transformer_blocks\.\d+\.({_JOINT}|ff(_context)?\.linear_(in|out))",
        r"single_transformer_blocks\.\d+\.attn\.(to_qkv_mlp_proj|to_out)",
        r"x_embedder|context_embedder|proj_out|norm_out\.linear",
    ),
    "SD3Transformer2DModel": _same(
        rf"transformer_blocks\.\d+\.({_JOINT}|attn2\.(to_[qkv]|to_out\.0)|ff(_context)?\.{_FF}|norm1(_context)?\.linear)",
        r"context_embedder|proj_out|norm_out\.linear|time_text_embed\.(timestep|text)_embedder\.linear_[12]",
    ),
    "QwenImageTransformer2DModel": _same(
        rf"transformer_blocks\.\d+\.({_JOINT}|(img|txt)_mlp\.{_FF}|(img|txt)_mod\.1)",
        r"img_in|txt_in|proj_out|norm_out\.linear|time_text_embed\.timestep_embedder\.linear_[12]",
    ),
    "ZImageTransformer2DModel": _same(
        r"(layers|noise_refiner|context_refiner)\.\d+\.(attention\.(to_[qkv]|to_out\.0)|feed_forward\.w[123])",
        r"(layers|noise_refiner)\.\d+\.adaLN_modulation\.0",
        r"all_x_embedder\.2-1|all_final_layer\.2-1\.(linear|adaLN_modulation\.1)|cap_embedder\.1|t_embedder\.mlp\.[02]",
    ),
    "Krea2Transformer2DModel": _same(
        r"(transformer_blocks\.\d+|text_fusion\.(layerwise|refiner)_blocks\.[01])\.(attn\.(to_[qkv]|to_gate|to_out\.0)|ff\.(gate|up|down))",
        r"img_in|time_embed\.linear_[12]|time_mod_proj|txt_in\.linear_[12]|text_fusion\.projector|final_layer\.linear",
    ),
    "LTXVideoTransformer3DModel": Keys(
        "diffusion_model.",
        {
            rf"transformer_blocks\.\d+\.(attn[12]\.(to_[qkv]|to_out\.0)|ff\.{_FF})": SAME,
            r"caption_projection\.linear_[12]|proj_out": SAME,
            r"proj_in": "patchify_proj",
            r"time_embed(\..+)": r"adaln_single\1",
        },
    ),
    "WanTransformer3DModel": Keys(
        "diffusion_model.",
        {
            r"(blocks\.\d+)\.attn1\.to_([qkv])": r"\1.self_attn.\2",
            r"(blocks\.\d+)\.attn1\.to_out\.0": r"\1.self_attn.o",
            r"(blocks\.\d+)\.attn2\.to_([qkv])": r"\1.cross_attn.\2",
            r"(blocks\.\d+)\.attn2\.to_out\.0": r"\1.cross_attn.o",
            r"(blocks\.\d+)\.attn2\.add_([kv])_proj": r"\1.cross_attn.\2_img",
            r"(blocks\.\d+)\.ffn\.net\.0\.proj": r"\1.ffn.0",
            r"(blocks\.\d+)\.ffn\.net\.2": r"\1.ffn.2",
            r"condition_embedder\.(text|time)_embedder\.linear_1": r"\1_embedding.0",
            r"condition_embedder\.(text|time)_embedder\.linear_2": r"\1_embedding.2",
            r"condition_embedder\.time_proj": "time_projection.1",
            r"proj_out": "head.head",
        },
    ),
    "Lumina2Transformer2DModel": Keys(
        "diffusion_model.",
        {
            r"((layers|noise_refiner|context_refiner)\.\d+)\.attn\.to_[qkv]": r"\1.attention.qkv",
            r"((layers|noise_refiner|context_refiner)\.\d+)\.attn\.to_out\.0": r"\1.attention.out",
            r"((layers|noise_refiner|context_refiner)\.\d+)\.feed_forward\.linear_([123])": r"\1.feed_forward.w\3",
            r"((layers|noise_refiner)\.\d+)\.norm1\.linear": r"\1.adaLN_modulation.1",
        },
    ),
}
"""By the class of the transformer in diffusers."""

WHOLE: Mapping[str, Mapping[str, str]] = {
    **{f"{name}Transformer2DModel": {} for name in ("Flux", "SD3", "ZImage", "QwenImage")},
    "LTXVideoTransformer3DModel": {
        r"^proj_in\.": "patchify_proj.",
        r"^time_embed\.": "adaln_single.",
        r"\.norm_([qk])\.": r".\1_norm.",
    },
    "WanTransformer3DModel": {
        r"\.attn1\.": ".self_attn.",
        r"\.attn2\.": ".cross_attn.",
        r"_attn\.to_([qkv])\.": r"_attn.\1.",
        r"_attn\.to_out\.0\.": "_attn.o.",
        r"_attn\.add_([kv])_proj\.": r"_attn.\1_img.",
        r"_attn\.norm_added_k\.": "_attn.norm_k_img.",
        r"\.ffn\.net\.0\.proj\.": ".ffn.0.",
        r"\.ffn\.net\.2\.": ".ffn.2.",
        r"\.norm2\.": ".norm3.",
        r"^blocks\.(\d+)\.scale_shift_table$": r"blocks.\1.modulation",
        r"^scale_shift_table$": "head.modulation",
        r"^proj_out\.": "head.head.",
        r"^condition_embedder\.(text|time)_embedder\.linear_1\.": r"\1_embedding.0.",
        r"^condition_embedder\.(text|time)_embedder\.linear_2\.": r"\1_embedding.2.",
        r"^condition_embedder\.time_proj\.": "time_projection.1.",
    },
}
"""Changes of tensors' names, one after the other, after which ComfyUI loads a whole transformer; it reads some as they are."""

NO_MODEL = ("SanaTransformer2DModel", "CogView4Transformer2DModel")
"""Classes that ComfyUI itself has no model for."""


def whole_names(transformer: str) -> Callable[[str], str]:
    """What ComfyUI calls the tensors of a whole transformer of this class; UserError if it cannot load one."""
    changes = _known(WHOLE, transformer, "no conversion of a whole model is known")

    def renamed(name: str) -> str:
        for pattern, other in changes.items():
            name = re.sub(pattern, other, name)
        return name

    return renamed


def _known(table: Mapping[str, Entry], transformer: str, otherwise: str) -> Entry:
    if transformer in table:
        return table[transformer]
    reason = "ComfyUI has no such model" if transformer in NO_MODEL else otherwise
    raise UserError(f"--format comfyui: {transformer}: {reason}; --format diffusers and merged are for any model")


def for_comfyui(adapter: Adapter, transformer: str) -> Adapter:
    """The adapter with ComfyUI's keys as modules' names. Projections that the original weights keep in one matrix become one
    LoRA: the downs below one another, the ups in the blocks of a diagonal, so that up @ down stacks their changes."""
    keys, grouped = _known(KEYS, transformer, "no map of its LoRA keys is known"), dict[str, list[str]]()
    for module in sorted(adapter.layers, key=lambda name: (name.rpartition(".")[0], "qkv".find(name[-1]), name)):
        grouped.setdefault(_key(keys, module, transformer), []).append(module)
    for key, modules in grouped.items():
        if key.endswith(".qkv") and len(modules) != 3:
            raise UserError(f"--format comfyui: {key} is one matrix in ComfyUI; train to_q, to_k and to_v, not {modules} alone")
    layers = {}
    for key, modules in grouped.items():
        downs, ups = zip(*(adapter.layers[module] for module in modules), strict=True)
        layers[key] = (downs[0], ups[0]) if len(modules) == 1 else (torch.cat(downs), torch.block_diag(*ups))
    return Adapter(layers, {key: text for key, text in adapter.metadata.items() if key != CONFIG})  # its names are diffusers'


def _key(keys: Keys, module: str, transformer: str) -> str:
    if (key := keys.of(module)) is not None:
        return key
    raise UserError(
        f"--format comfyui: ComfyUI's loader has no key for {module} of {transformer} and would leave it out; "
        "use --format diffusers or merged, or train without it (policy.lora_targets)"
    )
