"""`DiffusersPolicy` for every class of the catalogue, on tiny random pipelines, against diffusers' own pipelines."""

import copy
import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.evaluation.heldout import sample_images
from g2rpo.policies.flux import FluxPolicy
from g2rpo.policies.sd3 import SD3Policy
from g2rpo.rollout.engine import Engine
from g2rpo.seeding import generator_for
from g2rpo.types import Cond
from tests.by_hand import by_hand
from tests.tiny_pipelines import CLASSES, tiny_pipeline

PROMPTS = ["a red circle", "two blue square left of a circle"]
SIZE = {"height": 32, "width": 48, "max_sequence_length": 24}
STEPS = 5
BOTH = [(kind, guided) for kind in CLASSES for guided in ("on", "off")]


@functools.cache
def original(kind):
    return tiny_pipeline(kind)


def pipeline_of(kind):
    return copy.deepcopy(original(kind))


def scale_of(kind, guided):
    """The class's own guidance scale, or none; where the scale is an input of the network, another one."""
    described = CLASSES[kind]
    return described.guidance if guided == "on" else described.unguided if described.unguided is not None else 1.5


def load(kind, guided="on", **options):
    options = {**SIZE, "tuning": "frozen", "guidance_scale": scale_of(kind, guided), **options}
    return CLASSES[kind](pipeline_of(kind), **options)


def pictures(policy):
    return sample_images(policy, PROMPTS, policy.grid(STEPS), seed=5, batch_size=3, decode_batch_size=2)


def theirs(pipeline, kind, guided="on"):
    described, pipeline = CLASSES[kind], pipeline if hasattr(pipeline, "scheduler") else pipeline_of(kind)
    pipeline.set_progress_bar_config(disable=True)
    negative = {"negative_prompt": [""] * 2} if guided == "on" and "negative_prompt" not in described.unsupported else {}
    return pipeline(
        prompt=list(PROMPTS),
        num_inference_steps=STEPS,
        generator=[generator_for(5, "picture", i) for i in range(2)],
        output_type="pt",
        **{described.scale: scale_of(kind, guided)},
        **negative,
        **SIZE,
    )[0]


def difference(a, b):
    return float((a - b).abs().max())


@pytest.mark.parametrize(("kind", "guided"), BOTH)
def test_pictures_equal_the_pipelines_own_at_the_same_seed(kind, guided):
    """The same network, noise, grid and Euler steps; sums in another order differ by a few 1e-7 of [0, 1], which guidance
    multiplies by up to 5."""
    pipeline = pipeline_of(kind)
    expected = theirs(pipeline, kind, guided)
    policy = load(kind, guided)
    torch.testing.assert_close(pictures(policy), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(policy.grid(STEPS), pipeline.scheduler.sigmas, atol=1e-7, rtol=0)
    assert difference(*expected) > 0.05  # the prompts, and the noise, are seen


@pytest.mark.parametrize("kind", CLASSES)
def test_guidance_is_seen_in_the_pictures(kind):
    """Otherwise parity above would compare the same pictures twice."""
    assert difference(pictures(load(kind, "on")), pictures(load(kind, "off"))) > 1e-3


def inputs(policy):
    x = policy.noise([generator_for(i) for i in range(2)])
    return x, torch.tensor([0.8, 0.3]), policy.encode(PROMPTS)


@pytest.mark.parametrize(("kind", "guided"), BOTH)
@torch.no_grad()
def test_velocity_equals_a_call_of_the_transformer_by_hand(kind, guided):
    """Two rows with a sigma each, prompts of two lengths."""
    policy = load(kind, guided)
    x, sigma, cond = inputs(policy)
    expected = by_hand(pipeline_of(kind), x, sigma, PROMPTS, scale_of(kind, guided), SIZE)
    torch.testing.assert_close(policy.velocity(x, sigma, cond), expected, atol=2e-5, rtol=1e-5)
    assert float(expected.std()) > 0.01


@pytest.mark.parametrize(("kind", "hand"), [("FluxPipeline", FluxPolicy), ("StableDiffusion3Pipeline", SD3Policy)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_policies_written_by_hand_have_the_same_velocity(kind, hand, dtype):
    """Bit for bit: the same operations in the same order and dtypes."""
    described = load(kind, dtype=dtype)
    written = hand(pipeline_of(kind), **SIZE, tuning="frozen", dtype=dtype, guidance_scale=scale_of(kind, "on"))
    x, sigma, cond = inputs(described)
    assert torch.equal(x, written.noise([generator_for(i) for i in range(2)]))
    own = Cond.join([written.encode([prompt]) for prompt in PROMPTS])
    mine, its = described.velocity(x, sigma, cond), written.velocity(x, sigma, own)
    assert torch.equal(mine, its.float())
    assert torch.equal(described.decode(x), written.decode(x))


@pytest.mark.parametrize(("kind", "guided"), BOTH)
@torch.no_grad()
def test_rows_are_independent_and_counted(kind, guided):
    policy = load(kind, guided)
    seen = []
    policy.tuning.active.register_forward_hook(lambda module, args, out: seen.append(len(out[0])))
    x, sigma, cond = inputs(policy)
    together = policy.velocity(x, sigma, cond)
    assert sum(seen) == 2 * policy.shapes(12).rows
    alone = torch.cat([policy.velocity(x[i : i + 1], sigma[i : i + 1], cond.rows([i])) for i in range(2)])
    torch.testing.assert_close(together, alone, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", CLASSES)
@torch.no_grad()
def test_shapes_are_those_of_what_there_is(kind):
    policy = load(kind)
    x, _, cond = inputs(policy)
    shapes = policy.shapes(12)
    assert tuple(x.shape[1:]) == shapes.latent
    assert {*cond.tensors, *cond.ragged} == {*shapes.cond}
    assert all(tuple(value.shape[1:]) == shapes.cond[name] for name, value in cond.tensors.items())
    for name, values in cond.ragged.items():
        assert all(value.shape[1:] == shapes.cond[name][1:] for value in values)
        assert max(len(value) for value in values) <= shapes.cond[name][0]
    blank = policy.blank(1, 24)
    assert {name: value.dtype for name, value in blank.tensors.items()} == {n: v.dtype for n, v in cond.tensors.items()}


@pytest.mark.parametrize("kind", CLASSES)
def test_the_gradient_is_the_slope_of_the_velocity(kind):
    """Along the gradient of one matrix, central differences give its squared norm; float32 leaves about three digits."""
    policy = load(kind, tuning="full")
    x, sigma, cond = inputs(policy)
    weights = torch.randn(x.shape, generator=generator_for("weights"))

    def loss():
        return (policy.velocity(x, sigma, cond) * weights).double().mean()

    loss().backward()
    matrix = next(p for n, p in policy.tuning.named().items() if n.endswith("to_q.weight"))
    slope = float(matrix.grad.double().pow(2).sum())
    step = 0.02 / slope**0.5 * matrix.grad * float(matrix.detach().norm())
    with torch.no_grad():
        matrix.add_(step)
        above = loss()
        matrix.sub_(2 * step)
        below = loss()
    length = float(step.norm() * 2)
    assert slope > 1e-12
    assert float(above - below) / length == pytest.approx(slope**0.5, rel=0.02)


def perturb(policy, size):
    with torch.no_grad():
        for p in policy.trainable_parameters():
            p.add_(size * torch.randn(p.shape, generator=generator_for("perturb")))
    return policy


@pytest.mark.parametrize("kind", CLASSES)
def test_a_saved_lora_loads_in_plain_diffusers_and_draws_the_same(kind, tmp_path):
    plain = pictures(load(kind))
    policy = load(kind, tuning="lora", lora_rank=4, lora_alpha=8)
    torch.testing.assert_close(pictures(policy), plain, atol=1e-6, rtol=0)
    perturb(policy, 0.1).save(tmp_path)
    tuned = pictures(policy)
    assert difference(tuned, plain) > 1e-3
    with policy.base():
        torch.testing.assert_close(pictures(policy), plain, atol=1e-6, rtol=0)
    pipeline = pipeline_of(kind)
    pipeline.load_lora_weights(tmp_path, weight_name="pytorch_lora_weights.safetensors")
    torch.testing.assert_close(tuned, theirs(pipeline, kind), atol=1e-5, rtol=0)
    sampling = load(kind)
    sampling.load(tmp_path)
    torch.testing.assert_close(pictures(sampling), tuned, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", CLASSES)
def test_fully_tuned_weights_load_with_from_pretrained(kind, tmp_path):
    policy = perturb(load(kind, tuning="full", keep_base=True), 0.01)
    policy.save(tmp_path)
    pipeline = pipeline_of(kind)
    pipeline.transformer = type(pipeline.transformer).from_pretrained(tmp_path)
    tuned = pictures(policy)
    torch.testing.assert_close(tuned, theirs(pipeline, kind), atol=1e-5, rtol=0)
    with policy.base():
        assert difference(pictures(policy), tuned) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tuning", ["lora", "full"])
@pytest.mark.parametrize("kind", CLASSES)
def test_ratio_is_exactly_one_before_the_first_update(kind, tuning, dtype):
    """The rollout's log-prob against the training pass, bit for bit, with blocks that are computed anew in backward."""
    policy = load(kind, tuning=tuning, dtype=dtype, gradient_checkpointing=True)
    algorithm = GranularGRPO(group_size=2, branch_steps=(1,), granularities=(1,))
    sigmas = policy.grid(3)
    kernel = algorithm.kernel(sigmas)
    engine = Engine(policy=policy, cond=policy.encode(PROMPTS[:1]), sigmas=sigmas, anchor_dtype=dtype, sample_dtype=dtype)
    (rollout,) = engine.rollout(algorithm.plans(3), 2, kernel, generator_for)
    (t,) = rollout.transitions
    sigma = sigmas[t.step]
    velocity = policy.velocity(t.x, sigma[None], engine.cond)
    log_prob = kernel(t.x, velocity.float(), sigma, sigmas[t.step + 1]).log_prob(t.x_next)
    assert torch.equal((log_prob - t.old_log_prob).exp(), torch.ones(2))
    log_prob[0].backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in policy.trainable_parameters())
    assert sum(p.grad is not None and bool(p.grad.any()) for p in policy.trainable_parameters()) > 0


@pytest.mark.parametrize("kind", CLASSES)
@torch.no_grad()
def test_calls_in_several_threads_do_not_meet(kind):
    """Decoding and scoring run beside the rollout; pipelines keep the state of a call on themselves."""
    policy = load(kind)
    x, sigma, cond = inputs(policy)
    calls = [
        lambda: policy.velocity(x, sigma, cond),
        lambda: policy.velocity(x[:1], sigma[1:], cond.rows([1])),
        lambda: policy.decode(x),
    ]
    expected = [call() for call in calls]
    with ThreadPoolExecutor(3) as pool:
        results = [pool.submit(call) for _ in range(4) for call in calls]
    assert all(torch.equal(result.result(), expected[i % 3]) for i, result in enumerate(results))
