"""HPSv3 against upstream's own code on a tiny random model (recorded by
tools/record_hpsv3_oracle.py of commit 2328955a).

Tolerances. Upstream casts its model to bfloat16. In float32 after that cast both sides compute the
same up to the order of sums in one network, whose last layer adds states of size 1. In bfloat16 (8
bits, .4 % an operation) orders matter more, so the root mean square distance from the float32
scores is compared: of two samples of 25 from one distribution, one is twice the other once in a
thousand times.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from g2rpo.rewards.hpsv3 import HPSv3, target_size
from tests.rewards.learned import oracle, picture_of, save_processor, state_of
from tests.rewards.oracle_inputs import PROMPTS
from tests.support.tolerances import network, rounding

SCORE = network(1.0)
PATCH = rounding(8, size=2.6)
"""Of a grey level, resized, divided, and normalised to up to 2.6."""
HALF = ("model.", "visual.", "lm_head.")
RECORDED = oracle("hpsv3")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The recorded judge as it is published: weights, the processor's folder, upstream's file with
    the instruction."""
    folder = tmp_path_factory.mktemp("hpsv3")
    state = state_of(RECORDED["state_dict"])
    state |= {k: v.bfloat16() for k, v in state.items() if k.startswith(HALF)}
    save_file(state, folder / "HPSv3.safetensors")
    source = folder / "hpsv3" / "dataset" / "data_collator_qwen.py"
    source.parent.mkdir(parents=True)
    source.write_text(
        f"import torch\nINSTRUCTION = {RECORDED['instruction']!r}\n"
        f"prompt_with_special_token = {RECORDED['question']!r}\n"
    )
    processor = save_processor(folder / "processor", RECORDED["config"])
    return {"path": str(folder), "instruction": str(folder), "processor": processor}


@pytest.fixture(scope="module")
def judge(saved):
    return HPSv3(**saved, dtype="float32", batch_size=3)


def scores(reward, name):
    return reward((picture_of(name) / 255).expand(len(PROMPTS), -1, -1, -1), PROMPTS)


def test_scores_are_upstreams(judge):
    for case in RECORDED["cases"]:
        theirs = torch.tensor(case["float32"])
        torch.testing.assert_close(scores(judge, case["image"]), theirs, **SCORE)


def test_tokens_and_patches_are_upstreams(judge):
    square = RECORDED["cases"][0]["grid"]
    ids, mask = judge.chats(PROMPTS, square[1] * square[2] // 4)
    theirs = torch.tensor(RECORDED["token_ids"])
    assert torch.equal(ids.where(mask, -1), theirs.where(mask, -1))
    assert mask.sum(1).tolist() == (theirs != judge.tokenizer.pad_token_id).sum(1).tolist()
    for case in RECORDED["cases"]:
        pixels = judge.pixels(picture_of(case["image"]))[:, None].expand(-1, 2, -1, -1, -1)
        patches, grid = judge.patches(pixels)
        assert grid.tolist() == [case["grid"]]
        seen, theirs = patches[::97, ::131].flatten(), torch.tensor(case["patches"])
        torch.testing.assert_close(seen, theirs, **PATCH)


@pytest.mark.slow
def test_bfloat16_is_as_near_to_float32_as_upstreams(saved):
    reward, ours, theirs = HPSv3(**saved, dtype="bfloat16"), [], []
    for case in RECORDED["cases"]:
        single, half = (torch.tensor(case[key]) for key in ("float32", "bfloat16"))
        ours.append(scores(reward, case["image"]) - single)
        theirs.append(half - single)
    spread, ours = (torch.cat(errors).square().mean().sqrt() for errors in (theirs, ours))
    assert 0 < ours < 2 * spread
    head = reward.head["rm_head"][0].weight
    assert head.dtype == torch.float32 and not torch.equal(head, head.bfloat16().float())


def test_a_score_does_not_depend_on_the_batch_nor_on_special_tokens(judge, monkeypatch):
    pictures = (picture_of("small") / 255).expand(5, -1, -1, -1)
    prompts = ["a <|image_pad|> <|Reward|>", "<|im_end|>", *PROMPTS[:3]]
    together = judge(pictures, prompts)
    monkeypatch.setattr(judge, "batch_size", 1)
    torch.testing.assert_close(judge(pictures, prompts), together, **SCORE)
    assert together.isfinite().all()


def test_sizes_are_upstreams():
    for height, width, *theirs in RECORDED["sizes"]:
        assert list(target_size(height, width, 28, 200704, 200704)) == theirs


def test_what_is_missing_or_does_not_fit_is_named(saved, tmp_path):
    def refused(error, fact, **changed):
        with pytest.raises(error, match=fact):
            HPSv3(**{**saved, **changed})

    source = tmp_path / "data_collator_qwen.py"
    refused(FileNotFoundError, source.name, instruction=str(tmp_path))
    source.write_text("prompt_with_special_token = '<|Reward|>'\nINSTRUCTION = 'How good is it?'")
    refused(ValueError, "text_prompt", instruction=str(tmp_path))
    config = {"model_type": "qwen3_vl", "text_config": {}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    kinds = "has the config of a qwen3_vl, not of a qwen2_vl"
    refused(ValueError, kinds, processor=str(tmp_path))
    save_file(state_of(oracle("pickscore")["state_dict"]), tmp_path / "HPSv3.safetensors")
    refused(ValueError, "seems to be a CLIP", path=str(tmp_path))
    state = {"model.language_model.embed_tokens.weight": torch.zeros(1)}
    save_file(state, tmp_path / "HPSv3.safetensors")
    unfit = r"HPSv3.safetensors does not fit HPSv3.* It seems to be"
    refused(ValueError, unfit, path=str(tmp_path))
