"""Learned rewards against the numbers of their upstream packages (recorded by
tools/record_reward_oracles.py of commit 2328955a), on fixed weights.

Both sides compute in float32, with different orders of summation and different torch versions. That
is two to four orders of magnitude below what any wrong step costs.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from g2rpo.rewards import clip_encoder
from g2rpo.rewards.clip import CLIPScore
from g2rpo.rewards.clip_encoder import _transformers_preprocess
from g2rpo.rewards.image_reward import ImageReward, part, vision_state
from g2rpo.rewards.open_clip import VIT_H_14, clean_prompt, clip_config, clip_state, preprocess_from
from g2rpo.rewards.weights import check_state
from tests.rewards.learned import LEARNED, TOKENIZER, oracle, picture_of, save_pickscore, state_of
from tests.rewards.oracle_inputs import PROMPTS, TOKEN_PROMPTS
from tests.support.tables import rows
from tests.support.tolerances import network, reordered, rounding

PIXEL = rounding(8, size=2.6)
"""Of a grey level, resized in 8 bits, divided, and normalised to up to 2.6."""
RESIZED = reordered(2 * 16 * 16, size=2.6)
"""Of one resized in float32: a weighted sum of 16 x 16 pixels at most."""
KINDS = LEARNED.keys() - {"clip_score"}


def scores(reward, name):
    """One picture with every prompt."""
    return reward((picture_of(name) / 255).expand(len(PROMPTS), -1, -1, -1), PROMPTS)


def check_scores(reward, cases):
    for case in cases:
        theirs = torch.tensor(case.get("scores", case.get("score"))).expand(len(PROMPTS))
        found = scores(reward, case["image"])
        torch.testing.assert_close(found, theirs, **network(max(1.0, theirs.abs().max())))


def check_pixels(preprocess, case, tolerance=PIXEL):
    """Four rows and four columns of what a network sees."""
    seen = preprocess(picture_of(case["image"]))[0]
    step = seen.shape[-1] // 4
    rows = torch.tensor(case["pixel_rows"])
    torch.testing.assert_close(seen[:, ::step, ::step], rows, **tolerance)


def open_clip(folder, quick_gelu=True, resize_mode="squash", custom_text=False):
    """The recorded CLIP as a folder in open_clip's format; one with a text tower of its own in a
    file of torch."""
    recorded = oracle("open_clip")
    state = state_of(recorded["state_dict"])
    if custom_text:
        state = {custom_name(name): value for name, value in state.items()}
        torch.save(state, folder / "open_clip_pytorch_model.bin")
    else:
        save_file(state, folder / "open_clip_model.safetensors")
    config = {
        "model_cfg": {**recorded["model_cfg"], "quick_gelu": quick_gelu},
        "preprocess_cfg": {"resize_mode": resize_mode, "interpolation": "bicubic"},
    }
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    return CLIPScore(str(folder), tokenizer=TOKENIZER)


def custom_name(name):
    """The name of a weight where the text tower is a module of its own."""
    return name if name.startswith(("visual.", "logit_scale")) else f"text.{name}"


def recorded_cases(quick_gelu=True, resize_mode="squash"):
    cases = oracle("open_clip")["cases"]
    of = quick_gelu, resize_mode
    return [case for case in cases if (case["quick_gelu"], case["resize_mode"]) == of]


@pytest.mark.parametrize("quick_gelu", [False, True])
@pytest.mark.parametrize("resize_mode", ["shortest", "squash"])
def test_clip_score_is_open_clips(tmp_path, quick_gelu, resize_mode):
    reward = open_clip(tmp_path, quick_gelu, resize_mode)
    cases = recorded_cases(quick_gelu, resize_mode)
    assert len(cases) == 5
    check_scores(reward, cases)
    for case in cases:
        check_pixels(reward.encoder.preprocess, case)
        features = reward.encoder.image_features(picture_of(case["image"]))[0]
        theirs = torch.tensor(case["image_features"])
        torch.testing.assert_close(features, theirs, **network(1.0))


CLEANED = """
A caf\u00c3\u00a9 in  Z\u00c3\u00bcrich -> a caf\u00e9 in z\u00fcrich
it\u00e2\u20ac\u2122s a \u201ccat\u201d -> it's a "cat"
a &amp;lt; b -> a < b
\uff26\uff35\uff2c\uff2c width -> full width
red\u00ad\\ncar\\n -> red\u00ad car
"""
"""The first was decoded twice."""


@pytest.mark.parametrize(("prompt", "cleaned"), rows(CLEANED))
def test_prompts_are_cleaned_as_open_clips(prompt, cleaned):
    """By ftfy, which repairs what was decoded wrongly; our own table of letters did not."""
    assert clean_prompt(prompt) == cleaned


def test_token_ids_are_upstreams(rewards):
    recorded = oracle("open_clip")
    model_cfg = recorded["model_cfg"]
    model = clip_encoder.of_open_clip(
        clip_config(model_cfg), state_of(recorded["state_dict"]), "test", "memory"
    )
    words = clip_encoder.load_clip_tokenizer(TOKENIZER)
    pictures = preprocess_from(model_cfg, {})
    encoder = clip_encoder.ClipEncoder(model, words, pictures, clean=clean_prompt)
    end = model_cfg["text_cfg"]["vocab_size"] - 1
    for prompt, theirs in zip(TOKEN_PROMPTS, recorded["token_ids"], strict=True):
        ours = encoder.token_ids([prompt])[0].tolist()
        assert ours[: ours.index(end) + 1] == theirs[: theirs.index(end) + 1]
        assert len(ours) == len(theirs)
    bert = rewards["image_reward"].tokenizer
    ids = bert(list(PROMPTS), padding="max_length", truncation=True, max_length=35)["input_ids"]
    assert ids == oracle("image_reward")["token_ids"]


@pytest.mark.parametrize("name", sorted(KINDS))
def test_scores_are_upstreams(rewards, name):
    reward = rewards[name]
    cases = [case for case in oracle(name)["cases"] if case.get("antialias", True)]
    assert len(cases) == 5
    for case in cases:
        if "pixel_rows" in case:
            preprocess = getattr(reward, "encoder", reward).preprocess
            check_pixels(preprocess, case, RESIZED if name == "hpsv2" else PIXEL)
    check_scores(reward, cases)


# --- the published files: names and shapes of upstream's full-size classes ------------------------


def meta_state(shapes):
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def test_hpsv2_names_and_shapes_are_the_published_ones():
    from transformers import CLIPModel

    recorded = oracle("hpsv2")
    with torch.device("meta"):
        model = CLIPModel(clip_config(VIT_H_14))
    published = clip_state(meta_state(recorded["published_state_dict"]))
    check_state(model.state_dict(), published, "it", "file")
    assert recorded["published_model_cfg"] == VIT_H_14
    assert model.config.vision_config.num_attention_heads == 16


def test_a_text_tower_of_its_own_has_the_same_names(tmp_path):
    recorded = oracle("open_clip")
    assert sorted(map(custom_name, recorded["state_dict"])) == sorted(recorded["custom_text_keys"])
    check_scores(open_clip(tmp_path, custom_text=True), recorded_cases())


def test_what_a_description_of_the_preprocessing_lacks_is_named(tmp_path):
    save_pickscore(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    whole = json.loads(file.read_text())
    wrong = {"image_mean": None, "image_std": [0.2], "size": {"width": 224}, "resample": 0}
    for name, value in wrong.items():
        file.write_text(json.dumps({**whole, name: value}))
        with pytest.raises(ValueError, match=rf"preprocessor_config\.json: {name}"):
            _transformers_preprocess(tmp_path)


def test_open_clip_files_win_where_a_folder_holds_both_formats(learned, tmp_path):
    shutil.copytree(learned["pickscore"]["path"], tmp_path, dirs_exist_ok=True)
    open_clip(tmp_path)
    check_scores(CLIPScore(str(tmp_path)), recorded_cases())
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
    assert (vision.num_attention_heads, text.num_attention_heads) == (16, 12)
    assert text.bos_token_id == 30522
    assert (vision.layer_norm_eps, text.layer_norm_eps) == (1e-6, 1e-12)
