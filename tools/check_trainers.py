"""Compares `g2rpo export --format kohya` and `ai-toolkit` with the code by which those trainers
load and save LoRA files.

    python tools/check_trainers.py SD_SCRIPTS AI_TOOLKIT [MUSUBI_TUNER]

These are checkouts of github.com/kohya-ss/sd-scripts, ostris/ai-toolkit and kohya-ss/musubi-tuner;
their requirements need not be installed. No weights are needed: models have the rows of the real
ones where a converter fixes them, and two columns. For every class that has a format

1. read: the trainer loads an exported random LoRA of all modules that the format has names for, and
   leaves out no tensor;
2. written: it makes a random LoRA and saves it, and `read_adapter` reads it; ai-toolkit's is of all
   modules (of Wan, of the blocks), kohya's of the default ones and with alpha / rank 2.

The weights of the trainer's model are then what its modules compute of unit vectors. After
diffusers' single-file converter has named them, they must be W + up @ down of our merging. Exit
code 1 if anything differs.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import io
import logging
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import diffusers
import torch
from diffusers.loaders import single_file_utils as converters
from safetensors.torch import load_file
from torch import Tensor, nn

from g2rpo.lab.export import names_for, tensors_for
from g2rpo.lab.tuned_weights import TunedWeights
from g2rpo.models.adapter_files import read_adapter
from g2rpo.models.adapters import PREFIX, Adapter, write_tensors
from g2rpo.models.catalogue import SPECS
from g2rpo.models.comfyui import FLUX, replaced_name

COLUMNS, RANK = 2, 3
ABSENT = {
    *(
        "albumentations",
        "av",
        "einops",
        "ftfy",
        "imagesize",
        "optimum",
        "toml",
        "torchaudio",
        "torchvision",
    ),
    *("library.lpw_stable_diffusion", "library.sdxl_lpw_stable_diffusion"),  # need transformers 4
}
"""What the trainers import and the code that runs here does not need."""
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """The trainer's model of a class of diffusers, its config, and what gives its tensors
    diffusers' names; `code` is kohya's module for its LoRA, or ai-toolkit's class around it."""

    kind: str
    trainer: str
    model: str
    config: dict[str, Any]
    convert: Callable[[Weights], Weights]
    code: str


def cases() -> list[Case]:
    sd, musubi, ostris, extension = (
        "sd-scripts",
        "musubi-tuner",
        "ai-toolkit",
        "extensions_built_in.diffusion_models",
    )
    any_model = "toolkit.stable_diffusion_model:StableDiffusion"
    kinds = [
        f"{each}Transformer2DModel" for each in ("Flux", "Chroma", "Flux2", "QwenImage", "ZImage")
    ]
    flux, chroma, flux2, qwen, z_image, wan = (*kinds, "WanTransformer3DModel")
    convert = [
        getattr(converters, f"convert_{each}_transformer_checkpoint_to_diffusers")
        for each in ("flux", "chroma", "flux2")
    ]
    of_flux, of_chroma, of_flux2, of_wan = (
        *convert,
        converters.convert_wan_transformer_to_diffusers,
    )
    large = {
        "in_channels": 64, "context_in_dim": 16, "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "depth": 1,
        "depth_single_blocks": 1, "theta": 10, "axes_dim": [16, 56, 56], "qkv_bias": True, "guidance_embed": True,
    }  # fmt: skip
    approximator = {
        "approximator_in_dim": 64,
        "approximator_depth": 2,
        "approximator_hidden_size": 96,
        "_use_compiled": False,
    }
    small = {"num_attention_heads": 2, "num_layers": 2}
    of = {
        flux2: {
            "context_in_dim": 16,
            "hidden_size": 256,
            "num_heads": 2,
            "depth": 2,
            "depth_single_blocks": 2,
        },
        qwen: {**small, "joint_attention_dim": 32},
        z_image: {
            "dim": 256,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 32,
        },
        wan: {
            "dim": 256,
            "ffn_dim": 64,
            "num_heads": 2,
            "num_layers": 2,
            "text_dim": 32,
            "model_type": "i2v",
        },
    }
    of_diffusers = {
        **small,
        "ffn_dim": 64,
        "text_dim": 32,
        "added_kv_proj_dim": 256,
        "image_dim": 32,
    }
    rows = [
        (flux, sd, "library.flux_models:Flux", {**large, "vec_in_dim": 8}, of_flux, "networks.lora_flux"),
        (chroma, sd, "library.chroma_models:Chroma", {**large, **approximator}, of_chroma, "networks.lora_flux"),
        (flux2, musubi, "flux_2.flux2_models:Flux2", of[flux2], of_flux2, "lora_flux_2"),
        (qwen, musubi, f"qwen_image.qwen_image_model:{qwen}", of[qwen], dict, "lora_qwen_image"),
        (z_image, musubi, f"zimage.zimage_model:{z_image}", of[z_image], dict, "lora_zimage"),
        (wan, musubi, "wan.modules.model:WanModel", of[wan], of_wan, "lora_wan"),
        (flux, ostris, f"diffusers:{flux}", {**small, "num_single_layers": 2}, dict, any_model),
        (flux2, ostris, f"{extension}.flux2.src.model:Flux2", of[flux2], of_flux2, f"{extension}.flux2.flux2_model:Flux2Model"),
        (qwen, ostris, f"diffusers:{qwen}", of[qwen], dict, f"{extension}.qwen_image.qwen_image:QwenImageModel"),
        (z_image, ostris, f"diffusers:{z_image}", of[z_image], dict, f"{extension}.z_image.z_image:ZImageModel"),
        (wan, ostris, f"diffusers:{wan}", of_diffusers, dict, "toolkit.models.wan21.wan21:Wan21"),
    ]  # fmt: skip
    return [Case(*row) for row in rows]


class Stubs:
    """Imports what is `ABSENT` as modules in which every name is known."""

    @classmethod
    def find_spec(cls, name: str, *_: Any) -> Any:
        absent = name in ABSENT or name.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, cls, is_package=True) if absent else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: Any) -> Any:
        # a class that no tensor is of
        return MagicMock(__spec__=spec, __path__=[], QTensor=nn.Identity)

    @staticmethod
    def exec_module(module: Any) -> None: ...


def _find(target: str) -> Any:
    module, _, name = target.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def model_of(case: Case) -> nn.Module:
    """The trainer's model, with random weights of two columns in its linear modules."""
    kind = _find(f"musubi_tuner.{case.model}" if case.trainer == "musubi-tuner" else case.model)
    params = getattr(sys.modules[kind.__module__], f"{kind.__name__}Params", None)
    with torch.device("meta"):
        model = kind(params(**case.config)) if params else kind(**case.config)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(
                    parent, name, nn.Linear(COLUMNS, child.out_features, child.bias is not None)
                )
        for name, value in list(parent.named_parameters(recurse=False)):
            setattr(parent, name, nn.Parameter(torch.randn(value.shape)))
    return model


def weights_of(case: Case, model: nn.Module) -> Weights:
    """By diffusers' names."""
    found = {name: value.clone() for name, value in model.named_parameters()}
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            found[f"{name}.weight"] = (
                module(torch.eye(COLUMNS)) - module(torch.zeros(COLUMNS, COLUMNS))
            ).T
    return case.convert(found)


def kohya(case: Case, model: nn.Module, file: Path | None) -> Any:
    """kohya's LoRA in the model: as a file has it (--dim_from_weights), or new."""
    new, sd = (1.0, RANK, 2.0 * RANK, None, [], model), case.trainer == "sd-scripts"
    code = _find(case.code if sd else f"musubi_tuner.networks.{case.code}")
    if file is None:
        network = code.create_network(*new) if sd else code.create_arch_network(*new)
    elif sd:
        network, _ = code.create_network_from_weights(1.0, file, None, [], model)
    else:
        network = code.create_arch_network_from_weights(1.0, load_file(file), unet=model)
    network.apply_to([], model, False, True)
    return network


def ai_toolkit(case: Case, model: nn.Module, file: Path | None) -> Any:
    """ai-toolkit's. It has one rank, here the file's largest. Of Wan diffusers reads no modules
    outside the blocks."""
    network_kind, flux = (
        _find("toolkit.lora_special:LoRASpecialNetwork"),
        case.kind == FLUX.transformer,
    )
    rank = (
        max(len(value) for name, value in load_file(file).items() if "lora_A" in name)
        if file
        else RANK
    )
    around = object.__new__(_find(case.code))  # without what loads weights
    around.use_old_lokr_format = True
    network = network_kind(
        None, model, lora_dim=rank, train_text_encoder=False, is_flux=flux, is_transformer=not flux, base_model=around,
        transformer_only=case.kind == "WanTransformer3DModel", target_lin_modules=[type(model).__name__],
    )  # fmt: skip
    network.around = around  # the network itself has a weak reference
    network.apply_to(None, model, False, True)
    network._update_torch_multiplier()
    network.is_active = True
    return network


def check(case: Case, file: Path) -> tuple[float, float]:
    """The largest differences: of what the trainer reads, and of what it writes."""
    names, format = names_for(case.kind), "ai-toolkit" if case.trainer == "ai-toolkit" else "kohya"
    put, diffusers_own = (
        ai_toolkit if format == "ai-toolkit" else kohya,
        (names, format) == (FLUX, "ai-toolkit"),
    )
    model = model_of(case)
    before = weights_of(case, model)
    matrices = {
        n.removesuffix(".weight"): v
        for n, v in before.items()
        if n.endswith(".weight") and v.ndim == 2
    }
    with_name = {
        m: v for m, v in matrices.items() if diffusers_own or replaced_name(names.original or {}, m)
    }
    adapter = Adapter(
        {m: (torch.randn(RANK, COLUMNS), torch.randn(len(v), RANK)) for m, v in with_name.items()}
    )
    write_tensors(
        file, adapter.tensors(PREFIX) if diffusers_own else tensors_for(adapter, names, format), {}
    )
    network = put(case, model, file)  # in ai-toolkit its modules have a weak reference to it
    left = network.load_weights(str(file))
    if left := left if format == "ai-toolkit" else left.unexpected_keys + left.missing_keys:
        raise ValueError(f"{case.kind}: {case.trainer} leaves out {sorted(left)}")
    read = difference(case, model, adapter, before)

    model = model_of(case)
    before, network = weights_of(case, model), put(case, model, None)
    for value in network.parameters():
        value.normal_()
    network.save_weights(str(file), torch.float32, {})
    pipeline = next(
        getattr(diffusers, spec.pipeline_class) for spec in SPECS.values() if spec.comfyui is names
    )
    found = read_adapter(file, pipeline, with_modules(case.kind, matrices))
    return read, difference(case, model, found, before)


def with_modules(kind: str, matrices: Weights) -> nn.Module:
    """A module of a class of that name with linear modules of these names and sizes."""
    whole = type(kind, (nn.Module,), {})()
    for name, value in matrices.items():
        *above, own = name.split(".")
        parent = whole
        for each in above:
            if not hasattr(parent, each):
                parent.add_module(each, nn.Module())
            parent = getattr(parent, each)
        parent.add_module(own, nn.Linear(value.shape[1], value.shape[0], device="meta"))
    return whole


def difference(case: Case, model: nn.Module, adapter: Adapter, before: Weights) -> float:
    theirs, tuned = weights_of(case, model), TunedWeights(case.kind, adapter)
    if missing := set(tuned.names) - (before.keys() & theirs.keys()):
        raise ValueError(f"{case.kind}: {case.trainer} has no {sorted(missing)}")
    return max(
        float((theirs[name] - tuned.change(name, value)).abs().max())
        for name, value in before.items()
    )


def main(sd_scripts: str, ai_toolkit: str, musubi_tuner: str = "") -> int:
    sys.path[:0] = [sd_scripts, ai_toolkit, *([f"{musubi_tuner}/src"] if musubi_tuner else [])]
    sys.meta_path.insert(0, Stubs)  # type: ignore[arg-type]
    torch.cuda.current_device = lambda: 0  # the default of an argument in musubi-tuner
    # its own would import every model
    package = types.ModuleType("extensions_built_in.diffusion_models")
    package.__path__ = [f"{ai_toolkit}/extensions_built_in/diffusion_models"]
    sys.modules[package.__name__] = package
    torch.manual_seed(0)
    logging.disable(logging.WARNING)
    failed = 0
    print("| class | trainer | read | written |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for case in cases():
            if case.trainer == "musubi-tuner" and not musubi_tuner:
                continue
            with contextlib.redirect_stdout(io.StringIO()):
                read, written = check(case, Path(folder) / "lora.safetensors")
            failed += not max(read, written) < 1e-4
            print(f"| {case.kind} | {case.trainer} | {read:.0e} | {written:.0e} |", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
