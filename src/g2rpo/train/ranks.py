"""What a rank does in an iteration: all plans of its share of the prompts or, with more ranks than
prompts, some of one's."""

from __future__ import annotations

from dataclasses import dataclass

from g2rpo.config.schema import Config
from g2rpo.config.work import plans_in
from g2rpo.core.distributed import World
from g2rpo.core.errors import UserError


@dataclass(frozen=True)
class Division:
    """This rank among ranks with other prompts, and among those with other plans of the same
    prompt. Neither is for collectives. In rank order the groups of all are those of one rank,
    prompt by prompt."""

    prompts: World
    plans: World

    def own(self, prompts: int) -> int:
        """How many of an iteration's prompts this rank has."""
        return prompts // self.prompts.size


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
        world.share(prompts, "trainer.prompts_per_iteration")
        return Division(world, World())
    each = world.size // prompts
    if (why := _undivided(config, each)) is not None:
        raise UserError(
            f"trainer.prompts_per_iteration={prompts} cannot be divided over {world.size} ranks: {why}; "
            f"set it to {world.size}, or start {prompts} rank{'s' * (prompts > 1)}"
        )
    return Division(World(world.rank // each, prompts), World(world.rank % each, each))


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
