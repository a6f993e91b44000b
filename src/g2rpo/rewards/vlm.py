"""A vision-language model as judge, over any OpenAI-compatible endpoint (vLLM, SGLang, llama.cpp, a hosted service).

Three forms of answer are understood: one "Final Score: 1-5" (UnifiedReward, Wang et al. 2025, arXiv 2503.05236), several named
scores ("Alignment", "Coherence" and "Style" of UnifiedReward 2.0; for edits "Success", "Faithfulness" and "Quality"), and the
probability that the answer begins with "yes" (VQAScore, arXiv 2404.01291). What edits are asked about, and how their scores
are combined, follows VIEScore (arXiv 2312.14867) and EditScore (arXiv 2509.23909). The default instructions ask any capable
model for them, in this project's words; a model that was trained on one fixed instruction should be given that one
(`template`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from g2rpo.core.errors import at_least_one, did_you_mean
from g2rpo.core.images import to_pil
from g2rpo.core.input_pictures import INPUT, images_of, read_inputs
from g2rpo.rewards.instructions import read_instruction
from g2rpo.rewards.pixels import PictureReward
from g2rpo.rewards.remote import encode_png
from g2rpo.rewards.transport import NoAnswer, Patience, brief, endpoint, request_json, token_from, within, without_token
from g2rpo.rewards.yes_no import MOST_LIKELY, Completion, yes_probability

Part = Mapping[str, Any]
"""A picture or text of a message."""


@dataclass(frozen=True)
class Form:
    """The judge's instruction, with {prompt} in it; the names of the scores in its answer (none: "yes" or "no"), each from
    `low` to `high`; and how they become one. One that is about an `edit` needs input pictures."""

    template: str
    scores: tuple[str, ...] = ()
    low: float = 1.0
    high: float = 5.0
    combine: Callable[[Sequence[float]], float] = lambda values: sum(values) / len(values)
    edit: bool = False


def of_edit(values: Sequence[float]) -> float:
    """The geometric mean of quality, the last value, and the least of the others: each can spoil an edit alone."""
    return math.sqrt(min(values[:-1]) * values[-1])


EDITED = "The last picture was made from what is before it, by this instruction:\n{prompt}\n\n"
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
    "edit": Form(
        EDITED + "Give it three scores, each a number from 0 to 10: success, how completely it does what the instruction says, "
        "0 if nothing of that was done; faithfulness, how well everything is kept that the instruction does not speak of "
        "(people, things, background, framing), 0 if it is another scene; quality, how natural and free of defects it is, "
        "0 if it is useless. First say briefly what has changed and what should have. Then end with these three lines:\n"
        "Success Score (0-10): <number>\nFaithfulness Score (0-10): <number>\nQuality Score (0-10): <number>",
        ("Success Score", "Faithfulness Score", "Quality Score"),
        low=0.0,
        high=10.0,
        combine=of_edit,
        edit=True,
    ),
    "edit_yes_no": Form(
        EDITED + "Was that done, completely, and is everything else as it was before? Answer with one word, Yes or No.",
        edit=True,
    ),
}
# "(1-5)", bold marks and a colon may stand before the number; a range ("1-5", "1 to 5") is an instruction, not a score
# Every repetition is bounded: an answer of a million blanks would otherwise be tried in a million ways.
_NUMBER = (
    r"[\s*_]{0,20}(?:\(\s{0,9}\d{1,2}\s{0,9}-\s{0,9}\d{1,2}\s{0,9}\))?[\s*_]{0,20}:[\s*_<]{0,20}"
    r"(\d{1,9}(?:\.\d{1,9})?)(?![\d.]{0,20}[^\S\n]{0,20}(?:-|to)[^\S\n]{0,20}\d)"
)


def parse_scores(text: str, names: Sequence[str], form: Form = FORMS["final"]) -> float:
    """The scores called `names` in a judge's answer, combined by its `form`; NaN if one is missing or out of the form's range.

    Text between <think> and </think> is ignored. The last mention of a name counts, because an answer may quote its
    instructions.
    """
    decided = text.rpartition("</think>")[2]
    if "<think>" in decided:  # truncated within <think>
        return torch.nan
    values = []
    for name in names:
        found = re.findall(re.escape(name) + _NUMBER, decided, re.IGNORECASE)
        values.append(float(found[-1]) if found else torch.nan)
    return form.combine(values) if all(form.low <= value <= form.high for value in values) else torch.nan


class VLMJudge(PictureReward):
    """A score by a vision-language model; NaN, and one warning that counts them, where it gives none.

    It sees a prompt's input pictures, if there are any, and then the picture. From 1 to 5 for the forms "final" and "aspects",
    from 0 to 10 for "edit": sqrt(min(success, faithfulness) * quality). For "yes_no" and "edit_yes_no" P(yes) / (P(yes) +
    P(no)) of the answer's first token, from 0 to 1: continuous, so that members of a group do not tie.

    Args: `url`, up to and with the version, such as http://127.0.0.1:8000/v1; `model`, its name there; `form`; `template`, the
    instruction instead of the form's, with {prompt} where the prompt goes: the text itself, FILE.txt, or FILE.py:NAME for a
    string that a Python file assigns (it is read, not run); `aspects`, the names of scores of which the mean is taken instead;
    `api_key_env`, the environment variable with the key; `image_size`, to which the longer side of a larger picture is
    reduced; `max_tokens` of the answer (1024; for yes or no 1); `request`, further fields of every request, such
    as {"temperature": 0.7}, 0 unless given; `concurrency`, requests at a time; `timeout_s` for each; `retries`
    and `backoff_s`, the first wait; `check`, ask the endpoint for its models now, and one question about grey pictures for yes
    or no and for edits, so that a wrong address, key or model, or a server without log-probs or with room for one picture
    alone, fails here.
    Raises ValueError for bad settings, FileNotFoundError for a missing template, OSError if the check fails or a request is
    refused.
    """

    forms: ClassVar[Mapping[str, Form]] = FORMS
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
        retries: int = 6,
        backoff_s: float = 1.0,
        check: bool = True,
    ) -> None:
        self.form, self.template, self.names = judging(self.forms, form, template, aspects)
        self.url, self.token = endpoint(url, "/chat/completions"), token_from(api_key_env)
        self.settings: dict[str, Any] = {"model": model, "temperature": 0.0, "max_tokens": max_tokens or 1024}
        if not self.names:
            self.settings |= {"max_tokens": max_tokens or 1, "logprobs": True, "top_logprobs": MOST_LIKELY}
        self.settings |= request or {}
        at_least_one(image_size=image_size)
        self.image_size, self.concurrency = image_size, concurrency
        self.patience = Patience(timeout_s, retries, backoff_s)
        within("concurrency", concurrency, 1, 1000)
        if check:
            self._check(endpoint(url, "/models"), min(timeout_s, 10.0))

    @classmethod
    def fault(cls, options: Mapping[str, Any], prompts: Sequence[str]) -> str | None:
        form, edits = FORMS.get(options["form"]), [prompt for prompt in prompts if images_of(prompt)]
        if form is not None and form.edit and not edits:
            return f"form={options['form']} is for edits, but none of {len(prompts)} prompts has {INPUT}"
        if form is not None and not form.edit and edits and options["template"] is None:
            own = f"form={options['form']} asks about a picture from a description, but prompt {edits[0]!r:.60} has {INPUT}"
            return f"{own}: take form=edit or form=edit_yes_no, or a template of your own"
        return None

    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        before = {prompt: self._parts(read_inputs(prompt)) for prompt in dict.fromkeys(prompts)}
        asked = [([*before[p], part], p) for part, p in zip(self._parts(to_pil(images)), prompts, strict=True)]
        return torch.tensor(self._answers([None if self.form.edit and not before[one[1]] else one for one in asked]))

    def _answers(self, asked: Sequence[tuple[Sequence[Part], str] | None]) -> list[float]:
        """What is read from an answer for each list of pictures and prompt, asked again if the endpoint fails; NaN for None and
        for answers without a readable score."""

        def answer(one: tuple[Sequence[Part], str] | None) -> float:
            if one is None:
                return torch.nan
            score = self.patience.call(partial(self._ask, *one, self.patience.timeout_s), self.url)
            return torch.nan if score is None else score

        with ThreadPoolExecutor(max_workers=self.concurrency) as pool:
            return list(pool.map(answer, asked))

    def _parts(self, pictures: Sequence[Image.Image]) -> list[Part]:
        """Pictures as parts of a message."""
        for picture in pictures:
            picture.thumbnail((self.image_size, self.image_size), Image.Resampling.BICUBIC)
        return [self._part(picture) for picture in pictures]

    def _part(self, picture: Image.Image) -> Part:
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encode_png(picture)}"}}

    def _instruction(self, prompt: str) -> str:
        return self.template.replace("{prompt}", prompt)

    def _ask(self, pictures: Sequence[Part], prompt: str, timeout_s: float, **settings: Any) -> float:
        content = [*pictures, {"type": "text", "text": self._instruction(prompt)}]
        body = {**self.settings, **settings, "messages": [{"role": "user", "content": content}]}
        answer = request_json(self.url, Completion, body=body, token=self.token, timeout_s=timeout_s)
        try:
            return self._read(answer)
        except NoAnswer as error:
            raise NoAnswer(f"{self.url} {error}") from None

    def _read(self, answer: Completion) -> float:
        return parse_scores(answer.text, self.names, self.form) if self.names else yes_probability(answer)

    def _check(self, models: str, timeout_s: float) -> None:
        answer, model = request_json(models, object, token=self.token, timeout_s=timeout_s), self.settings["model"]
        if (fault := _unlisted(answer, model)) is not None:
            raise NoAnswer(f"{models} {without_token(fault, self.token)}")
        if self.form.edit or self.group or not self.names:
            pictures = [Image.new("RGB", (64, 64), "grey")] * (2 if self.form.edit or self.group else 1)
            self._ask(self._parts(pictures), "a grey picture", timeout_s, max_tokens=1)


def judging(
    forms: Mapping[str, Form], form: str, template: str | None, aspects: Sequence[str] | None
) -> tuple[Form, str, tuple[str, ...]]:
    """The form of a judge's options, its instruction, and the names of the scores in its answers."""
    if form not in forms:
        raise ValueError(f"form must be one of {', '.join(forms)}, got {form!r}")
    chosen = forms[form] if aspects is None else replace(forms[form], combine=Form.combine)
    return (
        chosen,
        _template(chosen.template if template is None else template),
        tuple(chosen.scores if aspects is None else aspects),
    )


def _template(text: str) -> str:
    """The instruction itself, or the one in the file that `text` names."""
    template = read_instruction(text) if text.endswith((".txt", ".md")) or ".py:" in text else text
    if "{prompt}" not in template:
        raise ValueError("the template must contain {prompt} where the prompt goes")
    return template


def _unlisted(answer: Any, model: str) -> str | None:
    """The fault of a model that the endpoint does not list; llama.cpp answers for any name, and other lists are not
    understood."""
    rows = answer.get("data") if isinstance(answer, dict) else None
    listed = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    names = [str(row.get("id")) for row in listed]
    if names and model not in names and all(row.get("owned_by") != "llamacpp" for row in listed):
        return f"has no model {model!r}, but {brief(names)}.{did_you_mean(model, names)}"
    return None
