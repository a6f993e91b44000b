"""Adapters under ComfyUI's keys: its rule (W + up @ down at the weight that a key names) on
original weights, which diffusers' own converters then read, against our merging in diffusers'
layout. `tools/check_comfyui.py` runs ComfyUI's own loader, and tests/models/test_adapters.py
reads files of these keys with diffusers'."""

import pytest
import torch
from diffusers import (
    FluxTransformer2DModel,
    LTXVideoTransformer3DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
    ZImageTransformer2DModel,
)
from diffusers.loaders import lora_conversion_utils as lora_converters
from diffusers.loaders import single_file_utils as converters

from g2rpo.core.errors import UserError
from g2rpo.lab.export import names_for, tensors_for, whole_names
from g2rpo.lab.tuned_weights import TunedWeights
from g2rpo.models.adapters import DOWN, UP
from tests.support.adapters import random_pairs
from tests.support.tolerances import rounding

HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}
TINY = {
    FluxTransformer2DModel: {
        **HEADS, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 8, "pooled_projection_dim": 8,
        "guidance_embeds": True, "axes_dims_rope": (4, 6, 6),
    },
    SD3Transformer2DModel: {
        **HEADS, "num_layers": 2, "joint_attention_dim": 8, "caption_projection_dim": 32, "pooled_projection_dim": 8,
        "pos_embed_max_size": 4, "sample_size": 4, "dual_attention_layers": (0,), "qk_norm": "rms_norm",
    },
    QwenImageTransformer2DModel: {**HEADS, "num_layers": 1, "joint_attention_dim": 8, "axes_dims_rope": (4, 6, 6)},
    ZImageTransformer2DModel: {
        "dim": 64, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 8,
        "axes_dims": [8, 12, 12],
    },
    LTXVideoTransformer3DModel: {**HEADS, "num_layers": 1, "cross_attention_dim": 32, "caption_channels": 8},
    WanTransformer3DModel: {**HEADS, "num_layers": 2, "text_dim": 8, "ffn_dim": 16, "freq_dim": 16},
}  # fmt: skip


def tiny(kind):
    with torch.device("meta"):
        model = kind(**TINY[kind])
    generator = torch.Generator().manual_seed(2)
    return {
        name: torch.randn(value.shape, generator=generator)
        for name, value in model.state_dict().items()
    }


def linear(tensors):
    return {
        n.removesuffix(".weight"): v.shape
        for n, v in tensors.items()
        if n.endswith(".weight") and v.ndim == 2
    }


BACK = {
    LTXVideoTransformer3DModel: converters.convert_ltx_transformer_checkpoint_to_diffusers,
    WanTransformer3DModel: converters.convert_wan_transformer_to_diffusers,
}


@pytest.mark.parametrize("kind", BACK, ids=lambda kind: kind.__name__)
def test_keys_of_original_weights_add_up_to_our_merging(kind):
    """ComfyUI's generic keys: "diffusion_model." and the name of the original weight."""
    before = tiny(kind)
    original = {
        whole_names(names_for(kind.__name__))(name): value for name, value in before.items()
    }
    adapter = random_pairs(linear(before))
    tensors = tensors_for(adapter, names_for(kind.__name__), "comfyui")
    for name, up in tensors.items():
        if name.endswith(UP):
            weight = name.removeprefix("diffusion_model.").replace(UP, ".weight")
            original[weight] = original[weight] + up @ tensors[name.replace(UP, DOWN)]
    theirs, tuned = BACK[kind](original), TunedWeights(kind.__name__, adapter)
    assert theirs.keys() == before.keys()
    for name, value in before.items():
        ours = tuned.change(name, value)
        torch.testing.assert_close(theirs[name], ours, **rounding(8, ours.abs().max()), msg=name)


def lumina():
    block = {"attn.to_q": 2304, "attn.to_k": 768, "attn.to_v": 768, "attn.to_out.0": 5}
    block |= {f"feed_forward.linear_{number}": 4 for number in (1, 2, 3)}
    shapes = {f"context_refiner.0.{name}": (rows, 3) for name, rows in block.items()}
    return shapes | {
        f"layers.0.{name}": (rows, 3) for name, rows in {**block, "norm1.linear": 6}.items()
    }


def test_projections_that_are_one_matrix_become_one_lora():
    """Lumina2, with diffusers' own reader of the original layout: its q, k and v share the downs,
    and each has its own ups."""
    adapter = random_pairs(lumina())
    written = tensors_for(adapter, names_for("Lumina2Transformer2DModel"), "comfyui")
    keys = {name.rpartition(".lora_")[0] for name in written}
    assert {key.rpartition(".")[2] for key in keys} == {"qkv", "out", "w1", "w2", "w3", "1"}
    theirs = lora_converters._convert_non_diffusers_lumina2_lora_to_diffusers(written)
    for module in adapter.layers:
        down, up = (theirs[f"transformer.{module}.lora_{side}.weight"] for side in "AB")
        delta = adapter.delta(module)
        torch.testing.assert_close(up @ down, delta, **rounding(8, delta.abs().max()), msg=module)


def test_one_projection_of_a_shared_matrix_alone_is_refused():
    shapes = {name: shape for name, shape in lumina().items() if not name.endswith("to_k")}
    with pytest.raises(UserError, match="one matrix there; train to_q, to_k and to_v"):
        tensors_for(random_pairs(shapes), names_for("Lumina2Transformer2DModel"), "comfyui")


@pytest.mark.parametrize("kind", TINY, ids=lambda kind: kind.__name__)
def test_every_linear_module_has_a_key_of_its_own(kind):
    modules = linear(tiny(kind))
    keys = {module: names_for(kind.__name__).key(module) for module in modules}
    assert len(modules) > 10 and None not in keys.values() and len(set(keys.values())) == len(keys)


@pytest.mark.parametrize("kind", ["ChromaTransformer2DModel", "FluxTransformer2DModel"])
def test_a_module_that_comfyui_would_leave_out_is_refused(kind):
    with pytest.raises(
        UserError, match=r"no key for distilled_guidance_layer\.in_proj.*policy\.lora_targets"
    ):
        tensors_for(
            random_pairs({"distilled_guidance_layer.in_proj": (4, 3)}), names_for(kind), "comfyui"
        )


OUTSIDE = [
    (QwenImageTransformer2DModel, "transformer_blocks.0.attn.to_q", "img_in"),
    (ZImageTransformer2DModel, "noise_refiner.0.attention.to_q", "cap_embedder.1"),
    (WanTransformer3DModel, "blocks.0.attn1.to_q", "condition_embedder.time_proj"),
    (WanTransformer3DModel, "blocks.0.attn2.add_k_proj", "proj_out"),
]


@pytest.mark.parametrize("format", ["kohya", "ai-toolkit"])
@pytest.mark.parametrize(("kind", "inside", "outside"), OUTSIDE)
def test_a_module_outside_the_blocks_which_trainers_would_leave_out_is_refused(
    kind, inside, outside, format
):
    names = names_for(kind.__name__)
    assert tensors_for(random_pairs({inside: (4, 3)}), names, format)
    with pytest.raises(UserError, match=f"its loader has no key for {outside}"):
        tensors_for(random_pairs({inside: (4, 3), outside: (4, 3)}), names, format)


def test_models_without_names_are_refused():
    for kind in ("SanaTransformer2DModel", "MineModel"):
        with pytest.raises(
            UserError, match=f"ComfyUI has no model {kind}, or its names are not known here"
        ):
            names_for(kind)
    with pytest.raises(
        UserError, match="no conversion of a whole Flux2Transformer2DModel is known"
    ):
        whole_names(names_for("Flux2Transformer2DModel"))
