"""The common part of policies of diffusers pipelines: loading, placement, the deployed shift, decoding, saving."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from g2rpo.errors import UserError
from g2rpo.flow import sigma_grid
from g2rpo.plain import refuse_hub_kernels
from g2rpo.policies.attention import BACKENDS, Attention
from g2rpo.policies.options import PolicyOptions
from g2rpo.policies.text import TextEncoders
from g2rpo.policies.tuning import Tuning, TuningMode
from g2rpo.runtime.sharding import Sharded
from g2rpo.types import Cond, Policy


@dataclass(frozen=True)
class Shapes:
    """Sizes of what a policy reads and writes: one latent, one prompt's conditioning, tokens, network rows an evaluation."""

    latent: tuple[int, ...]
    cond: Mapping[str, tuple[int, ...]]
    image_tokens: int
    text_tokens: int
    rows: int

    @property
    def latent_bytes(self) -> int:
        """Latents are float32 wherever they are kept."""
        return 4 * math.prod(self.latent)


class PipelinePolicy(Policy, ABC):
    """A `Policy` of a diffusers pipeline, with what adapters, sharding, plans and the demo need in addition. Subclasses define
    their pipeline, its defaults, the latents and the network call. `options` are the keywords of `PolicyOptions`. ValueError
    for a size that the model cannot have.
    """

    pipeline_class: ClassVar[str]
    """The class in diffusers."""
    lora_targets: ClassVar[Sequence[str]]
    guidance: ClassVar[float]
    tokens: ClassVar[int]
    """The defaults of lora_targets, guidance_scale and max_sequence_length."""
    unsupported: ClassVar[Sequence[str]] = ()
    """Options that this model lacks."""
    _for_loss = False

    def __init__(
        self, pipeline: Any, *, sharding: Sharded | None = None, text: TextEncoders | None = None, **options: Any
    ) -> None:
        o = self.options = PolicyOptions(**options)
        self.check_options(o)
        self.sharded = sharding is not None
        self.pipeline = pipeline
        self.guidance_scale = self.guidance if o.guidance_scale is None else o.guidance_scale
        self.max_sequence_length = o.max_sequence_length or self.tokens
        self.dtype, self._device = o.dtype, torch.device(o.device)
        self.check_size(o.height, o.width)
        self.text = text or self.encoders(pipeline, **options)
        self.tuning = Tuning(
            pipeline.transformer,
            o.tuning,
            rank=o.lora_rank,
            alpha=o.lora_alpha,
            targets=o.lora_targets or self.lora_targets,
            init=o.lora_init,
            seed=o.seed,
            dtype=o.dtype,
            device=self._device,
            keep_base=o.keep_base,
            sharding=sharding,
            quantized=o.quantize,
            autocast=o.autocast,
        )
        place(
            pipeline,
            dtype=o.dtype,
            device=self._device,
            vae_tiling=o.vae_tiling,
            gradient_checkpointing=o.gradient_checkpointing,
        )
        choose_attention(pipeline.transformer, o.attention)
        if o.compile:
            self.compile()

    @contextmanager
    def in_loss(self) -> Iterator[None]:
        """While entered, velocities are those of a loss."""
        self._for_loss = True
        try:
            yield
        finally:
            self._for_loss = False

    @property
    def truncates(self) -> bool:
        """Whether the network sees floor(1000 sigma)."""
        wanted = self.options.truncate_timesteps
        return wanted is True or (wanted == "rollout" and not self._for_loss)

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: Any) -> Self:
        """Loads the pipeline in a directory or of a hub id."""
        return cls(cls.load_pipeline(path, **options), **options)

    @classmethod
    def load_pipeline(cls, path: str | Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        """The pipeline in a directory or of a hub id, on the CPU, for a policy with these options."""
        import diffusers

        return load_pipeline(getattr(diffusers, cls.pipeline_class), path, dtype, options.get("tuning", "lora"))

    @classmethod
    def check_options(cls, options: PolicyOptions) -> None:
        """UserError for an option that this model lacks; nothing needs to be loaded."""
        for name in cls.unsupported:
            if getattr(options, name) not in (None, False):
                raise UserError(f"policy.{name}: a {cls.pipeline_class} has no such option; take it out")

    @classmethod
    @abstractmethod
    def encoders(cls, pipeline: Any, **options: Any) -> TextEncoders:
        """The text encoders of a policy with these options, usable before the policy is built."""

    @abstractmethod
    def check_size(self, height: int, width: int) -> None:
        """Raises ValueError for a picture size that the model cannot generate."""

    @property
    @abstractmethod
    def image_tokens(self) -> int:
        """Tokens of one picture."""

    @abstractmethod
    def shapes(self, clip_tokens: int) -> Shapes:
        """The sizes of a call; `clip_tokens` is the length to which the CLIP tokenizers pad."""

    def like(self, shapes: Shapes, rows: int) -> Cond:
        """Conditioning of these shapes without content."""
        return Cond({name: torch.zeros(rows, *shape, dtype=self.dtype) for name, shape in shapes.cond.items()})

    @staticmethod
    def blocks(transformer: Any) -> list[nn.Module]:
        """A transformer's blocks: the modules of its module lists."""
        return [block for blocks in _lists(transformer) for block in blocks]

    def compile(self, backend: str = "inductor") -> None:
        """Compiles the transformer's blocks with torch.compile, each where it stands, for sampling and training alike.

        All blocks of a kind share their graphs: one for sampling, one for training and one for the base model under adapters,
        whatever the number of rows and tokens, and another of each for calls of a single row.
        """
        for block in self.blocks(self.pipeline.transformer):
            block.compile(backend=backend, dynamic=True)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def autocast(self) -> bool:
        """Whether calls of the network run under autocast."""
        return self.dtype != torch.float32 and self.options.autocast

    @property
    def shift(self) -> float:
        """The pipeline's own time shift at this size."""
        return deployed_shift(self.pipeline.scheduler, self.image_tokens)

    @property
    def deployed(self) -> dict[str, Any]:
        """Arguments with which the pipeline itself samples as this policy does, besides size, steps and prompt."""
        return {"guidance_scale": self.guidance_scale}

    @property
    def lora_loader(self) -> str:
        """The method of the pipeline, or of a part of it, that loads a saved adapter in plain diffusers."""
        return "load_lora_weights" if hasattr(self.pipeline, "load_lora_weights") else "transformer.load_lora_adapter"

    def grid(self, num_steps: int) -> Tensor:
        """The sigmas [num_steps + 1] that sampling.shift=model means."""
        return sigma_grid(num_steps, self.shift)

    def encode(self, prompts: Sequence[str]) -> Cond:
        return self.text.encode(prompts)

    def trainable_parameters(self) -> list[nn.Parameter]:
        return list(self.tuning.named().values())

    def base(self) -> AbstractContextManager[None]:
        return self.tuning.base()

    def load(self, path: Path, strength: float = 1.0) -> None:
        """Loads tuned weights written by `save`; `strength` scales an adapter."""
        self.tuning.load(path, self.pipeline, strength)

    def save(self, directory: Path) -> Path:
        """Writes the tuned weights in diffusers' format; returns their path."""
        return self.tuning.save(directory)


def _lists(transformer: nn.Module) -> list[nn.ModuleList]:
    return [child for child in transformer.children() if isinstance(child, nn.ModuleList)]


def thin(transformer: nn.Module) -> list[int]:
    """Leaves the first and the last of every run of alike blocks; returns how many blocks each one stands for."""
    times = []
    for blocks in _lists(transformer):
        runs = [list(run) for _, run in itertools.groupby(blocks, _structure)]
        times += [count for run in runs for count in two_of(len(run))]
        kept = [block for run in runs for block in (run[0], *run[1:][-1:])]
        del blocks[:]
        blocks.extend(kept)
    return times


def _structure(block: nn.Module) -> Any:
    return type(block), [(name, weight.shape) for name, weight in block.named_parameters()]


def two_of(blocks: int) -> list[int]:
    """How many of `blocks` equal blocks the first and the last represent: at the peak one block is computing and the others
    have only saved activations, so the first represents all but the last."""
    return [blocks - 1, 1] if blocks > 1 else [1] * blocks


def choose_attention(transformer: Any, kind: Attention) -> None:
    """Has a diffusers transformer compute its attention so; UserError if its attention cannot be chosen."""
    if kind == "auto":
        return
    from diffusers.models.attention_dispatch import attention_backend

    with attention_backend(BACKENDS[kind]):  # it restores the backend of all other models, which the next line would change
        transformer.set_attention_backend(BACKENDS[kind])
    if not any(getattr(getattr(module, "processor", None), "_attention_backend", None) for module in transformer.modules()):
        raise UserError(f"policy.attention={kind}: a {type(transformer).__name__} has no choice of attention; take it out")


def load_pipeline(pipeline_class: Any, path: str | Path, dtype: torch.dtype, tuning: TuningMode = "lora") -> Any:
    """A pipeline in `dtype` from a directory or a hub id; parts that its index leaves empty (SD3 without T5) stay empty.

    A fully trained transformer is loaded as it is stored: rounding to `dtype` first would change the initial master weights.
    What is loaded in its stored dtype is mapped from its file, of which the processes of a machine share one copy.
    """
    from transformers import PreTrainedConfig

    index = pipeline_class.load_config(str(path))
    empty = {name: None for name, entry in index.items() if entry == [None, None]}
    for name, entry in index.items():
        if isinstance(entry, list) and entry[0] == "transformers":
            with suppress(OSError):  # no config.json: no model, but a tokenizer
                refuse_hub_kernels(PreTrainedConfig.get_config_dict(str(path), subfolder=name)[0], f"{name}/config.json")
    dtypes = {"transformer": stored_dtype(path) if tuning == "full" else dtype, "default": dtype}
    pipeline = pipeline_class.from_pretrained(str(path), dtype=dtypes, use_safetensors=True, **empty)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def stored_dtype(path: str | Path) -> torch.dtype:
    """The dtype of a pipeline's transformer, on disk or in the hub's cache; float32 if it has several, or no such file."""
    from huggingface_hub import try_to_load_from_cache
    from safetensors import safe_open

    folder = Path(path) / "transformer"
    if not folder.is_dir():
        found = try_to_load_from_cache(str(path), "transformer/config.json")
        folder = Path(found).parent if isinstance(found, str) else folder
    kinds: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            kinds |= {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118  no mapping
    known = {frozenset(["BF16"]): torch.bfloat16, frozenset(["F16"]): torch.float16}
    return known.get(frozenset(kinds), torch.float32)


def place(pipeline: Any, *, dtype: torch.dtype, device: torch.device, vae_tiling: bool, gradient_checkpointing: bool) -> None:
    """Moves the transformer (whose dtypes `Tuning` sets) and the VAE, frozen in `dtype`, to `device`."""
    pipeline.vae.requires_grad_(False).eval().to(dtype)
    pipeline.transformer.to(device)
    pipeline.vae.to(device)
    if all(weight.ndim <= 4 for weight in pipeline.vae.parameters()):
        pipeline.vae.to(memory_format=torch.channels_last)  # convolutions on interleaved channels are faster, on CPU and GPU
    pipeline.transformer.eval()  # the models have no dropout; eval keeps adapters without it too
    if vae_tiling:
        pipeline.vae.enable_tiling()
    if gradient_checkpointing:
        pipeline.transformer.enable_gradient_checkpointing()


def decode_latents(vae: Any, latents: Tensor, published: bool = False) -> Tensor:
    """Images [B, 3, H, W], float32 in [0, 1], of unpacked latents [B, channels, h, w] at sigma = 0.

    `published` is how the published code of G2RPO decodes: a bfloat16 VAE under autocast, which on a GPU computes its norms in
    float32, and x / 2 + 1 / 2 in the dtype of the VAE's output, as diffusers' image processor does.
    """
    latents = latents / vae.config.scaling_factor + vae.config.shift_factor
    autocast = published and vae.dtype != torch.float32 and not latents.is_meta  # torch has none for the meta device
    with torch.autocast(latents.device.type, vae.dtype) if autocast else nullcontext():
        images = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
    return ((images if published else images.float()) / 2 + 0.5).clamp(0, 1).float()


def deployed_shift(scheduler: Any, tokens: int) -> float:
    """The `shift` of `flow.sigma_grid` that the pipeline's own scheduler uses for pictures of `tokens` image tokens.

    Either a constant, or FLUX's dynamic one: mu is linear in the number of tokens, and a time shift by mu is SD3's
    with shift = exp(mu).
    """
    config = scheduler.config
    if not config.use_dynamic_shifting:
        return float(config.shift)
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    mu = config.base_shift + slope * (tokens - config.base_image_seq_len)
    return math.exp(mu) if config.time_shift_type == "exponential" else mu
