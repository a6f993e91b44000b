"""A `PipelineSpec` in a user's file, the example of docs/extending.md: from a plan to an export."""

import json
import re
from pathlib import Path

import pytest
import torch
from diffusers import OvisImagePipeline, OvisImageTransformer2DModel
from safetensors.torch import load_file

from g2rpo import api
from g2rpo.assembly import components
from g2rpo.config.schema import PolicyConfig
from g2rpo.core import plugins
from g2rpo.core.errors import UserError
from g2rpo.core.seeding import generator_for
from g2rpo.evaluation.sampler import Sampler
from g2rpo.policies import catalogue
from g2rpo.policies.anyflow import DiffusersPolicy
from g2rpo.runs.lifecycle import read_config
from tests.support.commands import g2rpo, write_tiny
from tests.support.pages import ROOT, blocks
from tests.support.tiny_pipelines import save_tiny, tiny_pipeline

PROMPTS = ["a red circle", "two blue square"]
SIZE = {"height": 32, "width": 48, "max_sequence_length": 12}
ADAPTER = "pytorch_lora_weights.safetensors"
PRX = """
from g2rpo.policies.spec import PipelineSpec

Prx = PipelineSpec(
    pipeline_class="PRXPipeline",
    encoded=("prompt_embeds", "prompt_attention_mask", "negative_prompt_embeds", "negative_prompt_attention_mask"),
    widths={},
    guidance=4.0,
    tokens=256,
)
"""
PUBLISHED = """
from dataclasses import replace
from g2rpo.policies.comfyui import ComfyUI
from g2rpo.policies.spec import Model

parts = PARTS
Published = replace(
    Ovis,
    comfyui=ComfyUI("OvisImageTransformer2DModel", "mine.", {r"(.+)": r"\\1"}),
    models={"AIDC-AI/Ovis-Image-7B": Model("A licence", parts=parts)},
)
"""


@pytest.fixture
def ovis(tmp_path):
    """(the pipeline's folder, FILE.py:NAME)."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    (code,) = [block.code for block in blocks(page) if block.code.startswith("# ovis.py\n")]
    (tmp_path / "ovis.py").write_text(code)
    return save_tiny("OvisImagePipeline", tmp_path / "ovis"), f"{tmp_path / 'ovis.py'}:Ovis"


def plain(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    generators = [generator_for(5, "picture", i) for i in range(len(PROMPTS))]
    return pipeline(PROMPTS, num_inference_steps=4, generator=generators, output_type="pt", **SIZE).images


def own(policy):
    return Sampler(policy=policy, shift="model", num_steps=4, seed=5).pictures(PROMPTS)


def test_pictures_are_the_pipelines_own(ovis):
    folder, kind = ovis
    plugins.allow(kind)
    policy = components.build_policy(PolicyConfig(path=str(folder), kind=kind, **SIZE), tuning="frozen")
    torch.testing.assert_close(own(policy), plain(OvisImagePipeline.from_pretrained(folder)), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("right", "code", "failed"), [(True, 0, []), (False, 1, ["policy"])])
def test_check_model_tells_whether_the_description_is_right(ovis, capsys, right, code, failed):
    """From the command line: a line for each check, and what to do about one that failed."""
    folder, kind = ovis
    file = Path(kind.partition(":")[0])
    if not right:  # a result of encode_prompt is left out
        file.write_text(file.read_text().replace('"text_ids", "negative_text_ids"', '"text_ids"'))
    size = [f"policy.{name}={value}" for name, value in SIZE.items()]
    found, out, err = g2rpo(capsys, "check-model", folder, "--kind", kind, *size)
    assert found == code, out + err
    assert re.findall(r"FAILED +(\w+)", out) == failed
    assert ("LoRA of rank 32 at 32x48, float32 needs" in out) == (not failed) and ("`encoded`" in out) == bool(failed)


@pytest.fixture
def published(ovis):
    """The same with a declaration of published sizes, a licence and ComfyUI's names."""
    folder, kind = ovis
    index = json.loads((folder / "model_index.json").read_text())
    parts = {
        name: (":".join(index[name]), json.loads((folder / name / "config.json").read_text()))
        for name in ("transformer", "text_encoder", "vae")
    }
    file = Path(kind.partition(":")[0])
    file.write_text(file.read_text() + PUBLISHED.replace("PARTS", repr(parts)))
    return folder, f"{file}:Published"


def test_published_sizes_and_licence_are_known_from_the_value(published, capsys):
    """By a hub id that is nowhere."""
    options = ["policy.height=32", "policy.width=48", f"policy.kind={published[1]}", "policy.pipeline="]
    code, out, err = g2rpo(capsys, "plan", "scenes", "policy.path=AIDC-AI/Ovis-Image-7B", *options, "--no-probe")
    assert code == 0 and "AIDC-AI/Ovis-Image-7B: A licence" in out, err


def test_it_trains_and_what_it_saves_plain_diffusers_draws(published, tmp_path, capsys):
    """Its pipeline has no loader of LoRAs; its transformer has one."""
    folder, kind = published
    few = ["trainer.iterations=1", "evaluation.num_prompts=1", "algorithm.group_size=2"]
    run, size = tmp_path / "run", ["policy.height=32", "policy.width=48"]
    few += ["rewards.scene_accuracy=", "rewards.brightness=1", "optim.learning_rate=0.01"]
    code, _, err = g2rpo(capsys, "train", write_tiny(tmp_path, folder), f"policy.kind={kind}", *few, *size, "--run-dir", run)
    assert code == 0, err
    plugins.allow(kind)
    policy = components.build_policy(read_config(run).policy, tuning="frozen")
    base = own(policy)
    policy.load(run / "adapter")
    tuned = own(policy)
    assert float((tuned - base).abs().max()) > 1e-3

    card = (run / "adapter" / "README.md").read_text()
    (line,) = re.findall(r"^pipe\.(\S+)\(", card, re.MULTILINE)
    assert line == "transformer.load_lora_adapter"
    pipe = OvisImagePipeline.from_pretrained(folder)
    pipe.transformer.load_lora_adapter(run / "adapter", weight_name=ADAPTER)
    torch.testing.assert_close(plain(pipe), tuned, atol=1e-5, rtol=0)

    transformer = OvisImageTransformer2DModel.from_pretrained(api.export(run, "merged"))
    pipe = OvisImagePipeline.from_pretrained(folder, transformer=transformer)
    torch.testing.assert_close(plain(pipe), tuned, atol=1e-5, rtol=0)
    names = load_file(api.export(run, "comfyui"))
    assert names and all(name.startswith("mine.") for name in names)
    sample = ["sample", "--run", run, "--plugin", kind.partition(":")[0], "--out", tmp_path / "drawn", "a red circle"]
    assert g2rpo(capsys, *sample)[0] == 0


def test_adapters_that_a_transformer_does_not_take_are_refused_before_it_is_loaded(tmp_path):
    folder, kind = save_tiny("PRXPipeline", tmp_path / "prx"), f"{tmp_path / 'own.py'}:Prx"
    Path(tmp_path / "own.py").write_text(PRX)
    plugins.allow(kind)
    size = {name: value for name, value in SIZE.items() if name != "max_sequence_length"}  # which its call does not take
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    with pytest.raises(UserError, match=r"no adapters for PRXTransformer2DModel; set policy\.tuning=full"):
        components.load_pipeline(PolicyConfig(path=str(folder), kind=kind, **size))
    with pytest.raises(UserError, match=r"set policy\.tuning=full"):  # from Python too
        DiffusersPolicy.of(plugins.load(kind))(tiny_pipeline("PRXPipeline"), **size)


def test_one_value_of_the_catalogue_is_enough(ovis, monkeypatch):
    folder, kind = ovis
    with pytest.raises(UserError, match="is not declared yet"):
        components.policy_options(
            PolicyConfig(path=str(folder), **SIZE), components.locate_pipeline(str(folder))[1], device="cpu"
        )
    monkeypatch.setitem(catalogue.SPECS, "OvisImagePipeline", plugins.load(kind))
    policy = components.build_policy(PolicyConfig(path=str(folder), **SIZE), tuning="frozen")
    assert policy.spec is plugins.load(kind)
