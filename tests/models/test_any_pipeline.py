"""`DiffusersPolicy` for every class of the catalogue, on tiny random pipelines, against diffusers'
own pipelines."""

import copy
import functools
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FluxPipeline, UniPCMultistepScheduler
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image
from safetensors.torch import load_file, save_file

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.core.data import Precision, Prompt
from g2rpo.core.errors import UserError
from g2rpo.core.noise import generator_for
from g2rpo.lab import check_model
from g2rpo.lab.check_model import CHECKED_STEPS, REMEDIES, checks, drawn_by, prompts_for, reported
from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.models.catalogue import SPECS
from g2rpo.models.options import PolicyConfig
from g2rpo.models.pipelines import cast, check_options, choose_attention, read_pipeline
from g2rpo.models.spec import PICTURE_SIZES
from g2rpo.rollout.engine import Engine
from g2rpo.train.evaluation.sampler import Sampler
from tests.support.policies import PROMPTS, guided_by, make, policy_of, question, small
from tests.support.tiny_pipelines import CLASSES, tiny_pipeline
from tests.support.tolerances import network, rounding
from tests.support.variants import few

STEPS = 5
DIFFERENT = (
    "FluxPipeline",
    "StableDiffusion3Pipeline",
    "ZImagePipeline",
    "QwenImageEditPlusPipeline",
    "WanPipeline",
)
"""Packed latents, plain ones, lists of latents, input pictures, clips."""
MASKED = "QwenImagePipeline"
GUIDED_AND_NOT = few(
    product(CLASSES, ("on", "off")),
    {
        (kind, "off" if kind == "ZImagePipeline" else "on") for kind in (*DIFFERENT, MASKED)
    }.__contains__,
)
A_FEW = few(CLASSES, DIFFERENT.__contains__)


def only(*quick):
    """Every class, and these ones in `make test`."""
    return few(CLASSES, quick.__contains__)


@functools.cache
def original(kind):
    return tiny_pipeline(kind)


def pipeline_of(kind):
    return copy.deepcopy(original(kind))


def scale_of(kind, guided):
    """The class's own guidance scale (4 where that is none), or none; where it is an input of the
    network, another one."""
    spec = SPECS[kind]
    on = spec.guidance if spec.guides(spec.guidance) else 4.0
    return on if guided == "on" else spec.unguided if spec.unguided is not None else 1.5


@pytest.fixture(scope="module")
def pictures_to_edit(tmp_path_factory):
    """Input pictures of two shapes."""
    folder = tmp_path_factory.mktemp("pictures")
    for name, size in (("tall", (40, 60)), ("wide", (64, 32))):
        values = torch.rand(*size[::-1], 3, generator=generator_for(name))
        Image.fromarray((255 * values).byte().numpy()).save(folder / f"{name}.png")
    return folder


def smaller(dimensions, area, ratio):
    width, height, *rest = dimensions(area, ratio)
    return (width // 32, height // 32, *rest)


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    """Pipelines that edit bring input pictures to a megapixel; here to a thousandth."""
    sizes = [(32, 32), (24, 40), (40, 24)]
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", sizes)
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        own = functools.partial(smaller, module.calculate_dimensions)
        monkeypatch.setattr(module, "calculate_dimensions", own)


@pytest.fixture
def prompts(kind, pictures_to_edit):
    """Two prompts of different lengths; for models that edit, with pictures."""
    most = SPECS[kind].most_pictures if SPECS[kind].pictured else 0
    tall, wide = (str(pictures_to_edit / f"{name}.png") for name in ("tall", "wide"))
    images = [tall][:most], [wide, tall][:most]
    return [Prompt(text, list(paths)) for text, paths in zip(PROMPTS[:2], images, strict=True)]


def size_of(kind):
    """LTX-Video, Sana and Qwen-Image-2.1 want multiples of 32, whatever their tiny VAEs could
    do."""
    of_32 = ("LTXPipeline", "SanaPipeline", "QwenImage21Pipeline")
    return {**small(original(kind)), "width": 64 if kind in of_32 else 48}


def load(kind, guided="on", **options):
    own = {"tuning": "frozen", "guidance_scale": scale_of(kind, guided), **options}
    return make(CLASSES[kind], pipeline_of(kind), **{**size_of(kind), **own})


def pictures(policy, prompts):
    return sampler(policy).pictures(prompts)


def sampler(policy):
    """On the scheduler's grid; SD3's is another one than its shift makes."""
    shift = "scheduler" if policy.spec is SPECS["StableDiffusion3Pipeline"] else "model"
    return Sampler(
        policy=policy, shift=shift, num_steps=STEPS, seed=5, batch_size=3, decode_batch_size=2
    )


def theirs(pipeline, kind, prompts, guided="on"):
    """The pipeline's own pictures, or clips."""
    options = PolicyConfig(path="", **size_of(kind), guidance_scale=scale_of(kind, guided))
    return drawn_by(pipeline, SPECS[kind], options, prompts, STEPS).pictures


def drawing(policy):
    """The tolerance of pictures: the steps, whose lengths add up to 1, and the VAE."""
    return network(guided_by(policy), passes=2)


def moving(policy, velocity):
    """The tolerance of velocities."""
    return network(guided_by(policy) * velocity.abs().max())


def difference(a, b):
    return float((a - b).abs().max())


@pytest.mark.parametrize(("kind", "guided"), GUIDED_AND_NOT)
def test_pictures_equal_the_pipelines_own_at_the_same_seed(kind, guided, prompts):
    """The same network, noise, grid and Euler steps; only the order of sums differs."""
    pipeline = pipeline_of(kind)
    expected = theirs(pipeline, kind, prompts, guided)
    policy = load(kind, guided)
    torch.testing.assert_close(pictures(policy, prompts), expected, **drawing(policy))
    torch.testing.assert_close(
        sampler(policy).sigmas, pipeline.scheduler.sigmas, **rounding(4, size=1.0)
    )
    assert difference(*expected) > 0.05  # the prompts, and the noise, are seen


@pytest.mark.parametrize("truncate", [False, True])
@torch.no_grad()
def test_times_in_bfloat16_are_those_of_the_pipeline_or_truncated_and_whole(truncate):
    """FLUX's pipeline rounds 1000 sigma to bfloat16 (834.8 to 836); truncated times, 834, are not
    (to 832)."""
    kind = "FluxPipeline"
    policy = load(kind, dtype=torch.bfloat16, truncate_timesteps=truncate)
    x, sigma, cond = question(policy, 0.8348)
    times = torch.tensor([834.0]) if truncate else torch.tensor([834.8]).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected = policy.pipeline.transformer(
            hidden_states=x.bfloat16(),
            timestep=times / 1000,
            guidance=torch.tensor([policy.guidance_scale]),
            encoder_hidden_states=cond.tensors["prompt_embeds"],
            pooled_projections=cond.tensors["pooled_prompt_embeds"],
            txt_ids=cond.tensors["text_ids"][0],
            img_ids=policy._beside[0],
            return_dict=False,
        )[0]
    assert torch.equal(policy.velocity(x, sigma, cond), expected.float())


@pytest.mark.parametrize("kind", A_FEW)
@torch.no_grad()
def test_velocities_without_guidance_are_those_of_a_policy_without_it(kind, prompts):
    """As an own algorithm may take them. A scale that is an input of the network stays. Rows are
    independent."""
    policy = load(kind)
    sigmas = (0.7,) if policy.spec.one_row else (0.7, 0.7)
    x, sigma, cond = question(policy, *sigmas, prompts=prompts)
    guided = policy.velocity(x, sigma, cond)
    with policy.unguided():
        without = policy.velocity(x, sigma, cond)
    plain = load(kind, "off" if policy.guided else "on")
    expected = plain.velocity(*question(plain, *sigmas, prompts=prompts))
    torch.testing.assert_close(without, expected, **moving(plain, expected))
    assert torch.equal(without, guided) is not policy.guided
    assert torch.equal(policy.velocity(x, sigma, cond), guided)
    alone = torch.cat([policy.velocity(x[[i]], sigma[[i]], cond.rows([i])) for i in range(len(x))])
    torch.testing.assert_close(guided, alone, **moving(policy, alone))


@pytest.mark.parametrize("kind", A_FEW)
@torch.no_grad()
def test_shapes_are_those_of_what_there_is(kind, prompts):
    """And each row of the network is counted."""
    policy, seen = load(kind), []
    policy.tuning.active.register_forward_hook(lambda module, args, out: seen.append(len(out[0])))
    x, sigma, cond = question(policy, 0.8, 0.3, prompts=prompts)
    shapes = policy.shapes(12)
    policy.velocity(x, sigma, cond)
    assert sum(seen) == 2 * shapes.rows
    assert tuple(x.shape[1:]) == shapes.latent
    assert {*cond.tensors, *cond.ragged} == {*shapes.cond}
    assert all(tuple(value.shape[1:]) == shapes.cond[name] for name, value in cond.tensors.items())
    for name, values in cond.ragged.items():
        assert all(value.shape[1:] == shapes.cond[name][1:] for value in values)
        assert name == PICTURE_SIZES or max(len(value) for value in values) <= shapes.cond[name][0]
    blank = policy.blank(1, 24)
    assert {name: value.dtype for name, value in blank.tensors.items()} == {
        n: v.dtype for n, v in cond.tensors.items()
    }


def checked(load, policy, folder, **options):
    """The checks of `g2rpo check-model` of a policy class."""
    own = {**size_of(policy.spec.pipeline_class), "lora_rank": 4, **options}
    config = PolicyConfig(path="", **own)
    return checks(load, policy, config, prompts_for(policy.spec, folder), folder)


@pytest.mark.parametrize(
    ("kind", "dtype", "tuning"),
    few(
        product(CLASSES, ("float32", "bfloat16"), ("lora", "full")),
        {
            ("ZImagePipeline", "float32", "full"),
            ("ZImagePipeline", "bfloat16", "lora"),
            ("Krea2Pipeline", "bfloat16", "lora"),
            ("Flux2KleinPipeline", "bfloat16", "lora"),
            ("WanPipeline", "bfloat16", "full"),
        }.__contains__,
    ),
)
def test_every_class_passes_check_model(kind, dtype, tuning, tmp_path):
    """Krea 2's tiny network multiplies rounding; Wan's tiny VAE draws all latents almost alike."""

    # where FLUX.2's tiny network hardly heeds an adapter of the usual size
    larger = {"height": 128, "width": 192, "lora_rank": 32}
    options = larger if kind == "Flux2KleinPipeline" else {}

    def load():
        pipeline = pipeline_of(kind)
        for part in pipeline.components.values():
            if isinstance(part, torch.nn.Module):
                cast(part, getattr(torch, dtype))
        return pipeline

    checks_of = checked(load, CLASSES[kind], tmp_path, dtype=dtype, tuning=tuning, **options)
    found = {check.name: check for check in checks_of}
    assert [name for name in REMEDIES if name != "plan"] == list(found)
    assert all(check.passed for check in found.values()), found
    if dtype == "float32":
        errors = {name: found[name].error for name in ("pictures", "velocity", "noise")}
        policy = policy_of(pipeline_of(kind))
        assert errors["pictures"] <= drawing(policy)["atol"] and errors["noise"] == 0
        assert errors["velocity"] <= network(guided_by(policy))["atol"]  # of the largest


def louder(path):
    save_file({name: 2 * value for name, value in load_file(path).items()}, path)


def returning(method, fault):
    """The method of a policy, with what `fault` makes of its result."""
    own = getattr(CLASSES["FluxPipeline"], method)
    return {method: lambda self, *args: fault(own(self, *args))}


def a_step_late(self, x, sigma, cond):
    return CLASSES["FluxPipeline"].velocity(self, x, sigma - 1 / CHECKED_STEPS, cond)


def without_a_layer(pipeline):
    """Which changes no velocity by as much as 0.1."""
    pipeline.transformer.transformer_blocks[0].attn.to_out[0].weight.data.zero_()


HALF = returning("velocity", lambda velocity: velocity.detach() / 2 + velocity / 2)
UNUSED = {"lora_targets": ["unused"]}
FAULTS = [
    ("policy", returning("encode", lambda cond: cond.rows([0, 0, 0]).rows([7])), torch.float32),
    ("noise", returning("noise", lambda noise: 1.01 * noise), torch.float32),
    ("velocity", returning("velocity", lambda velocity: 1.001 * velocity), torch.float32),
    ("grid", returning("grid", lambda sigmas: sigmas**1.001), torch.float32),
    ("pictures", returning("decode", lambda pictures: pictures + 1e-3), torch.float32),
    ("batch", returning("velocity", lambda v: v + 1e-2 * (len(v) == 1)), torch.float32),
    ("gradient", HALF, torch.float32),
    ("weights", returning("save", louder), torch.float32),
    # in the dtype whose tolerances are the widest
    (None, {}, torch.bfloat16),
    ("velocity", {}, torch.bfloat16, {}, without_a_layer),
    ("velocity", returning("velocity", torch.neg), torch.bfloat16),
    ("velocity", {"velocity": a_step_late}, torch.bfloat16),
    ("gradient", HALF, torch.bfloat16),
    ("gradient", {}, torch.bfloat16, UNUSED),
]
"""The check that must find a fault; methods of a policy, options, and a change of the second
pipeline that is loaded, which make it."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[0]}-{fault[2]}")
def test_check_model_finds_each_fault(fault, tmp_path):
    name, methods, dtype, options, change = (*fault, *({}, None)[len(fault) - 3 :])
    pipeline_of(kind := "FluxPipeline").save_pretrained(tmp_path / "model")
    made = iter(range(3))

    def load():
        pipeline = read_pipeline(FluxPipeline, tmp_path / "model", dtype)
        pipeline.transformer.unused = torch.nn.Linear(4, 4)
        if next(made) == 1 and change is not None:
            change(pipeline)
        return pipeline

    policy = type("Broken", (CLASSES[kind],), methods)
    found = reported(checked(load, policy, tmp_path, dtype=dtype, **options))
    failed = next(((check.name, check.remedy) for check in found if not check.passed), None)
    assert failed == (name and (name, REMEDIES[name]))


def timed_by_token():
    """Wan2.2-TI2V-5B: a call takes a time for every token, the same for all."""
    pipeline = pipeline_of("WanPipeline")
    pipeline.register_to_config(expand_timesteps=True)
    return pipeline


def test_check_model_names_one_time_where_a_call_takes_a_single_time(tmp_path):
    """Described without it; all other checks are made as with it. A run says the same."""
    policy = DiffusersPolicy.of(replace(SPECS["WanPipeline"], one_time=lambda pipeline: False))
    found = list(reported(checked(timed_by_token, policy, tmp_path)))
    assert [check.name for check in found if not check.passed] == ["velocity"]
    assert len(found) == len(REMEDIES) - 1 and "one_time=lambda pipeline: True" in found[2].found
    wrong = make(policy, timed_by_token(), **size_of("WanPipeline"))
    with pytest.raises(UserError, match="WanPipeline: .*one_time=lambda pipeline: True"):
        wrong.velocity(*question(wrong, 0.8, 0.3))


@pytest.mark.parametrize(
    ("kind", "tuning", "dtype"),
    few(
        product(CLASSES, ("lora", "full"), (torch.float32, torch.bfloat16)),
        {
            ("FluxPipeline", "full", torch.float32),
            ("FluxPipeline", "lora", torch.bfloat16),
            ("WanPipeline", "lora", torch.bfloat16),
        }.__contains__,
    ),
)
def test_ratio_is_exactly_one_before_the_first_update(kind, prompts, tuning, dtype):
    """The rollout's log-prob against the training pass, bit for bit, with blocks that are computed
    anew in backward."""
    anew = "gradient_checkpointing" not in SPECS[kind].unsupported
    policy = load(kind, tuning=tuning, dtype=dtype, gradient_checkpointing=anew)
    algorithm = GranularGRPO(group_size=2, branch_steps=(1,), granularities=(1,))
    sigmas = policy.grid(3)
    kernel = algorithm.kernel(sigmas)
    engine = Engine(
        policy=policy,
        cond=policy.encode(prompts[:1]),
        sigmas=sigmas,
        precision=Precision(anchor=dtype, sample=dtype),
    )
    (rollout,) = engine.rollout(algorithm.plans(3), 2, kernel, generator_for)
    (t,) = rollout.transitions
    sigma = sigmas[t.step]
    velocity = policy.velocity(t.x, sigma[None], engine.cond)
    log_prob = kernel(t.x, velocity.float(), sigma, sigmas[t.step + 1]).log_prob(t.x_next)
    assert torch.equal((log_prob - t.old_log_prob).exp(), torch.ones(2))
    log_prob[0].backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in policy.trainable_parameters())
    assert sum(p.grad is not None and bool(p.grad.any()) for p in policy.trainable_parameters()) > 0


@pytest.mark.parametrize("kind", only("WanPipeline"))
@torch.no_grad()
def test_calls_in_several_threads_do_not_meet(kind, prompts):
    """Decoding and scoring run beside the rollout; pipelines keep the state of a call on
    themselves."""
    policy = load(kind)
    x, sigma, cond = question(policy, 0.8, 0.3, prompts=prompts)
    calls = [
        lambda: policy.velocity(x, sigma, cond),
        lambda: policy.velocity(x[:1], sigma[1:], cond.rows([1])),
        lambda: policy.decode(x),
    ]
    expected = [call() for call in calls]
    with ThreadPoolExecutor(3) as pool:
        results = [pool.submit(call) for _ in range(4) for call in calls]
    assert all(torch.equal(result.result(), expected[i % 3]) for i, result in enumerate(results))


FLOW_SOLVERS = {"WanPipeline": UniPCMultistepScheduler, "SanaPipeline": DPMSolverMultistepScheduler}


@pytest.mark.parametrize("kind", FLOW_SOLVERS)
def test_the_grid_of_another_solver_of_flows_is_walked_from_exactly_one(kind):
    """UniPC and DPM++ begin just below 1, where the diffusion of a stochastic step would be many
    times as large."""
    policy = load(kind)
    solver = FLOW_SOLVERS[kind](
        use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0
    )
    policy.pipeline.scheduler = solver
    solver.set_timesteps(STEPS)
    sigmas, grid = solver.sigmas, policy.grid(STEPS)
    assert grid[0] == 1 and 0.99 < sigmas[0] <= 1 and grid[-1] == 0
    torch.testing.assert_close(grid[1:], sigmas[1:].float(), **rounding(4, size=1.0))


@torch.no_grad()
def test_wan_that_times_every_token_takes_rows_of_one_sigma_at_a_time():
    pipeline = timed_by_token()
    policy = policy_of(pipeline)
    x, sigma, cond = question(policy, 0.8, 0.3)
    tokens = x[0, 0, :, ::2, ::2].numel()

    def network(name):
        times = 1000 * sigma[:, None].expand(-1, tokens)
        return pipeline.transformer(x, times, cond.tensors[name], return_dict=False)[0]

    without, toward = network("negative_prompt_embeds"), network("prompt_embeds")
    expected = without + 5 * (toward - without)
    velocity = policy.velocity(x, sigma, cond)
    torch.testing.assert_close(velocity, expected, **moving(policy, toward))


def test_distilled_klein_ignores_the_scale_as_its_pipeline_does():
    pipeline = pipeline_of("Flux2KleinPipeline")
    pipeline.register_to_config(is_distilled=True)
    policy = policy_of(pipeline, guidance_scale=4.0)
    assert not policy.guided and policy.shapes(12).rows == 1
    assert set(policy.encode(PROMPTS).tensors) == {"prompt_embeds", "text_ids"}


def test_what_a_model_card_calls_is_what_was_sampled():
    """Qwen-Image is guided by true_cfg_scale, and only if there is a negative prompt."""
    assert load("QwenImagePipeline").deployed == {"true_cfg_scale": 4.0, "negative_prompt": ""}
    assert load("QwenImagePipeline", "off").deployed == {"true_cfg_scale": 1.0}
    clips = {"guidance_scale": 5.0, "num_frames": 3, "negative_prompt": ""}
    assert load("WanPipeline").deployed == clips


@pytest.mark.parametrize("kind", only("FluxPipeline", "QwenImagePipeline"))
@torch.no_grad()
def test_flash_attention_is_refused_exactly_where_a_mask_is_passed(kind, prompts):
    """Before anything is loaded; what it would do is asked of a policy without the check."""
    longer = {"max_sequence_length": 64} if "max_sequence_length" in size_of(kind) else {}
    policy = load(kind, **longer)
    try:
        choose_attention(policy.pipeline.transformer, "flash")
    except UserError as error:
        assert "has no choice of attention" in str(error)
        return
    # Z-Image pads to multiples of 32 tokens
    long = Prompt("two blue square left of a circle " * 6, prompts[0].images)
    x, sigma, cond = question(policy, 0.8, 0.3, prompts=[prompts[0], long])
    masked = SPECS[kind].is_masked
    with pytest.raises(ValueError, match="attn_mask") if masked else nullcontext():
        policy.velocity(x, sigma, cond)
    with pytest.raises(UserError, match="takes no mask") if masked else nullcontext():
        check_options(SPECS[kind], PolicyConfig(path="", **size_of(kind), attention="flash"))


def test_an_option_that_a_model_cannot_follow_is_refused_from_python_too():
    with pytest.raises(UserError, match=r"policy\.gradient_checkpointing"):
        load("ChromaPipeline", gradient_checkpointing=True)
    # which its call does not have
    own = replace(SPECS["SanaPipeline"], scale="real_guidance_scale")
    check_options(own, PolicyConfig(path="", height=32, width=32))
    with pytest.raises(UserError, match="guidance_scale: the call of a SanaPipeline has no such"):
        check_options(own, PolicyConfig(path="", height=32, width=32, guidance_scale=1.0))


def test_the_memory_on_a_numbered_cpu_is_a_cpus(monkeypatch):
    def planned(config, *, cuda, **more):
        raise UserError(f"with CUDA: {cuda}")

    monkeypatch.setattr(check_model, "make_plan", planned)
    policy = PolicyConfig(path="testbed", height=64, width=64, device="cpu:0")
    assert check_model._planned(policy).found == "with CUDA: False"
