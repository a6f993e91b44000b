"""A vision-language model as judge, over any OpenAI-compatible endpoint (vLLM, SGLang, llama.cpp, a
hosted service).

Three forms of answer are understood: one "Final Score: 1-5" (UnifiedReward, Wang et al. 2025, arXiv
2503.05236), several named scores ("Alignment", "Coherence" and "Style" of UnifiedReward 2.0; for
edits "Success", "Faithfulness" and "Quality"), and the probability that the answer begins with
"yes" (VQAScore, arXiv 2404.01291). What edits are asked about, and how their scores are combined,
follows VIEScore (arXiv 2312.14867) and EditScore (arXiv 2509.23909). The default instructions ask
any capable model for them, in this project's words; a model that was trained on one fixed
instruction should be given that one (`template`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Annotated, Any, Literal

import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from g2rpo.core.errors import shown
from g2rpo.core.images import INPUT_PICTURE, images_of, read_inputs, to_pil
from g2rpo.core.plain import Count
from g2rpo.rewards.asking import (
    JudgeQuestion,
    Said,
    ServedModel,
    Unread,
    probability_of_yes,
    scores_in,
)
from g2rpo.rewards.pixels import PictureReward
from g2rpo.rewards.remote import Endpoint
from g2rpo.rewards.weights import read_instruction


@dataclass(frozen=True)
class Form:
    """The judge's instruction, with {prompt} in it; the names of the scores in its answer (none:
    "yes" or "no"), each from `low` to `high`; and how they become one. One that is about an `edit`
    needs input pictures."""

    template: str
    scores: tuple[str, ...] = ()
    low: float = 1.0
    high: float = 5.0
    combine: Callable[[Sequence[float]], float] = lambda values: sum(values) / len(values)
    edit: bool = False


def of_edit(values: Sequence[float]) -> float:
    """The geometric mean of quality, the last value, and the least of the others: each can spoil an
    edit alone."""
    return math.sqrt(min(values[:-1]) * values[-1])


EDITED = "The last picture was made from what is before it, by this instruction:\n{prompt}\n\n"
ScoreRange = tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(le=1e6)]]
"""The lowest and the highest score. Answers have no signs."""
Aspects = Annotated[Sequence[str], Field(min_length=1)]
"""Names of scores; without one an answer would be yes or no."""
FormName = Literal["final", "aspects", "yes_no", "edit", "edit_yes_no"]
FORMS: dict[str, Form] = {
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
        EDITED
        + "Give it three scores, each a number from 0 to 10: success, how completely it does what the instruction says, "
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
        EDITED
        + "Was that done, completely, and is everything else as it was before? Answer with one word, Yes or No.",
        edit=True,
    ),
}


class VLMJudge(PictureReward):
    """A score by a vision-language model; NaN, and one warning that counts them, where it gives
    none.

    It sees a prompt's input pictures, if there are any, and then the picture. From 1 to 5 for the
    forms "final" and "aspects", from 0 to 10 for "edit": sqrt(min(success, faithfulness) *
    quality). For "yes_no" and "edit_yes_no" P(yes) / (P(yes) + P(no)) of the answer's first token,
    from 0 to 1: continuous, so that members of a group do not tie.

    Args: `url`, up to and with the version, such as http://127.0.0.1:8000/v1; `model`, its name
    there; `form`; `template`, the instruction instead of the form's, with {prompt} where the prompt
    goes: the text itself, FILE.txt, or FILE.py:NAME for a string that a Python file assigns (it is
    read, not run); `aspects`, the names of scores of which the mean is taken instead; `range`, the
    lowest and the highest score that the template asks for, the form's unless given; `image_size`,
    to which the longer side of a larger picture is reduced; `max_tokens` of the answer (1024; for
    yes or no 1); `request`, further fields of every request, such as {"temperature": 0.7}, 0 unless
    given, of which null leaves one out; `endpoint`, how the server is asked (`remote.Endpoint`);
    its `check` asks for the server's models, and one question about grey pictures, so that a judge
    whose answers cannot be read fails then. Raises ValueError
    for bad settings, FileNotFoundError for a missing template, OSError if the check fails or the
    server refuses (`remote.Client.ask`).
    """

    waits = asks = True
    missing = "the judge's answer has no score"

    def __init__(
        self,
        url: str,
        model: str,
        *,
        form: FormName = "final",
        template: str | None = None,
        aspects: Aspects | None = None,
        range: ScoreRange | None = None,
        image_size: Count = 512,
        max_tokens: Count | None = None,
        request: Mapping[str, Any] | None = None,
        endpoint: Endpoint | None = None,
    ) -> None:
        self.form = FORMS[form]
        if aspects is not None:
            self.form = replace(self.form, combine=Form.combine)
        self.template = _template(template or self.form.template)
        self.names = self.form.scores if aspects is None else tuple(aspects)
        self.image_size = image_size
        if range is not None:
            if template is None or not self.names:
                raise ValueError("range is for scores that a template of your own asks for")
            if range[0] >= range[1]:
                raise ValueError(
                    f"range should be the lowest and the highest score, got [{range[0]:g}, {range[1]:g}]"
                )
            self.form = replace(self.form, low=range[0], high=range[1])
        if self.names:
            self.missing += f" from {self.form.low:g} to {self.form.high:g}"
        self.served = ServedModel(url, model, not self.names, max_tokens, request, endpoint)
        if self.served.client.endpoint.check:
            grey = [Image.new("RGB", (64, 64), "grey")] * (1 + self.form.edit)
            self.served.check(self._question(grey, "a grey picture"), self.read)

    @classmethod
    def fault(cls, options: Mapping[str, Any], prompts: Sequence[str]) -> str | None:
        form, edits = FORMS.get(options["form"]), list(filter(images_of, prompts))
        if form is not None and form.edit and not edits:
            return f"form={options['form']} is for edits, but none of {len(prompts)} prompts has {INPUT_PICTURE}"
        if form is not None and not form.edit and edits and options["template"] is None:
            own = f"form={options['form']} asks about a picture from a description"
            given = f"prompt {shown(edits[0])} has {INPUT_PICTURE}"
            return (
                f"{own}, but {given}: take form=edit or form=edit_yes_no, or a template of your own"
            )
        return None

    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        before = {prompt: self._reduced(read_inputs(prompt)) for prompt in dict.fromkeys(prompts)}
        asked = [not self.form.edit or bool(before[prompt]) for prompt in prompts]
        rows = zip(self._reduced(to_pil(images)), prompts, strict=True)
        questions = [self._question([*before[prompt], picture], prompt) for picture, prompt in rows]
        scores = torch.full((len(prompts),), torch.nan)
        scores[asked] = torch.tensor(
            [self._score(said) for said in self.served([*compress(questions, asked)])]
        )
        return scores

    def _reduced(self, pictures: Sequence[Image.Image]) -> list[Image.Image]:
        for picture in pictures:
            picture.thumbnail((self.image_size, self.image_size), Image.Resampling.BICUBIC)
        return list(pictures)

    def _question(self, pictures: Sequence[Image.Image], prompt: str) -> JudgeQuestion:
        return JudgeQuestion(pictures, self.template.replace("{prompt}", prompt))

    def _score(self, said: Said | None) -> float:
        """The score in what the model said; NaN if there is none that can be read."""
        if said is None:
            return torch.nan
        try:
            return self.read(said)
        except Unread as error:
            self.example = f"{error}. It says: {shown(said.text)}"
            return torch.nan

    def read(self, said: Said) -> float:
        """The score in what the model said; `Unread` if there is none."""
        if not self.names:
            return probability_of_yes(said)
        return self.form.combine(scores_in(said, self.names, self.form.low, self.form.high))


def _template(text: str) -> str:
    """The instruction itself, or the one in the file that `text` names."""
    template = read_instruction(text) if text.endswith((".txt", ".md")) or ".py:" in text else text
    if "{prompt}" not in template:
        raise ValueError("the template must contain {prompt} where the prompt goes")
    return template
