"""A cheaper network for tails: compiled, in bfloat16, or with quantized weights.

It is a copy of the policy's transformer that shares all tensors which need not differ. LoRA adapters are shared and stay in
their own precision: merged into rounded weights, their small changes would be lost.
"""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.errors import UserError
from g2rpo.policies.pipelines import PipelinePolicy
from g2rpo.types import Cond


class FastNetwork:
    """The velocity of a pipeline's policy, for sampling only.

    `compile` runs the transformer through torch.compile with `backend` (the first calls take minutes). `dtype` bfloat16 is
    for a float32 policy. `quantize` "int8" rounds the frozen weights of linear layers per channel and their inputs per
    token, by torchao: one further byte per weight, faster only with `compile`. UserError if torchao is missing, or
    if `dtype` is bfloat16 and the policy computes in it already.
    """

    def __init__(
        self,
        policy: PipelinePolicy,
        *,
        compile: bool = False,
        backend: str = "inductor",
        dtype: str = "policy",
        quantize: str = "none",
    ) -> None:
        if dtype == "bfloat16" and policy.dtype == torch.bfloat16:
            raise UserError("sampling.tails.dtype=bfloat16: policy.dtype is bfloat16 already; take it out")
        self._source = policy.tuning.transformer
        self._dtype = torch.bfloat16 if dtype == "bfloat16" else policy.dtype
        self._quantize = _int8() if quantize == "int8" else None
        self._network = _shared_copy(self._source)
        self._fresh = False
        self._policy = copy.copy(policy)
        self._policy.tuning = copy.copy(policy.tuning)
        self._policy.tuning.active = torch.compile(self._network, backend=backend) if compile else self._network
        self._policy.dtype = self._dtype

    def refresh(self) -> None:
        """Copies weights that training has changed; adapters are shared and need no copy."""
        if self._fresh and not any(p.requires_grad for name, p in self._source.named_parameters() if "lora_" not in name):
            return
        modules = dict(self._network.named_modules())
        for name, weight in self._source.named_parameters():
            if "lora_" not in name:
                path, _, leaf = name.rpartition(".")
                kind = self._dtype if weight.dtype.is_floating_point else weight.dtype
                setattr(modules[path], leaf, nn.Parameter(weight.detach().to(kind), requires_grad=False))
        if self._quantize is not None:
            self._quantize(self._network)
        self._fresh = True

    @torch.no_grad()
    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        return self._policy.velocity(x, sigma, cond)


def _shared_copy(network: nn.Module) -> Any:
    """Other modules around the same tensors."""
    tensors = {id(tensor): tensor for tensor in chain(network.parameters(), network.buffers())}
    return copy.deepcopy(network, memo=tensors)


def _int8() -> Any:
    """A function that quantizes the linear layers of a model in place, adapters aside."""
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    except ImportError as error:
        raise UserError(f"sampling.tails.quantize=int8 needs torchao: pip install torchao ({error})") from None

    def linear(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and "lora_" not in name

    return lambda network: quantize_(network, Int8DynamicActivationInt8WeightConfig(), filter_fn=linear)
