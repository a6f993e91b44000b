"""`g2rpo export`: plain diffusers draws with what it writes what the run's model draws; what cannot
be written is said."""

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from g2rpo import __version__, api
from g2rpo.config.read import load_config
from g2rpo.core.errors import UserError
from g2rpo.core.statistics import percent
from g2rpo.lab.export import EXPORT_FORMATS, merge
from g2rpo.lab.tuned_weights import final, load_saved, transformer_folder
from g2rpo.models import hub, load
from g2rpo.models.adapter_files import read_adapter
from g2rpo.models.blueprint import read_blueprint
from g2rpo.models.catalogue import SPECS
from g2rpo.models.options import PolicyConfig
from g2rpo.models.spec import parameters_of
from g2rpo.train.model_card import CARD, header_of
from g2rpo.train.run.checkpoint import save_checkpoint
from g2rpo.train.run.folder import Run
from tests.support.commands import done, refused, write_tiny
from tests.support.policies import moved
from tests.support.tables import rows
from tests.support.tiny import save_flux
from tests.support.tiny_pipelines import CLASSES, tiny_pipeline
from tests.support.tolerances import rounding
from tests.support.variants import few

ADAPTER = "pytorch_lora_weights.safetensors"


def weights_of(policy):
    return [parameter.detach() for parameter in policy.trainable_parameters()]


def keep(run, iteration, weights, **more):
    save_checkpoint(run / "checkpoints", iteration, {"weights": weights, **more}, {}, keep=3)


def nothing(weights):
    return [torch.zeros_like(value) for value in weights]


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def begun(folder, pipeline, *overrides):
    """A run directory with a config, as training begins one."""
    folder.mkdir(parents=True, exist_ok=True)
    config = load_config(str(write_tiny(folder, pipeline)), overrides)
    run = folder / "run"
    Run(run).claim(config)
    return run, config


def finished(folder, pipeline, *overrides, size=0.3):
    """A run that has finished, with checkpoints of the same weights and of older ones; the run, and
    its policy."""
    run, config = begun(folder, pipeline, *overrides)
    policy = moved(load.build_policy(config.policy), size)
    policy.save(run / ("adapter" if config.policy.tuning == "lora" else "transformer"))
    keep(run, 1, nothing(weights_of(policy)))
    keep(run, 2, weights_of(policy))
    return run, policy


LORA = ("policy.tuning=lora", "policy.lora_rank=4", "policy.lora_alpha=6")  # a scale that rounds


@pytest.fixture
def rounded(tmp_path):
    """A tiny FLUX that is stored in bfloat16, in several files."""
    folder = save_flux(tmp_path / "bf16")
    pipeline = FluxPipeline.from_pretrained(folder)
    pipeline.transformer.to(torch.bfloat16).save_pretrained(
        folder / "transformer", max_shard_size="100KB"
    )
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    return folder


def test_every_format_of_full_tuning(rounded, tmp_path):
    run, policy = finished(
        tmp_path / "a", rounded, "policy.tuning=full", "policy.lora_targets=null", size=0.01
    )
    trained = policy.pipeline.transformer.state_dict()
    stored = {name: value.to(torch.bfloat16) for name, value in trained.items()}
    for checkpoint in (None, 2):  # the weights as they were trained, and in the dtype of the base
        for format, expected in (("diffusers", trained), ("merged", stored)):
            folder = api.export(run, format, checkpoint=checkpoint)
            found = FluxTransformer2DModel.from_pretrained(folder).state_dict()
            assert equal(found, {key: value.float() for key, value in expected.items()})
        assert equal(load_file(api.export(run, "comfyui", checkpoint=checkpoint)), stored)


def test_merged_weights_have_the_dtype_of_the_base_and_what_rounding_costs_is_said(
    rounded, tmp_path, capsys
):
    run, _ = finished(tmp_path / "a", rounded, *LORA, size=0.1)
    killed = run / "export" / ".unfinished_1"  # as an export without memory leaves it
    killed.mkdir(parents=True)
    out = done(capsys, "export", run, "--format", "merged")
    assert not killed.exists()
    base, stored = (
        FluxTransformer2DModel.from_pretrained(f, torch_dtype=torch.bfloat16).state_dict()
        for f in (rounded / "transformer", run / "export" / "merged")
    )
    adapter = read_adapter(run / "adapter" / ADAPTER)
    lost = trained = 0.0
    for name, before in base.items():
        module, _, kind = name.rpartition(".")
        tuned = kind == "weight" and module in adapter.layers
        exact = before.double() + (adapter.delta(module).double() if tuned else 0)
        assert torch.equal(stored[name], exact.float().to(torch.bfloat16)), name
        lost += float((stored[name].double() - exact).square().sum())
        trained += float((exact - before.double()).square().sum())
    share = percent((lost / trained) ** 0.5, 2)
    assert f"stored in bfloat16: rounding moves weights by {share} of what training did" in out
    assert len([*(run / "export" / "merged").glob("*.safetensors")]) > 1


def test_the_average_of_a_checkpoint_is_what_is_exported_and_best_is_the_best_evaluations(
    flux_directory, tmp_path
):
    run, policy = finished(tmp_path / "a", flux_directory, *LORA)
    weights = weights_of(policy)
    keep(run, 3, nothing(weights), average=weights)
    save_checkpoint(run / "checkpoints" / "best", 1, {"weights": weights}, {}, keep=1)
    expected = load_file(api.export(run, "comfyui"))
    for which in (3, "best"):
        assert equal(load_file(api.export(run, "comfyui", checkpoint=which)), expected)


# whose processor needs torchvision to be loaded
SAVED = [kind for kind in CLASSES if kind != "QwenImage21Pipeline"]


@pytest.mark.parametrize("kind", few(SAVED, ("ZImagePipeline", "SanaPipeline").__contains__))
def test_every_class_of_pipeline_is_exported_as_diffusers_itself_fuses_its_adapter(kind, tmp_path):
    """But for the order in which diffusers adds the products of a low rank."""
    pipeline = tiny_pipeline(kind)
    pipeline.save_pretrained(str(tmp_path / "model"))
    length = 24 if "max_sequence_length" in parameters_of(type(pipeline)) else ""
    run, policy = finished(
        tmp_path / "a", tmp_path / "model", *LORA, f"policy.max_sequence_length={length}"
    )
    load_saved(pipeline, api.export(run, "diffusers", checkpoint="last"), "lora")
    pipeline.transformer.fuse_lora()
    pipeline.transformer.unload_lora()
    expected = pipeline.transformer.state_dict()
    merged = load_file(api.export(run, "merged") / "diffusion_pytorch_model.safetensors")
    base = tiny_pipeline(kind).transformer.state_dict()
    assert merged.keys() == expected.keys()
    for name in merged:
        close = rounding(8, size=expected[name].abs().max())
        torch.testing.assert_close(merged[name], expected[name], **close, msg=name)
    changed = {name for name in merged if not torch.equal(merged[name], base[name])}
    assert len(changed) == len(policy.tuning.named()) / 2
    known = SPECS[kind].comfyui
    if known is None:
        with pytest.raises(UserError, match="--format comfyui"):
            api.export(run, "comfyui")
    else:  # that these are ComfyUI's is for test_comfyui.py to say
        keys = {name.rpartition(".lora_")[0] for name in load_file(api.export(run, "comfyui"))}
        assert keys == {known.key(name.removesuffix(".weight")) for name in changed}


@pytest.mark.slow
def test_a_trained_adapter_says_what_it_is_and_equal_runs_write_equal_bytes(
    tiny_config, tmp_path, capsys
):
    runs = [tmp_path / "one", tmp_path / "two"]
    for run in runs:
        overrides = ("trainer.iterations=1", "policy.lora_alpha=8")
        done(capsys, "train", tiny_config, *overrides, "--run-dir", run)
    expected = {
        "lora_alpha": "8",
        "version": __version__,
        "transformer": "FluxTransformer2DModel",
        "base_model": "flux",
        "algorithm": "G²RPO",
        "rewards": '{"scene_accuracy": 1.0}',
    }
    for write in (lambda run: run / "adapter" / ADAPTER, lambda run: api.export(run, "comfyui")):
        one, other = map(write, runs)
        assert one.read_bytes() == other.read_bytes()
        with safe_open(one, "pt") as opened:
            said = opened.metadata()
        # alpha / rank = 4 is in the weights
        assert said["ss_network_dim"] == said["ss_network_alpha"] == "2"
        assert {name: said[f"g2rpo.{name}"] for name in expected} == expected
        assert not any("tmp" in text or "trigger" in key for key, text in said.items())
    done(capsys, "export", runs[0], "--format", "diffusers")
    assert (runs[0] / "export" / "diffusers" / "README.md").is_file()


def test_a_card_goes_with_the_weights_that_it_describes_alone(sd3_directory, tmp_path):
    begin, _ = finished(tmp_path / "a", sd3_directory, *LORA)
    more = f"policy.adapter={begin / 'adapter' / ADAPTER}"
    run, _ = finished(tmp_path / "b", sd3_directory, *LORA, more)
    for folder in (begin, run):
        (folder / "adapter" / CARD).write_text("base .2, tuned .6")

    def has_card(run, learnt):
        return (api.export(run, "diffusers", learnt=learnt) / CARD).is_file()

    assert has_card(run, False) and not has_card(run, True)
    assert has_card(begin, True)  # continues none, so this is the whole


def test_modelspec_is_there_for_architectures_that_have_a_name(flux_directory):
    name = "black-forest-labs/FLUX.1-dev"
    own, named = (load_config("scenes", [f"policy.path={path}"]) for path in (flux_directory, name))
    assert not any(key.startswith("modelspec") for key in header_of(own, 1))
    header = header_of(named, 1)
    assert header["modelspec.architecture"] == "flux-1-dev/lora"
    assert header["modelspec.title"] == f"{name} tuned with G²RPO"


UNKNOWN = """
confyui -> confyui
diffusers -> has no weights yet
diffusers --checkpoint 3 -> keeps none; or say last or best
"""
UNFINISHED = """
diffusers -> goes on, --checkpoint last exports what it has (kept: 1, 2)
diffusers --checkpoint 3 -> keeps 1, 2; or say last or best
diffusers --checkpoint best -> no evaluation was better than the base's
diffusers --checkpoint 2 -> does not fit
comfyui --checkpoint 1 --out x -> ComfyUI's models/loras
"""


def test_what_cannot_be_exported_is_said_in_one_message(flux_directory, tmp_path, refuses, says):
    run, config = begun(tmp_path / "a", flux_directory, *LORA)
    assert str(tmp_path) in refuses(f"export {tmp_path} --format merged")
    for words, said in rows(UNKNOWN):
        assert said in refuses(f"export {run} --format {words}")
    weights = weights_of(load.build_policy(config.policy))
    keep(run, 1, weights)
    keep(run, 2, weights[1:])
    for words, said in rows(UNFINISHED):
        assert said in refuses(f"export {run} --format {words}")
    assert not (run / "export").exists()
    for format, out in (("comfyui", "x.safetensors"), ("merged", "x")):
        command = f"export {run} --format {format} --checkpoint 1 --out {out}"
        says(command)
        assert "exists; name another --out" in refuses(command)


UNFIT = """
policy.lora_above=0.5 policy.lora_targets=[to_q,context_embedder]
policy.lora_targets=[to_q,context_embedder]
policy.lora_above=0.5
policy.lora_rank=4
policy.tuning=full
"""


@pytest.mark.parametrize("more", UNFIT.strip().splitlines())
def test_a_refusal_names_all_formats_that_work_and_no_other(flux_directory, tmp_path, more):
    """The one of kohya's named merged weights, which refused the same run."""
    run, _ = finished(tmp_path / "a", flux_directory, *LORA, *more.split())
    said, written = {}, []
    for format in EXPORT_FORMATS:
        try:
            api.export(run, format)
            written.append(format)
        except UserError as error:
            said[format] = str(error)
    assert said and written
    for format, refusal in said.items():
        assert refusal.startswith(f"--format {format}: ")
        assert refusal.endswith(f"can be written with --format {' or '.join(written)}")


def test_a_base_whose_config_alone_is_in_the_hubs_cache_is_downloaded(tmp_path, monkeypatch):
    """Plans and checkpoints fetch no more of it."""
    config = PolicyConfig(path="me/mine", height=32, width=32)
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(hub, "cached", lambda *given: tmp_path / "config.json")
    monkeypatch.setattr(hub, "obstacle", lambda *given: "cannot be reached")
    monkeypatch.setattr("g2rpo.lab.tuned_weights.location_of", lambda name: (name, "X"))
    with pytest.raises(UserError, match="its transformer is needed, and it cannot be reached"):
        transformer_folder(config)
    save_file({"x": torch.zeros(1)}, tmp_path / "diffusion_pytorch_model.safetensors")
    assert transformer_folder(config) == tmp_path


def test_a_base_is_found_without_the_code_and_the_adapter_of_its_run(flux_directory):
    """To read weights no code is run, and an adapter that was continued may be gone."""
    config = PolicyConfig(path=str(flux_directory), height=32, width=32, adapter="/no/adapter")
    own = config.model_copy(update={"kind": "mine.py:Mine"})
    assert transformer_folder(own) == flux_directory / "transformer"
    assert read_blueprint(config).kind == "FluxPipeline"


def test_foreign_weights_and_another_base_are_refused(
    flux_directory, sd3_directory, tmp_path, capsys
):
    run, _ = finished(tmp_path / "a", flux_directory, *LORA)
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="is another model than the one that was trained; it has"):
        merge(final(run, Run(run).read_config()), sd3_directory / "transformer", tmp_path / "out")
    file = run / "adapter" / ADAPTER
    save_file({"transformer.x.lora_A.weight": torch.zeros(2, 2)}, file)
    assert "other tensors than a LoRA's" in refused(capsys, "export", run, "--format", "comfyui")
    file.unlink()
    assert "has a format of its own" in refused(capsys, "export", run, "--format", "comfyui")
