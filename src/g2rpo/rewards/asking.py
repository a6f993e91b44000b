"""Asks a vision-language model at an OpenAI-compatible server about pictures, and reads what counts
as its answer.

A text counts if it ended by itself; of it what stands after the thoughts; and a number there whose
form is known. Of log-probs the first word after the thoughts counts, if yes and no have at least half
of the probability. Everything else is `Unread`, with the reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from PIL import Image
from pydantic import BaseModel, BeforeValidator, Field

from g2rpo.core.errors import did_you_mean, shown
from g2rpo.core.http import NoAnswer, Refused, without_token
from g2rpo.rewards.remote import Client, Endpoint, encode_png

MOST_LIKELY = 20
"""The number of most likely tokens requested: the largest that OpenAI, and vLLM by default,
allow."""
TEXT_PARTS = ("text", "output_text")
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

    @property
    def likely(self) -> list[tuple[str, float]]:
        return [(each.token, math.exp(each.logprob)) for each in self.top_logprobs]


class LogProbs(BaseModel):
    content: list[Token] | None = None


def _joined(content: Any) -> Any:
    """The text of a content that comes in parts, of which thoughts are none; of null it is empty."""
    if not isinstance(content, list):
        return content or ""
    parts = [part if isinstance(part, dict) else {"text": part} for part in content]
    texts = [part.get("text") for part in parts if part.get("type", "text") in TEXT_PARTS]
    return "".join(text for text in texts if isinstance(text, str))


class Message(BaseModel):
    content: Annotated[str, BeforeValidator(_joined)] = ""


class Choice(BaseModel):
    message: Message = Message()
    finish_reason: str | None = None
    logprobs: LogProbs | None = None


class Completion(BaseModel):
    """What is read of a chat completion; the rest is ignored."""

    choices: Annotated[list[Choice], Field(min_length=1)]

    @property
    def said(self) -> Said:
        choice = self.choices[0]
        listed = None if choice.logprobs is None else choice.logprobs.content
        tokens = None if listed is None else [(each.token, each.likely) for each in listed]
        return Said(choice.message.content, (choice.finish_reason or "").lower() or None, tokens)


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


STOPPED = ("stop", "eos", "eos_token", "stop_sequence", "end_turn", "complete", "completed")
"""How servers call the end of an answer that ended by itself."""
_BLANKS = " \t\r\n\u2581\u0120\u010a"
"""White space, and its forms in raw vocabulary entries."""
CUT_OFF = ("length", "max_tokens", "model_length")
LEAST_MASS = 0.5


class Unread(ValueError):
    """Why what a model said is no answer."""


class Said(NamedTuple):
    """What a model said: its text, how that ended in the server's word, and its tokens, each with
    the probabilities of the likeliest ones in its place; None without log-probs."""

    text: str
    ended: str | None
    tokens: Sequence[tuple[str, Sequence[tuple[str, float]]]] | None = None


_THOUGHT = r"(?:\w{1,20}:)?(?:think|thinking|thoughts?|reason|reasoning|reflection|analysis)"
_TAG = re.compile(
    rf"<\|?(?:begin_of_)?{_THOUGHT}\|?>|\[think\]|◁think▷|<\|channel>thought|"
    rf"(<\|?(?:/|end_of_){_THOUGHT}\|?>|\[/think\]|◁/think▷|<channel\|>)",
    re.IGNORECASE,
)
"""The begin of thoughts, or their end."""
_BOX = re.compile(
    r"(?:<\|begin_of_box\|>(.*?)(?:<\|end_of_box\|>|\Z)|<answer>(.*?)(?:</answer>|\Z)|\\boxed\s?\{([^\n]{0,200})\})"
    r"(\$?\s{0,3}(?:/|out of|\\?%)\s?\d{0,9})?",
    re.IGNORECASE | re.DOTALL,
)
"""Where an answer stands alone, and what it is out of."""
_MARKS = re.compile(
    r"<\|(?:begin|end)_of_box\|>|</?[a-z]\w{0,20}>|\\(?:boxed|text\w{0,9})|[*`$#{}\\\"]",
    re.IGNORECASE,
)
"""What stands around names and numbers and means nothing."""
# Every repetition is bounded: an answer of a million blanks would otherwise be tried in a million ways.
_NUMBER = re.compile(
    r"[\s_\[(<]{0,20}(\d{1,9}(?:\.\d{1,20}|,\d\d?(?!\d))?)(?![a-z])"
    r"(?:[\s_\])>]{0,9}(?:,?\s?\(?(?:[/／]|out of|of)\s?(\d{1,9}(?:\.\d{1,9})?)|([%％])))?",
    re.IGNORECASE,
)
"""A number, what it is out of, and a sign of percent."""
_BEFORE = r"\s{0,9}_{0,2}(?:[(（\[][^()（）\[\]\n]{0,30}[)）\]])?_{0,2}[^\S\n]{0,9}[:：=|\n]"
"""What stands between a name and its number, such as " (1-5):"."""
_MORE = re.compile(r"[\s_\])>]{0,9}[+×÷/±~≈=→^]|.*[\d½¼¾]")
"""How a line goes on after a number that is not the score: "+ 1 = 4", "to 5"."""


def after_thoughts(text: str) -> int:
    """The place in `text` from which on it is no thought."""
    tags = list(_TAG.finditer(text))
    if not tags:
        return 0
    if tags[-1][1] is None:
        raise Unread("its thoughts have no end")
    return tags[-1].end()


def probability_of_yes(said: Said) -> float:
    """P(yes) / (P(yes) + P(no)), in all spellings ("Yes", " yes", "YES"), in the place of the first
    word after the thoughts: VQAScore (arXiv 2404.01291) in the form that also divides by P(no). A
    word that is not listed there has probability 0."""
    if said.ended not in (*STOPPED, *CUT_OFF, None):
        raise Unread(f"it did not end by itself (finish_reason: {said.ended})")
    if said.tokens is None:
        raise Unread("it has no log-probs")
    begin, end = after_thoughts("".join(token for token, _ in said.tokens)), 0
    for token, likely in said.tokens:
        end += len(token)
        if end <= begin or not _word_of(token):
            continue
        found = {"yes": 0.0, "no": 0.0}
        for spelling, probability in likely:
            if _word_of(spelling) in found:
                found[_word_of(spelling)] += probability
        if (mass := sum(found.values())) >= LEAST_MASS:
            return found["yes"] / mass
        raise Unread(
            f"it begins with {shown(token)}: yes and no have a probability of {mass:.1g} there, not of a half or more"
        )
    raise Unread("it has no word after its thoughts")


def _word_of(token: str) -> str:
    """The word of a token, in small letters; none of white space, marks and tags."""
    return re.sub(r"<[^<>]*>|[*_`\"'.,!:#{}]", "", token).strip(_BLANKS).lower()


def scores_in(said: Said, names: Sequence[str], low: float, high: float) -> list[float]:
    """The scores of these names, each from `low` to `high`.

    The last mention of a name counts, because an answer may quote its instructions. A single score
    may also be the whole answer, or stand alone in a box.
    """
    if said.ended is None:
        raise Unread("its server does not say how it ended (no finish_reason)")
    if said.ended in CUT_OFF:
        raise Unread(f"it was cut off (finish_reason: {said.ended}); give it more max_tokens")
    if said.ended not in STOPPED:
        raise Unread(f"it did not end by itself (finish_reason: {said.ended})")
    text = said.text[after_thoughts(said.text) :]
    if not text.strip():
        raise Unread("it has no text after its thoughts")
    if len(names) == 1 and (boxes := _BOX.findall(text)):
        text = "".join(boxes[-1])
    # in JSON a line ends before the next key
    text = _MARKS.sub("", re.sub(r",\s{0,20}\"", "\n", text))
    return [_score(text, name, names, low, high) for name in names]


def _score(text: str, name: str, names: Sequence[str], low: float, high: float) -> float:
    mentions = list(re.finditer(rf"(?<![^\W_]){_written(name)}{_BEFORE}", text, re.IGNORECASE))
    alone = len(names) == 1 and not mentions
    if not mentions and not alone:
        raise Unread(f"it does not say {shown(name)}")
    rest = text if alone else text[mentions[-1].end() :]
    found = _NUMBER.match(rest)
    if found is None:
        raise Unread(f"it has no number for {shown(name)}")
    number, most, percent = found.groups()
    after = rest[found.end() :]
    line = re.split("|".join(["\n", *map(_written, names)]), after, flags=re.IGNORECASE)[0]
    if _MORE.match(line) or (alone and re.search(r"\w", after)):
        raise Unread(f"what it says of {shown(name)} is more than a number")
    if (most or percent) and float(most or 100) != high:
        raise Unread(f"its {shown(name)} is out of {most or 100}, not of {high:g}")
    score = float(number.replace(",", "."))
    if not low <= score <= high:
        raise Unread(f"its {shown(name)} is {score:g}, not from {low:g} to {high:g}")
    return score


def _written(name: str) -> str:
    """The pattern of a name: "Final Score", "final_score", "finalScore"."""
    return r"[\s_-]{0,3}".join(map(re.escape, name.split()))
