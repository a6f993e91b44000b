"""Learned rewards against the numbers of their upstream packages (tools/record_reward_oracles.py), on fixed weights.

Tolerance. Both sides compute in float32, with different orders of summation and different torch versions. Rounding is
6e-8 relative per operation; through four layers of width 16 to 32 it grows to about 1e-6 in unit-length features, and
the features multiply into scores of the same size. SCORE leaves a factor of ten for that. It is two to four orders of
magnitude below what any wrong step costs: the tests at the end turn each step wrong once and demand to be noticed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from g2rpo.rewards import clip_encoder, open_clip
from g2rpo.rewards.aesthetic import Aesthetic
from g2rpo.rewards.clip import CLIPScore
from g2rpo.rewards.hpsv2 import HPSv2
from g2rpo.rewards.image_reward import ImageReward, blip_configs, part, vision_state
from g2rpo.rewards.pickscore import PickScore
from g2rpo.rewards.weights import check_state
from tests.rewards.learned import TOKENIZER, openai_clip_dir, oracle, save_learned, state_of
from tests.rewards.oracle_inputs import PROMPTS, TOKEN_PROMPTS, fixed_image

SCORE = 1e-5
PIXEL = 2e-6  # a normalised pixel is up to 2.6 in size; its float32 spacing is 2.4e-7

Fixture = dict[str, Any]


def image(name: str) -> Tensor:
    return torch.from_numpy(fixed_image(name)).permute(2, 0, 1)[None]


def scores(reward: Callable[..., Tensor], name: str) -> Tensor:
    """One picture with every prompt."""
    return reward((image(name) / 255).expand(len(PROMPTS), -1, -1, -1), PROMPTS)


def worst(reward: Callable[..., Tensor], cases: list[Fixture]) -> float:
    return max((scores(reward, c["image"]) - torch.tensor(c["scores"])).abs().max().item() for c in cases)


@pytest.fixture(scope="module")
def open_clip_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    def make(quick_gelu: bool, resize_mode: str, custom_text: bool = False, torch_file: bool = False) -> str:
        recorded = oracle("open_clip")
        folder = tmp_path_factory.mktemp("open_clip")
        state = state_of(recorded["state_dict"])
        if custom_text:
            own = ("visual.", "logit_scale")
            state = {k if k.startswith(own) else f"text.{k}": v for k, v in state.items()}
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


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return save_learned(tmp_path_factory.mktemp("learned"))


@pytest.mark.parametrize("quick_gelu", [False, True])
@pytest.mark.parametrize("resize_mode", ["shortest", "squash"])
def test_clip_score_is_open_clips(open_clip_dir: Callable[..., str], quick_gelu: bool, resize_mode: str) -> None:
    reward = CLIPScore(open_clip_dir(quick_gelu, resize_mode), tokenizer=TOKENIZER)
    cases = [c for c in oracle("open_clip")["cases"] if (c["quick_gelu"], c["resize_mode"]) == (quick_gelu, resize_mode)]
    assert len(cases) == 5
    assert worst(reward, cases) < SCORE
    for case in cases:
        seen = reward.encoder.preprocess(image(case["image"]))[0, :, ::8, ::8]
        torch.testing.assert_close(seen, torch.tensor(case["pixel_rows"]), atol=PIXEL, rtol=0)
        features = reward.encoder.image_features(image(case["image"]))[0]
        torch.testing.assert_close(features, torch.tensor(case["image_features"]), atol=SCORE, rtol=0)


def test_token_ids_are_open_clips() -> None:
    recorded = oracle("open_clip")
    model_cfg = recorded["model_cfg"]
    model = clip_encoder.build_open_clip(model_cfg, state_of(recorded["state_dict"]), "test", "memory")
    words = clip_encoder.load_clip_tokenizer(TOKENIZER)
    encoder = clip_encoder.ClipEncoder(model, words, open_clip.preprocess_from(model_cfg, {}), clean=open_clip.clean_prompt)
    end = model_cfg["text_cfg"]["vocab_size"] - 1
    for prompt, ids in zip(TOKEN_PROMPTS, recorded["token_ids"], strict=True):
        ours, theirs = encoder.token_ids([prompt])[0].tolist(), list(ids)
        assert ours[: ours.index(end) + 1] == theirs[: theirs.index(end) + 1]
        assert len(ours) == len(theirs)


def test_hpsv2_is_upstreams(options: dict[str, dict[str, Any]]) -> None:
    recorded = oracle("hpsv2")
    for antialias in (True, False):
        reward = HPSv2(**options["hpsv2"], antialias=antialias)
        cases = [c for c in recorded["cases"] if c["antialias"] is antialias]
        for case in cases:
            seen = reward.encoder.preprocess(image(case["image"]))[0, :, ::8, ::8]
            torch.testing.assert_close(seen, torch.tensor(case["pixel_rows"]), atol=10 * PIXEL, rtol=0)
        assert len(cases) == 5
        assert worst(reward, cases) < SCORE


def test_pickscore_is_upstreams(options: dict[str, dict[str, Any]]) -> None:
    recorded = oracle("pickscore")
    reward = PickScore(**options["pickscore"])
    for case in recorded["cases"]:
        seen = reward.encoder.preprocess(image(case["image"]))[0, :, ::8, ::8]
        torch.testing.assert_close(seen, torch.tensor(case["pixel_rows"]), atol=PIXEL, rtol=0)
    assert worst(reward, recorded["cases"]) < SCORE * reward.scale.item()


def test_image_reward_is_upstreams(options: dict[str, dict[str, Any]]) -> None:
    recorded = oracle("image_reward")
    reward = ImageReward(**options["image_reward"])
    for case in recorded["cases"]:
        seen = reward.preprocess(image(case["image"]))[0, :, ::56, ::56]
        torch.testing.assert_close(seen, torch.tensor(case["pixel_rows"]), atol=PIXEL, rtol=0)
    ids = reward.tokenizer(list(PROMPTS), padding="max_length", truncation=True, max_length=35)["input_ids"]
    assert ids == recorded["token_ids"]
    assert worst(reward, recorded["cases"]) < SCORE


def test_aesthetic_is_upstreams(tmp_path: Path) -> None:
    recorded = oracle("aesthetic")
    torch.save(state_of(recorded["state_dict"], gain=1.7), tmp_path / "sac+logos+ava1-l14-linearMSE.pth")
    reward = Aesthetic(str(tmp_path), clip=openai_clip_dir(tmp_path))
    for case in recorded["cases"]:
        ours = reward(image(case["image"]) / 255, ["no matter what"])
        assert ours.item() == pytest.approx(case["score"], abs=SCORE)


# --- the same comparisons, turned wrong once: each must be far outside the tolerance ------------------------------


@pytest.mark.parametrize(
    "change", ["activation", {"mode": "squash"}, {"odd_margin": "floor"}, {"interpolation": "bilinear"}, "clean"]
)
def test_a_wrong_step_is_noticed(open_clip_dir: Callable[..., str], change: str | dict[str, str]) -> None:
    reward = CLIPScore(open_clip_dir(change == "activation", "shortest"), tokenizer=TOKENIZER)
    if isinstance(change, dict):
        reward.encoder.preprocess = replace(reward.encoder.preprocess, **change)  # type: ignore[type-var]
    elif change == "clean":
        reward.encoder.clean = None
    cases = [c for c in oracle("open_clip")["cases"] if not c["quick_gelu"] and c["resize_mode"] == "shortest"]
    assert worst(reward, cases) > 100 * SCORE


def test_swapped_query_and_key_are_noticed(options: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    recorded = oracle("hpsv2")
    state = state_of(recorded["state_dict"])
    weight = state["transformer.resblocks.1.attn.in_proj_bias"]
    q, k, v = weight.chunk(3)
    state["transformer.resblocks.1.attn.in_proj_bias"] = torch.cat([k, q, v])
    torch.save({"state_dict": state}, tmp_path / "swapped.pt")
    reward = HPSv2(str(tmp_path / "swapped.pt"), tokenizer=TOKENIZER, model_cfg=recorded["model_cfg"])
    assert worst(reward, [c for c in recorded["cases"] if c["antialias"]]) > 100 * SCORE


def test_missing_antialias_is_noticed(options: dict[str, dict[str, Any]]) -> None:
    recorded = oracle("hpsv2")
    reward = HPSv2(**options["hpsv2"], antialias=False)
    assert worst(reward, [c for c in recorded["cases"] if c["antialias"]]) > 100 * SCORE


def test_the_other_librarys_crop_is_noticed(options: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    recorded = oracle("pickscore")
    reward = PickScore(**options["pickscore"])
    reward.encoder.preprocess = replace(reward.encoder.preprocess, odd_margin="round")  # type: ignore[type-var]
    assert worst(reward, recorded["cases"]) > 100 * SCORE
    recorded = oracle("aesthetic")
    torch.save(state_of(recorded["state_dict"], gain=1.7), tmp_path / "sac+logos+ava1-l14-linearMSE.pth")
    aesthetic = Aesthetic(str(tmp_path), clip=openai_clip_dir(tmp_path))
    aesthetic.encoder.preprocess = replace(aesthetic.encoder.preprocess, odd_margin="floor")  # type: ignore[type-var]
    worse = [aesthetic(image(c["image"]) / 255, ["x"]).item() - c["score"] for c in recorded["cases"]]
    assert max(map(abs, worse)) > 100 * SCORE


@pytest.mark.parametrize("heads", [(4, 3), (2, 6)])
def test_wrong_number_of_heads_is_noticed(options: dict[str, dict[str, Any]], heads: tuple[int, int]) -> None:
    recorded = oracle("image_reward")
    reward = ImageReward(**{**options["image_reward"], "heads": heads})
    assert worst(reward, recorded["cases"]) > 100 * SCORE


# --- the published files: names and shapes of upstream's full-size classes ----------------------------------------


def meta_state(shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def test_hpsv2_names_and_shapes_are_the_published_ones() -> None:
    from transformers import CLIPModel

    recorded = oracle("hpsv2")
    with torch.device("meta"):
        model = CLIPModel(open_clip.clip_config(open_clip.VIT_H_14))
    check_state(model.state_dict(), open_clip.clip_state(meta_state(recorded["published_state_dict"])), "it", "file")
    assert recorded["published_model_cfg"] == open_clip.VIT_H_14
    assert open_clip.clip_config(recorded["published_model_cfg"]).vision_config.num_attention_heads == 16


def test_a_text_tower_of_its_own_has_the_same_names(open_clip_dir: Callable[..., str]) -> None:
    own = ("visual.", "logit_scale")
    recorded = oracle("open_clip")
    assert sorted(k if k.startswith(own) else f"text.{k}" for k in recorded["state_dict"]) == sorted(
        recorded["custom_text_keys"]
    )
    plain = CLIPScore(open_clip_dir(True, "squash"), tokenizer=TOKENIZER)
    custom = CLIPScore(open_clip_dir(True, "squash", custom_text=True, torch_file=True), tokenizer=TOKENIZER)
    assert torch.equal(scores(plain, "wide"), scores(custom, "wide"))


def test_open_clip_files_win_where_a_folder_holds_both_formats(
    open_clip_dir: Callable[..., str], options: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    for source in (options["pickscore"]["path"], open_clip_dir(True, "squash")):
        for file in Path(source).iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    cases = [c for c in oracle("open_clip")["cases"] if c["quick_gelu"] and c["resize_mode"] == "squash"]
    assert worst(CLIPScore(str(tmp_path)), cases) < SCORE
    assert CLIPScore(str(tmp_path), format="transformers").encoder.preprocess.mode == "shortest"
    (tmp_path / "open_clip_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no open_clip_model.safetensors or open_clip_pytorch_model.bin"):
        CLIPScore(str(tmp_path))


def test_an_incomplete_transformers_clip_is_refused(options: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    for file in Path(options["pickscore"]["path"]).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    state = state_of(oracle("pickscore")["state_dict"])
    del state["visual_projection.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"not a complete CLIP: 1 tensors are missing, such as \['visual_projection"):
        CLIPScore(str(tmp_path))


def test_image_reward_names_and_shapes_are_the_published_ones() -> None:
    from transformers.models.blip.modeling_blip import BlipVisionModel
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    state = meta_state(oracle("image_reward")["published_state_dict"])
    vision, text = blip_configs(state, heads=(16, 12))
    with torch.device("meta"):
        towers = BlipVisionModel(vision), BlipTextModel(text, add_pooling_layer=False)
    check_state(towers[0].state_dict(), vision_state(state), "it", "file")
    check_state(towers[1].state_dict(), part(state, "blip.text_encoder."), "it", "file")
    assert (vision.image_size, vision.num_hidden_layers, vision.hidden_size) == (224, 24, 1024)
    assert (text.num_hidden_layers, text.hidden_size, text.vocab_size) == (12, 768, 30524)
    assert (vision.layer_norm_eps, text.layer_norm_eps) == (1e-6, 1e-12)
