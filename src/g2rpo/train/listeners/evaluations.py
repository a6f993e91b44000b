"""Asks for held-out evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from g2rpo.config.schema import EvaluationConfig
from g2rpo.core.data import Row
from g2rpo.train.listeners.early_stop import EarlyStop
from g2rpo.train.listeners.listener import Ask, Listener
from g2rpo.train.loop import Loop
from g2rpo.train.run.records import FIRST_LOOK


@dataclass
class Evaluations(Listener):
    """Asks for an evaluation of the base model, and then as `evaluation.every` and `every_minutes`
    say."""

    loop: Loop
    early_stop: EarlyStop

    def asks(self) -> Ask:
        config, rows = self.loop.config, self.early_stop.alarms.rows
        due = evaluation_due(
            config.evaluation, self.loop.iteration, config.trainer.iterations, rows
        )
        return Ask.EVALUATE if due else Ask.NOTHING


def evaluation_due(
    config: EvaluationConfig, iteration: int, iterations: int, rows: Sequence[Row]
) -> bool:
    """Whether an evaluation is due that the log `rows` lacks; minutes are of training since the
    last one."""
    evaluated = [row["iteration"] for row in rows if row["kind"] == "eval"]
    last = max(evaluated, default=0)
    spent = sum(
        row["seconds"] for row in rows if row["kind"] == "train" and row["iteration"] > last
    )
    minutes = config.every_minutes
    late = minutes is not None and spent >= 60 * minutes * (1 if last else FIRST_LOOK)
    due = iteration % config.every == 0 or iteration >= iterations or late
    return iteration not in evaluated and (iteration == 0 or due)
