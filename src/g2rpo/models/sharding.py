"""Placement of the trained weights: replicated on every rank, or sharded over groups of ranks
(FSDP, arXiv 2304.11277).

A group is all ranks, or in hybrid sharding (section 3.2.2 there) those of a node; every group has
all shards. With sharding, a network call gathers each layer just before it runs, and a backward
pass leaves each rank the summed gradient of its shard; gradients, moments and averages are always
sharded. Gathers are collective: if one rank makes a call fewer, the others hang. So before every
call the ranks exchange through gloo (which detects lost peers) whether they have a call, and a rank
that has finished sampling joins the others' gathers until all have finished.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from g2rpo.core.distributed import ALONE, World
from g2rpo.core.errors import Stopped, UserError, out_of_device_memory

DONE, SAMPLING, TRAINING = 0, 1, 2
"""What ranks exchange before a call: that this rank has finished its phase, or the kind of its next
call."""


@dataclass(frozen=True)
class Pieces:
    """A stored tensor in pieces along its first dimension."""

    parts: Sequence[Tensor]

    @property
    def shape(self) -> torch.Size:
        return torch.Size([sum(len(part) for part in self.parts), *self.parts[0].shape[1:]])

    def whole(self) -> Tensor:
        """The tensor, a copy."""
        return torch.cat(list(self.parts))


class Replicated:
    """Every rank has all weights, with equal values."""

    divided = False
    """Whether weights are sharded over the ranks."""
    writers = 1
    """The first so many ranks have all shards together."""
    in_step: frozenset[Literal["rollout", "decode", "micro"]] = frozenset()
    """Batch sizes (`memory.Kind`) that must be equal on all ranks."""

    def __init__(self, world: World) -> None:
        self.world = world

    def sampling(self) -> AbstractContextManager[None]:
        """While entered, each rank may call the network any number of times without gradients."""
        return nullcontext()

    def training(self) -> AbstractContextManager[None]:
        """While entered, all ranks make the same number of training passes."""
        return nullcontext()

    def begin_pass(self, last: bool) -> None:
        """Called before each training pass; `last` marks the last one of an accumulated
        gradient."""

    def reduce(self, parameters: Sequence[Tensor]) -> None:
        """Sums gradients over the ranks."""
        self.world.all_reduce([p.grad for p in parameters if p.grad is not None])

    def diverged(self, parameters: Sequence[Tensor]) -> list[int]:
        """The ranks whose weights are not rank 0's, to the bit."""
        return self.world.differing(_fingerprint(parameters))

    def gather(self, value: Any) -> Any:
        """`value` (nested plain data) with whole tensors in the place of shards: here itself, on
        every rank; where weights are sharded, on the CPU of rank 0, and None on the others."""
        return value

    def own(self, value: Tensor) -> Tensor:
        """This rank's shard, a piece along the first dimension."""
        return value

    def piece(self, value: Tensor | Pieces, like: Tensor) -> Tensor:
        """A copy of this rank's shard of a stored tensor, sharded like `like`."""
        return value.whole() if isinstance(value, Pieces) else value.clone()


WHOLE = Replicated(ALONE)


class Sharded(Replicated):
    """Every rank has a shard of each weight of the models given to `shard`; on `device`, "cpu" or
    "cuda".

    A weight is divided over a group of `group` consecutive ranks, by default all; with fewer, every
    group holds all shards, and gradients are summed over the groups once an update.

    With `whole_samples` the weights are gathered once before sampling, in the dtype of the
    network's calls, and kept until it ends; calls are then local, and batch sizes may differ
    between ranks. Without, each call gathers each layer.
    """

    def __init__(
        self, world: World, device: str, whole_samples: bool, group: int | None = None
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule

        if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
            raise UserError(
                f"trainer.sharding needs a newer torch than {torch.__version__}; 2.13 is what it was tested with"
            )
        super().__init__(world)
        self.divided = True
        self.in_step = frozenset(("micro",) if whole_samples else ("micro", "rollout"))
        self._whole_samples = whole_samples
        self._group = self.writers = group or world.size
        if self._group == world.size:
            self._mesh, self._mates = init_device_mesh(device, (world.size,)), world
        else:
            sizes = (world.size // self._group, self._group)
            self._mesh = init_device_mesh(device, sizes, mesh_dim_names=("replicate", "shard"))
            self._mates = world.among(self._mesh["shard"].get_group())
        self._last_pass = True
        self._doing: int | None = None
        # of the trained model, in the order in which a call gathers them
        self._parts: list[Any] = []
        self._gathered = False  # whether the weights are gathered at the moment

    def shard(self, model: Any, dtype: torch.dtype, *, trained: bool = True) -> None:
        """Shards `model` block by block (modules in its module lists, then the rest), and moves it
        to the device one block at a time. Calls compute with weights in `dtype`; trained weights
        are kept, and their gradients summed, in float32.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        # inputs are not cast: a policy casts what it feeds, and positions need their float32
        precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        lists = [child for child in model.children() if isinstance(child, nn.ModuleList)]
        parts = [*(block for blocks in lists for block in blocks), model]
        for part in parts:
            part.to(torch.float32 if trained else dtype)
            fully_shard(part, mesh=self._mesh, mp_policy=precision, reshard_after_forward=True)
            # the loss is divided by the members of all ranks already: sum, not average
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        model.register_forward_pre_hook(self._before_call, prepend=True)
        # blocks return views, and diffusers' models change none of them in place
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        if trained:
            self._parts = [model, *parts[:-1]]

    @contextmanager
    def sampling(self) -> Iterator[None]:
        with self._phase(SAMPLING):
            if self._whole_samples:
                with self._all_gathered():
                    yield
                return
            yield
            while self._meet(DONE):  # another rank has a call left: take part in its gathers
                for part in self._parts:
                    part.unshard()
                    part.reshard()

    @contextmanager
    def training(self) -> Iterator[None]:
        with self._phase(TRAINING):
            yield
            self._meet(DONE)

    def begin_pass(self, last: bool) -> None:
        self._last_pass = last
        if self._mates is not self.world:
            self._parts[0].set_requires_all_reduce(last)

    def reduce(self, parameters: Sequence[Tensor]) -> None:
        """A no-op: backward passes have summed the gradients."""

    def diverged(self, parameters: Sequence[Tensor]) -> list[int]:
        """The ranks whose shards are not those of the first group, to the bit."""
        if self._mates is self.world:  # no value is on two ranks
            return []
        rows = self.world.gather(_fingerprint([p.to_local() for p in parameters])[None].cpu())  # type: ignore[attr-defined]
        return [
            rank for rank, row in enumerate(rows) if not torch.equal(row, rows[rank % self._group])
        ]

    @torch.no_grad()
    def gather(self, value: Any) -> Any:
        from torch.distributed.tensor import DTensor

        if isinstance(value, Mapping):
            return {key: self.gather(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.gather(item) for item in value]
        if isinstance(value, DTensor):
            whole = value.full_tensor()
            return whole.cpu() if self.world.is_main else None
        return value

    def own(self, value: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return value.to_local() if isinstance(value, DTensor) else value

    def piece(self, value: Tensor | Pieces, like: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(like, DTensor) or value.shape != like.shape:
            return super().piece(value, like)
        return distribute_tensor(
            super().piece(value, like) if isinstance(value, Pieces) else value,
            like.device_mesh,
            like.placements,
            src_data_rank=None,
        ).clone()

    @contextmanager
    def _all_gathered(self) -> Iterator[None]:
        self._meet(SAMPLING)
        model = self._parts[0]
        model.set_reshard_after_forward(False)
        try:
            for part in self._parts:
                part.unshard()
            self._gathered = True
            yield
        except RuntimeError as error:
            if self._gathered or not out_of_device_memory(error):
                raise
            raise UserError(
                "out of memory: no room for all weights at once; trainer.sharding=full needs none"
            ) from None
        finally:
            self._gathered = False
            for part in self._parts:
                part.reshard()
            model.set_reshard_after_forward(True)

    @contextmanager
    def _phase(self, doing: int) -> Iterator[None]:
        self._doing = doing
        try:
            yield
        except RuntimeError as error:  # of a gather: gloo's errors have no class of their own
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                raise self.world.lost() from error
            raise
        finally:
            self._doing = None

    def _before_call(self, model: nn.Module, _: Any) -> None:
        """Runs before every forward pass of a sharded model."""
        own = model is self._parts[0]
        if self._doing is None or (self._doing == SAMPLING and not own):
            raise RuntimeError(
                "a divided model is called inside sampling() or training(), and another than the trained one inside training()"
            )
        if not self._gathered or not own:
            self._meet(self._doing)

    def _meet(self, doing: int) -> bool:
        """Exchanges the ranks' next calls; returns whether any rank samples next. If the calls
        differ, which would hang a gather, raises `Stopped` on all ranks.

        Within a group; all groups take part only in the pass that sums gradients over all ranks.
        """
        everybody = doing == TRAINING and self._last_pass
        told = set(
            (self.world if everybody else self._mates).gather(torch.tensor([doing])).tolist()
        )
        if TRAINING in told and len(told) > 1:
            raise Stopped(
                "the ranks have fallen out of step: some make another training pass, others do not"
            )
        return SAMPLING in told


def _fingerprint(parameters: Sequence[Tensor]) -> Tensor:
    """An integer checksum of each float32 parameter, independent of the order of addition."""
    return torch.stack([p.detach().view(torch.int32).sum(dtype=torch.int64) for p in parameters])
