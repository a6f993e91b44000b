"""Other programs' names of modules and tensors: ComfyUI's (github.com/comfyanonymous/ComfyUI,
comfy/lora.py, comfy/utils.py), and those of the original weights, which kohya's trainers and
ai-toolkit use.

For some models its LoRA loader accepts diffusers' names after "transformer."; for others only those
of the original weights after "diffusion_model.". `tools/check_comfyui.py` compares them with a
checkout of ComfyUI.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

SAME = r"\g<0>"
_JOINT = r"attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
_FF = r"net\.(0\.proj|2)"


@dataclass(frozen=True)
class ComfyUI:
    """ComfyUI's names of a transformer. For a LoRA: `prefix` and the first pattern that matches the
    module's whole name, with its replacement. For a whole transformer: replacements in tensor
    names, applied in order (None: it loads none).
    """

    transformer: str
    """The class in diffusers."""
    prefix: str
    names: Mapping[str, str]
    whole: Mapping[str, str] | None = None
    original: Mapping[str, str] | None = None
    """Patterns of modules with their names in the original weights; None where diffusers reads no
    LoRA with these. Of blocks alone, as the trainers have them by default:
    `tools/check_trainers.py` compares with their own code."""
    read: Mapping[str, str] = field(default_factory=dict)
    """More of these, of files that are read: not written."""

    def key(self, module: str) -> str | None:
        """The key of a module; None if there is none."""
        name = replaced_name(self.names, module)
        return name and self.prefix + name


def replaced_name(names: Mapping[str, str], module: str) -> str | None:
    """The replacement by the first pattern that matches a module's whole name."""
    found = ((re.fullmatch(pattern, module), name) for pattern, name in names.items())
    return next((match.expand(name) for match, name in found if match), None)


JOINT_PARTS = ("q", "k", "v", "mlp")
"""The projections in a joint matrix, in their order; "mlp" is in FLUX.1's alone."""


def part_in_joint(module: str) -> str | None:
    """Which of `JOINT_PARTS` a projection is; None for one that no joint matrix holds."""
    found = re.search(r"(?:to|add)_([qkv])(?:_proj)?$|proj_(mlp)$", module)
    return None if found is None else found[1] or found[2]


def order_in_joint(module: str) -> int:
    """Sorts projections as they stand in a joint matrix, and others after them."""
    part = part_in_joint(module)
    return len(JOINT_PARTS) if part is None else JOINT_PARTS.index(part)


def _same(*patterns: str) -> dict[str, str]:
    """Names as diffusers has them."""
    return dict.fromkeys(patterns, SAME)


DIFFUSERS = "transformer."
"""Before those, for ComfyUI."""
_BLOCK, _SINGLE = r"transformer_blocks\.(\d+)\.", r"single_transformer_blocks\.(\d+)\."


def _double_blocks(feed: Mapping[str, str]) -> dict[str, str]:
    """The original names of FLUX's blocks of two streams; `feed` has the patterns of a feed-forward
    network's two layers."""
    names: dict[str, str] = {}
    for stream, joint, out, ff in (
        ("img", r"to_[qkv]", r"to_out\.0", "ff"),
        ("txt", r"add_[qkv]_proj", "to_add_out", "ff_context"),
    ):
        names |= {rf"{_BLOCK}attn\.{joint}": rf"double_blocks.\1.{stream}_attn.qkv"}
        names |= {rf"{_BLOCK}attn\.{out}": rf"double_blocks.\1.{stream}_attn.proj"}
        names |= {
            rf"{_BLOCK}{ff}\.{layer}": rf"double_blocks.\1.{stream}_mlp.{number}"
            for layer, number in feed.items()
        }
    return names


_FLUX1 = {
    **_double_blocks({r"net\.0\.proj": "0", r"net\.2": "2"}),
    rf"{_BLOCK}norm1\.linear": r"double_blocks.\1.img_mod.lin",
    rf"{_BLOCK}norm1_context\.linear": r"double_blocks.\1.txt_mod.lin",
    rf"{_SINGLE}(attn\.to_[qkv]|proj_mlp)": r"single_blocks.\1.linear1",
    rf"{_SINGLE}proj_out": r"single_blocks.\1.linear2",
    rf"{_SINGLE}norm\.linear": r"single_blocks.\1.modulation.lin",
}
_FLUX1_ENDS = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    r"time_text_embed\.timestep_embedder\.linear_1": "time_in.in_layer",
    r"time_text_embed\.timestep_embedder\.linear_2": "time_in.out_layer",
    r"time_text_embed\.text_embedder\.linear_1": "vector_in.in_layer",
    r"time_text_embed\.text_embedder\.linear_2": "vector_in.out_layer",
    r"time_text_embed\.guidance_embedder\.linear_1": "guidance_in.in_layer",
    r"time_text_embed\.guidance_embedder\.linear_2": "guidance_in.out_layer",
    "proj_out": "final_layer.linear",
    r"norm_out\.linear": "final_layer.adaLN_modulation.1",
}
_FLUX2 = {
    **_double_blocks({"linear_in": "0", "linear_out": "2"}),
    rf"{_SINGLE}attn\.to_qkv_mlp_proj": r"single_blocks.\1.linear1",
    rf"{_SINGLE}attn\.to_out": r"single_blocks.\1.linear2",
}


_FLUX_BLOCKS = (
    rf"transformer_blocks\.\d+\.({_JOINT}|ff(_context)?\.{_FF})",
    r"single_transformer_blocks\.\d+\.(attn\.to_[qkv]|proj_mlp|proj_out)",
    r"x_embedder|context_embedder|proj_out",
)
FLUX = ComfyUI(
    "FluxTransformer2DModel",
    DIFFUSERS,
    _same(
        *_FLUX_BLOCKS,
        r"transformer_blocks\.\d+\.norm1(_context)?\.linear|single_transformer_blocks\.\d+\.norm\.linear",
        r"norm_out\.linear|time_text_embed\.(timestep|text|guidance)_embedder\.linear_[12]",
    ),
    whole={},
    original=_FLUX1,
    read=_FLUX1_ENDS,
)
CHROMA = ComfyUI("ChromaTransformer2DModel", DIFFUSERS, _same(*_FLUX_BLOCKS), original=_FLUX1)
FLUX2_NAMES = ComfyUI(
    "Flux2Transformer2DModel",
    DIFFUSERS,
    _same(
        rf"transformer_blocks\.\d+\.({_JOINT}|ff(_context)?\.linear_(in|out))",
        r"single_transformer_blocks\.\d+\.attn\.(to_qkv_mlp_proj|to_out)",
        r"x_embedder|context_embedder|proj_out|norm_out\.linear",
    ),
    original=_FLUX2,
)
_SD3 = {
    rf"{_BLOCK}(attn2?)\.to_[qkv]": r"joint_blocks.\1.x_block.\2.qkv",
    rf"{_BLOCK}(attn2?)\.to_out\.0": r"joint_blocks.\1.x_block.\2.proj",
    rf"{_BLOCK}attn\.add_[qkv]_proj": r"joint_blocks.\1.context_block.attn.qkv",
    rf"{_BLOCK}attn\.to_add_out": r"joint_blocks.\1.context_block.attn.proj",
    rf"{_BLOCK}ff\.net\.0\.proj": r"joint_blocks.\1.x_block.mlp.fc1",
    rf"{_BLOCK}ff\.net\.2": r"joint_blocks.\1.x_block.mlp.fc2",
    rf"{_BLOCK}ff_context\.net\.0\.proj": r"joint_blocks.\1.context_block.mlp.fc1",
    rf"{_BLOCK}ff_context\.net\.2": r"joint_blocks.\1.context_block.mlp.fc2",
    rf"{_BLOCK}norm1\.linear": r"joint_blocks.\1.x_block.adaLN_modulation.1",
    rf"{_BLOCK}norm1_context\.linear": r"joint_blocks.\1.context_block.adaLN_modulation.1",
    r"time_text_embed\.timestep_embedder\.linear_1": "t_embedder.mlp.0",
    r"time_text_embed\.timestep_embedder\.linear_2": "t_embedder.mlp.2",
    r"time_text_embed\.text_embedder\.linear_1": "y_embedder.mlp.0",
    r"time_text_embed\.text_embedder\.linear_2": "y_embedder.mlp.2",
    "proj_out": "final_layer.linear",
    r"norm_out\.linear": "final_layer.adaLN_modulation.1",
}
SD3 = ComfyUI(
    "SD3Transformer2DModel",
    DIFFUSERS,
    _same(
        rf"transformer_blocks\.\d+\.({_JOINT}|attn2\.(to_[qkv]|to_out\.0)|ff(_context)?\.{_FF}|norm1(_context)?\.linear)",
        r"context_embedder|proj_out|norm_out\.linear|time_text_embed\.(timestep|text)_embedder\.linear_[12]",
    ),
    whole={},
    read=_SD3,
)
QWEN_IMAGE = ComfyUI(
    "QwenImageTransformer2DModel",
    DIFFUSERS,
    _same(
        rf"transformer_blocks\.\d+\.({_JOINT}|(img|txt)_mlp\.{_FF}|(img|txt)_mod\.1)",
        r"img_in|txt_in|proj_out|norm_out\.linear|time_text_embed\.timestep_embedder\.linear_[12]",
    ),
    whole={},
    original={r"transformer_blocks\..+": SAME},
)
Z_IMAGE = ComfyUI(
    "ZImageTransformer2DModel",
    DIFFUSERS,
    _same(
        r"(layers|noise_refiner|context_refiner)\.\d+\.(attention\.(to_[qkv]|to_out\.0)|feed_forward\.w[123])",
        r"(layers|noise_refiner)\.\d+\.adaLN_modulation\.0",
        r"all_x_embedder\.2-1|all_final_layer\.2-1\.(linear|adaLN_modulation\.1)|cap_embedder\.1|t_embedder\.mlp\.[02]",
    ),
    whole={},
    original={r"(layers|noise_refiner|context_refiner)\..+": SAME},
    read={
        r"((layers|noise_refiner|context_refiner)\.\d+\.attention)\.to_[qkv]": r"\1.qkv",
        r"((layers|noise_refiner|context_refiner)\.\d+\.attention)\.to_out\.0": r"\1.out",
        r"all_(x_embedder|final_layer)\.2-1(.*)": r"\1\2",
    },
)
KREA2 = ComfyUI(
    "Krea2Transformer2DModel",
    DIFFUSERS,
    _same(
        r"(transformer_blocks\.\d+|text_fusion\.(layerwise|refiner)_blocks\.[01])\.(attn\.(to_[qkv]|to_gate|to_out\.0)|ff\.(gate|up|down))",
        r"img_in|time_embed\.linear_[12]|time_mod_proj|txt_in\.linear_[12]|text_fusion\.projector|final_layer\.linear",
    ),
)
LTX = ComfyUI(
    "LTXVideoTransformer3DModel",
    "diffusion_model.",
    {
        rf"transformer_blocks\.\d+\.(attn[12]\.(to_[qkv]|to_out\.0)|ff\.{_FF})": SAME,
        r"caption_projection\.linear_[12]|proj_out": SAME,
        r"proj_in": "patchify_proj",
        r"time_embed(\..+)": r"adaln_single\1",
    },
    {
        r"^proj_in\.": "patchify_proj.",
        r"^time_embed\.": "adaln_single.",
        r"\.norm_([qk])\.": r".\1_norm.",
    },
)
_WAN_BLOCKS = {
    r"(blocks\.\d+)\.attn1\.to_([qkv])": r"\1.self_attn.\2",
    r"(blocks\.\d+)\.attn1\.to_out\.0": r"\1.self_attn.o",
    r"(blocks\.\d+)\.attn2\.to_([qkv])": r"\1.cross_attn.\2",
    r"(blocks\.\d+)\.attn2\.to_out\.0": r"\1.cross_attn.o",
    r"(blocks\.\d+)\.attn2\.add_([kv])_proj": r"\1.cross_attn.\2_img",
    r"(blocks\.\d+)\.ffn\.net\.0\.proj": r"\1.ffn.0",
    r"(blocks\.\d+)\.ffn\.net\.2": r"\1.ffn.2",
}
_WAN = {
    **_WAN_BLOCKS,
    r"condition_embedder\.(text|time)_embedder\.linear_1": r"\1_embedding.0",
    r"condition_embedder\.(text|time)_embedder\.linear_2": r"\1_embedding.2",
    r"condition_embedder\.time_proj": "time_projection.1",
    r"proj_out": "head.head",
}
WAN = ComfyUI(
    "WanTransformer3DModel",
    "diffusion_model.",
    _WAN,
    {
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
    _WAN_BLOCKS,
)
LUMINA2 = ComfyUI(
    "Lumina2Transformer2DModel",
    "diffusion_model.",
    {
        r"((layers|noise_refiner|context_refiner)\.\d+)\.attn\.to_[qkv]": r"\1.attention.qkv",
        r"((layers|noise_refiner|context_refiner)\.\d+)\.attn\.to_out\.0": r"\1.attention.out",
        r"((layers|noise_refiner|context_refiner)\.\d+)\.feed_forward\.linear_([123])": r"\1.feed_forward.w\3",
        r"((layers|noise_refiner)\.\d+)\.norm1\.linear": r"\1.adaLN_modulation.1",
    },
)
KNOWN = {value.transformer: value for value in list(vars().values()) if isinstance(value, ComfyUI)}
"""All of them, by the class of the transformer."""
