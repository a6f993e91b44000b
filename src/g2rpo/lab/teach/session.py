"""Teaching a model by choosing among its pictures. Independent of any page.

A round: a group of pictures of one prompt is shown (`groups`); a person answers; the head (`rewards.taste`) is fitted again to
all answers; and the model takes `UPDATES` iterations of its algorithm on the reward `clicks`, with the recipe's rewards as
guards, under the `brake`. Everything is a function of the config and of the answers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.core.errors import UserError
from g2rpo.core.plain import checked_as
from g2rpo.core.statistics import Comparison
from g2rpo.lab.teach.brake import LOOK, Brake
from g2rpo.lab.teach.groups import AskedGroup, Asker, of_main
from g2rpo.monitor.clips import seconds_of
from g2rpo.monitor.scores import save_pictures
from g2rpo.rewards import votes
from g2rpo.rewards.taste import Choice, Clicks, Head, features_of, fit
from g2rpo.rewards.votes import Vote
from g2rpo.training.collector import Groups
from g2rpo.training.trainer import Trainer

FIRST = 3
"""Answered groups before the weights change."""
UPDATES = 4
"""Iterations after an answer, once there is a head that counts."""
USUAL_ANSWERS = 20
"""Answers of a session of usual length, which is the one that was measured (docs/teach.md)."""
ENOUGH, HOPELESS = 12, 0.6
"""After so many groups a head that agrees less with the person is said not to know the taste."""
AIM = 0.75
"""Standard deviations within groups by which the head's utility of held-out pictures is to rise, at strength 1: a model that
learns on loses what a prompt asks for (LOG.md)."""
DIRECT = 4
"""Groups of an update that learns from the clicks alone."""
REMEMBERED = 8
"""Answers that can be taken back."""
OVERRIDES = (
    "policy.tuning=lora",
    "algorithm.name=g2rpo",
    "algorithm.granularities=[1]",
    "algorithm.branch_steps=[0,1,2]",
    "algorithm.branch_schedule=turns",
    "sampling.tails.forecast=true",
    "trainer.prompts_per_iteration=4",
    "optim.decay=constant",
    "optim.ema_decay=0",
    "evaluation.num_prompts=96",
    "evaluation.controls=false",
    "alarms.decline=off",
    "alarms.hacking=off",
)
"""What a session changes in a recipe, before the user's overrides. The two alarms compare scores of the reward `clicks`, whose
meaning changes with every answer."""


class Answering:
    """What a person may say, as votes for `take`, which raises UserError for what cannot be said."""

    def take(self, **said: Any) -> Any:
        """Stores an answer and acts on it."""
        raise NotImplementedError

    def answer(self, liked: Sequence[int] = (), *, round: int, skipped: bool = False, seconds: float = 0.0) -> Any:
        """The answer to the group of `round`, from which the model learns."""
        return self.take(kind="vote", round=round, liked=tuple(liked), skipped=skipped, seconds=seconds)

    def undo(self) -> Any:
        """Takes back the last answer and what the weights learnt from it."""
        return self.take(kind="undo")

    def set_strength(self, strength: float) -> Any:
        """Sets `Session.strength`, 0 to 4, from the next answer on."""
        return self.take(kind="strength", strength=strength)

    def learn_directly(self) -> Any:
        """Gives up the head: from here on the model learns from the clicks alone, whether or not a person is consistent."""
        return self.take(kind="direct")


@dataclass
class Learnt:
    """What a session knows after some answers; the weights are the trainer's."""

    brake: Brake
    head: Head | None = None
    direct: bool = False
    """Whether the model learns from the clicks alone, without a head."""
    choices: dict[int, Choice] = field(default_factory=dict)
    """By round, of the groups that were answered with a picture."""
    waiting: list[tuple[AskedGroup, Vote]] = field(default_factory=list)
    """Answers to learn from directly, of the weights as they are."""

    def copied(self) -> Learnt:
        """Itself as it is now."""
        return Learnt(copy.copy(self.brake), self.head, self.direct, dict(self.choices), list(self.waiting))


@dataclass(kw_only=True)
class Session(Answering):
    """Rounds of a `trainer` that has a reward `clicks`; not thread-safe. All its ranks act on the same answers.

    `ahead` groups lie ready: group r is sampled after the answer to group r - ahead, whenever that comes. `notify` is called
    with what a person should know.
    """

    trainer: Trainer
    ahead: int = 1
    notify: Callable[[str], None] = print
    strength: float = 1.0
    """The multiple of `AIM` at which learning pauses; without a head, a factor of the learning rate."""
    next: int = 0
    """The round that is to be answered."""
    groups: dict[int, AskedGroup] = field(default_factory=dict)
    changes: int = 0
    """How often the weights have changed."""
    _before: list[tuple[int, Any, Learnt, dict[int, AskedGroup]]] = field(default_factory=list)
    """What was so before each of the last answers."""
    _drawn: dict[str, tuple[Tensor, int, Tensor]] = field(default_factory=dict)
    """By prompt: the base's picture; the last one, after how many changes of the weights; and that."""

    def __post_init__(self) -> None:
        t = self.trainer
        if not isinstance(t.algorithm, GranularGRPO):
            name = getattr(t.algorithm, "name", "?")
            raise UserError(f"teach: learns by G2RPO; algorithm.name={name} has no groups to choose in")
        if not isinstance(t.rewards.get("clicks"), Clicks):
            raise UserError("teach: the recipe needs the reward `clicks`; add rewards.clicks=1")
        judged_by = {**t.rewards, **t.judges}.values()
        self.clicks.encoder = next((one for one in judged_by if hasattr(one, "features")), None)
        self.rate = t.config.optim.learning_rate
        self.asker = Asker(t)

    @property
    def clicks(self) -> Clicks:
        reward = self.trainer.rewards["clicks"]
        assert isinstance(reward, Clicks)
        return reward

    @contextmanager
    def begun(self) -> Iterator[None]:
        """While entered, rows are logged. Evaluates the base and samples the first groups; earlier answers in the run's
        votes.jsonl are repeated first."""
        t = self.trainer
        with t.listening():
            t.evaluate()
            self.learnt = Learnt(Brake(t, self.clicks.encoder, t.snapshot()))
            self._fill()
            if t.run.writes:
                t.run.votes.touch()  # by which a session is known, before its first answer too
            stored = of_main(t.world, self._stored)
            self.repeat([Vote.model_validate(each, strict=False) for each in stored], written=True)
            yield

    def _stored(self) -> list[Any]:
        run = self.trainer.run
        return [each.model_dump() for each in votes.read(run.votes)] if run.writes else []

    @property
    def head(self) -> Head | None:
        return self.learnt.head

    @property
    def brake(self) -> Brake:
        return self.learnt.brake

    @property
    def answered(self) -> int:
        """Groups that were answered with a picture."""
        return len(self.learnt.choices)

    @property
    def group(self) -> AskedGroup:
        """The group that is to be answered."""
        return self.groups[self.next]

    @property
    def moved(self) -> float:
        """The rise of the head's utility of held-out pictures (`Brake.moved`)."""
        return self.brake.moved(self.head)

    @property
    def reached(self) -> bool:
        """Whether held-out pictures are as far as they should be by the head, so that nothing more is learnt."""
        return not self.learnt.direct and self.moved >= AIM * self.strength

    # how an answer is taken

    def take(self, **said: Any) -> Vote:
        """Stores an answer and acts on it."""
        vote = self.vote(self.next, **said)
        self.store(vote)
        self.act(vote)
        return vote

    def vote(self, asked: int, **said: Any) -> Vote:
        """An answer, now, while the group of round `asked` is asked; UserError if a page sent what cannot be one."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        about = {"round": asked, "iteration": self.trainer.iteration, "ahead": self.ahead, "time": now}
        try:
            vote = checked_as(Vote, {**about, **said})
        except ValueError as error:
            raise UserError(f"an answer's {error}") from None
        if vote.kind == "vote" and vote.round == asked:
            group = self.groups[asked]
            liked = tuple(sorted(set(vote.liked)))
            known = {"prompt": str(group.prompt), "step": group.step, "digest": group.digest, "liked": liked}
            vote = vote.model_copy(update=known)
        self._check(vote, asked)
        return vote

    def _check(self, vote: Vote, asked: int) -> None:
        if vote.kind == "vote":
            if vote.round != asked:
                raise UserError(f"round {vote.round + 1} is not the one that is asked, which is {asked + 1}; reload the page")
            votes.check_liked(vote.liked, len(self.groups[asked].images))
        elif vote.kind == "undo" and not self._before:
            raise UserError("there is no answer that could be taken back")

    def store(self, vote: Vote) -> None:
        """Writes an answer: before it is acted on, so that a kill in between loses nothing."""
        run = self.trainer.run
        if not run.writes:
            return
        with run.holding():
            if vote.kind == "vote":
                images = self.groups[vote.round].images
                seconds = seconds_of(self.trainer.policy, len(images[0]))
                save_pictures(run.group(vote.round), images, range(len(images)), seconds)
            votes.append(run.votes, vote)

    def repeat(self, stored: Sequence[Vote], written: bool = False) -> None:
        """Takes stored answers again, in their order; UserError for another run's. `written`: they are in votes.jsonl."""
        for vote in stored:
            own = (self.group.digest, self.group.prompt, self.group.step)
            if vote.kind == "vote" and vote.round == self.next and (vote.digest, vote.prompt, vote.step) != own:
                raise UserError(
                    f"votes: prompt and pictures of round {vote.round + 1} are not those that were answered; "
                    "they belong to another run, another version or another machine"
                )
            self._check(vote, self.next)
            if not written:
                self.store(vote)
            self.act(vote)

    def act(self, vote: Vote) -> None:
        """Does what a stored answer asks for, and samples the groups that lie ready after it."""
        if vote.kind == "undo":
            self.next, weights, self.learnt, self.groups = self._before.pop()
            self.trainer.restore(weights)
            self.clicks.head = self.head
            self.changes += 1
        elif vote.kind == "strength":
            self.strength = vote.strength
        elif vote.kind == "direct":
            self.learnt.direct = True
        else:
            self._before.append((self.next, self.trainer.snapshot(), self.learnt.copied(), dict(self.groups)))
            del self._before[:-REMEMBERED]
            self.next += 1
            if vote.liked and not vote.skipped:
                self._learn(self.groups[vote.round], vote)
        self._fill()

    def _fill(self) -> None:
        """Samples groups until `ahead` lie ready."""
        for round in range(self.next, self.next + self.ahead):
            if round not in self.groups:
                self.groups[round] = self.asker.group(round, self.changes)
        self.groups = {round: group for round, group in self.groups.items() if round >= self.next}

    # how the model learns

    def _learn(self, group: AskedGroup, vote: Vote) -> None:
        learnt = self.learnt
        features = features_of(group.images, [group.prompt] * len(group.images), self.clicks.encoder)
        learnt.choices[group.round] = Choice(features, vote.liked)
        head = learnt.head = self.clicks.head = fit(list(learnt.choices.values()))
        if self.answered < FIRST or head is None:
            return
        if learnt.direct:
            own = [(g, v) for g, v in [*learnt.waiting, (group, vote)] if g.changes == self.changes]
            learnt.waiting = own  # not of earlier weights
            if len(own) == DIRECT:
                self._update_directly()
            return
        if self.answered == ENOUGH and head.agreement.mean < HOPELESS:
            self.notify(
                f"after {ENOUGH} groups the head orders {head.agreement.mean:.0%} of pairs that it was not fitted to as you "
                'do, little more than chance; "Clicks alone" goes on without it, which takes many more clicks'
            )
        if of_main(self.trainer.world, lambda: head.trust > 0 and not self.reached):
            self.iterate()

    def iterate(self) -> None:
        """`UPDATES` iterations on the rewards as they are."""
        self.trainer.set_rate(self.rate * self.brake.step)
        for _ in range(UPDATES):
            self.trainer.iterate()
        self._changed()

    def _update_directly(self) -> None:
        """One update on the groups that were shown, whose advantages are their clicks."""
        t, waiting = self.trainer, self.learnt.waiting
        largest = t.algorithm.advantage_clip
        advantages = torch.cat([group.advantages(vote.liked, largest) for group, vote in waiting])
        groups = Groups.join([group.sampled for group, _ in waiting])
        t.set_rate(self.rate * self.brake.step * self.strength)
        t.learn_from(groups, t.world.gather(advantages), counted=False)
        self.learnt.waiting = []
        self._changed()

    def _changed(self) -> None:
        """Counts a change of the weights, and looks at held-out pictures after every `LOOK` of them."""
        self.changes += 1
        self.brake.since += 1
        if self.brake.since == LOOK:
            self._look()

    def _look(self) -> None:
        look = self.brake.look(self.next, None if self.learnt.direct else self.head)
        if look.wrong:
            self.changes += 1
            self.notify(f"held-out pictures: {look.wrong}; back to the last good weights, with smaller steps")

    def settle(self) -> None:
        """Looks at held-out pictures, if weights changed since the last look, and takes back what made them worse."""
        if self.brake.since:
            self._look()

    def finish(self) -> dict[str, Comparison]:
        """Ends the run at this iteration: weights, comparison, pictures and card, as any run's."""
        t = self.trainer
        self.settle()
        t.set_length(max(1, t.iteration), t.config.evaluation.every)
        if self.brake.evaluated != t.iteration:
            t.evaluate()
        if t.world.is_main and (base := t.base) is not None:  # there was no head when its pictures were drawn
            base.scores["clicks"] = self.clicks.scores(base.images.float() / 255, base.prompts)
        t.save()
        return t.finish()

    # a prompt before and now

    @property
    def wrong_prompt(self) -> str:
        """The first held-out prompt that the base draws wrong, by the rewards that define right pictures; the first one if none
        does, or if all are right."""
        base = self.trainer.base
        assert base is not None
        wrong = [] if base.right is None else (base.right == 0).nonzero().flatten().tolist()
        return self.trainer.heldout[wrong[0] if wrong else 0]

    def pictures(self, prompt: str) -> tuple[Tensor, Tensor]:
        """The base model's picture [3, H, W] of a prompt, and that of the weights as they are, from the same noise: that of the
        evaluations, if the prompt is held out."""
        if prompt not in self._drawn:
            with self.trainer.policy.base():
                before = self._picture(prompt)
            self._drawn[prompt] = (before, 0, before)
        before, changes, now = self._drawn[prompt]
        if changes != self.changes:
            now = self._picture(prompt)
            self._drawn[prompt] = (before, self.changes, now)
        return before, now

    def _picture(self, prompt: str) -> Tensor:
        heldout = self.trainer.heldout
        place = heldout.index(prompt) if prompt in heldout else 0
        return self.trainer.sample([prompt], self.trainer.config.trainer.seed, place)[0]
