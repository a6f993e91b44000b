"""Pictures that are judged at another size than the one trained at: what changes, what does not,
and what is refused."""

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from g2rpo.app.evaluate import run_settings
from g2rpo.assembly import components
from g2rpo.assembly.config import load_config
from g2rpo.config.schema import PolicyConfig
from g2rpo.core.errors import UserError
from g2rpo.evaluation.sampler import sampler_of
from g2rpo.lab.plan.cards import CARDS
from g2rpo.lab.plan.plan import make_plan
from g2rpo.run.run import Run
from tests.support.commands import done, refused

LARGER = ["evaluation.height=64", "evaluation.width=48"]
FEW = [
    "rewards.scene_accuracy=",
    "rewards.brightness=1",
    "trainer.iterations=1",
    "evaluation.controls=true",
]


@pytest.fixture
def run(tiny_config, tmp_path, capsys):
    def make(name, *overrides):
        done(capsys, "train", tiny_config, *FEW, *overrides, "--run-dir", tmp_path / name)
        return tmp_path / name

    return make


def test_pictures_have_the_size_and_training_does_not_see_it(run):
    small, large = run("small"), run("large", *LARGER)
    (row,) = [r for r in Run(large).read_log() if r["kind"] == "train"]
    (expected,) = [r for r in Run(small).read_log() if r["kind"] == "train"]
    assert all(
        row[name] == expected[name]
        for name in expected
        if name.startswith(("reward/", "loss", "grad_norm"))
    )
    weights = [
        load_file(each / "adapter" / "pytorch_lora_weights.safetensors") for each in (small, large)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    config = Run(large).read_config()
    policy = components.build_policy(config.judged, tuning="frozen")
    assert config.judged_size == (64, 48) and (policy.options.height, policy.options.width) == (
        64,
        48,
    )
    expected = sampler_of(config.model_copy(update={"policy": config.judged}), policy)
    resized = sampler_of(config, components.build_policy(config.policy, tuning="frozen"))
    prompts = ["a red circle", "two blue squares"]
    assert torch.equal(resized.sigmas, expected.sigmas)
    assert torch.equal(resized.pictures(prompts), expected.pictures(prompts))
    # as before
    assert resized.policy.decode(resized.policy.noise([torch.Generator()])).shape[-2:] == (32, 32)

    assert (48, 64) in {Image.open(path).size for path in (large / "samples").rglob("*.png")}
    assert json.loads((large / "results.json").read_text())["controls"]["prompts"] == 2
    assert "height=64, width=48" in (large / "adapter" / "README.md").read_text()
    assert (run_settings(large)["policy"]["height"], run_settings(large)["policy"]["width"]) == (
        64,
        48,
    )


def test_a_reward_that_compares_gets_the_bases_pictures_at_their_size(tiny_config):
    """An untrained policy is its own base, so both pictures of a pair are equal."""
    pairs = []

    def compares(images, prompts):
        pairs.append(images)
        return torch.zeros(len(images))

    compares.group = True
    config = load_config(str(tiny_config), LARGER)
    sampler_of(config, components.build_policy(config.policy, tuning="frozen")).evaluate(
        ["a red circle"], {"it": compares}
    )
    assert pairs[0].shape == (2, 3, 64, 48) and torch.equal(pairs[0][0], pairs[0][1])


@pytest.mark.slow  # two plans
def test_a_plan_counts_judged_pictures_at_their_size(tiny_config):
    plain, larger = (
        make_plan(load_config(str(tiny_config), more), cuda=True, heldout=3, distinct_prompts=6)
        for more in ([], ["evaluation.height=128", "evaluation.width=128"])
    )
    for call in ("velocity", "training", "decode"):
        assert getattr(larger.traced, call) == getattr(plain.traced, call)
    assert larger.memory.moments["evaluation"] > plain.memory.moments["evaluation"]
    assert larger.memory.moments["update"] == plain.memory.moments["update"]
    before, after = (plan.seconds(CARDS["h100"]) for plan in (plain, larger))
    # launching takes longest here
    assert after.evaluation >= before.evaluation and after.iteration == before.iteration
    assert larger.traced.heldout.roofline.flops > 10 * plain.traced.heldout.roofline.flops


def test_a_size_that_the_model_cannot_make_is_refused(tiny_config, capsys, tmp_path):
    for command in (["train", tiny_config, "--run-dir", tmp_path / "r"], ["plan", tiny_config]):
        err = refused(capsys, *command, "evaluation.height=50", *FEW[:2])
        assert "evaluation.height, evaluation.width: " in err and "multiples of" in err
    config = load_config(str(tiny_config), LARGER)
    with pytest.raises(UserError, match="a PolicyConfig has one size"):
        components.check_judged_size(config, PolicyConfig(path="", height=4, width=4))
