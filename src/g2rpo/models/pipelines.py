"""Loading, placing and measuring pipelines of diffusers, and which kernel computes their attention, in
rollouts and in training alike."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from g2rpo.core.errors import UserError, refuse
from g2rpo.core.files import refuse_other
from g2rpo.core.plain import refuse_hub_kernels
from g2rpo.models import hub
from g2rpo.models.modular import pipeline_class
from g2rpo.models.offload import Offload, offloads
from g2rpo.models.options import Attention, PolicyConfig, TuningMode
from g2rpo.models.pipeline_files import parts_in, read_index
from g2rpo.models.quantized import installed
from g2rpo.models.spec import PipelineSpec, parameters_of

BACKENDS: Mapping[str, str] = {
    "cudnn": "_native_cudnn",
    "flash": "_native_flash",
    "flash2": "flash",
    "flash3": "_flash_3",
    "efficient": "_native_efficient",
    "math": "_native_math",
}
"""diffusers' names. Left out are kernels that round to fewer bits, that have no gradient, or whose
code comes from a hub."""
PACKAGES: Mapping[str, str] = {"flash2": "flash_attn", "flash3": "flash_attn_interface"}
TAKE_NO_MASK = ("flash", "flash2", "flash3")
"""Kernels that take no mask."""
CUDA_ONLY = ("cudnn", "efficient", *PACKAGES)


def attention_kinds(device: str) -> list[str]:
    """The kinds of attention that this installation has for `device`."""
    cuda = torch.device(device).type == "cuda"
    usable = [kind for kind in BACKENDS if cuda or kind not in CUDA_ONLY]
    # those that are in no package of their own are torch's
    return ["auto", *(kind for kind in usable if installed(PACKAGES.get(kind, "torch")))]


def faults_of_attention(kind: Attention, device: str) -> Iterator[str]:
    """Why this installation has no such attention for `device`."""
    if kind not in (have := attention_kinds(device)):
        package = f" (it needs the package {PACKAGES[kind]})" if kind in PACKAGES else ""
        yield f"policy.attention={kind} is not available for {device}{package}; available: {', '.join(have)}"
    elif kind == "cudnn" and mixes_layouts(torch.device(device)):
        yield f"policy.attention=cudnn: with torch {torch.__version__} its gradients are wrong; take auto or flash"


def mixes_layouts(device: torch.device) -> bool:
    """Whether torch's cuDNN attention takes the layout of one output gradient for that of another.

    torch keeps a cuDNN graph for the shapes and strides of queries, keys and values, but not for
    the strides of the output's gradient. A gradient in another layout is then read with the strides
    of the first. FLUX has both: the gradient of a single-stream block is a slice of a wider tensor.
    With torch 2.11.0 on an H200 gradients were 110 % off without a word; in the other order memory
    beyond the tensor was read ("illegal memory access").
    """
    batch, tokens, heads, width = 1, 256, 2, 64
    values = torch.randn(batch, tokens, heads, width, device=device, dtype=torch.bfloat16)
    narrow = torch.randn(batch, tokens, heads * width, device=device, dtype=torch.bfloat16)
    slice_of_wide = torch.cat([narrow, torch.zeros_like(narrow)], dim=-1)[..., : heads * width]
    gradients = []
    for given in (narrow, slice_of_wide):  # in this order nothing beyond a tensor is read
        leaf = values.clone().requires_grad_()
        each = leaf.transpose(1, 2)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = functional.scaled_dot_product_attention(each, each, each)
        out.transpose(1, 2).flatten(2).backward(given)
        assert leaf.grad is not None
        gradients.append(leaf.grad.float())
    first, second = gradients
    # rounding in bfloat16 gives less than 0.01
    return float((second - first).norm()) > 0.1 * float(first.norm())


CALL_OPTIONS = (
    "height",
    "width",
    "num_frames",
    "negative_prompt",
    "guidance_scale",
    "max_sequence_length",
)
"""Options that are arguments of a pipeline's call."""


@dataclass(frozen=True)
class Shapes:
    """Sizes of what a policy reads and writes: one latent, one prompt's conditioning, tokens,
    network rows an evaluation."""

    latent: tuple[int, ...]
    cond: Mapping[str, tuple[int, ...]]
    image_tokens: int
    text_tokens: int
    rows: int

    @property
    def latent_bytes(self) -> int:
        """Latents are float32 wherever they are kept."""
        return 4 * math.prod(self.latent)


def patch_area(config: Any) -> int:
    """Latent pixels of a token; of the transformer's `config`."""
    sides = getattr(config, "patch_size", None) or config.all_patch_size[0]
    return math.prod(sides) if isinstance(sides, Sequence) else sides**2


def _lists(transformer: nn.Module) -> dict[str, nn.ModuleList]:
    """Lists of modules, of the transformer itself or of a dictionary in it."""
    found = {}
    for name, child in transformer.named_children():
        if isinstance(child, nn.ModuleList):
            found[name] = child
        elif isinstance(child, nn.ModuleDict):
            found |= {f"{name}.{inner}": blocks for inner, blocks in _lists(child).items()}
    return found


def blocks_of(transformer: Any) -> list[nn.Module]:
    """A transformer's blocks: the modules of its module lists."""
    return [block for blocks in _lists(transformer).values() for block in blocks]


def keep_two_blocks(
    transformer: nn.Module, changed: Callable[[str], bool] = lambda name: False
) -> list[int]:
    """Keeps the first and the last of every run of equal blocks, under their names; returns how
    many each one represents.

    Equal blocks have weights of the same shapes, and the same of their modules are `changed` by an
    adapter.
    """
    times = []
    for path, blocks in _lists(transformer).items():

        def kind(item: tuple[str, nn.Module], path: str = path) -> Any:
            name, block = item
            weights = [(weight, value.shape) for weight, value in block.named_parameters()]
            return (
                type(block),
                weights,
                [inner for inner, _ in block.named_modules() if changed(f"{path}.{name}.{inner}")],
            )

        for _, equal in itertools.groupby(list(blocks.named_children()), kind):
            names = [name for name, _ in equal]
            times += two_of(len(names))
            for name in names[1:-1]:
                delattr(blocks, name)  # `del blocks[i]` would rename those that stay
    return times


def two_of(blocks: int) -> list[int]:
    """How many of `blocks` equal blocks the first and the last represent: at the peak one block is
    computing and the others have only saved activations, so the first represents all but the
    last."""
    return [blocks - 1, 1] if blocks > 1 else [1] * blocks


def check_options(spec: PipelineSpec, options: PolicyConfig) -> None:
    """UserError for an option that a model lacks, or that contradicts another one; needs nothing
    loaded."""
    refuse(_faults_of_options(spec, options))


def _faults_of_options(spec: PipelineSpec, options: PolicyConfig) -> Iterator[str]:
    kind = spec.pipeline_class
    for name in (*spec.unsupported, *([] if spec.video else ["num_frames"])):
        if getattr(options, name) not in (None, False):
            yield f"policy.{name}: a {kind} has no such option; take it out"
    known = {
        *parameters_of(pipeline_class(kind)),
        *spec.fixed,
        *([spec.scale] if spec.guider else []),
    }
    for name in CALL_OPTIONS:
        argument = spec.scale if name == "guidance_scale" else name
        if getattr(options, name) is not None and argument not in known:
            yield f"policy.{name}: the call of a {kind} has no such argument; take it out"
    if options.attention in TAKE_NO_MASK and spec.is_masked:
        yield (
            f"policy.attention={options.attention}: takes no mask, which a {kind} needs for its prompts; "
            "take auto, cudnn, efficient or math"
        )
    if options.lora_above and options.tuning == "full":
        yield "policy.lora_above: is for adapters; take it out, or set policy.tuning=lora"


def choose_attention(transformer: Any, kind: Attention) -> None:
    """Sets the attention kernel of a diffusers transformer; UserError if it cannot be set.

    "auto" is torch's choice without cuDNN, which torch prefers on Hopper and later since 2.11: see
    `mixes_layouts`.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)  # of this process; "cudnn" names it at each call
    if kind == "auto":
        return
    from diffusers.models.attention_dispatch import attention_backend

    # it restores the backend of all other models, which the next line would change
    with attention_backend(BACKENDS[kind]):
        transformer.set_attention_backend(BACKENDS[kind])
    if not any(
        getattr(getattr(module, "processor", None), "_attention_backend", None)
        for module in transformer.modules()
    ):
        raise UserError(
            f"policy.attention={kind}: a {type(transformer).__name__} has no choice of attention; take it out"
        )


def read_pipeline(
    pipeline_class: Any,
    path: str | Path,
    dtype: torch.dtype,
    tuning: TuningMode = "lora",
    vae_dtype: torch.dtype | None = None,
) -> Any:
    """A pipeline in `dtype`, its VAE in `vae_dtype` (None: the same), from a directory or a hub id;
    parts that its index leaves empty (SD3 without T5) stay empty.

    A fully trained transformer is loaded as it is stored: rounding to `dtype` first would change
    the initial master weights. What is loaded in its stored dtype is mapped from its file, of which
    the processes of a machine share one copy.
    """
    from transformers import PreTrainedConfig

    parts = parts_in(read_index(str(path), download=True))
    empty = {name: None for name, (library, _) in parts.items() if library is None}
    for name, (library, _) in parts.items():
        if library == "transformers":
            with suppress(OSError):  # no config.json: no model, but a tokenizer
                refuse_hub_kernels(
                    PreTrainedConfig.get_config_dict(str(path), subfolder=name)[0],
                    f"{name}/config.json",
                )
    dtypes = {
        "transformer": stored_dtype(path) if tuning == "full" else dtype,
        "vae": vae_dtype or dtype,
        "default": dtype,
    }
    pipeline = pipeline_class.from_pretrained(
        str(path), dtype=dtypes, use_safetensors=True, **empty
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def stored_dtype(path: str | Path) -> torch.dtype:
    """The dtype of a pipeline's transformer, on disk or in the hub's cache; float32 if it has
    several, or no such file."""
    from safetensors import safe_open

    folder = Path(path) / "transformer"
    if not folder.is_dir() and (config := hub.cached(str(path), "transformer/config.json")):
        folder = config.parent
    kinds: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(refuse_other(file), "pt") as weights:
            kinds |= {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118  no mapping
    known = {frozenset(["BF16"]): torch.bfloat16, frozenset(["F16"]): torch.float16}
    return known.get(frozenset(kinds), torch.float32)


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts what is stored of a model, as `from_pretrained` does: frequencies of positions are
    computed, and stay float32, as do those weights that a class of diffusers keeps so."""
    from diffusers import ModelMixin

    kept = {*(module._keep_in_fp32_modules or ())} if isinstance(module, ModelMixin) else set()
    for name, value in module.state_dict(keep_vars=True).items():
        if value.is_floating_point():
            value.data = value.data.to(torch.float32 if kept & {*name.split(".")} else dtype)


def trainable(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters with a gradient, by name."""
    return {
        name: parameter
        for name, parameter in transformer.named_parameters()
        if parameter.requires_grad
    }


def shared_copy(transformer: nn.Module) -> Any:
    """A frozen copy that shares the weights' memory."""
    weights = {id(p): nn.Parameter(p.data, requires_grad=False) for p in transformer.parameters()}
    return copy.deepcopy(transformer, weights)


def separate(trained: nn.Module, frozen: nn.Module) -> None:
    """Replaces weights of `frozen` that share memory with `trained` by copies."""
    for weight, other in zip(trained.parameters(), frozen.parameters(), strict=True):
        if weight.data_ptr() == other.data_ptr():
            other.data = other.data.clone()


def place(
    pipeline: Any,
    transformer: Any,
    options: PolicyConfig,
    device: torch.device,
    vae_dtype: torch.dtype,
) -> None:
    """Moves the trained transformer (whose dtypes `Tuning` sets; with policy.offload not its blocks)
    and the VAE, frozen in its dtype, to `device`."""
    cast(pipeline.vae.requires_grad_(False).eval(), vae_dtype)
    if offloads(options, device):
        Offload(transformer, blocks_of(transformer), device)
    else:
        transformer.to(device)
    pipeline.vae.to(device)
    if all(weight.ndim <= 4 for weight in pipeline.vae.parameters()):
        # convolutions on interleaved channels are faster, on CPU and GPU
        pipeline.vae.to(memory_format=torch.channels_last)
    transformer.eval()  # the models have no dropout; eval keeps adapters without it too
    if options.vae_tiling:
        pipeline.vae.enable_tiling()
    if options.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()


def deployed_shift(scheduler: Any, tokens: int) -> float:
    """The `shift` of `flow.sigma_grid` that the pipeline's own scheduler uses for pictures of
    `tokens` image tokens.

    Either a constant, or FLUX's dynamic one: mu is linear in the number of tokens, and a time shift
    by mu is SD3's with shift = exp(mu).
    """
    config = scheduler.config
    if not config.use_dynamic_shifting:
        return float(config.shift)
    slope = (config.max_shift - config.base_shift) / (
        config.max_image_seq_len - config.base_image_seq_len
    )
    mu = config.base_shift + slope * (tokens - config.base_image_seq_len)
    return math.exp(mu) if config.time_shift_type == "exponential" else mu


def loader_of(pipeline: Any) -> str | None:
    """The method of a pipeline, or of a part of it, that loads a saved adapter in plain diffusers;
    None: there is none, and a merged transformer is loaded."""
    if "transformer" in getattr(pipeline, "_lora_loadable_modules", ()):
        return "load_lora_weights"
    name = "load_lora_adapter"
    return f"transformer.{name}" if hasattr(pipeline.transformer, name) else None
