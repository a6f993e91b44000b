"""A frozen base whose blocks live in host memory, and come to the device one ahead of their call.

diffusers' `apply_group_offloading` (0.42) is for sampling. `ModuleGroup` moves all parameters of a
block, so between calls a trained adapter is on the host and its gradient on the device; after a
block's forward pass its weights leave (`GroupOffloadingHook.post_forward`), which int8 and nf4
layers read in their backward pass; prefetching keeps the forward pass's order (`next_group`) when
checkpointing runs blocks backwards; and the host waits for a stream before every block.

Here a block leaves when another one needs its place, and the order is learnt. Checkpointed blocks
run again in the backward pass, each just before its gradients are computed, which are all queued
before the block in front of it runs: autograd's order is that of the forward pass, reversed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.core.files import in_bytes
from g2rpo.models.options import PolicyConfig, TuningMode

ALIGNED = 256
"""Each tensor begins at a multiple of so many bytes, as in torch's allocators."""


def faults_of_offload(options: PolicyConfig, tuning: TuningMode, device: str) -> Iterator[str]:
    """Why the blocks of these options cannot live in host memory; for sampling on a CPU, they do."""
    if not options.offload or tuning == "frozen":
        return
    kind = torch.device(device).type
    if kind in ("cpu", "mps"):
        yield f"policy.offload: is for a CUDA GPU with memory of its own, and here is {kind}; take it out"
    if tuning == "full":
        yield "policy.offload: is for weights that are not trained: set policy.tuning=lora, or take it out"
    elif not options.gradient_checkpointing:
        yield "policy.offload: the backward pass needs every block again; set policy.gradient_checkpointing=true"
    if options.compile is True:
        yield "policy.offload: policy.compile is not for weights that come and go; take one of them out"


def offloads(options: PolicyConfig, device: torch.device) -> bool:
    return options.offload and device.type not in ("cpu", "meta")


def frozen_in(block: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """The tensors of a block that are not trained: the table of its module, the name, the tensor."""
    for module in block.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and not tensor.requires_grad:
                    yield table, name, tensor


def offloaded_bytes(block: nn.Module) -> int:
    return sum(tensor.nbytes for _, _, tensor in frozen_in(block))


def faults_of_places(
    options: PolicyConfig, blocks: Sequence[nn.Module], memory: int
) -> Iterator[str]:
    """Of a device that cannot even hold the places of two blocks."""
    places = 2 * max(map(offloaded_bytes, blocks))
    if options.offload and places > memory:
        yield f"policy.offload: two blocks take {in_bytes(places)}, and the device has {in_bytes(memory)}"


class _Block:
    """The frozen tensors of a block, one after the other in host memory, from where it takes them."""

    def __init__(self, block: nn.Module) -> None:
        frozen = list(frozen_in(block))
        self._tensors = [(table, name, tensor.to("meta")) for table, name, tensor in frozen]
        self._sizes = [-(-tensor.nbytes // ALIGNED) * ALIGNED for *_, tensor in frozen]
        self.host = torch.empty(sum(self._sizes), dtype=torch.uint8)
        self.take(self.host)
        for table, name, tensor in frozen:
            table[name].copy_(tensor)
            table[name] = None  # what is left is moved as a whole

    def take(self, memory: Tensor) -> None:
        """From now on the block's tensors are those in `memory`."""
        pieces = memory.split(self._sizes)
        for (table, name, like), piece in zip(self._tensors, pieces, strict=True):
            tensor = piece[: like.nbytes].view(like.dtype).view(like.shape)
            table[name] = nn.Parameter(tensor, requires_grad=False)


class Offload:
    """Moves a transformer to a device, but for the frozen tensors of its blocks, the `modules`, of
    which two are there at a time: the one that is called, and the one that came after it the last
    time, which a stream of its own copies during the call.

    Where a block's place is taken while its gradients still need it, autograd raises.
    """

    def __init__(
        self, transformer: nn.Module, modules: Sequence[nn.Module], device: torch.device
    ) -> None:
        blocks = [_Block(module) for module in modules]
        transformer.to(device)
        self._device, self._stream = device, None if device.type == "cpu" else torch.Stream(device)
        if device.type == "cuda":
            _pin(self, [block.host for block in blocks])
        size = max(len(block.host) for block in blocks)
        places = [torch.empty(size, dtype=torch.uint8, device=device) for _ in blocks[:2]]
        self._there: dict[_Block | int, Tensor] = dict(enumerate(places))
        """Places by their blocks, that of the last call at the end; at first by numbers."""
        self._last: _Block | None = None
        self._after: dict[tuple[_Block | None, bool], _Block] = {}
        """The block that came after another one, in and without a backward pass."""
        for module, block in zip(modules, blocks, strict=True):
            block.take(block.host)
            module.register_forward_pre_hook(partial(self._enter, block))

    def _enter(self, block: _Block, *_: Any) -> None:
        backward = torch._C._current_graph_task_id() != -1
        if self._last is not block:
            self._after[self._last, backward] = block
        self._last = block
        self._bring(block)
        self._there[block] = self._there.pop(block)
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)
        if (upcoming := self._after.get((block, backward))) is not None:
            self._bring(upcoming)

    def _bring(self, block: _Block) -> None:
        """Copies a block to the place of the one that was called before the last, unless it is
        there."""
        if block in self._there:
            return
        former = next(iter(self._there))
        if isinstance(former, _Block):
            former.take(former.host)
        self._there[block] = self._there.pop(former)
        memory = self._there[block][: len(block.host)]
        if self._stream is not None:  # what reads the block that was there has been queued
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream or nullcontext():
            memory.copy_(block.host, non_blocking=True)
        block.take(memory)


def _pin(owner: Offload, hosts: Sequence[Tensor]) -> None:
    """Pins host memory as it is, for as long as its owner lives: torch's own allocator would take
    the next power of two."""
    runtime: Any = torch.cuda.cudart()
    for host in hosts:
        code = runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)
        torch.cuda.check_error(int(code))
    weakref.finalize(owner, _unpin, hosts).atexit = False


def _unpin(hosts: Sequence[Tensor]) -> None:
    for host in hosts:
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
