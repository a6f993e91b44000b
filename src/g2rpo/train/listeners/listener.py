"""What listens to a run: to its groups and rows, in a fixed order, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Flag, auto
from functools import reduce
from operator import or_

from torch import Tensor

from g2rpo.core.data import Row
from g2rpo.core.distributed import World
from g2rpo.train.collector import Groups
from g2rpo.train.evaluation.heldout import Evaluation


class Ask(Flag):
    """What a listener may ask for. What one rank's listener asks for, all ranks do, in this
    order."""

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
        """This rank's groups of an iteration and their advantages [N, G], after they were learnt
        from."""

    def hear(self, row: Row, evaluation: Evaluation | None) -> None:
        """A row of metrics before it is yielded: of an iteration, or of an `evaluation` of the base
        or the trained model."""

    def asks(self) -> Ask:
        """What should happen next, asked after every row was yielded, and once before the first.
        May raise `Stopped`."""
        return Ask.NOTHING


def asked_by(listeners: Sequence[Listener], stopping: bool, world: World) -> Ask:
    """What any listener of any rank asks for; a rank that is `stopping` asks to leave."""
    own = reduce(
        or_, (listener.asks() for listener in listeners), Ask.LEAVE if stopping else Ask.NOTHING
    )
    counts = world.total(*(ask in own for ask in Ask))
    return reduce(or_, (ask for ask, count in zip(Ask, counts, strict=True) if count), Ask.NOTHING)
