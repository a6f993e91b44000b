"""Trackers from their names in a config."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from g2rpo.core import plugins
from g2rpo.core.errors import UserError
from g2rpo.monitor.trackers import Tracker

TRACKERS = {
    "tensorboard": "g2rpo.monitor.trackers:TensorBoard",
    "wandb": "g2rpo.monitor.trackers:WandB",
    "trackio": "g2rpo.monitor.trackers:Trackio",
}


def check_trackers(names: Sequence[str]) -> None:
    """Refuses a tracker whose library is not installed."""
    for name in names:
        plugins.find("trackers", name, TRACKERS)
        if name in TRACKERS and importlib.util.find_spec(name) is None:
            raise UserError(f"trackers: {name} is not installed; `pip install {name}`, or leave it out")


def build_trackers(names: Sequence[str]) -> list[Tracker]:
    """The trackers of a config; nothing of their libraries is imported yet."""
    check_trackers(names)
    return [plugins.find("trackers", name, TRACKERS)() for name in names]
