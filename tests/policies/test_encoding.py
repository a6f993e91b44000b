"""Pictures from files as latents: of every pipeline what its own decoding gives its VAE back."""

import copy

import numpy as np
import pytest
import torch
from PIL import Image

from g2rpo.core.errors import UserError
from g2rpo.core.input_pictures import cut
from g2rpo.policies.anyflow import DiffusersPolicy
from g2rpo.policies.catalogue import SPECS
from g2rpo.policies.encoding import Layout, Undecoded, as_asked, mode_of
from g2rpo.policies.replay import OneStep
from tests.policies.test_any_pipeline import original
from tests.support.policies import make
from tests.support.tiny_pipelines import CLASSES
from tests.support.variants import few


@pytest.fixture
def files(tmp_path):
    """A picture of the policy's proportions, and a higher one that is cropped."""
    for name, size in (("wide.png", (96, 64)), ("high.png", (48, 80))):
        levels = np.random.default_rng(len(name)).integers(0, 256, (*size[::-1], 3), np.uint8)
        Image.fromarray(levels).save(tmp_path / name)
    return [str(tmp_path / "wide.png"), str(tmp_path / "high.png")]


@pytest.mark.parametrize(
    "kind", few(CLASSES, ("FluxPipeline", "StableDiffusion3Pipeline").__contains__)
)
def test_latents_are_what_the_vae_would_decode_again(kind, files):
    """In float32: scale and shift are differences of numbers of size 1, so 1e-5 of the largest
    entry."""
    size = {"height": 32, "width": 32, **({"num_frames": 1} if SPECS[kind].video else {})}
    policy = make(DiffusersPolicy.of(SPECS[kind]), copy.deepcopy(original(kind)), **size)
    if kind == "Lumina2Pipeline":  # its pipeline takes any VAE for one of scale 8
        with pytest.raises(UserError, match="and decodes"):
            policy.latents_of(files)
        return
    latents = policy.latents_of(files)
    assert latents.shape[1:] == policy.noise([torch.Generator()]).shape[1:]
    parts = {
        "scheduler": OneStep(policy.pipeline.scheduler.config, None),
        "vae": Undecoded(policy.pipeline.vae),
    }
    for row, file in enumerate(files):
        again = policy._replay(policy.blank(1, 1), latents[row : row + 1], parts)
        asked = as_asked(cut(file, 32, 32), policy.pipeline.vae, again.ndim == 5)
        with torch.no_grad():
            encoded = mode_of(policy.pipeline.vae.encode(asked))
        near = 1e-5 * float(encoded.abs().max())
        torch.testing.assert_close(again, encoded, atol=near, rtol=0)


@pytest.mark.parametrize("kind", ["LTXPipeline", "StableDiffusion3Pipeline"])
def test_the_order_of_latents_does_not_depend_on_the_dtype(kind):
    """bfloat16 has no whole numbers above 256: of which latents have more entries here."""
    size = {"height": 32, "width": 32, **({"num_frames": 1} if SPECS[kind].video else {})}
    orders = []
    for dtype in (torch.float32, torch.bfloat16):
        own = copy.deepcopy(original(kind))
        policy = make(DiffusersPolicy.of(SPECS[kind]), own, dtype=str(dtype)[6:], **size)
        orders.append(policy._layout().order)
    assert len(orders[0]) > 256 and torch.equal(*orders)


def test_a_picture_is_cropped_in_its_middle(tmp_path):
    """Of three vertical stripes the middle one is left. Lanczos' filter sees three pixels beyond an
    edge, of which there are five in one."""
    levels = np.repeat(np.array([0, 128, 255], np.uint8), 40)[None, :, None]
    Image.fromarray(np.broadcast_to(levels, (40, 120, 3)).copy()).save(tmp_path / "a.png")
    found = cut(str(tmp_path / "a.png"), 8, 8)
    assert found.shape == (1, 3, 8, 8)
    torch.testing.assert_close(found[..., 3:5], torch.full((1, 3, 8, 2), 128 / 255))


def test_a_pipeline_that_mixes_latents_is_refused():
    with pytest.raises(UserError, match="in another order"):
        Layout.of(lambda x: x.flip(1) + x, torch.zeros(1, 4))
