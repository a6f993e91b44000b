"""OpenAI-compatible chat completions: their text, and the probability that it begins with yes, from log-probs."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from pydantic import BaseModel, Field

from g2rpo.rewards.transport import NoAnswer

MOST_LIKELY = 20
"""The number of most likely tokens requested: the largest that OpenAI, and vLLM by default, allow."""
_BLANKS = " \t\r\n\u2581\u0120\u010a"
"""White space, and its forms in raw vocabulary entries."""


class Likely(BaseModel):
    token: str
    logprob: float = Field(le=1e-3)  # rounded, it may be a little above 0


class Token(BaseModel):
    top_logprobs: list[Likely]


class LogProbs(BaseModel):
    content: list[Token] | None = None


class Message(BaseModel):
    content: str | None = None


class Choice(BaseModel):
    message: Message = Message()
    finish_reason: str | None = None
    logprobs: LogProbs | None = None


class Completion(BaseModel):
    """What is read of an answer; the rest is ignored."""

    choices: Annotated[list[Choice], Field(min_length=1)]

    @property
    def text(self) -> str:
        """`NoAnswer` if there is none."""
        choice = self.choices[0]
        if choice.message.content is None and choice.finish_reason != "length":
            raise NoAnswer("answered a chat completion without text")
        return choice.message.content or ""  # none: only reasoning until max_tokens, in a separate field

    @property
    def first_tokens(self) -> list[Likely]:
        """The likeliest first tokens; empty if the answer is empty. `NoAnswer` if the server gave no log-probs."""
        given = self.choices[0].logprobs
        if given is None or given.content is None:
            raise NoAnswer("answered no log-probs of its first token")
        return given.content[0].top_logprobs if given.content else []


def yes_probability(answer: Completion, words: tuple[str, str] = ("yes", "no")) -> float:
    """P(yes) / (P(yes) + P(no)), or of two other `words`, of the first token of a chat completion, in [0, 1] (VQAScore, arXiv
    2404.01291, in the form that also divides by P(no)).

    All spellings of a word count together: "Yes", " yes", "YES". A word that is not among the listed tokens has probability 0.
    NaN if neither is. Raises `NoAnswer` if the completion has no log-probs.
    """
    yes = no = 0.0
    for likely in answer.first_tokens:
        word, probability = likely.token.strip(_BLANKS).lower(), math.exp(likely.logprob)
        yes += probability * (word == words[0])
        no += probability * (word == words[1])
    return yes / (yes + no) if yes + no > 0 else torch.nan
