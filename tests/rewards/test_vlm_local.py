"""A vision-language judge in this process, on a tiny random Llava: the questions of `vlm_judge`,
answered by transformers."""

import pytest
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from g2rpo.core.data import Prompt
from g2rpo.rewards.vlm import FORMS, LocalVLMJudge
from tests.rewards.learned import FIXTURES

CHAT = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}"
    "{% endif %}{% endfor %}{% endfor %}:"
)
PICTURES = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
PROMPTS = ["a cat", "a dog in the rain", "a cat"]


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    tokenizer = AutoTokenizer.from_pretrained(FIXTURES / "qwen2_tokenizer")
    tokenizer.add_tokens(["<image>", "Yes", " yes", "no"])
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    text = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=len(tokenizer),
        max_position_embeddings=4096,
    )  # fmt: skip
    image = tokenizer.convert_tokens_to_ids("<image>")
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision, text_config=text, image_token_index=image, vision_feature_layer=-1
        )
    )
    model.lm_head.weight.data.normal_(0, 0.1)
    model.save_pretrained(folder)
    pixels = CLIPImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    )
    more = {"patch_size": 8, "chat_template": CHAT, "num_additional_image_tokens": 1}
    LlavaProcessor(
        pixels, tokenizer, vision_feature_select_strategy="default", **more
    ).save_pretrained(folder)
    return str(folder)


def test_yes_is_the_share_of_its_tokens_whatever_the_batch(llava):
    """Beside the model's own softmax, a question at a time. float32 roundings of two layers."""
    judge = LocalVLMJudge(llava, form="yes_no", dtype="float32", batch_size=3)
    scores = judge(PICTURES, PROMPTS)
    tokenizer = judge.ask.processor.tokenizer
    for picture, prompt, score in zip(PICTURES, PROMPTS, scores, strict=True):
        shown = Image.fromarray((picture * 255).round().byte().permute(1, 2, 0).numpy())
        text = "<image>" + FORMS["yes_no"].template.replace("{prompt}", prompt) + ":"
        inputs = judge.ask.processor(images=[shown], text=[text], return_tensors="pt")
        p = judge.ask.model(**inputs).logits[0, -1].softmax(-1)
        yes, no = (
            sum(p[tokenizer.convert_tokens_to_ids(w)] for w in words)
            for words in (["Yes", " yes"], ["no"])
        )
        assert score == pytest.approx(float(yes / (yes + no)), abs=1e-5)
    assert len(set(scores.tolist())) == 3  # pictures and prompts are both seen
    torch.testing.assert_close(
        LocalVLMJudge(llava, form="yes_no", dtype="float32", batch_size=1)(PICTURES, PROMPTS),
        scores,
    )


def test_answers_are_read_and_edits_see_their_input(llava, tmp_path, monkeypatch):
    judge = LocalVLMJudge(llava, form="edit", dtype="float32", max_tokens=2)
    assert judge(PICTURES[:1], ["a cat"]).isnan().all()  # no input picture, so nothing is asked
    Image.new("RGB", (8, 8), "red").save(tmp_path / "in.png")
    edit = Prompt("make it blue", images=(str(tmp_path / "in.png"),))
    seen = []

    def generate(**inputs):
        seen.append(inputs["pixel_values"].shape[0])
        said = judge.ask.processor.tokenizer(
            "Success Score: 9\nFaithfulness Score: 4\nQuality Score: 9", return_tensors="pt"
        )
        return torch.cat([inputs["input_ids"], said["input_ids"]], 1)

    assert judge(PICTURES[:1], [edit]).isnan().all()  # two random tokens are no scores
    monkeypatch.setattr(judge.ask.model, "generate", generate)
    assert judge(PICTURES[:1], [edit]).tolist() == [6.0] and seen == [2]


def test_what_is_no_judge_is_refused(llava, tmp_path):
    with pytest.raises(OSError):
        LocalVLMJudge(str(tmp_path))
    assert LocalVLMJudge.model_of({"path": llava, "max_tokens": 8}).flops > 0
