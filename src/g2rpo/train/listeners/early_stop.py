"""Ends a run before its last iteration: alarms, rewards without scores, gradients that are not
finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from g2rpo.core.data import Row
from g2rpo.core.errors import Stopped
from g2rpo.train.evaluation.heldout import Evaluation
from g2rpo.train.listeners.listener import Ask, Listener
from g2rpo.train.loop import Loop
from g2rpo.train.monitor.alarms import HELPS, Alarms, Scores
from g2rpo.train.run.folder import Run

UNSCORED = 5
"""Consecutive iterations without any score of a reward after which a run stops."""
SKIPPED = 10
"""Consecutive updates with a gradient that is not finite (none is applied) after which a run
stops."""


@dataclass(kw_only=True)
class EarlyStop(Listener):
    """Sets the alarms of every row, reports new ones, and ends the run by their actions, or after
    `UNSCORED` iterations or `SKIPPED` updates. `save` writes a checkpoint."""

    loop: Loop
    alarms: Alarms
    run: Run
    save: Callable[[], object]
    asked: bool = False
    """Whether a new alarm is to end the run."""
    # iterations in a row without any score, by reward; one of weight 0 need not have one
    unscored: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.unscored = dict.fromkeys(self.loop.config.trained, 0)

    def take_up(self, rewards: Sequence[str], prompts: int) -> None:
        """Shows the alarms the log and the scores of `prompts` by `rewards` up to the current
        iteration, of earlier starts."""
        run, iteration = self.run, self.loop.iteration
        self.alarms.rows = [row for row in run.read_log() if row["iteration"] <= iteration]
        looks = [row["iteration"] for row in self.alarms.rows if row["kind"] == "eval"]
        kept = [look for look in looks if run.scores(look).is_file()]
        self.alarms.history = {look: run.read_scores(look, rewards, prompts) for look in kept}

    def hear(self, row: Row, evaluation: Evaluation | None) -> None:
        new = self.alarms.see(row, None if evaluation is None else evaluation.scores)
        self.asked |= any(self.loop.config.action_of(name) == "stop" for name in new)
        for name in new:
            if self.loop.world.is_main:
                said = f"{name}: {row['alarms'][name]}. What helps: {HELPS[name]}"
                self.run.notify(f"alarm after iteration {row['iteration']}: {said}")
        if evaluation is None:
            for name in self.unscored:
                self.unscored[name] = (
                    self.unscored[name] + 1 if math.isnan(row[f"reward/{name}"]) else 0
                )

    def asks(self) -> Ask:
        """Raises `Stopped` after too many iterations without a score, or too many updates in a row
        that were skipped because of their gradient; weights are those of the last update."""
        iteration, skipped = self.loop.iteration, self.loop.updater.skipped_in_a_row
        for name, count in self.unscored.items():
            if count >= UNSCORED:
                raise Stopped(
                    f"iteration {iteration}: reward '{name}' gave no score at all in {UNSCORED} iterations in a row"
                )
        if skipped >= SKIPPED:
            self.save()
            how_long = f"{skipped} updates in a row"
            raise Stopped(
                f"iteration {iteration}: the gradient was not finite in {how_long}; the weights before are saved"
            )
        return Ask.NOTHING

    def end(self) -> None:
        """Raises `Stopped` if that is the action of a new alarm."""
        asked, self.asked = self.asked, False
        iteration = self.loop.iteration
        if asked and iteration < self.loop.config.trainer.iterations:
            raise Stopped(
                f"stopped by an alarm after iteration {iteration}; {self.run.how_to_continue}"
            )

    def check_base(self, scores: Scores) -> None:
        """Raises `Stopped` if no reward that is trained on has any score [N] of the base's
        pictures."""
        trained = self.loop.config.trained
        if trained and all(bool(scores[name].isnan().all()) for name in trained):
            raise Stopped(
                f"no reward ({', '.join(trained)}) gave a score to any of the base's {len(scores[trained[0]])} held-out "
                "pictures, so nothing could be learnt; the pictures are finite: look for what the rewards said"
            )
