"""Pictures that are not finite: no score, and if there is no other a message that names the part of
the model."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from g2rpo.core.errors import Stopped
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.rollout.scoring import score
from tests.support.commands import g2rpo, write_tiny
from tests.support.runs import brightness, trainer

VAE = "the VAE's picture of finite latents"


class Faulty(GaussianPolicy):
    """Its velocities below `below` on the sigma axis, or its pictures, are `value` (NaN, infinity)
    in some of their entries."""

    def __init__(self, part, value=math.nan, below=2.0):
        super().__init__()
        self.part, self.value, self.below, self.dtype = part, value, below, torch.bfloat16

    def encode(self, prompts):
        cond = super().encode(prompts)
        if self.part == "text":
            next(iter(cond.tensors.values()))[:] = self.value
        return cond

    def velocity(self, x, sigma, cond):
        wrong = (sigma < self.below)[:, None, None, None] & (self.part == "velocity")
        return super().velocity(x, sigma, cond).masked_fill(wrong, self.value)

    def decode(self, x):
        images = super().decode(x).clone()
        if self.part == "picture":
            images[:, 0, 1, 2] = self.value
        return images


@pytest.mark.parametrize(
    ("policy", "part"),
    [
        (Faulty("picture"), VAE),
        (Faulty("picture", math.inf), VAE),
        (Faulty("velocity"), "the transformer's velocity at step 1 of 6"),
        (Faulty("velocity", -math.inf, below=0.8), "the transformer's velocity at step [23456] of"),
        (Faulty("text"), "the text encoder's"),
    ],
)
def test_a_base_without_any_finite_picture_ends_the_run_and_names_the_part(tmp_path, policy, part):
    said = f"{part}.*NaN or infinity when computed in bfloat16.*policy.dtype=float32"
    with pytest.raises(Stopped, match=said):
        next(trainer(tmp_path, policy=policy).train())
    with pytest.raises(Stopped, match=part.partition(" at step")[0]):
        trainer(None, policy=policy).sample(["0"])


def test_a_base_without_any_score_ends_the_run():
    def silent(images, prompts):
        return torch.full((len(images),), torch.nan)

    said = r"no reward \(bright\) gave a score to any of the base's 3 held-out pictures"
    with pytest.raises(Stopped, match=said):
        next(trainer(None, rewards={"bright": silent}).train())


@pytest.mark.parametrize("shape", [(5, 3, 4, 4), (5, 6, 3, 4, 4)], ids=["pictures", "clips"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_picture_that_is_partly_not_finite_has_no_score_and_no_reward_sees_the_number(
    shape, value
):
    def pedantic(images, prompts):
        assert images.isfinite().all()
        return brightness(images, prompts)

    def scores(images, **more):
        return score({"it": pedantic}, images, [""] * 5, **more)[0]

    images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    damaged = images.clone()
    damaged[1].view(-1)[7] = value
    whole, masked = scores(images), scores(damaged)
    assert masked[1].isnan() and torch.equal(masked[[0, 2, 3, 4]], whole[[0, 2, 3, 4]])
    assert torch.equal(scores(images, latents=damaged).isnan(), masked.isnan())


def test_members_that_are_not_finite_are_masked_out_of_their_groups():
    class Policy(GaussianPolicy):
        def decode(self, x):
            images = super().decode(x)
            images[::4] = torch.nan
            return images

    row = trainer(None, policy=Policy(), rewards={"bright": brightness}).iterate()
    assert row["missing_scores"] == pytest.approx(0.25, abs=0.05) and row["skipped_updates"] == 0


def test_a_pipeline_that_overflows_is_a_message_of_train(capsys, tmp_path, flux_directory):
    """An infinite number before a clamp to [0, 1] would be white."""
    broken = shutil.copytree(flux_directory, tmp_path / "broken")
    (file,) = (broken / "vae").glob("*.safetensors")
    weights = load_file(file)
    weights["decoder.conv_out.bias"][0] = math.inf
    save_file(weights, file, metadata={"format": "pt"})
    config = write_tiny(tmp_path, broken)
    code, _, err = g2rpo(capsys, "train", config, "--run-dir", tmp_path / "run")
    assert code == 1 and "Traceback" not in err, err
    assert VAE in err and "NaN or infinity when computed in" in err
