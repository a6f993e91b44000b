"""Adapters under ComfyUI's keys: its rule (W + up @ down at the weight that a key names) on original weights, which diffusers'
own converters then read, against our merging in diffusers' layout. `tools/check_comfyui.py` runs ComfyUI's own loader."""

import re
import zlib

import pytest
import torch
from diffusers import (
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    LTXVideoTransformer3DModel,
    Lumina2Transformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
    ZImageTransformer2DModel,
)
from diffusers.loaders import lora_conversion_utils as lora_converters
from diffusers.loaders import single_file_utils as converters
from safetensors.torch import load_file

from g2rpo.core.errors import UserError
from g2rpo.export.comfyui import for_comfyui, names_for, whole_names
from g2rpo.export.weights import Tuned
from g2rpo.policies.adapters import Adapter

RANK, COLUMNS = 2, 3
HIDDEN = 3072  # diffusers' converter has FLUX.1's width in it

# What ComfyUI's maps say (comfy/utils.py: flux_to_diffusers, mmdit_to_diffusers, z_image_to_diffusers) of some modules: the
# original weight, and which of its rows.
JOINT = {
    r"transformer_blocks\.(\d+)\.attn\.to_([qkv])": (r"double_blocks.\1.img_attn.qkv", "thirds"),
    r"transformer_blocks\.(\d+)\.attn\.add_([qkv])_proj": (r"double_blocks.\1.txt_attn.qkv", "thirds"),
    r"transformer_blocks\.(\d+)\.attn\.to_out\.0": (r"double_blocks.\1.img_attn.proj", None),
    r"transformer_blocks\.(\d+)\.attn\.to_add_out": (r"double_blocks.\1.txt_attn.proj", None),
}
RULES = {
    FluxTransformer2DModel: {
        **JOINT,
        r"transformer_blocks\.(\d+)\.ff\.net\.0\.proj": (r"double_blocks.\1.img_mlp.0", None),
        r"transformer_blocks\.(\d+)\.ff_context\.net\.2": (r"double_blocks.\1.txt_mlp.2", None),
        r"transformer_blocks\.(\d+)\.norm1\.linear": (r"double_blocks.\1.img_mod.lin", None),
        r"single_transformer_blocks\.(\d+)\.attn\.to_([qkv])": (r"single_blocks.\1.linear1", "first three"),
        r"single_transformer_blocks\.(\d+)\.proj_mlp": (r"single_blocks.\1.linear1", "rest"),
        r"single_transformer_blocks\.(\d+)\.proj_out": (r"single_blocks.\1.linear2", None),
        r"norm_out\.linear": ("final_layer.adaLN_modulation.1", "swapped"),
    },
    Flux2Transformer2DModel: {
        **JOINT,
        r"transformer_blocks\.(\d+)\.ff\.linear_in": (r"double_blocks.\1.img_mlp.0", None),
        r"single_transformer_blocks\.(\d+)\.attn\.to_qkv_mlp_proj": (r"single_blocks.\1.linear1", None),
        r"single_transformer_blocks\.(\d+)\.attn\.to_out": (r"single_blocks.\1.linear2", None),
    },
    SD3Transformer2DModel: {
        r"transformer_blocks\.(\d+)\.attn\.to_([qkv])": (r"joint_blocks.\1.x_block.attn.qkv", "thirds"),
        r"transformer_blocks\.(\d+)\.attn2\.to_([qkv])": (r"joint_blocks.\1.x_block.attn2.qkv", "thirds"),
        r"transformer_blocks\.(\d+)\.attn\.add_([qkv])_proj": (r"joint_blocks.\1.context_block.attn.qkv", "thirds"),
        r"transformer_blocks\.(\d+)\.attn\.to_out\.0": (r"joint_blocks.\1.x_block.attn.proj", None),
        r"transformer_blocks\.0\.attn\.to_add_out": ("joint_blocks.0.context_block.attn.proj", None),
        r"transformer_blocks\.(\d+)\.ff\.net\.2": (r"joint_blocks.\1.x_block.mlp.fc2", None),
        r"transformer_blocks\.0\.norm1_context\.linear": ("joint_blocks.0.context_block.adaLN_modulation.1", None),
        r"transformer_blocks\.1\.norm1_context\.linear": ("joint_blocks.1.context_block.adaLN_modulation.1", "swapped"),
    },
    ZImageTransformer2DModel: {
        r"(\w+\.\d+)\.attention\.to_([qkv])": (r"\1.attention.qkv", "thirds"),
        r"(\w+\.\d+)\.attention\.to_out\.0": (r"\1.attention.out", None),
        r"(\w+\.\d+\.feed_forward\.w[123])": (r"\1", None),
        r"all_x_embedder\.2-1": ("x_embedder", None),
    },
}


def seeded(name):
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


class Original(dict):
    """The original weights of a model that nobody has here: a converter that asks for one gets random numbers of its rows."""

    def __init__(self, *names):
        self.made = {}
        super().__init__(dict.fromkeys(names))
        for name in names:
            self[name] = self.random(name)

    def random(self, name):
        rows = (
            3 * HIDDEN if ".qkv." in name else 7 * HIDDEN if name.startswith("single_blocks") and "linear1" in name else HIDDEN
        )
        self.made[name] = torch.randn(
            rows, *[COLUMNS] * name.endswith("weight"), generator=torch.Generator().manual_seed(len(name))
        )
        return self.made[name].clone()

    def pop(self, name, *default):
        return super().pop(name) if name in self else self.random(name)


NAMES = {
    FluxTransformer2DModel: ("double_blocks.0.img_mod.lin.weight", "single_blocks.0.linear1.weight"),
    SD3Transformer2DModel: (
        "joint_blocks.0.x_block.attn.ln_q.weight", "joint_blocks.1.x_block.attn2.qkv.weight", "context_embedder.weight",
    ),
    Flux2Transformer2DModel: tuple(
        f"{name}.weight" for name in (
            "double_blocks.0.img_attn.qkv", "double_blocks.0.txt_attn.qkv", "double_blocks.0.img_attn.proj",
            "double_blocks.0.txt_attn.proj", "double_blocks.0.img_mlp.0", "single_blocks.0.linear1", "single_blocks.0.linear2",
        )
    ),
    ZImageTransformer2DModel: tuple(
        f"{name}.weight" for block in ("layers.0", "noise_refiner.1", "context_refiner.0")
        for name in (f"{block}.attention.qkv", f"{block}.attention.out", f"{block}.feed_forward.w2", "x_embedder")
    ),
}  # fmt: skip
CONVERTERS = {
    FluxTransformer2DModel: converters.convert_flux_transformer_checkpoint_to_diffusers,
    SD3Transformer2DModel: converters.convert_sd3_transformer_checkpoint_to_diffusers,
    Flux2Transformer2DModel: converters.convert_flux2_transformer_checkpoint_to_diffusers,
    ZImageTransformer2DModel: converters.convert_z_image_transformer_checkpoint_to_diffusers,
}


def random_adapter(shapes):
    """A LoRA on modules of these weights' shapes."""
    generator = torch.Generator().manual_seed(1)
    layers = {
        module: (torch.randn(RANK, shape[1], generator=generator), torch.randn(shape[0], RANK, generator=generator))
        for module, shape in shapes.items()
    }
    return Adapter(layers)


def exported(adapter, kind, folder):
    """What is in the file that ComfyUI would read, by key: (down, up)."""
    for_comfyui(adapter, names_for(kind.__name__)).write(folder / "it.safetensors")
    tensors = load_file(folder / "it.safetensors")
    keys = {name.rpartition(".lora_")[0] for name in tensors}
    assert tensors.keys() == {f"{key}.lora_{side}.weight" for key in keys for side in "AB"}
    return {key: (tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"]) for key in keys}


def apply(change, weight, part, letter):
    """ComfyUI's rule: adds a change to the rows of an original weight that the map names."""
    if part == "swapped":
        change = torch.cat(change.chunk(2)[::-1])
    start = {"thirds": "qkv".find(letter), "first three": "qkv".find(letter), "rest": 3}.get(part, 0) * HIDDEN
    weight[start : start + len(change)] += change


@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_comfyuis_rule_on_the_original_weights_is_our_merging(kind, tmp_path):
    original = Original(*NAMES[kind])
    before = CONVERTERS[kind](original)
    rules = RULES[kind]
    modules = {name.removesuffix(".weight") for name in before if name.endswith(".weight") and before[name].ndim == 2}
    trained = {m: before[f"{m}.weight"].shape for m in modules if any(re.fullmatch(rule, m) for rule in rules)}
    assert len(trained) >= len(rules)
    adapter = random_adapter(trained)
    after = {name: value.clone() for name, value in original.made.items()}
    for key, (down, up) in exported(adapter, kind, tmp_path).items():
        assert key.startswith("transformer.")
        for rule, (name, part) in rules.items():
            if found := re.fullmatch(rule, key.removeprefix("transformer.")):
                letter = found.group(found.re.groups) if found.re.groups else ""
                apply(up @ down, after[found.expand(name) + ".weight"], part, letter)
                break
        else:
            raise AssertionError(key)
    again = Original()
    again.update(after)
    theirs, tuned = CONVERTERS[kind](again), Tuned(kind.__name__, adapter)
    for name, value in before.items():
        torch.testing.assert_close(theirs[name], tuned.change(name, value), msg=name)


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
    return {name: torch.randn(value.shape, generator=generator) for name, value in model.state_dict().items()}


def linear(tensors):
    return {n.removesuffix(".weight"): v.shape for n, v in tensors.items() if n.endswith(".weight") and v.ndim == 2}


BACK = {
    LTXVideoTransformer3DModel: converters.convert_ltx_transformer_checkpoint_to_diffusers,
    WanTransformer3DModel: converters.convert_wan_transformer_to_diffusers,
}


@pytest.mark.parametrize("kind", BACK, ids=lambda kind: kind.__name__)
def test_keys_of_original_weights_add_up_to_our_merging(kind, tmp_path):
    """ComfyUI's generic keys: "diffusion_model." and the name of the original weight."""
    before = tiny(kind)
    original = {whole_names(names_for(kind.__name__))(name): value for name, value in before.items()}
    adapter = random_adapter(linear(before))
    for key, (down, up) in exported(adapter, kind, tmp_path).items():
        name = key.removeprefix("diffusion_model.") + ".weight"
        original[name] = original[name] + up @ down
    theirs, tuned = BACK[kind](original), Tuned(kind.__name__, adapter)
    assert theirs.keys() == before.keys()
    for name, value in before.items():
        torch.testing.assert_close(theirs[name], tuned.change(name, value), msg=name)


def lumina():
    block = {"attn.to_q": 2304, "attn.to_k": 768, "attn.to_v": 768, "attn.to_out.0": 5}
    block |= {f"feed_forward.linear_{number}": 4 for number in (1, 2, 3)}
    shapes = {f"context_refiner.0.{name}": (rows, 3) for name, rows in block.items()}
    return shapes | {f"layers.0.{name}": (rows, 3) for name, rows in {**block, "norm1.linear": 6}.items()}


def test_projections_that_are_one_matrix_become_one_lora(tmp_path):
    """Lumina2, with diffusers' own reader of the original layout: its q, k and v share the downs, and each has its own ups."""
    adapter = random_adapter(lumina())
    keys = exported(adapter, Lumina2Transformer2DModel, tmp_path)
    assert {name.rpartition(".")[2] for name in keys} == {"qkv", "out", "w1", "w2", "w3", "1"}
    theirs = lora_converters._convert_non_diffusers_lumina2_lora_to_diffusers(load_file(tmp_path / "it.safetensors"))
    for module in adapter.layers:
        down, up = (theirs[f"transformer.{module}.lora_{side}.weight"] for side in "AB")
        torch.testing.assert_close(up @ down, adapter.delta(module), msg=module)


def test_one_projection_of_a_shared_matrix_alone_is_refused():
    shapes = {name: shape for name, shape in lumina().items() if not name.endswith("to_k")}
    with pytest.raises(UserError, match="one matrix there; train to_q, to_k and to_v"):
        for_comfyui(random_adapter(shapes), names_for("Lumina2Transformer2DModel"))


@pytest.mark.parametrize("kind", TINY, ids=lambda kind: kind.__name__)
def test_every_linear_module_has_a_key_of_its_own(kind):
    modules = linear(tiny(kind))
    keys = {module: names_for(kind.__name__).key(module) for module in modules}
    assert len(modules) > 10 and None not in keys.values() and len(set(keys.values())) == len(keys)


@pytest.mark.parametrize("kind", ["ChromaTransformer2DModel", "FluxTransformer2DModel"])
def test_a_module_that_comfyui_would_leave_out_is_refused(kind):
    with pytest.raises(UserError, match=r"no key for distilled_guidance_layer\.in_proj.*policy\.lora_targets"):
        for_comfyui(random_adapter({"distilled_guidance_layer.in_proj": (4, 3)}), names_for(kind))


def test_models_without_names_are_refused():
    for kind in ("SanaTransformer2DModel", "MineModel"):
        with pytest.raises(UserError, match=f"{kind}: ComfyUI has no such model, or its names are not known here; --format"):
            names_for(kind)
    with pytest.raises(UserError, match="Flux2Transformer2DModel: no conversion of a whole model is known"):
        whole_names(names_for("Flux2Transformer2DModel"))
