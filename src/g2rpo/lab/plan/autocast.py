"""CUDA's autocast on a machine without CUDA, for tensors that have shapes and no data."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


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
CONVOLUTIONS = (F.conv2d, torch.conv2d)


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
        if func in CONVOLUTIONS and args[1].is_contiguous(memory_format=torch.channels_last):
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
