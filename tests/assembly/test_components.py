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


def test_an_option_that_a_model_does_not_have_is_refused(flux_directory):
    with pytest.raises(UserError, match=r"policy\.negative_prompt: a FluxPipeline has no such option"):
        components.build_policy(PolicyConfig(path=str(flux_directory), **SIZE, negative_prompt=""), tuning="frozen")


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
        ("model_index.json", other(transformer="x")),
        ("transformer/config.json", None),
        ("transformer/config.json", lambda content: b"[]"),
        ("transformer/config.json", other(num_attention_heads=3)),
        ("transformer/config.json", other(num_layers="x")),
        ("transformer/diffusion_pytorch_model.safetensors", None),
        ("transformer/diffusion_pytorch_model.safetensors", lambda content: content[:1000]),
        ("vae/config.json", other(block_out_channels=[8, 16])),
        ("vae/diffusion_pytorch_model.safetensors", lambda content: b"\0" * 100),
        ("text_encoder/config.json", other(hidden_size=24)),
        ("text_encoder/model.safetensors", lambda content: content[:-1]),
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


@pytest.mark.parametrize("name", ["hpsv2", "hpsv3", "pickscore", "clip_score", "image_reward", "aesthetic", "geneval"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "float64"}, "options.dtype must be one of float32, float16, bfloat16, got 'float64'"),
        ({"batch_size": 0}, "options.batch_size must be a whole number, at least 1, got 0"),
        ({"batch_size": True}, "options.batch_size must be .*, got True"),
        ({"device": "gpu"}, "options.device=gpu: is no device; write cpu, cuda"),
        ({"device": "cuda:7"}, "options.device=cuda:7: torch sees 0 CUDA devices here; .*options.device=cpu needs none"),
    ],
)
def test_shared_options_are_checked_before_anything_is_loaded(name, options, says):
    table = {name: RewardConfig(kind=name, options=options)}
    with pytest.raises(UserError, match=f"rewards.{name}.{says}"):
        build_rewards(table)
    if "device" in options:
        check_rewards(table)  # a plan for another machine


def test_rewards_that_need_no_weights_are_built():
    table = {
        "jpeg_size": RewardConfig(kind="jpeg_size", options={"negative": True}),
        "bright": RewardConfig(kind="brightness"),
        "saturation": RewardConfig(kind="saturation"),
    }
    built = build_rewards(table)
    images = torch.zeros(2, 3, 8, 8)
    assert all(reward(images, ["", ""]).shape == (2,) for reward in built.values())


@pytest.mark.parametrize("scale", [1.0, 4.5])
def test_sd3_trains_from_a_config(tmp_path, sd3_directory, scale):
    """Two iterations through the same door as the command line: weights move, and the adapter is written."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\ntwo blue square\n")
    policy = {"path": str(sd3_directory), **SIZE, "lora_rank": 2, "guidance_scale": scale}
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
