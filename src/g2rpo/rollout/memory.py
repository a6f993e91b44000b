"""Batch sizes: measured for the device, and halved when memory runs out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor

from g2rpo.core.data import Cond
from g2rpo.core.devices import accelerator, empty_cache, measures_memory
from g2rpo.core.errors import UserError, out_of_device_memory
from g2rpo.core.statistics import percent
from g2rpo.core.types import Policy

Kind = Literal["rollout", "decode", "micro"]
T = TypeVar("T")

SIZE_SETTINGS: dict[Kind, str] = {
    "rollout": "sampling.batch_size",
    "decode": "sampling.decode_batch_size",
    "micro": "trainer.micro_batch_size",
}
MEMORY_ADVICE: dict[Kind, str] = {
    "rollout": "take smaller pictures, policy.dtype=bfloat16, or a device with more memory",
    "decode": "set policy.vae_tiling=true, or take smaller pictures",
    "micro": "set policy.gradient_checkpointing=true, policy.tuning=lora, or take smaller pictures",
}
CPU_ROWS: dict[Kind, int] = {"rollout": 32, "decode": 8}
""""auto" on a CPU: larger batches no longer fit the cache."""
SAFETY_MARGIN = 0.2
"""The share of a GPU's memory that "auto" leaves free, for optimizer moments that come later and
for fragmentation."""


class OutOfMemory(UserError):
    """torch ran out of memory in a call whose rows are bounded by the batch size `kind`; training
    halves it and repeats the call."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(
            f"out of memory: lower {SIZE_SETTINGS[kind]} (--batch-size of g2rpo sample and g2rpo evaluate)"
        )
        self.kind = kind


@contextmanager
def bounded_by(kind: Kind) -> Iterator[None]:
    """Turns out-of-memory errors of a device into `OutOfMemory` with the batch size `kind`."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_device_memory(error):
            raise
        raise OutOfMemory(kind) from None


@dataclass(kw_only=True)
class BatchSizes:
    """Rows of a network call in rollouts, pictures of one decoding, branch points of one training
    pass.

    `auto` names sizes that `find` has not measured yet. `halved` counts how often memory ran out;
    `notify` gets a message for each. `in_step` names sizes that are never halved, because they must
    be equal on all ranks.
    """

    rollout: int
    decode: int
    micro: int
    notify: Callable[[str], None] = print
    auto: set[Kind] = field(default_factory=set)
    halved: int = 0
    in_step: frozenset[Kind] = frozenset()

    def fit(self, attempt: Callable[[], T]) -> T:
        """The result of `attempt`, which is repeated with half the batch size when memory runs out.
        It must not have side effects on its repetition. Raises UserError if one row does not fit,
        or if the size is `in_step`.
        """
        while True:
            try:
                return attempt()
            except OutOfMemory as failure:
                kind = failure.kind
            # outside the except block, whose traceback holds the failed attempt's tensors
            self._halve(kind)

    def _halve(self, kind: Kind) -> None:
        gc.collect()
        empty_cache()
        size = getattr(self, kind)
        if size == 1:
            raise UserError(
                f"out of memory with {SIZE_SETTINGS[kind]}=1, the smallest there is: {MEMORY_ADVICE[kind]}"
            )
        if kind in self.in_step:
            why = "ranks that gather weights together cannot halve it alone"
            smaller = (
                f"`g2rpo resume RUN {SIZE_SETTINGS[kind]}={size // 2}` goes on with a smaller one"
            )
            raise UserError(f"out of memory with {SIZE_SETTINGS[kind]}={size}: {why}; {smaller}")
        setattr(self, kind, size // 2)
        self.halved += 1
        self.notify(
            f"out of memory with {SIZE_SETTINGS[kind]}={size}: going on with {size // 2}; nothing is lost"
        )

    @torch.no_grad()
    def find(
        self, policy: Policy, cond: Cond, noise: Tensor, most: int, gauge: Gauge | None = None
    ) -> None:
        """Measures the sizes in `auto`: the rows, up to `most`, that leave `SAFETY_MARGIN` of the
        memory free.

        cond and noise have one row. Only current calls are measured: later allocations (gradients,
        moments) must fit into the margin, otherwise sizes are halved then.
        """
        gauge = gauge or Gauge(policy.device)
        calls: dict[Kind, Callable[[int], Tensor]] = {
            "rollout": lambda rows: policy.velocity(
                _repeat(noise, rows), noise.new_full((rows,), 0.5), cond.rows([0] * rows)
            ),
            "decode": lambda rows: policy.decode(_repeat(noise, rows)),
        }
        for kind in sorted(self.auto):
            limit = int((1 - SAFETY_MARGIN) * gauge.available())
            rows = largest_batch(partial(gauge.peak, calls[kind]), limit, most)
            setattr(self, kind, rows)
            self.notify(
                f"{SIZE_SETTINGS[kind]}: {rows} rows fit this device with {percent(SAFETY_MARGIN)} of its memory to spare"
            )
        self.auto.clear()


class Gauge:
    """Reads the memory, in bytes, of a CUDA device, or of another accelerator with the same functions in its torch
    module."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, accelerator(device)

    def available(self) -> int:
        """Bytes that this process holds or can allocate."""
        free, _ = self.module.mem_get_info(self.device)
        return free + self.module.memory_reserved(self.device)

    def peak(self, call: Callable[[int], object], rows: int) -> int:
        """The peak of allocated bytes during a call with so many rows."""
        self.module.empty_cache()
        self.module.reset_peak_memory_stats(self.device)
        call(rows)
        self.module.synchronize(self.device)
        return self.module.max_memory_allocated(self.device)


def batch_sizes(
    rollout: int | Literal["auto"],
    decode: int | Literal["auto"],
    micro: int,
    device: torch.device,
    notify: Callable[[str], None],
) -> BatchSizes:
    """The sizes of a config; "auto" is `CPU_ROWS`, and where the memory of the device is known the
    start of a search."""
    asked: dict[Kind, int | Literal["auto"]] = {"rollout": rollout, "decode": decode}
    auto = {kind for kind, size in asked.items() if size == "auto"}
    sizes = {kind: CPU_ROWS[kind] if size == "auto" else size for kind, size in asked.items()}
    return BatchSizes(
        rollout=sizes["rollout"],
        decode=sizes["decode"],
        micro=micro,
        notify=notify,
        auto=auto if measures_memory(device) else set(),
    )


def largest_batch(peak: Callable[[int], int], limit: int, most: int) -> int:
    """The largest number of rows found, at least 1 and at most `most`, for which `peak(rows)` bytes
    stay within `limit`.

    Rows are doubled while a line through the last two measurements stays within `limit`; the last
    trial is where that line reaches it. `peak` may run out of memory, which ends the search; with
    one row the error is passed on.
    """
    rows, used, per_row = 1, peak(1), 0.0
    while rows < most and used <= limit:
        trial, last = min(2 * rows, most), False
        if used + per_row * (trial - rows) > limit:
            trial, last = rows + int((limit - used) / per_row), True
        if trial <= rows:
            break
        try:
            needed = peak(trial)
        except RuntimeError as error:
            if not out_of_device_memory(error):
                raise
            break
        if needed > limit:
            break
        rows, used, per_row = trial, needed, max(0.0, (needed - used) / (trial - rows))
        if last:
            break
    return rows


def _repeat(row: Tensor, rows: int) -> Tensor:
    return row.expand(rows, *row.shape[1:]).contiguous()
