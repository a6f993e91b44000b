"""VideoAlign against upstream's own code on a tiny random Qwen2-VL with a LoRA
(tools/record_qwen_oracles.py).

Tolerances as in test_hpsv3; "overall" is a sum of three scores, each divided by a standard
deviation.
"""

import json
import shutil

import pytest
import torch

from g2rpo.assembly.checks import check
from g2rpo.assembly.config import load_config
from g2rpo.core.errors import UserError
from g2rpo.rewards.video_align import QUALITIES, VideoAlign, frames_seen
from tests.rewards.learned import FIXTURES, oracle, state_of
from tests.rewards.oracle_inputs import CLIPS, PROMPTS, fixed_clip

RECORDED = oracle("video_align")
SCORE = 1e-5


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """VideoReward as it is published: weights with their LoRA, settings, the processor's folder,
    the instruction's file."""
    folder = tmp_path_factory.mktemp("video_reward")
    (folder / "checkpoint-11352").mkdir()
    state = {name: value.bfloat16() for name, value in state_of(RECORDED["state_dict"]).items()}
    torch.save(state, folder / "checkpoint-11352" / "model.pth")
    (folder / "model_config.json").write_text(json.dumps(RECORDED["settings"]))
    (folder / "prompt_template.py").write_text(
        f"DETAILED_PROMPT_WITH_SPECIAL_TOKEN = {RECORDED['instruction']!r}\n"
    )
    shutil.copytree(FIXTURES / "qwen2_tokenizer", folder / "processor")
    (folder / "processor" / "config.json").write_text(json.dumps(RECORDED["config"]))
    return {"path": str(folder), "instruction": str(folder), "processor": str(folder / "processor")}


def scores(reward, name, score="overall"):
    """Scores of a recorded clip for all prompts."""
    reward.chosen = [QUALITIES.index(score)] if score in QUALITIES else [0, 1, 2]
    reward.fps = CLIPS[name][2]
    return reward(
        (torch.from_numpy(fixed_clip(name)).permute(0, 3, 1, 2) / 255).expand(
            len(PROMPTS), -1, -1, -1, -1
        ),
        PROMPTS,
    )


def test_scores_are_upstreams(options):
    reward = VideoAlign(**options, dtype="float32")
    for case, quality in zip(RECORDED["cases"], QUALITIES, strict=True):
        for score in (quality, "Overall"):
            ours = scores(reward, case["clip"], score.replace("Overall", "overall"))
            torch.testing.assert_close(
                ours, torch.tensor(case["float32"][score]), atol=SCORE, rtol=0
            )


def test_bfloat16_is_as_near_to_float32_as_upstreams(options):
    reward = VideoAlign(**options)
    errors = [
        (
            scores(reward, case["clip"], score) - single,
            torch.tensor(case["bfloat16"][score]) - single,
        )
        for case in RECORDED["cases"]
        for score in QUALITIES
        for single in [torch.tensor(case["float32"][score])]
    ]
    ours, theirs = (torch.cat(each).square().mean().sqrt() for each in zip(*errors, strict=True))
    assert 0 < ours < 2 * theirs


def test_patches_and_frames_are_upstreams(options, monkeypatch):
    for fps, counts in RECORDED["frames"].items():
        assert [len(frames_seen(length, float(fps), 2.0)) for length in range(2, 130)] == counts
    assert frames_seen(9, 16, 2.0) == [0, 3, 5, 8]
    reward = VideoAlign(**options, dtype="float32")
    made, patches = [], reward.patches
    monkeypatch.setattr(reward, "patches", lambda x: made.append(patches(x)) or made[-1])
    for case in RECORDED["cases"]:
        made.clear()
        scores(reward, case["clip"])
        (found, grid), count = made[0], torch.tensor(case["grid"]).prod()
        assert grid[0].tolist() == case["grid"]
        torch.testing.assert_close(
            found[:count:97, ::131].flatten(), torch.tensor(case["patches"]), atol=2e-6, rtol=0
        )


def test_a_clip_without_finite_pixels_or_with_one_frame_has_no_score(options):
    reward = VideoAlign("TA", **options, dtype="float32")
    pair = torch.rand(2, 4, 3, 40, 40)
    pair[1, 2, 0, 5, 5] = torch.nan
    assert reward(pair, ["a", "b"]).isnan().tolist() == [False, True]
    with pytest.raises(ValueError, match="clips of two frames or more"):
        reward(pair[:, :1], ["a", "b"])
    with pytest.raises(ValueError, match=r"float \[B, T, 3, H, W\], got"):
        reward(pair[:, 0], ["a", "b"])


def test_what_does_not_fit_is_named_before_anything_is_loaded(options, tmp_path):
    def refused(fact, **changed):
        given = [
            f"rewards.clips.options.{name}={value}"
            for name, value in {**options, **changed}.items()
        ]
        with pytest.raises(UserError, match=fact) as found:
            check(load_config("scenes", ["rewards.clips.kind=video_align", *given]))
        # beside: here are pictures
        assert f"\n- rewards.clips.options.{next(iter(changed))}" in str(found.value)

    refused("'VQ', 'MQ', 'TA' or 'overall', got 'QV'", score="QV")
    refused("greater than 0, got 0", fps=0)
    refused("lacks VideoReward's model_config.json", path=tmp_path)
    refused(
        "lacks VideoReward's model_config.json",
        path=f"{options['path']}/checkpoint-11352/model.pth",
    )
    refused("has no prompt_template.py", instruction=tmp_path)
    for settings in (
        {},
        {
            **RECORDED["settings"],
            "data_config": {**RECORDED["settings"]["data_config"], "num_frames": 8},
        },
    ):
        (tmp_path / "model_config.json").write_text(json.dumps(settings))
        refused("lacks VideoReward's model_config.json: ", path=tmp_path)
    (tmp_path / "model_config.json").write_text(json.dumps(RECORDED["settings"]))
    refused("has no checkpoint-11352/model.pth", path=tmp_path)
    (tmp_path / "checkpoint-11352").mkdir()
    torch.save({"rm_head.weight": torch.zeros(1)}, tmp_path / "checkpoint-11352" / "model.pth")
    with pytest.raises(ValueError, match="model.pth does not fit VideoAlign.* It seems to be"):
        VideoAlign(**{**options, "path": str(tmp_path)})
