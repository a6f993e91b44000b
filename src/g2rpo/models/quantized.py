"""Frozen weights in one byte or half a byte each, so that a LoRA fits on smaller cards.

Adapters on a quantised base are QLoRA's idea (arXiv 2305.14314). int8 needs torch alone; NF4 is
bitsandbytes', which has a kernel for it.

The layers are our own: torchao's int8 has the same errors, but keeps each weight dense until the
backward pass; bitsandbytes' layers keep 16 bits on the meta device, where plans count bytes
(docs/performance.md).
"""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Quantize = Literal["none", "int8", "nf4"]


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is frozen and quantised. Gradients of inputs use the quantised
    weight.

    The tensors of the weight are buffers. The weight of `linear` is quantised on `device` and stays
    there.
    """

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.dtype = linear.weight.dtype
        for name, part in self.pack(linear.weight.detach().to(device)).items():
            self.register_buffer(name, part)

    @abstractmethod
    def pack(self, weight: Tensor) -> Mapping[str, Tensor]:
        """The tensors that store a weight, by name."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The quantised weight in the layer's dtype."""

    def product(self, x: Tensor) -> Tensor:
        """The layer's output, without a gradient."""
        return F.linear(x, self.dense(), self.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)  # autocast may hand over float32
        return _Product.apply(x, self) if torch.is_grad_enabled() else self.product(x)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """For libraries that read a layer's shape, dtype and device; computed at each access."""
        return self.dense()


class _Product(torch.autograd.Function):
    """Recomputes the dense weight in the backward pass, so that no dense copy is stored until
    then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.dense(), None


class Int8Linear(QuantizedLinear):
    """A whole number of a byte a weight, and a scale for each output; products in the layer's
    dtype."""

    codes: Tensor
    scale: Tensor

    def pack(self, weight: Tensor) -> Mapping[str, Tensor]:
        # not 0, because it is a divisor
        largest = weight.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.bfloat16).tiny)
        # rounded first, since codes refer to the stored scale
        scale = (largest.float() / 127.5).to(weight.dtype)
        return {
            "codes": (weight.float() / scale).round().clamp(-128, 127).to(torch.int8),
            "scale": scale,
        }

    def dense(self) -> Tensor:
        return self.codes.to(self.dtype).mul_(self.scale)


class NF4Linear(QuantizedLinear):
    """Four bits a weight, a scale for each 64 of them, and those scales in a byte each; products in
    the layer's dtype."""

    codes: Tensor
    absmax: Tensor
    offset: Tensor
    values: Tensor
    absmax_scale: Tensor
    absmax_values: Tensor

    def pack(self, weight: Tensor) -> Mapping[str, Tensor]:
        from bitsandbytes.functional import create_dynamic_map, name2qmap, quantize_4bit

        # made by the first call for all later ones, and a plan's is on the meta device
        if "dynamic" not in name2qmap:
            with torch.device("cpu"):
                name2qmap["dynamic"] = create_dynamic_map()
        codes, state = quantize_4bit(
            weight, blocksize=64, compress_statistics=True, quant_type="nf4"
        )
        scales = {
            "absmax": state.absmax,
            "absmax_scale": state.state2.absmax,
            "absmax_values": state.state2.code,
        }
        return {"codes": codes, "values": state.code, "offset": state.offset, **scales}

    def dense(self) -> Tensor:
        from bitsandbytes.functional import QuantState, dequantize_4bit

        scales = QuantState(
            self.absmax_scale, code=self.absmax_values, blocksize=256, dtype=torch.float32
        )
        shape = torch.Size((self.out_features, self.in_features))
        state = QuantState(
            self.absmax, shape, self.values, 64, quant_type="nf4", dtype=self.dtype, offset=self.offset, state2=scales
        )  # fmt: skip
        return dequantize_4bit(self.codes, state)


QUANTIZED_LINEARS: Mapping[str, type[QuantizedLinear]] = {
    "int8": Int8Linear,
    "nf4": NF4Linear,
}


def quantize(
    transformer: nn.Module, how: Quantize, device: torch.device, kept: torch.device | None = None
) -> None:
    """Quantises the linear layers of a transformer's blocks, except adapters. Layers outside the
    blocks are small and stay.

    Layers go to `device` one at a time and are quantised there, so the device never holds all
    weights in their old dtype; they are `kept` there, or elsewhere.
    """
    for path, linear in list(linears_of_blocks(transformer)):
        transformer.set_submodule(path, QUANTIZED_LINEARS[how](linear, device).to(kept or device))


def linears_of_blocks(transformer: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for group, blocks in transformer.named_children():
        if isinstance(blocks, nn.ModuleList):
            for path, module in blocks.named_modules():
                if isinstance(module, nn.Linear) and "lora_" not in path:
                    yield f"{group}.{path}", module


def is_quantized(model: nn.Module) -> bool:
    """Whether a layer of the model is quantised."""
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def weights_of(model: nn.Module) -> int:
    """The number of weights of a model without adapters, quantised or not."""
    stored = sum(
        m.in_features * m.out_features for m in model.modules() if isinstance(m, QuantizedLinear)
    )
    return stored + sum(p.numel() for name, p in model.named_parameters() if "lora_" not in name)


def faults_of_quantization(how: Quantize, tuning: str) -> Iterator[str]:
    """Of a quantisation that the run or its libraries do not support."""
    said = f"policy.quantize={how}"
    if how != "none" and tuning == "full":
        yield f"{said} is for weights that are not trained: set policy.tuning=lora, or take it out"
    if how == "nf4" and not installed("bitsandbytes"):
        yield f"{said} needs bitsandbytes: pip install bitsandbytes, or take int8, which needs no library"


def installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ValueError:  # its entry in sys.modules is None
        return False
