"""From a config's names to objects: policies by the pipeline's class, options that fit, and a whole
iteration on SD3."""

import json
import re
import shutil

import pytest
import torch

from g2rpo.config.read import load_config
from g2rpo.core.devices import pick_device
from g2rpo.core.distributed import joined
from g2rpo.core.errors import UserError
from g2rpo.models import load
from g2rpo.models.options import PolicyConfig
from g2rpo.rewards.catalogue import RewardConfig, build_rewards, check_rewards
from g2rpo.train import checks
from g2rpo.train.found import find
from tests.support.tiny_pipelines import save_tiny
from tests.support.variants import few

SIZE = {"height": 32, "width": 32, "max_sequence_length": 12, "device": "cpu"}


def other(**values):
    """A change of a JSON file's values."""
    return lambda content: json.dumps({**json.loads(content), **values}).encode()


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("model_index.json", lambda content: content[:20]),
        ("transformer/config.json", other(num_attention_heads=3)),
        ("transformer/diffusion_pytorch_model.safetensors", lambda content: content[:1000]),
        ("text_encoder/config.json", other(hidden_size=24)),
        ("tokenizer/tokenizer.json", lambda content: b"{}"),
    ],
)
def test_a_pipeline_with_a_damaged_part_is_one_message(flux_directory, tmp_path, file, change):
    path = shutil.copytree(flux_directory, tmp_path / "pipe") / file
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=f"^policy.path={re.escape(str(tmp_path / 'pipe'))}: ."):
        load.build_policy(PolicyConfig(path=str(tmp_path / "pipe"), **SIZE), tuning="frozen")


@pytest.mark.parametrize(
    ("name", "option", "value", "fact"),
    [
        ("hpsv2", "batch_size", 0, "got 0"),
        ("hpsv2", "batch_size", True, "got True"),
        ("hpsv2", "device", "gpu", "=gpu: is no device; write cpu, cuda"),
        ("hpsv2", "device", "cuda:7", "=cpu"),
        ("hpsv2", "dtype", "float64", "float32.*bfloat16.*got 'float64'"),
        ("geneval", "dtype", "float64", "float32.*bfloat16.*got 'float64'"),
    ],
)
def test_shared_options_are_checked_before_anything_is_loaded(name, option, value, fact):
    table = {name: RewardConfig(kind=name, options={option: value})}
    with pytest.raises(UserError, match=rf"rewards\.{name}\.options\.{option}.*{fact}"):
        build_rewards(table)
    if option == "device":
        check_rewards(table)  # a plan for another machine


FLUX = "plan flux1-dev-evening --memory 16 policy.offload=true"
REFUSED = """
train words policy.autocast=false policy.tuning=full | weights that are trained are float32
train words policy.quantize=int8 policy.tuning=full | weights that are not trained
train words policy.quantize=int4 | policy.quantize
train words policy.attention=flash3 | flash_attn_interface.*auto, flash, math
train words policy.offload=true | policy.offload: is for a CUDA GPU .*, and here is cpu; take it out
FLUX --device cpu | here is cpu
FLUX policy.quantize=none policy.autocast=true policy.tuning=full | set policy.tuning=lora, or take it out
FLUX policy.gradient_checkpointing=false | set policy.gradient_checkpointing=true
FLUX policy.compile=true | policy.compile is not for weights that come and go; take one of them out
FLUX --ranks 2 trainer.sharding=full policy.tuning=full policy.quantize=none | policy.offload is not for weights
plan chroma policy.offload=true | a ChromaPipeline has no such option; take it out
plan flux1-dev-evening --memory 0.5 policy.offload=true | two blocks take 648.7 MiB, and the device has 476.8 MiB
plan flux1-dev-evening --memory 12 --cards | leave --device and --memory out
"""


@pytest.mark.parametrize(
    "case", few(REFUSED.strip().splitlines(), lambda case: "--memory 0.5" not in case)
)
def test_options_that_do_not_fit_are_refused_in_one_message(refuses, tmp_path, case):
    command, said = case.replace("FLUX", FLUX).split(" | ")
    if command.startswith("plan chroma"):
        folder = save_tiny("ChromaPipeline", tmp_path / "chroma")
        own = f"policy.path={folder} policy.pipeline=ChromaPipeline"
        command = command.replace("chroma", f"sd35-medium-evening {own}")
    assert re.search(said, refuses(command))


@pytest.mark.parametrize(
    ("overrides", "facts"),
    [
        ([], []),
        (["policy.dtype=bfloat16"], ["autocast is not supported"]),
        (["policy.dtype=bfloat16", "policy.autocast=false"], []),
        (["policy.quantize=int8", "policy.compile=true"], ["quantize=int8", "compile=true"]),
        (["policy.tuning=full", "trainer.sharding=full"], ["trainer.sharding=full"]),
    ],
)
def test_what_apples_gpus_lack_is_refused_by_name(monkeypatch, overrides, facts):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    said = list(
        checks._faults_of_device(find(load_config("words", ["policy.device=mps", *overrides])))
    )
    for complaint, fact in zip(said, facts, strict=True):
        assert complaint.startswith("policy.device=mps") and fact in complaint


def test_apples_gpu_is_for_one_process_on_its_machine(monkeypatch):
    with pytest.raises(UserError, match="policy.device=mps: torch sees no GPU of Apple's here"):
        pick_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="policy.device=mps: one process"), joined("mps"):
        pass


def test_a_model_of_another_kind_than_the_recipes_is_refused(tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    with pytest.raises(
        UserError, match="is a StableDiffusion3Pipeline, but this recipe is for a FluxPipeline"
    ):
        load.find_pipeline(load_config("flux1-dev-lora", [f"policy.path={tmp_path}"]).policy)
    options = PolicyConfig(path=str(tmp_path), **SIZE)
    assert load.find_pipeline(options).kind == "StableDiffusion3Pipeline"
    with pytest.raises(UserError, match="^policy.path=testbed: is a FluxPipeline, but"):
        load.find_pipeline(load_config("scenes", ["policy.pipeline=WanPipeline"]).policy)
