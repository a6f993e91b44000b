"""HPSv3 against upstream's own code on transformers 4.45.2 (tools/record_hpsv3_oracle.py), on a tiny random Qwen2-VL.

Tolerances. Upstream casts its model to bfloat16. In float32 after that cast both sides compute the same up to the order of
sums: 1e-5, as in test_parity. In bfloat16 (8 bits, .4 % an operation) orders matter more, so the root mean square distance from
the float32 scores is compared: of two samples of 25 from one distribution, one is twice the other once in a thousand times.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from g2rpo.rewards.hpsv3 import HPSv3, target_size
from tests.rewards.learned import FIXTURES, oracle, picture_of, state_of
from tests.rewards.oracle_inputs import PROMPTS

SCORE = 1e-5


def save_hpsv3(folder):
    """Saves the recorded HPSv3 as it is published: weights, Qwen2-VL's folder, upstream's file with the instruction."""
    recorded = oracle("hpsv3")
    state = {k: v if k.startswith("rm_head") else v.bfloat16() for k, v in state_of(recorded["state_dict"]).items()}
    save_file(state, folder / "HPSv3.safetensors")
    base = folder / "qwen2_vl"
    shutil.copytree(FIXTURES / "qwen2_tokenizer", base)
    (base / "config.json").write_text(json.dumps(recorded["config"]))
    (folder / "hpsv3" / "dataset").mkdir(parents=True)
    lines = f"import torch\nINSTRUCTION = {recorded['instruction']!r}\nprompt_with_special_token = {recorded['question']!r}\n"
    (folder / "hpsv3" / "dataset" / "data_collator_qwen.py").write_text(lines)
    return {"path": str(folder), "instruction": str(folder), "processor": str(base)}


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    return save_hpsv3(tmp_path_factory.mktemp("hpsv3"))


def scores(reward, name):
    return reward((picture_of(name) / 255).expand(len(PROMPTS), -1, -1, -1), PROMPTS)


def worst(reward):
    return max((scores(reward, c["image"]) - torch.tensor(c["float32"])).abs().max().item() for c in oracle("hpsv3")["cases"])


def test_scores_are_upstreams(options):
    assert worst(HPSv3(**options, dtype="float32", batch_size=3)) < SCORE


def test_tokens_and_patches_are_upstreams(options):
    reward, recorded = HPSv3(**options, dtype="float32"), oracle("hpsv3")
    ids, mask = reward._tokens(PROMPTS, 256)
    theirs = torch.tensor(recorded["token_ids"])
    assert torch.equal(ids.where(mask, -1), theirs.where(mask, -1))
    assert mask.sum(1).tolist() == (theirs != reward.tokenizer.pad_token_id).sum(1).tolist()
    for case in recorded["cases"]:
        patches, grid = reward._patches(picture_of(case["image"]))
        assert grid.tolist() == [case["grid"]]
        torch.testing.assert_close(patches[::97, ::131].flatten(), torch.tensor(case["patches"]), atol=2e-6, rtol=0)


def test_bfloat16_is_as_near_to_float32_as_upstreams(options):
    reward = HPSv3(**options)
    ours, theirs = [], []
    for case in oracle("hpsv3")["cases"]:
        exact = torch.tensor(case["float32"])
        ours.append(scores(reward, case["image"]) - exact)
        theirs.append(torch.tensor(case["bfloat16"]) - exact)
    spread, ours = (torch.cat(errors).square().mean().sqrt() for errors in (theirs, ours))
    assert 0 < ours < 2 * spread
    assert reward.head[0].weight.dtype == torch.float32


def test_a_score_does_not_depend_on_the_batch_nor_on_special_tokens_in_a_prompt(options):
    reward = HPSv3(**options, dtype="float32", batch_size=1)
    alone = scores(reward, "small")
    reward.batch_size = 5
    torch.testing.assert_close(scores(reward, "small"), alone, atol=SCORE, rtol=0)
    odd = reward((picture_of("small") / 255).expand(2, -1, -1, -1), ["a <|image_pad|> <|Reward|>", "<|im_end|>"])
    assert torch.isfinite(odd).all()


def test_sizes_are_upstreams():
    for height, width, *theirs in oracle("hpsv3")["sizes"]:
        assert list(target_size(height, width, 28)) == theirs


def test_what_is_missing_is_named(options, tmp_path):
    with pytest.raises(FileNotFoundError, match="data_collator_qwen.py"):
        HPSv3(**{**options, "instruction": str(tmp_path)})
    (tmp_path / "data_collator_qwen.py").write_text("INSTRUCTION = 'How good is it?'\nprompt_with_special_token = '<|Reward|>'")
    with pytest.raises(ValueError, match="text_prompt"):
        HPSv3(**{**options, "instruction": str(tmp_path)})
    save_file(state_of(oracle("pickscore")["state_dict"]), tmp_path / "HPSv3.safetensors")
    with pytest.raises(ValueError, match="seems to be a CLIP"):
        HPSv3(**{**options, "path": str(tmp_path)})
