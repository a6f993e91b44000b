"""Recipes for real models: complete, explained, and clear about what is missing where they are
run."""

import re
import shlex
from fractions import Fraction
from pathlib import Path

import pytest

from g2rpo.algorithms.flow_grpo import FlowGRPO
from g2rpo.config import recipes
from g2rpo.config.read import load_config
from g2rpo.config.resolve import differences
from g2rpo.rewards.catalogue import check_rewards
from g2rpo.rollout.planning import count_evaluations
from g2rpo.train.run.records import FIRST_LOOK
from tests.support.tables import rows
from tools.recipe_needs import needs_of

ROOT = Path(__file__).parents[2]
REAL = [
    name
    for name in recipes.names()
    if not re.search(r"path: (testbed|words)\b", recipes.text(name))
]


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_says_in_its_first_line_what_it_is(name):
    assert recipes.text(name).startswith("# ") and 20 < len(recipes.summary(name)) <= 110


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd35-medium-evening", "flux1-dev-hps"])
def test_what_the_list_says_that_a_recipe_needs_is_what_is_planned(name):
    """It is stored, for a plan takes seconds; `python -m tools.recipe_needs` writes it."""
    assert vars(recipes.needs()[name]) == needs_of(name)


def test_each_recipe_of_a_real_model_says_what_it_needs():
    assert set(recipes.needs()) == set(REAL)


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


COSTS = """
flux1-dev-hps -> 16 1700 288
reference -> 16 1496 192
flux1-dev-lora -> 4 727 96
sd35-medium-lora -> 8 557 120
sd35-medium-flow-grpo -> 48 240 24
sd35-medium-nft -> 48 240 24
flux1-dev-pave -> 8 583 48
flux2-klein-lora -> 8 484 96
wan-lora -> 8 484 96
"""


@pytest.mark.parametrize(("name", "expected"), rows(COSTS))
def test_a_prompt_costs_what_the_comments_say(name, expected):
    """Prompts of an iteration; evaluations and pictures of each."""
    config = load_config(name, [])
    plans, size = config.algorithm.plans(config.sampling.num_steps), config.algorithm.group_size
    costs = count_evaluations(plans, size), size * sum(len(plan.tails) for plan in plans)
    assert [config.trainer.prompts_per_iteration, *costs] == [*map(int, expected.split())]


@pytest.mark.parametrize("name", ["flux1-dev-lora", "flux2-klein-lora", "z-image-lora"])
def test_a_recipe_for_24_gb_differs_in_memory_alone(name):
    """Smaller batches, frozen weights in int8, rewards in bfloat16, judges on the CPU; and what is
    kept and judged by the clock, as a crash should lose half an hour at most and a first look come
    within the first hour."""
    large, small = (load_config(recipe, []) for recipe in (name, f"{name}-24gb"))
    changed = differences(large, small)
    assert {key for key in changed if not key.endswith((".options.dtype", ".options.device"))} <= {
        "recipe",
        "policy.quantize",
        "sampling.batch_size",
        "sampling.decode_batch_size",
        "trainer.micro_batch_size",
        "trainer.checkpoint_minutes",
        "evaluation.every_minutes",
    }
    assert small.trainer.checkpoint_minutes <= 30
    assert small.evaluation.every_minutes * FIRST_LOOK <= 30


PUBLISHED = {"flux1-dev-hps": "reference", "flux1-dev-hps-clip": "reference-hps-clip"}


@pytest.mark.parametrize("paper", PUBLISHED)
def test_the_reference_differs_from_the_paper_in_the_codes_quirks_only(paper):
    ours, theirs = (load_config(name, []) for name in (paper, PUBLISHED[paper]))
    changed = {
        key
        for key in differences(ours, theirs)
        if not key.startswith(("recipe", "prompts", "rewards", "evaluation.rewards"))
    }
    assert changed - {"algorithm.granularities"} == {
        "policy.truncate_timesteps",
        "policy.published_pictures",
        "policy.vae_tiling",
        "sampling.precision",
        "trainer.iterations",
    }
    assert {reward.options["dtype"] for reward in theirs.rewards.values()} == {"float16"}
    assert list(theirs.rewards) == list(ours.rewards)


def test_flow_grpos_recipe_is_its_pickscore_config():
    """The algorithm's defaults are those of its OCR and GenEval configs, which differ in the weight
    of the KL term alone."""
    config = load_config("sd35-medium-flow-grpo", [])
    assert config.algorithm == FlowGRPO(kl_weight=0.01)
    assert config.sampling.shift == "scheduler" and config.sampling.num_steps == 10
    optim = config.optim
    assert (optim.ema_decay, optim.ema_every, optim.ema_warmup) == (0.9, 8, True)
    assert config.rewards["pickscore"].weight == pytest.approx(1 / 26, abs=5e-7)  # six digits


PAGE = (ROOT / "studies/published.md").read_text("utf-8")
ROWS = re.findall(r"^\| ([\w-]+) \| `([\w-]+)` \| `([^`]+)` \|", PAGE, flags=re.MULTILINE)
"""(algorithm, recipe, overrides) of the table of published values over the nearest recipe, and of
the command below it."""
ROWS += [
    ("ReFL", recipe, overrides.replace("\\\n", ""))
    for recipe, overrides in re.findall(
        r"^g2rpo train ([\w-]+) --run-dir runs/refl (.*?)^```$",
        PAGE,
        flags=re.MULTILINE | re.DOTALL,
    )
]

SD35 = """
sampling.num_steps=10 sampling.tails.solver=dpmpp2m policy.max_sequence_length=128
policy.tuning=lora policy.lora_init=gaussian policy.guidance_scale=1 policy.height=512
optim.learning_rate=3e-4 optim.weight_decay=1e-4 optim.ema_warmup=true
"""
GRPO_SERIES = """
policy.max_sequence_length=256 policy.tuning=full policy.lora_rank=64 policy.lora_alpha=128
policy.lora_targets=[attn.to_k,attn.to_q,attn.to_v,attn.to_out.0,attn.add_k_proj,attn.add_q_proj,\
attn.add_v_proj,attn.to_add_out,ff.net.0.proj,ff.net.2,ff_context.net.0.proj,ff_context.net.2]
policy.lora_init=gaussian policy.guidance_scale=3.5 sampling.num_steps=16 sampling.shift=3
algorithm.branch_steps=[0,2,4,6] algorithm.group_size=12
optim.learning_rate=2e-6 optim.ema_decay=0 trainer.iterations=300 trainer.prompts_per_iteration=8
"""
# DiffusionNFT 24af555, sd3_pickscore
NFT = """
policy.truncate_timesteps=rollout algorithm.group_size=24 algorithm.kl_weight=1e-4
trainer.prompts_per_iteration=48 optim.ema_decay=0.9 optim.ema_every=1
"""
# be51372, pickscore_sd3_no_cfg: 6 pictures on each of 8 GPUs 12 times, in groups of 24
AWM = """
sampling.num_steps=14 trainer.prompts_per_iteration=24 algorithm.group_size=24 algorithm.times=6
algorithm.kl_weight=1e-4 algorithm.power=0.25 optim.ema_decay=0.99 optim.ema_every=1
policy.lora_rank=32 policy.truncate_timesteps=false
"""
# 01ceb4b, pickscore_sd3_4gpu
DGPO = """
sampling.shift=3 trainer.prompts_per_iteration=8 algorithm.group_size=24 algorithm.strength=10
algorithm.clip_range=0.05 algorithm.kl_weight=1e-3 algorithm.times=4 optim.ema_decay=0.9
optim.ema_every=8 policy.lora_rank=64 policy.lora_alpha=128
"""
# c257000, scripts/sd3/sd3_geneval_epg.sh, config/sd3.py and base.py: A = (1e-4 / 1e-3) (R - mean)
EPG = """
policy.truncate_timesteps=rollout policy.lora_rank=32 policy.lora_alpha=64 policy.dtype=float32
algorithm.group_size=24 algorithm.objective=epg algorithm.likelihood=adaptive algorithm.share=0.99
algorithm.advantage_scale=0.1 algorithm.normalized=false algorithm.kl_weight=1e-4
algorithm.old_schedule=[0,0.001,0.5] algorithm.update_every=rollout sampling.shift=scheduler
trainer.prompts_per_iteration=48 trainer.iterations=360 trainer.seed=96 optim.max_grad_norm=5
optim.ema_decay=0.9 optim.ema_every=1 evaluation.num_steps=40
"""
# 17c25d1, base.py and self_opd.py: an update has 128 trajectories, of each two groups
OPD = """
algorithm.group_size=8 algorithm.steps_drawn=2 algorithm.step_weights=[10,9,8,7,6,4,2,1,0]
algorithm.eta=0.7 trainer.prompts_per_iteration=128 sampling.num_steps=10 sampling.shift=scheduler
policy.guidance_scale=4.5 policy.height=512 policy.width=512 policy.max_sequence_length=128
policy.tuning=lora policy.lora_rank=32 policy.lora_alpha=64 policy.lora_init=gaussian
optim.learning_rate=3e-4 optim.weight_decay=1e-4 optim.max_grad_norm=1 optim.ema_decay=0.9
optim.ema_every=8 trainer.seed=42
"""
# 740e22f, config.py with the preset pickscore
FDFO = """
sampling.num_steps=40 sampling.tails.solver=euler sampling.shift=scheduler algorithm.group_size=2
algorithm.churn=0.0025 algorithm.clip_range=0.03 algorithm.kl_weight=0 algorithm.update_every=0.25
trainer.prompts_per_iteration=432 trainer.iterations=1000 trainer.seed=6 optim.learning_rate=3e-5
optim.max_grad_norm=1 optim.ema_decay=0 policy.lora_rank=32 policy.lora_alpha=64
policy.truncate_timesteps=false
"""
# DiffusionOPSD 2166584, config/public.py: sd35_pickscore over sd3_pickscore
OPSD = """
policy.truncate_timesteps=true algorithm.group_size=24 algorithm.kl_weight=0 sampling.shift=scheduler
algorithm.query_sigma=0.278 algorithm.radius=0.1 algorithm.target_steps=2 algorithm.mixing=1
algorithm.old_schedule=[0,0.001,0.5] trainer.prompts_per_iteration=48 trainer.iterations=100
trainer.checkpoint_every=10 optim.ema_decay=0.9 optim.ema_every=1 policy.lora_rank=32
policy.lora_alpha=64 evaluation.num_steps=40
"""
# FlowBP 93b220a, sd3_5_refl.yaml: 8 GPUs with 8 prompts each, one picture of each
REFL = """
trainer.prompts_per_iteration=64 algorithm.group_size=1 algorithm.ceiling=0.55
sampling.num_steps=25 sampling.shift=3 sampling.tails.solver=euler policy.guidance_scale=3.5
policy.detach_negative=true policy.negative_prompt=null policy.tuning=full
policy.max_sequence_length=512
policy.truncate_timesteps=false policy.height=512 optim.learning_rate=1e-5 optim.weight_decay=1e-4
optim.max_grad_norm=1 optim.ema_decay=0.995 optim.ema_every=1 optim.ema_warmup=false
trainer.iterations=300 trainer.seed=42 evaluation.num_steps=40
"""
# GRPO-Series c4028f9
PAVE = "algorithm.eta=0.8 algorithm.segments=[2,3] trainer.seed=72"


@pytest.mark.parametrize(
    ("name", "reward", "published", "constants"),
    [
        ("sd35-medium-nft", "pickscore", SD35 + NFT, {}),
        ("AWM", "pickscore", SD35 + AWM, {}),
        ("DGPO", "pickscore", SD35 + DGPO, {"early": Fraction(7, 10), "old_after": 200}),
        ("EPG", "geneval", SD35 + EPG, {"ratio": True}),
        ("Self-OPD", "ocr", OPD, {"weight_clip": 1.0}),
        ("FDFO", "pickscore", SD35 + FDFO, {}),
        ("DiffusionOPSD", "pickscore", SD35 + OPSD, {}),
        ("ReFL", "hpsv2", REFL, {"late": Fraction(11, 25)}),
        ("flux1-dev-pave", "hpsv3", GRPO_SERIES + PAVE, {}),
    ],
)
def test_a_recipe_or_row_has_the_values_of_the_published_code(name, reward, published, constants):
    """Given the values of the published configs and scripts, which are written down from these, it
    is what it was."""
    rows = {algorithm: (recipe, shlex.split(overrides)) for algorithm, recipe, overrides in ROWS}
    recipe, overrides = rows.get(name, (name, []))
    config = load_config(recipe, overrides)
    assert not differences(load_config(recipe, [*overrides, *published.split()]), config)
    assert list(config.rewards) == [reward]
    assert {key: getattr(config.algorithm, key) for key in constants} == constants


def test_missing_prompts_are_an_exit_2_that_names_the_key_and_the_file(refuses, flux_directory):
    err = refuses(f"train flux1-dev-hps policy.path={flux_directory} --run-dir never-made")
    for key, file in (("prompts.train", "train"), ("evaluation.prompts", "test")):
        assert (
            f"{key}=prompts/hpdv2_{file}.txt" in err and "starter:train or starter:heldout" in err
        )
    assert "input pictures" not in err
