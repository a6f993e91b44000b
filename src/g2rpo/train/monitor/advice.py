"""The alarms in a run's log, and what helps against each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from g2rpo.core.data import Row

HELPS = {
    "drift": "rollout and training disagree about the model: find what differs, or use float32 or a larger clip range",
    "masked": "a reward gives no scores: look at its code, or at the log of its server",
    "silent": "zero-variance groups have no gradient: a finer reward, harder or easier prompts, more noise (eta)",
    "saturated": "advantages are mostly signs: raise algorithm.advantage_clip, or lower the weights of the rewards",
    "hacking": "the reward is being gamed: train on the fallen reward too, lower the learning rate, add algorithm.kl_weight",
    "decline": "the model is getting worse: lower the learning rate, or stop earlier",
    "pictures": "look at samples/ for blank, noisy or oversaturated ones; lower the learning rate, add algorithm.kl_weight",
    "diversity": "pictures of one prompt become alike: stop earlier, lower the learning rate, add algorithm.kl_weight",
}
"""By alarm (`train.monitor.alarms.ALARMS`)."""
ALIKE = 0.5
"""The alarm `diversity`: the least spread of a prompt's pictures, as a share of the base's."""
DIVERSITIES = {"right pictures": "diversity_right", "pictures": "diversity"}
"""Which pictures it is of, and its name in the log."""


@dataclass
class Occurrence:
    """An alarm, from its first row to the last consecutive row of its kind; `said` is the first
    row's text."""

    name: str
    first: int
    last: int
    said: str


def occurrences(rows: Sequence[Row]) -> list[Occurrence]:
    """Every alarm of a log, in the order in which they were raised."""
    found: list[Occurrence] = []
    for kind in ("train", "eval"):
        standing: dict[str, Occurrence] = {}
        for row in rows:
            if row["kind"] != kind:
                continue
            said, at = row.get("alarms", {}), row["iteration"]
            for name in standing.keys() - said.keys():
                standing.pop(name)
            for name in said:
                if name not in standing:
                    standing[name] = Occurrence(name, at, at, said[name])
                    found.append(standing[name])
                standing[name].last = at
    return sorted(found, key=lambda one: one.first)
