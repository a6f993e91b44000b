"""Rewards on DINOv2, on tiny random ones: which patches count, by hand, and what clips score."""

import pytest
import torch
from PIL import Image
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
)
from transformers import Dinov2WithRegistersModel as WithRegisters

from g2rpo.assembly.checks import check
from g2rpo.assembly.config import load_config
from g2rpo.core.data import Prompt
from g2rpo.core.errors import RewardFailed, UserError
from g2rpo.core.images import to_pil
from g2rpo.rewards.dino import IMAGENET_MEAN, IMAGENET_STD, ClipConsistency, DinoSimilarity, Motion
from g2rpo.rollout.scoring import score

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 12,
    "patch_size": 4,
}


@pytest.fixture(scope="module", params=["dinov2", "dinov2_with_registers"])
def path(request, tmp_path_factory):
    torch.manual_seed(0)
    own = Dinov2Model(Dinov2Config(**SIZES))
    if request.param != "dinov2":
        own = WithRegisters(Dinov2WithRegistersConfig(**SIZES, num_register_tokens=2))
    own.save_pretrained(folder := tmp_path_factory.mktemp(request.param))
    return str(folder)


def pictures(count, side=16):
    levels = torch.randint(
        0, 256, (count, 3, side, side), generator=torch.Generator().manual_seed(count)
    )
    return levels.float() / 255


def as_input(folder, picture, text="make it red"):
    to_pil((255 * picture[None]).to(torch.uint8))[0].save(folder / "input.png")
    return Prompt(text, [str(folder / "input.png")])


def test_the_half_of_the_patches_that_agree_best_counts(path, tmp_path):
    """By hand with the model's own classes: 16 patches of 4 pixels, of which 8 count."""
    before, after = pictures(2)
    reward = DinoSimilarity(path, size=18)
    scores = reward(torch.stack([after, before]), [as_input(tmp_path, before)] * 2)
    model = reward.dino.model
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    states = model(pixel_values=(torch.stack([after, before]) - mean) / std).last_hidden_state[
        :, -16:
    ]
    cosines = torch.nn.functional.cosine_similarity(*states, dim=-1).sort().values
    assert cosines.max() - cosines.min() > 0.1
    torch.testing.assert_close(
        scores, torch.tensor([float(cosines[8:].mean()), 1.0]), atol=1e-5, rtol=0
    )


def test_what_cannot_be_kept_is_refused_ahead(path, tmp_path):
    with pytest.raises(
        UserError, match=r"rewards\.dino_similarity: none of 2000 prompts has an input picture"
    ):
        check(load_config("scenes", [f"rewards.dino_similarity.options.path={path}"]))
    with pytest.raises(ValueError, match="at least a patch, 4, got 3"):
        DinoSimilarity(path, size=3)
    sizes = {**SIZES, "intermediate_size": 16}
    CLIPVisionModel(CLIPVisionConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is no DINOv2"):
        DinoSimilarity(tmp_path)


def test_steady_clips_are_consistent_and_moving_ones_move(path):
    frame, other = pictures(2)
    still, flicker = torch.stack([frame] * 3), torch.stack([frame, other, frame])
    reward = ClipConsistency(path, size=16)
    features = reward.dino((255 * torch.stack([frame, other])).round().to(torch.uint8))[0]
    cosine = float((features[0] * features[1]).sum())
    steady, moved = score(
        {"steady": reward, "moved": Motion()}, torch.stack([still, flicker]), ["a", "b"]
    )
    torch.testing.assert_close(steady, torch.tensor([1.0, (cosine + (1 + cosine) / 2) / 2]))
    torch.testing.assert_close(
        moved, torch.tensor([0.0, 255 * float((frame - other).abs().mean())])
    )
    with pytest.raises(RewardFailed, match="is for clips of two frames or more"):
        score({"moved": Motion()}, frame[None], ["a"])


def test_an_input_of_another_shape_is_squashed_alike(path, tmp_path):
    before = pictures(1)[0]
    prompt = as_input(tmp_path, before)
    Image.open(prompt.images[0]).resize((32, 16), Image.Resampling.NEAREST).save(prompt.images[0])
    wide = before.repeat_interleave(2, 2)
    assert DinoSimilarity(path, size=16)(wide[None], [prompt])[0] == pytest.approx(1, abs=1e-5)
