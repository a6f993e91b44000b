"""What tensors with shapes and no data need to run a policy's code: CUDA's autocast on a machine
without CUDA, and the values that depend on no weights: masks and positions, which some networks read
in a call."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from g2rpo.lab.plan.kernels import tensors_in


def listed() -> frozenset[str]:
    """The functions that compute in float32 under CUDA's autocast, and not all of them under the
    CPU's, by the header of the installed torch. Versions differ: RMS norms are computed in float32
    by 2.13, and were not by 2.11."""
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text(
        encoding="utf-8"
    )
    (block,) = re.findall(r"#define AT_FORALL_FP32\(_\)(.*?)\n\n", header, re.DOTALL)
    return frozenset(name for name in re.findall(r"_\((\w+)", block) if not name.startswith("_"))


FLOAT32_OPERATIONS = listed()
JOINED = {"cat", "stack", "index_copy"}
"""Functions for which the CPU's autocast copies narrower inputs to the widest dtype; CUDA's leaves
them alone."""
CONV2D = (F.conv2d, torch.conv2d)


class CudaAutocast(TorchFunctionMode):
    """While entered, or in a network's calls, the CPU's autocast uses CUDA's dtypes.

    RMS norms use the layer-norm operation, for its shapes: CUDA has one kernel for each, while the
    CPU computes RMS norms in many steps with intermediate results. CUDA's group norms copy
    interleaved channels apart, and its convolutions, whose weights are interleaved, copy them back;
    the CPU's do neither.
    """

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def apply_to(self, network: nn.Module) -> None:
        """Enters for every call of a module of `network`, including recomputation by gradient
        checkpointing."""
        for module in network.modules():
            module.register_forward_pre_hook(self._begin)
            # checkpointing ends recomputation by exceptions
            module.register_forward_hook(self._end, always_call=True)

    def _begin(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self.__enter__()

    def _end(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.__exit__(None, None, None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if torch.is_autocast_enabled("cpu"):
            if name in FLOAT32_OPERATIONS:
                args, kwargs = tree_map(_widened, (args, kwargs))
            elif name in JOINED:
                with torch.autocast("cpu", enabled=False):
                    return func(*args, **kwargs)
        if func in (F.group_norm, torch.group_norm):
            args = (args[0].contiguous(), *args[1:])
        if func in CONV2D and args[1].is_contiguous(memory_format=torch.channels_last):
            args = (args[0].contiguous(memory_format=torch.channels_last), *args[1:])
        return _rms_norm(*args, **kwargs) if func is F.rms_norm else func(*args, **kwargs)


def _widened(value: Any) -> Any:
    """The value in float32 if it is a tensor of half precision."""
    half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if half else value


def _rms_norm(
    x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return F.layer_norm(x, shape, weight, None, 0.0 if eps is None else eps)


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
