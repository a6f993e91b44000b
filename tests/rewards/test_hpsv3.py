"""HPSv3 and HPSv3++ against upstream's own code on tiny random models
(tools/record_qwen_oracles.py).

Tolerances. Upstream casts its model to bfloat16. In float32 after that cast both sides compute the
same up to the order of sums in one network, whose last layer adds states of size 1. In bfloat16 (8 bits, .4 % an operation)
orders matter more, so the root mean square distance from the float32 scores is compared: of two
samples of 25 from one distribution, one is twice the other once in a thousand times.
"""

import pytest
import torch
from safetensors.torch import save_file

from g2rpo.rewards.hpsv3 import HPSv3, HPSv3PlusPlus
from g2rpo.rewards.qwen_vl import target_size
from tests.rewards.learned import oracle, picture_of, save_processor, state_of
from tests.rewards.oracle_inputs import PROMPTS
from tests.support.tolerances import network, rounding

SCORE = network(1.0)
PATCH = rounding(8, size=2.6)
"""Of a grey level, resized, divided, and normalised to up to 2.6."""
HALF = ("model.", "visual.", "lm_head.", "cap_encoder.")
JUDGES = {"hpsv3": HPSv3, "hpsv3pp": HPSv3PlusPlus}


def save_judge(folder, name):
    """Saves a recorded judge as it is published: weights, the processor's folder, upstream's file
    with the instruction."""
    recorded = oracle(name)
    state = state_of(recorded["state_dict"])
    state |= {k: v.bfloat16() for k, v in state.items() if k.startswith(HALF)}
    if name == "hpsv3":
        save_file(state, folder / "HPSv3.safetensors")
    else:
        torch.save(state, folder / "hpsv3++.pth")
    source = folder / "hpsv3" / "dataset" / "data_collator_qwen.py"
    source.parent.mkdir(parents=True)
    source.write_text(
        f"import torch\nINSTRUCTION = {recorded['instruction']!r}\n"
        f"prompt_with_special_token = {recorded['question']!r}\n"
    )
    processor = save_processor(folder / "processor", recorded["config"])
    return {"path": str(folder), "instruction": str(folder), "processor": processor}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return {name: save_judge(tmp_path_factory.mktemp(name), name) for name in JUDGES}


@pytest.fixture(scope="module")
def judges(saved):
    options = {"dtype": "float32", "batch_size": 3}
    return {name: kind(**saved[name], **options) for name, kind in JUDGES.items()}


each = pytest.mark.parametrize("name", JUDGES)


def check(reward, recorded):
    """`recorded` is a key of a case."""
    for case in oracle("hpsv3" if type(reward) is HPSv3 else "hpsv3pp")["cases"]:
        theirs = torch.tensor(case[recorded])
        torch.testing.assert_close(scores(reward, case["image"]), theirs, **SCORE)


def scores(reward, name):
    return reward((picture_of(name) / 255).expand(len(PROMPTS), -1, -1, -1), PROMPTS)


def test_scores_are_upstreams(judges):
    check(judges["hpsv3"], "float32")


@pytest.mark.slow
def test_scores_of_hpsv3pp_are_upstreams_before_and_within_a_run(saved):
    """The progress is .3 + .7 * 5 / 10 after five iterations of ten, and 0 outside runs."""
    options = {**saved["hpsv3pp"], "dtype": "float32", "batch_size": 3}
    plain, within = HPSv3PlusPlus(**options), HPSv3PlusPlus(**options, iterations=10)
    for iteration in range(5):
        plain.observe(iteration, torch.zeros(1, 1, 2))
        within.observe(iteration, torch.zeros(1, 1, 2))
    assert plain.state is None
    for reward in (plain, within.held_out):
        check(reward, "float32_0.0")
    check(within, "float32_0.65")
    for case in oracle("hpsv3pp")["cases"]:
        change = torch.tensor(case["float32_0.65"]) - torch.tensor(case["float32_0.0"])
        assert change.abs().min() > 100 * SCORE["atol"]


@each
def test_tokens_and_patches_are_upstreams(name, judges):
    judge, recorded = judges[name], oracle(name)
    square = recorded["cases"][0]["grid"]
    ids, mask = judge.chats(PROMPTS, square[1] * square[2] // 4)
    theirs = torch.tensor(recorded["token_ids"])
    assert torch.equal(ids.where(mask, -1), theirs.where(mask, -1))
    assert mask.sum(1).tolist() == (theirs != judge.tokenizer.pad_token_id).sum(1).tolist()
    for case in recorded["cases"]:
        pixels = judge._pixels(picture_of(case["image"]))[:, None].expand(-1, 2, -1, -1, -1)
        patches, grid = judge.patches(pixels)
        assert grid.tolist() == [case["grid"]]
        seen, theirs = patches[::97, ::131].flatten(), torch.tensor(case["patches"])
        torch.testing.assert_close(seen, theirs, **PATCH)


@pytest.mark.slow
@each
def test_bfloat16_is_as_near_to_float32_as_upstreams(name, saved):
    reward, plus = JUDGES[name](**saved[name], dtype="bfloat16"), "_0.0" * (name == "hpsv3pp")
    ours, theirs = [], []
    for case in oracle(name)["cases"]:
        single, half = (torch.tensor(case[key + plus]) for key in ("float32", "bfloat16"))
        ours.append(scores(reward, case["image"]) - single)
        theirs.append(half - single)
    spread, ours = (torch.cat(errors).square().mean().sqrt() for errors in (theirs, ours))
    assert 0 < ours < 2 * spread
    head = reward.head["rm_head"][0].weight
    assert head.dtype == torch.float32 and not torch.equal(head, head.bfloat16().float())


@each
def test_a_score_does_not_depend_on_the_batch_nor_on_special_tokens(name, judges, monkeypatch):
    judge, pictures = judges[name], (picture_of("small") / 255).expand(5, -1, -1, -1)
    prompts = ["a <|image_pad|> <|Reward|>", "<|im_end|>", *PROMPTS[:3]]
    together = judge(pictures, prompts)
    monkeypatch.setattr(judge, "batch_size", 1)
    torch.testing.assert_close(judge(pictures, prompts), together, **SCORE)
    assert together.isfinite().all()


def test_sizes_are_upstreams():
    for height, width, *theirs in oracle("hpsv3")["sizes"]:
        assert list(target_size(height, width, 28, 200704, 200704)) == theirs


def test_what_is_missing_or_does_not_fit_is_named(saved, tmp_path):
    source, question = (
        tmp_path / "data_collator_qwen.py",
        "prompt_with_special_token = '<|Reward|>'\n",
    )

    def refused(name, error, fact, **changed):
        with pytest.raises(error, match=fact):
            JUDGES[name](**{**saved[name], **changed})

    def instructed(name, fact, text):
        source.write_text(f"{question}INSTRUCTION = {text!r}")
        refused(name, ValueError, fact, instruction=str(tmp_path))

    refused("hpsv3", FileNotFoundError, source.name, instruction=str(tmp_path))
    instructed("hpsv3", "text_prompt", "How good is it?")
    instructed("hpsv3pp", "is HPSv3's", "**Text Alignment:** {text_prompt}")
    kinds = "has the config of a qwen3_vl, not of a qwen2_vl"
    refused("hpsv3", ValueError, kinds, processor=saved["hpsv3pp"]["processor"])
    save_file(state_of(oracle("pickscore")["state_dict"]), tmp_path / "HPSv3.safetensors")
    refused("hpsv3", ValueError, "seems to be a CLIP", path=str(tmp_path))
    other = {"model.language_model.embed_tokens.weight": torch.zeros(1)}
    torch.save(other, tmp_path / "hpsv3++.pth")
    fact = r"hpsv3\+\+\.pth does not fit HPSv3PlusPlus.* It seems to be"
    refused("hpsv3pp", ValueError, fact, path=str(tmp_path))
