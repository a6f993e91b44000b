"""The roofline of network calls (Williams et al., 2009): operations over the rate at which a card computes, bytes over the rate
at which it reads and writes, kernel by kernel.

A call of the whole model is traced on tensors without data, so casts of autocast, adapters and dequantised weights count as
they are. It is a lower bound: every kernel at the given rates, none waiting for its launch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from g2rpo.assembly.blueprint import Blueprint, shapes_of
from g2rpo.config.schema import Config
from g2rpo.core.types import Plan
from g2rpo.lab.plan.autocast import CudaAutocast
from g2rpo.lab.plan.cards import Card
from g2rpo.lab.plan.flops import FLOAT8
from g2rpo.lab.plan.trace import inputs, shallow_policy, training_pass

PRODUCTS, ATTENTION, NORMS, CASTS, REST = "products", "attention", "norms", "casts", "elementwise"
"""Kinds of kernels: matrix products; attention in one kernel; layer and RMS norms; changes of dtype; all others."""
MADE_WITHOUT_READING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass(frozen=True)
class Kernel:
    """One kernel: its kind, floating-point operations and their dtype, and the bytes it reads and writes, by storage."""

    kind: str
    flops: float
    dtype: str
    reads: Mapping[int, int]
    writes: Mapping[int, int]

    @property
    def moved(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())


class Kernels(TorchDispatchMode):
    """While entered, records a `Kernel` for every operation that computes or copies. Views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self._alive: list[Any] = []  # a storage that dies would give its number to another

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given, made = self._sizes((args, kwargs)), self._sizes(out)
        if not func._schema.is_mutable and made.keys() <= given.keys():
            return out
        name = func.overloadpacket.__name__
        if name not in MADE_WITHOUT_READING:
            kind, flops, dtype = _work(func, name, args, kwargs, out)
            self.kernels.append(Kernel(kind, flops, dtype, given, made))
        return out

    def _sizes(self, values: Any) -> dict[int, int]:
        """Bytes by storage; of an expanded tensor those that are there."""
        sizes: dict[int, int] = defaultdict(int)
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._alive.append(storage)
                size = min(leaf.numel() * leaf.element_size(), storage.nbytes())
                sizes[storage._cdata] = max(sizes[storage._cdata], size)
        return dict(sizes)


def _work(func: Any, name: str, args: tuple, kwargs: dict, out: Any) -> tuple[str, float, str]:
    """A kernel's kind, operations and their dtype."""
    first = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)), None)
    dtype = "float8" if first is not None and first.element_size() == 1 else str(getattr(first, "dtype", "")).split(".")[-1]
    if "scaled_dot_product" in name:
        return ATTENTION, _attention(args, backward="backward" in name), dtype
    if (count := FLOAT8.get(func.overloadpacket)) is not None:
        return PRODUCTS, float(count(args[0].shape, args[1].shape)), dtype
    if (count := flop_registry.get(func.overloadpacket)) is not None:
        return PRODUCTS, float(count(*args, **kwargs, out_val=out)), dtype
    if name == "_to_copy":
        return CASTS, 0.0, dtype
    return (NORMS if "norm" in name else REST), 0.0, dtype


def _attention(args: tuple, backward: bool) -> float:
    """Two products of queries, keys and values; five in the backward pass, which computes the scores again."""
    query, key = args[1:3] if backward else args[:2]
    batch, heads, rows, width = query.shape
    return (5 if backward else 2) * 2.0 * batch * heads * rows * key.shape[2] * width


@dataclass(frozen=True)
class Reached:
    """The shares of a card's rates that kernels reach: products of matrices, attention, reading and writing."""

    products: float
    attention: float
    bandwidth: float


PEAK = Reached(1.0, 1.0, 1.0)
USUAL = Reached(0.7, 0.4, 0.85)
"""Assumed: what large kernels of cuBLAS, FlashAttention 2 and elementwise loops are reported to reach on an H100."""


@dataclass(frozen=True)
class Roofline:
    """The kernels of one call."""

    kernels: tuple[Kernel, ...] = field(repr=False)

    @property
    def flops(self) -> float:
        return sum(kernel.flops for kernel in self.kernels)

    def bytes(self, *kinds: str) -> int:
        return sum(kernel.moved for kernel in self.kernels if kernel.kind in kinds)

    def seconds(self, card: Card, reached: Reached = PEAK) -> dict[str, float]:
        """By kind: each kernel's operations or bytes, whichever takes longer."""
        found = dict.fromkeys((PRODUCTS, ATTENTION, NORMS, CASTS, REST), 0.0)
        for kernel in self.kernels:
            share = reached.attention if kernel.kind == ATTENTION else reached.products
            computed = kernel.flops / (card.tflops(kernel.dtype) * 1e12 * share)
            found[kernel.kind] += max(computed, kernel.moved / (card.bandwidth * 1e9 * reached.bandwidth))
        return found

    def fused(self) -> Roofline:
        """What a compiler could leave at best: between two products, one kernel reads what comes from outside it once, and
        writes once what is used outside it."""
        products = [kernel for kernel in self.kernels if kernel.kind in (PRODUCTS, ATTENTION)]
        stages: dict[int, list[Kernel]] = defaultdict(list)
        for stage, kernel in zip(_stages(self.kernels), self.kernels, strict=True):
            if kernel.kind not in (PRODUCTS, ATTENTION):
                stages[stage].append(kernel)
        read_by = _readers(products, stages)
        return Roofline((*products, *(_one(stage, kernels, read_by) for stage, kernels in stages.items())))


def _stages(kernels: Iterable[Kernel]) -> list[int]:
    """How many products come before each kernel on the longest way to it."""
    of_storage: dict[int, int] = {}
    found = []
    for kernel in kernels:
        stage = max((of_storage.get(storage, 0) for storage in kernel.reads), default=0)
        found.append(stage)
        of_storage |= dict.fromkeys(kernel.writes, stage + (kernel.kind in (PRODUCTS, ATTENTION)))
    return found


def _readers(products: Iterable[Kernel], stages: Mapping[int, Iterable[Kernel]]) -> dict[int, set[int]]:
    """By storage, the stages that read it; -1 stands for products."""
    found: dict[int, set[int]] = defaultdict(set)
    for stage, kernels in {-1: products, **stages}.items():
        for kernel in kernels:
            for storage in kernel.reads:
                found[storage].add(stage)
    return found


def _one(stage: int, kernels: Iterable[Kernel], read_by: Mapping[int, set[int]]) -> Kernel:
    reads: dict[int, int] = {}
    writes: dict[int, int] = {}
    for kernel in kernels:
        reads |= {storage: size for storage, size in kernel.reads.items() if storage not in writes}
        writes |= kernel.writes
    kept = {storage: size for storage, size in writes.items() if read_by.get(storage, set()) != {stage}}
    return Kernel(REST, 0.0, "", reads, kept)


def rollout_call(blueprint: Blueprint, config: Config, rows: int) -> Roofline:
    """Of a rollout's network call with `rows` evaluations, on a GPU."""
    return _traced(blueprint, config, lambda policy, shapes: policy.velocity(*inputs(policy, shapes, rows)), grad=False)


def training_call(blueprint: Blueprint, config: Config, rows: int, plans: Iterable[Plan]) -> Roofline:
    """Of a training pass over `rows` latents of `plans`, forward and backward, on a GPU."""
    return _traced(blueprint, config, lambda policy, shapes: training_pass(policy, config, shapes, plans, rows), grad=True)


def _traced(blueprint: Blueprint, config: Config, call: Callable[[Any, Any], object], grad: bool) -> Roofline:
    with shallow_policy(blueprint, config, whole=True) as (policy, _):
        shapes = shapes_of(policy, blueprint)
        CudaAutocast().apply_to(policy.pipeline.transformer)
        with torch.set_grad_enabled(grad), Kernels() as traced:
            call(policy, shapes)
    return Roofline(tuple(traced.kernels))
