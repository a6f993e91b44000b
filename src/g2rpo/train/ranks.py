"""What a rank does in an iteration: all plans of its share of the prompts or, with more ranks than
prompts, some of one's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from g2rpo.config.schema import Config
from g2rpo.config.work import plans_in
from g2rpo.core.devices import pick_device
from g2rpo.core.distributed import ALONE, World, number_in
from g2rpo.core.errors import UserError
from g2rpo.data.prompts import PromptOrder
from g2rpo.models.sharding import Sharded


@dataclass(frozen=True)
class Division:
    """This rank among ranks with other prompts, and among those with other plans of the same
    prompt. Neither is for collectives. In rank order the groups of all are those of one rank,
    prompt by prompt."""

    by_prompt: World
    by_plan: World

    def own(self, prompts: int) -> int:
        """How many of an iteration's prompts this rank has."""
        return prompts // self.by_prompt.size


def divided(config: Config, world: World) -> Division:
    """The division of an iteration; UserError if the ranks cannot have equally many groups, or need
    each other's."""
    prompts, every = config.trainer.prompts_per_iteration, config.algorithm.update_every
    if (
        world.size > 1
        and isinstance(every, float)
        and config.sampling.num_steps % (parts := round(1 / every))
    ):
        raise UserError(
            f"algorithm.update_every={every:g} makes {parts} parts, into which {config.sampling.num_steps} steps cannot be "
            "dealt out evenly on several ranks; change it or sampling.num_steps"
        )
    if world.size % prompts or world.size == prompts:
        # no more ranks than prompts; `share` refuses the rest
        world.share(prompts, "trainer.prompts_per_iteration")
        return Division(world, World())
    each = world.size // prompts
    if (why := _undivided(config, each)) is not None:
        raise UserError(
            f"trainer.prompts_per_iteration={prompts} cannot be divided over {world.size} ranks: {why}; "
            f"set it to {world.size}, or start {prompts} rank{'s' * (prompts > 1)}"
        )
    return Division(World(world.rank // each, prompts), World(world.rank % each, each))


def prompts_to_come(
    config: Config,
    prompts: Sequence[str],
    heldout: Sequence[str],
    world: World = ALONE,
    iteration: int = 0,
) -> list[str]:
    """The distinct prompts of this rank from `iteration` on: its training prompts and its held-out
    prompts."""
    order = PromptOrder(prompts, config.trainer.seed)
    size = config.trainer.prompts_per_iteration
    own = divided(config, world).by_prompt
    batches = [
        own.shard(order.batch(later, size)) for later in range(iteration, config.trainer.iterations)
    ]
    return list(dict.fromkeys(chain(*batches, world.shard_or_all(heldout))))


def _undivided(config: Config, each: int) -> str | None:
    """Why `each` ranks cannot have one prompt's plans between them; None if they can."""
    algorithm = config.algorithm
    plans = len(plans_in(config, 0))
    if plans == 1:
        more = ", and with algorithm.branch_schedule=all one for every branch step"
        return f"each has one group in an iteration{more if hasattr(algorithm, 'branch_schedule') else ''}"
    if plans % each:
        return f"the {plans} groups of a prompt cannot be divided over {each} ranks"
    if algorithm.update_every != "rollout" and not isinstance(algorithm.update_every, int):
        return f"algorithm.update_every={algorithm.update_every} takes an update from some groups of every prompt"
    if algorithm.drop_zero_advantages:
        return "the algorithm leaves out members without any advantage in all groups of a prompt"
    if config.trainer.sharding != "none":
        return f"trainer.sharding={config.trainer.sharding} needs equal calls on all ranks"
    return None


def ranks_of_node() -> int | None:
    """The ranks of this node, as a launcher says it."""
    return number_in("LOCAL_WORLD_SIZE", 0) or None


def build_sharding(config: Config, world: World) -> Sharded | None:
    """The weight placement of `trainer.sharding`, of which there are no `faults_of_sharding`."""
    if config.trainer.sharding == "none":
        return None
    group = shard_group(config, world.size, ranks_of_node())
    whole = config.trainer.sharding == "training"
    return Sharded(world, pick_device(config.policy.device), whole_samples=whole, group=group)


def shard_group(config: Config, ranks: int, node: int | None) -> int:
    """The ranks that a weight is divided over, of `ranks` in nodes of `node` (None: unknown), in a
    config without `faults_of_sharding`."""
    asked = config.trainer.shard_group
    return {"all": ranks, "node": node or 0}[asked] if isinstance(asked, str) else asked


def faults_of_sharding(config: Config, ranks: int, node: int | None) -> Iterator[str]:
    """Of a `trainer.sharding` that does not fit the number of ranks (in nodes of `node`) or other
    settings."""
    if config.trainer.sharding == "none":
        if config.trainer.shard_group != "all":
            yield "trainer.shard_group divides what trainer.sharding shards, which is none; set sharding, or take it out"
        return
    asked = f"trainer.sharding={config.trainer.sharding}"
    if config.policy.tuning != "full":
        yield f"{asked} divides what policy.tuning=full trains; adapters are small; with lora every rank holds all weights"
    if ranks == 1:
        how = "start them with torchrun (plan for them with --ranks)"
        yield f"{asked} divides weights over several processes: {how}, or take it out"
    for name in ("compile", "offload"):
        if getattr(config.policy, name) is True:
            yield f"{asked}: policy.{name} is not for weights that come and go in each block; take it out"
    if config.trainer.sharding == "full" and config.sampling.batch_size == "auto":
        yield f"{asked}: sampling.batch_size=auto is each rank's own, but they gather weights together; give a number"
    divided = f"trainer.shard_group={config.trainer.shard_group}"
    if config.trainer.shard_group == "node" and node is None:
        yield f"{divided} needs LOCAL_WORLD_SIZE, which torchrun sets; set it, or give a number"
        return
    group = shard_group(config, ranks, node)
    if ranks % group:
        yield f"{divided}: {ranks} ranks are no multiple of {group}; take a divisor of {ranks}"
    if group == 1 < ranks:
        yield f"{divided}: one rank would hold all weights, as with trainer.sharding=none; set that"
