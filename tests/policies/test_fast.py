"""The tails' own network: the policy's unless asked otherwise, then as near as its precision allows, and never in its way."""

import sys

import pytest
import torch

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.errors import UserError
from g2rpo.flow import sigma_grid
from g2rpo.policies.fast import FastNetwork
from g2rpo.policies.flux import FluxPolicy
from g2rpo.policies.sd3 import SD3Policy
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.tails import Tails
from g2rpo.seeding import generator_for
from tests.support.commands import g2rpo

PROMPTS = ["a red circle", "two blue square left of a circle", "a square"]


@pytest.fixture
def policy(flux_directory):
    """LoRA adapters that do something."""
    policy = FluxPolicy.from_pretrained(flux_directory, height=32, width=32, max_sequence_length=12, lora_rank=2)
    for number, parameter in enumerate(policy.trainable_parameters()):
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator_for(number))
    return policy


def question(policy):
    return policy.noise([generator_for(i) for i in range(3)]), torch.tensor([0.9, 0.5, 0.1]), policy.encode(PROMPTS)


def answers(policy, network):
    """(the policy's velocities, the network's), float32."""
    x, sigma, cond = question(policy)
    with torch.no_grad():
        return policy.velocity(x, sigma, cond).float(), network.velocity(x, sigma, cond).float()


def fast(policy, **options):
    network = FastNetwork(policy, **options)
    network.refresh()
    return network


def relative_error(exact, got):
    return float((got - exact).norm() / exact.norm())


def test_without_options_it_is_the_policy_and_costs_no_memory(policy):
    network = fast(policy)
    exact, got = answers(policy, network)
    assert torch.equal(exact, got)
    theirs = {p.data_ptr() for p in policy.tuning.transformer.parameters()}
    assert {p.data_ptr() for p in network._network.parameters()} == theirs


def bfloat16_error(policy, directory):
    """What bfloat16 costs a policy of the same weights that computes everything in it."""
    other = type(policy).from_pretrained(
        directory, height=32, width=32, max_sequence_length=12, lora_rank=2, tuning=policy.tuning.mode, dtype=torch.bfloat16
    )
    for mine, theirs in zip(other.trainable_parameters(), policy.trainable_parameters(), strict=True):
        mine.data.copy_(theirs.data)
    x, sigma, cond = question(policy)
    with torch.no_grad():
        return relative_error(policy.velocity(x, sigma, cond), other.velocity(x, sigma, cond).float())


def test_bfloat16_is_as_near_as_a_bfloat16_policy_is(policy, flux_directory):
    """The same roundings, in another order: the errors are of one size."""
    error = relative_error(*answers(policy, fast(policy, dtype="bfloat16")))
    assert 0.5 < error / bfloat16_error(policy, flux_directory) < 2


def test_compiled_it_is_the_same_network(policy):
    """Traced into one graph but not into machine code, which takes minutes and is measured by `benchmarks.fast_tails`.

    Some operators are decomposed into others: float32 roundings (6e-8) over sums of a hundred and some layers.
    """
    network = fast(policy, compile=True, backend="aot_eager")
    exact, got = answers(policy, network)
    assert relative_error(exact, got) < 1e-5
    policy.trainable_parameters()[1].data.add_(0.5)  # what was traced must not be what is computed with for ever
    moved, got = answers(policy, network)
    assert relative_error(moved, exact) > 1e-3 and relative_error(moved, got) < 1e-5


def test_int8_is_as_near_as_its_roundings_are(policy):
    """A weight is off by up to 1/254 of its channel's largest, and so is an input: a few percent over the layers."""
    pytest.importorskip("torchao", reason="torchao, the extra 'quantized', is not installed")
    exact, got = answers(policy, fast(policy, quantize="int8"))
    assert 1e-4 < relative_error(exact, got) < 0.1


def test_int8_without_torchao_says_what_to_install(policy, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(UserError, match=r"pip install torchao"):
        FastNetwork(policy, quantize="int8")


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"compile": True, "backend": "aot_eager"}])
def test_the_policy_does_not_notice(policy, options):
    weights = {name: value.clone() for name, value in policy.tuning.transformer.state_dict().items()}
    before, _ = answers(policy, network := FastNetwork(policy, **options))
    network.refresh()
    with torch.no_grad():
        assert torch.equal(before, policy.velocity(*question(policy)))
    for name, value in policy.tuning.transformer.state_dict().items():
        assert value.dtype == weights[name].dtype and torch.equal(value, weights[name])
    assert all(p.requires_grad for p in policy.trainable_parameters())


def test_what_training_changes_reaches_the_tails_however_little_it_is(policy):
    """An adapter that adds 1e-4 to weights of size 0.1 is below what bfloat16 weights could hold, but it is not in them."""
    adapters = {name: p for name, p in policy.tuning.transformer.named_parameters() if "lora_" in name}
    network = fast(policy, dtype="bfloat16")
    mine = dict(network._network.named_parameters())
    for name, parameter in adapters.items():
        parameter.data.mul_(1e-3)
        assert mine[name] is parameter and mine[name].dtype == torch.float32


@pytest.mark.parametrize("dtype", ["policy", "bfloat16"])
def test_fully_tuned_weights_are_taken_over_at_a_refresh(flux_directory, dtype):
    policy = FluxPolicy.from_pretrained(
        flux_directory, height=32, width=32, max_sequence_length=12, tuning="full", keep_base=False
    )
    network = fast(policy, dtype=dtype)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.mul_(1.5)
    stale = relative_error(*answers(policy, network))
    network.refresh()
    error = relative_error(*answers(policy, network))
    if dtype == "policy":
        assert stale == error == 0
    else:
        assert error < 2 * bfloat16_error(policy, flux_directory) and error < stale / 2, (error, stale)
    assert policy.trainable_parameters()[0].dtype == torch.float32 and policy.trainable_parameters()[0].requires_grad


def test_stable_diffusion_3_has_one_too(sd3_directory):
    policy = SD3Policy.from_pretrained(sd3_directory, height=32, width=32, max_sequence_length=12, lora_rank=2)
    error = relative_error(*answers(policy, fast(policy, dtype="bfloat16")))
    assert 0.5 < error / bfloat16_error(policy, sd3_directory) < 2


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("tails", [Tails(), Tails(forecast=True), Tails("ab2", stride=2)], ids=["exact", "forecast", "ab2"])
def test_rollouts_of_a_transformer_do_not_depend_on_batch_size_or_order(policy, tails, batch_size):
    """Matrix products of another height add in another order: a relative rounding of 6e-8 * sqrt(100) per layer, ten layers and
    six steps make at most 4e-5 of the largest entry (7 here, 34 with ab2) if all went one way."""
    sigmas, algorithm = sigma_grid(6, 3.0), GranularGRPO(branch_steps=(0, 2), granularities=(1, 2), group_size=3)
    cond = policy.encode(PROMPTS)

    def finals(plans, size):
        engine = Engine(policy=policy, cond=cond, sigmas=sigmas, batch_size=size, tails=tails)
        rollouts = engine.rollout(plans, 3, algorithm.kernel(sigmas), generator_for)
        return {(rollout.prompt, rollout.plan): rollout.finals for rollout in rollouts}

    plans = algorithm.plans(6)
    one, other = finals(plans, 64), finals(plans[::-1], batch_size)
    for key, value in one.items():
        torch.testing.assert_close(other[key], value, atol=4e-5 * float(value.abs().max()), rtol=0)


def test_a_run_with_a_network_for_tails(tmp_path, capsys, tiny_config):
    """Rollout and training pass still agree: the ratio is 1, and its drift is that of float32 in another batch."""
    import json

    options = ["sampling.tails.dtype=bfloat16", "sampling.tails.forecast=true"]
    code, _, err = g2rpo(capsys, "train", tiny_config, *options, "--run-dir", tmp_path / "run")
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    trained = [row for row in rows if row["kind"] == "train"]
    assert len(trained) == 2 and all(row["ratio_deviation"] == 0 and row["log_prob_drift"] < 1e-4 for row in trained)


def test_bfloat16_tails_of_a_bfloat16_policy_are_refused(tmp_path, capsys, tiny_config):
    options = ["sampling.tails.dtype=bfloat16", "policy.dtype=bfloat16"]
    code, _, err = g2rpo(capsys, "train", tiny_config, *options, "--run-dir", tmp_path / "run")
    assert code == 2 and "policy.dtype is bfloat16 already" in err and "Traceback" not in err
