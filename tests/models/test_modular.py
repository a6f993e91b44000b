"""FLUX.3, of which diffusers has blocks alone, beside what `test_any_pipeline` checks of every class:
there its pictures, velocities, gradients and grid are those of the plain modular pipeline."""

import diffusers
import pytest
import torch

from g2rpo.core.errors import UserError
from g2rpo.models.catalogue import FLOW_MAPS
from g2rpo.models.load import load_pipeline
from g2rpo.models.options import PolicyConfig
from tests.support.policies import guided_by, moved, policy_of, question, velocity
from tests.support.tiny_pipelines import flux3, save_tiny, tiny_pipeline
from tests.support.tolerances import network

KIND = "Flux3ModularPipeline"
SIZE = {"height": 32, "width": 48, "max_sequence_length": 160}
PROMPTS = ["a red circle", "a red circle " * 40]


def load(tuning="frozen", **options):
    return policy_of(tiny_pipeline(KIND), tuning, **SIZE, **options)


def inputs(policy):
    return question(policy, 0.8, 0.8, prompts=PROMPTS)


@torch.no_grad()
def test_prompts_in_windows_of_different_lengths_do_not_share_a_call():
    """The network attends to the padding of a window, so a longer one would change a picture."""
    policy = load()
    x, sigma, cond = inputs(policy)
    assert [len(row) for row in cond.ragged["prompt_embeds"]] == [80, 160]
    together = policy.velocity(x, sigma, cond)
    alone = [policy.velocity(x[i : i + 1], sigma[:1], cond.rows([i])) for i in range(2)]
    size = network(guided_by(policy) * together.abs().max())
    torch.testing.assert_close(together, torch.cat(alone), **size)


@torch.no_grad()
def test_guidance_extrapolates_from_the_empty_prompt():
    """u + g (c - u) of two calls of the network; wrong with the roles exchanged, or g less one."""
    policy = load(guidance_scale=3.5)
    x, sigma, cond = inputs(policy)
    guided = policy.velocity(x, sigma, cond)
    plain = load(guidance_scale=1.0)
    c, u = (plain.velocity(x, sigma, plain.encode(texts)) for texts in (PROMPTS, ["", ""]))
    size = network(guided_by(policy) * guided.abs().max())
    torch.testing.assert_close(guided, u + 3.5 * (c - u), **size)


def test_a_folder_is_loaded_and_the_block_that_rewrites_prompts_is_left_out(tmp_path):
    save_tiny(KIND, tmp_path)
    options = PolicyConfig(path=str(tmp_path), dtype="float32", **SIZE)
    loaded = load_pipeline(options, tuning="frozen")
    words = loaded.pipeline.tokenizer
    words.tokenizer = words  # which a processor has, and transformers' needs torchvision
    expected = velocity(own := load())
    size = network(guided_by(own) * expected.abs().max())  # weights lie elsewhere in memory
    torch.testing.assert_close(velocity(loaded.policy()), expected, **size)
    assert "prompt_upsampler" not in loaded.pipeline.components


def test_the_distilled_model_is_refused_by_its_reason_and_draws_with_an_adapter_of_the_base(
    tmp_path,
):
    """Its velocity is also a function of the time to which a step goes."""
    assert FLOW_MAPS[0] in dir(diffusers)
    (tmp_path / "modular_model_index.json").write_text(f'{{"_class_name": "{FLOW_MAPS[0]}"}}')
    with pytest.raises(UserError, match=r"a flow map: .*the time to which a step goes.*base model"):
        load_pipeline(PolicyConfig(path=str(tmp_path), **SIZE))

    moved(load("lora", lora_rank=2), 0.5).save(tmp_path / "adapter")
    torch.manual_seed(0)
    distilled = flux3(distilled=True)

    def picture():
        generator = torch.Generator().manual_seed(0)
        size = {"height": 32, "width": 48, "num_inference_steps": 2, "output_type": "pt"}
        return distilled(prompt=["a red circle"], generator=generator, **size)[0]

    before = picture()
    distilled.load_lora_weights(str(tmp_path / "adapter"))
    assert not torch.equal(picture(), before)
