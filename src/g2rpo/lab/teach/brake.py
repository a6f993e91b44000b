"""The brake of a session: judges on held-out pictures, the last good weights, and the size of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from g2rpo.core.statistics import Comparison, paired
from g2rpo.evaluation.heldout import Evaluation
from g2rpo.rewards.taste import Features, Head, PictureEncoder, features_of
from g2rpo.training.learner import Snapshot
from g2rpo.training.trainer import Trainer

LOOK = 2
"""Changes of the weights between two looks at held-out pictures."""
FALL = 1.5
"""Standard errors by which the mean of a judge may fall."""
USELESS = 2
"""Looks in a row that may be no nearer to the taste, by the head, than the last good weights."""
SHRINK, GROW, LARGEST_STEP = 0.5, 1.25, 1.0
"""Factors of the step after a look that was bad and one that was good, and the largest step, as a multiple of the rate."""


@dataclass(frozen=True)
class BrakeLook:
    """Held-out pictures after some rounds: judges against the base, and what was wrong, if anything."""

    round: int
    judges: dict[str, Comparison]
    wrong: str = ""
    good: bool = True
    """Whether the weights are the new good ones."""


@dataclass
class Brake:
    """Looks at held-out pictures, and takes back what made them worse. `encoder` has features of pictures for the head."""

    trainer: Trainer
    encoder: PictureEncoder | None
    good: Snapshot
    """The last good weights."""
    step: float = 1.0
    """The factor of the learning rate."""
    since: int = 0
    """Changes of the weights since the last look."""
    useless: int = 0
    """Looks in a row that were no nearer to the taste, by the head."""
    looks: list[BrakeLook] = field(default_factory=list)
    evaluated: int = 0
    """The iteration of the last evaluation."""
    heldout: tuple[Features, Features] | None = None
    """Features of held-out pictures, of the base and of the last good look."""

    def moved(self, head: Head | None) -> float:
        """The rise of the head's utility of held-out pictures at the last good look, in standard deviations within groups."""
        if head is None or self.heldout is None:
            return 0.0
        base, now = (float(head(features).mean()) for features in self.heldout)
        return now - base

    def look(self, round: int, head: Head | None) -> BrakeLook:
        """Compares held-out pictures with the base's by the judges, which are not trained on.

        If one fell, or pictures left the base's range, the last good weights come back and steps become smaller. They come back
        too after `USELESS` looks in a row that are no nearer to the taste by `head`. Else steps grow, and weights that are
        nearer, or any without a head, are good.
        """
        t = self.trainer
        row, base, now = t.evaluate(), t.base, t.final
        assert base is not None and now is not None
        self.evaluated = t.iteration
        judges = {name: paired(base.scores[name], now.scores[name]) for name in t.judges or t.rewards if name != "clicks"}
        wrong = [f"{name} fell" for name, one in judges.items() if one.change < -FALL * one.error]
        wrong += ["pictures left the base's range"] if "pictures" in row.get("alarms", {}) else []
        fell = t.world.broadcast_text(" and ".join(wrong))
        seen = self._seen(base, now) if t.world.is_main else None  # rank 0 has all pictures
        nearer = bool(t.world.total(seen is not None and self._nearer(head, seen))[0])
        self.since, self.useless = 0, 0 if nearer or fell else self.useless + 1
        told = fell or ("no nearer to the guess of your taste" if self.useless == USELESS else "")
        if told:
            t.restore(self.good)
            self.useless = 0
        elif nearer:
            self.good, self.heldout = t.snapshot(), seen
        self.step = self.step * SHRINK if fell else min(LARGEST_STEP, self.step * GROW)
        self.looks.append(look := BrakeLook(round, judges, told, nearer and not told))
        return look

    def _seen(self, *sides: Evaluation) -> tuple[Features, Features]:
        base, now = (features_of(one.images.float() / 255, one.prompts, self.encoder) for one in sides)
        return base, now

    def _nearer(self, head: Head | None, seen: tuple[Features, Features]) -> bool:
        if head is None:
            return True
        last = (self.heldout or (seen[0], seen[0]))[1]
        return bool(head(seen[1]).mean() > head(last).mean())
