"""A vision-language model as judge, in this process: the questions and answers of `rewards.vlm`, by transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from g2rpo.core.errors import at_least_one
from g2rpo.core.files import is_hub_id
from g2rpo.core.types import RewardModel
from g2rpo.rewards.vlm import Part, VLMJudge, judging, parse_scores
from g2rpo.rewards.weights import check_config, fetch, parse_dtype


class LocalVLMJudge(VLMJudge):
    """A score by a vision-language model in this process, as `vlm_judge` gives it: for "yes_no" and "edit_yes_no" from the
    probabilities of all first tokens, else from the greedy answer.

    Args: `path`, a folder or repository that transformers loads for "image-text-to-text", with a chat template; `form`,
    `template`, `aspects` and `image_size` as for `vlm_judge`; `max_tokens` of an answer; `device`; `dtype` of the weights;
    `batch_size`, pictures at a time.
    Raises ValueError for bad settings or a model that is none, OSError if it is not there.
    """

    files = {"path": ("config.json",)}
    waits = asks = False

    def __init__(
        self,
        path: str = "Qwen/Qwen2.5-VL-3B-Instruct",
        *,
        form: str = "final",
        template: str | None = None,
        aspects: Sequence[str] | None = None,
        image_size: int = 512,
        max_tokens: int = 512,
        device: str = "cpu",
        dtype: str = "bfloat16",
        batch_size: int = 8,
    ) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.form, self.template, self.names = judging(self.forms, form, template, aspects)
        at_least_one(max_tokens=max_tokens, batch_size=batch_size, image_size=image_size)
        fetch(path, "config.json")  # says what is wrong with a path
        check_config(path)
        self.processor = AutoProcessor.from_pretrained(path)
        if getattr(self.processor, "image_processor", None) is None or self.processor.chat_template is None:
            raise ValueError(
                f"{path} is no vision-language model that chats: its processor has no pictures or no chat template"
            )
        self.processor.tokenizer.padding_side = "left"  # answers are at the right
        model, report = AutoModelForImageTextToText.from_pretrained(
            path, dtype=parse_dtype(dtype), use_safetensors=True, output_loading_info=True
        )
        if report["missing_keys"]:
            raise ValueError(f"{path} lacks weights, such as {sorted(report['missing_keys'])[0]}")
        self.model = model.to(device).requires_grad_(False).eval()
        self.device = torch.device(device)
        self.image_size, self.max_tokens, self.batch_size = image_size, max_tokens, batch_size
        vocabulary = torch.arange(self.model.get_output_embeddings().weight.shape[0])
        words = [token.strip().lower() for token in self.processor.tokenizer.batch_decode(vocabulary[:, None])]
        self.yes, self.no = ([place for place, token in enumerate(words) if token == word] for word in ("yes", "no"))
        if not self.names and not (self.yes and self.no):
            raise ValueError(f"{path}: its vocabulary has no token for yes or for no; take form=final")

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel | None:
        """The model, of a folder; a token costs two operations a weight, of about 1,000 tokens and the answer's."""
        from transformers import AutoConfig, AutoModelForImageTextToText

        if is_hub_id(str(options["path"])):
            return None
        check_config(options["path"])
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(str(options["path"])))
        return RewardModel([model], flops=2.0 * model.num_parameters() * (1000 + options["max_tokens"]))

    def _part(self, picture: Image.Image) -> Part:
        return {"type": "image", "image": picture.convert("RGB")}

    def _answers(self, asked: Sequence[tuple[Sequence[Part], str] | None]) -> list[float]:
        questions = [one for one in asked if one is not None]
        found = iter(self._batch(questions) if questions else [])
        return [torch.nan if one is None else next(found) for one in asked]

    @torch.no_grad()
    def _batch(self, questions: Sequence[tuple[Sequence[Part], str]]) -> list[float]:
        chats = [
            [{"role": "user", "content": [*pictures, {"type": "text", "text": self._instruction(prompt)}]}]
            for pictures, prompt in questions
        ]
        texts = self.processor.apply_chat_template(chats, add_generation_prompt=True)
        shown = [[picture["image"] for picture in pictures] for pictures, _ in questions]
        inputs = self.processor(text=texts, images=shown, padding=True, return_tensors="pt")
        inputs = inputs.to(self.model.device, self.model.dtype)
        if not self.names:
            return self._yes(self.model(**inputs, logits_to_keep=1).logits[:, -1]).tolist()
        tokens = self.model.generate(**inputs, max_new_tokens=self.max_tokens, do_sample=False)
        texts = self.processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return [parse_scores(text, self.names, self.form) for text in texts]

    def _yes(self, logits: Tensor) -> Tensor:
        """P(yes) / (P(yes) + P(no)) of the next token, all spellings together."""
        each = logits.float().log_softmax(-1)
        yes, no = (each[:, places].logsumexp(-1) for places in (self.yes, self.no))
        return torch.sigmoid(yes - no)
