"""HPSv3 and HPSv3++ against upstream's own code on tiny random models
(tools/record_qwen_oracles.py).

Tolerances. Upstream casts its model to bfloat16. In float32 after that cast both sides compute the
same up to the order of sums: 1e-5, as in test_parity. In bfloat16 (8 bits, .4 % an operation)
orders matter more, so the root mean square distance from the float32 scores is compared: of two
samples of 25 from one distribution, one is twice the other once in a thousand times.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from g2rpo.assembly.checks import check
from g2rpo.assembly.config import load_config
from g2rpo.core.errors import UserError
from g2rpo.rewards.hpsv3 import HPSv3, HPSv3PlusPlus
from g2rpo.rewards.qwen_vl import target_size
from tests.rewards.learned import FIXTURES, oracle, picture_of, state_of
from tests.rewards.oracle_inputs import PROMPTS

SCORE = 1e-5
HALF = ("model.", "visual.", "lm_head.", "cap_encoder.")
JUDGES = {"hpsv3": HPSv3, "hpsv3pp": HPSv3PlusPlus}


def save_judge(folder, name):
    """Saves a recorded judge as it is published: weights, the processor's folder, upstream's file
    with the instruction."""
    recorded = oracle(name)
    state = {
        k: v.bfloat16() if k.startswith(HALF) else v
        for k, v in state_of(recorded["state_dict"]).items()
    }
    if name == "hpsv3":
        save_file(state, folder / "HPSv3.safetensors")
    else:
        torch.save(state, folder / "hpsv3++.pth")
    base = folder / "processor"
    shutil.copytree(FIXTURES / "qwen2_tokenizer", base)
    (base / "config.json").write_text(json.dumps(recorded["config"]))
    (folder / "hpsv3" / "dataset").mkdir(parents=True)
    lines = f"import torch\nINSTRUCTION = {recorded['instruction']!r}\nprompt_with_special_token = {recorded['question']!r}\n"
    (folder / "hpsv3" / "dataset" / "data_collator_qwen.py").write_text(lines)
    return {"path": str(folder), "instruction": str(folder), "processor": str(base)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return {name: save_judge(tmp_path_factory.mktemp(name), name) for name in JUDGES}


@pytest.fixture(params=JUDGES)
def judge(request, saved):
    """A judge's name, and the judge made with options."""
    return request.param, lambda **more: JUDGES[request.param](
        **{**saved[request.param], "dtype": "float32", **more}
    )


def scores(reward, name):
    return reward((picture_of(name) / 255).expand(len(PROMPTS), -1, -1, -1), PROMPTS)


def test_scores_are_upstreams(saved):
    reward = HPSv3(**saved["hpsv3"], dtype="float32", batch_size=3)
    for case in oracle("hpsv3")["cases"]:
        torch.testing.assert_close(
            scores(reward, case["image"]), torch.tensor(case["float32"]), atol=SCORE, rtol=0
        )


def test_scores_of_hpsv3pp_are_upstreams_before_and_within_a_run(saved):
    """The progress is .3 + .7 * 5 / 10 after five iterations of ten, and 0 outside runs."""
    plain = HPSv3PlusPlus(**saved["hpsv3pp"], dtype="float32", batch_size=3)
    within = HPSv3PlusPlus(**saved["hpsv3pp"], dtype="float32", batch_size=3, iterations=10)
    for iteration in range(5):
        plain.observe(iteration, torch.zeros(1, 1, 2))
        within.observe(iteration, torch.zeros(1, 1, 2))
    assert plain.state is None
    for case in oracle("hpsv3pp")["cases"]:
        torch.testing.assert_close(
            scores(plain, case["image"]), torch.tensor(case["float32_0.0"]), atol=SCORE, rtol=0
        )
        torch.testing.assert_close(
            scores(within, case["image"]), torch.tensor(case["float32_0.65"]), atol=SCORE, rtol=0
        )
        assert torch.equal(scores(within.held_out, case["image"]), scores(plain, case["image"]))
    assert (
        torch.tensor(case["float32_0.65"]) - torch.tensor(case["float32_0.0"])
    ).abs().min() > 100 * SCORE


def test_tokens_and_patches_are_upstreams(judge):
    name, make = judge
    reward, recorded = make(), oracle(name)
    square = recorded["cases"][0]["grid"]
    ids, mask = reward.chats(PROMPTS, square[1] * square[2] // 4)
    theirs = torch.tensor(recorded["token_ids"])
    assert torch.equal(ids.where(mask, -1), theirs.where(mask, -1))
    assert mask.sum(1).tolist() == (theirs != reward.tokenizer.pad_token_id).sum(1).tolist()
    for case in recorded["cases"]:
        patches, grid = reward.patches(
            reward._pixels(picture_of(case["image"]))[:, None].expand(-1, 2, -1, -1, -1)
        )
        assert grid.tolist() == [case["grid"]]
        torch.testing.assert_close(
            patches[::97, ::131].flatten(), torch.tensor(case["patches"]), atol=2e-6, rtol=0
        )


def test_bfloat16_is_as_near_to_float32_as_upstreams(judge):
    name, make = judge
    reward = make(dtype="bfloat16")
    ours, theirs = [], []
    for case in oracle(name)["cases"]:
        single, half = (
            torch.tensor(case[key + "_0.0" * (name == "hpsv3pp")])
            for key in ("float32", "bfloat16")
        )
        ours.append(scores(reward, case["image"]) - single)
        theirs.append(half - single)
    spread, ours = (torch.cat(errors).square().mean().sqrt() for errors in (theirs, ours))
    assert 0 < ours < 2 * spread
    head = reward.head["rm_head"][0].weight
    assert head.dtype == torch.float32 and not torch.equal(head, head.bfloat16().float())


def test_a_score_does_not_depend_on_the_batch_nor_on_special_tokens_in_a_prompt(judge):
    reward = judge[1](batch_size=1)
    alone = scores(reward, "small")
    reward.batch_size = 5
    torch.testing.assert_close(scores(reward, "small"), alone, atol=SCORE, rtol=0)
    odd = reward(
        (picture_of("small") / 255).expand(2, -1, -1, -1),
        ["a <|image_pad|> <|Reward|>", "<|im_end|>"],
    )
    assert torch.isfinite(odd).all()


def test_sizes_are_upstreams():
    for height, width, *theirs in oracle("hpsv3")["sizes"]:
        assert list(target_size(height, width, 28, 200704, 200704)) == theirs


def test_what_is_missing_is_named(saved, tmp_path):
    options = saved["hpsv3"]
    with pytest.raises(FileNotFoundError, match="data_collator_qwen.py"):
        HPSv3(**{**options, "instruction": str(tmp_path)})
    (tmp_path / "data_collator_qwen.py").write_text(
        "INSTRUCTION = 'How good is it?'\nprompt_with_special_token = '<|Reward|>'"
    )
    with pytest.raises(ValueError, match="text_prompt"):
        HPSv3(**{**options, "instruction": str(tmp_path)})
    save_file(state_of(oracle("pickscore")["state_dict"]), tmp_path / "HPSv3.safetensors")
    with pytest.raises(ValueError, match="seems to be a CLIP"):
        HPSv3(**{**options, "path": str(tmp_path)})
    with pytest.raises(ValueError, match="has the config of a qwen3_vl, not of a qwen2_vl"):
        HPSv3(**{**options, "processor": saved["hpsv3pp"]["processor"]})


def test_what_does_not_fit_hpsv3pp_is_named(saved, tmp_path):
    options = saved["hpsv3pp"]
    given = [f"rewards.plus.options.{name}={value}" for name, value in options.items()]
    with pytest.raises(
        UserError, match=r"rewards\.plus\.options\.iterations: .*greater than or equal to 1, got 0"
    ):
        check(
            load_config(
                "scenes", ["rewards.plus.kind=hpsv3pp", *given, "rewards.plus.options.iterations=0"]
            )
        )
    text = "prompt_with_special_token = '<|Reward|>'\nINSTRUCTION = '**Text Alignment:** {text_prompt}'"
    (tmp_path / "data_collator_qwen.py").write_text(text)
    with pytest.raises(ValueError, match="is HPSv3's"):
        HPSv3PlusPlus(**{**options, "instruction": str(tmp_path)})
    torch.save(
        {"model.language_model.embed_tokens.weight": torch.zeros(1)}, tmp_path / "hpsv3++.pth"
    )
    with pytest.raises(
        ValueError, match=r"hpsv3\+\+\.pth does not fit HPSv3PlusPlus.* It seems to be"
    ):
        HPSv3PlusPlus(**{**options, "path": str(tmp_path)})
