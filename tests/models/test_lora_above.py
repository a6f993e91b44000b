"""`policy.lora_above`: the adapter acts at early steps alone, in training, in samples, merged, and in
plain diffusers by the card."""

import copy
import re
from contextlib import nullcontext

import pytest
import torch
from peft.tuners.lora import Linear as LoraLayer

from g2rpo import api
from g2rpo.cli.main import main
from g2rpo.config.read import load_config
from g2rpo.core.errors import UserError
from g2rpo.core.flow import dance_sde, sde_kernel
from g2rpo.core.noise import generator_for
from g2rpo.core.plans import Plan
from g2rpo.data.testbed import pipeline_dir
from g2rpo.lab.check_gradient import perturb
from g2rpo.models.adapter_files import read_adapter
from g2rpo.models.catalogue import SPECS
from g2rpo.models.load import build_policy
from g2rpo.models.lora_layers import TRAINED, factors_of
from g2rpo.models.pipelines import check_options
from g2rpo.rollout.engine import Engine
from g2rpo.train.checks import check_policy
from g2rpo.train.evaluation.sampler import Sampler, sampler_of
from g2rpo.train.run.folder import Run
from tests.support.commands import g2rpo, refused
from tests.support.policies import PROMPTS, policy_of, question, velocity
from tests.support.tiny import flux_pipeline
from tests.support.tiny_pipelines import tiny_pipeline
from tests.support.tolerances import network

ABOVE = 0.5
DRAWN = network(1.0, passes=2)
"""Of pictures: the steps, whose lengths add up to 1, and the VAE."""
QUICK = [
    "trainer.iterations=1",
    "trainer.prompts_per_iteration=1",
    "algorithm.group_size=2",
    "algorithm.branch_steps=[1]",
    "evaluation.num_prompts=1",
    "sampling.num_steps=4",
    "optim.learning_rate=0.05",
    "policy.tuning=lora",
    "policy.lora_rank=4",
    "rewards.brightness=1",
]


@pytest.fixture(scope="module")
def original():
    return flux_pipeline()


def load(original, **options):
    policy = policy_of(copy.deepcopy(original), **{"tuning": "lora", "lora_rank": 4, **options})
    perturb(policy)
    return policy


@torch.no_grad()
def test_velocities_are_the_adapters_above_and_the_bases_below(original):
    everywhere, early = load(original), load(original, lora_above=ABOVE)
    x, sigma, cond = question(early, 0.9, ABOVE, 0.2)
    tuned = everywhere.velocity(x, sigma, cond)
    with everywhere.base():
        base = everywhere.velocity(x, sigma, cond)
    assert (tuned - base).flatten(1).abs().amax(1).min() > 1e-3  # at all three sigmas
    expected = torch.stack([tuned[0], base[1], base[2]])
    close = network(tuned.abs().max())
    torch.testing.assert_close(early.velocity(x, sigma, cond), expected, **close)
    with early.base():
        torch.testing.assert_close(early.velocity(x, sigma, cond), base, **close)
    assert [early.trains_at(value) for value in (0.9, ABOVE, 0.2)] == [True, False, False]
    assert everywhere.trains_at(0.001)


def test_what_a_policy_saves_says_where_it_acts(original, tmp_path):
    policy = load(original, lora_above=0.123456789)  # the rounded number would be another sigma
    assert read_adapter(policy.save(tmp_path)).above == 0.123456789
    again = load(original, tuning="frozen")
    again.load(tmp_path)
    with policy.base():
        base = velocity(policy, 0.1)
    torch.testing.assert_close(velocity(again, 0.1), base, **network(base.abs().max()))
    everywhere = str(load(original).save(tmp_path / "everywhere"))
    with pytest.raises(UserError, match=r"policy.adapter acts at all steps, and the saved adapter"):
        load(original, lora_above=ABOVE, adapter=everywhere)


def test_a_gradient_flows_above_and_a_loss_below_is_refused(original):
    policy = load(original, lora_above=ABOVE)
    with policy.in_loss():
        policy.velocity(*question(policy, 0.9)).square().mean().backward()
        assert all(p.grad is not None for p in policy.trainable_parameters())
        with pytest.raises(UserError, match="sigma 0.200, where the trained weights do not act"):
            policy.velocity(*question(policy, 0.2))


def test_layers_are_set_only_where_other_adapters_act_than_before(original, monkeypatch):
    policy, visits = load(original, lora_above=ABOVE), []
    monkeypatch.setattr(LoraLayer, "set_adapter", lambda layer, *_, **__: visits.append(layer))
    with policy.base():
        entered = len(visits)
        velocity(policy, 0.2)  # where the base acts anyway
        assert len(visits) == entered > 0


def calls_of_adapters(policy):
    """A list that grows with every call of an adapter's factor."""
    calls = []
    for factor in factors_of(policy.transformer, TRAINED).values():
        factor.register_forward_hook(lambda *_: calls.append(1))
    return calls


@torch.no_grad()
def test_merged_velocities_are_those_of_adapters_whatever_acts(original):
    """To rounding, and without a call of an adapter; later changes count, and afterwards all is as
    it was, to the bit."""
    policy = load(original, lora_above=ABOVE)
    calls, given = calls_of_adapters(policy), question(policy, 0.9, ABOVE, 0.2)

    def velocities(context):
        with context(), policy.base():
            base = policy.velocity(*given)
        with context():
            return [base, *(policy.velocity(*given) for _ in range(2))]

    for _ in range(2):
        apart = velocities(nullcontext)
        assert calls and (apart[1] - apart[0])[0].abs().max() > 1e-3
        calls.clear()
        merged = velocities(policy.merged)
        assert not calls
        torch.testing.assert_close(merged, apart, **network(apart[1].abs().max(), passes=2))
        assert all(map(torch.equal, velocities(nullcontext), apart))
        perturb(policy)


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rollouts_merge_tails_alone_and_in_float32_alone(original, monkeypatch, dtype):
    """Log-probs are of velocities as the loss has them."""
    policy = load(original, dtype=dtype)
    calls, plan = calls_of_adapters(policy), Plan(1, 2, ((2, 3, 4),))
    engine = Engine(policy=policy, cond=policy.encode(PROMPTS[:1]), sigmas=policy.grid(4))

    def rollout():
        calls.clear()
        done = engine.rollout([plan], 2, sde_kernel(dance_sde(0.5)), generator_for)[0]
        return done, len(calls)

    merged, few = rollout()
    monkeypatch.setattr(policy, "merged", nullcontext)
    apart, all_calls = rollout()
    assert few * 2 == all_calls if dtype == "float32" else few == all_calls
    (mine,), (theirs,) = merged.transitions, apart.transitions
    assert torch.equal(mine.old_log_prob, theirs.old_log_prob)
    assert torch.equal(mine.x_next, theirs.x_next)
    torch.testing.assert_close(merged.finals, apart.finals, **network(4.0, passes=2))


PROMPT = "a small red circle"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("early") / "run"
    with pytest.raises(SystemExit, match="0"):
        main(["train", "scenes", "--run-dir", str(folder), f"policy.lora_above={ABOVE}", *QUICK])
    return folder


@pytest.fixture(scope="module")
def drawn(run):
    """A picture by the tuned model, and the base's of the same noise."""
    tuned, base = (api.sample(run, [PROMPT], seed=3, base=base) for base in (False, True))
    assert (tuned - base).abs().max() > 1e-2
    return tuned, base


def pictures_of(run, policy):
    sampler = sampler_of(Run(run).read_config(), policy, seed=3, decode_batch_size=8)
    return sampler.pictures([PROMPT])


@pytest.mark.slow
def test_the_card_draws_the_same_in_plain_diffusers(capsys, tmp_path, run, drawn):
    """The code of the card is run; only the prompt, its noise and the base model's folder are put
    in."""
    card = Run(run).weights / "README.md"
    (code,) = re.findall(r"```python\n(.*?)```", card.read_text(), re.DOTALL)
    assert "callback_on_step_end=until" in code
    for old, new in (
        ("'testbed'", f"{str(pipeline_dir())!r}, torch_dtype='float32'"),
        ("THIS FOLDER OR REPOSITORY", str(card.parent)),
        ('"..."', 'prompt, generator=noise, output_type="pt"'),
        (".images[0]", "[0]"),
    ):
        code = code.replace(old, new)
    pictures = {}
    for name, until in {"card": "", "everywhere": ", callback_on_step_end=until"}.items():
        namespace = {"prompt": PROMPT, "noise": generator_for(3, "picture", 0)}
        exec(code.replace(until, "") if until else code, namespace)
        pictures[name] = namespace["picture"].float().cpu()
    off = {name: float((picture - drawn[0]).abs().max()) for name, picture in pictures.items()}
    assert off["card"] <= DRAWN["atol"] < 1e-2 < off["everywhere"], off
    assert "acts at early steps only" in refused(capsys, "export", run, "--format", "merged")
    code, out, err = g2rpo(capsys, "export", run, "--format", "comfyui")
    assert code == 0 and "acts at early steps only" in " ".join((out + err).split())
    said = []
    api.export(run, "comfyui", out=tmp_path / "it.safetensors", notify=said.append)
    assert "acts at early steps only" in said[0]


@pytest.mark.slow
def test_a_run_that_continues_it_begins_with_its_pictures(run, drawn):
    options = Run(run).read_config().policy.model_copy(update={"adapter": str(Run(run).weights)})
    with pytest.raises(UserError, match="acts above sigma 0.5 alone; set policy.lora_above=0.5"):
        build_policy(options.model_copy(update={"lora_above": 0.0}))
    policy = build_policy(options)
    torch.testing.assert_close(pictures_of(run, policy), drawn[0], **DRAWN)
    perturb(policy)
    assert (pictures_of(run, policy) - drawn[0]).abs().max() > 1e-2
    with policy.base():
        torch.testing.assert_close(pictures_of(run, policy), drawn[0], **DRAWN)


TOO_LATE = r"trains at sigma 0.429.*policy.lora_above=0.5"
REFUSED = [
    ("algorithm.branch_steps=[0,8]", TOO_LATE),
    ("algorithm.name=diffusion_nft", "diffusion_nft trains at sigma"),
    ("algorithm.branch_steps=[0,7]", None),
    # whose four steps of seven are drawn for each group
    ("algorithm.name=dgpo", None),
    ("algorithm.name=dgpo sampling.shift=1", "dgpo trains at sigma 0.500"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_is_trained_lies_above(original, change, message):
    above = f"policy.lora_above={ABOVE}"
    config = load_config("scenes-fast", ["sampling.shift=3", above, *change.split()])
    policy = load(original, lora_above=ABOVE)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        check_policy(config, policy)


def test_what_it_is_not_for_is_refused(capsys):
    """check-model would find that saved weights draw otherwise in the pipeline, where they act
    everywhere."""
    assert "policy.lora_above=0.5: in the pipeline's own call" in refused(
        capsys, "check-model", "nowhere", "policy.lora_above=0.5"
    )
    full = load_config("scenes", ["policy.lora_above=0.5", "policy.tuning=full"]).policy
    with pytest.raises(UserError, match="policy.lora_above: is for adapters"):
        check_options(SPECS["FluxPipeline"], full)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_that_was_not_trained_adds_exactly_nothing(dtype):
    """So neither its rank nor where it acts is anything that the base depends on."""
    pipeline, found = tiny_pipeline("FluxPipeline"), []
    for own in ({"lora_rank": 2}, {"lora_rank": 5, "lora_above": 0.5}):
        policy = policy_of(copy.deepcopy(pipeline), "lora", dtype=dtype, **own)
        found.append(Sampler(policy=policy, shift="model", num_steps=3).pictures(["a red circle"]))
    assert torch.equal(*found)
