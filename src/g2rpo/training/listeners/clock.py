"""Fits a run to a given time (`--within`)."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from g2rpo.core.capabilities import encode_ahead
from g2rpo.core.data import Row
from g2rpo.evaluation.controls import evaluations_of
from g2rpo.evaluation.heldout import Evaluation
from g2rpo.training.evaluator import Evaluator
from g2rpo.training.listeners.checkpoints import Checkpoints
from g2rpo.training.listeners.early_stop import EarlyStop
from g2rpo.training.listeners.listener import Listener
from g2rpo.training.loop import Loop
from g2rpo.training.pace import MEASURED, fitted_length

MARGIN = 1.1
"""Prompts are encoded ahead for so many times the iterations, which later fits may raise a
little."""


@dataclass
class Clock(Listener):
    """With `ends_at`, a time of rank 0's `time.monotonic`, fits the number of iterations to the
    time that is left. Without time left the run has ended, and is evaluated."""

    loop: Loop
    early_stop: EarlyStop
    checkpoints: Checkpoints
    evaluator: Evaluator
    set_length: Callable[[int, int], None]
    keeps_base: bool
    ends_at: float | None = None
    has_fitted: bool = False
    encoded: int = 0
    """The iterations whose prompts are encoded."""

    def listening(self) -> AbstractContextManager[object]:
        self.fit()
        self._encode_ahead()
        return nullcontext()

    def hear(self, row: Row, evaluation: Evaluation | None) -> None:
        if evaluation is None:
            self.fit()

    def fit(self) -> None:
        """Changes the config's number of iterations; its first change spreads evaluations over
        them."""
        if self.ends_at is None or not self.loop.iteration:
            return
        looks = [row for row in self.early_stop.alarms.rows if row["kind"] == "eval"]
        train = [row["seconds"] for row in self.early_stop.alarms.rows if row["kind"] == "train"]
        if not looks or not train:  # of a lost log
            return
        config, iteration = self.loop.config, self.loop.iteration
        left, look = self._left(looks[-1])
        found = fitted_length(
            config,
            iteration,
            train,
            look,
            left,
            first=not self.has_fitted,
            evaluated=looks[-1]["iteration"] == iteration,
            save=self.checkpoints.seconds,
        )
        # the first ones are slow: too early for more than to end
        if iteration < MEASURED and left > look:
            found = config
        asked = (found.trainer.iterations, found.evaluation.every)
        iterations, every = json.loads(self.loop.world.broadcast_text(json.dumps(asked)))
        if iteration < MEASURED and iterations > iteration:
            return
        self.has_fitted = True
        if (iterations, every) != (config.trainer.iterations, config.evaluation.every):
            self.set_length(iterations, every)
            self._encode_ahead()

    def _encode_ahead(self) -> None:
        """Encodes the prompts that a longer run has beside those that it began with: all at once,
        because text encoders move to the device for it and back."""
        iterations = self.loop.config.trainer.iterations
        if self.ends_at is None or iterations <= self.encoded:
            return
        self.encoded = math.ceil(MARGIN * iterations)
        to_come = range(self.loop.iteration, self.encoded)
        prompts = [prompt for later in to_come for prompt in self.loop.prompts_of(later)]
        encode_ahead(self.loop.policy, prompts)

    def _left(self, last: Row) -> tuple[float, float]:
        """The seconds that are left for training and evaluations, and those of an evaluation;
        `last` is the last one's row."""
        e = self.evaluator
        steps = e.sampler.num_steps
        knobs = evaluations_of(e.controls, steps) * e.controls_on / (steps * len(e.heldout))
        look = last["seconds"] / (1 if self.keeps_base or last["iteration"] else 1 + knobs)
        # files, pictures, and controls that are still to be sampled
        finishing = look * (0.25 + knobs * self.keeps_base)
        assert self.ends_at is not None
        return self.ends_at - time.monotonic() - finishing, look
