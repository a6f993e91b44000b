"""`policy.lora_above`: the adapter acts at early steps alone, in training, in samples, and in plain diffusers by the card."""

import copy
import re

import pytest
import torch

from g2rpo import api
from g2rpo.app.train import load_config
from g2rpo.assembly.components import check_trained_steps
from g2rpo.core.errors import UserError
from g2rpo.core.seeding import generator_for
from g2rpo.lab.check_model import perturb
from g2rpo.runs.directory import RunDirectory
from g2rpo.testbed import pipeline_dir
from tests.support.commands import done, refused
from tests.support.tiny import flux_pipeline
from tests.support.tiny_pipelines import CLASSES

PROMPTS = ["a red circle", "two blue square left of a circle"]
ABOVE = 0.5
QUICK = [
    "trainer.iterations=1",
    "trainer.prompts_per_iteration=1",
    "algorithm.group_size=2",
    "algorithm.branch_steps=[1]",
    "evaluation.num_prompts=2",
    "evaluation.controls=false",
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
    policy = CLASSES["FluxPipeline"](copy.deepcopy(original), height=32, width=32, lora_rank=4, **options)
    perturb(policy)
    return policy


@torch.no_grad()
def test_velocities_are_the_adapters_above_and_the_bases_below(original):
    everywhere, early = load(original), load(original, lora_above=ABOVE)
    x, cond = early.noise([generator_for(i) for i in range(3)]), early.encode([*PROMPTS, PROMPTS[0]])
    sigma = torch.tensor([0.9, ABOVE, 0.2])
    tuned = everywhere.velocity(x, sigma, cond)
    with everywhere.base():
        base = everywhere.velocity(x, sigma, cond)
    assert (tuned - base).flatten(1).abs().amax(1).min() > 1e-3  # at all three sigmas
    found = early.velocity(x, sigma, cond)
    torch.testing.assert_close(found, torch.stack([tuned[0], base[1], base[2]]), atol=2e-6, rtol=1e-5)
    with early.base():
        torch.testing.assert_close(early.velocity(x, sigma, cond), base, atol=2e-6, rtol=1e-5)
    assert [early.trains_at(value) for value in (0.9, ABOVE, 0.2)] == [True, False, False]
    assert everywhere.trains_at(0.001)


def test_a_gradient_flows_above_and_a_loss_below_is_refused(original):
    policy = load(original, lora_above=ABOVE)
    x, cond = policy.noise([generator_for(0)]), policy.encode(PROMPTS[:1])
    with policy.in_loss():
        policy.velocity(x, torch.tensor([0.9]), cond).square().mean().backward()
        assert all(p.grad is not None for p in policy.trainable_parameters())
        with pytest.raises(UserError, match="sigma 0.200, where the trained weights do not act"):
            policy.velocity(x, torch.tensor([0.2]), cond)


def test_the_card_draws_the_same_in_plain_diffusers(capsys, tmp_path):
    """The code of the card is run; only the prompt, its noise and the base model's folder are put in."""
    run = tmp_path / "run"
    done(capsys, "train", "scenes", "--run-dir", run, f"policy.lora_above={ABOVE}", *QUICK)
    drawn, prompt = {}, "a small red circle"
    card = RunDirectory(run).weights / "README.md"
    code = re.search(r"```python\n(.*?)```", card.read_text(), re.DOTALL)[1]
    code = code.replace("'testbed'", f"{str(pipeline_dir())!r}, torch_dtype='float32'").replace(
        "THIS FOLDER OR REPOSITORY", str(card.parent)
    )
    assert "callback_on_step_end=until" in code
    for name, text in {"card": code, "everywhere": code.replace(", callback_on_step_end=until", "")}.items():
        namespace = {"prompt": prompt, "noise": generator_for(3, "picture", 0)}
        exec(text.replace('"..."', 'prompt, generator=noise, output_type="pt"').replace(".images[0]", "[0]"), namespace)
        drawn[name] = namespace["picture"].float().cpu()
    ours, base = (api.sample(run, [prompt], seed=3, base=base) for base in (False, True))
    off = {name: float((picture - ours).abs().max()) for name, picture in drawn.items()}
    assert off["card"] < 1e-4 < 1e-2 < off["everywhere"] and (ours - base).abs().max() > 1e-2, off
    assert "acts at early steps only" in refused(capsys, "export", run, "--format", "merged")


REFUSED = [
    ("policy.lora_above=0.5", "algorithm.branch_steps=[0,8]", r"trains at sigma 0.429.*policy.lora_above=0.5"),
    ("policy.lora_above=0.5", "algorithm.name=diffusion_nft", "diffusion_nft trains at sigma"),
    ("policy.lora_above=0.5", "algorithm.branch_steps=[0,7]", None),
]


@pytest.mark.parametrize(("above", "change", "message"), REFUSED)
def test_what_is_trained_lies_above(original, above, change, message):
    config = load_config("scenes-fast", ["sampling.shift=3", above, change])
    policy = load(original, lora_above=config.policy.lora_above)
    if message is None:
        check_trained_steps(config, policy)
        return
    with pytest.raises(UserError, match=message):
        check_trained_steps(config, policy)


def test_it_is_for_adapters(original):
    with pytest.raises(UserError, match="policy.lora_above: is for adapters"):
        load(original, tuning="full", lora_above=ABOVE)
    with pytest.raises(UserError, match="policy.lora_above: is for adapters"):
        CLASSES["FluxPipeline"].check_options(load_config("scenes", ["policy.lora_above=0.5", "policy.tuning=full"]).policy)
