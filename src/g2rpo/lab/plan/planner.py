"""Plans of a recipe with more overrides, and the overrides with which it fits in a device's memory."""

from __future__ import annotations

from collections.abc import Sequence

from g2rpo.app.ahead import prompts_to_come
from g2rpo.assembly import components
from g2rpo.assembly.adapters import completed
from g2rpo.assembly.checks import check_plans
from g2rpo.assembly.config import load_config
from g2rpo.assembly.prompts import build_prompts
from g2rpo.assembly.rewards import check_rewards
from g2rpo.core.capabilities import candidates_of
from g2rpo.core.errors import UserError
from g2rpo.lab.plan.advice import what_fits
from g2rpo.lab.plan.network import NETWORK, nodes_of
from g2rpo.lab.plan.plan import Estimate, Target, make_plan
from g2rpo.lab.plan.tokens import longest_prompt


class Planner:
    """Plans of `recipe` with `overrides` on `ranks` devices, `ranks_per_node` in a machine that sends `network` GB/s to others.

    UserError for a config that no run could have. `notes` has what is assumed.
    """

    def __init__(
        self,
        recipe: str,
        overrides: Sequence[str],
        ranks: int = 1,
        ranks_per_node: int | None = None,
        network: float = NETWORK,
    ) -> None:
        self.recipe, self.overrides, self.ranks = recipe, overrides, ranks
        self.ranks_per_node, self.network = ranks_per_node, network
        self.notes: list[str] = []
        self.config = completed(load_config(recipe, overrides, self.notes.append), self.notes.append)
        check_rewards({**self.config.rewards, **self.config.evaluation.rewards})
        components.check_sharding(self.config, ranks, nodes_of(ranks, ranks_per_node))
        check_plans(self.config.algorithm, self.config.sampling)
        self.text_tokens: int | None = None
        self.heldout, self.distinct_prompts = self._listed_prompts()
        self._made: dict[tuple[bool, Sequence[str]], Estimate] = {}

    def plan(self, *more: str, cuda: bool = True) -> Estimate:
        """The plan with `more` overrides, on CUDA devices or a CPU. Models and calls of earlier plans are traced once."""
        if (cuda, more) not in self._made:
            self._made[cuda, more] = make_plan(
                completed(load_config(self.recipe, [*self.overrides, *more])) if more else self.config,
                cuda=cuda,
                heldout=self.heldout,
                distinct_prompts=self.distinct_prompts,
                ranks=self.ranks,
                ranks_per_node=self.ranks_per_node,
                network=self.network,
                known=list(self._made.values()),
                text_tokens=self.text_tokens,
            )
        return self._made[cuda, more]

    def fitting(self, target: Target) -> list[str] | None:
        """The mildest overrides with which the run fits in the memory of `target`; [] if it does, None if none are known."""

        def fits(more: Sequence[str]) -> bool:
            return target.holds(self.plan(*more, cuda=target.cuda))

        return [] if fits([]) else what_fits(self.config, self.ranks, fits)

    def _listed_prompts(self) -> tuple[int, int]:
        """(held-out prompts, different prompts of the run); for a list that is missing, the numbers of the config."""
        config = self.config
        n = config.trainer.iterations * config.trainer.prompts_per_iteration * candidates_of(config.algorithm)
        read: list[list[str]] = []
        for key, source in (("prompts.train", config.prompts.train), ("evaluation.prompts", config.evaluation.prompts)):
            try:
                read.append(build_prompts(source, key))
            except UserError as error:
                why = str(error).split(";")[0]
                self.notes.append(f"{why}. As many prompts as the config asks for are assumed, all different.")
        if len(read) < 2:
            return config.evaluation.num_prompts, n + config.evaluation.num_prompts
        train, heldout = read[0], read[1][: config.evaluation.num_prompts]
        to_come = prompts_to_come(config, train, heldout)
        try:
            self.text_tokens = longest_prompt(config.policy, to_come)
        except UserError as error:
            self.notes.append(f"{error}. The most that a prompt may have are assumed.")
        return len(heldout), len(to_come)
