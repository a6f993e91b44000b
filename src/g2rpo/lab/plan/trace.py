"""Activation memory and kernels of calls, by tracing the policy's code on tensors with shapes and
no data.

Every storage is counted from its allocation to its release, through forward, checkpointing,
autocast's weight casts and backward. Kernels' workspaces and the allocator's rounding are not
counted.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves

from g2rpo.config.schema import Config
from g2rpo.core.data import Batch, Cond
from g2rpo.core.errors import UserError
from g2rpo.core.flow import sigma_grid
from g2rpo.core.noise import generator_for
from g2rpo.core.objectives import passes
from g2rpo.core.plans import Plan
from g2rpo.lab.plan.counting import Counts, algorithm_key
from g2rpo.lab.plan.fake_tensors import CudaAutocast, KnownValues
from g2rpo.lab.plan.kernels import Meter, Roofline, fixed_storages
from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.models.blueprint import Blueprint, build_shallow, shapes_of
from g2rpo.models.offload import offloaded_bytes
from g2rpo.models.pipelines import Shapes
from g2rpo.rollout.guidance import guided_by
from g2rpo.rollout.planning import dry_rollout
from g2rpo.train.updater import Trained


@dataclass(frozen=True)
class TracedCall:
    """One traced call: its rows (latents, or pictures decoded; of a training pass those of all its
    network calls), its peak of temporary bytes, and its kernels."""

    rows: int
    peak: int
    roofline: Roofline

    def changed(self, **of_roofline: Any) -> TracedCall:
        """With other values in its roofline."""
        return replace(self, roofline=replace(self.roofline, **of_roofline))


@dataclass(frozen=True)
class Calls:
    """The largest rollout call, training pass and decoded batch of a run."""

    velocity: TracedCall
    training: TracedCall
    decode: TracedCall
    heldout: TracedCall
    """The largest call of an evaluation, which has policy.guidance_scale; the others have that of
    training."""
    judged: TracedCall
    """The largest decoded batch of an evaluation."""

    def compiled(self) -> Calls:
        """With the network's calls compiled."""
        names = "velocity", "training", "heldout"
        return replace(self, **{name: getattr(self, name).changed(compiled=True) for name in names})


Known = dict[tuple[Any, ...], TracedCall]
"""Calls that were traced, by what they depend on."""
NOT_TRACED = {"compile", "attention", "device", "offload"}
"""Options that no trace depends on, but for attention that keeps its scores ("math")."""
NOT_OF_SAMPLING = {"gradient_checkpointing"}
NOT_OF_DECODING = {
    *NOT_OF_SAMPLING,
    "tuning",
    "quantize",
    "lora_rank",
    "lora_alpha",
    "lora_targets",
    "lora_above",
    "autocast",
}


def trace_calls(
    blueprint: Blueprint,
    config: Config,
    counts: Counts,
    *,
    like_cuda: bool,
    known: Known | None = None,
) -> Calls:
    """Traces calls on a shallow copy of the model whose blocks represent all blocks, but for those
    that are `known`.

    Gradients are taken to exist already, as they do from the second pass on. `like_cuda` computes
    with CUDA's autocast, which has norms and powers in float32, instead of the CPU's. `config` has
    settled batch sizes. Gathered weights of a sharded model are in the call's dtype, so autocast
    casts none; they are not counted here.
    """
    known = {} if known is None else known
    sampling = config.sampling
    plans = {plan for iteration, _ in counts.kinds for plan in iteration.plans}
    drawn = min(int(sampling.batch_size), counts.heldout)
    rows = counts.largest(lambda it: it.calls) or drawn
    if sampling.guidance_scale is None:  # one call for both
        rows = drawn = max(rows, drawn)
    pictures = min(
        int(sampling.decode_batch_size), max(counts.largest(lambda it: [it.images]), counts.heldout)
    )
    passed = counts.largest(lambda it: it.passes)

    def key(*more: Any, without: Collection[str] = ()) -> tuple[Any, ...]:
        options = config.policy.model_dump_json(exclude={*NOT_TRACED, *without})
        options += str(config.policy.attention == "math")
        return options, blueprint.text_tokens, config.trainer.sharding != "none", like_cuda, *more

    scale = sampling.guidance_scale
    trained = sampling.num_steps, algorithm_key(config), frozenset(plans)
    keys = {
        "velocity": key("velocity", rows, scale, without=NOT_OF_SAMPLING),
        "training": key("training", passed, scale, *trained),
        "heldout": key("velocity", drawn, None, without=NOT_OF_SAMPLING),
        "decode": key("decode", pictures, without=NOT_OF_DECODING),
    }
    if not known.keys() >= set(keys.values()):
        with shallow_policy(blueprint, config) as (policy, times):
            shapes, kept = shapes_of(policy, blueprint), list(_permanent_tensors(policy))
            if like_cuda:
                for network in (policy.transformer, policy.pipeline.vae):
                    CudaAutocast().apply_to(network)

            def trace(name: str, call: Callable[[], int], grad: bool = False) -> None:
                if keys[name] in known:
                    return
                with torch.set_grad_enabled(grad), _standing_for(policy, times, kept) as meter:
                    rows = call()
                roofline = Roofline(
                    tuple(meter.kernels),
                    fixed_storages(meter.kernels, meter.existing),
                    checkpointed=grad and config.policy.gradient_checkpointing,
                    streamed=meter.streamed,
                )
                known[keys[name]] = TracedCall(rows, meter.peak, roofline)

            with guided_by(policy, config.sampling.guidance_scale):
                trace("velocity", lambda: len(policy.velocity(*inputs(policy, shapes, rows))))
                trace(
                    "training",
                    lambda: training_pass(policy, config, shapes, plans, passed),
                    grad=True,
                )
            trace("heldout", lambda: len(policy.velocity(*inputs(policy, shapes, drawn))))
            trace("decode", lambda: len(policy.decode(torch.empty(pictures, *shapes.latent))))
    velocity, training, heldout = (
        _compiled(known[keys[name]], config) for name in ("velocity", "training", "heldout")
    )
    decode = judged = known[keys["decode"]]
    if config.judged_size is not None:  # a size of its own
        larger = config.model_copy(update={"policy": config.judged})
        other = trace_calls(blueprint, larger, counts, like_cuda=like_cuda, known=known)
        heldout, judged = other.heldout, other.decode
    return Calls(
        velocity=velocity, training=training, decode=decode, heldout=heldout, judged=judged
    )


def _compiled(call: TracedCall, config: Config) -> TracedCall:
    """The call of a network that is compiled, has the kernel of attention and gets its blocks from
    where the config says."""
    policy = config.policy
    streamed = call.roofline.streamed if policy.offload else 0
    compiled = policy.compile is True
    return call.changed(compiled=compiled, attention=policy.attention, streamed=streamed)


def training_pass(
    policy: DiffusersPolicy, config: Config, shapes: Shapes, plans: Iterable[Plan], rows: int
) -> int:
    """One training pass over `rows` latents by the algorithm's own loss, on the example of `plans`
    with most members a latent; returns how many rows its network calls have, in all.

    The untrained model's velocities are assumed to exist: their call needs no more memory than a
    rollout's.
    """
    algorithm = config.algorithm
    nothing = torch.zeros(algorithm.group_size)
    sigmas = sigma_grid(config.sampling.num_steps)
    examples = []
    for plan in plans:
        rollout = dry_rollout(plan, algorithm.group_size, sigmas, shapes.latent)
        examples += algorithm.examples(rollout, nothing, generator_for)
    example = max(examples, key=lambda example: len(example.advantages) / example.rows)
    part = next(passes([example] * math.ceil(rows / example.rows), rows))
    _, _, cond = inputs(policy, shapes, sum(item.rows for item in part))
    if algorithm.sums_groups:
        part = [item.with_group_sum(torch.tensor(0.0)) for item in part]
    batch = Batch.of(part, sigmas, first=False)
    network = _WithoutBase(policy, cond, reward=lambda x, rows: policy.decode(x).flatten(1).mean(1))
    algorithm.loss(batch, network).values.sum().backward()
    return sum(network.calls)


@dataclass(frozen=True)
class _WithoutBase(Trained):
    calls: list[int] = field(default_factory=list)

    def velocity(self, x: Tensor, sigma: Tensor, prompts: Sequence[int]) -> Tensor:
        self.calls.append(len(x))
        return super().velocity(x, sigma, prompts)

    def base_velocity(self, x: Tensor, sigma: Tensor, prompts: Sequence[int]) -> Tensor:
        return torch.zeros_like(x)

    old_velocity = base_velocity


def inputs(policy: DiffusersPolicy, shapes: Shapes, rows: int) -> tuple[Tensor, Tensor, Cond]:
    """Latents, sigmas and conditioning of a call: prompts of the full length, without content."""
    cond = policy.like(shapes, rows)
    for name, mask in cond.tensors.items():
        if name.endswith(("attention_mask", "embeds_mask")):
            mask.fill_(1)
    return torch.empty(rows, *shapes.latent), torch.tensor([0.5] * rows), cond


@contextmanager
def shallow_policy(
    blueprint: Blueprint, config: Config
) -> Iterator[tuple[DiffusersPolicy, list[int]]]:
    """A policy of fake tensors with two blocks of every kind, and how many blocks each of these
    stands for."""
    policy, times = build_shallow(blueprint, config.policy)
    if config.trainer.sharding != "none":
        nn.Module.to(policy.transformer, policy.dtype)  # diffusers' own warns
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kernels that fake tensors do not run
        _materialise(policy)
        try:
            with KnownValues():
                yield policy, times
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise UserError(
                f"policy.path={config.policy.path}: cannot be planned: the call of a {blueprint.kind} reads values of tensors "
                "that depend on weights or times, and a plan has none; training does not need that"
            ) from None


@contextmanager
def _standing_for(
    policy: DiffusersPolicy, times: list[int], kept: Sequence[Tensor]
) -> Iterator[Meter]:
    """While entered, counts live bytes beside the `kept` tensors, and kernels, and the frozen bytes
    of blocks at each of their calls.

    Storages kept by a block's forward passes count `times` times, because the first of equal blocks
    stands for all but the last (`pipelines.two_of`); those of a recomputation within backward count
    once. Of kernels the last stands for all but the first, whose input needs no gradient.
    """
    standing = dict(zip(policy.blocks, times, strict=True))
    kernel_times = dict(standing)
    for first, last in itertools.pairwise(policy.blocks):
        if standing[first] > 1:
            kernel_times[first], kernel_times[last] = 1, standing[first]
    before: dict[nn.Module, set[int]] = {}
    entered: list[nn.Module] = []
    """Blocks whose forward pass runs, also within backward, where a checkpointed block comes
    again."""
    backward: list[nn.Module] = []
    """The block whose backward pass runs: its output has a gradient, its input has none yet."""

    def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
        entered.append(block)
        meter.streamed += standing[block] * offloaded_bytes(block)
        before[block] = set(meter.live)
        for leaf in _with_gradient((args, kwargs)):
            leaf.register_hook(lambda _: backward.remove(block) if block in backward else None)

    def leave(block: nn.Module, args: Any, out: Any) -> None:
        entered.remove(block)
        for leaf in _with_gradient(out):
            leaf.register_hook(lambda _: backward.__setitem__(slice(None), [block]))
        if torch._C._current_graph_task_id() == -1:  # not within backward
            born = meter.live.keys() - before[block]
            passed_on = set() if torch.is_grad_enabled() else meter.sizes(out).keys()
            meter.multiply(born - passed_on, standing[block])

    with ExitStack() as hooks:
        for block in standing:
            hooks.enter_context(block.register_forward_pre_hook(enter, with_kwargs=True))
            # checkpointing ends recomputation by an exception
            hooks.enter_context(block.register_forward_hook(leave, always_call=True))
        meter = Meter(
            kept, lambda: kernel_times[(entered or backward)[-1]] if entered or backward else 1
        )
        yield hooks.enter_context(meter)


def _with_gradient(values: Any) -> list[Tensor]:
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.grad_fn is not None]


def _permanent_tensors(policy: DiffusersPolicy) -> Iterator[Tensor]:
    """The policy's permanent tensors: weights, buffers, gradients."""
    for module in (policy.transformer, policy.pipeline.vae):
        for tensor in (*module.parameters(), *module.buffers()):
            yield tensor
            if tensor.grad is not None:
                yield tensor.grad
    yield from (value for value in vars(policy).values() if isinstance(value, Tensor))


def _materialise(policy: DiffusersPolicy) -> None:
    """Replaces a policy's meta tensors by fake CPU tensors with gradients. Autocast ignores the
    meta device."""

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        if isinstance(value, nn.Parameter):
            made = nn.Parameter(made, value.requires_grad)
            made.grad = torch.empty_like(made) if value.requires_grad else None
        return made

    policy._device = torch.device("cpu")
    tables = [vars(policy)]
    for module in (policy.transformer, policy.pipeline.vae):
        tables += [
            table
            for part in module.modules()
            for table in (part._parameters, part._buffers, vars(part))
        ]
    for table in tables:
        table.update({name: _each(fake, value) for name, value in table.items()})


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """The change of a value, or of a list's entries."""
    return [change(entry) for entry in value] if type(value) is list else change(value)
