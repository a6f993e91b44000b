"""Ends a run before its last iteration: alarms, rewards without scores, gradients that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from g2rpo.config.schema import Config
from g2rpo.core.errors import RolledBack, Stopped
from g2rpo.monitor.alarms import ADVICE, Alarms, Scores
from g2rpo.monitor.metrics import Row
from g2rpo.training.run_files import RunFiles

UNSCORED = 5
"""Consecutive iterations without any score of a reward after which a run stops."""
SKIPPED = 10
"""Consecutive updates with a gradient that is not finite (none is applied) after which a run stops."""


@dataclass(kw_only=True)
class EarlyStop:
    """Reports new `alarms`, and ends the run by their actions, or after `UNSCORED` iterations or `SKIPPED` updates."""

    config: Config
    rewards: Sequence[str]
    alarms: Alarms
    files: RunFiles
    asked: set[str] = field(default_factory=set)  # "stop" or "rollback", from alarms that are new
    unscored: dict[str, int] = field(init=False)  # iterations in a row without any score, by reward

    def __post_init__(self) -> None:
        self.unscored = dict.fromkeys(self.rewards, 0)
        if self.may_roll_back and self.files.run_dir is None:
            raise ValueError("alarms: going back to the best evaluation needs a run_dir that keeps it")

    @property
    def may_roll_back(self) -> bool:
        """Whether an alarm may end the run with the weights of its best evaluation."""
        return any(self.config.action_of(name) == "rollback" for name in ADVICE)

    def see(self, row: Row, scores: Scores | None = None) -> None:
        """Sets the alarms of a row, with an evaluation's `scores`; reports the new ones and stores their actions for
        `end_if_asked`."""
        for name in self.alarms.see(row, scores):
            self.asked |= {self.config.action_of(name)} & {"stop", "rollback"}
            if self.files.world.is_main:
                said = f"{name}: {row['alarms'][name]}. What helps: {ADVICE[name]}"
                self.files.notify(f"alarm after iteration {row['iteration']}: {said}")

    def end_if_asked(self, iteration: int, roll_back: Callable[[], int]) -> None:
        """Raises `Stopped` if that is the action of a new alarm. `roll_back` restores the weights of the best evaluation and
        returns its iteration."""
        asked, self.asked = self.asked, set()
        stopped = f"stopped by an alarm after iteration {iteration}"
        if "rollback" in asked:
            best = f"the weights are those of iteration {roll_back()}, the best evaluation kept"
            raise RolledBack(f"{stopped}; {best}; {self.files.command} continues without going back")
        if "stop" in asked and iteration < self.config.trainer.iterations:
            raise Stopped(f"{stopped}; {self.files.how_to_continue}")

    def check_base(self, scores: Scores) -> None:
        """Raises `Stopped` if no reward that is trained on has any score [N] of the base's pictures."""
        trained = [name for name in self.rewards if self.config.rewards[name].weight]
        if trained and all(bool(scores[name].isnan().all()) for name in trained):
            raise Stopped(
                f"no reward ({', '.join(trained)}) gave a score to any of the base's {len(scores[trained[0]])} held-out "
                "pictures, so nothing could be learnt; the pictures are finite: look for what the rewards said"
            )

    def check_limits(self, row: Row, skipped: int, save: Callable[[], object]) -> None:
        """Raises `Stopped` after too many iterations without a score, or too many updates `skipped` in a row because of their
        gradient; weights are those of the last update."""
        iteration = row["iteration"]
        for name in self.unscored:
            self.unscored[name] = self.unscored[name] + 1 if math.isnan(row[f"reward/{name}"]) else 0
            if self.unscored[name] >= UNSCORED:
                raise Stopped(f"iteration {iteration}: reward '{name}' gave no score at all in {UNSCORED} iterations in a row")
        if skipped >= SKIPPED:
            save()
            how_long = f"{skipped} updates in a row"
            raise Stopped(f"iteration {iteration}: the gradient was not finite in {how_long}; the weights before are saved")
