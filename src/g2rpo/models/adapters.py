"""Adapters (LoRA) as plain matrices. `adapter_files` reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, cat, finfo, float32, nn

from g2rpo.core.errors import UserError
from g2rpo.core.files import add_metadata

PREFIX, DOWN, UP = "transformer.", ".lora_A.weight", ".lora_B.weight"
ADAPTER_FILE = "pytorch_lora_weights.safetensors"
"""The file of a saved adapter."""
CONFIG = "lora_adapter_metadata"
"""Where diffusers keeps peft's config, as JSON, in the header."""
CLASS, OWN_ALPHA = "g2rpo.transformer", "g2rpo.lora_alpha"
"""In the header of an adapter of this package: the class of its transformer, and alpha, which is in
its weights."""
SIZES = ("ss_network_dim", "ss_network_alpha")
"""The rank and alpha that trainers read."""
ABOVE_KEY = "g2rpo.lora_above"
"""Of an adapter that was trained to act at early steps alone, the sigma above which it acts
(`policy.lora_above`)."""


Factors = tuple[Tensor, Tensor]
"""down and up."""


@dataclass(frozen=True)
class Adapter:
    """The change up @ down that a LoRA adds to the weights W [out, in, ...] of a transformer.

    `layers` has (down [rank, in, ...], up [out, rank, ...]) in float32 by a module's name in
    diffusers, with the factor alpha / rank multiplied into up; `scale` is that factor, 1 if modules
    differ. `metadata` is the file's header.

    ValueError for what is no such change: no layer, a rank of 0, shapes that do not match, or
    numbers that are not finite in float32.
    """

    layers: Mapping[str, Factors]
    metadata: Mapping[str, str] = field(default_factory=dict)
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("holds no factors of a LoRA")
        check_scale("alpha / rank", self.scale)
        for module, (down, up) in self.layers.items():
            whole = down.ndim == up.ndim >= 2 and min(*down.shape, *up.shape) > 0
            if not whole or down.shape[0] != up.shape[1] or max(up.shape[2:], default=1) > 1:
                found = f"{list(down.shape)} and {list(up.shape)}"
                raise ValueError(
                    f"{module}: should be [rank, in] and [out, rank] of one rank above 0, is {found}"
                )
            # no element of their product is larger; NaN compares as False
            most = len(down) * float(down.abs().max()) * float(up.abs().max())
            if not most <= finfo(float32).max:
                raise ValueError(
                    f"{module}: has values that are not finite in float32 (NaN, infinity or too large)"
                )

    @property
    def rank(self) -> int:
        """The largest of a module."""
        return max(len(down) for down, _ in self.layers.values())

    @property
    def above(self) -> float:
        """The sigma above which it acts; 0: everywhere."""
        return float(self.metadata.get(ABOVE_KEY, 0))

    def delta(self, module: str) -> Tensor:
        """What is added to a module's weight, as a matrix [out, in]."""
        down, up = self.layers[module]
        return up.flatten(1) @ down.flatten(1)

    def of(self, transformer: nn.Module) -> Adapter | None:
        """The part of it for the modules that are there; None if there is none."""
        there = {name for name, _ in transformer.named_modules()}
        layers = {module: pair for module, pair in self.layers.items() if module in there}
        return Adapter(layers, self.metadata, self.scale) if layers else None

    def plus(self, other: Adapter, sign: float = 1.0) -> Adapter:
        """The sum of the changes (sign -1: their difference), exactly: with the factors side by
        side, so that ranks add up."""
        layers = dict(self.layers)
        for module, (down, up) in other.layers.items():
            mine = layers.get(module)
            layers[module] = (
                (cat([mine[0], down]), cat([mine[1], sign * up], 1)) if mine else (down, sign * up)
            )
        both = Adapter(layers)
        sizes = dict.fromkeys(self.metadata.keys() & SIZES, str(both.rank))
        left_out = (CONFIG, OWN_ALPHA)
        kept = {key: text for key, text in self.metadata.items() if key not in left_out}
        return replace(both, metadata=kept | sizes)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """The factors by diffusers' endings, after `prefix`."""
        return {
            f"{prefix}{m}{end}": v
            for m, pair in self.layers.items()
            for end, v in zip((DOWN, UP), pair, strict=True)
        }

    def write(self, path: Path, prefix: str = "") -> None:
        """Writes the file; its bytes depend on nothing but matrices and text."""
        write_tensors(path, self.tensors(prefix), self.metadata)


@dataclass(frozen=True)
class AdapterFile:
    """How trained parameters are written as an adapter: by key, in their order, the factor by which
    each is multiplied; and the header of the file."""

    factors: Mapping[str, float]
    header: Mapping[str, str]

    def tensors(self, values: Iterable[Tensor]) -> dict[str, Tensor]:
        pairs = zip(self.factors.items(), values, strict=True)
        return {key: value if factor == 1 else value * factor for (key, factor), value in pairs}

    def values(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The parameters in a file."""
        return [
            tensors[key] if factor == 1 else tensors[key] / factor
            for key, factor in self.factors.items()
        ]


def own_header(transformer: str, rank: int, alpha: float) -> dict[str, str]:
    """What the header of an adapter of this package says; trainers read the rank, and an alpha that
    is equal to it."""
    return {
        CLASS: transformer,
        OWN_ALPHA: f"{alpha:g}",
        **dict.fromkeys(SIZES, str(rank)),
    }


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes tensors in the order of their names."""
    save_file({name: value.contiguous() for name, value in sorted(tensors.items())}, path)
    add_metadata(path, {"format": "pt", **metadata})


def check_scale(what: str, value: float) -> None:
    """ValueError for a factor of weights that is not above 0, or has no float32."""
    if not finfo(float32).tiny <= value <= finfo(float32).max:
        raise ValueError(f"{what} is {value:g}; it should be above 0 and a number of float32")


def shapes_in(transformer: nn.Module) -> dict[str, list[int]]:
    """The shapes of the weights that an adapter can change, by module."""
    own: dict[str, list[int]] = {}
    for name, module in transformer.named_modules():
        # quantised weights are no parameters
        if isinstance(module, nn.Linear) and "lora_" not in name:
            own[name.removesuffix(".base_layer")] = [module.out_features, module.in_features]
        elif isinstance(weight := module._parameters.get("weight"), Tensor) and weight.ndim > 1:
            own.setdefault(name, list(weight.shape))
    return own


def check_fit(place: str, adapter: Adapter, transformer: nn.Module, why: str = "") -> None:
    """UserError, which ends with `why`, for an adapter that does not fit the transformer."""
    own = shapes_in(transformer)
    sizes = {module: [len(up), *down.shape[1:]] for module, (down, up) in adapter.layers.items()}
    absent, kind = [module for module in sizes if module not in own], type(transformer).__name__
    other = [
        f"{module} {size} (the model: {own[module]})"
        for module, size in sizes.items()
        if own.get(module, size) != size
    ]
    if not absent and not other:
        return
    counted = [f"{len(absent)} are not in it, such as {', '.join(absent[:2])}"] if absent else []
    counted += [f"{len(other)} have another shape, such as {', '.join(other[:2])}"] if other else []
    near = (
        f" The model has {', '.join(get_close_matches(absent[0], own, 2, cutoff=0))}, ... It is of another model, or has a "
        "trainer's names that are not read: save it with diffusers' names."
        if absent
        else " It is of another model."
    )
    others = f"of its {len(sizes)} modules {'; '.join(counted)}.{near} {why}".rstrip()
    raise UserError(f"{place}: does not fit this {kind}: {others}")


def endings(modules: Collection[str], names: Iterable[str]) -> list[str]:
    """The shortest endings, as `policy.lora_targets` has them, that fit these modules and no others
    of `names`; a module whose whole name is an ending of others brings these along."""

    def tails(name: str) -> list[str]:
        parts = name.split(".")
        return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]

    every, mine = (Counter(tail for name in of for tail in tails(name)) for of in (names, modules))
    return sorted(
        {next((tail for tail in tails(m) if every[tail] == mine[tail]), m) for m in modules}
    )
