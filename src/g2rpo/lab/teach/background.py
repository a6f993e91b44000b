"""Learning while the next group is shown: answers are stored at once, and acted on in their order by a thread."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor

from g2rpo.core.statistics import Comparison
from g2rpo.lab.teach.groups import AskedGroup
from g2rpo.lab.teach.session import Answering, Session
from g2rpo.rewards.votes import Vote
from g2rpo.runtime.distributed import World

BEAT = 60.0
"""Seconds without an answer after which other ranks get a sign of life: they do not wait forever for rank 0."""


class InBackground(Answering):
    """A session whose answers are acted on by a thread, which is the only one that uses the policy. What it learns is that of
    the same answers one after the other, for a group depends on the answers before it by `Session.ahead` rounds alone.

    `prompt` is drawn before and after every change. Safe to be called from several threads.
    """

    def __init__(self, session: Session, prompt: str) -> None:
        self.session, self.prompt = session, prompt
        self.pair: tuple[Tensor, Tensor] = session.pictures(prompt)
        self.version = 0
        """Changes with what is to be shown."""
        self._waiting: deque[Vote] = deque()
        self._asked = session.next
        self._failed: Exception | None = None
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="learning", daemon=True)
        self._thread.start()

    @property
    def group(self) -> AskedGroup:
        """The group that is asked; waits until it is sampled."""
        with self._changed:
            self._wait(lambda: self._asked in self.session.groups)
            return self.session.groups[self._asked]

    @property
    def learning(self) -> bool:
        """Whether answers wait to be acted on."""
        return bool(self._waiting)

    def take(self, **said: Any) -> None:
        """Stores an answer, which is acted on after the ones before; to take one back waits until that is done."""
        with self._changed:
            undoes = said["kind"] == "undo"
            self._wait(lambda: not self._waiting if undoes else self._asked in self.session.groups)
            vote = self.session.vote(self._asked, **said)
            self.session.store(vote)
            self._waiting.append(vote)
            self._changed.notify_all()
            if vote.kind == "vote":
                self._asked += 1
            if undoes:
                self._wait(lambda: not self._waiting)
                self._asked = self.session.next

    def close(self) -> None:
        """Ends the thread after the answers that wait."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()
        self._wait(lambda: True)

    def _wait(self, until: Callable[[], bool]) -> None:
        """Waits with the lock held; raises what the thread failed with."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed is not None or until())
        if self._failed is not None:
            raise self._failed

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended, BEAT)
                vote, ended = self._waiting[0] if self._waiting else None, self._ended and not self._waiting
            try:
                send(self.session.trainer.world, vote, ended)
                if ended:
                    return
                if vote is None:
                    continue
                self.session.act(vote)
                self.pair = self.session.pictures(self.prompt)
            except Exception as error:  # is raised where the session is used next
                self._failed = error
            with self._changed:
                self._waiting.popleft()
                self.version += 1
                self._changed.notify_all()
            if self._failed is not None:
                return


def send(world: World, vote: Vote | None, ended: bool) -> None:
    """Sends the other ranks an answer to act on, a sign of life, or the end."""
    world.broadcast_text(json.dumps({"vote": vote and vote.model_dump(), "ended": ended}))


def follow(session: Session, prompt: str) -> None:
    """Acts on the answers that rank 0 sends, until it has ended; on the other ranks."""
    session.pictures(prompt)
    while not (sent := json.loads(session.trainer.world.broadcast_text("")))["ended"]:
        if sent["vote"] is not None:
            session.act(Vote.model_validate(sent["vote"], strict=False))
            session.pictures(prompt)


class Lesson:
    """A session that a page may begin and end. `taught` is None but in between."""

    def __init__(self, opened: Callable[[], AbstractContextManager[Session]], prompt: str | None = None) -> None:
        self.taught: InBackground | None = None
        self._opened, self._prompt, self._stack = opened, prompt, ExitStack()

    def begin(self) -> InBackground:
        """Opens the session; `prompt`, or a held-out one that the base draws wrong, is drawn before and after every change."""
        with ExitStack() as stack:  # closes it, if its first pictures fail
            session = stack.enter_context(self._opened())
            self.taught = InBackground(session, self._prompt or session.wrong_prompt)
            self._stack = stack.pop_all()
        return self.taught

    def finish(self) -> tuple[Session, dict[str, Comparison]] | None:
        """Ends the run, if one was begun, and keeps what was learnt."""
        taught, self.taught = self.taught, None
        if taught is None:
            return None
        with self._stack:
            taught.close()
            return taught.session, taught.session.finish()

    def close(self) -> None:
        """Leaves a session that could not be finished; its answers are on disk."""
        self._stack.close()
