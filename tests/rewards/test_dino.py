"""The reward on DINOv2, on tiny random ones: which patches count, by hand."""

import pytest
import torch
from PIL import Image
from transformers import CLIPVisionConfig, CLIPVisionModel

from g2rpo.core.data import Prompt
from g2rpo.core.images import to_pil, to_uint8
from g2rpo.rewards.dino import IMAGENET_MEAN, IMAGENET_STD, DinoSimilarity
from tests.rewards.learned import save_dino
from tests.support.pictures import noise
from tests.support.refusals import refusal
from tests.support.tolerances import near, network


@pytest.fixture(scope="module", params=[0, 2], ids=["dinov2", "dinov2_with_registers"])
def path(request, tmp_path_factory):
    return save_dino(tmp_path_factory.mktemp("dino"), registers=request.param)


def pictures(count):
    return to_uint8(noise(count, 16, 16)) / 255


def as_input(folder, picture):
    to_pil(to_uint8(picture[None]))[0].save(folder / "input.png")
    return Prompt("make it red", [str(folder / "input.png")])


def test_the_half_of_the_patches_that_agree_best_counts(path, tmp_path):
    """By hand with the model's own classes: 16 patches of 4 pixels, of which 8 count. float32
    roundings of two layers."""
    before, after = pictures(2)
    both = torch.stack([after, before])
    reward = DinoSimilarity(path, size=18)
    scores = reward(both, [as_input(tmp_path, before)] * 2)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    states = reward.dino.model(pixel_values=(both - mean) / std).last_hidden_state[:, -16:]
    cosines = torch.nn.functional.cosine_similarity(*states, dim=-1).sort().values
    assert cosines.max() - cosines.min() > 0.1
    wanted = torch.tensor([float(cosines[8:].mean()), 1.0])
    torch.testing.assert_close(scores, wanted, **network(1.0))


def test_what_cannot_be_kept_is_refused_ahead(path, tmp_path):
    said = refusal(f"rewards.dino_similarity.options.path={path}")
    assert "rewards.dino_similarity: none of 2000 prompts has an input picture" in said
    with pytest.raises(ValueError, match="at least a patch, 4, got 3"):
        DinoSimilarity(path, size=3)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    CLIPVisionModel(CLIPVisionConfig(**sizes, intermediate_size=16)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is no DINOv2"):
        DinoSimilarity(tmp_path)


def test_an_input_of_another_shape_is_squashed_alike(path, tmp_path):
    before = pictures(1)[0]
    prompt = as_input(tmp_path, before)
    Image.open(prompt.images[0]).resize((32, 16), Image.Resampling.NEAREST).save(prompt.images[0])
    wide = before.repeat_interleave(2, 2)
    assert DinoSimilarity(path, size=16)(wide[None], [prompt])[0] == near(1, network(1.0))
