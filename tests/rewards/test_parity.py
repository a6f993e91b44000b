"""Learned rewards against the numbers of their upstream packages (tools/record_reward_oracles.py),
on fixed weights.

Tolerance. Both sides compute in float32, with different orders of summation and different torch
versions. Rounding is 6e-8 relative per operation; through four layers of width 16 to 32 it grows to
about 1e-6 in unit-length features, and the features multiply into scores of the same size. SCORE
leaves a factor of ten for that. It is two to four orders of magnitude below what any wrong step
costs: the tests at the end turn each step wrong once and demand to be noticed.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from g2rpo.rewards import clip_encoder, open_clip
from g2rpo.rewards.clip import CLIPScore
from g2rpo.rewards.image_reward import ImageReward, part, vision_state
from g2rpo.rewards.weights import check_state
from tests.rewards.learned import LEARNED, TOKENIZER, TinyImageReward, oracle, picture_of, state_of
from tests.rewards.oracle_inputs import PROMPTS, TOKEN_PROMPTS

SCORE = 1e-5
PIXEL = 2e-6  # a normalised pixel is up to 2.6 in size; its float32 spacing is 2.4e-7
KINDS = {name: kind for name, kind in LEARNED.items() if kind is not CLIPScore}


def scores(reward, name):
    """One picture with every prompt."""
    return reward((picture_of(name) / 255).expand(len(PROMPTS), -1, -1, -1), PROMPTS)


def worst(reward, cases):
    return max(
        (scores(reward, c["image"]) - torch.tensor(c.get("scores", c.get("score"))))
        .abs()
        .max()
        .item()
        for c in cases
    )


def check_pixels(preprocess, case, tolerance=PIXEL):
    """Four rows and four columns of what a network sees."""
    seen = preprocess(picture_of(case["image"]))[0]
    step = seen.shape[-1] // 4
    torch.testing.assert_close(
        seen[:, ::step, ::step], torch.tensor(case["pixel_rows"]), atol=tolerance, rtol=0
    )


@pytest.fixture(scope="module")
def open_clip_dir(tmp_path_factory):
    def make(quick_gelu, resize_mode, custom_text=False, torch_file=False):
        recorded = oracle("open_clip")
        folder = tmp_path_factory.mktemp("open_clip")
        state = state_of(recorded["state_dict"])
        if custom_text:
            state = {custom_name(name): value for name, value in state.items()}
        if torch_file:
            torch.save(state, folder / "open_clip_pytorch_model.bin")
        else:
            save_file(state, folder / "open_clip_model.safetensors")
        config = {
            "model_cfg": {**recorded["model_cfg"], "quick_gelu": quick_gelu},
            "preprocess_cfg": {"resize_mode": resize_mode, "interpolation": "bicubic"},
        }
        (folder / "open_clip_config.json").write_text(json.dumps(config))
        return str(folder)

    return make


def custom_name(name):
    """The name of a weight where the text tower is a module of its own."""
    return name if name.startswith(("visual.", "logit_scale")) else f"text.{name}"


def open_clip_cases(quick_gelu, resize_mode):
    return [
        c
        for c in oracle("open_clip")["cases"]
        if (c["quick_gelu"], c["resize_mode"]) == (quick_gelu, resize_mode)
    ]


@pytest.mark.parametrize("quick_gelu", [False, True])
@pytest.mark.parametrize("resize_mode", ["shortest", "squash"])
def test_clip_score_is_open_clips(open_clip_dir, quick_gelu, resize_mode):
    reward = CLIPScore(open_clip_dir(quick_gelu, resize_mode), tokenizer=TOKENIZER)
    cases = open_clip_cases(quick_gelu, resize_mode)
    assert len(cases) == 5
    assert worst(reward, cases) < SCORE
    for case in cases:
        check_pixels(reward.encoder.preprocess, case)
        features = reward.encoder.image_features(picture_of(case["image"]))[0]
        torch.testing.assert_close(
            features, torch.tensor(case["image_features"]), atol=SCORE, rtol=0
        )


def test_token_ids_are_upstreams(learned):
    recorded = oracle("open_clip")
    model_cfg = recorded["model_cfg"]
    model = clip_encoder.of_open_clip(
        open_clip.clip_config(model_cfg), state_of(recorded["state_dict"]), "test", "memory"
    )
    words = clip_encoder.load_clip_tokenizer(TOKENIZER)
    encoder = clip_encoder.ClipEncoder(
        model, words, open_clip.preprocess_from(model_cfg, {}), clean=open_clip.clean_prompt
    )
    end = model_cfg["text_cfg"]["vocab_size"] - 1
    for prompt, theirs in zip(TOKEN_PROMPTS, recorded["token_ids"], strict=True):
        ours = encoder.token_ids([prompt])[0].tolist()
        assert ours[: ours.index(end) + 1] == theirs[: theirs.index(end) + 1]
        assert len(ours) == len(theirs)
    bert = TinyImageReward(**learned["image_reward"]).tokenizer
    ids = bert(list(PROMPTS), padding="max_length", truncation=True, max_length=35)["input_ids"]
    assert ids == oracle("image_reward")["token_ids"]


@pytest.mark.parametrize("name", KINDS)
def test_scores_are_upstreams(learned, name):
    reward = KINDS[name](**learned[name])
    cases = [case for case in oracle(name)["cases"] if case.get("antialias", True)]
    assert len(cases) == 5
    for case in cases:
        if "pixel_rows" in case:
            preprocess = getattr(reward, "encoder", reward).preprocess
            check_pixels(preprocess, case, PIXEL * (10 if name == "hpsv2" else 1))
    assert worst(reward, cases) < SCORE * (reward.scale.item() if name == "pickscore" else 1)


# --- the same comparisons, turned wrong once: each must be far outside the tolerance --------------


# --- the published files: names and shapes of upstream's full-size classes ------------------------


def meta_state(shapes):
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def test_hpsv2_names_and_shapes_are_the_published_ones():
    from transformers import CLIPModel

    recorded = oracle("hpsv2")
    with torch.device("meta"):
        model = CLIPModel(open_clip.clip_config(open_clip.VIT_H_14))
    check_state(
        model.state_dict(),
        open_clip.clip_state(meta_state(recorded["published_state_dict"])),
        "it",
        "file",
    )
    assert recorded["published_model_cfg"] == open_clip.VIT_H_14
    assert (
        open_clip.clip_config(recorded["published_model_cfg"]).vision_config.num_attention_heads
        == 16
    )


def test_a_text_tower_of_its_own_has_the_same_names(open_clip_dir):
    recorded = oracle("open_clip")
    assert sorted(map(custom_name, recorded["state_dict"])) == sorted(recorded["custom_text_keys"])
    reward = CLIPScore(
        open_clip_dir(True, "squash", custom_text=True, torch_file=True), tokenizer=TOKENIZER
    )
    assert worst(reward, open_clip_cases(True, "squash")) < SCORE


def test_open_clip_files_win_where_a_folder_holds_both_formats(open_clip_dir, learned, tmp_path):
    for source in (learned["pickscore"]["path"], open_clip_dir(True, "squash")):
        shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    assert worst(CLIPScore(str(tmp_path)), open_clip_cases(True, "squash")) < SCORE
    (tmp_path / "open_clip_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="open_clip_model.safetensors"):
        CLIPScore(str(tmp_path))


def test_image_reward_names_and_shapes_are_the_published_ones():
    state = meta_state(oracle("image_reward")["published_state_dict"])
    with torch.device("meta"):
        towers = ImageReward.vision_tower(), ImageReward.text_tower()
    check_state(towers[0].state_dict(), vision_state(state), "it", "file")
    check_state(towers[1].state_dict(), part(state, "blip.text_encoder."), "it", "file")
    vision, text = (tower.config for tower in towers)
    assert (vision.num_attention_heads, text.num_attention_heads, text.bos_token_id) == (
        16,
        12,
        30522,
    )
    assert (vision.layer_norm_eps, text.layer_norm_eps) == (1e-6, 1e-12)
