"""The roofline of network calls (Williams et al., 2009): operations over the rate at which a card computes, bytes over the rate
at which it reads and writes, kernel by kernel.

Calls are traced on tensors without data, so casts of autocast, adapters and dequantised weights count as they are.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from g2rpo.lab.plan.cards import Card

PRODUCTS, ATTENTION, NORMS, CASTS, REST = "products", "attention", "norms", "casts", "elementwise"
"""Kinds of kernels: matrix products; attention in one kernel; layer and RMS norms; changes of dtype; all others."""
FLOAT8_PRODUCT = getattr(torch.ops.aten, "_scaled_mm_v2", None)
"""The product of `policies.quantized.Float8Linear`, for which torch's counter has no formula."""
MADE_WITHOUT_READING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass(frozen=True)
class KernelCost:
    """One kernel: its kind, floating-point operations and their dtype, the bytes it reads and writes, by storage, and how many
    kernels of the model it stands for."""

    kind: str
    flops: float
    dtype: str
    reads: Mapping[int, int]
    writes: Mapping[int, int]
    times: int = 1

    @property
    def moved(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())


class Meter(TorchDispatchMode):
    """While entered, records a `KernelCost` for every operation that computes or copies (views are none), and counts the
    bytes of live storages that are allocated in it: `now`, and their maximum, `peak`.

    Storages of `existing` tensors are not counted. `times` returns how many kernels of the model the present one stands for.
    Works on real and on fake tensors.
    """

    def __init__(self, existing: Iterable[Tensor] = (), times: Callable[[], int] = lambda: 1) -> None:
        super().__init__()
        self.kernels: list[KernelCost] = []
        self.times = times
        self.now = self.peak = 0
        self._numbers = itertools.count()
        self._number: dict[int, int] = {}  # of live storages: a later one may get the address of one that died
        self.live: dict[int, int] = {self._number_of(tensor): 0 for tensor in existing}
        """Bytes by storage."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and (number := self._number_of(leaf)) not in self.live:
                self.live[number] = leaf.untyped_storage().nbytes()
                self.now += self.live[number]
        self.peak = max(self.peak, self.now)
        given, made = self.sizes((args, kwargs)), self.sizes(out)
        name = func.overloadpacket.__name__
        view = not func._schema.is_mutable and made.keys() <= given.keys()
        if not view and name not in MADE_WITHOUT_READING:
            kind, flops, dtype = _work(func, name, args, kwargs, out)
            self.kernels.append(KernelCost(kind, flops, dtype, given, made, self.times()))
        return out

    def sizes(self, values: Any) -> dict[int, int]:
        """Bytes by storage; of an expanded tensor those that are there."""
        sizes: dict[int, int] = defaultdict(int)
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                size = min(leaf.numel() * leaf.element_size(), leaf.untyped_storage().nbytes())
                number = self._number_of(leaf)
                sizes[number] = max(sizes[number], size)
        return dict(sizes)

    def multiply(self, numbers: Iterable[int], times: int) -> None:
        """Counts each live storage of `numbers` `times` times, because it represents as many."""
        for number in self.live.keys() & set(numbers):
            self.now += self.live[number] * (times - 1)
            self.live[number] *= times
        self.peak = max(self.peak, self.now)

    def _number_of(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._number:
            self._number[storage._cdata] = next(self._numbers)
            weakref.finalize(storage, self._died, storage._cdata).atexit = False
        return self._number[storage._cdata]

    def _died(self, address: int) -> None:
        self.now -= self.live.pop(self._number.pop(address), 0)


def _work(func: Any, name: str, args: tuple, kwargs: dict, out: Any) -> tuple[str, float, str]:
    """A kernel's kind, operations and their dtype."""
    first = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)), None)
    dtype = str(getattr(first, "dtype", "")).removeprefix("torch.").split("_")[0]  # float8 of every layout is one
    if "scaled_dot_product" in name:
        return ATTENTION, _attention(args, backward="backward" in name), dtype
    if func.overloadpacket is FLOAT8_PRODUCT:
        return PRODUCTS, 2.0 * args[0].shape[0] * args[0].shape[1] * args[1].shape[1], dtype
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
    """The shares of a card's rates that kernels reach: products of matrices, attention, reading and writing; and, whole, models
    that are not traced (text encoders, rewards). `launch`: seconds of the host for each kernel."""

    products: float
    attention: float
    bandwidth: float
    models: float = 1.0
    launch: float = 0.0


PEAK = Reached(1.0, 1.0, 1.0)
USUAL_SHARES = Reached(0.7, 0.4, 0.85, 0.4, 6e-6)
"""Assumed: what large kernels of cuBLAS, FlashAttention 2 and elementwise loops are reported to reach on an H100, and the
host's time for a call of an operator. docs/performance.md compares the result with published times."""


@dataclass(frozen=True)
class Roofline:
    """The kernels of one call."""

    kernels: tuple[KernelCost, ...] = field(repr=False)

    @property
    def flops(self) -> float:
        return sum(kernel.times * kernel.flops for kernel in self.kernels)

    @property
    def launches(self) -> int:
        return sum(kernel.times for kernel in self.kernels)

    def bytes(self, *kinds: str) -> int:
        return sum(kernel.times * kernel.moved for kernel in self.kernels if kernel.kind in kinds)

    def seconds(self, card: Card, reached: Reached = PEAK) -> dict[str, float]:
        """By kind: each kernel's operations or bytes, whichever takes longer."""
        found = dict.fromkeys((PRODUCTS, ATTENTION, NORMS, CASTS, REST), 0.0)
        for kernel in self.kernels:
            share = reached.attention if kernel.kind == ATTENTION else reached.products
            computed = kernel.flops / (card.tflops(kernel.dtype) * 1e12 * share)
            moved = kernel.moved / (card.bandwidth * 1e9 * reached.bandwidth)
            found[kernel.kind] += kernel.times * max(computed, moved)
        return found

    def call(self, card: Card, reached: Reached) -> float:
        """Seconds of the call: of its kernels, or of their launches if these take longer."""
        return max(sum(self.seconds(card, reached).values()), self.launches * reached.launch)

    def fused(self) -> Roofline:
        """What a compiler could leave at best: between two products, one kernel reads what comes from outside it once, and
        writes once what is used outside it."""
        products = [kernel for kernel in self.kernels if kernel.kind in (PRODUCTS, ATTENTION)]
        stages: dict[int, list[KernelCost]] = defaultdict(list)
        for stage, kernel in zip(_stages(self.kernels), self.kernels, strict=True):
            if kernel.kind not in (PRODUCTS, ATTENTION):
                stages[stage].append(kernel)
        read_by = _readers(products, stages)
        return Roofline((*products, *(_one(stage, kernels, read_by) for stage, kernels in stages.items())))


def _stages(kernels: Iterable[KernelCost]) -> list[int]:
    """How many products come before each kernel on the longest way to it."""
    of_storage: dict[int, int] = {}
    found = []
    for kernel in kernels:
        stage = max((of_storage.get(storage, 0) for storage in kernel.reads), default=0)
        found.append(stage)
        of_storage |= dict.fromkeys(kernel.writes, stage + (kernel.kind in (PRODUCTS, ATTENTION)))
    return found


def _readers(products: Iterable[KernelCost], stages: Mapping[int, Iterable[KernelCost]]) -> dict[int, set[int]]:
    """By storage, the stages that read it; -1 stands for products."""
    found: dict[int, set[int]] = defaultdict(set)
    for stage, kernels in {-1: products, **stages}.items():
        for kernel in kernels:
            for storage in kernel.reads:
                found[storage].add(stage)
    return found


def _one(stage: int, kernels: Sequence[KernelCost], read_by: Mapping[int, set[int]]) -> KernelCost:
    reads: dict[int, int] = {}
    writes: dict[int, int] = {}
    for kernel in kernels:
        reads |= {storage: size for storage, size in kernel.reads.items() if storage not in writes}
        writes |= kernel.writes
    kept = {storage: size for storage, size in writes.items() if read_by.get(storage, set()) != {stage}}
    return KernelCost(REST, 0.0, "", reads, kept, max(kernel.times for kernel in kernels))
