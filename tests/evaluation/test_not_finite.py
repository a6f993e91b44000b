"""Pictures that are not finite: no score, and if there is no other a message that names the part of
the model."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from g2rpo.core.errors import Stopped
from g2rpo.core.images import to_uint8
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.rollout.scoring import score
from tests.app.test_evaluate import judging
from tests.support.commands import g2rpo, write_tiny
from tests.support.runs import brightness, trainer


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
        v = super().velocity(x, sigma, cond)
        if self.part == "velocity":
            v = torch.where((sigma < self.below)[:, None, None, None], self.value, v)
        return v

    def decode(self, x):
        images = super().decode(x).clone()
        if self.part == "picture":
            images[:, 0, 1, 2] = self.value
        return images


@pytest.mark.parametrize(
    ("policy", "part"),
    [
        (Faulty("picture"), "the VAE's picture of finite latents"),
        (Faulty("picture", math.inf), "the VAE's picture of finite latents"),
        (Faulty("velocity"), "the transformer's velocity at step 1 of 6"),
        (
            Faulty("velocity", -math.inf, below=0.8),
            r"the transformer's velocity at step [23456] of 6",
        ),
        (Faulty("text"), "the text encoder's"),
    ],
)
def test_a_base_without_any_finite_picture_ends_the_run_and_names_the_part(tmp_path, policy, part):
    with pytest.raises(
        Stopped, match=f"{part}.*NaN or infinity when computed in bfloat16.*policy.dtype=float32"
    ):
        next(trainer(tmp_path, policy=policy).train())
    part, judgement = part.partition(" at step")[0], judging(tmp_path / "evaluation")
    with pytest.raises(Stopped, match=part):
        trainer(None, policy=policy).sample(["0"])
    with pytest.raises(Stopped, match=part):
        judgement.run(
            judgement.missing(), policy, lambda: None, {"bright": brightness, "dark": brightness}
        )


def test_a_base_without_any_score_ends_the_run():
    t = trainer(
        None, rewards={"bright": lambda images, prompts: torch.full((len(images),), torch.nan)}
    )
    with pytest.raises(
        Stopped, match=r"no reward \(bright\) gave a score to any of the base's 3 held-out pictures"
    ):
        next(t.train())


@pytest.mark.parametrize("shape", [(5, 3, 4, 4), (5, 6, 3, 4, 4)], ids=["pictures", "clips"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_picture_that_is_partly_not_finite_has_no_score_and_no_reward_sees_the_number(
    shape, value
):
    def pedantic(images, prompts):
        assert images.isfinite().all()
        return brightness(images, prompts)

    images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    (whole,) = score({"it": pedantic}, images, [""] * 5)
    damaged = images.clone()
    damaged[1].view(-1)[7] = value
    (masked,) = score({"it": pedantic}, damaged, [""] * 5)
    assert masked[1].isnan() and torch.equal(masked[[0, 2, 3, 4]], whole[[0, 2, 3, 4]])
    (by_latents,) = score({"it": pedantic}, images, [""] * 5, latents=damaged)
    assert torch.equal(by_latents.isnan(), masked.isnan())


def test_members_that_are_not_finite_are_masked_out_of_their_groups():
    class Policy(GaussianPolicy):
        def decode(self, x):
            return (
                super()
                .decode(x)
                .where(torch.arange(len(x))[:, None, None, None] % 4 > 0, torch.nan)
            )

    row = trainer(None, policy=Policy(), rewards={"bright": brightness}).iterate()
    assert row["missing_scores"] == pytest.approx(0.25, abs=0.05) and row["skipped_updates"] == 0


def test_numbers_that_are_not_finite_become_black_in_8_bits():
    levels = to_uint8(torch.tensor([math.nan, math.inf, -math.inf, 0.5, 2.0]))
    assert levels.tolist() == [0, 255, 0, 128, 255]


def damage(pipeline, folder, part, name):
    """Makes a copy of a pipeline with infinity in the first weight of a part whose name begins
    so."""
    copy = shutil.copytree(pipeline, folder)
    (file,) = (copy / part).glob("*.safetensors")
    weights = load_file(file)
    key = next(key for key in sorted(weights) if key.startswith(name))
    weights[key].view(-1)[0] = math.inf
    save_file(weights, file, metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize(
    ("part", "name", "said"),
    [
        ("vae", "decoder.conv_out.bias", "the VAE's picture of finite latents"),
        ("transformer", "proj_out.bias", "the transformer's velocity at step 1 of 4"),
        (
            "text_encoder_2",
            "encoder.final_layer_norm",
            "the text encoder's prompt_embeds of 'a red circle'",
        ),
    ],
)
def test_a_pipeline_that_overflows_is_a_message_of_sample_and_train(
    capsys, tmp_path, flux_directory, part, name, said
):
    """An infinite number before a clamp to [0, 1] would be white."""
    broken = damage(flux_directory, tmp_path / "broken", part, name)
    out = tmp_path / "out"
    code, _, err = g2rpo(
        capsys,
        "sample",
        "a red circle",
        "--model",
        broken,
        "--size",
        "32",
        "--steps",
        "4",
        "--out",
        out,
    )
    assert (
        code == 1
        and said in err
        and "NaN or infinity when computed in" in err
        and "Traceback" not in err
    ), err
    assert not list(tmp_path.glob("out/*.png"))
    config = write_tiny(tmp_path, broken)
    code, _, err = g2rpo(capsys, "train", config, "--run-dir", tmp_path / "run")
    assert code == 1 and said in err and "Traceback" not in err, err
