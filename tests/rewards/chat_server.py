"""A small OpenAI-compatible server with a language model of eight words, which answers as vLLM and
llama.cpp do."""

import base64
import io
import json
import math
from contextlib import contextmanager

from PIL import Image, ImageStat

from tests.support.servers import endpoint_that, replies

WORDS = ("Yes", " yes", "YES", "No", " no", "The", "I", "\u2581Yes")


def brightness(mean, text):
    """A model that says yes to bright pictures: its logits of `WORDS`, from a picture's mean in [0,
    1] and the text."""
    return 4 * mean, mean, -2.0, 1.0, 0.5, -1.0, -3.0, -2.5


def pictures_in(body):
    *pictures, _ = body["messages"][0]["content"]
    data = [part["image_url"]["url"].removeprefix("data:image/png;base64,") for part in pictures]
    return [Image.open(io.BytesIO(base64.b64decode(png))) for png in data]


def means_in(body):
    """The mean in [0, 1] of each picture of a request."""
    return [sum(ImageStat.Stat(picture).mean) / 3 / 255 for picture in pictures_in(body)]


def text_in(body):
    return body["messages"][0]["content"][-1]["text"]


@contextmanager
def chatting(style="vllm", **more):
    """A `ChatServer` while it runs, at its `url`."""
    server = ChatServer(style, **more)
    with endpoint_that(server.answer) as (url, _):
        server.url = f"{url}/v1"
        yield server


class ChatServer:
    """Serves `logits`, and as text the first likeliest word or `says(request)`; `requests` keeps the
    bodies that it was sent.

    vLLM knows its model by name, allows 20 log-probs, and writes -inf as -9999; llama.cpp takes any
    name.
    """

    def __init__(self, style, logits=brightness, says=None):
        self.vllm, self.logits, self.says = style == "vllm", logits, says
        self.requests = []
        self.finish, self.logprobs, self.vision = "stop", True, True
        self.filtered = lambda body: False

    def answer(self, handler, count):
        status, content = self.complete(json.loads(handler.body)) if count else self.models()
        replies(json.dumps(content), status)(handler, count)

    def models(self):
        llama = {"id": "/models/judge.gguf", "owned_by": "llamacpp"}
        return 200, {"data": [{"id": "judge", "owned_by": "vllm"} if self.vllm else llama]}

    def complete(self, body):
        """Status and answer of a chat completion."""
        self.requests.append(body)
        if self.vllm and body["model"] != "judge":
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if self.vllm and body.get("top_logprobs", 0) > 20:
            return 400, {"error": {"message": "logprobs of 21, greater than max allowed: 20"}}
        if self.filtered(body):
            return 400, {"error": {"message": "unsafe picture", "code": "content_filter"}}
        if not self.vision:
            return 500, {"error": {"message": "image input is not supported"}}
        row = self.first_token(body)
        said = self.says(body) if self.says else row["token"]
        asked = body.get("logprobs") and self.logprobs
        choice = {
            "message": {"content": said if self.finish == "stop" else None},
            "finish_reason": self.finish,
            "logprobs": {"content": [row]} if asked else None,
        }
        return 200, {"choices": [choice]}

    def first_token(self, body):
        logits = self.logits(means_in(body)[-1], text_in(body))
        total = math.log(sum(math.exp(value) for value in logits))
        rows = [
            {"token": word, "logprob": max(value - total, -9999.0)}
            for word, value in zip(WORDS, logits, strict=True)
        ]
        rows.sort(key=lambda row: -row["logprob"])
        return {**rows[0], "top_logprobs": rows[: body.get("top_logprobs", 0)]}
