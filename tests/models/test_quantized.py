"""Frozen weights in fewer bits: the nearest that can be stored, used by rollout, tails and training
alike."""

import sys

import pytest
import torch
from diffusers import FluxPipeline
from torch import nn

from g2rpo.core.errors import UserError
from g2rpo.core.noise import generator_for
from g2rpo.models.quantized import (
    QUANTIZED_LINEARS,
    QuantizedLinear,
    faults_of_quantization,
    weights_of,
)
from g2rpo.train.evaluation.sampler import Sampler
from tests.support import policies
from tests.support.commands import done
from tests.support.runs import log
from tests.support.variants import few

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(params=sorted(QUANTIZED_LINEARS))
def kind(request):
    if request.param == "nf4":
        pytest.importorskip(
            "bitsandbytes", reason="bitsandbytes, of the extra 'quantized', is not installed"
        )
    return request.param


def layer(dtype=torch.float32, rows=32, columns=128):
    linear = nn.Linear(columns, rows, dtype=dtype)
    values = torch.randn(rows, columns, generator=generator_for("weights"))
    with torch.no_grad():
        linear.weight.copy_(values * torch.linspace(0.01, 3, rows)[:, None])
        linear.weight[3] = 0
    return linear


def quantised(kind, dtype=torch.float32):
    return QUANTIZED_LINEARS[kind](layer(dtype), torch.device("cpu"))


def test_weights_are_the_nearest_that_can_be_stored(kind):
    """No weight is off by more than half a gap: of its row's largest, of itself, or of its block's
    of 64. The largest of NF4's blocks are stored too, within half the widest gap, 0.014, of
    bitsandbytes' 8-bit numbers times their spread."""
    weight, stored = layer().weight.detach(), quantised(kind).dense()
    row = weight.abs().amax(1, keepdim=True)
    block = weight.reshape(-1, 64).abs().amax(1).repeat_interleave(64).view_as(weight)
    allowed = {
        "int8": row / 127.5 / 2,
        "nf4": block * 0.3039 / 2 + 0.014 / 2 * (block - block.mean()).abs().max(),
    }
    assert (stored - weight).abs().le(allowed[kind] * (1 + 1e-4)).all()
    assert stored.dtype == weight.dtype and (kind == "nf4" or stored[3].eq(0).all())


def test_int8_is_torchaos():
    """torchao's int8 multiplies by the scale's reciprocal: a weight between two codes may get
    either."""
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    linear = layer()
    with torch.no_grad():
        linear.weight[3] = 1  # torchao has another scale for a row of zeros
    int8 = QUANTIZED_LINEARS["int8"](linear, torch.device("cpu"))
    theirs = torchao.Int8Tensor.from_hp(linear.weight, torchao.PerRow())
    off = (int8.codes.int() - theirs.qdata.int()).abs()
    # a row's largest, 127.5 steps, is between two codes
    assert off.max() <= 1 and off.count_nonzero() <= 40
    torch.testing.assert_close(int8.scale, theirs.scale, rtol=1e-6, atol=0)


def test_inputs_get_the_gradient_of_the_stored_weight(kind):
    """x -> x W' + b is linear: its gradient is that of the same product with a dense W'."""
    quantized, dtype = quantised(kind, torch.bfloat16), torch.bfloat16
    x = torch.randn(2, 5, 128, generator=generator_for("x")).to(dtype).requires_grad_()
    grad = torch.randn(2, 5, 32, generator=generator_for("grad")).to(dtype)
    mine = torch.autograd.grad(y := quantized(x), x, grad)[0]
    answer = nn.functional.linear(x, quantized.dense(), quantized.bias)
    assert torch.equal(mine, torch.autograd.grad(answer, x, grad)[0])
    assert torch.equal(answer, y)
    with torch.no_grad():
        assert torch.equal(quantized(x), y)


def test_what_waits_for_the_backward_pass_is_no_dense_weight(kind):
    quantized, saved = quantised(kind), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t, lambda t: t
    ):
        quantized(torch.randn(4, 128, requires_grad=True)).sum().backward()
    assert sum(saved) == 0


# --- of a policy ----------------------------------------------------------------------------------


SIGMAS = 0.9, 0.5, 0.1


def load(directory, tuning="lora", **options):
    own = {"dtype": torch.bfloat16, "lora_rank": 2, **options}
    return policies.moved(policies.load(directory, tuning, **own))


def test_layers_of_blocks_are_quantised_and_adapters_are_not(flux_directory, kind):
    policy, whole = load(flux_directory, quantize=kind), load(flux_directory)
    transformer = policy.pipeline.transformer

    def dense(transformer):
        """The layers that an adapter may be beside, by name."""
        layers = {name: each for name, each in transformer.named_modules() if "lora_" not in name}
        return {name: each for name, each in layers.items() if type(each) is nn.Linear}

    assert dense(transformer) and not any("blocks" in name for name in dense(transformer))
    assert all(p.dtype == torch.float32 for p in policy.trainable_parameters())
    assert weights_of(transformer) == weights_of(whole.pipeline.transformer)
    of_blocks = dense(whole.pipeline.transformer).keys() - dense(transformer).keys()
    inside = sum(whole.pipeline.transformer.get_submodule(n).weight.numel() for n in of_blocks)
    quantized = [each for each in transformer.modules() if isinstance(each, QuantizedLinear)]
    buffers = sum(buffer.nbytes for each in quantized for buffer in each.buffers())
    assert buffers < inside * 1.6  # tiny layers: scales weigh as much as codes


@pytest.mark.parametrize("model", few(["flux_directory", "sd3_directory"], "sd3_directory".__eq__))
@pytest.mark.parametrize("kind", few(sorted(QUANTIZED_LINEARS), "int8".__eq__), indirect=True)
def test_one_base_serves_rollout_training_and_the_untrained_model(request, model, kind):
    policy = load(request.getfixturevalue(model), quantize=kind, gradient_checkpointing=True)
    rollout = policies.velocity(policy, *SIGMAS)
    with policy.base():
        base = policies.velocity(policy, *SIGMAS)
    # gradient checkpointing works in this mode only; there is no dropout
    policy.pipeline.transformer.train()
    trained = policy.velocity(*policies.question(policy, *SIGMAS))
    assert torch.equal(rollout, trained) and not torch.equal(rollout, base)
    trained.float().square().sum().backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() for p in policy.trainable_parameters()
    )


def pictures(policy):
    return Sampler(policy=policy, shift=3.0, num_steps=4, seed=5).pictures(policies.PROMPTS)


@pytest.mark.parametrize("kind", few(sorted(QUANTIZED_LINEARS), "int8".__eq__), indirect=True)
def test_adapters_of_a_quantised_base_are_plain_ones(flux_directory, tmp_path, kind):
    """Loaded again they give the same velocities to the bit, and in diffusers' own pipeline the
    pictures of the base as it was, which are near those of the quantised one."""
    policy = load(flux_directory, quantize=kind)
    policy.save(tmp_path)
    again = load(flux_directory, quantize=kind, tuning="frozen")
    again.load(tmp_path)
    assert torch.equal(*(policies.velocity(each, *SIGMAS) for each in (policy, again)))
    whole = load(flux_directory, tuning="frozen")
    untuned = pictures(whole)
    FluxPipeline.from_pretrained(flux_directory).load_lora_weights(
        tmp_path, weight_name="pytorch_lora_weights.safetensors"
    )
    whole.load(tmp_path)
    tuned = pictures(whole)
    moved, apart = ((tuned - other).abs().mean() for other in (untuned, pictures(again)))
    assert apart < moved / 6


def test_a_whole_transformer_does_not_fit_a_quantised_base(flux_directory):
    with pytest.raises(UserError, match=r"holds a whole transformer"):
        load(flux_directory, quantize="int8", tuning="frozen").load(flux_directory / "transformer")


@pytest.mark.slow
def test_a_run_on_a_quantised_base_keeps_its_ratio(tmp_path, capsys, tiny_config, kind):
    """1 to the bit before the first update; the drift is what bfloat16 leaves, and the alarm is
    silent."""
    options = ["dtype=bfloat16", "gradient_checkpointing=true", f"quantize={kind}"]
    options = [*(f"policy.{option}" for option in options), "alarms.drift=stop"]
    done(capsys, "train", tiny_config, *options, "--run-dir", tmp_path / "run")
    trained = [row for row in log(tmp_path / "run") if row["kind"] == "train"]
    assert len(trained) == 2 and all(row["ratio_deviation"] == 0 for row in trained)


def test_nf4_without_bitsandbytes_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    (fault,) = faults_of_quantization("nf4", "lora")
    assert "pip install bitsandbytes" in fault
