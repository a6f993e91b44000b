"""Tuned weights in a single .safetensors file: a whole transformer, as published checkpoints are,
or an adapter."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from g2rpo.core.errors import UserError
from g2rpo.models import load
from g2rpo.models.options import PolicyConfig
from tests.support.commands import done, refused
from tests.support.policies import moved, velocity
from tests.support.tolerances import network
from tests.support.variants import few

SIZE = {"height": 32, "width": 32, "max_sequence_length": 12}
WHOLE, ADAPTER = "diffusion_pytorch_model.safetensors", "pytorch_lora_weights.safetensors"


def built(folder, tuning="frozen"):
    return load.build_policy(
        PolicyConfig(path=str(folder), lora_rank=2, **SIZE), tuning=tuning, keep_base=True
    )


def trained(folder, tuning, to):
    """A policy of random tuned weights, saved in the folder `to`."""
    policy = moved(built(folder, tuning))
    policy.save(to)
    return policy


@pytest.mark.parametrize(
    "prefix", few(["", "transformer.", "module.model."], "module.model.".__eq__)
)
def test_a_whole_transformer_is_read_whatever_stands_before_all_names(
    flux_directory, tmp_path, prefix
):
    policy = trained(flux_directory, "full", tmp_path / "transformer")
    tensors, file = load_file(tmp_path / "transformer" / WHOLE), tmp_path / "released.safetensors"
    save_file({prefix + name: value for name, value in tensors.items()}, file)
    sampling = built(flux_directory)
    base = velocity(sampling)
    with pytest.raises(UserError, match=r"whole transformer, .* leave 0\.5 out"):
        sampling.load(file, 0.5)
    sampling.load(file)
    tuned = velocity(policy)
    close = network(max(tuned.abs().max(), base.abs().max()))
    torch.testing.assert_close(velocity(sampling), tuned, **close)
    for one in (sampling, policy):
        with one.base():
            torch.testing.assert_close(velocity(one), base, **close)
        torch.testing.assert_close(velocity(one), tuned, **close)


def test_an_adapter_is_read_whatever_its_file_is_called(flux_directory, tmp_path):
    policy = trained(flux_directory, "lora", tmp_path)
    file = (tmp_path / ADAPTER).rename(tmp_path / "mine.safetensors")
    sampling = built(flux_directory)
    sampling.load(file)
    tuned = velocity(policy)
    torch.testing.assert_close(velocity(sampling), tuned, **network(tuned.abs().max()))
    with pytest.raises(
        UserError, match=r"mine\.safetensors: other tuned weights are loaded; build"
    ):
        sampling.load(file)  # modules that a second adapter lacks would keep the first one's


@pytest.mark.parametrize(
    ("kind", "ends"), [("LoKr", ["lokr_w1", "lokr_w2"]), ("LoHa", ["hada_w1_a", "hada_w1_b"])]
)
def test_an_adapter_of_another_kind_is_named_and_no_transformer(
    flux_directory, tmp_path, kind, ends
):
    """As ai-toolkit and LyCORIS write them, without alphas."""
    file, module = tmp_path / "other.safetensors", "lycoris_transformer_blocks_0_attn_to_q"
    save_file({f"{module}.{end}": torch.ones(4, 4) for end in ends}, file)
    with pytest.raises(UserError, match=rf"other\.safetensors: is a {kind} .* not supported"):
        built(flux_directory).load(file)


CHANGES = {
    "another model": (
        lambda tensors: {f"x{name}": value for name, value in tensors.items()},
        "are missing, .* are unknown",
    ),
    "another size": (
        lambda tensors: {**tensors, "x_embedder.bias": torch.zeros(7)},
        "1 have another shape.*x_embedder.bias",
    ),
    "nothing": (lambda tensors: {}, "is no FluxTransformer2DModel of this size"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_does_not_fit_is_refused_and_changes_nothing(flux_directory, tmp_path, case):
    change, message = CHANGES[case]
    file = tmp_path / "file.safetensors"
    save_file(change(load_file(flux_directory / "transformer" / WHOLE)), file)
    policy = built(flux_directory)
    before = velocity(policy)
    with pytest.raises(UserError, match=message):
        policy.load(file)
    assert torch.equal(velocity(policy), before)


def test_commands_take_a_file(capsys, flux_directory, tmp_path):
    trained(flux_directory, "full", tmp_path / "transformer")
    file = tmp_path / "transformer" / WHOLE
    words = ["sample", "--model", flux_directory, "--size", 32, "a red circle", "--steps", 2]
    drawn = []
    for weights in (file, file.parent):
        done(
            capsys, *words, "--weights", weights, "--out", out := tmp_path / f"{weights.name}-drawn"
        )
        drawn.append((out / "0000.png").read_bytes())
    assert drawn[0] == drawn[1]
    said = refused(
        capsys, *words, "--weights", tmp_path / "prompts.txt", "--out", tmp_path / "none"
    )
    assert "is no folder and no .safetensors file" in said
