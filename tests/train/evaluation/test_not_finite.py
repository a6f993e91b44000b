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
from tests.support.tolerances import EXACT

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


@pytest.mark.parametrize(
    ("shape", "value"), [((5, 3, 4, 4), math.nan), ((5, 6, 3, 4, 4), -math.inf)]
)
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
    expected = scores(images)
    expected[1] = math.nan
    for masked in (scores(damaged), scores(images, latents=damaged)):
        torch.testing.assert_close(masked, expected, **EXACT, equal_nan=True)


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
