"""A vision-language model as judge, over any OpenAI-compatible endpoint (vLLM, SGLang, llama.cpp, a hosted service).

Three forms of answer are understood: one "Final Score: 1-5" (UnifiedReward, Wang et al. 2025, arXiv 2503.05236), three scores
"Alignment", "Coherence" and "Style" (UnifiedReward 2.0), and the probability that the answer begins with "yes" (VQAScore,
arXiv 2404.01291). The default instructions ask any capable model for them, in this project's words; a model that was trained on
one fixed instruction should be given that one (`template`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from g2rpo.core.errors import did_you_mean
from g2rpo.rewards.instructions import read_instruction
from g2rpo.rewards.pixels import PictureReward, to_pil
from g2rpo.rewards.remote import encode_png
from g2rpo.rewards.transport import NoAnswer, brief, check_patience, endpoint, request_json, token_from, with_retries
from g2rpo.rewards.yes_no import MOST_LIKELY, yes_probability


@dataclass(frozen=True)
class Form:
    """The judge's instruction, with {prompt} in it, and the names of the scores in its answer (none: "yes" or "no")."""

    template: str
    scores: tuple[str, ...] = ()


FORMS = {
    "final": Form(
        "The picture was generated from this description:\n{prompt}\n\n"
        "Judge two things together: whether everything the description names is in the picture as described (objects, "
        "numbers, attributes, relations), and how good the picture is (sharpness, detail, colour, absence of defects). "
        "First name the parts of the description that are there and those that are missing, briefly. Then end with one "
        "line, where 1 is useless and 5 is flawless:\nFinal Score: <a number from 1 to 5>",
        ("Final Score",),
    ),
    "aspects": Form(
        "The picture was generated from this description:\n{prompt}\n\n"
        "Give it three scores, each a number from 1 (useless) to 5 (flawless): alignment, how completely and exactly it "
        "shows what the description says; coherence, how free of broken anatomy, impossible geometry and other defects it "
        "is; style, how pleasing it is to look at. Answer with just these three lines:\n"
        "Alignment Score (1-5): <number>\nCoherence Score (1-5): <number>\nStyle Score (1-5): <number>",
        ("Alignment Score", "Coherence Score", "Style Score"),
    ),
    "yes_no": Form(
        "The picture was generated from this description:\n{prompt}\n\n"
        "Is everything that it names in the picture, as it is described? Answer with one word, Yes or No."
    ),
}
_LOW, _HIGH = 1.0, 5.0
# "(1-5)", bold marks and a colon may stand before the number; a range ("1-5", "1 to 5") is an instruction, not a score
# Every repetition is bounded: an answer of a million blanks would otherwise be tried in a million ways.
_NUMBER = (
    r"[\s*_]{0,20}(?:\(\s{0,9}1\s{0,9}-\s{0,9}5\s{0,9}\))?[\s*_]{0,20}:[\s*_<]{0,20}"
    r"(\d{1,9}(?:\.\d{1,9})?)(?![\d.]{0,20}\s{0,20}(?:-|to)\s{0,20}\d)"
)


def parse_scores(text: str, names: Sequence[str]) -> float:
    """The mean of the scores called `names` in a judge's answer, each from 1 to 5; NaN if one is missing or outside.

    Text between <think> and </think> is ignored. The last mention of a name counts, because an answer may quote its
    instructions.
    """
    decided = text.rpartition("</think>")[2]
    if "<think>" in decided:  # truncated within <think>
        return torch.nan
    values = []
    for name in names:
        found = re.findall(re.escape(name) + _NUMBER, decided, re.IGNORECASE)
        value = float(found[-1]) if found else torch.nan
        values.append(value if _LOW <= value <= _HIGH else torch.nan)
    return sum(values) / len(values)


class VLMJudge(PictureReward):
    """A score by a vision-language model; NaN, and one warning that counts them, where it gives none.

    From 1 to 5 for the forms "final" and "aspects". For "yes_no" P(yes) / (P(yes) + P(no)) of the answer's first token, from 0
    to 1: continuous, so that members of a group do not tie.

    Args: `url`, up to and with the version, such as http://127.0.0.1:8000/v1; `model`, its name there; `form`; `template`, the
    instruction instead of the form's, with {prompt} where the prompt goes: the text itself, FILE.txt, or FILE.py:NAME for a
    string that a Python file assigns (it is read, not run); `aspects`, the names of the scores to average instead of all the
    form's; `api_key_env`, the environment variable with the key; `image_size`, to which the longer side of a larger picture is
    reduced; `max_tokens` of the answer (1024; for "yes_no" 1); `request`, further fields of every request, such
    as {"temperature": 0.7}, 0 unless given; `concurrency`, requests at a time; `timeout_s` for each; `retries`
    and `backoff_s`, the first wait; `check`, ask the endpoint for its models now, and for "yes_no" one question about a grey
    picture, so that a wrong address, key or model, or a server without log-probs, fails here.
    Raises ValueError for bad settings, FileNotFoundError for a missing template, OSError if the check fails or a request is
    refused.
    """

    waits = asks = True
    missing = "the judge's answer has no score"

    def __init__(
        self,
        url: str,
        model: str,
        *,
        form: str = "final",
        template: str | None = None,
        aspects: Sequence[str] | None = None,
        api_key_env: str | None = None,
        image_size: int = 512,
        max_tokens: int | None = None,
        request: Mapping[str, Any] | None = None,
        concurrency: int = 8,
        timeout_s: float = 120.0,
        retries: int = 3,
        backoff_s: float = 1.0,
        check: bool = True,
    ) -> None:
        if form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
        asked = FORMS[form]
        self.template = _template(asked.template if template is None else template)
        self.names = tuple(asked.scores if aspects is None else aspects)
        self.url, self.token = endpoint(url, "/chat/completions"), token_from(api_key_env)
        self.settings: dict[str, Any] = {"model": model, "temperature": 0.0, "max_tokens": max_tokens or 1024}
        if not self.names:
            self.settings |= {"max_tokens": max_tokens or 1, "logprobs": True, "top_logprobs": MOST_LIKELY}
        self.settings |= request or {}
        self.image_size, self.concurrency = image_size, concurrency
        self.timeout_s, self.retries, self.backoff_s = timeout_s, retries, backoff_s
        check_patience(timeout_s=timeout_s, retries=retries, backoff_s=backoff_s, concurrency=concurrency)
        if check:
            self._check(endpoint(url, "/models"), min(timeout_s, 10.0))

    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        with ThreadPoolExecutor(max_workers=self.concurrency) as pool:
            return torch.tensor(list(pool.map(self._judge, to_pil(images), prompts)))

    def _judge(self, picture: Image.Image, prompt: str) -> float:
        """One request for one picture, repeated if the endpoint fails; an answer without a readable score is NaN."""
        ask = partial(self._ask, picture, prompt, self.timeout_s)
        score = with_retries(ask, retries=self.retries, backoff_s=self.backoff_s, what=self.url)
        return torch.nan if score is None else score

    def _ask(self, picture: Image.Image, prompt: str, timeout_s: float) -> float:
        picture.thumbnail((self.image_size, self.image_size), Image.Resampling.BICUBIC)
        content = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encode_png(picture)}"}},
            {"type": "text", "text": self.template.replace("{prompt}", prompt)},
        ]
        body = {**self.settings, "messages": [{"role": "user", "content": content}]}
        return float(request_json(self.url, body=body, token=self.token, timeout_s=timeout_s, read=self._read))

    @property
    def _read(self) -> Callable[[Any], float]:
        return partial(_named_scores, names=self.names) if self.names else yes_probability

    def _check(self, models: str, timeout_s: float) -> None:
        request_json(models, token=self.token, timeout_s=timeout_s, read=partial(_check_model, model=self.settings["model"]))
        if not self.names:
            self._ask(Image.new("RGB", (64, 64), "grey"), "a grey picture", timeout_s)


def _template(text: str) -> str:
    """The instruction itself, or the one in the file that `text` names."""
    template = read_instruction(text) if text.endswith((".txt", ".md")) or ".py:" in text else text
    if "{prompt}" not in template:
        raise ValueError("the template must contain {prompt} where the prompt goes")
    return template


def _check_model(answer: Any, model: str) -> None:
    """Refuses a model that the endpoint does not list; llama.cpp answers for any name, and other lists are not understood."""
    rows = answer.get("data") if isinstance(answer, dict) else None
    listed = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    names = [str(row.get("id")) for row in listed]
    if names and model not in names and all(row.get("owned_by") != "llamacpp" for row in listed):
        raise NoAnswer(f"has no model {model!r}, but {brief(names)}.{did_you_mean(model, names)}")


def _named_scores(answer: Any, names: Sequence[str]) -> float:
    return parse_scores(answer_text(answer), names)


def answer_text(answer: Any) -> str:
    """The text of a chat completion; `NoAnswer` if the JSON is something else."""
    try:
        choice = answer["choices"][0]
        text, why = choice["message"]["content"], choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise NoAnswer(f"answered no chat completion: {brief(answer)}") from error
    if text is None and why == "length":  # only reasoning until max_tokens, in a separate field
        return ""
    if not isinstance(text, str):
        raise NoAnswer(f"answered a chat completion without text: {brief(answer)}")
    return text
