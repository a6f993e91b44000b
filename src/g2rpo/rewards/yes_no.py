"""The probability that a language model answers yes, from the log-probs of an OpenAI-compatible chat completion."""

from __future__ import annotations

import math
from typing import Any

import torch

from g2rpo.rewards.transport import NoAnswer, brief

MOST_LIKELY = 20
"""The number of most likely tokens requested: the largest that OpenAI, and vLLM by default, allow."""
_BLANKS = " \t\r\n\u2581\u0120\u010a"
"""White space, and its forms in raw vocabulary entries."""


def yes_probability(answer: Any, words: tuple[str, str] = ("yes", "no")) -> float:
    """P(yes) / (P(yes) + P(no)), or of two other `words`, of the first token of a chat completion, in [0, 1] (VQAScore, arXiv
    2404.01291, in the form that also divides by P(no)).

    All spellings of a word count together: "Yes", " yes", "YES". A word that is not among the listed tokens has probability 0.
    NaN if neither is. Raises `NoAnswer` if the completion has no log-probs.
    """
    yes = no = 0.0
    for token, probability in first_token(answer):
        word = token.strip(_BLANKS).lower()
        yes += probability * (word == words[0])
        no += probability * (word == words[1])
    return yes / (yes + no) if yes + no > 0 else torch.nan


def first_token(answer: Any) -> list[tuple[str, float]]:
    """The likeliest first tokens of a completion with their probabilities; empty if the answer is empty."""
    try:
        content = answer["choices"][0]["logprobs"]["content"]
        if content == []:
            return []
        listed = [(row["token"], math.exp(row["logprob"])) for row in content[0]["top_logprobs"]]
    except (KeyError, IndexError, TypeError, OverflowError) as error:
        raise NoAnswer(f"answered no log-probs of its first token: {brief(answer)}") from error
    if not all(isinstance(token, str) and 0 <= probability <= 1.001 for token, probability in listed):
        raise NoAnswer(f"answered log-probs that are none: {brief(listed)}")
    return listed
