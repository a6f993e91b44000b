"""What a call does: its kernels, and the bytes that live at a time."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from g2rpo.lab.plan.rates import ATTENTION, CONVOLUTIONS, MOVING, PRODUCTS, Kernel

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
    `peak`.

    Storages of `existing` tensors are not counted. `times` returns how many kernels of the model
    the present one stands for. Works on real and on fake tensors.
    """

    def __init__(
        self, existing: Iterable[Tensor] = (), times: Callable[[], int] = lambda: 1
    ) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.times = times
        self.now = self.peak = 0
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
        return ATTENTION, products * 2.0 * batch * heads * rows * key.shape[2] * width
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return MOVING, 0.0
    return CONVOLUTIONS if "convolution" in name else PRODUCTS, float(
        count(*args, **kwargs, out_val=out)
    )
