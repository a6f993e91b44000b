"""What a run does at this moment, as its status.json says. Loads no torch, so that `g2rpo watch`
answers at once."""

from __future__ import annotations

import time
from typing import Annotated

from pydantic import BaseModel, Field

COMPARING = "comparing base and tuned"
"""The last phase of a run."""
Amount = Annotated[int, Field(ge=0)]


class Status(BaseModel):
    """A phase of a run, such as "training": begun at `since` (seconds since 1970), `done` of its
    `of` network evaluations (0: not known). `ended` is why training ended early."""

    phase: str
    since: Annotated[float, Field(ge=0, le=1e12)]
    done: Amount = 0
    of: Amount = 0
    ended: str | None = None


def begun(phase: str, of: int = 0) -> Status:
    """A phase that begins now."""
    return Status(phase=phase, since=time.time(), of=of)
