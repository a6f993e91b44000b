"""`policy.autocast=false`: calls as diffusers' pipelines make them, with adapters rounded as
autocast rounds them."""

import pytest
import torch

from g2rpo.core.data import Prompt
from g2rpo.core.noise import generator_for
from g2rpo.lab.check_model import drawn_by
from g2rpo.models.blueprint import read_blueprint, size_of
from g2rpo.models.catalogue import SPECS
from g2rpo.models.load import build_policy
from g2rpo.models.modular import pipeline_class
from g2rpo.models.options import PolicyConfig
from g2rpo.models.pipelines import read_pipeline
from tests.support import policies
from tests.support.policies import build_on_meta
from tests.support.tiny_pipelines import tiny_pipeline
from tests.support.variants import few


def load(directory, **options):
    own = {"dtype": torch.bfloat16, "lora_rank": 2, **options}
    return policies.moved(policies.load(directory, **own))


@pytest.mark.parametrize("model", few(["flux_directory", "sd3_directory"], "sd3_directory".__eq__))
def test_adapters_compute_in_bfloat16_and_learn_in_float32(request, model):
    """Both ways are off from float32 by what bfloat16 rounds, and by about as much; gradients reach
    the float32 factors."""
    directory = request.getfixturevalue(model)
    plain, cast = load(directory, autocast=False), load(directory)
    products = []
    for name, module in plain.pipeline.transformer.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_hook(
                lambda module, given, answer: products.append(answer.dtype)
            )
    exact = load(directory)
    exact.pipeline.transformer.float()
    exact.dtype = exact._latent_dtype = torch.float32
    with torch.no_grad():
        x, sigma, cond = policies.question(plain, 0.9, 0.5)
        wide = type(cond)({name: value.float() for name, value in cond.tensors.items()})
        reference = exact.velocity(x, sigma, wide)
        errors = [
            float((p.velocity(x, sigma, cond).float() - reference).norm() / reference.norm())
            for p in (plain, cast)
        ]
    assert products and set(products) == {torch.bfloat16}
    assert 0 < errors[0] < 3 * errors[1]
    plain.velocity(x, sigma, cond).float().square().sum().backward()
    # the last block of SD3 gives up the text
    grads = [p.grad for p in plain.trainable_parameters() if p.grad is not None]
    assert len(grads) > 0.8 * len(plain.trainable_parameters())
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads)
    assert sum(map(torch.any, grads)) > len(grads) / 2


AS_LOADED = [
    ("FluxPipeline", "lora", {"guidance_scale": 3.5}),
    ("Krea2Pipeline", "frozen", {"guidance_scale": 0.0}),
    ("WanPipeline", "full", {"guidance_scale": 0.0}),
    ("WanPipeline", "lora", {"guidance_scale": 0.0}),
]


@pytest.mark.parametrize(
    ("kind", "tuning", "options"), few(AS_LOADED, AS_LOADED[:2].__contains__), ids=str
)
@torch.no_grad()
def test_what_loading_in_bfloat16_leaves_in_float32_is_not_rounded(kind, tuning, options, tmp_path):
    """Frequencies of text encoders, Wan's embedding of time and tables, norms: velocities are the
    pipeline's own to the bit."""
    tiny_pipeline(kind).save_pretrained(tmp_path)
    options |= {"dtype": torch.bfloat16, "lora_rank": 2, "autocast": False}
    pipeline = read_pipeline(pipeline_class(kind), tmp_path, torch.bfloat16)
    config = PolicyConfig(path="", **policies.small(pipeline), **options)
    own = drawn_by(pipeline, SPECS[kind], config, [Prompt("a red circle")])
    policy = policies.load(tmp_path, tuning=tuning, **options)
    with policy.base():
        mine = policy.velocity(own.noise, own.sigmas[:1], policy.encode(["a red circle"]))
    assert torch.equal(mine, own.velocity)


def test_adapters_of_convolutions_compute_in_bfloat16_too(sd3_directory):
    plain = load(sd3_directory, autocast=False, lora_targets=["pos_embed.proj"])
    x, sigma, cond = policies.question(plain, 0.9, 0.5)
    velocity = plain.velocity(x, sigma, cond)
    with plain.base():
        assert not torch.equal(plain.velocity(x, sigma, cond), velocity)
    assert torch.equal(plain.velocity(x, sigma, cond), velocity)
    velocity.square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.any() for p in plain.trainable_parameters())


@torch.no_grad()
def test_wans_vae_computes_in_float32(tmp_path):
    """As in diffusers' examples, from the weights as they are stored; and so plans count it."""
    tiny_pipeline("WanPipeline").save_pretrained(tmp_path)
    size = {"height": 32, "width": 32, "num_frames": 3}
    half, whole = (
        PolicyConfig(path=str(tmp_path), dtype=dtype, **size) for dtype in ("bfloat16", "float32")
    )
    policies = [build_policy(config, tuning="frozen") for config in (half, whole)]
    x = policies[0].noise([generator_for(0)])
    pictures = [policy.decode(x) for policy in policies]
    assert policies[0].transformer.dtype == torch.bfloat16 and torch.equal(*pictures)
    planned = build_on_meta(read_blueprint(half), half)
    assert size_of(planned.pipeline.vae) == size_of(policies[1].pipeline.vae)
