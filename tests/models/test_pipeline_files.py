"""Pipelines that cannot be trained are refused by their small files, in one message; distilled ones
get a caution."""

import json
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file, save_file

from g2rpo.config.read import load_config
from g2rpo.core.data import Prompt
from g2rpo.core.errors import UserError
from g2rpo.models import blueprint, load, pipeline_files
from g2rpo.models.options import PolicyConfig
from g2rpo.models.pipeline_files import weight_files
from g2rpo.train import checks
from g2rpo.train.consistency import refuse_all
from g2rpo.train.found import Given, find
from tests.support.commands import refused, write_tiny
from tests.support.variants import few

FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}


def folder_of(tmp_path, kind="QwenImagePipeline", scheduler=FLOW, **entries):
    """The small files of a pipeline."""
    parts = {"text_encoder": ["transformers", "Qwen3Model"], "transformer": ["diffusers", "X"]}
    for name in ("scheduler", *parts):
        (tmp_path / name).mkdir()
    index = {"_class_name": kind, **parts, **entries}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    return PolicyConfig(path=str(tmp_path), height=64, width=64)


DDIM = {"_class_name": "EulerDiscreteScheduler", "prediction_type": "epsilon"}
CASES = [
    ({"scheduler": DDIM}, "EulerDiscreteScheduler with prediction_type=epsilon, is not for flow"),
    ({"transformer_2": ["diffusers", "X"]}, "has a transformer_2 beside its transformer"),
    ({"text_encoder": [None, None]}, "has no text_encoder"),
    ({"kind": "HunyuanImagePipeline"}, "which has no policy here: docs/models.md .*check-model"),
]


@pytest.mark.parametrize(("changes", "message"), CASES, ids=str)
def test_what_cannot_be_trained_is_refused_before_it_is_loaded(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        load.load_pipeline(folder_of(tmp_path, **changes))


def test_a_solver_of_flows_is_sound_and_an_option_that_a_model_lacks_is_refused(tmp_path):
    solver = {"_class_name": "DPMSolverMultistepScheduler", "use_flow_sigmas": True}
    options = folder_of(tmp_path, scheduler=solver)
    assert list(pipeline_files.faults_of_files(options.path)) == []
    with pytest.raises(UserError, match="policy.num_frames: a QwenImagePipeline has no such opt"):
        load.load_pipeline(options.model_copy(update={"num_frames": 5}))


DISTILLED = [
    ("black-forest-labs/FLUX.1-schnell", {}, True),
    ("black-forest-labs/FLUX.2-klein-base-4B", {}, False),
    ("klein", {"is_distilled": False}, False),
    ("mine", {"is_distilled": True}, True),
]


def test_distilled_models_get_one_caution(tmp_path):
    for name, index, cautioned in DISTILLED:
        (tmp_path / "model_index.json").write_text(json.dumps(index))
        said = pipeline_files.caution(name, str(tmp_path))
        assert (said is not None) == cautioned
        assert said is None or (name in said and "base model" in said)


TAKES = [
    (
        "FluxKontextPipeline",
        0,
        "prompt 'make it red': has 0 input pictures, .*takes 1; prompts of",
    ),
    ("QwenImageEditPlusPipeline", 4, "takes 1 to 3; prompts"),
    ("QwenImagePipeline", 1, "takes 0;"),
]


@pytest.mark.parametrize(("kind", "images", "message"), TAKES)
def test_prompts_without_the_pictures_that_a_model_needs_are_named(tmp_path, kind, images, message):
    config = load_config("scenes", [])
    config = config.model_copy(update={"policy": folder_of(tmp_path, kind)})
    found = find(config, Given(prompts=[Prompt("make it red", ["a.png"] * images)], heldout=[]))
    with pytest.raises(UserError, match=message):
        refuse_all([checks._input_pictures], found)


WRONG = {
    "layers in a list": ("transformer", {"num_layers": [1, 2]}),
    "a million layers": ("text_encoder_2", {"num_layers": 1_000_000}),
    "shift that is no number": ("scheduler", {"shift": float("nan")}),
    "no part": ("", {"transformer": None}),
    "a part without a name": ("", {"": None}),
    "a part of another folder": ("", {"../x": ["diffusers", "AutoencoderKL"]}),
    "blocks without end": ("vae", {"layers_per_block": 10**30}),
    "blocks for minutes": ("vae", {"layers_per_block": 10**7}),
    "a list of widths": ("vae", {"block_out_channels": [2**40]}),
    "no number": ("transformer", {"num_attention_heads": float("inf")}),
    "a scale of nothing": ("vae", {"scaling_factor": 0}),
    "times in words": ("scheduler", {"num_train_timesteps": "1000"}),
    "a length below 0": ("tokenizer", {"model_max_length": -1}),
}
LONG = ("a million layers", "blocks for minutes")


@pytest.mark.parametrize("case", few(WRONG, lambda case: case not in LONG))
def test_wrong_values_of_config_files_are_one_message_of_plan_and_of_a_run(
    flux_directory, tmp_path, capsys, case
):
    part, changes = WRONG[case]
    folder = shutil.copytree(flux_directory, tmp_path / "pipeline")
    (file,) = (folder / part).glob("*index.json" if not part else "*config.json")
    began = time.process_time()
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    config = write_tiny(tmp_path, folder)
    for command in (["plan", config], ["train", config, "--run-dir", tmp_path / "run"]):
        assert "policy.path" in refused(capsys, *command)
    assert not (tmp_path / "run").exists()
    assert time.process_time() - began < 60  # seconds; without bounds some take hours


def as_pointer(file):
    """As git-lfs leaves files where it is not installed."""
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def cut_short(file):
    """As a download that was interrupted."""
    file.write_bytes(file.read_bytes()[:-20])


def renamed(ending):
    return lambda file: file.rename(file.with_suffix(ending))


ABSENT = [
    ("text_encoder", Path.unlink, "has no weights"),
    ("transformer", Path.unlink, "has no weights"),
    (
        "transformer",
        renamed(".fp16.safetensors"),
        r"has the variant fp16 alone \(.*fp16.safetensors\); .*variant='fp16'\).save_pretrained",
    ),
    ("transformer", renamed(".bin"), "has no weights .* but .*bin"),
    ("transformer", as_pointer, "is a pointer of git-lfs"),
    ("text_encoder", cut_short, r"model\.safetensors is cut short or damaged"),
]


@pytest.mark.parametrize(("part", "change", "message"), ABSENT)
def test_weights_that_are_not_loaded_are_named_with_the_cure(
    flux_directory, tmp_path, part, change, message
):
    folder = shutil.copytree(flux_directory, tmp_path / "pipeline")
    for file in (folder / part).glob("*.safetensors"):
        change(file)
    with pytest.raises(UserError, match=rf"(?s){part}/.*{message}"):
        load.load_pipeline(PolicyConfig(path=str(folder), height=32, width=32))


def test_a_pipeline_of_one_variant_is_named_with_the_cure_once(flux_directory, tmp_path):
    folder = shutil.copytree(flux_directory, tmp_path / "pipeline")
    for file in folder.rglob("*.safetensors"):
        renamed(".fp16.safetensors")(file)
    with pytest.raises(UserError) as said:
        load.load_pipeline(PolicyConfig(path=str(folder), height=32, width=32))
    words = ["has the variant fp16 alone (", ".fp16.safetensors)", "; write them", "Pipeline.from"]
    assert [str(said.value).count(each) for each in words] == [4, 4, 1, 1]
    (cure,) = re.findall(r"; write .* (Diff\S+ variant='fp16'\)\.save\S+)$", str(said.value))
    assert cure == "DiffusionPipeline.from_pretrained(FOLDER, variant='fp16').save_pretrained(NEW)"


def test_of_several_copies_of_weights_the_loaded_one_is_read(flux_directory, tmp_path):
    """diffusers takes shards that an index names before a whole file, and a variant only if it is
    asked for."""
    folder = shutil.copytree(flux_directory / "transformer", tmp_path / "transformer")
    whole = folder / "diffusion_pytorch_model.safetensors"
    shutil.copy(whole, folder / "diffusion_pytorch_model.fp16.safetensors")
    shutil.copy(whole, folder / "diffusion_pytorch_model.old.safetensors")
    assert weight_files(folder) == [whole]
    shard = folder / "diffusion_pytorch_model-00001-of-00001.safetensors"
    tensors = {name: torch.zeros_like(value) for name, value in load_file(whole).items()}
    save_file(tensors, shard)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard.name)}
    (folder / f"{whole.name}.index.json").write_text(json.dumps(index))
    assert weight_files(folder) == [shard]
    assert not any(
        value.any()
        for value in FluxTransformer2DModel.from_pretrained(folder).state_dict().values()
    )
    (folder / f"{whole.name}.index.json").write_text('{"weight_map": {"x": 3}}')
    with pytest.raises(UserError, match=r"weight_map.x: Input should be a valid string"):
        weight_files(folder)


def test_a_plan_names_a_part_that_this_transformers_lacks():
    with pytest.raises(
        UserError, match="names NoSuchEncoder, which is no model of the transformers installed here"
    ):
        blueprint.on_meta(("transformers:NoSuchEncoder", {}))
