"""From a config's names to objects: policies by the pipeline's class, options that fit, and a whole iteration on SD3."""

import json
import re
import shutil

import pytest
import torch
import yaml

from g2rpo.app.train import build_trainer, load_config
from g2rpo.assembly import components
from g2rpo.assembly.rewards import build_rewards, check_rewards
from g2rpo.config.resolve import resolve
from g2rpo.config.schema import PolicyConfig, RewardConfig
from g2rpo.core.errors import UserError
from g2rpo.policies.catalogue import flux, sd3
from tests.support.commands import TINY

SIZE = {"height": 32, "width": 32, "max_sequence_length": 12, "device": "cpu"}


def test_the_pipelines_class_chooses_the_policy(flux_directory, sd3_directory):
    one = components.build_policy(PolicyConfig(path=str(flux_directory), **SIZE), tuning="frozen")
    other = components.build_policy(PolicyConfig(path=str(sd3_directory), **SIZE, negative_prompt="blue"), tuning="frozen")
    assert one.spec is flux and other.spec is sd3
    assert other.text.options.negative_prompt == "blue" and other.guided


def damaged(pipeline, file, change):
    """`pipeline` after `change` was made to one of its files; None removes it."""
    path = pipeline / file
    path.unlink() if change is None else path.write_bytes(change(path.read_bytes()))


def other(**values):
    """A change of a JSON file's values."""
    return lambda content: json.dumps({**json.loads(content), **values}).encode()


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("model_index.json", lambda content: content[:20]),
        ("model_index.json", other(transformer=["diffusers", "NoSuchModel"])),
        ("transformer/config.json", None),
        ("transformer/config.json", lambda content: b"[]"),
        ("transformer/config.json", other(num_attention_heads=3)),
        ("transformer/diffusion_pytorch_model.safetensors", None),
        ("transformer/diffusion_pytorch_model.safetensors", lambda content: content[:1000]),
        ("vae/config.json", other(block_out_channels=[8, 16])),
        ("text_encoder/config.json", other(hidden_size=24)),
        ("tokenizer/tokenizer.json", lambda content: b"{}"),
        ("tokenizer_2/tokenizer.json", None),
        ("scheduler/scheduler_config.json", lambda content: b"\xff"),
    ],
)
def test_a_pipeline_with_a_damaged_part_is_one_message(flux_directory, tmp_path, file, change):
    pipeline = shutil.copytree(flux_directory, tmp_path / "pipe")
    damaged(pipeline, file, change)
    with pytest.raises(UserError, match=f"^policy.path={re.escape(str(pipeline))}: ."):
        components.build_policy(PolicyConfig(path=str(pipeline), **SIZE), tuning="frozen")


LEARNED = ("hpsv3", "pickscore", "clip_score", "image_reward", "aesthetic", "geneval")


@pytest.mark.parametrize(
    ("name", "option", "value", "fact"),
    [
        ("hpsv2", "batch_size", 0, "got 0"),
        ("hpsv2", "batch_size", True, "got True"),
        ("hpsv2", "device", "gpu", "=gpu: is no device; write cpu, cuda"),
        ("hpsv2", "device", "cuda:7", "=cuda:7: torch sees 0 CUDA devices"),
        *((name, "dtype", "float64", "float32, float16, bfloat16, got 'float64'") for name in ("hpsv2", *LEARNED)),
    ],
)
def test_shared_options_are_checked_before_anything_is_loaded(name, option, value, fact):
    table = {name: RewardConfig(kind=name, options={option: value})}
    with pytest.raises(UserError, match=rf"rewards\.{name}\.options\.{option}.*{fact}"):
        build_rewards(table)
    if option == "device":
        check_rewards(table)  # a plan for another machine


def test_sd3_trains_from_a_config(tmp_path, sd3_directory):
    """Two iterations through the same door as the command line: weights move, and the adapter is written."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\ntwo blue square\n")
    policy = {"path": str(sd3_directory), **SIZE, "lora_rank": 2, "guidance_scale": 4.5}
    data = {**TINY, "policy": policy, "rewards": {"brightness": 1.0}}
    data |= {"prompts": {"train": str(prompts)}, "evaluation": {"prompts": str(prompts), "num_prompts": 2}}
    config = resolve(yaml.safe_load(yaml.safe_dump(data)), ["prompts.cache=off"])
    trainer = build_trainer(config, tmp_path / "run", print)
    before = [p.detach().clone() for p in trainer.learner.parameters]
    (tmp_path / "run").mkdir()
    rows = [row for row in trainer.train() if row["kind"] == "train"]
    assert [row["log_prob_drift"] for row in rows] == pytest.approx([0, 0], abs=1e-5)
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.learner.parameters, strict=True))
    assert trainer.export().name == "pytorch_lora_weights.safetensors"


def test_a_model_of_another_kind_than_the_recipes_is_refused(tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    with pytest.raises(UserError, match="is a StableDiffusion3Pipeline, but this recipe is for a FluxPipeline"):
        components.locate_pipeline(str(tmp_path), load_config("flux1-dev-lora", []).policy.pipeline)
    assert components.locate_pipeline(str(tmp_path))[1] == "StableDiffusion3Pipeline"


def test_the_prompt_length_that_a_config_leaves_open_is_the_models_own(flux_directory, sd3_directory):
    """Prompt tokens: 512 for FLUX, 256 for SD3, as in their pipelines."""
    open_size = {**SIZE, "max_sequence_length": None}
    flux = components.build_policy(PolicyConfig(path=str(flux_directory), **open_size), tuning="frozen")
    sd3 = components.build_policy(PolicyConfig(path=str(sd3_directory), **open_size), tuning="frozen")
    assert (flux.max_sequence_length, sd3.max_sequence_length) == (512, 256)
