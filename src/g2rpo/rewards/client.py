"""Asks a server many questions at a time, and again where no answer came."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from g2rpo.core.http import NoAnswer, RefusedContent, address, request_json, token_from

log = logging.getLogger(__name__)
Q = TypeVar("Q")
S = TypeVar("S")
T = TypeVar("T")

FIRST_WAIT_S, CHECK_S = 1.0, 10.0
MAX_WAIT_S = 60.0
"""The longest wait before a retry, also if the server asks for more."""


class Endpoint(BaseModel):
    """How a server is asked."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    token_env: str | None = None
    """The environment variable with the server's token or key."""
    concurrency: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Requests at a time; by default 1 for `http`, 8 for judges."""
    timeout_s: Annotated[float, Field(ge=1e-3, le=86_400)] = 120.0
    """The time limit of each request."""
    retries: Annotated[int, Field(ge=0, le=1000)] = 6
    """How often a request without an answer is sent again."""
    check: bool = True
    """Whether the server is asked when the reward is made, so that a wrong address, token or model
    fails then."""


class Client:
    """Asks the server at `url`, as its `endpoint` says; ValueError for a malformed address or a
    missing token.

    A request without an answer is sent again after a wait, which is `FIRST_WAIT_S` at first and
    doubles up to 30 s. After one without an answer the next ones are sent once each, until one is
    answered: a server that is gone must not be waited for at every picture.
    """

    def __init__(
        self, url: str, endpoint: Endpoint | Mapping[str, Any] | None, concurrency: int
    ) -> None:
        self.url, self.endpoint = address(url), Endpoint.model_validate(endpoint or {})
        self.token, self.lost = token_from(self.endpoint.token_env), False
        self.answered = False
        self.concurrency = self.endpoint.concurrency or concurrency

    def once(
        self,
        path: str,
        kind: type[T],
        body: Mapping[str, Any] | None = None,
        timeout_s: float = CHECK_S,
    ) -> T:
        """The answer to a check: a single request."""
        return self._request(path, kind, body, min(self.endpoint.timeout_s, timeout_s))

    def _request(
        self, path: str, kind: type[T], body: Mapping[str, Any] | None, timeout_s: float
    ) -> T:
        return request_json(self.url + path, kind, body=body, token=self.token, timeout_s=timeout_s)

    def ask(
        self,
        path: str,
        kind: type[T],
        questions: Sequence[Q],
        body: Callable[[Q], Mapping[str, Any]],
        read: Callable[[Q, T], S],
    ) -> list[S | None]:
        """What is read of the answer to each question, whose request has this body; None, and a
        warning, where none came. `read` may raise `NoAnswer`. `Refused` is not caught, because
        retries would not help; but of a server that has answered, `RefusedContent` is None too:
        the same picture would end every attempt to resume. After an exception, or Ctrl-C, nothing
        is sent again."""
        stopped = Event()

        def answer(question: Q) -> S | RefusedContent | None:
            content, retries = body(question), 0 if self.lost else self.endpoint.retries
            for attempt in range(retries + 1):
                try:
                    found = read(
                        question, self._request(path, kind, content, self.endpoint.timeout_s)
                    )
                except NoAnswer as error:
                    last = error
                except RefusedContent as error:
                    return error
                else:
                    self.lost, self.answered = False, True
                    return found
                if attempt < retries:
                    wait_s = min(30.0, FIRST_WAIT_S * 2 ** min(attempt, 10))
                    wait_s *= random.uniform(0.5, 1.0)
                    if stopped.wait(min(MAX_WAIT_S, max(wait_s, last.after_s))):
                        return None
            self.lost = True
            log.warning("%s: no score after %d attempts: %s", self.url + path, retries + 1, last)
            return None

        with ThreadPoolExecutor(max_workers=self.concurrency) as pool:
            try:
                answers = list(pool.map(answer, questions))
            finally:
                stopped.set()
        refused = [one for one in answers if isinstance(one, RefusedContent)]
        if refused and not self.answered:
            raise refused[0]
        if refused:
            log.warning(
                "%d of %d requests have no score, the first: %s",
                len(refused),
                len(answers),
                refused[0],
            )
        return [None if isinstance(one, RefusedContent) else one for one in answers]
