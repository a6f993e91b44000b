"""Compares `g2rpo export --format comfyui` with ComfyUI's own LoRA loader and diffusers' own
converters.

    python tools/check_comfyui.py COMFYUI

COMFYUI is a checkout of github.com/comfyanonymous/ComfyUI; its requirements must be installed. No
weights are needed: tensors have the rows of the real models, and two columns. For every class of
`g2rpo.models.comfyui` that a model of the catalogue has

1. ComfyUI's model names the original tensors, and diffusers' single-file converter makes diffusers'
   ones of them;
2. a random LoRA on every module that has a key is exported, ComfyUI's loader reads it and changes
   the original tensors;
3. diffusers' converter makes diffusers' tensors of those, and they must be W + up @ down of our own
   merging;
4. where a whole transformer can be exported, ComfyUI makes the original tensors of it again.

It prints the modules that ComfyUI has no key for. Exit code 1 if anything differs.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.loaders import single_file_utils as converters
from torch import Tensor

from g2rpo.lab.export import names_for, tensors_for, whole_names
from g2rpo.lab.tuned_weights import TunedWeights
from g2rpo.models.adapters import Adapter
from g2rpo.models.catalogue import SPECS

COLUMNS, RANK = 2, 3


@dataclass(frozen=True)
class Case:
    """ComfyUI's network and its config, the class of the model around it, and what makes diffusers'
    tensors of its own."""

    network: str
    config: dict[str, Any]
    model: str
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]


_FLUX = {
    "in_channels": 16, "out_channels": 16, "vec_in_dim": 8, "context_in_dim": 16, "hidden_size": 3072, "mlp_ratio": 4.0,
    "num_heads": 24, "depth": 2, "depth_single_blocks": 2, "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2,
    "qkv_bias": True, "guidance_embed": True, "txt_ids_dims": [],
}  # fmt: skip
_FLUX2 = {
    **_FLUX, "hidden_size": 256, "num_heads": 2, "axes_dim": [32, 32, 32, 32], "vec_in_dim": None, "qkv_bias": False,
    "ops_bias": False, "global_modulation": True, "mlp_silu_act": True, "mlp_ratio": 3.0, "patch_size": 1,
}  # fmt: skip
_CHROMA = {key: value for key, value in _FLUX.items() if key != "guidance_embed"} | {
    "in_dim": 64, "out_dim": 3072, "hidden_dim": 96, "n_layers": 2, "in_channels": 64, "out_channels": 64,
}  # fmt: skip
_SD3 = {
    "depth": 2, "num_blocks": 2, "patch_size": 2, "in_channels": 16, "adm_in_channels": 32, "pos_embed_max_size": 8,
    "num_patches": 64, "qk_norm": "rms", "x_block_self_attn_layers": [0], "context_size": 32, "input_size": None,
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 32, "out_features": 128}},
}  # fmt: skip
_NEXT = {"patch_size": 2, "in_channels": 16, "n_layers": 2, "qk_norm": True, "cap_feat_dim": 32}
_LUMINA = {
    **_NEXT,
    "dim": 2304,
    "n_heads": 24,
    "n_kv_heads": 8,
    "axes_dims": [32, 32, 32],
    "axes_lens": [300, 512, 512],
}
_Z_IMAGE = {
    **_NEXT, "dim": 256, "n_heads": 2, "n_kv_heads": 2, "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512],
    "z_image_modulation": True, "pad_tokens_multiple": 32, "ffn_dim_multiplier": 8 / 3,
}  # fmt: skip

_KREA2 = {
    "features": 256, "tdim": 32, "txtdim": 64, "heads": 2, "kvheads": 1, "layers": 2, "txtlayers": 3, "txtheads": 2,
    "txtkvheads": 2,
}  # fmt: skip


def _named(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """A converter of diffusers, which has the published names of norms; ComfyUI has renamed
    them."""
    convert = getattr(converters, f"convert_{name}")
    norm = re.compile(r"((query|key)_norm|distilled_guidance_layer\.norms\.\d+)\.weight$")
    return lambda tensors: convert(
        {norm.sub(r"\1.scale", name): value for name, value in tensors.items()}
    )


def cases() -> dict[str, Case]:
    flux = "comfy.ldm.flux.model:Flux"
    wan = {
        "dim": 128,
        "ffn_dim": 64,
        "num_heads": 2,
        "num_layers": 2,
        "text_dim": 32,
        "model_type": "t2v",
    }
    ltx = {
        "cross_attention_dim": 128,
        "attention_head_dim": 64,
        "num_attention_heads": 2,
        "caption_channels": 32,
        "num_layers": 2,
    }
    qwen = {
        "num_layers": 2,
        "attention_head_dim": 128,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
    }
    next_dit = "comfy.ldm.lumina.model:NextDiT"
    return {
        "FluxTransformer2DModel": Case(
            flux, _FLUX, "Flux", _named("flux_transformer_checkpoint_to_diffusers")
        ),
        "ChromaTransformer2DModel": Case(
            "comfy.ldm.chroma.model:Chroma",
            _CHROMA,
            "Chroma",
            _named("chroma_transformer_checkpoint_to_diffusers"),
        ),
        "Flux2Transformer2DModel": Case(
            flux, _FLUX2, "Flux2", _named("flux2_transformer_checkpoint_to_diffusers")
        ),
        "SD3Transformer2DModel": Case(
            "comfy.ldm.modules.diffusionmodules.mmdit:MMDiT",
            _SD3,
            "SD3",
            _named("sd3_transformer_checkpoint_to_diffusers"),
        ),
        "QwenImageTransformer2DModel": Case(
            "comfy.ldm.qwen_image.model:QwenImageTransformer2DModel", qwen, "QwenImage", dict
        ),
        "ZImageTransformer2DModel": Case(
            next_dit, _Z_IMAGE, "Lumina2", _named("z_image_transformer_checkpoint_to_diffusers")
        ),
        "Lumina2Transformer2DModel": Case(
            next_dit, _LUMINA, "Lumina2", _named("lumina2_to_diffusers")
        ),
        "LTXVideoTransformer3DModel": Case(
            "comfy.ldm.lightricks.model:LTXVModel",
            ltx,
            "LTXV",
            _named("ltx_transformer_checkpoint_to_diffusers"),
        ),
        "WanTransformer3DModel": Case(
            "comfy.ldm.wan.model:WanModel", wan, "WAN21", _named("wan_transformer_to_diffusers")
        ),
        "Krea2Transformer2DModel": Case(
            "comfy.ldm.krea2.model:SingleStreamDiT",
            _KREA2,
            "Krea2",
            _named("krea2_transformer_checkpoint_to_diffusers"),
        ),
    }


def _find(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(__import__(module, fromlist=[name]), name)


def original(case: Case) -> dict[str, Tensor]:
    """Random tensors of the names and rows that ComfyUI's network has."""
    import comfy.ops

    network = _find(case.network)(
        **case.config, device="meta", dtype=torch.float32, operations=comfy.ops.disable_weight_init
    )
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    return {
        name: torch.randn(*shape[:1], *[COLUMNS] * (len(shape) == 2), *shape[1:] * (len(shape) > 2))
        for name, shape in shapes.items()
    }


def patched(case: Case, tensors: dict[str, Tensor], lora: dict[str, Tensor]) -> dict[str, Tensor]:
    """The original tensors after ComfyUI's loader has put a LoRA file into them; ValueError for a
    key that it leaves out."""
    import comfy.lora
    import comfy.lora_convert
    import comfy.model_base

    inside = {f"diffusion_model.{name}": value.clone() for name, value in tensors.items()}
    kind = getattr(comfy.model_base, case.model)
    fake = type(
        "Fake", (kind,), {"__init__": torch.nn.Module.__init__, "state_dict": lambda self: inside}
    )()
    fake.model_config = types.SimpleNamespace(unet_config=case.config)
    loaded = comfy.lora.load_lora(
        comfy.lora_convert.convert_lora(lora),
        comfy.lora.model_lora_keys_unet(fake, {}),
        log_missing=False,
    )
    used = {name for adapter in loaded.values() for name in adapter.loaded_keys}
    if left := lora.keys() - used:
        raise ValueError(f"ComfyUI leaves out {sorted(left)}")
    for target, adapter in loaded.items():
        key, offset, function = (
            (target, None, None) if isinstance(target, str) else (*target, None)[:3]
        )
        inside[key] = comfy.lora.calculate_weight(
            [(1.0, adapter, 1.0, offset, function)], inside[key], key
        )
    return {name.removeprefix("diffusion_model."): value for name, value in inside.items()}


def check(kind: str, case: Case) -> tuple[float, int, list[str]]:
    """(the largest difference, how many modules were compared, modules without a key)."""
    tensors = original(case)
    ours = case.convert(dict(tensors))
    matrices = {
        name.removesuffix(".weight"): value
        for name, value in ours.items()
        if name.endswith(".weight") and value.ndim == 2
    }
    with_key = {module: value for module, value in matrices.items() if names_for(kind).key(module)}
    layers = {
        module: (torch.randn(RANK, COLUMNS), torch.randn(len(value), RANK))
        for module, value in with_key.items()
    }
    adapter = Adapter(layers)
    theirs = case.convert(patched(case, tensors, tensors_for(adapter, names_for(kind), "comfyui")))
    tuned = TunedWeights(kind, adapter)
    worst = max(
        float((theirs[name] - tuned.change(name, value)).abs().max())
        for name, value in ours.items()
    )
    if names_for(kind).whole is not None:
        worst = max(worst, whole(kind, tensors, ours))
    return worst, len(layers), sorted(matrices.keys() - layers.keys())


def whole(kind: str, tensors: dict[str, Tensor], ours: dict[str, Tensor]) -> float:
    """The largest difference between the original tensors and what ComfyUI makes of a whole
    transformer."""
    import comfy.model_detection

    exported = {whole_names(names_for(kind))(name): value for name, value in ours.items()}
    theirs = comfy.model_detection.convert_diffusers_mmdit(dict(exported), "") or exported
    if theirs.keys() != tensors.keys():
        raise ValueError(
            f"{kind}: other names than ComfyUI's: {sorted(theirs.keys() ^ tensors.keys())}"
        )
    return max(float((theirs[name] - value).abs().max()) for name, value in tensors.items())


def main(checkout: str) -> int:

    sys.path.insert(0, checkout)
    sys.argv = [sys.argv[0], "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.model_base

    torch.manual_seed(0)
    failed = 0
    with torch.no_grad():
        for kind in dict.fromkeys(
            spec.comfyui.transformer for spec in SPECS.values() if spec.comfyui is not None
        ):
            case = cases()[kind]
            if not hasattr(comfy.model_base, case.model):
                print(f"{kind}: this ComfyUI has no {case.model}")
                continue
            worst, count, without = check(kind, case)
            failed += worst > 1e-4
            print(
                f"{kind}: {count} modules, largest difference {worst:.1e}; no key: {', '.join(without) or 'none'}"
            )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
