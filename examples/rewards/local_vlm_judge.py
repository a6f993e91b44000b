"""A vision-language model in this process as a judge: how likely it says yes, as VQAScore (Lin et al.
2024, arXiv 2404.01291). `vlm_judge` asks one on a server, for scores and of edits too.

    g2rpo train z-image-lora rewards.vlm.kind=examples/rewards/local_vlm_judge.py:LocalVLMJudge \\
        rewards.vlm.options.device=cuda
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from g2rpo.core.images import to_pil
from g2rpo.core.rewards import RewardModel
from g2rpo.rewards.pixels import PictureReward
from g2rpo.rewards.vlm import FORMS
from g2rpo.rewards.weights import check_config, config_in, fetch, parse_dtype, place_of, pretrained


class LocalVLMJudge(PictureReward):
    """P(yes) / (P(yes) + P(no)) of the answer's first token, in [0, 1]; all spellings of a word count
    together: "Yes", " yes", "YES".

    Args: `path`, a folder or repository that transformers loads for "image-text-to-text", with a chat
    template (Qwen-VL needs torchvision); `question`, with {prompt} in it; `image_size`, to which the
    longer side of a larger picture is reduced; `device`; `dtype` of the weights; `batch_size`.
    """

    files: ClassVar = {"path": ("config.json",)}

    def __init__(
        self,
        path: str = "Qwen/Qwen2.5-VL-3B-Instruct",
        *,
        question: str = FORMS["yes_no"].template,
        image_size: int = 512,
        device: str = "cpu",
        dtype: str = "bfloat16",
        batch_size: int = 8,
    ) -> None:
        fetch(path, "config.json")  # says what is wrong with a path
        check_config(path)
        self.processor = AutoProcessor.from_pretrained(place_of(path))
        if not getattr(self.processor, "image_processor", None) or not self.processor.chat_template:
            raise ValueError(f"{path}: its processor has no pictures or no chat template")
        self.processor.tokenizer.padding_side = "left"  # answers are at the right
        model = pretrained(
            AutoModelForImageTextToText, path, dtype=parse_dtype(dtype), use_safetensors=True
        )
        self.model, self.device = model.to(device), torch.device(device)
        self.question, self.image_size, self.batch_size = question, image_size, batch_size
        vocabulary = torch.arange(model.get_output_embeddings().weight.shape[0])[:, None]
        tokens = [
            token.strip().lower() for token in self.processor.tokenizer.batch_decode(vocabulary)
        ]
        self.yes, self.no = (
            [place for place, token in enumerate(tokens) if token == word] for word in ("yes", "no")
        )
        if not self.yes or not self.no:
            raise ValueError(f"{path}: its vocabulary has no token for yes or for no")

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel | None:
        """Of a folder; a token costs two operations a weight, and a question has about 1,000."""
        if (config := config_in(options["path"])) is None:
            return None
        model = AutoModelForImageTextToText.from_config(config)
        return RewardModel([model], flops=2.0 * model.num_parameters() * 1000)

    @torch.no_grad()
    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        pictures = to_pil(images)
        for picture in pictures:
            picture.thumbnail((self.image_size, self.image_size))
        chats = [
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": picture},
                        {"type": "text", "text": self.question.replace("{prompt}", prompt)},
                    ],
                }
            ]
            for picture, prompt in zip(pictures, prompts, strict=True)
        ]
        texts = self.processor.apply_chat_template(chats, add_generation_prompt=True)
        shown = [[picture] for picture in pictures]
        inputs = self.processor(text=texts, images=shown, padding=True, return_tensors="pt")
        inputs = inputs.to(self.model.device, self.model.dtype)
        logits = self.model(**inputs, logits_to_keep=1).logits[:, -1].float()
        yes, no = logits[:, self.yes].logsumexp(-1), logits[:, self.no].logsumexp(-1)
        return torch.sigmoid(yes - no)
