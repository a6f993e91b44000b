"""Two ways to ask a vision-language model about pictures: at an OpenAI-compatible server, and in
this process by transformers.

With two `words`, such as yes and no, the answer is P(first) / (P(first) + P(second)) of its first
word, in [0, 1]: VQAScore (arXiv 2404.01291) in the form that also divides by P(no).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from PIL import Image
from pydantic import BaseModel, BeforeValidator, Field
from torch import Tensor

from g2rpo.core.errors import did_you_mean, shown
from g2rpo.rewards.answers import Said, Unread
from g2rpo.rewards.remote import encode_png
from g2rpo.rewards.transport import Client, Endpoint, NoAnswer, Refused, without_token
from g2rpo.rewards.weights import check_config, fetch, parse_dtype, place_of, pretrained

MOST_LIKELY = 20
"""The number of most likely tokens requested: the largest that OpenAI, and vLLM by default,
allow."""
TEXT = ("text", "output_text")
"""The types of parts of a message that are text."""
Answer = Said | float | None
"""What the model said, or a probability; None if no answer came."""


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
    has further fields of every request, such as {"temperature": 0.7}, 0 unless given."""

    def __init__(
        self,
        url: str,
        model: str,
        words: tuple[str, str] | None,
        max_tokens: int | None,
        request: Mapping[str, Any] | None,
        endpoint: Endpoint | None,
    ) -> None:
        self.client, self.words = Client(url, endpoint, concurrency=8), words
        given = dict(request or {})
        if "max_completion_tokens" in given:  # the newer name of max_tokens: no server takes both
            given.setdefault("max_tokens", None)
        settings: dict[str, Any] = {
            "model": model,
            "temperature": 0.0,
            "max_tokens": max_tokens or (1024 if words is None else 1),
        }
        if words is not None:
            settings |= {"logprobs": True, "top_logprobs": MOST_LIKELY}
        settings |= given
        self.settings = {key: value for key, value in settings.items() if value is not None}

    def __call__(self, questions: Sequence[JudgeQuestion]) -> Sequence[Answer]:
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


class LoadedModel:
    """A model that transformers loads from the folder or repository `path` for
    "image-text-to-text"; answers are greedy.

    Raises ValueError for a model that is none, OSError if it is not there.
    """

    def __init__(
        self, path: str, words: tuple[str, str] | None, max_tokens: int, device: str, dtype: str
    ) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        fetch(path, "config.json")  # says what is wrong with a path
        check_config(path)  # before the processor is made
        self.processor = AutoProcessor.from_pretrained(place_of(path))
        if (
            getattr(self.processor, "image_processor", None) is None
            or self.processor.chat_template is None
        ):
            raise ValueError(
                f"{path} is no vision-language model that chats: its processor has no pictures or no chat template"
            )
        self.processor.tokenizer.padding_side = "left"  # answers are at the right
        model = pretrained(
            AutoModelForImageTextToText, path, dtype=parse_dtype(dtype), use_safetensors=True
        )
        self.model, self.max_tokens = model.to(device), max_tokens
        vocabulary = torch.arange(self.model.get_output_embeddings().weight.shape[0])
        tokens = [
            token.strip().lower()
            for token in self.processor.tokenizer.batch_decode(vocabulary[:, None])
        ]
        self.places = [
            [place for place, token in enumerate(tokens) if token == word] for word in words or ()
        ]
        if words is not None and not all(self.places):
            raise ValueError(
                f"{path}: its vocabulary has no token for {' or for '.join(words)}; take form=final"
            )

    @torch.no_grad()
    def __call__(self, questions: Sequence[JudgeQuestion]) -> Sequence[Answer]:
        if not questions:
            return []
        chats = [_chat(question) for question in questions]
        texts = self.processor.apply_chat_template(chats, add_generation_prompt=True)
        shown = [
            [picture.convert("RGB") for picture in question.pictures] for question in questions
        ]
        inputs = self.processor(text=texts, images=shown, padding=True, return_tensors="pt")
        inputs = inputs.to(self.model.device, self.model.dtype)
        if self.places:
            return self._probabilities(
                self.model(**inputs, logits_to_keep=1).logits[:, -1]
            ).tolist()
        tokens = self.model.generate(**inputs, max_new_tokens=self.max_tokens, do_sample=False)
        texts = self.processor.batch_decode(
            tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return [Said(text, "stop") for text in texts]

    def _probabilities(self, logits: Tensor) -> Tensor:
        each = logits.float().log_softmax(-1)
        first, second = (each[:, places].logsumexp(-1) for places in self.places)
        return torch.sigmoid(first - second)


def _chat(question: JudgeQuestion) -> list[dict[str, Any]]:
    pictures = [{"type": "image", "image": picture} for picture in question.pictures]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": question.text}]}]
