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
from typing import Any

import torch
from PIL import Image
from pydantic import BaseModel, FiniteFloat
from torch import Tensor

from g2rpo.core.errors import counted, shown
from g2rpo.core.http import NoAnswer, Refused
from g2rpo.core.images import images_of, read_inputs, to_pil
from g2rpo.core.types import Prompt
from g2rpo.rewards.client import Client, Endpoint
from g2rpo.rewards.pixels import PictureReward


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
    the server is asked (`transport.Endpoint`); its `check` asks for the server's health, and for
    `right`. Raises ValueError for a malformed address or a missing token, OSError if the check
    fails, the server refuses (`transport.Client.ask`), or it has another reward than before.
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
        unscored = [torch.full((len(asked),), torch.nan) for _, asked in parts]
        return torch.cat(
            [
                none if scores is None else scores
                for scores, none in zip(answers, unscored, strict=True)
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
    if paths := list(dict.fromkeys(path for prompt in prompts for path in images_of(prompt))):
        unique = dict.fromkeys(prompts)
        own = {
            path: one
            for prompt in unique
            for path, one in zip(images_of(prompt), read_inputs(prompt), strict=True)
        }
        body["inputs"] = [encode_png(own[path]) for path in paths]
        body["inputs_of"] = [
            [paths.index(path) for path in images_of(prompt)] for prompt in prompts
        ]
    return body
