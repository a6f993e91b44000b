"""A `PipelineSpec` in a user's file, the example of docs/extending.md: from a plan to an export."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import (
    BriaPipeline,
    BriaTransformer2DModel,
    ErnieImagePipeline,
    PRXTransformer2DModel,
)
from diffusers.pipelines.prx import pipeline_prx
from safetensors.torch import load_file

from g2rpo import api
from g2rpo.config.read import completed
from g2rpo.core import plugins
from g2rpo.core.errors import UserError
from g2rpo.core.noise import generator_for
from g2rpo.models import catalogue, load
from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.models.blueprint import build_shallow, read_blueprint
from g2rpo.models.options import PolicyConfig
from g2rpo.models.replay import Script, replay
from g2rpo.train.evaluation.sampler import Sampler
from g2rpo.train.run.folder import Run
from tests.support.commands import done, g2rpo, write_tiny
from tests.support.pages import ROOT, blocks
from tests.support.policies import make
from tests.support.tiny_pipelines import save_tiny, tiny_pipeline
from tests.support.tolerances import network
from tests.support.variants import few

PROMPTS = ["a red circle", "two blue square"]
SIZE = {"height": 32, "width": 48, "max_sequence_length": 12}
ADAPTER = "pytorch_lora_weights.safetensors"
DRAWN = network(9.0, passes=2)
"""Of pictures: guidance by 5 multiplies errors by 9, and the VAE follows."""
PRX = """
import torch
from g2rpo.models.spec import PipelineSpec

Prx = PipelineSpec(
    pipeline_class="PRXPipeline",
    encoded=("prompt_embeds", "prompt_attention_mask", "negative_prompt_embeds", "negative_prompt_attention_mask"),
    widths={"prompt_embeds": ("context_in_dim",), "prompt_attention_mask": ()},
    dtypes={"prompt_attention_mask": torch.bool},
    guidance=4.0,
    tokens=24,  # its tokenizer's
    fixed={"use_resolution_binning": False},
    one_row=True,
    one_time=lambda pipeline: True,
    unsupported=("num_frames", "published_pictures", "detach_negative"),
)
"""
PUBLISHED = """
from dataclasses import replace
from g2rpo.models.comfyui import ComfyUI
from g2rpo.models.published import PublishedModel

parts = PARTS
Published = replace(
    Bria,
    comfyui=ComfyUI("BriaTransformer2DModel", "mine.", {r"(.+)": r"own.\\1"}),
    models={"briaai/BRIA-3.2": PublishedModel("A licence", parts=parts)},
)
"""


@pytest.fixture
def bria(tmp_path):
    """(the pipeline's folder, FILE.py:NAME)."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    (code,) = [block.code for block in blocks(page) if block.code.startswith("# bria.py\n")]
    (tmp_path / "bria.py").write_text(code)
    return save_tiny("BriaPipeline", tmp_path / "bria"), f"{tmp_path / 'bria.py'}:Bria"


def plain(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    generators = [generator_for(5, "picture", i) for i in range(len(PROMPTS))]
    return pipeline(
        PROMPTS, num_inference_steps=4, generator=generators, output_type="pt", **SIZE
    ).images


def own(policy):
    return Sampler(policy=policy, shift="model", num_steps=4, seed=5).pictures(PROMPTS)


SHORT = (
    *("trainer.iterations=1", "evaluation.num_prompts=1", "algorithm.group_size=2"),
    *("rewards.scene_accuracy=", "rewards.brightness=1", "optim.learning_rate=0.01"),
)


def trained(folder, kind, place, capsys, *more):
    """A run of one iteration; the frozen policy with its weights, and its pictures before and with
    them."""
    run, options = place / "run", [f"policy.kind={kind}", *SHORT, *more]
    done(capsys, "train", write_tiny(place, folder), *options, "--run-dir", run)
    plugins.allow(kind)
    policy = load.build_policy(Run(run).read_config().policy, tuning="frozen")
    base = own(policy)
    policy.load(run / "adapter")
    tuned = own(policy)
    assert float((tuned - base).abs().max()) > 1e-3
    return run, policy, base, tuned


@pytest.mark.parametrize("right", few([True, False], False.__eq__))
def test_check_model_tells_whether_the_description_is_right(bria, capsys, right):
    """From the command line: a line for each check, and what to do about one that failed."""
    folder, kind = bria
    file = Path(kind.partition(":")[0])
    if not right:  # a result of encode_prompt is left out
        text = file.read_text()
        file.write_text(text.replace('"negative_prompt_embeds",', ""))
        assert file.read_text() != text
    size = [f"policy.{name}={value}" for name, value in SIZE.items()]
    code, out, err = g2rpo(capsys, "check-model", folder, "--kind", kind, *size)
    assert code == (0 if right else 1), out + err
    assert re.findall(r"FAILED +(\w+)", out) == ([] if right else ["policy"])
    assert ("LoRA of rank 32 at 32x48, float32 needs" if right else "`encoded`") in out


@pytest.fixture
def published(bria):
    """The same with a declaration of published sizes, a licence and ComfyUI's names."""
    folder, kind = bria
    index = json.loads((folder / "model_index.json").read_text())
    parts = {
        name: (":".join(index[name]), json.loads((folder / name / "config.json").read_text()))
        for name in ("transformer", "text_encoder", "vae")
    }
    file = Path(kind.partition(":")[0])
    file.write_text(file.read_text() + PUBLISHED.replace("PARTS", repr(parts)))
    return folder, f"{file}:Published"


@pytest.mark.slow
def test_published_sizes_and_licence_are_known_from_the_value(published, capsys):
    """By a hub id that is nowhere."""
    own = ["height=32", "width=48", f"kind={published[1]}", "pipeline=", "path=briaai/BRIA-3.2"]
    rewards = "rewards.scene_accuracy=", "rewards.brightness=1"
    without = (f"evaluation.rewards.{name}=" for name in ("scene_clip", "scene_preference"))
    out = done(
        capsys, "plan", "scenes", *(f"policy.{option}" for option in own), *rewards, *without
    )
    assert re.search("scenes: briaai/BRIA-3.2, .*; A licence", out)


def test_it_trains_and_what_it_saves_plain_diffusers_draws(published, tmp_path, capsys):
    """Its pipeline has no loader of LoRAs; its transformer has one."""
    folder, kind = published
    size = ["policy.height=32", "policy.width=48"]
    run, _, _, tuned = trained(folder, kind, tmp_path, capsys, *size)
    card = (run / "adapter" / "README.md").read_text()
    (line,) = re.findall(r"^pipe\.(\S+)\(", card, re.MULTILINE)
    assert line == "transformer.load_lora_adapter"
    pipe = BriaPipeline.from_pretrained(folder)
    pipe.transformer.load_lora_adapter(run / "adapter", weight_name=ADAPTER)
    torch.testing.assert_close(plain(pipe), tuned, **DRAWN)

    transformer = BriaTransformer2DModel.from_pretrained(api.export(run, "merged"))
    pipe = BriaPipeline.from_pretrained(folder, transformer=transformer)
    torch.testing.assert_close(plain(pipe), tuned, **DRAWN)
    file = api.export(run, "comfyui")
    assert all(name.startswith("mine.own.") for name in load_file(file))
    options = Run(run).read_config().policy
    back = load.build_policy(options, tuning="frozen")
    back.load(file)
    torch.testing.assert_close(own(back), tuned, **DRAWN)
    begun = completed(
        Run(run).read_config([f"policy.adapter={file}", "policy.lora_targets="])
    ).policy
    torch.testing.assert_close(own(load.build_policy(begun)), tuned, **DRAWN)
    build_shallow(read_blueprint(begun), begun)  # of a plan
    plugin, out = kind.partition(":")[0], tmp_path / "drawn"
    done(capsys, "sample", run, "--plugin", plugin, "--out", out, "a red circle")


@pytest.fixture
def prx(tmp_path):
    """(the pipeline's folder, FILE.py:NAME, options): a class whose transformer has no methods for
    adapters in diffusers."""
    Path(tmp_path / "own.py").write_text(PRX)
    kind = f"{tmp_path / 'own.py'}:Prx"
    plugins.allow(kind)
    # which its call does not take
    size = {name: value for name, value in SIZE.items() if name != "max_sequence_length"}
    return save_tiny("PRXPipeline", tmp_path / "prx"), kind, size


LACKING = [
    (["to_q", "to_k"], "no layer of a .* is named to_q, to_k; .* img_qkv_proj, .*=full"),
    (["img_qkv_proj", "to_k"], "no layer of a .* is named to_k; .* img_qkv_proj, .*=full"),
    (["img_qkv_proj", "to_out"], r"blocks\.0\.\S*to_out of a .* is a ModuleList; adapters"),
]


@pytest.mark.parametrize(("targets", "message"), LACKING, ids=str)
def test_layers_that_a_transformer_lacks_are_named_before_it_is_loaded(prx, targets, message):
    folder, kind, size = prx
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    missing = {"lora_targets": targets}
    with pytest.raises(UserError, match=message):
        load.load_pipeline(PolicyConfig(path=str(folder), kind=kind, **size, **missing))
    policy = DiffusersPolicy.of(plugins.load(kind))
    with pytest.raises(UserError, match=message):  # from Python too
        make(policy, tiny_pipeline("PRXPipeline"), **size, **missing)


@pytest.mark.slow  # half a minute, and one more class that a file describes
def test_an_adapter_that_diffusers_cannot_load_is_exported_merged(
    prx, tmp_path, capsys, monkeypatch
):
    folder, kind, size = prx
    # with which it cleans prompts
    monkeypatch.setattr(pipeline_prx, "ftfy", SimpleNamespace(fix_text=str), raising=False)
    given = [f"policy.{name}={value}" for name, value in size.items()]
    more = ["policy.max_sequence_length=", *given]
    run, policy, base, tuned = trained(folder, kind, tmp_path, capsys, *more)
    with policy.base():
        torch.testing.assert_close(own(policy), base, **DRAWN)
    merged = 'AutoModel.from_pretrained("FOLDER OF g2rpo export RUN --format merged")'
    assert merged in (run / "adapter" / "README.md").read_text()
    transformer = PRXTransformer2DModel.from_pretrained(api.export(run, "merged"))
    merged = load.load_pipeline(Run(run).read_config().policy, tuning="frozen")
    merged.pipeline.transformer = transformer
    torch.testing.assert_close(own(merged.policy()), tuned, **DRAWN)
    out = done(capsys, "check-model", folder, "--kind", kind, *given)
    assert "from_pretrained, merged" in out


class Unimported(BriaPipeline):
    def __call__(self):
        return ftfy.fix_text("")  # noqa: F821


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        # its own noise would be taken for a velocity
        (ErnieImagePipeline, "has no method prepare_latents, so no PipelineSpec can"),
        # as PRX and SkyReels-V2 where a library is missing
        (Unimported, "needs ftfy, which is not installed: pip install ftfy"),
    ],
)
def test_a_pipeline_that_cannot_be_replayed_is_refused(kind, message):
    with pytest.raises(UserError, match=f"{kind.__name__}: {message}"):
        replay(object.__new__(kind), Script(None, None), {}, device="cpu", parts={})


def test_one_value_of_the_catalogue_is_enough(bria, monkeypatch):
    folder, kind = bria
    with pytest.raises(UserError, match="is a BriaPipeline, which has no policy here: .*extending"):
        load.load_pipeline(PolicyConfig(path=str(folder), **SIZE))
    monkeypatch.setitem(catalogue.SPECS, "BriaPipeline", plugins.load(kind))
    policy = load.build_policy(PolicyConfig(path=str(folder), **SIZE), tuning="frozen")
    assert policy.spec is plugins.load(kind)
