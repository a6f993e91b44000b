"""A reward that another process computes: the client of `g2rpo.rewards.server`, or of any server
with that protocol.

For rewards whose dependencies do not fit into the trainer's environment, or whose model belongs on
another GPU. The protocol is JSON, so a server can be written in any language:

    GET  /health                                                        -> {"status": "ok", "reward": "name", "right": 0.5}
    POST /score  {"images": ["<PNG, base64>", ...], "prompts": [...]}   -> {"scores": [0.31, null, ...], "reward": "name"}

    further fields:  "metadata": [{...}, ...]    "inputs": ["<PNG, base64>", ...], "inputs_of": [[0], [0, 1], ...]

`metadata` has an object for each prompt; `inputs` has the input pictures of all prompts, each once,
and `inputs_of` those of each prompt by their index. `right`, the least score of a right picture,
and `reward`, which may not change during a run, may be left out. A null is a picture without a
score. Nothing is pickled, in neither direction.
"""

from __future__ import annotations

import base64
import io
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Annotated, Any, TypeVar

import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from torch import Tensor

from g2rpo.core.data import Prompt
from g2rpo.core.errors import counted, shown
from g2rpo.core.http import NoAnswer, Refused, RefusedContent, address, request_json, token_from
from g2rpo.core.images import images_of, read_inputs, to_pil
from g2rpo.rewards.pixels import PictureReward

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


def encode_png(picture: Image.Image) -> str:
    """The picture as base64 of a PNG file: lossless, quick rather than small."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


class Health(BaseModel):
    """What a server says of its reward."""

    reward: str | None = None
    right: FiniteFloat | None = None


class RemoteScores(BaseModel):
    """What a server answers to pictures."""

    scores: list[float | None]
    reward: str | None = None


class RemoteReward(PictureReward):
    """Scores from a reward server; a batch that stays unanswered after all retries is NaN, and a
    warning is logged.

    Args: `url`, such as http://127.0.0.1:8000; `batch_size`, pictures per request; `endpoint`, how
    the server is asked (`Endpoint`); its `check` asks for the server's health, and for
    `right`. Raises ValueError for a malformed address or a missing token, OSError if the check
    fails, the server refuses (`Client.ask`), or it has another reward than before.
    """

    waits = asks = True
    missing = "the server gave no score"

    def __init__(self, url: str, *, batch_size: int = 16, endpoint: Endpoint | None = None) -> None:
        self.client = Client(url, endpoint, concurrency=1)
        self.per_request, self.batch_size = batch_size, batch_size * self.client.concurrency
        self.served: str | None = None
        if self.client.endpoint.check:
            health = self.client.once("/health", Health)
            self.served, self.right = health.reward, health.right

    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        size = self.per_request
        parts = [(images[i : i + size], prompts[i : i + size]) for i in range(0, len(images), size)]
        answers = self.client.ask("/score", RemoteScores, parts, _body, self._read)
        return torch.cat(
            [
                torch.full((len(asked),), torch.nan) if scores is None else scores
                for scores, (_, asked) in zip(answers, parts, strict=True)
            ]
        )

    def _read(self, part: tuple[Tensor, list[str]], answer: RemoteScores) -> Tensor:
        """A score for each picture; what is null or beyond float32 is NaN or infinite."""
        if len(answer.scores) != (count := len(part[1])):
            raise NoAnswer(
                f"{self.client.url} answered {counted(len(answer.scores), 'score')} for {counted(count, 'picture')}"
            )
        if answer.reward is not None and self.served is not None and answer.reward != self.served:
            raise Refused(
                f"{self.client.url} had the reward {shown(self.served)} and now has {shown(answer.reward)}"
            )
        self.served = self.served or answer.reward
        return torch.tensor(
            [torch.nan if score is None else score for score in answer.scores], dtype=torch.float64
        ).float()


def _body(part: tuple[Tensor, list[str]]) -> dict[str, Any]:
    """The request for pictures and their prompts."""
    images, prompts = part
    body: dict[str, Any] = {
        "images": [encode_png(picture) for picture in to_pil(images)],
        "prompts": prompts,
    }
    if any(isinstance(prompt, Prompt) and prompt.metadata for prompt in prompts):
        body["metadata"] = [
            dict(prompt.metadata) if isinstance(prompt, Prompt) else {} for prompt in prompts
        ]
    inputs = {
        path: picture
        for prompt in dict.fromkeys(prompts)
        for path, picture in zip(images_of(prompt), read_inputs(prompt), strict=True)
    }
    if inputs:
        places = {path: place for place, path in enumerate(inputs)}
        body["inputs"] = [encode_png(picture) for picture in inputs.values()]
        body["inputs_of"] = [[places[path] for path in images_of(prompt)] for prompt in prompts]
    return body
