"""Numbers that are not finite: NaN, or infinity where a narrow dtype overflows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from g2rpo.core.data import Cond
from g2rpo.core.errors import Stopped, shown


def all_finite(values: Iterable[Tensor]) -> bool:
    """Whether all numbers of `values` are finite. Waits once for each device."""
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for value in values:
        by_device[value.device].append(value.isfinite().all())
    return all(bool(torch.stack(found).all()) for found in by_device.values())


def finite_rows(*values: Tensor | None) -> Tensor:
    """Which rows [B] hold finite numbers alone in each of `values` [B, ...], on the CPU."""
    given = [value[:, None] for value in values if value is not None]
    rows = [value.flatten(1).isfinite().all(1).cpu() for value in given]
    return torch.stack(rows).all(0)


def check_embeddings(cond: Cond, prompt: str) -> Cond:
    """`cond` of one prompt; `Stopped` if it holds numbers that are not finite."""
    for name, values in real_tensors(cond):
        if not values.isfinite().all():
            raise Stopped(not_finite(f"the text encoder's {name} of {shown(prompt)}", values.dtype))
    return cond


def real_tensors(cond: Cond) -> Iterator[tuple[str, Tensor]]:
    """The tensors of real numbers in `cond`, with names."""
    ragged = [(name, row) for name, rows in cond.ragged.items() for row in rows]
    for name, values in [*cond.tensors.items(), *ragged]:
        if values.is_floating_point():
            yield name, values


def not_finite(what: str, dtype: torch.dtype | None) -> str:
    """A message that says what is not finite, and what helps."""
    name = str(dtype).removeprefix("torch.")
    wider = "compute in float32 (policy.dtype=float32); if it is the same there, its file of weights is damaged"
    damaged = "its file of weights is damaged, or was converted to a dtype in which it overflows; load another one"
    narrow = dtype in (torch.float16, torch.bfloat16)
    computed = "" if dtype is None else f" when computed in {name}"
    return (
        f"{what}: NaN or infinity{computed}, so there is no picture; {wider if narrow else damaged}"
    )
