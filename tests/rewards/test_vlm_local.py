"""A vision-language judge in this process, on a tiny random Llava: the questions of `vlm_judge`,
answered by transformers."""

import pytest
import torch
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from g2rpo.core.images import to_pil, to_uint8
from g2rpo.rewards.vlm import FORMS, LocalVLMJudge
from tests.rewards.learned import FIXTURES
from tests.support.edits import edits
from tests.support.pictures import noise

CHAT = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}"
    "{% endif %}{% endfor %}{% endfor %}:"
)
PICTURES = noise(3, 16, 16)
PROMPTS = ["a cat", "a dog in the rain", "a cat"]


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("llava"))
    tokenizer = AutoTokenizer.from_pretrained(FIXTURES / "qwen2_tokenizer")
    tokenizer.add_tokens(["<image>", "Yes", " yes", "no"])
    sizes = {"hidden_size": 16, "intermediate_size": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, image_size=16, patch_size=8),
        text_config=LlamaConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=4096),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config)
    model.lm_head.weight.data.normal_(0, 0.1)
    model.save_pretrained(folder)
    square = {"height": 16, "width": 16}
    pixels = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=square)
    more = {"patch_size": 8, "chat_template": CHAT, "num_additional_image_tokens": 1}
    more["vision_feature_select_strategy"] = "default"
    LlavaProcessor(pixels, tokenizer, **more).save_pretrained(folder)
    return folder


def test_yes_is_the_share_of_its_tokens_whatever_the_batch(llava, monkeypatch):
    """Beside the model's own softmax, a question at a time. float32 roundings of two layers."""
    monkeypatch.setenv("HOME", "/")
    judge = LocalVLMJudge(f"~{llava}", form="yes_no", dtype="float32", batch_size=3)
    scores, processor = judge(PICTURES, PROMPTS), judge.ask.processor
    wanted = []
    for picture, prompt in zip(to_pil(to_uint8(PICTURES)), PROMPTS, strict=True):
        text = "<image>" + FORMS["yes_no"].template.replace("{prompt}", prompt) + ":"
        inputs = processor(images=[picture], text=[text], return_tensors="pt")
        p = judge.ask.model(**inputs).logits[0, -1].softmax(-1)
        one, other, no = p[processor.tokenizer.convert_tokens_to_ids(["Yes", " yes", "no"])]
        wanted.append(float((one + other) / (one + other + no)))
    assert scores.tolist() == pytest.approx(wanted, abs=1e-5)
    assert len(set(scores.tolist())) == 3  # pictures and prompts are both seen
    monkeypatch.setattr(judge, "batch_size", 1)
    torch.testing.assert_close(judge(PICTURES, PROMPTS), scores)


def test_answers_are_read_and_edits_see_their_input(llava, tmp_path, monkeypatch):
    judge = LocalVLMJudge(llava, form="edit", dtype="float32", max_tokens=2)
    assert judge(PICTURES[:1], ["a cat"]).isnan().all()  # no input picture, so nothing is asked
    seen, prompts = [], edits(tmp_path, blue=(0.5,))

    def generate(**inputs):
        seen.append(inputs["pixel_values"].shape[0])
        said = "Success Score: 9\nFaithfulness Score: 4\nQuality Score: 9"
        answer = judge.ask.processor.tokenizer(said, return_tensors="pt")["input_ids"]
        return torch.cat([inputs["input_ids"], answer], 1)

    assert judge(PICTURES[:1], prompts).isnan().all()  # two random tokens are no scores
    monkeypatch.setattr(judge.ask.model, "generate", generate)
    assert judge(PICTURES[:1], prompts).tolist() == [6.0] and seen == [2]


def test_what_is_no_judge_is_refused_and_the_work_of_one_is_known(llava, tmp_path):
    with pytest.raises(OSError):
        LocalVLMJudge(str(tmp_path))
    assert LocalVLMJudge.model_of({"path": llava, "max_tokens": 8}).flops > 0
