"""A plan of a run beside what the run measures, once it has made a few iterations."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from g2rpo.config.schema import Config
from g2rpo.core.data import Row
from g2rpo.train.run.records import PlannedAndMeasured
from g2rpo.train.trainer import Trainer


@dataclass(frozen=True)
class Planned:
    """Seconds of an iteration, on average, and bytes at the peak, on a card by its datasheet."""

    card: str
    seconds: float
    memory: int


Predict = Callable[[Config, int, Sequence[str], Sequence[str]], Planned | None]
"""The plan of a run of a config (with numbers for its batch sizes) on so many ranks, with its
training and held-out prompts, on this machine's device; None if there is none, as for a CPU;
UserError if it could not be made."""


def beside_plan(
    trainer: Trainer, rows: Sequence[Row], predict: Predict
) -> PlannedAndMeasured | None:
    """The plan beside the training `rows` of this start, which is stored; None without a plan, or
    if it is stored already."""
    if not trainer.run.writes or trainer.run.plan.is_file():
        return None
    found = {"batch_size": trainer.sizes.rollout, "decode_batch_size": trainer.sizes.decode}
    config = trainer.config.model_copy(
        update={"sampling": trainer.config.sampling.model_copy(update=found)}
    )
    planned = predict(config, trainer.world.size, trainer.prompts, trainer.heldout)
    if planned is None:
        return None
    seconds = statistics.median(row["seconds"] for row in rows[1:])
    both = PlannedAndMeasured(
        **asdict(planned), measured_seconds=seconds, measured_memory=rows[-1].get("memory_peak")
    )
    trainer.run.write_plan(both)
    return both
