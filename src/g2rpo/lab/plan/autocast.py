"""CUDA's autocast on a machine without CUDA, for tensors that have shapes and no data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

FLOAT32_OPERATIONS = {
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm",
    "nuclear_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
    "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
    "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d",
    "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d",
    "upsample_bicubic2d",
}  # fmt: skip
"""Functions that compute in float32 under CUDA's autocast, and not all of them under the CPU's."""
SUMS = {"prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "sum"}
"""Functions whose results are float32 there."""
JOINED = {"cat", "stack", "index_copy"}
"""Functions for which the CPU's autocast copies narrower inputs to the widest dtype; CUDA's leaves them alone."""


class CudaAutocast(TorchFunctionMode):
    """While entered, or in a network's calls, the CPU's autocast uses CUDA's dtypes.

    The lists are those of torch's ATen/autocast_mode.h. RMS norms use the layer-norm operation, for its shapes: CUDA has one
    kernel for each, while the CPU computes RMS norms in many steps with intermediate results.
    """

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def apply_to(self, network: nn.Module) -> None:
        """Enters for every call of a module of `network`, including recomputation by gradient checkpointing."""
        for module in network.modules():
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(self._end, always_call=True)  # checkpointing ends recomputation by exceptions

    def _begin(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self.__enter__()

    def _end(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if torch.is_autocast_enabled("cpu"):
            if name in FLOAT32_OPERATIONS:
                args, kwargs = tree_map(_widened, (args, kwargs))
            elif name in SUMS and _widened(args[0]) is not args[0]:
                kwargs = {"dtype": torch.float32, **kwargs}
            elif name in JOINED:
                with torch.autocast("cpu", enabled=False):
                    return func(*args, **kwargs)
        return _rms_norm(*args, **kwargs) if func is F.rms_norm else func(*args, **kwargs)


def _widened(value: Any) -> Any:
    """The value in float32 if it is a tensor of half precision."""
    half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if half else value


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return F.layer_norm(x, shape, weight, None, 0.0 if eps is None else eps)
