"""Teaching a model by choosing among its pictures. Independent of any page.

    a group of pictures of one prompt, which differ by the noise of one step     Session.group
    a person clicks on the best one                                              Session.answer
    a head is fitted to all answers                                              rewards.head.fit
    once the head agrees with the person on groups that it was not fitted to:
        iterations of G2RPO on the head and the recipe's rewards                 Session._learn
        after every `CHANGES_PER_LOOK` of these, held-out pictures are judged;
        if a judge falls, the last good weights come back                        Session._look

Everything is a function of the config and of the answers, so stored answers repeat a session.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Lock
from typing import Any

from torch import Tensor

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.core.devices import same_device
from g2rpo.core.errors import UserError, placed
from g2rpo.core.files import append_line
from g2rpo.core.plain import checked_as
from g2rpo.core.statistics import Comparison, paired
from g2rpo.lab.teach import rounds
from g2rpo.lab.teach.rounds import AskedGroup, AskedGroups, Click, Vote, VoteKind
from g2rpo.rewards.head import Choice, Features, Head, features_of, fit
from g2rpo.rewards.pairs import Pairs
from g2rpo.train.evaluation.heldout import Evaluation, compare_right, save_pictures
from g2rpo.train.learner import Snapshot
from g2rpo.train.monitor.alarms import is_large_fall
from g2rpo.train.monitor.pictures import seconds_of
from g2rpo.train.trainer import Trainer

GROUPS_AHEAD = 2
"""Groups that lie ready: one is shown while the answer to the one before is learnt from."""
REMEMBERED_ANSWERS = 8
"""Answers that can be taken back."""
FIRST_ANSWERS = 3
"""Answered groups before the weights change."""
ITERATIONS_PER_ANSWER = 4
"""Iterations after an answer, once there is a head that counts."""
AIMED_RISE = 1.0
"""Standard deviations within groups by which the head's utility of held-out pictures is to rise, less
one posterior deviation: at half of it words are learnt less, and a model that learns on and on loses
what a prompt asks for (docs/teach.md)."""
CHANGES_PER_LOOK = 2
"""Changes of the weights between two looks at held-out pictures."""
ALLOWED_FALL = 1.5
"""Standard errors by which the mean of a judge may fall; a small fall (`alarms.is_large_fall`) does not
count."""
MOST_USELESS_LOOKS = 2
"""Looks in a row that may be no nearer to the person's choices, by the head, than the last good
weights."""
SHRINK_RATE, GROW_RATE, LARGEST_FACTOR = 0.5, 1.25, 1.0
"""Factors of the learning rate after a look that was bad and one that was good, and the largest
one."""
SHOWN_CHANGES = 4
"""Held-out prompts of which pictures are shown before and after."""
CLICKS = "clicks"
"""The name of the reward whose head is fitted to the answers."""


@dataclass
class Learnt:
    """What is known after some answers; the weights are the trainer's. Its parts are replaced, not
    changed, so a copy stays."""

    good: Snapshot
    """The last good weights."""
    head: Head | None = None
    choices: tuple[Choice, ...] = ()
    rate_factor: float = 1.0
    """The factor of the learning rate."""
    since: int = 0
    """Changes of the weights since the last look."""
    useless: int = 0
    """Looks in a row that were no nearer, by the head."""
    heldout: tuple[Features, Features] | None = None
    """Features of held-out pictures, of the base and of the last good look."""
    shown: Evaluation | None = None
    """The last good look."""
    said: str = ""
    """What the last look found."""

    @property
    def rise(self) -> tuple[float, float]:
        """The rise of the head's utility of held-out pictures, in standard deviations within groups,
        and its posterior standard deviation."""
        if self.head is None or self.heldout is None:
            return 0.0, 0.0
        return self.head.rise(*self.heldout)

    @property
    def enough(self) -> bool:
        """Whether held-out pictures are as far as they should be; nothing more is learnt then."""
        rise, deviation = self.rise
        return rise > 0 and rise - deviation >= AIMED_RISE


@dataclass(kw_only=True)
class Session:
    """Rounds with a `trainer` that has a reward `clicks`.

    Answers are stored at once, and acted on in their order by a thread, the only one that uses the
    policy; with `background` nobody waits for it. Group r is sampled after the answer to group
    r - GROUPS_AHEAD, whenever that comes, so the same is learnt with `background` and without. `notify` is called with what a
    person should know.
    """

    trainer: Trainer
    background: bool = False
    notify: Callable[[str], None] = print
    asked: int = 0
    """The round that is asked."""
    groups: dict[int, AskedGroup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        t = self.trainer
        clicks, taught = t.rewards.get(CLICKS), isinstance(t.algorithm, GranularGRPO)
        if not taught or not isinstance(clicks, Pairs) or t.world.size > 1:
            raise UserError(
                "teach: runs as one process with algorithm.name=g2rpo and a reward clicks of the kind pairs"
            )
        every = {**t.rewards, **t.judges}.values()
        clicks.encoder = next((one for one in every if hasattr(one, "features")), None)
        t.evaluator.unlogged = (CLICKS,)  # every answer changes the head
        self.clicks, self.rate = clicks, t.config.optim.learning_rate
        self.learnt = Learnt(t.snapshot())
        self._drawn = AskedGroups(t)
        self._next = 0  # the round whose answer is acted on next
        # what was so before the last answers
        self._before: deque[Any] = deque(maxlen=REMEMBERED_ANSWERS)
        self._pending: deque[Future[None]] = deque()
        self._turn = Lock()

    @contextmanager
    def begun(self) -> Iterator[None]:
        """While entered, rows are logged. Evaluates the base and samples the first groups; earlier
        answers in the run's votes.jsonl are repeated first."""
        t = self.trainer
        device = same_device(t.policy.device)
        with t.listening(), ThreadPoolExecutor(1, "learning", initializer=device) as self._thread:
            t.evaluate()
            self._fill()
            t.run.votes.touch()  # by which a session is known, before its first answer too
            self.repeat(rounds.read_votes(t.run.votes), written=True)
            yield

    @property
    def group(self) -> AskedGroup:
        """The group that is asked; waits until it is sampled."""
        self._wait(lambda: self.asked in self.groups)
        return self.groups[self.asked]

    @property
    def learning(self) -> bool:
        """Whether answers wait to be acted on."""
        return not all(map(Future.done, tuple(self._pending)))  # another thread may take some out

    def hear(self, sent: Any) -> Vote:
        """`answer` or `undo`, as a page sent it; UserError for what is no `Click`."""
        with placed("a page sent no answer: "):
            click = checked_as(Click, sent)
        if click.act == "undo":
            return self.undo()
        return self.answer(click.liked, round=click.round, digest=click.digest)

    def answer(self, liked: Sequence[int] = (), *, round: int, digest: str = "") -> Vote:
        """The answer to the group of `round`, from which the model learns; `digest` is that of the
        group that was shown, if it is known. UserError if a page sent what cannot be one."""
        with self._turn:
            group, liked = self.group, sorted(set(liked))
            if round != self.asked or digest not in ("", group.digest):
                raise UserError(
                    f"round {round + 1} is not the one that is asked, which is {self.asked + 1}, or has other pictures by now"
                )
            if len(liked) == len(group.images) or not {*liked} <= {*range(len(group.images))}:
                raise UserError(
                    f"an answer names some of the {len(group.images)} pictures, from 0, and not all of them; got {liked}"
                )
            return self._take(group, "vote", liked)

    def undo(self) -> Vote:
        """Takes back the last answer and what the weights learnt from it."""
        with self._turn:
            self._wait()
            if not self._before:
                raise UserError("there is no answer that could be taken back")
            return self._take(self.group, "undo", [])

    def _take(self, group: AskedGroup, kind: VoteKind, liked: Sequence[int]) -> Vote:
        vote = Vote(
            kind=kind,
            liked=tuple(liked),
            round=group.round,
            prompt=str(group.prompt),
            step=group.step,
            digest=group.digest,
            members=len(group.images),
            time=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self._store(vote)
        self._hand_over(vote)
        return vote

    def _store(self, vote: Vote) -> None:
        """Writes an answer: before it is acted on, so that a kill in between loses nothing."""
        run = self.trainer.run
        with run.holding():
            if vote.kind == "vote":
                images = self.group.images
                seconds = seconds_of(self.trainer.policy, len(images[0]))
                save_pictures(run.group(vote.round), images, range(len(images)), seconds)
            append_line(run.votes, vote.model_dump_json())

    def _hand_over(self, vote: Vote) -> None:
        """Has a stored answer acted on, after the one before it and unless that failed."""
        before = self._pending[-1] if self._pending else None
        self._pending.append(self._thread.submit(self._act, vote, before))
        self.asked += vote.kind == "vote"
        if vote.kind == "undo" or not self.background:
            self._wait()
            self.asked = self._next

    def _wait(self, until: Callable[[], bool] = lambda: False) -> None:
        """Until all answers are acted on, or `until`; raises what that failed with."""
        while self._pending and not until():
            self._pending[0].result()
            self._pending.popleft()

    def repeat(self, stored: Sequence[Vote], written: bool = False) -> None:
        """Takes stored answers again, in their order; UserError for another run's. `written`: they
        are in votes.jsonl."""
        for vote in stored:
            if vote.kind == "vote" and (vote.round, vote.digest) != (self.asked, self.group.digest):
                raise UserError(
                    f"votes: prompt and pictures of round {vote.round + 1} are not those that were answered; "
                    "they belong to another run, version or machine"
                )
            if not written:
                self._store(vote)
            self._hand_over(vote)
            self._wait()

    def finish(self) -> dict[str, Comparison]:
        """Ends the run after the answers that wait: weights, comparison, pictures and card, as any
        run's, and the answers as pairs."""
        self._wait()
        t = self.trainer
        self._look()
        self._set_length(max(1, t.iteration))
        if t.iteration and t.final is None:  # weights came back since the last look
            t.evaluate()
        for iteration, one in ((0, t.base), (t.iteration, t.final)):
            if one is not None:
                self._score(iteration, one)
        rounds.write_pairs(t.run)
        t.save()
        return t.finish()

    def _set_length(self, iterations: int) -> None:
        """Gives the run another number of iterations; config.yaml says so."""
        t = self.trainer
        t.config = t.config.changed("trainer", iterations=iterations)
        with t.run.written(t.run.config) as path:
            path.write_text(t.config.to_yaml(), encoding="utf-8")

    # what an answer does

    def _act(self, vote: Vote, before: Future[None] | None) -> None:
        """Does what a stored answer asks for, and samples the groups that lie ready after it."""
        if before is not None:
            before.result()
        if vote.kind == "undo":
            self._next, self.groups, self.learnt, weights = self._before.pop()
            self.clicks.head = self.learnt.head
            self.trainer.restore(weights)
        else:
            kept = self._next, dict(self.groups), copy.copy(self.learnt), self.trainer.snapshot()
            self._before.append(kept)
            self._next += 1
            if vote.liked:
                self._learn(self.groups[vote.round], vote.liked)
        self._fill()

    def _fill(self) -> None:
        """Samples groups until `GROUPS_AHEAD` lie ready."""
        for round in range(self._next, self._next + GROUPS_AHEAD):
            if round not in self.groups:
                self.groups[round] = self._drawn.draw(round)
        self.groups = {round: group for round, group in self.groups.items() if round >= self._next}

    def _learn(self, group: AskedGroup, liked: tuple[int, ...]) -> None:
        """Fits the head to one answer more, and trains on it if it counts."""
        learnt, t = self.learnt, self.trainer
        features = features_of(
            group.images, [group.prompt] * len(group.images), self.clicks.encoder
        )
        learnt.choices = (*learnt.choices, Choice(features, liked, group.round))
        learnt.head = self.clicks.head = fit(learnt.choices)
        head = learnt.head
        if len(learnt.choices) < FIRST_ANSWERS or head is None or not head.trusted or learnt.enough:
            return
        t.set_rate(self.rate * learnt.rate_factor)
        for _ in range(ITERATIONS_PER_ANSWER):
            t.iterate()
        learnt.since += 1
        if learnt.since == CHANGES_PER_LOOK:
            self._look()

    def _look(self) -> None:
        """Compares held-out pictures with the base's by the judges, if weights changed since the
        last time.

        If one fell, or pictures left the base's range, the last good weights come back and steps
        become smaller. They come back too after `MOST_USELESS_LOOKS` looks in a row that are no nearer
        to the person's choices by the head. Else steps grow, and weights that are nearer are good.
        """
        t, learnt = self.trainer, self.learnt
        if not learnt.since:
            return
        row, base, now = t.evaluate(), t.base, t.final
        assert base is not None and now is not None and learnt.head is not None
        self._score(0, base)
        judges = {
            name: paired(base.scores[name], now.scores[name])
            for name in t.judges or t.rewards
            if name != CLICKS
        }
        wrong = [
            f"{name} fell"
            for name, one in judges.items()
            if one.change.mean < -ALLOWED_FALL * one.error
            and is_large_fall(one.change.mean, base.scores[name])
        ]
        wrong += ["pictures left the base's range"] if "pictures" in row.get("alarms", {}) else []
        before, seen = self._features(base), self._features(now)
        last = learnt.heldout[1] if learnt.heldout else before
        nearer = bool(learnt.head(seen).mean() > learnt.head(last).mean())
        learnt.since = 0
        learnt.useless = 0 if nearer or wrong else learnt.useless + 1
        factor = learnt.rate_factor * (SHRINK_RATE if wrong else GROW_RATE)
        learnt.rate_factor = min(LARGEST_FACTOR, factor)
        if not wrong and learnt.useless == MOST_USELESS_LOOKS:
            wrong = ["no nearer to your choices"]
        learnt.said = ", ".join(f"{name} {one}" for name, one in judges.items())
        if wrong:
            t.restore(learnt.good)
            learnt.useless = 0
            learnt.said += f"; {' and '.join(wrong)}, so the weights before are back"
            self.notify(f"held-out pictures: {learnt.said}, with smaller steps")
        elif nearer:
            learnt.good, learnt.heldout, learnt.shown = t.snapshot(), (before, seen), now

    def _features(self, one: Evaluation) -> Features:
        return features_of(one.images.float() / 255, one.prompts, self.clicks.encoder)

    def _score(self, iteration: int, evaluation: Evaluation) -> None:
        """Scores an evaluation by the head as it is, which was another when its pictures were
        drawn."""
        images = evaluation.images.float() / 255
        evaluation.scores[CLICKS] = self.clicks(images, evaluation.prompts)
        self.trainer.evaluator.rescore(iteration, evaluation)

    # what a person sees of it

    @property
    def headline(self) -> str:
        """What has changed, as "41 % → 93 % right", or in the head's units where no reward says what
        is right; "" before it has."""
        base, now = self.trainer.base, self.learnt.shown
        if base is None or now is None:
            return ""
        if (right := compare_right(base, now)) is not None:
            return f"{right} right"
        rise, deviation = self.learnt.rise
        return f"by {rise:+.1f} ± {deviation:.1f} deviations more as you like it"

    def changed(self) -> list[tuple[str, Tensor, Tensor]]:
        """Up to `SHOWN_CHANGES` held-out prompts with their pictures, 8 bit, before and now: first
        those that became right, then those that the head says changed most."""
        base, now, head = self.trainer.base, self.learnt.shown, self.learnt.head
        if base is None or now is None or head is None:
            return []
        order = head(self._features(now)) - head(self._features(base))
        if base.right is not None and now.right is not None:
            order = order + 1e6 * (now.right > base.right)
        places = order.argsort(descending=True)[:SHOWN_CHANGES].tolist()
        return [(now.prompts[place], base.images[place], now.images[place]) for place in places]
