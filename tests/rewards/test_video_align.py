"""VideoAlign against upstream's own code on a tiny random Qwen2-VL with a LoRA
(tools/record_qwen_oracles.py).

Tolerances as in test_hpsv3; "overall" is a sum of three scores, each divided by a standard
deviation.
"""

import json

import pytest
import torch

from g2rpo.rewards.video_align import QUALITIES, VideoAlign, frames_seen
from tests.rewards.learned import oracle, save_processor, state_of
from tests.rewards.oracle_inputs import CLIPS, PROMPTS, fixed_clip
from tests.support.refusals import refusal
from tests.support.tolerances import rounding
from tests.support.variants import few

RECORDED = oracle("video_align")
WEIGHTS, SETTINGS = "checkpoint-11352/model.pth", "model_config.json"


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """VideoReward as it is published: weights with their LoRA, settings, the processor's folder,
    the instruction's file."""
    folder = tmp_path_factory.mktemp("video_reward")
    (folder / WEIGHTS).parent.mkdir()
    state = {name: value.bfloat16() for name, value in state_of(RECORDED["state_dict"]).items()}
    torch.save(state, folder / WEIGHTS)
    (folder / SETTINGS).write_text(json.dumps(RECORDED["settings"]))
    (folder / "prompt_template.py").write_text(
        f"DETAILED_PROMPT_WITH_SPECIAL_TOKEN = {RECORDED['instruction']!r}\n"
    )
    processor = save_processor(folder / "processor", RECORDED["config"])
    return {"path": str(folder), "instruction": str(folder), "processor": processor}


@pytest.fixture(scope="module")
def reward(options):
    return VideoAlign(**options, dtype="float32")


def scores(reward, name, score="Overall"):
    """Scores of a recorded clip for all prompts."""
    reward.chosen = [QUALITIES.index(score)] if score in QUALITIES else [0, 1, 2]
    reward.fps = CLIPS[name][2]
    clip = torch.from_numpy(fixed_clip(name)).permute(0, 3, 1, 2) / 255
    return reward(clip.expand(len(PROMPTS), -1, -1, -1, -1), PROMPTS)


@pytest.mark.parametrize(
    ("case", "quality"),
    few(zip(RECORDED["cases"], QUALITIES, strict=True), lambda each: each[1] == QUALITIES[0]),
    ids=QUALITIES,
)
def test_scores_and_patches_are_upstreams(reward, monkeypatch, case, quality):
    made, patches = [], reward.patches
    monkeypatch.setattr(reward, "patches", lambda x: made.append(patches(x)) or made[-1])
    for score in (quality, "Overall"):
        theirs = torch.tensor(case["float32"][score])
        found = scores(reward, case["clip"], score)
        # these weights multiply rounding a hundredfold: with SSE scores are up to 1.7e-4 off
        torch.testing.assert_close(found, theirs, atol=1e-3, rtol=0)
    (frames, grid), count = made[0], torch.tensor(case["grid"]).prod()
    assert grid[0].tolist() == case["grid"]
    seen, theirs = frames[:count:97, ::131].flatten(), torch.tensor(case["patches"])
    torch.testing.assert_close(seen, theirs, **rounding(8, size=2.6))


@pytest.mark.slow
def test_bfloat16_is_as_near_to_float32_as_upstreams(options):
    half = VideoAlign(**options)
    ours, theirs = [], []
    for case in RECORDED["cases"]:
        for score in QUALITIES:
            single = torch.tensor(case["float32"][score])
            ours.append(scores(half, case["clip"], score) - single)
            theirs.append(torch.tensor(case["bfloat16"][score]) - single)
    ours, theirs = (torch.cat(errors).square().mean().sqrt() for errors in (ours, theirs))
    assert 0 < ours < 2 * theirs


def test_frames_are_upstreams():
    for fps, counts in RECORDED["frames"].items():
        assert [len(frames_seen(length, float(fps), 2.0)) for length in range(2, 130)] == counts
    assert frames_seen(9, 16, 2.0) == [0, 3, 5, 8]


def test_a_clip_without_finite_pixels_or_with_one_frame_has_no_score(reward):
    pair = torch.rand(2, 4, 3, 40, 40)
    pair[1, 2, 0, 5, 5] = torch.nan
    assert reward(pair, ["a", "b"]).isnan().tolist() == [False, True]
    with pytest.raises(ValueError, match="clips of two frames or more"):
        reward(pair[:, :1], ["a", "b"])
    with pytest.raises(ValueError, match=r"float \[B, T, 3, H, W\], got"):
        reward(pair[:, 0], ["a", "b"])


def test_what_does_not_fit_is_named_before_anything_is_loaded(options, tmp_path):
    def refused(option, value, fact):
        given = {**options, option: str(value)}.items()
        named = [f"rewards.clips.options.{name}={text}" for name, text in given]
        said = refusal("rewards.clips.kind=video_align", *named)
        assert f"\n- rewards.clips.options.{option}" in said and fact in said

    wrong = f"lacks VideoReward's {SETTINGS}"
    refused("path", tmp_path, wrong)
    refused("path", f"{options['path']}/{WEIGHTS}", wrong)
    refused("instruction", tmp_path, "has no prompt_template.py")
    settings = RECORDED["settings"]
    frames = {**settings, "data_config": {**settings["data_config"], "num_frames": 8}}
    for content, fact in (({}, wrong), (frames, wrong), (settings, f"has no {WEIGHTS}")):
        (tmp_path / SETTINGS).write_text(json.dumps(content))
        refused("path", tmp_path, fact)
    (tmp_path / WEIGHTS).parent.mkdir()
    torch.save({"rm_head.weight": torch.zeros(1)}, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match="model.pth does not fit VideoAlign.* It seems to be"):
        VideoAlign(**{**options, "path": str(tmp_path)})
