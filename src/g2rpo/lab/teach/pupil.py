"""How a model learns from a person's answers, and the brake that keeps it whole.

After an answer the head (`rewards.taste`) is fitted again to all answers, and the model takes
`UPDATES` iterations of its algorithm on the reward `clicks`, with the recipe's rewards as guards.
The head cannot tell when a model breaks: judges, which are not trained on, look at held-out
pictures after every `LOOK` changes, and take back what made them worse.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.core.errors import UserError
from g2rpo.core.statistics import Comparison, paired
from g2rpo.evaluation.heldout import Evaluation
from g2rpo.lab.teach.blind import BlindTest
from g2rpo.lab.teach.groups import AskedGroup, of_main
from g2rpo.monitor.alarms import is_large
from g2rpo.rewards.picture_features import Features, features_of
from g2rpo.rewards.taste import Choice, Clicks, Head, fit
from g2rpo.rewards.votes import Vote
from g2rpo.training.collector import Groups
from g2rpo.training.learner import Snapshot
from g2rpo.training.trainer import Trainer

FIRST = 3
"""Answered groups before the weights change."""
UPDATES = 4
"""Iterations after an answer, once there is a head that counts."""
ENOUGH, HOPELESS = 12, 0.6
"""After so many groups a head that agrees less with the person is said not to know the taste."""
AIM = 0.5
"""Standard deviations within groups by which the head's utility of held-out pictures is to rise, less
one posterior deviation, at strength 1: a model that learns on loses what a prompt asks for
(studies/LOG.md)."""
HARD = 32
"""Iterations after which it is said that pictures hardly move towards a taste that the head
knows."""
DIRECT = 4
"""Groups of an update that learns from the clicks alone."""
LOOK = 2
"""Changes of the weights between two looks at held-out pictures."""
FALL = 1.5
"""Standard errors by which the mean of a judge may fall; a small fall (`alarms.is_large`) does not
count."""
USELESS = 2
"""Looks in a row that may be no nearer to the taste, by the head, than the last good weights."""
SHRINK, GROW, LARGEST_STEP = 0.5, 1.25, 1.0
"""Factors of the step after a look that was bad and one that was good, and the largest step, as a
multiple of the rate."""


@dataclass(frozen=True)
class BrakeLook:
    """Held-out pictures after some changes: judges against the base, and what was wrong, if
    anything."""

    judges: dict[str, Comparison]
    wrong: str = ""


@dataclass(frozen=True)
class Confirmed:
    """Weights to which a person may go back, with `Learnt.heldout` and `Learnt.looks` then."""

    weights: Snapshot
    version: int = 0
    heldout: tuple[Features, Features] | None = None
    looks: tuple[BrakeLook, ...] = ()


@dataclass
class Learnt:
    """What is known after some answers; the weights are the trainer's. Its parts are replaced, not
    changed, so a copy stays."""

    good: Snapshot
    """The last good weights."""
    head: Head | None = None
    direct: bool = False
    """Whether the model learns from the clicks alone, without a head."""
    choices: dict[int, Choice] = field(default_factory=dict)
    """By round, of the groups that were answered with a picture."""
    waiting: tuple[tuple[AskedGroup, Vote], ...] = ()
    """Answers to learn from directly, of the weights as they are."""
    step: float = 1.0
    """The factor of the learning rate."""
    since: int = 0
    """Changes of the weights since the last look."""
    useless: int = 0
    """Looks in a row that were no nearer to the taste, by the head."""
    looks: tuple[BrakeLook, ...] = ()
    heldout: tuple[Features, Features] | None = None
    """Features of held-out pictures, of the base and of the last good look; in the end of the weights
    that are kept."""
    pairs: tuple[Choice, ...] = ()
    """What blind comparisons said: no difference is one choice each way."""
    confirmed: Confirmed | None = None
    """The weights that a person liked better than the base's; None: those of the base."""


@dataclass(frozen=True)
class Kept:
    """A `Pupil` as it was before an answer."""

    weights: Snapshot
    learnt: Learnt
    changes: int
    version: int
    compared: int


@dataclass
class Pupil:
    """A `trainer` with a reward `clicks`, which learns. `notify` is called with what a person
    should know."""

    trainer: Trainer
    notify: Callable[[str], None] = print
    strength: float = 1.0
    """The multiple of `AIM` at which learning pauses, at 0 before it begins; without a head, a
    factor of the learning rate."""
    changes: int = 0
    """How often the weights have changed."""
    version: int = 0
    """The number of the weights as they are: `changes` when they were new."""
    compared: int = 0
    """`version` of the last weights that a person compared with the base's, or went back to."""

    def __post_init__(self) -> None:
        t = self.trainer
        if not isinstance(t.algorithm, GranularGRPO):
            name = getattr(t.algorithm, "name", "?")
            raise UserError(
                f"teach: learns by G2RPO; algorithm.name={name} has no groups to choose in"
            )
        clicks = t.rewards.get("clicks")
        if not isinstance(clicks, Clicks):
            raise UserError("teach: the recipe needs the reward `clicks`; add rewards.clicks=1")
        judged_by = {**t.rewards, **t.judges}.values()
        clicks.encoder = next((one for one in judged_by if hasattr(one, "features")), None)
        self.clicks, self.rate = clicks, t.config.optim.learning_rate
        t.evaluator.unlogged = ("clicks",)  # every answer changes the head
        base = t.snapshot()
        self.learnt, self.base = Learnt(base), Confirmed(base)

    @property
    def answered(self) -> int:
        """Groups that were answered with a picture."""
        return len(self.learnt.choices)

    @property
    def unconfirmed(self) -> bool:
        """Whether the weights have changed since a person last compared them with the base's."""
        return self.version != self.compared

    @property
    def moved(self) -> tuple[float, float]:
        """The rise of the head's utility of held-out pictures at the last good look, in standard
        deviations within groups, and its posterior standard deviation."""
        head, heldout = self.learnt.head, self.learnt.heldout
        return (0.0, 0.0) if head is None or heldout is None else head.rise(*heldout)

    @property
    def reached(self) -> bool:
        """Whether held-out pictures are as far as they should be by the head, and more surely than
        by one posterior deviation; nothing more is learnt then."""
        rise, deviation = self.moved
        return not self.learnt.direct and rise > 0 and rise - deviation >= AIM * self.strength

    @property
    def hard_to_teach(self) -> bool:
        """Whether pictures are, after a while and by more than one posterior deviation, not halfway
        to `AIM` for a head that counts."""
        head, (rise, deviation) = self.learnt.head, self.moved
        known = head is not None and head.trust > 0 and not self.learnt.direct
        return known and self.trainer.iteration >= HARD and rise + deviation < AIM / 2

    def kept(self) -> Kept:
        """All that `put_back` needs."""
        learnt = copy.copy(self.learnt)
        return Kept(self.trainer.snapshot(), learnt, self.changes, self.version, self.compared)

    def put_back(self, kept: Kept) -> None:
        """Forgets what was learnt since."""
        self.learnt, self.clicks.head = kept.learnt, kept.learnt.head
        if kept.changes != self.changes:
            self.trainer.restore(kept.weights)
            self.changes += 1
        self.version, self.compared = kept.version, kept.compared

    def learn(self, group: AskedGroup, vote: Vote) -> None:
        """Learns from the answer to a group that names a picture."""
        learnt = self.learnt
        features = features_of(
            group.images, [group.prompt] * len(group.images), self.clicks.encoder
        )
        learnt.choices = {**learnt.choices, group.round: Choice(features, vote.liked)}
        if learnt.direct:
            every = *learnt.waiting, (group, vote)
            # not of earlier weights
            learnt.waiting = tuple(one for one in every if one[0].changes == self.changes)
            if len(learnt.waiting) == DIRECT:
                self._update_directly()
            return
        head = self._fit(group.images)
        if self.answered < FIRST or head is None:
            return
        if self.answered == ENOUGH and head.agreement.mean < HOPELESS:
            self.notify(
                f"after {ENOUGH} groups the head orders {head.agreed:.0%} of pairs that it was not fitted to as you "
                'do, little more than chance; "Clicks alone" goes on without it, which takes many more clicks'
            )
        learns = self.strength > 0 and head.trust > 0
        if of_main(self.trainer.world, lambda: learns and not self.reached):
            self.iterate()

    def _fit(self, images: Tensor) -> Head | None:
        """Fits the head to all that is known, with a file of pairs as pictures of this size."""
        learnt, known = self.learnt, self.clicks.known(*images.shape[-2:])
        learnt.head = self.clicks.head = fit([*known, *learnt.choices.values()], learnt.pairs)
        return learnt.head

    def compare(self, test: BlindTest) -> None:
        """Learns what a person saw in a blind comparison of the base with the weights of when it
        began, which an answer that waited then may have changed."""
        learnt = self.learnt
        for prompt, before, now, better in zip(
            test.prompts, test.before, test.now, test.answers, strict=True
        ):
            images = torch.stack([before, now]).float() / 255
            features = features_of(images, [prompt] * 2, self.clicks.encoder)
            liked = (better,) if better else ((0,), (1,))
            learnt.pairs += tuple(Choice(features, one) for one in liked)
        if not learnt.direct:
            self._fit(test.now)
        self.compared = test.version
        if test.verdict == "better" and not self.unconfirmed:
            weights = self.trainer.snapshot()
            learnt.confirmed = Confirmed(weights, self.version, learnt.heldout, learnt.looks)

    def go_back(self) -> None:
        """Puts back the last weights that a person confirmed, or the base's."""
        learnt = self.learnt
        last = learnt.confirmed or self.base
        self.trainer.restore(last.weights)
        learnt.good, learnt.heldout, learnt.looks = last.weights, last.heldout, last.looks
        learnt.since, learnt.useless, learnt.waiting = 0, 0, ()
        self.changes += 1
        self.version = self.compared = last.version

    def iterate(self) -> None:
        """`UPDATES` iterations on the rewards as they are."""
        self.trainer.set_rate(self.rate * self.learnt.step)
        for _ in range(UPDATES):
            self.trainer.iterate()
        self._changed()

    def _update_directly(self) -> None:
        """One update on the groups that were shown, whose advantages are their clicks."""
        t, waiting = self.trainer, self.learnt.waiting
        largest = t.algorithm.advantage_clip
        advantages = torch.cat([group.advantages(vote.liked, largest) for group, vote in waiting])
        groups = Groups.join([group.sampled for group, _ in waiting])
        t.set_rate(self.rate * self.learnt.step * self.strength)
        t.learn_from(groups, t.world.gather(advantages), counted=False)
        t.loop.iteration += 1  # without a row; an evaluation after none is the base's
        self.learnt.waiting = ()
        self._changed()

    def _changed(self) -> None:
        self._renewed()
        self.learnt.since += 1
        if self.learnt.since == LOOK:
            self.settle()

    def _renewed(self) -> None:
        self.changes += 1
        self.version = self.changes

    def settle(self) -> None:
        """Compares held-out pictures with the base's by the judges, if weights changed since the
        last time.

        If one fell, or pictures left the base's range, the last good weights come back and steps
        become smaller. They come back too after `USELESS` looks in a row that are no nearer to the
        taste by the head. Else steps grow, and weights that are nearer, or any without a head, are
        good.
        """
        t, learnt = self.trainer, self.learnt
        if not learnt.since:
            return
        row, base, now = t.evaluate(), t.base, t.final
        assert base is not None and now is not None
        self._score(0, base)
        judges = {
            name: paired(base.scores[name], now.scores[name])
            for name in t.judges or t.rewards
            if name != "clicks"
        }
        wrong = [
            f"{name} fell"
            for name, one in judges.items()
            if one.change < -FALL * one.error and is_large(one.change, base.scores[name])
        ]
        wrong += ["pictures left the base's range"] if "pictures" in row.get("alarms", {}) else []
        fell = of_main(t.world, lambda: " and ".join(wrong))
        seen = self._seen(base, now)
        nearer = of_main(t.world, lambda: seen is not None and self._nearer(*seen))
        learnt.since, learnt.useless = 0, 0 if nearer or fell else learnt.useless + 1
        told = fell or ("no nearer to the guess of your taste" if learnt.useless == USELESS else "")
        learnt.looks = *learnt.looks, BrakeLook(judges, told)
        learnt.step = learnt.step * SHRINK if fell else min(LARGEST_STEP, learnt.step * GROW)
        if told:
            t.restore(learnt.good)
            learnt.useless = 0
            self._renewed()
            self.notify(
                f"held-out pictures: {told}; back to the last good weights, with smaller steps"
            )
        elif nearer:
            learnt.good, learnt.heldout = t.snapshot(), seen

    def _seen(self, base: Evaluation, now: Evaluation) -> tuple[Features, Features] | None:
        """Features of held-out pictures of both; None but on rank 0, which has all pictures."""
        if not self.trainer.world.is_main:
            return None
        before, after = (
            features_of(one.images.float() / 255, one.prompts, self.clicks.encoder)
            for one in (base, now)
        )
        return before, after

    def _nearer(self, base: Features, now: Features) -> bool:
        head = None if self.learnt.direct else self.learnt.head
        if head is None:
            return True
        last = self.learnt.heldout[1] if self.learnt.heldout else base
        return bool(head(now).mean() > head(last).mean())

    def finish(self) -> dict[str, Comparison]:
        """Ends the run at this iteration: weights, comparison, pictures and card, as any run's."""
        t = self.trainer
        self.settle()
        t.set_length(max(1, t.iteration))
        if t.iteration and t.final is None:  # weights changed or came back since the last look
            t.evaluate()
        for iteration, one in ((0, t.base), (t.iteration, t.final)):
            if one is not None:
                self._score(iteration, one)
        if t.base is not None and t.final is not None:  # the last good weights may be others
            self.learnt.heldout = self._seen(t.base, t.final)
        t.save()
        return t.finish()

    def _score(self, iteration: int, evaluation: Evaluation) -> None:
        """Scores an evaluation by the head as it is, which was another when its pictures were
        drawn."""
        if self.trainer.world.is_main:  # it has all pictures
            images = evaluation.images.float() / 255
            evaluation.scores["clicks"] = self.clicks.scores(images, evaluation.prompts)
            self.trainer.evaluator.keep_scores(iteration, evaluation)
