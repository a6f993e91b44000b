"""Kernels: which ones a call runs, with the bytes that live at a time, and how long they take on a
card: the roofline (Williams et al., 2009) at the rates that kernels reach."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from g2rpo.lab.plan.cards import Card

PRODUCTS, ATTENTION, BACKWARD, CONVOLUTIONS, MOVING = KINDS = (
    "products",
    "attention",
    "attention's gradient",
    "convolutions",
    "moving",
)
"""Kinds of kernels: products of matrices; attention in one kernel, and its backward pass;
convolutions; those that only read and write."""


@dataclass(frozen=True)
class Kernel:
    """One kernel: its kind, floating-point operations and their dtype, the bytes it reads and
    writes, by storage, and how many kernels of the model it stands for."""

    kind: str
    flops: float
    dtype: str
    reads: Mapping[int, int]
    writes: Mapping[int, int]
    times: int = 1


@dataclass(frozen=True)
class Rates:
    """What kernels reach of a datasheet's rates. `benchmarks.published_times` fits these numbers on
    half of the times that were published or measured, and tests them on the other half
    (docs/performance.md)."""

    hbm: float = 0.69
    """The share of its peak that a card of one TFLOP/s a watt with HBM reaches in products of
    matrices. Boards are limited by power: the more TFLOP/s they claim for a watt, the smaller the
    share."""
    hbm_power: float = 0.28
    gddr: float = 0.59
    """TFLOP/s a watt that boards with GDDR memory sustain."""
    most: float = 0.95
    """The share of cards with power to spare, such as GeForce."""
    attention: float = 0.87
    """The rate of attention, as a share of that of products."""
    flash2: float = 0.5
    """The share of that which FlashAttention 2, torch's "flash", reaches on Hopper (arXiv
    2407.08608: 35 % of its peak, where FlashAttention 3 and cuDNN reach 75 %)."""
    backward: float = 0.56
    """The share of the rate of attention that its gradient reaches on cards with GDDR memory: their
    multiprocessors have 100 KB of shared memory, for which FlashAttention 2 takes smaller tiles."""
    convolutions: float = 0.29
    bandwidth: float = 0.83
    compiled: float = 0.09
    """The share of the time between products that a compiled network still takes."""
    gap: float = 15e-6
    """Seconds that a kernel takes beside its work, until the next one runs."""
    launch: float = 22e-6
    """Seconds of the host for a kernel; a call of few rows waits for them."""
    launch_checkpointed: float = 40e-6
    """Likewise in a training pass with checkpointing, which runs more of Python. The median of three
    passes of two blocks (benchmarks/results/gpu_nvidia-h200_2026-11-27.json)."""
    models: float = 0.7
    """The rate of text encoders and rewards, which are not traced, as a share of that of products.
    Assumed."""

    def products(self, card: Card, dtype: str) -> float:
        """FLOP/s that products of matrices reach."""
        density = card.bfloat16 / card.watts
        share = self.hbm * density**-self.hbm_power if card.hbm else self.gddr / density
        return card.tflops(dtype) * 1e12 * min(self.most, share)

    def convolved(self, card: Card, dtype: str) -> float:
        """FLOP/s that convolutions reach. Those of float32 are in TF32 on NVIDIA's cards
        (torch.backends.cudnn.allow_tf32), at half of bfloat16's rate."""
        rate = self.products(card, dtype)
        if dtype == "float32" and card.name.startswith("NVIDIA"):
            rate = max(rate, self.products(card, "bfloat16") / 2)
        return rate * self.convolutions

    def moved(self, card: Card) -> float:
        """Bytes a second of its memory."""
        return card.bandwidth * 1e9 * self.bandwidth


RATES = Rates()
TIME_SPREAD = (0.84, 1.3)
"""Between these multiples of the plan lie nine of ten times that were held out."""
SLOWER_ON_HOPPER = ("auto", "flash", "flash2", "efficient", "math")
"""Kinds of `policy.attention` without the instructions of Hopper and newer. By itself torch takes
"flash" here."""


@dataclass(frozen=True)
class Roofline:
    """The kernels of one call; `fixed` are storages whose size does not depend on its rows."""

    kernels: tuple[Kernel, ...] = field(repr=False)
    fixed: frozenset[int] = field(default=frozenset(), repr=False)
    compiled: bool = False
    attention: str = "auto"
    checkpointed: bool = False
    """Whether it is a training pass with checkpointing."""
    streamed: float = 0.0
    """Bytes that come from host memory meanwhile (policy.offload)."""

    @property
    def flops(self) -> float:
        return sum(kernel.times * kernel.flops for kernel in self.kernels)

    @property
    def launches(self) -> int:
        return sum(kernel.times for kernel in self.kernels)

    def _kept(self, kernel: Kernel, rates: Rates) -> float:
        """The share of a kernel's time and launches that a compiler leaves."""
        return rates.compiled if self.compiled and kernel.kind == MOVING else 1.0

    def seconds(self, card: Card, rates: Rates = RATES, rows: float = 1.0) -> dict[str, float]:
        """By kind: each kernel's operations or bytes, whichever takes longer, and its gap. `rows`:
        how many times as many rows as were traced."""
        reached = {
            (kind, dtype): rates.convolved(card, dtype)
            if kind == CONVOLUTIONS
            else rates.products(card, dtype)
            for kind, dtype in {(kernel.kind, kernel.dtype) for kernel in self.kernels}
        }
        old = card.hopper and self.attention in SLOWER_ON_HOPPER
        forward = rates.attention * (rates.flash2 if old else 1.0)
        slower = {ATTENTION: forward, BACKWARD: forward * (1.0 if card.hbm else rates.backward)}
        found = dict.fromkeys(KINDS, 0.0)
        for kernel, size in zip(self.kernels, self._from_memory(card, rows), strict=True):
            rate = reached[kernel.kind, kernel.dtype] * slower.get(kernel.kind, 1.0)
            computed = kernel.flops * rows / rate
            moved, kept = size / rates.moved(card), self._kept(kernel, rates)
            found[kernel.kind] += kernel.times * max(computed, kept * moved)
            found[MOVING] += kernel.times * kept * rates.gap
        return found

    def copies(self, card: Card) -> float:
        """Seconds of what comes from host memory."""
        return self.streamed / (card.link * 1e9)

    def call(self, card: Card, rates: Rates = RATES, rows: float = 1.0) -> float:
        """Seconds of the call: of its kernels, of their launches or of copies, whichever take
        longest. A block's copy and its products both grow with its weights, so the sum over blocks
        of the longer of the two is nearly the longer sum."""
        launches = sum(kernel.times * self._kept(kernel, rates) for kernel in self.kernels)
        launch = rates.launch_checkpointed if self.checkpointed else rates.launch
        kernels = sum(self.seconds(card, rates, rows).values())
        return max(kernels, launches * launch, self.copies(card))

    def _from_memory(self, card: Card, rows: float) -> Iterator[float]:
        """Bytes of every kernel that its card's memory reads and writes: those that the cache has
        are not read again, and those that it holds need not be written before they are read."""
        cache, passed = card.cache * 1e6, 0.0
        seen: dict[int, float] = {}
        """By storage: the bytes that had passed when it was last used."""
        for kernel in self.kernels:
            missed = 0.0
            for sizes, written in ((kernel.reads, False), (kernel.writes, True)):
                for storage, traced in sizes.items():
                    size = traced if storage in self.fixed else traced * rows
                    held = (
                        2 * size <= cache
                        if written
                        else storage in seen and passed - seen[storage] + size <= cache
                    )
                    missed += 0.0 if held else size
                    passed += size
                    seen[storage] = passed
            yield missed


def fixed_storages(kernels: Sequence[Kernel], weights: frozenset[int]) -> frozenset[int]:
    """Storages that do not grow with a call's rows: weights, and what is computed from weights
    alone."""
    fixed = set(weights)
    for kernel in kernels:
        if kernel.reads and kernel.reads.keys() <= fixed:
            fixed |= kernel.writes.keys()
    return frozenset(fixed)


MADE_WITHOUT_READING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors of an operation's arguments or results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


class Meter(TorchDispatchMode):
    """While entered, records a `Kernel` for every operation that computes or copies (views are
    none), and counts the bytes of live storages that are allocated in it: `now`, and their maximum,
    `peak`; `streamed` is for who uses it.

    Storages of `existing` tensors are not counted. `times` returns how many kernels of the model
    the present one stands for. Works on real and on fake tensors.
    """

    def __init__(
        self, existing: Iterable[Tensor] = (), times: Callable[[], int] = lambda: 1
    ) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.times = times
        self.now = self.peak = self.streamed = 0
        self._numbers = itertools.count()
        # of live storages: a later one may get the address of one that died
        self._number: dict[int, int] = {}
        self.live: dict[int, int] = {self._number_of(tensor): 0 for tensor in existing}
        """Bytes by storage."""
        self.existing = frozenset(self.live)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given, made = self.sizes((args, kwargs)), self.sizes(out)
        for tensor in tensors_in(out):
            number = self._number_of(tensor)
            if number not in self.live:
                self.live[number] = tensor.untyped_storage().nbytes()
                self.now += self.live[number]
        self.peak = max(self.peak, self.now)
        name = func.overloadpacket.__name__
        view = not func._schema.is_mutable and made.keys() <= given.keys()
        if not view and name not in MADE_WITHOUT_READING:
            first = next(tensors_in(args), None)
            dtype = "" if first is None else str(first.dtype).removeprefix("torch.")
            kind, flops = _work(func, name, args, kwargs, out)
            self.kernels.append(Kernel(kind, flops, dtype, given, made, self.times()))
        return out

    def sizes(self, values: Any) -> dict[int, int]:
        """Bytes by storage; of an expanded tensor those that are there."""
        sizes: dict[int, int] = {}
        for tensor in tensors_in(values):
            size = min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
            number = self._number_of(tensor)
            sizes[number] = max(sizes.get(number, 0), size)
        return sizes

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


def _work(func: Any, name: str, args: tuple, kwargs: dict, out: Any) -> tuple[str, float]:
    """A kernel's kind and operations."""
    if "scaled_dot_product" in name:
        backward = "backward" in name
        query, key = args[1:3] if backward else args[:2]
        batch, heads, rows, width = query.shape
        products = 5 if backward else 2  # the backward pass computes the scores again
        kind = BACKWARD if backward else ATTENTION
        return kind, products * 2.0 * batch * heads * rows * key.shape[2] * width
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return MOVING, 0.0
    return CONVOLUTIONS if "convolution" in name else PRODUCTS, float(
        count(*args, **kwargs, out_val=out)
    )
