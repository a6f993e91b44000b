"""Training on several processes: this process's rank, and the collectives that training uses.

Prompts, or plans of a prompt, are sharded over ranks, so a group never spans two of them. Rewards
and metrics are gathered through gloo (small, on the CPU); gradients are reduced on the devices.
With one process, collectives are no-ops.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import NonNegativeInt
from torch import Tensor

from g2rpo.core.devices import accelerator
from g2rpo.core.errors import RankLost, UserError, out_of_device_memory, placed
from g2rpo.core.plain import parse_as
from g2rpo.core.plans import Plan

Items = TypeVar("Items", list[str], Sequence[str], list[Plan], Tensor)

BUCKET_ELEMENTS = 2**25
"""Elements of one all-reduce: large enough to be fast, small compared with the gradients of a large
model."""
RANK_TIMEOUT_S = 1800
"""Seconds after which a rank that does not answer is lost."""
_REASON = "g2rpo/reason"


@dataclass(frozen=True)
class World:
    """This process among `size` ranks. Methods that exchange data are collective: all ranks must
    call them, in the same order."""

    rank: int = 0
    size: int = 1
    store: Any = None
    group: Any = None
    """The process group of these ranks; None: all of the launch."""

    def among(self, group: Any) -> World:
        """The ranks of a process group that contains this rank, as a `World`."""
        return World(dist.get_rank(group), dist.get_world_size(group), self.store, group)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the run directory and prints."""
        return self.rank == 0

    def share(self, count: int, setting: str) -> int:
        """A rank's share of `count`; UserError that names `setting` if it is not divisible."""
        if count % self.size:
            fitting = [
                number
                for number in (count - count % self.size, count + self.size - count % self.size)
                if number
            ]
            listed = " or ".join(str(number) for number in fitting)
            raise UserError(
                f"{setting}={count} cannot be divided evenly over {self.size} ranks; {listed} can"
            )
        return count // self.size

    def first(self, count: int) -> int:
        """The index of this rank's first of `count` items."""
        return self.rank * count // self.size

    def shard(self, items: Items) -> Items:
        """This rank's contiguous slice of `items`; the slices of all ranks, in order, make up
        `items`."""
        return items[self.first(len(items)) : (self.rank + 1) * len(items) // self.size]

    def shard_or_all(self, items: Items) -> Items:
        """This rank's slice, or all items if there are fewer items than ranks."""
        return self.shard(items) if len(items) >= self.size else items

    def gather(self, own: Tensor) -> Tensor:
        """The rows of all ranks, in rank order, on every rank; `own` [rows, ...] is on the CPU, and
        `rows` may differ."""
        if self.size == 1:
            return own
        with self._collective():
            padded, counts = self._padded(own)
            parts = [torch.empty_like(padded) for _ in counts]
            dist.all_gather(parts, padded, group=self.group)
        return torch.cat(_unpadded(parts, counts))

    def gather_to_main(self, own: Tensor) -> Tensor:
        """As `gather`, but on rank 0 only; the others return their own rows."""
        if self.size == 1:
            return own
        with self._collective():
            padded, counts = self._padded(own)
            parts = [torch.empty_like(padded) for _ in counts] if self.is_main else None
            dist.gather(padded, parts, group=self.group, group_dst=0)
        return own if parts is None else torch.cat(_unpadded(parts, counts))

    def _padded(self, own: Tensor) -> tuple[Tensor, list[int]]:
        """`own` padded to the largest number of rows of any rank, and the number of rows of
        each."""
        counts = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(counts, torch.tensor([len(own)]), group=self.group)
        padded = own.new_zeros(int(max(counts)), *own.shape[1:])
        padded[: len(own)] = own
        return padded, [int(count) for count in counts]

    def total(self, *numbers: int) -> list[int]:
        """Each number, summed over the ranks."""
        return self.gather(torch.tensor([numbers])).sum(0).tolist()

    def joined_text(self, text: str) -> str:
        """The texts of all ranks, in rank order."""
        return bytes(
            self.gather(torch.tensor(list(text.encode()), dtype=torch.uint8)).tolist()
        ).decode()

    def broadcast_text(self, text: str) -> str:
        """The text of rank 0."""
        return self.joined_text(text if self.is_main else "")

    def differing(self, numbers: Tensor) -> list[int]:
        """The ranks whose `numbers` are not rank 0's."""
        rows = self.gather(numbers[None].cpu())
        return [rank for rank, row in enumerate(rows) if not torch.equal(row, rows[0])]

    @torch.no_grad()
    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor by its sum over the ranks, with bitwise equal results on all of
        them.

        NCCL waits for a lost peer without an error, so a gloo barrier, which raises one, comes
        first.
        """
        if self.size == 1:
            return
        self.total(0)
        with self._collective():
            for bucket in _buckets(tensors):
                flat = torch.cat([tensor.flatten() for tensor in bucket])
                dist.all_reduce(flat, group=self.group)
                for tensor, part in zip(
                    bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True
                ):
                    tensor.copy_(part.view_as(tensor))

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Turns the failure of a collective into `RankLost` with its reason."""
        try:
            yield
        except RuntimeError as error:
            if out_of_device_memory(error):
                raise
            raise self.lost() from error

    def lost(self) -> RankLost:
        """The exception for a failed collective."""
        silence = f"another rank died, or did not answer within {RANK_TIMEOUT_S:g} s"
        return RankLost(
            f"rank {self.rank if self.group is None else dist.get_rank()} stops: {self._reason() or silence}"
        )

    def _reason(self) -> str:
        try:
            return self.store.get(_REASON).decode() if self.store.check([_REASON]) else ""
        except RuntimeError:  # rank 0 hosts the store, which ends with it
            return ""


ALONE = World()


@contextmanager
def joined(device: str, timeout_s: float = RANK_TIMEOUT_S) -> Iterator[World]:
    """The world of this process, as set by torchrun or any launcher that sets RANK, WORLD_SIZE,
    LOCAL_RANK and MASTER_*.

    On GPUs the process takes the device of its local rank. An exception that leaves the context is
    published to the other ranks. A collective that takes longer than `timeout_s` or loses a rank
    raises `RankLost`.
    """
    local, size = number_in("LOCAL_RANK", 0), number_in("WORLD_SIZE", 1)
    module, index = accelerator(torch.device(device)), torch.device(device).index
    if module is not None and index is None and local:
        if local >= (count := module.device_count()):
            raise UserError(
                f"local rank {local} has no GPU: this machine has {count}; start at most that many processes on it"
            )
        module.set_device(local)
    if size == 1:
        yield ALONE
        return
    if torch.device(device).type == "mps":
        raise UserError(
            "policy.device=mps: one process computes on Apple's GPU; start the run without torchrun"
        )
    if index is not None:
        raise UserError(
            f"policy.device={device}: with several processes write auto, and each takes the GPU of its local rank"
        )
    timeout = timedelta(seconds=timeout_s)
    backend = (
        "gloo"
        if module is None
        else f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
    )
    asked = f"WORLD_SIZE={size} asks for several processes, but "
    try:
        with placed(asked):
            store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timeout
            )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RankLost(f"the {size} ranks did not find each other: {reason}") from error
    try:
        yield World(rank, size, store)
    except BaseException as error:
        if not isinstance(error, RankLost):
            _publish(store, f"rank {rank} stopped with {type(error).__name__}: {error}")
        raise
    dist.destroy_process_group()


def number_in(variable: str, default: int) -> int:
    """A number that torchrun sets in the environment; UserError for another value."""
    with placed(f"the environment's {variable}: "):
        return parse_as(NonNegativeInt, os.environ.get(variable, str(default)))


LAUNCHERS = {
    "srun": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
}
"""Launchers that set no RANK, with their names for RANK, LOCAL_RANK and WORLD_SIZE."""


def apart() -> str | None:
    """What the first of a launcher's processes should say if each trains alone, for none has a
    RANK; else None."""
    for launcher, names in LAUNCHERS.items():
        rank, _, size = (os.environ.get(name, "0") for name in names)
        if "RANK" not in os.environ and size.isdecimal() and int(size) > 1 and rank == "0":
            own = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
            given = " ".join(f"{ours}=${theirs}" for ours, theirs in zip(own, names, strict=True))
            return (
                f"{launcher} has {size} processes, and each trains alone, for RANK is not set; `{launcher} bash -c '{given} "
                "exec python -m g2rpo ...'` with MASTER_ADDR and MASTER_PORT trains together (docs/scaling.md), or torchrun"
            )
    return None


def _publish(store: Any, words: str) -> None:
    """Publishes why this rank stopped, unless another rank has already."""
    with suppress(RuntimeError):  # the store ends with rank 0
        store.compare_set(_REASON, "", words)


def _unpadded(parts: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Each part without the rows that `World._padded` added."""
    return [part[:count] for part, count in zip(parts, counts, strict=True)]


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    room = BUCKET_ELEMENTS
    for tensor in tensors:
        if bucket and tensor.numel() > room:
            yield bucket
            bucket, room = [], BUCKET_ELEMENTS
        bucket.append(tensor)
        room -= tensor.numel()
    if bucket:
        yield bucket
