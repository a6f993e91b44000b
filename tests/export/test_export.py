"""`g2rpo export`: plain diffusers draws with what it writes what the run's model draws; what cannot
be written is said."""

import json

import pytest
import torch
import yaml
from diffusers import FluxPipeline, FluxTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from g2rpo import __version__, api
from g2rpo.assembly import components
from g2rpo.core.errors import UserError
from g2rpo.export.formats import merge
from g2rpo.export.weights import final
from g2rpo.lab.check_model import load_saved
from g2rpo.policies.adapter_files import read_adapter
from g2rpo.policies.catalogue import SPECS
from g2rpo.policies.spec import parameters_of
from g2rpo.run.checkpoint import save_checkpoint
from g2rpo.run.run import Run
from g2rpo.training.model_card import header_of
from tests.support.commands import done, refused, write_tiny
from tests.support.tiny import save_flux
from tests.support.tiny_pipelines import CLASSES, tiny_pipeline
from tests.support.variants import few

ADAPTER = "pytorch_lora_weights.safetensors"


@pytest.fixture
def folders(flux_directory, sd3_directory):
    return {"flux": flux_directory, "sd3": sd3_directory}


def tuned(config, size):
    """The policy that a run of `config` trains, moved away from its base by random numbers."""
    policy = components.build_policy(config.policy)
    with torch.no_grad():
        for number, parameter in enumerate(policy.trainable_parameters()):
            parameter.add_(
                size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            )
    return policy


def begun(folder, pipeline, *overrides):
    """A run directory with a config, as training begins one."""
    folder.mkdir()
    data = yaml.safe_load(write_tiny(folder, pipeline).read_text())
    run = folder / "run"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(data))
    config = Run(run).read_config(overrides)
    (run / "config.yaml").write_text(config.to_yaml())
    return run, config


def finished(folder, pipeline, *overrides, size=0.3):
    """A run that has finished, with checkpoints of the same weights and of older ones; the run, and
    its policy."""
    run, config = begun(folder, pipeline, *overrides)
    policy = tuned(config, size)
    policy.save(run / ("adapter" if config.policy.tuning == "lora" else "transformer"))
    weights = [parameter.detach() for parameter in policy.trainable_parameters()]
    save_checkpoint(
        run / "checkpoints", 1, {"weights": [0 * value for value in weights]}, {}, keep=3
    )
    save_checkpoint(run / "checkpoints", 2, {"weights": weights}, {}, keep=3)
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
            transformer = FluxTransformer2DModel.from_pretrained(
                api.export(run, format, checkpoint=checkpoint)
            )
            assert all(
                torch.equal(value, expected[key].float())
                for key, value in transformer.state_dict().items()
            )
        file = load_file(api.export(run, "comfyui", checkpoint=checkpoint))
        assert file.keys() == stored.keys() and all(
            torch.equal(file[key], stored[key]) for key in file
        )


def test_merged_weights_have_the_dtype_of_the_base_and_what_rounding_costs_is_said(
    rounded, tmp_path, capsys
):
    run, _ = finished(tmp_path / "a", rounded, *LORA, size=0.1)
    out = done(capsys, "export", run, "--format", "merged")
    base, stored = (
        FluxTransformer2DModel.from_pretrained(f, torch_dtype=torch.bfloat16).state_dict()
        for f in (rounded / "transformer", run / "export" / "merged")
    )
    adapter = read_adapter(run / "adapter" / ADAPTER)
    lost = trained = 0.0
    for name, before in base.items():
        module = name.removesuffix(".weight")
        change = (
            adapter.delta(module).double() if module in adapter.layers and name != module else 0
        )
        exact = before.double() + change
        assert torch.equal(stored[name], exact.float().to(torch.bfloat16)), name
        lost += float((stored[name].double() - exact).square().sum())
        trained += float((exact - before.double()).square().sum())
    assert (
        f"stored in bfloat16: rounding moves weights by {(lost / trained) ** 0.5:.2%} of what training did"
        in out
    )
    headers = [safe_open(path, "pt") for path in (run / "export" / "merged").glob("*.safetensors")]
    assert len(headers) > 1 and all(
        h.get_tensor(next(iter(h.keys()))).dtype == torch.bfloat16 for h in headers
    )


@pytest.mark.parametrize("format", few(["diffusers", "comfyui", "merged"], "comfyui".__eq__))
def test_a_checkpoint_of_the_same_weights_is_the_same_export(folders, tmp_path, format):
    run, _ = finished(tmp_path / "a", folders["sd3"], *LORA)
    outs = [api.export(run, format, checkpoint=which) for which in (None, 2, "last")]
    files = [out if out.is_file() else next(out.glob("*.safetensors")) for out in outs]
    one, *others = (load_file(file) for file in files)
    for other in others:
        assert other.keys() == one.keys() and all(torch.equal(other[key], one[key]) for key in one)
    untrained = load_file(
        api.export(run, "comfyui", checkpoint=1, out=tmp_path / "one.safetensors")
    )
    assert not any(value.any() for value in untrained.values())


def test_the_average_of_a_checkpoint_is_what_is_exported_and_best_is_the_best_evaluations(
    folders, tmp_path
):
    run, policy = finished(tmp_path / "a", folders["flux"], *LORA)
    weights = [parameter.detach() for parameter in policy.trainable_parameters()]
    save_checkpoint(
        run / "checkpoints",
        3,
        {"weights": [0 * v for v in weights], "average": weights},
        {},
        keep=3,
    )
    save_checkpoint(run / "checkpoints" / "best", 1, {"weights": weights}, {}, keep=1)
    expected = load_file(api.export(run, "comfyui"))
    for which in (3, "best"):
        file = load_file(api.export(run, "comfyui", checkpoint=which))
        assert file.keys() == expected.keys() and all(
            torch.equal(file[key], expected[key]) for key in expected
        )


# whose processor needs torchvision to be loaded
SAVED = [kind for kind in CLASSES if kind != "QwenImage21Pipeline"]


@pytest.mark.parametrize(
    "kind",
    few(SAVED, ("FluxPipeline", "ZImagePipeline", "SanaPipeline", "WanPipeline").__contains__),
)
def test_every_class_of_pipeline_is_exported_as_diffusers_itself_fuses_its_adapter(kind, tmp_path):
    """diffusers adds float32 products in another order, so the last bits may differ."""
    pipeline = tiny_pipeline(kind)
    pipeline.save_pretrained(tmp_path / "model")
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
        torch.testing.assert_close(merged[name], expected[name], atol=1e-5, rtol=1e-5, msg=name)
    changed = {name for name in merged if not torch.equal(merged[name], base[name])}
    assert len(changed) == len(policy.tuning.named()) / 2
    known = SPECS[kind].comfyui
    if known is None:
        with pytest.raises(UserError, match="--format comfyui"):
            api.export(run, "comfyui")
    else:  # that these are ComfyUI's is for test_comfyui.py to say
        keys = {name.rpartition(".lora_")[0] for name in load_file(api.export(run, "comfyui"))}
        assert keys == {known.key(name.removesuffix(".weight")) for name in changed}


def metadata(file):
    with safe_open(file, "pt") as opened:
        return opened.metadata()


def test_a_trained_adapter_says_what_it_is_and_equal_runs_write_equal_bytes(
    tiny_config, tmp_path, capsys
):
    runs = [tmp_path / "one", tmp_path / "two"]
    overrides = ("trainer.iterations=1", "policy.lora_alpha=8")
    for run in runs:
        done(capsys, "train", tiny_config, *overrides, "--run-dir", run)
    files = [run / "adapter" / ADAPTER for run in runs] + [
        api.export(run, "comfyui") for run in runs
    ]
    assert (
        files[0].read_bytes() == files[1].read_bytes()
        and files[2].read_bytes() == files[3].read_bytes()
    )
    for file in files:
        said = metadata(file)
        # alpha / rank = 4 is in the weights
        assert said["ss_network_dim"] == said["ss_network_alpha"] == "2"
        assert said["g2rpo.lora_alpha"] == "8" and said["g2rpo.version"] == __version__
        assert (
            said["g2rpo.transformer"] == "FluxTransformer2DModel"
            and said["g2rpo.base_model"] == "flux"
        )
        assert said["g2rpo.algorithm"] == "G²RPO" and json.loads(said["g2rpo.rewards"]) == {
            "scene_accuracy": 1.0
        }
        assert not any("tmp" in text or "trigger" in key for key, text in said.items())
    done(capsys, "export", runs[0], "--format", "diffusers")
    assert (runs[0] / "export" / "diffusers" / "README.md").is_file()


def test_modelspec_is_there_for_architectures_that_have_a_name(tmp_path, flux_directory):
    _, config = begun(tmp_path / "a", flux_directory)
    assert not any(key.startswith("modelspec") for key in header_of(config, 1))
    name = "black-forest-labs/FLUX.1-dev"
    header = header_of(
        config.model_copy(update={"policy": config.policy.model_copy(update={"path": name})}), 1
    )
    expected = {
        "sai_model_spec": "1.0.1",
        "architecture": "flux-1-dev/lora",
        "implementation": "diffusers",
    }
    expected["title"] = f"{name} tuned with G²RPO"
    assert {key: header[f"modelspec.{key}"] for key in expected} == expected


def refusal(capsys, *arguments):
    return refused(capsys, "export", *arguments)


def test_what_cannot_be_exported_is_said_in_one_message(folders, tmp_path, capsys):
    run, config = begun(tmp_path / "a", folders["flux"], *LORA)
    assert "confyui" in refusal(capsys, run, "--format", "confyui")
    assert str(tmp_path) in refusal(capsys, tmp_path, "--format", "merged")
    assert "has no weights yet" in refusal(capsys, run, "--format", "diffusers")
    assert "keeps none; or say last or best" in refusal(
        capsys, run, "--format", "diffusers", "--checkpoint", "3"
    )
    weights = [parameter.detach() for parameter in tuned(config, 0.1).trainable_parameters()]
    save_checkpoint(run / "checkpoints", 1, {"weights": weights}, {}, keep=3)
    unfinished = refusal(capsys, run, "--format", "diffusers")
    assert (
        f"`g2rpo resume {run}` goes on, --checkpoint last exports what it has (kept: 1)"
        in unfinished
    )
    assert "keeps 1; or say last or best" in refusal(
        capsys, run, "--format", "diffusers", "--checkpoint", "3"
    )
    assert "alarms.action=rollback keeps it" in refusal(
        capsys, run, "--format", "diffusers", "--checkpoint", "best"
    )
    save_checkpoint(run / "checkpoints", 2, {"weights": weights[1:]}, {}, keep=3)
    assert "does not fit" in refusal(capsys, run, "--format", "diffusers", "--checkpoint", "2")
    assert "ComfyUI's models/loras" in refusal(
        capsys, run, "--format", "comfyui", "--checkpoint", "1", "--out", tmp_path / "x"
    )
    assert not (run / "export").exists()
    for format, out in (("comfyui", tmp_path / "x.safetensors"), ("merged", tmp_path / "x")):
        done(capsys, "export", run, "--format", format, "--checkpoint", "1", "--out", out)
        assert "exists; name another --out" in refusal(
            capsys, run, "--format", format, "--checkpoint", "1", "--out", out
        )


def test_damaged_and_foreign_weights_are_refused(folders, tmp_path, capsys):
    run, _ = finished(tmp_path / "a", folders["flux"], *LORA)
    file = run / "adapter" / ADAPTER
    save_file({"transformer.x.lora_A.weight": torch.zeros(2, 2)}, file)
    assert "holds other tensors than a LoRA's" in refusal(capsys, run, "--format", "comfyui")
    file.write_bytes(file.read_bytes()[:40])
    assert "cannot be read" in refusal(capsys, run, "--format", "comfyui")
    file.unlink()
    assert "has a format of its own" in refusal(capsys, run, "--format", "comfyui")


def test_another_base_than_the_trained_one_is_refused(folders, tmp_path):
    run, _ = finished(tmp_path / "a", folders["flux"], *LORA)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(
        UserError, match="is another model than the one that was trained; it has no"
    ):
        merge(final(run, Run(run).read_config()), folders["sd3"] / "transformer", out)


HEADER = "lora_adapter_metadata"
ODD = {
    "rank 0": (
        {},
        json.dumps({"transformer.r": 0, "transformer.lora_alpha": 4}),
        "r: Input should be greater than or equal to 1",
    ),
    "other ranks": ({"lora_A": torch.zeros(3, 4)}, "{}", "of one rank"),
    "NaN": ({"lora_B": torch.full((4, 2), torch.nan)}, "{}", "not finite"),
}


@pytest.mark.parametrize("case", ODD)
def test_an_odd_adapter_is_refused(tmp_path, case):
    changes, header, message = ODD[case]
    pair = {"lora_A": torch.ones(2, 4), "lora_B": torch.ones(4, 2), **changes}
    save_file(
        {f"transformer.x.{name}.weight": value for name, value in pair.items()},
        tmp_path / ADAPTER,
        {HEADER: header},
    )
    with pytest.raises(UserError, match=message):
        read_adapter(tmp_path / ADAPTER)
