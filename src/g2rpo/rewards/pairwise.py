"""A vision-language model that compares pictures of one prompt, two at a time: win rates within a
group.

As in Pref-GRPO (Wang et al. 2025, arXiv 2508.20751). Each pair is asked about in both orders,
because models prefer a place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from PIL import Image
from torch import Tensor

from g2rpo.core.images import to_pil
from g2rpo.core.input_pictures import images_of, read_inputs
from g2rpo.core.plain import Count
from g2rpo.core.seeding import generator_for
from g2rpo.rewards.asking import JudgeQuestion
from g2rpo.rewards.transport import Endpoint
from g2rpo.rewards.vlm import Form, VLMJudge

MADE = "Two pictures were generated from this description:\n{prompt}\n\n"
BETTER = "Which one shows completely and exactly what it says? If they are equal in that, which one is the better picture? "
EDITED_PAIR = "The last two pictures were made, each for itself, from what is before them, by this instruction:\n{prompt}\n\n"
BETTER_EDIT = "Which one does what it says, keeps what it does not speak of, and is the better picture, in this order? "
ENDS = {
    "choice": "Answer with one digit: 1 for the first, 2 for the second.",
    "final": "Compare them briefly. Then end with one line, in which 1 is the first, 2 the second, and 1.5 neither:\n"
    "Better Picture: <1, 2 or 1.5>",
}


class PairwiseVLM(VLMJudge):
    """The share of comparisons within its group that a picture wins, by a vision-language model,
    from 0 to 1.

    A pair's win is the mean over both orders of P(1) / (P(1) + P(2)) of the answer's first token
    (form "choice"), or of the "Better Picture" in the answer, where neither is a half (form
    "final"). Pairs without an answer in one of the orders are left out; a picture without any pair
    has no score. It sees a prompt's input pictures before the two.

    Args: `pairs`, how many pairs of a group are compared, by chance, in rounds in which no picture
    is in two; None: all. The others are those of `vlm_judge`.
    """

    group = True
    batch_size = 2**31  # a group is never divided
    words = "1", "2"
    forms: ClassVar[Mapping[str, Form]] = {
        "choice": Form(MADE + BETTER + ENDS["choice"]),
        "final": Form(
            MADE + BETTER + ENDS["final"],
            ("Better Picture",),
            low=1.0,
            high=2.0,
            combine=lambda values: 2 - values[0],
        ),
    }

    def __init__(
        self,
        url: str,
        model: str,
        *,
        form: Literal["choice", "final"] = "choice",
        pairs: Count | None = None,
        template: str | None = None,
        image_size: Count = 512,
        max_tokens: Count | None = None,
        request: Mapping[str, Any] | None = None,
        endpoint: Endpoint | None = None,
    ) -> None:
        self.pairs = pairs
        self.edit_template = template or EDITED_PAIR + BETTER_EDIT + ENDS.get(form, "")
        more = {
            "image_size": image_size,
            "max_tokens": max_tokens,
            "request": request,
            "endpoint": endpoint,
        }
        super().__init__(url, model, form=form, template=template, **more)  # type: ignore[arg-type]

    @classmethod
    def fault(cls, options: Mapping[str, Any], prompts: Sequence[str]) -> str | None:
        return None  # it has an instruction for pictures and one for edits

    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        before, shown = self._reduced(read_inputs(prompts[0])), self._reduced(to_pil(images))
        pairs = pairs_of(len(shown), self.pairs, int(images.long().sum()))
        orders = [order for pair in pairs for order in (pair, pair[::-1])]
        wins = self._scores(
            [self._question([*before, shown[i], shown[j]], prompts[0]) for i, j in orders]
        )
        won, met = torch.zeros(2, len(shown))
        for (i, j), first, second in zip(pairs, wins[::2], wins[1::2], strict=True):
            share = (first + 1 - second) / 2
            if share == share:  # both orders were answered
                won[i], won[j] = won[i] + share, won[j] + 1 - share
                met[i], met[j] = met[i] + 1, met[j] + 1
        return won / met

    def _question(self, pictures: Sequence[Image.Image], prompt: str) -> JudgeQuestion:
        template = self.edit_template if images_of(prompt) else self.template
        return JudgeQuestion(pictures, template.replace("{prompt}", prompt))


def pairs_of(members: int, most: int | None, seed: int) -> list[tuple[int, int]]:
    """Pairs of different members, each once: all, or the first `most`, in rounds in which nobody is
    in two pairs.

    A tournament by the circle method: one stays, the others go round; of an odd number, one has a
    round without a pair.
    """
    order = torch.randperm(members, generator=generator_for("pairs", seed)).tolist()
    last = members - 1 + members % 2
    rounds = [
        [(last, r), *(((r + k) % last, (r - k) % last) for k in range(1, (last + 1) // 2))]
        for r in range(last)
    ]
    return [(order[i], order[j]) for each in rounds for i, j in each if i < members][:most]
