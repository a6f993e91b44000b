"""Two ways to ask a vision-language model about pictures: at an OpenAI-compatible server, and in
this process by transformers.

An answer is a text, or with two `words`, such as yes and no, P(first) / (P(first) + P(second)) of
its first token, in [0, 1]: VQAScore (arXiv 2404.01291) in the form that also divides by P(no). All
spellings of a word count together: "Yes", " yes", "YES".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from PIL import Image
from pydantic import BaseModel, Field
from torch import Tensor

from g2rpo.core.errors import did_you_mean
from g2rpo.rewards.remote import encode_png
from g2rpo.rewards.transport import Client, Endpoint, NoAnswer, without_token
from g2rpo.rewards.weights import check_config, fetch, parse_dtype, place_of, pretrained

MOST_LIKELY = 20
"""The number of most likely tokens requested: the largest that OpenAI, and vLLM by default,
allow."""
_BLANKS = " \t\r\n\u2581\u0120\u010a"
"""White space, and its forms in raw vocabulary entries."""

ENDED = ("length", "content_filter")
"""How an answer ends that has no text, though the server works: only reasoning until max_tokens, in
a separate field; or a filter took the text out."""

Answer = str | float | None
"""A text, or a probability; None if there was no answer."""


class JudgeQuestion(NamedTuple):
    """Pictures, and the text after them."""

    pictures: Sequence[Image.Image]
    text: str


class Likely(BaseModel):
    token: str
    logprob: float = Field(le=1e-3)  # rounded, it may be a little above 0


class Token(BaseModel):
    top_logprobs: list[Likely]


class LogProbs(BaseModel):
    content: list[Token] | None = None


class Message(BaseModel):
    content: str | None = None


class AnswerLetter(BaseModel):
    message: Message = Message()
    finish_reason: str | None = None
    logprobs: LogProbs | None = None


class Completion(BaseModel):
    """What is read of a chat completion; the rest is ignored."""

    choices: Annotated[list[AnswerLetter], Field(min_length=1)]

    @property
    def text(self) -> str:
        """`NoAnswer` if there is none."""
        choice = self.choices[0]
        if choice.message.content is None and choice.finish_reason not in ENDED:
            raise NoAnswer("answered a chat completion without text")
        return choice.message.content or ""

    def probability_of(self, words: tuple[str, str]) -> float:
        """That of the first word. A word that is not among the listed tokens has probability 0. NaN
        if neither is; `NoAnswer` if the completion has no log-probs."""
        given = self.choices[0].logprobs
        if self.choices[0].finish_reason == "content_filter":
            return torch.nan
        if given is None or given.content is None:
            raise NoAnswer("answered no log-probs of its first token")
        found = dict.fromkeys(words, 0.0)
        for likely in given.content[0].top_logprobs if given.content else ():
            word = likely.token.strip(_BLANKS).lower()
            if word in found:
                found[word] += math.exp(likely.logprob)
        total = sum(found.values())
        return found[words[0]] / total if total > 0 else torch.nan


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
        self.settings: dict[str, Any] = {
            "model": model,
            "temperature": 0.0,
            "max_tokens": max_tokens or 1024,
        }
        if words is not None:
            self.settings |= {
                "max_tokens": max_tokens or 1,
                "logprobs": True,
                "top_logprobs": MOST_LIKELY,
            }
        self.settings |= request or {}

    def __call__(self, questions: Sequence[JudgeQuestion]) -> list[Answer]:
        return self.client.ask("/chat/completions", Completion, questions, self._body, self._read)

    def check(self, trial: JudgeQuestion | None) -> None:
        """NoAnswer unless the server has the model, and answers a `trial`."""
        answer, model = self.client.once("/models", object), self.settings["model"]
        if (fault := _unlisted(answer, model)) is not None:
            raise NoAnswer(f"{self.client.url}/models {without_token(fault, self.client.token)}")
        if trial is not None:
            body = {**self._body(trial), "max_tokens": 1}
            self._read(trial, self.client.once("/chat/completions", Completion, body))

    def _body(self, question: JudgeQuestion) -> dict[str, Any]:
        urls = [f"data:image/png;base64,{encode_png(picture)}" for picture in question.pictures]
        content = [
            *({"type": "image_url", "image_url": {"url": url}} for url in urls),
            {"type": "text", "text": question.text},
        ]
        return {**self.settings, "messages": [{"role": "user", "content": content}]}

    def _read(self, question: JudgeQuestion, answer: Completion) -> str | float:
        try:
            return answer.text if self.words is None else answer.probability_of(self.words)
        except NoAnswer as error:
            raise NoAnswer(f"{self.client.url}/chat/completions {error}") from None


def _unlisted(answer: Any, model: str) -> str | None:
    """The fault of a model that the endpoint does not list; llama.cpp answers for any name, and
    other lists are not understood."""
    rows = answer.get("data") if isinstance(answer, dict) else None
    listed = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    names = [str(row.get("id")) for row in listed]
    if names and model not in names and all(row.get("owned_by") != "llamacpp" for row in listed):
        return f"has no model {model!r}, but {names!r:.200}.{did_you_mean(model, names)}"
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
    def __call__(self, questions: Sequence[JudgeQuestion]) -> list[Answer]:
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
        answers: list[Answer] = self.processor.batch_decode(
            tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return answers

    def _probabilities(self, logits: Tensor) -> Tensor:
        each = logits.float().log_softmax(-1)
        first, second = (each[:, places].logsumexp(-1) for places in self.places)
        return torch.sigmoid(first - second)


def _chat(question: JudgeQuestion) -> list[dict[str, Any]]:
    pictures = [{"type": "image", "image": picture} for picture in question.pictures]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": question.text}]}]
