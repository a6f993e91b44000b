"""A reward that another process computes: the client of `g2rpo.rewards.server`, or of any server with that protocol.

For rewards whose dependencies do not fit into the trainer's environment, or whose model belongs on another GPU. The
protocol is JSON, so a server can be written in any language:

    GET  /health                                                        -> {"status": "ok", "reward": "name", "right": 0.5}
    POST /score  {"images": ["<PNG, base64>", ...], "prompts": [...]}   -> {"scores": [0.31, null, ...]}

    further fields:  "metadata": [{...}, ...]    "inputs": ["<PNG, base64>", ...], "inputs_of": [[0], [0, 1], ...]

`metadata` has an object for each prompt; `inputs` has the input pictures of all prompts, each once, and `inputs_of` those of
each prompt by their index. `right`, the least score of a right picture, may be left out. A null is a picture without a score.
Nothing is pickled, in neither direction.
"""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from g2rpo.core.errors import at_least_one
from g2rpo.core.images import to_pil
from g2rpo.core.input_pictures import images_of, read_inputs
from g2rpo.core.types import Prompt
from g2rpo.rewards.pixels import PictureReward
from g2rpo.rewards.transport import NoAnswer, brief, check_patience, endpoint, request_json, token_from, with_retries

LARGEST = torch.finfo(torch.float32).max


def encode_png(picture: Image.Image) -> str:
    """The picture as base64 of a PNG file: lossless, quick rather than small."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


class RemoteReward(PictureReward):
    """Scores from a reward server; a batch that stays unanswered after all retries is NaN, and a warning is logged.

    Args: `url`, such as http://127.0.0.1:8000; `token_env`, the environment variable with the server's token;
    `batch_size`, pictures per request, and `concurrency`, requests at a time; `timeout_s` for a whole request; `retries`
    and `backoff_s`, the first wait; `check`, ask the server for its health now, so that a wrong address fails here, and for
    `right`.
    Raises ValueError for a malformed address or a missing token, OSError if the check fails or a request is refused.
    """

    waits = asks = True

    def __init__(
        self,
        url: str,
        *,
        token_env: str | None = None,
        batch_size: int = 16,
        concurrency: int = 1,
        timeout_s: float = 120.0,
        retries: int = 3,
        backoff_s: float = 1.0,
        check: bool = True,
    ) -> None:
        self.url, self.token = endpoint(url, "/score"), token_from(token_env)
        self.per_request, self.concurrency, self.batch_size = batch_size, concurrency, batch_size * concurrency
        self.timeout_s, self.retries, self.backoff_s = timeout_s, retries, backoff_s
        check_patience(timeout_s=timeout_s, retries=retries, backoff_s=backoff_s, concurrency=concurrency)
        at_least_one(batch_size=batch_size)
        if check:
            url = endpoint(url, "/health")
            self.right = request_json(url, token=self.token, timeout_s=min(timeout_s, 10.0), read=parse_right)

    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        starts, size = range(0, len(images), self.per_request), self.per_request
        batches = [(images[i : i + size], prompts[i : i + size]) for i in starts]
        with ThreadPoolExecutor(max_workers=self.concurrency) as pool:
            return torch.cat(list(pool.map(lambda batch: self._request(*batch), batches)))

    def _request(self, images: Tensor, prompts: list[str]) -> Tensor:
        body: dict[str, Any] = {"images": [encode_png(picture) for picture in to_pil(images)], "prompts": prompts}
        if any(isinstance(prompt, Prompt) and prompt.metadata for prompt in prompts):
            body["metadata"] = [dict(prompt.metadata) if isinstance(prompt, Prompt) else {} for prompt in prompts]
        if paths := list(dict.fromkeys(path for prompt in prompts for path in images_of(prompt))):
            unique = dict.fromkeys(prompts)
            own = {path: one for prompt in unique for path, one in zip(images_of(prompt), read_inputs(prompt), strict=True)}
            body["inputs"] = [encode_png(own[path]) for path in paths]
            body["inputs_of"] = [[paths.index(path) for path in images_of(prompt)] for prompt in prompts]

        def ask() -> Tensor:
            read = partial(parse_scores, count=len(prompts))
            return request_json(self.url, body=body, token=self.token, timeout_s=self.timeout_s, read=read)

        scores = with_retries(ask, retries=self.retries, backoff_s=self.backoff_s, what=self.url)
        return torch.full((len(prompts),), torch.nan) if scores is None else scores


def parse_right(answer: Any) -> float | None:
    """The least score of a right picture that a server's health names; `NoAnswer` if it is no number."""
    right = answer.get("right") if isinstance(answer, dict) else None
    if right is None or (isinstance(right, int | float) and not isinstance(right, bool) and abs(right) < LARGEST):
        return right
    raise NoAnswer(f"should name a number as `right`, got {brief(right)}")


def parse_scores(answer: Any, count: int) -> Tensor:
    """`count` scores from a server's JSON, null and non-finite as NaN; `NoAnswer` if it is anything else."""
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list) or len(scores) != count:
        raise NoAnswer(f"should answer {{'scores': [{count} numbers]}}, got {brief(answer)}")
    if not all(s is None or (isinstance(s, int | float) and not isinstance(s, bool)) for s in scores):
        raise NoAnswer(f"answered scores that are not numbers: {brief(scores)}")
    return torch.tensor([torch.nan if s is None or not abs(s) < LARGEST else float(s) for s in scores])
