"""The plan of a run that is under way, on this machine's card."""

from __future__ import annotations

from g2rpo.app.prediction import Planned
from g2rpo.config.schema import Config
from g2rpo.lab.plan.plan import find_target, make_plan


def predict(config: Config, ranks: int, heldout: int) -> Planned | None:
    """`app.prediction.Predict`: None for a CPU, a card without a datasheet, and a model that cannot be planned."""
    target = find_target(config.policy.device)
    if target.card is None:
        return None
    try:
        plan = make_plan(config, cuda=True, heldout=heldout, distinct_prompts=heldout, ranks=ranks)
    except Exception:  # a user's own policy or reward may be beyond a plan, but not beyond training
        return None
    seconds = sum(plan.seconds(target.card).iteration.values())
    return Planned(target.card.name, seconds, max(plan.memory.moments.values()))
