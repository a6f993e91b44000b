"""Asks a vision-language model at an OpenAI-compatible server about pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from PIL import Image
from pydantic import BaseModel, BeforeValidator, Field

from g2rpo.core.errors import did_you_mean, shown
from g2rpo.core.http import NoAnswer, Refused, without_token
from g2rpo.rewards.answers import Said, Unread
from g2rpo.rewards.client import Client, Endpoint
from g2rpo.rewards.remote import encode_png

MOST_LIKELY = 20
"""The number of most likely tokens requested: the largest that OpenAI, and vLLM by default,
allow."""
TEXT = ("text", "output_text")
"""The types of parts of a message that are text."""


class JudgeQuestion(NamedTuple):
    """Pictures, and the text after them."""

    pictures: Sequence[Image.Image]
    text: str


class Likely(BaseModel):
    token: str
    logprob: float = Field(le=1e-3)  # rounded, it may be a little above 0


class Token(BaseModel):
    token: str = ""
    top_logprobs: list[Likely] = []


class LogProbs(BaseModel):
    content: list[Token] | None = None


def _joined(content: Any) -> Any:
    """The text of a content that comes in parts, of which thoughts are none; of null it is empty."""
    if not isinstance(content, list):
        return content or ""
    parts = [part if isinstance(part, dict) else {"text": part} for part in content]
    texts = [part.get("text") for part in parts if part.get("type", "text") in TEXT]
    return "".join(text for text in texts if isinstance(text, str))


class Message(BaseModel):
    content: Annotated[str, BeforeValidator(_joined)] = ""


class AnswerLetter(BaseModel):
    message: Message = Message()
    finish_reason: str | None = None
    logprobs: LogProbs | None = None


class Completion(BaseModel):
    """What is read of a chat completion; the rest is ignored."""

    choices: Annotated[list[AnswerLetter], Field(min_length=1)]

    @property
    def said(self) -> Said:
        choice = self.choices[0]
        listed = None if choice.logprobs is None else choice.logprobs.content
        tokens = None if listed is None else [(token.token, _likely(token)) for token in listed]
        return Said(choice.message.content, (choice.finish_reason or "").lower() or None, tokens)


def _likely(token: Token) -> list[tuple[str, float]]:
    return [(each.token, math.exp(each.logprob)) for each in token.top_logprobs]


class ServedModel:
    """The `model` of an OpenAI-compatible server at `url`, asked as its `endpoint` says; `request`
    has further fields of every request, such as {"temperature": 0.7}, 0 unless given. With `yes_no`
    the likeliest first tokens are asked for."""

    def __init__(
        self,
        url: str,
        model: str,
        yes_no: bool,
        max_tokens: int | None,
        request: Mapping[str, Any] | None,
        endpoint: Endpoint | None,
    ) -> None:
        self.client = Client(url, endpoint, concurrency=8)
        given = dict(request or {})
        if "max_completion_tokens" in given:  # the newer name of max_tokens: no server takes both
            given.setdefault("max_tokens", None)
        settings: dict[str, Any] = {
            "model": model,
            "temperature": 0.0,
            "max_tokens": max_tokens or (1 if yes_no else 1024),
        }
        if yes_no:
            settings |= {"logprobs": True, "top_logprobs": MOST_LIKELY}
        settings |= given
        self.settings = {key: value for key, value in settings.items() if value is not None}

    def __call__(self, questions: Sequence[JudgeQuestion]) -> Sequence[Said | None]:
        """What the model said to each; None if no answer came."""
        return self.client.ask(
            "/chat/completions", Completion, questions, self._body, lambda _, answer: answer.said
        )

    def check(self, trial: JudgeQuestion, read: Callable[[Said], float]) -> None:
        """NoAnswer unless the server has the model, and gives a `trial` an answer that can be
        `read`."""
        client, model = self.client, self.settings["model"]
        try:
            listed = client.once("/models", object)
        except Refused as error:
            raise Refused(
                f"{error}\nA gateway that has no list of models is taken with endpoint: {{check: false}}."
            ) from None
        if (fault := _unlisted(listed, model)) is not None:
            raise NoAnswer(f"{client.url}/models {without_token(fault, client.token)}")
        body = self._body(trial)
        said = client.once("/chat/completions", Completion, body, client.endpoint.timeout_s).said
        try:
            read(said)
        except Unread as error:
            quoted = without_token(f"{error}. It says: {shown(said.text)}", client.token)
            raise NoAnswer(
                f"{client.url}/chat/completions: the answer to a trial question cannot be read: {quoted}"
            ) from None

    def _body(self, question: JudgeQuestion) -> dict[str, Any]:
        urls = [f"data:image/png;base64,{encode_png(picture)}" for picture in question.pictures]
        content = [
            *({"type": "image_url", "image_url": {"url": url}} for url in urls),
            {"type": "text", "text": question.text},
        ]
        return {**self.settings, "messages": [{"role": "user", "content": content}]}


def _unlisted(answer: Any, model: str) -> str | None:
    """The fault of a model that the endpoint does not list; llama.cpp answers for any name, and
    other lists are not understood."""
    rows = answer.get("data") if isinstance(answer, dict) else None
    listed = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    names = [str(row.get("id")) for row in listed]
    if names and model not in names and all(row.get("owned_by") != "llamacpp" for row in listed):
        return f"has no model {shown(model)}, but {shown(names)}.{did_you_mean(model, names)}"
    return None
