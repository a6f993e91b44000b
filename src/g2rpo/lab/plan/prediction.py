"""The plan of a run that is under way, on this machine's card."""

from __future__ import annotations

from collections.abc import Sequence

from g2rpo.app.ahead import prompts_to_come
from g2rpo.app.prediction import Planned
from g2rpo.config.schema import Config
from g2rpo.core.errors import UserError
from g2rpo.lab.plan.plan import find_target, make_plan
from g2rpo.lab.plan.tokens import longest_prompt


def predict(config: Config, ranks: int, prompts: Sequence[str], heldout: Sequence[str]) -> Planned | None:
    """`app.prediction.Predict`: None for a CPU and for a card without a datasheet; UserError for a run beyond planning."""
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
    except Exception as error:  # a user's own policy or reward may be beyond a plan, but not beyond training
        raise UserError(f"no plan stands beside this run: {error}") from error
    seconds = sum(plan.seconds(target.card).iteration.values())
    return Planned(target.card.name, seconds, max(plan.memory.moments.values()))
