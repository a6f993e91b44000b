"""What listens to a run: to its groups and rows, in a fixed order, on every rank."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import Flag, auto

from torch import Tensor

from g2rpo.evaluation.heldout import Evaluation
from g2rpo.monitor.metrics import Row
from g2rpo.training.loop import Groups


class Ask(Flag):
    """What a listener may ask for. What one rank's listener asks for, all ranks do, in this order."""

    NOTHING = 0
    LEAVE = auto()
    """To save, and to end the process: the run goes on later."""
    EVALUATE = auto()
    SAVE = auto()


class Listener:
    """Hears a run. A subclass overrides what it needs; `Trainer.listeners` has the order."""

    def listening(self) -> AbstractContextManager[object]:
        """Entered while `Trainer.train` runs."""
        return nullcontext()

    def hear_groups(self, groups: Groups, advantages: Tensor) -> None:
        """This rank's groups of an iteration and their advantages [N, G], after they were learnt from."""

    def hear(self, row: Row, evaluation: Evaluation | None) -> None:
        """A row of metrics before it is yielded: of an iteration, or of an `evaluation` of the base or the trained model."""

    def asks(self) -> Ask:
        """What should happen next, asked after every row was yielded, and once before the first. May raise `Stopped`."""
        return Ask.NOTHING
