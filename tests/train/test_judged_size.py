"""Pictures that are judged at another size than the one trained at: what changes, what does not,
and what is refused."""

import pytest
import torch
from PIL import Image

from g2rpo.config.read import load_config
from g2rpo.core.errors import UserError
from g2rpo.lab.evaluate import run_settings
from g2rpo.models import load
from g2rpo.models.options import PolicyConfig
from g2rpo.train.checks import check_policy
from g2rpo.train.evaluation.sampler import sampler_of
from tests.support.commands import adapter_of, done, refused

LARGER = ["evaluation.height=64", "evaluation.width=48"]
FEW = ["rewards.scene_accuracy=", "rewards.brightness=1", "trainer.iterations=1"]


@pytest.mark.slow  # trains twice
def test_pictures_have_the_size_and_training_does_not_see_it(tiny_config, tmp_path, capsys):
    small, large = tmp_path / "small", tmp_path / "large"
    for folder, size in ((small, []), (large, LARGER)):
        done(capsys, "train", tiny_config, *FEW, *size, "--run-dir", folder)
    one, two = adapter_of(small), adapter_of(large)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert (48, 64) in {Image.open(path).size for path in (large / "samples").rglob("*.png")}
    assert "height=64, width=48" in (large / "adapter" / "README.md").read_text()
    policy = run_settings(large)["policy"]
    assert (policy["height"], policy["width"]) == (64, 48)


def test_a_policy_of_another_size_draws_the_pictures_of_that_size_and_keeps_its_own(tiny_config):
    config, prompts = load_config(str(tiny_config), LARGER), ["a red circle", "two blue squares"]
    own, large = (
        load.build_policy(options, tuning="frozen") for options in (config.policy, config.judged)
    )
    expected = sampler_of(config.model_copy(update={"policy": config.judged}), large)
    resized = sampler_of(config, own)
    assert torch.equal(resized.sigmas, expected.sigmas)
    assert torch.equal(resized.pictures(prompts), expected.pictures(prompts))
    assert own.decode(own.noise([torch.Generator()])).shape[-2:] == (32, 32)


def test_a_size_that_the_model_cannot_make_is_refused(tiny_config, capsys, tmp_path):
    words = ["evaluation.height=50", *FEW[:2], "--run-dir", tmp_path / "r"]
    err = refused(capsys, "train", tiny_config, *words)
    assert "evaluation.height, evaluation.width: " in err and "multiples of" in err
    config = load_config(str(tiny_config), LARGER)
    with pytest.raises(UserError, match="a PolicyConfig has one size"):
        check_policy(config, PolicyConfig(path="", height=4, width=4))
