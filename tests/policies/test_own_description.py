"""A description of a pipeline's class in a user's file, the example of docs/extending.md: from plain pictures to an export."""

import re
from importlib.util import find_spec, module_from_spec
from pathlib import Path

import pytest
import torch
from diffusers import OvisImagePipeline, OvisImageTransformer2DModel

from g2rpo import api, plugins
from g2rpo.build import components
from g2rpo.config.schema import PolicyConfig
from g2rpo.errors import UserError
from g2rpo.evaluation.heldout import sample_images
from g2rpo.policies import catalogue
from g2rpo.policies.anyflow import DiffusersPolicy
from g2rpo.runs.lifecycle import read_config
from g2rpo.seeding import generator_for
from tests.support.commands import g2rpo, write_tiny
from tests.support.pages import ROOT, blocks
from tests.support.tiny_pipelines import save_tiny, tiny_pipeline

PROMPTS = ["a red circle", "two blue square"]
SIZE = {"height": 32, "width": 48, "max_sequence_length": 12}
ADAPTER = "pytorch_lora_weights.safetensors"
PRX = """
from g2rpo.policies import catalogue
from g2rpo.policies.anyflow import DiffusersPolicy

class Prx(DiffusersPolicy):
    pipeline_class = "PRXPipeline"
    encoded = ("prompt_embeds", "prompt_attention_mask", "negative_prompt_embeds", "negative_prompt_attention_mask")
    guidance, tokens = 4.0, 256
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
    return sample_images(policy, PROMPTS, policy.grid(4), seed=5, batch_size=2, decode_batch_size=2)


def test_pictures_are_the_pipelines_own(ovis):
    folder, kind = ovis
    plugins.allow(kind)
    policy = components.build_policy(PolicyConfig(path=str(folder), kind=kind, **SIZE), tuning="frozen")
    torch.testing.assert_close(own(policy), plain(OvisImagePipeline.from_pretrained(folder)), atol=1e-5, rtol=0)


def test_it_trains_and_what_it_saves_plain_diffusers_draws(ovis, tmp_path, capsys):
    """Its pipeline has no loader of LoRAs; its transformer has one."""
    folder, kind = ovis
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
    pipe = OvisImagePipeline.from_pretrained(folder)
    assert line == "transformer.load_lora_adapter"
    pipe.transformer.load_lora_adapter(run / "adapter", weight_name=ADAPTER)
    torch.testing.assert_close(plain(pipe), tuned, atol=1e-5, rtol=0)

    transformer = OvisImageTransformer2DModel.from_pretrained(api.export(run, "merged"))
    torch.testing.assert_close(
        plain(OvisImagePipeline.from_pretrained(folder, transformer=transformer)), tuned, atol=1e-5, rtol=0
    )
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
    described = plugins.load(kind)
    with pytest.raises(UserError, match=r"set policy\.tuning=full"):  # from Python too
        described(tiny_pipeline("PRXPipeline"), **size)


def test_one_entry_of_the_catalogue_is_enough(monkeypatch):
    class Mine(DiffusersPolicy):
        __module__ = catalogue.__name__
        pipeline_class = "OvisImagePipeline"

    monkeypatch.setattr(catalogue, "Mine", Mine, raising=False)
    spec = find_spec(components.__name__)
    again = module_from_spec(spec)
    spec.loader.exec_module(again)
    assert plugins.find("policies", "OvisImagePipeline", again.POLICIES) is Mine
