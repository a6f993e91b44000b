"""A plan of a run beside what the run measures, once it has made a few iterations."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from g2rpo.config.schema import Config
from g2rpo.core.files import in_bytes
from g2rpo.core.plain import read_as
from g2rpo.monitor.metrics import Row
from g2rpo.runs.directory import RunDirectory
from g2rpo.training.trainer import Trainer


@dataclass(frozen=True)
class Planned:
    """Seconds of an iteration, on average, and bytes at the peak, on a card by its datasheet."""

    card: str
    seconds: float
    memory: int


Predict = Callable[[Config, int, Sequence[str], Sequence[str]], Planned | None]
"""The plan of a run of a config (with numbers for its batch sizes) on so many ranks, with its training and held-out prompts,
on this machine's device; None if there is none, as for a CPU; UserError if it could not be made."""


@dataclass(frozen=True)
class PlannedAndMeasured:
    """`Planned`, and the median of iterations after the first, and the allocator's peak of this rank."""

    card: str
    seconds: float
    memory: int
    measured_seconds: float
    measured_memory: int | None

    def __str__(self) -> str:
        peak = "" if self.measured_memory is None else f" ({in_bytes(self.measured_memory)} measured)"
        return f"{self.seconds:.3g} s an iteration ({self.measured_seconds:.3g} s measured), {in_bytes(self.memory)}{peak}"


def beside_plan(trainer: Trainer, rows: Sequence[Row], predict: Predict) -> PlannedAndMeasured | None:
    """The plan beside the training `rows` of this start, which is stored; None without a plan, or if it is stored already."""
    if not trainer.files.writes or trainer.files.run.plan.is_file():
        return None
    found = {"batch_size": trainer.sizes.rollout, "decode_batch_size": trainer.sizes.decode}
    config = trainer.config.model_copy(update={"sampling": trainer.config.sampling.model_copy(update=found)})
    planned = predict(config, trainer.world.size, trainer.prompts, trainer.heldout)
    if planned is None:
        return None
    seconds = statistics.median(row["seconds"] for row in rows[1:])
    both = PlannedAndMeasured(**asdict(planned), measured_seconds=seconds, measured_memory=rows[-1].get("memory_peak"))
    with trainer.files.written(trainer.files.run.plan) as path:
        path.write_text(json.dumps(asdict(both), indent=1), encoding="utf-8")
    return both


def read_plan(run: RunDirectory) -> PlannedAndMeasured | None:
    """What `beside_plan` stored in a run."""
    return read_as(PlannedAndMeasured, run.plan, "delete it") if run.plan.is_file() else None
