"""Recipes for real models: complete, explained, and clear about what is missing where they are
run."""

import re
import shlex
from fractions import Fraction
from functools import reduce
from pathlib import Path

import pytest

from g2rpo.algorithms.flow_grpo import FlowGRPO
from g2rpo.app.build import Request, build
from g2rpo.assembly.config import load_config
from g2rpo.assembly.rewards import check_rewards
from g2rpo.config import recipes
from g2rpo.core.errors import UserError
from g2rpo.lab.plan.counting import count
from g2rpo.rollout.planning import count_evaluations
from g2rpo.training.listeners.evaluations import FIRST_LOOK
from tests.support.commands import refused

ROOT = Path(__file__).parents[2]
REAL = [
    name
    for name in recipes.names()
    if not re.search(r"path: (testbed|words)\b", recipes.text(name))
]


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_says_in_its_first_line_what_it_is(name):
    assert recipes.text(name).startswith("# ") and 20 < len(recipes.summary(name)) <= 110


@pytest.mark.parametrize("name", REAL)
def test_every_value_has_its_reason(name):
    values = re.findall(r"^  \w+: (?!\{).+$", recipes.text(name), flags=re.MULTILINE)
    assert [line for line in values if "#" not in line and "name:" not in line] == []


@pytest.mark.parametrize("name", recipes.names())
def test_rewards_options_and_plans_of_a_recipe_exist(name):
    config = load_config(name, [])
    check_rewards({**config.rewards, **config.evaluation.rewards})
    assert not set(config.rewards) & set(config.evaluation.rewards)
    assert config.algorithm.plans(config.sampling.num_steps)


@pytest.mark.parametrize(
    ("name", "prompts", "evaluations", "images"),
    [
        ("flux1-dev-hps", 16, 1700, 288),
        ("reference", 16, 1496, 192),
        ("flux1-dev-lora", 4, 727, 96),
        ("sd35-medium-lora", 8, 557, 120),
        ("sd35-medium-flow-grpo", 48, 240, 24),
        ("sd35-medium-nft", 48, 240, 24),
        ("flux1-dev-pave", 8, 7 + 12 * (15 + 13 + 11 + 9), 48),
        ("flux2-klein-lora", 8, 484, 96),
        ("wan-lora", 8, 484, 96),
    ],
)
def test_a_prompt_costs_what_the_comments_say(name, prompts, evaluations, images):
    config = load_config(name, [])
    plans, size = config.algorithm.plans(config.sampling.num_steps), config.algorithm.group_size
    assert config.trainer.prompts_per_iteration == prompts
    scored = size * sum(len(plan.tails) for plan in plans)
    assert (count_evaluations(plans, size), scored) == (evaluations, images)


@pytest.mark.parametrize("name", ["flux1-dev-lora", "flux2-klein-lora", "z-image-lora"])
def test_a_recipe_for_24_gb_differs_in_memory_alone(name):
    """Smaller batches, frozen weights in int8, rewards in bfloat16, judges on the CPU; and what is
    kept and judged by the clock, as a crash should lose half an hour at most and a first look come
    within the first hour."""
    large, small = (load_config(recipe, []).model_dump() for recipe in (name, f"{name}-24gb"))
    for table in (
        large["rewards"],
        small["rewards"],
        large["evaluation"]["rewards"],
        small["evaluation"]["rewards"],
    ):
        for reward in table.values():
            reward["options"] = {
                key: value
                for key, value in reward["options"].items()
                if key not in ("dtype", "device")
            }
    sizes = {
        "policy": ["quantize"],
        "sampling": ["batch_size", "decode_batch_size"],
        "trainer": ["micro_batch_size", "checkpoint_minutes"],
        "evaluation": ["every_minutes"],
    }
    assert (
        small["trainer"]["checkpoint_minutes"] <= 30
        and small["evaluation"]["every_minutes"] * FIRST_LOOK <= 30
    )
    for config in (large, small):
        config.pop("recipe")
        for group, keys in sizes.items():
            for key in keys:
                config[group].pop(key)
    assert large == small


PUBLISHED = {"flux1-dev-hps": "reference", "flux1-dev-hps-clip": "reference-hps-clip"}


@pytest.mark.parametrize("name", [*PUBLISHED, *PUBLISHED.values()])
def test_who_follows_the_paper_or_its_code_makes_eight_optimizer_steps_a_rollout(name):
    """The published scripts step after every branch step; their rate and their 300 iterations are
    for that."""
    config = load_config(name, [])
    ((iteration, times),) = count(config, 400).kinds
    assert (iteration.optimizer_steps, times) == (8, config.trainer.iterations)
    assert config.optim.learning_rate == 2e-6 and 300 <= times <= 301


@pytest.mark.parametrize("paper", PUBLISHED)
def test_the_reference_differs_from_the_paper_in_the_codes_quirks_only(paper):
    ours, theirs = (
        load_config(paper, []).model_dump(),
        load_config(PUBLISHED[paper], []).model_dump(),
    )
    changed = {
        f"{group}.{key}"
        for group in ("policy", "algorithm", "sampling", "optim", "trainer", "evaluation")
        for key in theirs[group]
        if theirs[group][key] != ours[group][key]
    }
    assert changed - {"algorithm.granularities"} == {
        "policy.truncate_timesteps",
        "policy.published_pictures",
        "policy.vae_tiling",
        "sampling.precision",
        "trainer.iterations",
    }
    assert [reward["options"]["dtype"] for reward in theirs["rewards"].values()] == [
        "float16"
    ] * len(ours["rewards"])
    assert list(theirs["rewards"]) == list(ours["rewards"])


def test_flow_grpos_recipe_is_its_pickscore_config():
    """The algorithm's defaults are those of its OCR and GenEval configs, which differ in the weight
    of the KL term alone."""
    config = load_config("sd35-medium-flow-grpo", [])
    assert config.algorithm == FlowGRPO(kl_weight=0.01)
    assert config.sampling.shift == "scheduler" and config.sampling.num_steps == 10
    assert (config.optim.ema_decay, config.optim.ema_every, config.optim.ema_warmup) == (
        0.9,
        8,
        True,
    )
    assert config.rewards["pickscore"].weight == pytest.approx(1 / 26, abs=5e-7)  # six digits


ROWS = re.findall(
    r"^\| ([\w-]+) \| `([\w-]+)` \| `([^`]+)` \|",
    (ROOT / "docs/recipes.md").read_text(),
    flags=re.MULTILINE,
)
"""(algorithm, recipe, overrides) of the table of published values over the nearest recipe."""

SD35 = {
    "sampling.num_steps": 10,
    "sampling.tails.solver": "dpmpp2m",
    "policy.max_sequence_length": 128,
    "optim.ema_warmup": True,
}
LORA = {"policy.tuning": "lora", "policy.lora_init": "gaussian", "optim.learning_rate": 3e-4}
PICKSCORE = {
    "rewards": ["pickscore"],
    "policy.guidance_scale": 1.0,
    "policy.height": 512,
    "optim.weight_decay": 1e-4,
}
FLUX_LORA = [
    "attn.to_k",
    "attn.to_q",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_k_proj",
    "attn.add_q_proj",
    "attn.add_v_proj",
]
FLUX_LORA += [
    "attn.to_add_out",
    *(f"{ff}.{layer}" for ff in ("ff", "ff_context") for layer in ("net.0.proj", "net.2")),
]
GRPO_SERIES = {
    "policy.max_sequence_length": 256, "policy.tuning": "full", "policy.lora_rank": 64, "policy.lora_alpha": 128,
    "policy.lora_targets": FLUX_LORA, "policy.lora_init": "gaussian", "policy.guidance_scale": 3.5, "sampling.num_steps": 16,
    "sampling.shift": 3.0, "algorithm.branch_steps": (0, 2, 4, 6), "algorithm.group_size": 12, "rewards": ["hpsv3"],
    "optim.learning_rate": 2e-6, "optim.ema_decay": 0.0, "trainer.iterations": 300, "trainer.prompts_per_iteration": 8,
}  # fmt: skip
FROM_THE_CODE = {
    "sd35-medium-nft": {  # DiffusionNFT 24af555, sd3_pickscore
        **SD35, **LORA, **PICKSCORE, "policy.truncate_timesteps": "rollout", "algorithm.group_size": 24,
        "algorithm.kl_weight": 1e-4, "trainer.prompts_per_iteration": 48, "optim.ema_decay": 0.9, "optim.ema_every": 1,
    },
    # be51372, pickscore_sd3_no_cfg: 6 pictures on each of 8 GPUs 12 times, in groups of 24
    "AWM": {
        **SD35, **LORA, **PICKSCORE, "sampling.num_steps": 14, "trainer.prompts_per_iteration": 6 * 8 * 12 // 24,
        "algorithm.group_size": 24, "algorithm.times": 6, "algorithm.kl_weight": 1e-4, "algorithm.power": 0.25,
        "optim.ema_decay": 0.99, "optim.ema_every": 1, "policy.lora_rank": 32,
        "policy.truncate_timesteps": False,
    },
    "DGPO": {  # 01ceb4b, pickscore_sd3_4gpu
        **SD35, **LORA, **PICKSCORE, "sampling.shift": 3.0, "trainer.prompts_per_iteration": 8, "algorithm.group_size": 24,
        "algorithm.strength": 10, "algorithm.clip_range": 0.05, "algorithm.kl_weight": 1e-3, "algorithm.times": 4,
        "algorithm.early": Fraction(7, 10), "algorithm.old_after": 200, "optim.ema_decay": 0.9, "optim.ema_every": 8,
        "policy.lora_rank": 64, "policy.lora_alpha": 128,
    },
    "FDFO": {  # 740e22f, config.py with the preset pickscore
        **SD35, **LORA, **PICKSCORE, "sampling.num_steps": 40, "sampling.tails.solver": "euler", "sampling.shift": "scheduler",
        "algorithm.group_size": 2, "algorithm.churn": 0.0025, "algorithm.clip_range": 0.03, "algorithm.kl_weight": 0.0,
        "algorithm.update_every": 1 / 4, "trainer.prompts_per_iteration": 432,
        "trainer.iterations": 1000, "trainer.seed": 6, "optim.learning_rate": 3e-5,
        "optim.max_grad_norm": 1.0, "optim.ema_decay": 0.0, "policy.lora_rank": 32, "policy.lora_alpha": 64,
        "policy.truncate_timesteps": False,
    },
    "ReFL": {  # FlowBP 93b220a, sd3_5_refl.yaml: 8 GPUs with 8 prompts each, one picture of each
        "trainer.prompts_per_iteration": 64, "algorithm.group_size": 1, "algorithm.late": Fraction(11, 25),
        "algorithm.ceiling": 0.55,
        "sampling.num_steps": 25, "sampling.shift": 3.0, "sampling.tails.solver": "euler",
        "policy.guidance_scale": 3.5, "policy.detach_negative": True, "policy.tuning": "full", "policy.negative_prompt": None,
        "policy.max_sequence_length": 512, "policy.truncate_timesteps": False, "policy.height": 512, "rewards": ["hpsv2"],
        "optim.learning_rate": 1e-5, "optim.weight_decay": 1e-4, "optim.max_grad_norm": 1.0, "optim.ema_decay": 0.995,
        "optim.ema_every": 1, "optim.ema_warmup": False, "trainer.iterations": 300, "trainer.seed": 42,
        "evaluation.num_steps": 40,
    },
    "flux1-dev-pave": {  # GRPO-Series c4028f9
        **GRPO_SERIES, "algorithm.eta": 0.8, "algorithm.segments": (2, 3), "trainer.seed": 72,
    },
    "AdaGRPO": {
        **GRPO_SERIES, "algorithm.eta": 0.7, "algorithm.candidates": 10, "algorithm.forget": 0.8,
        "trainer.seed": 42,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FROM_THE_CODE)
def test_a_recipe_or_row_has_the_values_of_the_published_code(name):
    """Written down from the published configs and scripts, not from this package."""
    rows = {algorithm: (recipe, shlex.split(overrides)) for algorithm, recipe, overrides in ROWS}
    config = load_config(*rows.get(name, (name, [])))
    found = {key: reduce(getattr, key.split("."), config) for key in FROM_THE_CODE[name]}
    assert {**found, "rewards": list(config.rewards)} == FROM_THE_CODE[name]


def test_missing_prompts_are_an_exit_2_that_names_the_key_and_the_file(capsys, flux_directory):
    path = f"policy.path={flux_directory}"
    err = refused(capsys, "train", "flux1-dev-hps", path, "--run-dir", "never-made")
    for key, file, own in (
        ("prompts.train", "train", "train"),
        ("evaluation.prompts", "test", "heldout"),
    ):
        assert f"{key}=prompts/hpdv2_{file}.txt" in err and f"name your own with {key}=FILE" in err
        assert f"for a model without input pictures {key}=starter:{own}" in err


def test_missing_weights_are_a_user_error_that_says_what_to_fetch(tmp_path, flux_directory):
    """The hub is offline here (tests/conftest.py), so nothing can be downloaded."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\n")
    given = [
        f"prompts.train={prompts}",
        f"evaluation.prompts={prompts}",
        f"policy.path={flux_directory}",
    ]
    config = load_config("flux1-dev-hps", given)
    repository = config.rewards["hpsv2"].options["path"]
    with pytest.raises(UserError) as refusal:
        build(Request(config=config))
    wanted = f"rewards.hpsv2.options.path={repository}: is not in the local hub cache, and HF_HUB_OFFLINE forbids to download it"
    assert f"{wanted}; `hf download {repository}` fetches it" in str(refusal.value)


def test_a_model_that_is_not_there_is_named():
    with pytest.raises(
        UserError,
        match=r"policy\.path=black-forest-labs/FLUX\.1-dev.*\n  .hf download black-forest-labs/FLUX",
    ):
        build(Request(config=load_config("flux1-dev-lora", [])))
