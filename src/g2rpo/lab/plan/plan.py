"""Estimates compute, memory and time of a run, from its config, for one device."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from g2rpo.assembly import components
from g2rpo.assembly.blueprint import Blueprint, build_on_meta, read_blueprint, shapes_of
from g2rpo.config.schema import Config
from g2rpo.core.errors import UserError, loading
from g2rpo.core.files import in_bytes
from g2rpo.lab.plan.cards import CARDS, Card, card_of, find_card
from g2rpo.lab.plan.counting import Counts, Iteration, count, knob_evaluations, settled
from g2rpo.lab.plan.memory import RESERVE, Memory, plan_memory
from g2rpo.lab.plan.network import NETWORK, Layout, Limit, Traffic, limit_of, nodes_of, traffic
from g2rpo.lab.plan.rewards import RewardCost, cost_of_reward
from g2rpo.lab.plan.seconds import Seconds, Work, on_card, work_of
from g2rpo.lab.plan.trace import Calls, trace_calls
from g2rpo.policies.anyflow import DiffusersPolicy
from g2rpo.policies.pipelines import Shapes
from g2rpo.policies.quantized import weights_of
from g2rpo.rollout.guidance import in_training
from g2rpo.runtime.distributed import World
from g2rpo.training.ranks import divided

COUNTED: dict[str, Callable[[Iteration], float]] = {
    "evaluations": lambda it: it.evaluations,
    "images": lambda it: it.images,
    "training_rows": lambda it: it.training_rows,
    "training_passes": lambda it: len(it.passes),
    "reference_rows": lambda it: it.reference_rows,
    "optimizer_steps": lambda it: it.optimizer_steps,
}
"""The counted quantities of an iteration, by name."""
SMALL = 1_000_000_000
"""Largest model, in parameters, that is probed on a CPU by default."""


@dataclass(frozen=True)
class Target:
    """The device of a plan: one of this machine, or a card by its datasheet."""

    name: str
    cuda: bool
    own: bool
    capacity: int
    """Bytes of the device's memory; of this machine's card those that are free."""
    card: Card | None

    def holds(self, plan: Estimate) -> bool:
        return plan.memory.needed <= self.capacity


def find_target(device: str) -> Target:
    """The target that `device` names: "auto", "cpu" or "cuda" on this machine, or a card of `cards.CARDS`."""
    device = components.pick_device(device) if device == "auto" else device
    if device == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Target("this machine's CPU", False, True, memory, None)
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise UserError(f"--device {device}: torch sees no CUDA device here; name a card instead: {', '.join(CARDS)}")
        device = components.pick_device(device, "--device")
        name = torch.cuda.get_device_name(torch.device(device))
        free, total = torch.cuda.mem_get_info(torch.device(device))
        used = f", of whose {in_bytes(total)} other programs use {in_bytes(total - free)}" if total - free > RESERVE else ""
        return Target(f"this machine's {name}{used}", True, True, free, card_of(name))
    card = find_card(device)
    return Target(card.name, True, False, int(card.memory_gib * 2**30), card)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The work and memory of each rank on a device of the target's kind, and its time on any card."""

    config: Config
    """The config of one rank, with its share of the prompts."""
    cuda: bool
    counts: Counts
    memory: Memory
    traced: Calls
    blueprint: Blueprint
    policy: DiffusersPolicy
    """On the meta device."""
    shapes: Shapes
    reward_costs: dict[str, RewardCost | None]
    distinct_prompts: int
    """Distinct prompts, over all ranks."""
    layout: Layout

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    @cached_property
    def sent(self) -> Traffic:
        """What an iteration sends between ranks."""
        return traffic(self.config, self.policy, self.counts, self.layout)

    @cached_property
    def work(self) -> Work:
        prompts = math.ceil(self.distinct_prompts / self.ranks)
        return work_of(self.config, self.policy, self.shapes, self.traced, self.reward_costs, prompts)

    @property
    def network_rows(self) -> int:
        """Rows of the network in an evaluation of training: two under classifier-free guidance."""
        with in_training(self.policy, self.config.sampling.guidance_scale):
            return shapes_of(self.policy, self.blueprint).rows

    @property
    def parameters(self) -> int:
        """Parameters of the published model, without adapters."""
        return sum(map(weights_of, (self.policy.transformer, *self.policy.frozen.values())))

    @property
    def trained_parameters(self) -> int:
        return sum(p.numel() for p in self.policy.trainable_parameters())

    def seconds(self, card: Card) -> Seconds:
        """The time on a card, by its datasheet, without what ranks send each other."""
        return on_card(card, self.counts, self.work)

    def limit(self, card: Card, seconds: Seconds) -> Limit:
        """What limits an iteration that takes such `seconds` on a card."""
        return limit_of(card, self.sent, sum(seconds.iteration.values()), self.layout)


def make_plan(
    config: Config,
    *,
    cuda: bool,
    heldout: int,
    distinct_prompts: int,
    ranks: int = 1,
    ranks_per_node: int | None = None,
    network: float = NETWORK,
    known: Sequence[Estimate] = (),
    text_tokens: int | None = None,
) -> Estimate:
    """The plan of one rank of a run of `config` on CUDA devices or a CPU.

    The run has `heldout` held-out prompts and `distinct_prompts` different ones in all, of `text_tokens` where the model does
    not pad them; nodes send `network` GB/s to others. From estimates that are `known`, it takes the model and the traced calls
    where they are the same.
    """
    node = nodes_of(ranks, ranks_per_node)
    components.check_sharding(config, ranks, node)
    group = components.shard_group(config, ranks, node) if config.trainer.sharding != "none" else 1
    whole = config = settled(config, cuda)
    division = divided(config, World(size=ranks))  # rank 0's has the earliest branch steps, so most evaluations
    share = division.prompts.share(config.trainer.prompts_per_iteration, "trainer.prompts_per_iteration")
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"prompts_per_iteration": share})})
    looking = ranks if heldout >= ranks else 1  # ranks between which an evaluation is divided
    counts = count(config, math.ceil(heldout / looking), division.plans)
    blueprint = replace(read_blueprint(config.policy), text_tokens=text_tokens)
    alike = [it for it in known if (it.blueprint, it.config.policy) == (blueprint, config.policy)]
    with loading(f"policy.path={config.policy.path}: its config files describe no model that can be computed"):
        policy = alike[0].policy if alike else build_on_meta(blueprint, config.policy)
        components.check_judged_size(config, policy)
        components.check_trained_steps(config, policy)
        knobs = knob_evaluations(whole, policy, heldout, counts.times_evaluated)
        counts = replace(counts, knobs=math.ceil(knobs / looking))
        same = [it.traced for it in alike if _calls(it.config, it.counts, it.cuda) == _calls(config, counts, cuda)]
        traced = same[0] if same else trace_calls(blueprint, config, counts, like_cuda=cuda)
        shapes = shapes_of(policy, blueprint)
    table = {**config.rewards, **config.evaluation.rewards}
    device, length = "cuda" if cuda else "cpu", config.policy.num_frames or 1
    reward_costs = {name: cost_of_reward(entry, device, length) for name, entry in table.items()}
    memory = plan_memory(
        config,
        blueprint,
        policy,
        shapes,
        reward_costs,
        counts,
        traced,
        cuda=cuda,
        distinct_prompts=distinct_prompts,
        ranks=node,
        group=group,
    )
    return Estimate(
        config=config,
        cuda=cuda,
        counts=counts,
        memory=memory,
        traced=traced,
        blueprint=blueprint,
        policy=policy,
        shapes=shapes,
        reward_costs=reward_costs,
        distinct_prompts=distinct_prompts,
        layout=Layout(ranks, node, group, network),
    )


def _calls(config: Config, counts: Counts, cuda: bool) -> tuple[Any, ...]:
    """What calls of one model are traced from."""
    return config.algorithm, config.sampling, config.trainer.sharding, config.judged_size, counts, cuda
