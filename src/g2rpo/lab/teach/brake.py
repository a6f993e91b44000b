"""The brake of a session: judges on held-out pictures, the last good weights, and the size of a step."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from g2rpo.evaluation.heldout import Comparison, paired
from g2rpo.monitor.metrics import Row
from g2rpo.training.trainer import Trainer

LOOK = 2
"""Changes of the weights between two looks at held-out pictures."""
FALL = 1.5
"""Standard errors by which the mean of a judge may fall."""
USELESS = 2
"""Looks in a row that may be no nearer to the taste, by the head, than the last good weights."""
SHRINK, GROW, MOST = 0.5, 1.25, 1.0
"""Factors of the step after a look that was bad and one that was good, and the largest step, as a multiple of the rate."""


@dataclass(frozen=True)
class Look:
    """Held-out pictures after some rounds: judges against the base, and what was wrong, if anything."""

    round: int
    judges: dict[str, Comparison]
    wrong: str = ""
    good: bool = True
    """Whether the weights are the new good ones."""


@dataclass
class Brake:
    """Looks at held-out pictures every `LOOK` changes of a trainer's weights."""

    good: Any
    """The last good weights (`weights_of`)."""
    step: float = 1.0
    """The factor of the learning rate."""
    since: int = 0
    """Changes since the last look."""
    useless: int = 0
    """Looks in a row that were no nearer to the taste, by the head."""
    looks: list[Look] = field(default_factory=list)

    def look(self, trainer: Trainer, row: Row, round: int, nearer: bool) -> Look:
        """Compares an evaluation's `row` with the base by the judges, which are not trained on.

        If one fell, or pictures left the base's range, the last good weights come back and steps become smaller. They come back
        too after `USELESS` looks in a row that are no `nearer` to the taste. Else steps grow, and weights that are nearer are
        good.
        """
        judges, wrong = {}, list[str]()
        if trainer.world.is_main:
            base, scores = trainer.evaluator.base(), trainer.alarms.history[row["iteration"]]
            assert base is not None
            names = [name for name in (trainer.judges or trainer.rewards) if name != "clicks"]
            judges = {name: paired(base.scores[name], scores[name]) for name in names}
            wrong += [f"{name} fell" for name, one in judges.items() if one.tuned - one.base < -FALL * one.error]
            wrong += ["pictures left the base's range"] if "pictures" in row.get("alarms", {}) else []
        fell = trainer.world.broadcast_text(" and ".join(wrong))
        nearer = bool(trainer.world.total(trainer.world.is_main and nearer)[0])
        self.since, self.useless = 0, 0 if nearer or fell else self.useless + 1
        told = fell or ("no nearer to the guess of your taste" if self.useless == USELESS else "")
        if told:
            put_back(trainer, self.good)
            self.useless = 0
        elif nearer:
            self.good = weights_of(trainer)
        self.step = self.step * SHRINK if fell else min(MOST, self.step * GROW)
        self.looks.append(look := Look(round, judges, told, nearer and not told))
        return look


def weights_of(trainer: Trainer) -> Any:
    """A copy of weights and moments, in host memory."""
    return tree_map_only(Tensor, lambda value: value.detach().to("cpu", copy=True), trainer.learner.stored())


def put_back(trainer: Trainer, weights: Any) -> None:
    """Restores what `weights_of` copied."""
    trainer.learner.take(*copy.deepcopy(weights))  # the optimizer keeps what it is given
    trainer.final = None
