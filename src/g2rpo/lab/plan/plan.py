"""Estimates compute, memory and time of a run, from its config, for one device."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from g2rpo.config.read import completed, load_config
from g2rpo.config.schema import Config
from g2rpo.core.devices import pick_device, usable_memory
from g2rpo.core.distributed import World
from g2rpo.core.errors import UserError, counted, loading, refuse
from g2rpo.core.events import doing
from g2rpo.core.files import in_bytes, local
from g2rpo.data.prompts import build_prompts
from g2rpo.lab.plan.cards import CARDS, Card, card_of, find_card
from g2rpo.lab.plan.counting import CountedIteration, Counts, count, settled, spread_evaluations
from g2rpo.lab.plan.memory import CONTEXT_BYTES, PlannedMemory, plan_memory
from g2rpo.lab.plan.models import KnownModels, Model, RewardCost, cost_of_reward, longest_prompt
from g2rpo.lab.plan.seconds import PlannedSeconds, planned_seconds
from g2rpo.lab.plan.trace import Calls, trace_calls
from g2rpo.models.blueprint import read_blueprint
from g2rpo.models.offload import faults_of_offload
from g2rpo.models.pipeline_files import caution
from g2rpo.models.quantized import faults_of_quantization
from g2rpo.rewards.catalogue import check_rewards
from g2rpo.rollout.guidance import guided_by
from g2rpo.train.build import Planned
from g2rpo.train.checks import check_policy, faults_of_autocast
from g2rpo.train.consistency import SETTINGS, refuse_all
from g2rpo.train.found import find_settings
from g2rpo.train.ranks import divided, faults_of_sharding, prompts_to_come, shard_group

COUNTS_OF_ITERATION: dict[str, Callable[[CountedIteration], float]] = {
    "evaluations": lambda it: it.evaluations,
    "images": lambda it: it.images,
    "training_rows": lambda it: it.training_rows,
    "training_passes": lambda it: len(it.passes),
    "reference_rows": lambda it: it.reference_rows,
    "optimizer_steps": lambda it: it.optimizer_steps,
}
"""The counted quantities of an iteration, by name."""
CORES = 8
"""Cores of the CPU beside a card, unless it is this machine's."""
RANKS_PER_NODE = 8
"""Ranks of a node, if nothing else is known."""


@dataclass(frozen=True)
class Target:
    """The device of a plan: one of this machine, or a card by its datasheet."""

    name: str
    cuda: bool
    capacity: int
    """Bytes of the device's memory; of this machine's card those that are free."""
    card: Card | None
    cores: int = CORES
    limited: bool = False
    """Whether the capacity is one that was asked for, `--memory`."""

    def holds(self, plan: Estimate) -> bool:
        return plan.memory.needed <= self.capacity


def find_target(device: str) -> Target:
    """The target that `device` names: one of torch's on this machine, or "auto", or a card of
    `cards.CARDS`."""
    device = pick_device(device) if device == "auto" else device
    kind = device.partition(":")[0]
    if kind in ("cpu", "mps"):
        pick_device(device, "--device")
        name = "CPU" if kind == "cpu" else "Apple GPU"
        return Target(f"this machine's {name}", False, usable_memory(), None)
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise UserError(
                f"--device {device}: torch sees no CUDA device here; name a card instead: {', '.join(CARDS)}"
            )
        device = pick_device(device, "--device")
        name = torch.cuda.get_device_name(torch.device(device))
        free, total = torch.cuda.mem_get_info(torch.device(device))
        said = f"this machine's {name}"
        if total - free > CONTEXT_BYTES:
            said += f", of whose {in_bytes(total)} other programs use {in_bytes(total - free)}"
        return Target(said, True, free, card_of(name), torch.get_num_threads())
    card = find_card(device)
    return Target(card.name, True, int(card.memory_gib * 2**30), card)


def limited_target(device: str | None, gb: float) -> Target:
    """The target `device` with so many GB (10^9 bytes) of its memory at most; without one, some GPU
    that is as fast as the slowest known card with so many."""
    limit = int(gb * 1e9)
    if device is not None:
        target = find_target(device)
        return replace(target, capacity=min(limit, target.capacity), limited=True)
    card = min(CARDS.values(), key=lambda card: (card.memory_gib * 2**30 < limit, card.bfloat16))
    name = f"a GPU of {gb:g} GB, as fast as an {card.name}"
    return Target(name, True, limit, card, limited=True)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The work and memory of each rank on a device of the target's kind, and its time on any
    card."""

    config: Config
    """The config of one rank, with its share of the prompts."""
    counts: Counts
    memory: PlannedMemory
    traced: Calls
    model: Model
    reward_costs: dict[str, RewardCost | None]
    distinct_prompts: int
    """Distinct prompts, over all ranks."""
    ranks: int

    @property
    def network_rows(self) -> int:
        """Rows of the network in an evaluation of training: two under classifier-free guidance."""
        with guided_by(self.model.policy, self.config.sampling.guidance_scale):
            return self.model.shapes.rows

    @property
    def trained_parameters(self) -> int:
        return sum(p.numel() for p in self.model.trained)

    def seconds(self, card: Card, cores: int = CORES) -> PlannedSeconds:
        """The time on a card, by its datasheet, without what ranks send each other."""
        return planned_seconds(self, card, cores)

    def seconds_on(self, target: Target) -> PlannedSeconds | None:
        """That on a target; None where it has no datasheet."""
        return self.seconds(target.card, target.cores) if target.card else None


def nodes_of(ranks: int, asked: int | None) -> int:
    """The ranks of a node: `asked`, or `RANKS_PER_NODE` where there are more; UserError if they do not divide
    `ranks`."""
    node = asked or min(ranks, RANKS_PER_NODE)
    if ranks % node:
        raise UserError(
            f"--ranks-per-node {node}: {ranks} ranks do not fill such nodes; give a divisor of {ranks}"
        )
    return node


def make_plan(
    config: Config,
    *,
    cuda: bool,
    heldout: int,
    distinct_prompts: int,
    ranks: int = 1,
    ranks_per_node: int | None = None,
    known: KnownModels | None = None,
    text_tokens: int | None = None,
) -> Estimate:
    """The plan of one rank of a run of `config` on CUDA devices or a CPU.

    The run has `heldout` held-out prompts, and `distinct_prompts` different ones in all, of
    `text_tokens` where the model does not pad them. What earlier plans know of models, `known`, is
    not computed again.
    """
    node = nodes_of(ranks, ranks_per_node)
    refuse(faults_of_sharding(config, ranks, node))
    policy = config.policy
    refuse(faults_of_quantization(policy.quantize, policy.tuning))
    refuse(faults_of_offload(policy, policy.tuning, "cuda" if cuda else "cpu"))
    refuse(faults_of_autocast(config))
    group = shard_group(config, ranks, node) if config.trainer.sharding != "none" else 1
    whole = config = settled(config, cuda)
    # rank 0's has the earliest branch steps, so most evaluations
    division = divided(config, World(size=ranks))
    key = "prompts_per_iteration"
    share = division.by_prompt.share(config.trainer.prompts_per_iteration, f"trainer.{key}")
    config = config.changed("trainer", **{key: share})
    looking = ranks if heldout >= ranks else 1  # ranks between which an evaluation is divided
    counts = count(config, math.ceil(heldout / looking), division.by_plan)
    blueprint = replace(read_blueprint(config.policy), text_tokens=text_tokens)
    known = KnownModels() if known is None else known
    with loading(
        f"policy.path={config.policy.path}: its config files describe no model that can be computed"
    ):
        model = known.model(blueprint, config.policy)
        check_policy(config, model.policy)
        spread = spread_evaluations(whole, heldout, counts.times_evaluated)
        counts = replace(counts, spread=math.ceil(spread / looking))
        with doing(f"tracing {config.policy.path}"):
            traced = trace_calls(blueprint, config, counts, like_cuda=cuda, known=known.calls)
    device, length = "cuda" if cuda else "cpu", config.policy.num_frames or 1
    table = config.all_rewards.items()
    reward_costs = {name: cost_of_reward(entry, device, length) for name, entry in table}
    memory = plan_memory(
        config,
        model,
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
        counts=counts,
        memory=memory,
        traced=traced,
        model=model,
        reward_costs=reward_costs,
        distinct_prompts=distinct_prompts,
        ranks=ranks,
    )


def _cautions(result: Estimate, config: Config) -> Iterator[str]:
    """Assumptions of the plan of `config`, and what it does not count."""
    path = str(local(config.policy.path))
    if said := caution(config.policy.path, path if os.path.isdir(path) else config.policy.path):
        yield said
    if result.memory.unknown:
        yield f"Not known, so neither weights nor time are counted: {', '.join(result.memory.unknown)}."
    elsewhere = [
        name
        for name, cost in result.reward_costs.items()
        if cost and cost.device not in ("cpu", "cuda", "cuda:0")
    ]
    if elsewhere:
        yield f"On another device, so not in this one's memory: {', '.join(elsewhere)}."
    kept = [name for name in config.rewards if (it := result.reward_costs.get(name)) and it.bytes]
    if kept and config.algorithm.uses_rewards:
        latents = counted(config.trainer.micro_batch_size, "latent")
        yield f"The gradient of rewards keeps their activations, which are not counted: of {latents} by {', '.join(kept)}."
    for name in ("batch_size", "decode_batch_size"):
        if getattr(config.sampling, name) == "auto":
            taken = getattr(result.config.sampling, name)
            yield f"sampling.{name}=auto is planned as {taken}; the run asks its GPU, and leaves a fifth of it free."
    if config.evaluation.every_minutes is not None:
        yield "evaluation.every_minutes: evaluations that the clock adds are not counted."


class Planner:
    """Plans of `recipe` with `overrides` on `ranks` devices, `ranks_per_node` in a machine.

    UserError for a config that no run could have.
    """

    def __init__(
        self,
        recipe: str,
        overrides: Sequence[str],
        ranks: int = 1,
        ranks_per_node: int | None = None,
    ) -> None:
        self.recipe, self.overrides = recipe, overrides
        self.ranks, self.ranks_per_node = ranks, ranks_per_node
        self._notes: list[str] = []
        note = self._notes.append
        self.config = completed(load_config(recipe, overrides, note), note)
        check_rewards(self.config.all_rewards)
        refuse_all(SETTINGS, find_settings(self.config))
        self.heldout, self.distinct, self.text_tokens = self._count_prompts()
        self._made: dict[tuple[bool, Sequence[str]], Estimate] = {}
        self._known = KnownModels()

    def plan(self, *more: str, cuda: bool = True) -> Estimate:
        """The plan with `more` overrides, of the same prompts, on CUDA devices or a CPU. Models and
        calls of earlier plans are traced once."""
        if (cuda, more) not in self._made:
            config = self.config
            if more:
                config = completed(load_config(self.recipe, [*self.overrides, *more]))
            self._made[cuda, more] = make_plan(
                config,
                cuda=cuda,
                heldout=self.heldout,
                distinct_prompts=self.distinct,
                ranks=self.ranks,
                ranks_per_node=self.ranks_per_node,
                known=self._known,
                text_tokens=self.text_tokens,
            )
        return self._made[cuda, more]

    def notes(self, result: Estimate) -> list[str]:
        """What a plan of these assumes, and what it does not count."""
        return [*self._notes, *_cautions(result, self.config)]

    def _count_prompts(self) -> tuple[int, int, int | None]:
        """(held-out prompts, different prompts of the run, tokens of the longest where they
        count)."""
        config, read = self.config, list[list[str]]()
        sources = {
            "prompts.train": config.prompts.train,
            "evaluation.prompts": config.evaluation.prompts,
        }
        for key, source in sources.items():
            try:
                read.append(build_prompts(source, key))
            except UserError as error:
                why = str(error).split(";")[0]
                self._notes.append(
                    f"{why}. As many prompts as the config asks for are assumed, all different."
                )
        asked = config.evaluation.num_prompts
        if len(read) < 2:
            drawn = config.trainer.iterations * config.trainer.prompts_per_iteration
            return asked, drawn + asked, None
        train, heldout = read[0], read[1][:asked]
        to_come = prompts_to_come(config, train, heldout)
        try:
            tokens = longest_prompt(config.policy, to_come)
        except UserError as error:
            self._notes.append(f"{error}. The most that a prompt may have are assumed.")
            tokens = None
        return len(heldout), len(to_come), tokens


def predict(
    config: Config, ranks: int, prompts: Sequence[str], heldout: Sequence[str]
) -> Planned | None:
    """`train.build.Predict`: None for a CPU and for a card without a datasheet; UserError for a
    run beyond planning."""
    target = find_target(config.policy.device)
    if target.card is None:
        return None
    try:
        to_come = prompts_to_come(config, prompts, heldout)
        plan = make_plan(
            config,
            cuda=True,
            heldout=len(heldout),
            distinct_prompts=len(to_come),
            ranks=ranks,
            text_tokens=longest_prompt(config.policy, to_come),
        )
    except (
        Exception
    ) as error:  # a user's own policy or reward may be beyond a plan, but not beyond training
        raise UserError(f"no plan stands beside this run: {error}") from error
    seconds = plan.seconds(target.card, target.cores)
    peak = max(plan.memory.moments.values())
    return Planned(target.card.name, sum(seconds.iteration.values()), peak, seconds.compiling)
