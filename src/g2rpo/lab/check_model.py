"""`g2rpo check-model`: whether a policy draws, learns and saves as the diffusers pipeline does that
it runs, with numbers."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from g2rpo.config.read import load_config
from g2rpo.config.resolve import resolve_as
from g2rpo.core import plugins
from g2rpo.core.data import Prompt
from g2rpo.core.devices import pick_device
from g2rpo.core.errors import UserError, out_of_memory, placed
from g2rpo.core.files import in_bytes
from g2rpo.core.holding import holding
from g2rpo.core.images import read_inputs
from g2rpo.core.noise import generator_for
from g2rpo.core.plain import Section
from g2rpo.lab.check_gradient import LEAST_CHANGE, gradient_error, rms
from g2rpo.lab.plan.plan import make_plan
from g2rpo.lab.tuned_weights import load_saved
from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.models.load import load_pipeline
from g2rpo.models.options import PolicyConfig
from g2rpo.models.replay import ONE_TIME, guiding, opaque
from g2rpo.models.spec import PipelineSpec
from g2rpo.train.evaluation.sampler import Sampler

CHECKED_TEXTS = ("a red circle", "two blue squares left of a circle")
"""Of different lengths, so that padding and masks matter."""
CHECKED_SIZE = {"height": 128, "width": 192}
"""Not square, and in whole tokens of every known model."""
CHECKED_STEPS, CHECK_SEED = 4, 5
LARGEST_DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.1}
"""The largest difference, of pictures in [0, 1] and of velocities relative to the largest one, by
`policy.dtype`."""
ROUNDED, REORDERED = 2**-6, 2**-4
"""The largest root mean squares of differences of bfloat16, relative to the spread. Of the same
calls only guidance is rounded otherwise: by at most 0.0042 on tiny models of sixteen classes; one
layer without its weights was 0.023 or more in all ten in which it was tried. Calls of other rows
may add in another order, as two roundings of the whole network, each of which is off by up to
0.04."""
OTHER_SOLVER = 1e-2
"""The same as LIMITS, for a pipeline with another solver than Euler's, whose times are whole
numbers."""
LARGEST_INTEGRAL_ERROR = {"float32": 0.02, "bfloat16": REORDERED / LEAST_CHANGE}
"""The largest relative error of the integral of gradients. Tiny models of 22 classes reach 0.018 and
0.16; half a gradient is off by 0.5."""

SPEC_FIELDS = "see `encoded` (all results of encode_prompt, in order), `widths`, `fixed` and `one_time` of the PipelineSpec"
REMEDIES = {
    "policy": SPEC_FIELDS,
    "noise": "prepare_latents must draw one latent per generator, and nothing else",
    "velocity": f"the call gets other arguments than the pipeline's own; {SPEC_FIELDS}, `scale` and `unguided`",
    "grid": "set own_grid of the PipelineSpec to true, or sampling.shift to a number",
    "pictures": "if velocity and grid are equal, decoding differs: see `fixed` of the PipelineSpec",
    "batch": "rows depend on each other: see `masks`, `ragged`, `lists`, `one_row` and `one_time` of the PipelineSpec",
    "gradient": "trained layers must act and be differentiable; leave policy.gradient_checkpointing and policy.compile out",
    "weights": "set policy.lora_targets to module names that the transformer has, or policy.tuning=full",
    "plan": "`g2rpo plan` cannot count this model; training does not need it",
}


@dataclass(frozen=True)
class ModelCheck:
    """One thing that was checked: what was found, in words, and for measured differences the
    `error` and its `limit`."""

    name: str
    found: str
    error: float = 0.0
    limit: float = 0.0

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # false for an error that is no number

    @property
    def remedy(self) -> str:
        return REMEDIES[self.name]


@dataclass(frozen=True)
class DrawnByPipeline:
    """What a pipeline drew by its own call: pictures, the noise and the velocity of its first step,
    the latents that it decoded, and its sigmas."""

    pictures: Tensor
    noise: Tensor
    velocity: Tensor
    latents: Tensor
    sigmas: Tensor
    euler: bool


class _Settings(Section):
    policy: PolicyConfig


def check_model(path: str, kind: str | None, overrides: Sequence[str]) -> Iterator[ModelCheck]:
    """Checks a pipeline, in a folder or of a hub id, as the policy `kind` (None: the catalogue's),
    with `policy.` overrides. UserError for `policy.lora_above`, which no pipeline has."""
    if kind is not None and plugins.is_code(kind):
        plugins.allow(kind)
    given = {"path": path, "kind": kind, **CHECKED_SIZE}
    config = resolve_as(_Settings, {"policy": given}, overrides, "check-model").policy
    if config.lora_above:
        raise UserError(
            f"policy.lora_above={config.lora_above:g}: in the pipeline's own call, with which a model is compared, an "
            "adapter acts at all steps; take it out"
        )
    loaded = load_pipeline(config)
    kind_of, spec, device = loaded.found.policy, loaded.found.spec, loaded.setting["device"]
    options = loaded.found.options
    if spec.frames is not None and config.num_frames is None:
        options = options.model_copy(
            update={"num_frames": 1 + int(getattr(loaded.pipeline, spec.frames))}
        )
    pipelines = iter([loaded.pipeline])
    del loaded
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)

        def pipeline() -> Any:
            return next(pipelines, None) or load_pipeline(config).pipeline

        found = reported(
            checks(pipeline, kind_of, options, prompts_for(spec, place), place, device)
        )
        yield (first := next(found))
        yield from found
    if first.passed:
        yield _planned(config.model_copy(update={"num_frames": options.num_frames}))


def prompts_for(spec: PipelineSpec, folder: Path) -> list[Prompt]:
    """Two prompts; for models that edit, with a picture in `folder`."""
    path = folder / "input.png"
    noise = torch.rand(60, 40, 3, generator=generator_for("input picture"))
    Image.fromarray((255 * noise).byte().numpy()).save(path)
    return [Prompt(text, [str(path)] if spec.pictured else []) for text in CHECKED_TEXTS]


def drawn_by(
    pipeline: Any,
    spec: PipelineSpec,
    options: PolicyConfig,
    prompts: Sequence[Prompt],
    steps: int = CHECKED_STEPS,
) -> DrawnByPipeline:
    """Pictures by the pipeline's own call. Prompts go one by one where there are input pictures, or
    where prompts that are encoded together change each other (CogView4 pads them without a
    mask)."""
    pipeline.set_progress_bar_config(disable=True)
    guided, scheduler = spec.is_guided(pipeline, options.guidance_scale), pipeline.scheduler
    euler = type(scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
    alone = bool(spec.ragged or spec.pictured or spec.one_row)
    generators = [generator_for(CHECK_SEED, "picture", i) for i in range(len(prompts))]
    if spec.guider:
        pipeline.guider = guiding(
            pipeline.guider,
            spec.guidance if options.guidance_scale is None else options.guidance_scale,
            guided,
        )
    own, pictures, found = scheduler.step, [], []
    for rows in [[row] for row in range(len(prompts))] if alone else [list(range(len(prompts)))]:
        seen: list[tuple[Tensor, Tensor]] = []

        def step(
            velocity: Tensor, time: Any, latents: Tensor, seen: Any = seen, **given: Any
        ) -> Any:
            seen.append((latents.float(), velocity.float()))
            if euler:
                return own(velocity, time, latents, **given)
            here, there = scheduler.sigmas[len(seen) - 1 : len(seen) + 1]
            return (latents + (there - here) * velocity,)

        changes: dict[str, Any] = {
            "prompt": [str(prompts[row]) for row in rows],
            "generator": [generators[row] for row in rows],
        }
        if spec.pictured:
            opened = read_inputs(prompts[rows[0]])
            changes["image"] = opened[0] if spec.most_pictures == 1 else opened
        scheduler.step = step
        own_arguments = spec.arguments(
            pipeline, options, rows=len(rows), guided=guided, steps=steps
        )
        try:
            made = pipeline(**own_arguments | changes)[0]
        finally:
            del scheduler.step
        pictures.append(opaque(made.float()))
        x, v = seen[-1]
        found.append((*seen[0], x + (scheduler.sigmas[-1] - scheduler.sigmas[-2]) * v))
    noise, velocity, latents = (torch.cat(each) for each in zip(*found, strict=True))
    sigmas = scheduler.sigmas.float().cpu()
    return DrawnByPipeline(torch.cat(pictures), noise, velocity, latents, sigmas, euler)


def reported(found: Iterator[ModelCheck]) -> Iterator[ModelCheck]:
    """The results of `checks`; what raises an error is a check that failed, and ends them."""
    for name in REMEDIES:
        try:
            yield next(found)
        except StopIteration:
            return
        except UserError:
            raise
        except Exception as error:  # the pipeline's code, or a wrong description of it
            if out_of_memory(error):
                raise
            yield ModelCheck(
                name,
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                math.nan,
            )
            return


def checks(
    load: Callable[[], Any],
    kind: type[DiffusersPolicy],
    config: PolicyConfig,
    prompts: Sequence[Prompt],
    folder: Path,
    on: str = "cpu",
) -> Iterator[ModelCheck]:
    """Checks a policy class with `config` on a device, on two pipelines from `load`, of which one
    is in memory at a time."""
    device = torch.device(on)
    own = drawn_by(load().to(device), kind.spec, config, prompts)
    limit = max(LARGEST_DIFFERENCE[config.dtype], 0.0 if own.euler else OTHER_SOLVER)
    pipeline = load()
    with placed(""):  # a size that the model cannot draw is no fault of its description
        size = config.height, config.width, config.num_frames or 1
        kind.spec.check_size(pipeline, pipeline.transformer.config, *size)
    policy = kind(pipeline, config, device=device)
    del pipeline
    plain = (config.dtype, config.tuning, config.quantize) == ("bfloat16", "lora", "none")
    rounding = partial(_as_the_pipeline, policy) if plain else nullcontext
    cond = policy.encode(prompts)
    yield ModelCheck(
        "policy",
        f"{kind.spec.pipeline_class} is run as a policy, with {policy.shapes(77).rows} rows an evaluation",
    )

    noise = policy.noise([generator_for(CHECK_SEED, "picture", i) for i in range(len(prompts))])
    yield _equal("noise", noise, own.noise.cpu(), limit, "as the pipeline's own")
    first = policy.grid(CHECKED_STEPS)[:1].expand(len(prompts)).to(device)
    with rounding():
        velocity, without = _velocity(policy, noise.to(device), first, cond)
    said = "of the first step as its own"
    yield _equal("velocity", velocity, own.velocity, limit, said, without, ROUNDED * plain)

    grids = {
        shift: Sampler(policy=policy, shift=shift, num_steps=CHECKED_STEPS, seed=CHECK_SEED)
        for shift in ("model", "scheduler")
    }
    apart = {shift: _apart(each.sigmas, own.sigmas) for shift, each in grids.items()}
    shift = min(apart, key=lambda each: apart[each])
    yield ModelCheck(
        "grid",
        f"{CHECKED_STEPS} steps of sampling.shift={shift} differ by {apart[shift]:.0e}",
        apart[shift],
        1e-6 if own.euler else 1e-3,
    )
    base = grids[shift].pictures(prompts)
    how = "" if own.euler else " by Euler's steps on its grid (its solver is another one)"
    yield _equal("pictures", base, own.pictures, limit, f"as its own{how}")

    x, sigma = noise.to(device), torch.tensor([0.8, 0.3], device=device)
    with rounding():
        both, without = _velocity(policy, x, sigma, cond)
        each = [
            _velocity(policy, x[i : i + 1], sigma[i : i + 1], policy.encode(prompts[i : i + 1]))[0]
            for i in range(2)
        ]
    said = "two rows as two of one"
    yield _equal("batch", both, torch.cat(each), limit, said, without, REORDERED * plain)

    said, error = gradient_error(policy, x, sigma, cond, LARGEST_INTEGRAL_ERROR[config.dtype])
    yield ModelCheck("gradient", said, error, LARGEST_INTEGRAL_ERROR[config.dtype])

    latents = noise.to(device)
    for here, there in pairwise(own.sigmas.to(device)):
        v, _ = _velocity(policy, latents, here.expand(len(latents)), cond)
        latents = latents + (there - here) * v
    policy.save(folder)
    by_loader = config.tuning == "lora" and policy.lora_loader
    loader = f"pipe.{policy.lora_loader}" if by_loader else "from_pretrained, merged"
    del policy, grids
    pipeline = load()
    load_saved(pipeline, folder, config.tuning)
    again = drawn_by(pipeline.to(device), kind.spec, config, prompts)
    changed, error = rms(latents, own.latents), rms(latents, again.latents)
    yield ModelCheck(
        "weights",
        f"saved, and loaded by {loader}, draw as the tuned policy: difference {error:.0e}, where "
        f"the base's is {changed:.0e}",
        error / changed if changed else math.nan,
        (limit if config.dtype == "float32" else REORDERED) / LEAST_CHANGE,
    )


@contextmanager
def _as_the_pipeline(policy: DiffusersPolicy) -> Iterator[None]:
    """While entered, the network rounds as the pipeline's own does: without autocast, and without
    adapters, which need it."""
    options = policy.options.model_copy(update={"autocast": False})
    with holding(policy, options=options), policy.base():
        yield


@torch.no_grad()
def _velocity(policy: DiffusersPolicy, x: Tensor, sigma: Tensor, cond: Any) -> tuple[Tensor, str]:
    """A velocity, and what its description lacks: "" if nothing. A call that fails is tried again
    as one that takes a single time for all rows."""
    try:
        return policy.velocity(x, sigma, cond), ""
    except Exception as error:
        if policy.one_time or out_of_memory(error):
            raise
        policy.one_time = True
        try:
            velocity = policy.velocity(x, sigma, cond)
        except Exception:
            raise error from None
        if isinstance(error, UserError):
            return velocity, str(error)
        return (
            velocity,
            f"{ONE_TIME}; without it {type(error).__name__}: {str(error).splitlines()[0]}",
        )


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a.cpu() - b.cpu()).abs().max()) if a.shape == b.shape else math.nan


def _equal(
    name: str,
    ours: Tensor,
    own: Tensor,
    limit: float,
    said: str,
    lacking: str = "",
    spread: float = 0.0,
) -> ModelCheck:
    """Whether two tensors differ by at most `limit`, relative to the largest value where that is
    above 1, or by at most `spread` (if any) of the standard deviation in the root mean square, and
    nothing is `lacking`."""
    if lacking:
        return ModelCheck(name, lacking, math.nan)
    if spread and ours.shape == own.shape:
        values = own.cpu().float()
        error = rms(ours, values) / float(values.std())
        return ModelCheck(name, f"{said}: difference {error:.0e} of the spread", error, spread)
    error = _apart(ours, own)
    shapes = "" if ours.shape == own.shape else f"; {tuple(ours.shape)} and {tuple(own.shape)}"
    return ModelCheck(
        name,
        f"{said}: largest difference {error:.0e}{shapes}",
        error,
        limit * max(1.0, float(own.abs().max())),
    )


def _planned(policy: PolicyConfig) -> ModelCheck:
    """The memory that a run would need, as `g2rpo plan scenes` counts it with this model."""
    try:
        config = load_config("scenes", []).model_copy(update={"policy": policy})
        cuda = pick_device(policy.device).startswith("cuda")
        plan = make_plan(config, cuda=cuda, heldout=1, distinct_prompts=1)
    except UserError as error:
        return ModelCheck("plan", str(error), math.nan)
    what = "all weights" if policy.tuning == "full" else f"a LoRA of rank {policy.lora_rank}"
    size = f"{policy.height}x{policy.width}, {policy.dtype}"
    return ModelCheck(
        "plan",
        f"training {what} at {size} needs {in_bytes(plan.memory.needed)} (`g2rpo plan` counts a run)",
    )
