"""Teaching a model by choosing among its pictures: rounds of a group that is shown and a person's
answer. Independent of any page.

Everything is a function of the config and of the answers, so that stored answers repeat a session.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from threading import Lock
from typing import Any

from torch import Tensor

from g2rpo.core.errors import UserError
from g2rpo.core.plain import checked_as
from g2rpo.core.statistics import Comparison
from g2rpo.lab.teach.blind import PAIRS, BlindTest
from g2rpo.lab.teach.groups import AskedGroup, Asker, of_main
from g2rpo.lab.teach.pupil import Pupil
from g2rpo.monitor.clips import seconds_of
from g2rpo.monitor.scores import save_pictures
from g2rpo.rewards import votes
from g2rpo.rewards.votes import ANSWERS, Vote
from g2rpo.runtime.devices import same_device
from g2rpo.training.trainer import Trainer

AHEAD = 2
"""Groups that lie ready: one is shown while the answer to the one before is learnt from."""
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
"""What a session changes in a recipe, before the user's overrides. The two alarms compare scores of
the reward `clicks`, whose meaning changes with every answer."""


@dataclass(kw_only=True)
class Session:
    """Rounds with a `trainer` that has a reward `clicks`. All its ranks act on the same answers.

    Answers are stored at once, and acted on in their order by a thread, the only one that uses the
    policy; with `background` nobody waits for it. `AHEAD` groups lie ready: group r is sampled
    after the answer to group r - AHEAD, whenever that comes, so both learn the same. Once pictures
    have `reached` what they should, the person compares them blindly with the base's. `prompt`, or a
    held-out one that the base draws wrong, is drawn after every change. `notify` is called with
    what a person should know.
    """

    trainer: Trainer
    background: bool = False
    prompt: str = ""
    notify: Callable[[str], None] = print
    asked: int = 0
    """The round that is asked."""
    groups: dict[int, AskedGroup] = field(default_factory=dict)
    blind: BlindTest | None = None

    def __post_init__(self) -> None:
        self.pupil, self.asker = Pupil(self.trainer, self.notify), Asker(self.trainer)
        self._next = 0  # the round whose answer is acted on next
        # what was so before each of the last answers
        self._before: deque[Any] = deque(maxlen=REMEMBERED)
        self._pending: deque[Future[None]] = deque()
        self._turn, self._sent = Lock(), count()

    @contextmanager
    def begun(self) -> Iterator[None]:
        """While entered, rows are logged. Evaluates the base and samples the first groups; earlier
        answers in the run's votes.jsonl are repeated first."""
        t = self.trainer
        device = same_device(t.policy.device)
        with t.listening(), ThreadPoolExecutor(1, "learning", initializer=device) as self._thread:
            t.evaluate()
            self.prompt = self.prompt or self._wrong_prompt()
            self._place = t.heldout.index(self.prompt) if self.prompt in t.heldout else 0
            self.pair, self._drawn = (self._picture(),) * 2, 0
            self._fill()
            if t.run.writes:
                t.run.votes.touch()  # by which a session is known, before its first answer too
            stored = of_main(
                t.world,
                lambda: (
                    [vote.model_dump() for vote in votes.read(t.run.votes)] if t.run.writes else []
                ),
            )
            self.repeat([Vote.model_validate(each, strict=False) for each in stored], written=True)
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

    @property
    def unconfirmed(self) -> bool:
        """Whether the weights have changed since a person compared them with the base's; waits for
        the answers that are not yet acted on."""
        self._wait()
        return self.pupil.unconfirmed

    @property
    def told_of_blind(self) -> str:
        """What the last blind comparison found, and whether it was of other weights; "" without
        one."""
        test = self.blind
        if test is None or not test.answers:
            return ""
        return f"{'' if test.version == self.pupil.version else 'Of earlier weights: '}{test}"

    # what a person may say

    def answer(
        self, liked: Sequence[int] = (), *, round: int, skipped: bool = False, digest: str = ""
    ) -> Vote:
        """The answer to the group of `round`, from which the model learns; `digest` is that of the
        group that was shown, if it is known."""
        return self._take(
            kind="vote", round=round, liked=tuple(liked), skipped=skipped, digest=digest
        )

    def undo(self) -> Vote:
        """Takes back the last answer and what the weights learnt from it."""
        return self._take(kind="undo")

    def set_strength(self, strength: float) -> Vote:
        """Sets `Pupil.strength`, 0 to 4, from the next answer on."""
        return self._take(kind="strength", strength=strength)

    def learn_directly(self) -> Vote:
        """Gives up the head: from here on the model learns from the clicks alone, whether or not a
        person is consistent."""
        return self._take(kind="direct")

    @property
    def comparing(self) -> BlindTest | None:
        """The blind comparison of which a pair is asked, and no group."""
        return None if self.blind is None or self.blind.done else self.blind

    def begin_blind(self) -> Vote:
        """Begins a blind comparison of the base with the weights as they are."""
        return self._take(kind="look")

    def compare(self, sides: Sequence[int], *, pair: int) -> Vote:
        """The answer to a pair of the blind comparison: the better side, 0 for the left one; empty
        without a difference. From all of them the head learns."""
        test = self.comparing
        if test is None or pair != len(test.answers) or not {*sides} <= {0, 1}:
            raise UserError("this pair of the comparison is not the one that is asked")
        liked = tuple(test.sides()[side] for side in sides[:1])
        return self._take(kind="blind", step=pair, liked=liked)

    def go_back(self) -> Vote:
        """Puts back the last weights that were confirmed by a comparison, or the base's."""
        return self._take(kind="back")

    def _take(self, **said: Any) -> Vote:
        """Stores an answer and has it acted on; UserError if a page sent what cannot be one."""
        with self._turn:
            if said["kind"] in ("undo", "look", "back"):
                self._wait()
            group, now = self.group, datetime.now(UTC).isoformat(timespec="seconds")
            about = {"round": self.asked, "iteration": self.trainer.iteration, "time": now}
            try:
                vote = checked_as(Vote, {**about, **said})
            except ValueError as error:
                raise UserError(f"an answer's {error}") from None
            if vote.kind == "vote":
                if vote.round == self.asked and vote.digest not in ("", group.digest):
                    raise UserError(
                        f"round {vote.round + 1} has other pictures by now: an answer before it was taken back"
                    )
                known = {"prompt": str(group.prompt), "step": group.step, "digest": group.digest}
                vote = vote.model_copy(update={**known, "liked": tuple(sorted(set(vote.liked)))})
            self._check(vote)
            self._store(vote)
            if self.trainer.world.size > 1:
                self.trainer.world.store.set(f"{SAID}{next(self._sent)}", vote.model_dump_json())
            self._hand_over(vote)
            return vote

    def _check(self, vote: Vote) -> None:
        if vote.kind == "vote":
            if vote.round != self.asked:
                raise UserError(
                    f"round {vote.round + 1} is not the one that is asked, which is {self.asked + 1}"
                )
            votes.check_liked(vote.liked, len(self.group.images))
        elif vote.kind == "undo" and not self._before:
            raise UserError("there is no answer that could be taken back")
        elif vote.kind == "blind" and (
            self.comparing is None or vote.step != len(self.comparing.answers)
        ):
            raise UserError(f"votes: pair {vote.step + 1} of a comparison is not asked here")
        elif vote.kind == "look" and not self.pupil.changes:
            raise UserError("nothing has been learnt yet, so there is nothing to compare")
        elif vote.kind == "back" and (self.blind is None or not self.blind.done):
            raise UserError("compare before and now first; then you can go back")

    def _store(self, vote: Vote) -> None:
        """Writes an answer: before it is acted on, so that a kill in between loses nothing."""
        run = self.trainer.run
        if not run.writes:
            return
        with run.holding():
            if vote.kind == "vote":
                images = self.group.images
                seconds = seconds_of(self.trainer.policy, len(images[0]))
                save_pictures(run.group(vote.round), images, range(len(images)), seconds)
            votes.append(run.votes, vote)

    def _hand_over(self, vote: Vote) -> None:
        """Has a stored answer acted on, after the one before it and unless that failed."""
        before = self._pending[-1] if self._pending else None
        self._pending.append(self._thread.submit(self._act, vote, before))
        self.asked += vote.kind == "vote"
        if vote.kind in ("undo", "look", "blind", "back") or not self.background:
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
            group = self.group
            own = group.digest, group.prompt, group.step
            if (
                vote.kind == "vote"
                and vote.round == self.asked
                and (vote.digest, vote.prompt, vote.step) != own
            ):
                raise UserError(
                    f"votes: prompt and pictures of round {vote.round + 1} are not those that were answered; "
                    "they belong to another run, version, machine or number of processes"
                )
            self._check(vote)
            if not written:
                self._store(vote)
            self._hand_over(vote)
            self._wait()

    def follow(self) -> None:
        """Acts on the answers that rank 0 sends, until it has ended; on the other ranks."""
        world = self.trainer.world
        for number in count():
            try:
                # not a collective: that would not wait for ever
                while not world.store.check([f"{SAID}{number}"]):
                    time.sleep(0.1)
                said = world.store.get(f"{SAID}{number}").decode()
            except RuntimeError as error:
                raise world.lost() from error
            if said == ENDED:
                return
            self.repeat([Vote.model_validate_json(said)], written=True)

    def finish(self) -> dict[str, Comparison]:
        """Ends the run after the answers that wait, on all ranks, and keeps what was learnt."""
        self._wait()
        if self.trainer.world.size > 1 and self.trainer.world.is_main:
            self.trainer.world.store.set(f"{SAID}{next(self._sent)}", ENDED)
        return self.pupil.finish()

    # what an answer does

    def _act(self, vote: Vote, before: Future[None] | None) -> None:
        """Does what a stored answer asks for, and samples the groups that lie ready after it."""
        if before is not None:
            before.result()
        pupil = self.pupil
        if vote.kind in ANSWERS:
            self._before.append((self._next, dict(self.groups), self.blind, pupil.kept()))
        if vote.kind == "undo":
            self._next, self.groups, self.blind, kept = self._before.pop()
            pupil.put_back(kept)
        elif vote.kind == "strength":
            pupil.strength = vote.strength
        elif vote.kind == "direct":
            pupil.learnt.direct = True
        elif vote.kind == "look":
            self._begin_blind()
        elif vote.kind == "blind":
            assert self.blind is not None
            self.blind = replace(self.blind, answers=(*self.blind.answers, vote.liked))
            if self.blind.done:
                pupil.compare(self.blind)
        elif vote.kind == "back":
            pupil.go_back()
        else:
            self._next += 1
            if vote.liked and not vote.skipped:
                pupil.learn(self.groups[vote.round], vote)
            if self.blind is None and of_main(self.trainer.world, lambda: pupil.reached):
                self._begin_blind()
        self._fill()
        if self._drawn != pupil.changes:
            self.pair, self._drawn = (self.pair[0], self._picture()), pupil.changes

    def _fill(self) -> None:
        """Samples groups until `AHEAD` lie ready."""
        for round in range(self._next, self._next + AHEAD):
            if round not in self.groups:
                self.groups[round] = self.asker.group(round, self.pupil.changes)
        self.groups = {round: group for round, group in self.groups.items() if round >= self._next}

    def _wrong_prompt(self) -> str:
        """The first held-out prompt that the base draws wrong, by the rewards that define right
        pictures; the first one if none does, or if all are right."""
        base = self.trainer.base
        assert base is not None
        wrong = [] if base.right is None else (base.right == 0).nonzero().flatten().tolist()
        return self.trainer.heldout[wrong[0] if wrong else 0]

    def _begin_blind(self) -> None:
        """Compares pictures of held-out prompts that lie evenly among all; not of `prompt`, which is
        shown before and now."""
        self.pupil.settle()
        t, base = self.trainer, self.trainer.base
        now, every = t.final or t.score_heldout(), range(len(t.heldout))
        assert base is not None
        unseen = [place for place in every if t.heldout[place] != self.prompt] or list(every)
        count = min(PAIRS, len(unseen))
        places = [unseen[len(unseen) * pair // count] for pair in range(count)]
        before, after = (
            t.world.gather(one.images[places] if t.world.is_main else one.images[:0])
            for one in (base, now)
        )
        prompts = [t.heldout[place] for place in places]
        changes, version = self.pupil.changes, self.pupil.version
        self.blind = BlindTest(prompts, before, after, changes, version=version)

    def _picture(self) -> Tensor:
        """The picture [3, H, W] of `prompt` by the weights as they are, from the noise of its
        evaluation."""
        return self.trainer.sample([self.prompt], self.trainer.config.trainer.seed, self._place)[0]


SAID, ENDED = "g2rpo/said/", "ended"
"""Keys of the answers that rank 0 sends, and the last of them."""


class Lesson:
    """A session that a page may begin and end. `session` is None but in between; `ended` is the
    last one, with its results."""

    def __init__(self, opened: Callable[[], AbstractContextManager[Session]]) -> None:
        self.session: Session | None = None
        self.ended: tuple[Session, dict[str, Comparison]] | None = None
        self._opened, self._stack = opened, ExitStack()

    def begin(self) -> Session:
        """Opens the session, unless it is."""
        if self.session is None:
            self.session = self._stack.enter_context(self._opened())
        return self.session

    def finish(self) -> tuple[Session, dict[str, Comparison]] | None:
        """Ends the run, if one was begun, and keeps what was learnt; returns `ended`. If that
        fails, it can be tried again."""
        if self.session is not None:
            self.ended = self.session, self.session.finish()
            self.session = None
            self._stack.close()
        return self.ended

    def close(self) -> None:
        """Leaves a session that could not be finished; its answers are on disk."""
        self._stack.close()
