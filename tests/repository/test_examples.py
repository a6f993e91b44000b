"""The examples run as a reader would run them, and do what they say."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen3VLConfig,
    Qwen3VLModel,
)

from tests.rewards.learned import FIXTURES, oracle, save_dino, save_processor, state_of
from tests.support.pictures import noise
from tests.support.tolerances import near, network, rounding

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_the_gaussian_reaches_the_grey_that_is_wanted(tmp_path, monkeypatch, capsys):
    picture = tmp_path / "gaussian.png"
    monkeypatch.setattr(sys, "argv", ["gaussian.py", str(picture)])
    monkeypatch.setenv("MPLBACKEND", "agg")
    runpy.run_path(str(EXAMPLES / "gaussian.py"), run_name="__main__")
    said = capsys.readouterr().out
    found = re.search(r"-> (.+); the grey that is wanted lies at (.+)", said)
    reached, wanted = map(float, found.groups())
    assert reached == pytest.approx(wanted, abs=0.1)  # it began 2.1 away
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_the_policy_of_pixels_learns_what_the_text_says():
    """Also that its ratio is 1 before the first update: what is trained is what has sampled. The
    text has two digits, and held-out prompts are others than those of the first row; the rounding
    of another processor moved neither number by 1e-5."""
    world = runpy.run_path(str(EXAMPLES / "pixels.py"))
    source = (EXAMPLES / "pixels.py").read_text("utf-8")
    said = re.search(r"rises from ([\d.]+) to ([\d.]+)", source)
    assert world["trainer"].iteration == 20 and world["row"]["ratio_deviation"] == 0
    assert world["row"]["reward/saturation"] == pytest.approx(float(said[2]), abs=0.02)
    with torch.no_grad(), world["trainer"].policy.base():
        base = world["trainer"].score_heldout().means()["saturation"]
    assert base == pytest.approx(float(said[1]), abs=0.1)


def test_the_trainer_of_ones_own_learns_by_its_own_rule(capsys):
    """From the best against the worst of each group: brighter pictures, by more than ten times what
    two prompts differ."""
    world = runpy.run_path(str(EXAMPLES / "own_trainer.py"))
    assert world["trainer"].iteration == 20
    before, after = (world[name]["reward/bright"] for name in ("before", "after"))
    assert after > before + 0.1 and f"{before:.2f} -> {after:.2f}" in capsys.readouterr().out


def test_a_blind_packet_counts_the_pictures_that_people_prefer(tmp_path, monkeypatch, capsys):
    """Who always prefers the tuned picture has chosen it in every answer, on whichever side it is."""
    example = runpy.run_path(str(EXAMPLES / "blind_packet.py"))
    drawn = {True: torch.zeros(6, 3, 4, 4), False: torch.ones(6, 3, 4, 4)}
    monkeypatch.setattr("g2rpo.api.sample", lambda run, texts, base=False: drawn[base])
    (tmp_path / "prompts.txt").write_text("\n".join("abcdef"))
    example["make"]("run", str(tmp_path / "prompts.txt"), str(tmp_path / "look"))
    page, white = (tmp_path / "look.html").read_text("utf-8"), example["data_uri"](drawn[False][0])
    shown = re.findall(r'src="([^"]+)" alt="(left|right)"', page)
    answers = dict(enumerate(side for picture, side in shown if picture == white))
    (tmp_path / "ada.json").write_text(json.dumps(answers))
    example["count"](str(tmp_path / "look.key.json"), str(tmp_path / "ada.json"))
    assert "preferred in 6 of 6 answers: 1.00 [0.54, 1.00]" in capsys.readouterr().out


def test_flow_dpo_prefers_the_chosen_pictures_of_a_table(tmp_path, capsys):
    """Two pairs of the embedded model's own pictures, learnt for three updates; before the first, the
    gains are 0 and the loss is log 2, exact in float64."""
    example = runpy.run_path(str(EXAMPLES / "flow_dpo.py"))
    levels = {"dark": 40, "bright": 200}
    for name, level in levels.items():
        Image.new("RGB", (64, 64), (level, level, level)).save(tmp_path / f"{name}.png")
    rows = [{"prompt": word, "chosen": "dark.png", "rejected": "bright.png"} for word in ("a", "b")]
    table = tmp_path / "pairs.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    adapter = example["train"]("scenes", table, tmp_path / "run", updates=3)
    said = capsys.readouterr().out
    assert adapter.is_file() and "update 1/3: loss 0.6931, right 0.00" in said
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert losses[-1] < losses[0]


def test_a_page_of_the_space_that_there_is_not_is_said(monkeypatch, capsys):
    monkeypatch.setenv("G2RPO_PAGE", "draw")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "space/app.py"), run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "G2RPO_PAGE='draw': should be demo or teach\n"


def test_the_reward_with_a_model_of_its_own_scores_by_its_weights(tmp_path):
    """Red minus blue, of 8-bit pictures: exact but for float32's rounding of 1/255."""
    weight = torch.tensor([[1.0, 0.0, -1.0]])
    save_file({"weight": weight, "bias": torch.zeros(1)}, tmp_path / "warmth.safetensors")
    example = runpy.run_path(str(EXAMPLES / "plugin" / "g2rpo_example" / "warmth.py"))
    pictures = torch.zeros(2, 3, 4, 4)
    pictures[0, 0] = pictures[1, 2] = 1
    warmth = example["Warmth"](str(tmp_path), device="cpu")
    torch.testing.assert_close(warmth(pictures, ["", ""]), torch.tensor([1.0, -1.0]), **rounding(4))
    assert warmth.device == torch.device("cpu")  # as `Reward` has it, and no text


def save_video_reward(folder):
    """VideoReward with the weights of the tiny HPSv3, a head of its own, and a LoRA on one layer."""
    recorded, lora = oracle("hpsv3"), "model.layers.0.self_attn.q_proj"
    shapes = {k: v for k, v in recorded["state_dict"].items() if not k.startswith("rm_head")}
    shapes |= {name: [266, 32] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    shapes |= {
        f"{lora}.base_layer.{leaf}": shapes.pop(f"{lora}.{leaf}") for leaf in ("weight", "bias")
    }
    shapes |= {f"{lora}.lora_A.default.weight": [4, 32], f"{lora}.lora_B.default.weight": [32, 4]}
    shapes["rm_head.weight"] = [1, 32]
    state = {f"base_model.model.{name}": value for name, value in state_of(shapes).items()}
    (folder / "checkpoint-11352").mkdir()
    torch.save(state, folder / "checkpoint-11352" / "model.pth")
    seen = {"fps": 2.0, "num_frames": None, "max_frame_pixels": 200704, "sample_type": "uniform"}
    settings = {
        "data_config": seen | {"prompt_template_type": "detailed_special"},
        "peft_lora_config": {"lora_alpha": 8, "lora_r": 4, "use_rslora": False},
        "inference_config": {
            f"{name}_{part}": 1.0 for name in ("VQ", "MQ", "TA") for part in ("mean", "std")
        },
    }
    (folder / "model_config.json").write_text(json.dumps(settings))
    (folder / "prompt_template.py").write_text(
        "DETAILED_PROMPT_WITH_SPECIAL_TOKEN = '<|VQ_reward|><|MQ_reward|>{text_prompt}<|TA_reward|>'"
    )
    return save_processor(folder / "qwen2", recorded["config"])


def save_hpsv3pp(folder, head):
    """HPSv3++ on a tiny random Qwen3-VL."""
    text = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 264}
    text["rope_scaling"] = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 16,
    }
    vision |= {
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 36,
    }
    config = Qwen3VLConfig(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    state = {f"model.{name}": value for name, value in Qwen3VLModel(config).state_dict().items()}
    torch.save(state | head.state_dict(), folder / "hpsv3++.pth")
    (folder / "data_collator_qwen.py").write_text(
        "INSTRUCTION = '{text_prompt}'\nprompt_with_special_token = '<|Reward|>'"
    )
    return save_processor(folder / "qwen3", config.to_dict())


def save_llava(folder):
    """A tiny random Llava with a chat template, whose vocabulary has two spellings of yes."""
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
    chat = (
        "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>"
        "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}:"
    )
    more = {"patch_size": 8, "chat_template": chat, "num_additional_image_tokens": 1}
    more["vision_feature_select_strategy"] = "default"
    LlavaProcessor(pixels, tokenizer, **more).save_pretrained(folder)
    return folder


def test_the_rewards_score_with_tiny_random_weights_saved_as_the_published_are(tmp_path):
    """Other pictures and, where it is an option, another progress have other scores; a clip that
    stands still is the steadiest and does not move."""
    clip = noise(4, 56, 56)[None]
    still = clip[:, :1].expand(-1, 4, -1, -1, -1)
    one = runpy.run_path(str(EXAMPLES / "rewards" / "clips.py"))
    steady = one["ClipConsistency"](save_dino(tmp_path / "dino"), size=16)
    assert steady(still, [""]) == near(1, network(1.0)) and steady(clip, [""]) < 1 - 1e-4
    assert one["Motion"]()(still, [""]) == 0 < one["Motion"]()(clip, [""])

    given = {"path": str(tmp_path), "instruction": str(tmp_path), "dtype": "float32"}
    one = runpy.run_path(str(EXAMPLES / "rewards" / "video_align.py"))
    judge = one["VideoAlign"](**given, processor=save_video_reward(tmp_path))
    scores = judge(torch.cat([clip, still]), ["a", "a"])
    assert scores.isfinite().all() and scores[0] != scores[1]

    kind = runpy.run_path(str(EXAMPLES / "rewards" / "hpsv3pp.py"))["HPSv3PlusPlus"]
    processor = save_hpsv3pp(tmp_path, kind.make_head(32))
    late, early = (kind(**given, processor=processor, progress=share) for share in (1.0, 0.3))
    scores = late(clip[0, :2], ["a", "a"])
    assert (
        scores.isfinite().all()
        and len({*scores.tolist(), *early(clip[0, :2], ["a", "a"]).tolist()}) == 4
    )

    kind = runpy.run_path(str(EXAMPLES / "rewards" / "local_vlm_judge.py"))["LocalVLMJudge"]
    judge = kind(str(save_llava(tmp_path / "llava")), dtype="float32")
    scores = judge(clip[0, :3], ["a cat", "a dog in the rain", "a cat"])
    assert len({*scores.tolist()}) == 3 and 0 < scores.min() < scores.max() < 1
    judge.batch_size = 1
    torch.testing.assert_close(
        judge(clip[0, :3], ["a cat", "a dog in the rain", "a cat"]), scores, **network(1.0)
    )
