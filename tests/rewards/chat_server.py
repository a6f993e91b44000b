"""A small OpenAI-compatible server with a language model of eight words, which answers as vLLM and
llama.cpp do."""

import base64
import io
import json
import math
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from PIL import Image, ImageStat

from tests.support.servers import serving

WORDS = ("Yes", " yes", "YES", "No", " no", "The", "I", "\u2581Yes")


def brightness(logits_of_yes):
    """A model that says yes to bright pictures: its logits of `WORDS`, from a picture's mean in [0,
    1] and the text."""
    return lambda mean, text: (logits_of_yes * mean, mean, -2.0, 1.0, 0.5, -1.0, -3.0, -2.5)


def mean_of(part):
    """The mean in [0, 1] of the picture that a part of a message holds."""
    png = base64.b64decode(part["image_url"]["url"].partition(",")[2])
    return sum(ImageStat.Stat(Image.open(io.BytesIO(png))).mean) / 3 / 255


@contextmanager
def running(server):
    """The address of a server while it runs."""
    with serving(server):
        host, port = server.server_address[:2]
        yield f"http://{host!s}:{port}"


class ChatServer(ThreadingHTTPServer):
    """Serves `logits`, and as text the first likeliest word or `says`, which may be a function of
    the request; `requests` keeps the bodies that it was sent.

    vLLM knows its model by name, allows 20 log-probs, and writes -inf as -9999; llama.cpp takes any
    name.
    """

    def __init__(self, style, logits=None, says=None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.style, self.logits, self.says = style, logits or brightness(4.0), says
        self.requests = []
        self.finish, self.logprobs, self.vision = "stop", True, True

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def complete(self, body):
        """Status and answer of a chat completion."""
        self.requests.append(body)
        vllm = self.style == "vllm"
        if vllm and body["model"] != "judge":
            return self.error(404, "NotFoundError", f"The model `{body['model']}` does not exist.")
        if body.get("top_logprobs", 0) > 20 and vllm:
            return self.error(
                400,
                "BadRequestError",
                "Requested sample logprobs of 21, which is greater than max allowed: 20",
            )
        if not self.vision:
            return self.error(500, "server_error", "image input is not supported")
        row = self.first_token(body)
        message = {
            "role": "assistant",
            "content": self.says(body) if callable(self.says) else self.says or row["token"],
        }
        if self.finish == "length":
            message["content"] = None
        asked = bool(body.get("logprobs")) and self.logprobs
        choice = {"index": 0, "message": message, "finish_reason": self.finish}
        choice |= {"logprobs": {"content": [row]} if asked else None} if vllm or asked else {}
        return 200, {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "choices": [choice],
            "usage": {},
        }

    def first_token(self, body):
        *pictures, text = body["messages"][0]["content"]
        logits = self.logits(mean_of(pictures[-1]), text["text"])
        total = math.log(sum(math.exp(value) for value in logits))
        rows = [
            self.row(number, word, value - total)
            for number, (word, value) in enumerate(zip(WORDS, logits, strict=True))
        ]
        rows.sort(key=lambda row: -row["logprob"])
        return {**rows[0], "top_logprobs": rows[: body.get("top_logprobs", 0)]}

    def row(self, number, word, logprob):
        own = {"token": word, "bytes": list(word.encode()), "logprob": max(logprob, -9999.0)}
        return own if self.style == "vllm" else {"id": number, **own}

    def error(self, status, kind, message):
        return status, {"error": {"message": message, "type": kind, "code": status}}

    def models(self):
        vllm = self.style == "vllm"
        row = {
            "id": "judge" if vllm else "/models/judge.gguf",
            "object": "model",
            "owned_by": "vllm" if vllm else "llamacpp",
        }
        return {"object": "list", "data": [row]}


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_GET(self):
        self.answer(200, self.server.models())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(*self.server.complete(body))

    def answer(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass
