"""Values of fake tensors that depend on no weights: masks and positions, which some networks read
in a call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from g2rpo.lab.plan.meter import tensors_in

MOST_ELEMENTS = 2**22
"""Elements of the largest tensor whose values are kept; masks of pairs of tokens are larger, and no
code reads them."""


class _Lists(TorchFunctionMode):
    """While entered, `torch.tensor` takes lists of fake numbers, which it would read where they
    lie."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        options = kwargs or {}
        listed = func is torch.tensor and isinstance(args[0], list | tuple)
        if listed and any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(args[0])):
            return _stacked(args[0]).to(options.get("device"), options.get("dtype"))
        return func(*args, **options)


def _stacked(values: Any) -> Tensor:
    if isinstance(values, list | tuple):
        return torch.stack([_stacked(value) for value in values])
    return torch.as_tensor(values)


class KnownValues(TorchDispatchMode):
    """While entered within a FakeTensorMode, keeps the values of fake tensors that are computed
    from numbers alone, and answers by them where shapes are not enough: a number that is read, the
    rows that a mask selects.
    """

    def __init__(self) -> None:
        super().__init__()
        self._real: dict[int, torch.UntypedStorage] = {}
        """By fake storage, so that views have the values of what they view."""
        self._theirs = FakeTensor.tolist  # an operation for every number, which takes minutes
        self._lists = _Lists()

    def __enter__(self) -> Any:
        def tolist(fake: FakeTensor) -> Any:
            if not self._knows(fake):
                return self._theirs(fake)
            with _disable_current_modes():
                return self._value(fake).tolist()

        FakeTensor.tolist = tolist  # type: ignore[method-assign, assignment]
        self._lists.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        FakeTensor.tolist = self._theirs  # type: ignore[method-assign]
        self._lists.__exit__(*error)
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known = torch.Tag.nondeterministic_seeded not in func.tags and self._knows((args, kwargs))
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if known:
                return tree_map_only(Tensor, self._fake, self._compute(func, args, kwargs))
            if func is torch.ops.aten.index.Tensor and self._knows(
                [each for each in args[1] if _selects(each)]
            ):
                return func(args[0], [index for each in args[1] for index in self._positions(each)])
            raise
        if func._schema.is_mutable and not known:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in tensors_in(value):
                        self._real.pop(tensor.untyped_storage()._cdata, None)
        elif known and all(tensor.numel() <= MOST_ELEMENTS for tensor in tensors_in(out)):
            for tensor, real in zip(
                tensors_in(out), tensors_in(self._compute(func, args, kwargs)), strict=True
            ):
                self._keep(tensor, real)
        return out

    def _knows(self, values: Any) -> bool:
        return all(
            _is_real(tensor) or tensor.untyped_storage()._cdata in self._real
            for tensor in tensors_in(values)
        )

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        with _disable_current_modes():
            return func(
                *tree_map_only(Tensor, self._value, args),
                **tree_map_only(Tensor, self._value, kwargs),
            )

    def _value(self, fake: Tensor) -> Tensor:
        if _is_real(fake):
            return fake
        storage = self._real[fake.untyped_storage()._cdata]
        return torch.empty(0, dtype=fake.dtype).set_(
            storage, fake.storage_offset(), fake.size(), fake.stride()
        )

    def _keep(self, fake: Tensor, real: Tensor) -> None:
        """Keeps the values of a new storage; those of a view, or of a tensor that was written to,
        are there."""
        storage = fake.untyped_storage()
        if storage._cdata not in self._real and not fake.storage_offset():
            with _disable_current_modes():
                same = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype).copy_(real)
            self._real[storage._cdata] = same.untyped_storage()
            weakref.finalize(storage, self._real.pop, storage._cdata, None).atexit = False

    def _fake(self, real: Tensor) -> Tensor:
        fake = torch.empty(real.shape, dtype=real.dtype)
        self._keep(fake, real)
        return fake

    def _positions(self, index: Any) -> Sequence[Any]:
        """An index; of a mask, the positions where it is true."""
        if not _selects(index):
            return [index]
        return [
            self._fake(each)
            for each in self._compute(torch.ops.aten.nonzero_numpy.default, (index,), {})
        ]


def _is_real(tensor: Tensor) -> bool:
    """Whether it is a real tensor, made of a list of numbers, that becomes a fake one."""
    return not isinstance(tensor, FakeTensor)


def _selects(index: Any) -> bool:
    return index is not None and index.dtype == torch.bool
