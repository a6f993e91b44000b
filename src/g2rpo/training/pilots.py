"""Chooses a learning rate by pilots: short runs on training prompts, before a run begins (`g2rpo
train --find-rate`)."""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from g2rpo.config.schema import Config
from g2rpo.core.data import Row
from g2rpo.core.errors import Stopped, UserError, counted
from g2rpo.core.intervals import FEWEST_VALUES
from g2rpo.core.types import Reward
from g2rpo.evaluation.heldout import Evaluation, floors_of
from g2rpo.run.base import SharedBase
from g2rpo.run.rates import LONGER, PILOT_SEEDS, REPEATED, STOPPED, Pilot, Sweep, gain_at, gains
from g2rpo.run.run import Run
from g2rpo.training.pace import MEASURED, with_length
from g2rpo.training.trainer import Trainer

PART = 4
"""The run has so many times the iterations of a pilot."""
PILOT_SHARE = 1 / 3
"""The share of a given time that all pilots may take."""
PILOT_PROMPTS = 64
"""The most training prompts on which a pilot is evaluated."""


def pilot_config(config: Config, rate: float, iterations: int | None = None) -> Config:
    """The config of a pilot, of a quarter of the run's iterations; it is evaluated at its end
    alone."""
    c = config.trainer
    iterations = iterations or max(MEASURED, math.ceil(c.iterations / PART))
    share = min(1.0, iterations / c.iterations)  # of the run: warm-up and average are shorter alike
    optim = {
        "learning_rate": rate,
        "warmup_iterations": int(config.optim.warmup_iterations * share),
        "ema_decay": max(0.0, 1 - (1 - config.optim.ema_decay) / share),
        "ema_every": config.optim.ema_every and max(1, int(config.optim.ema_every * share)),
    }
    looks = {"controls": False, "every_minutes": None}
    alarms = {name: "off" if action == "off" else "warn" for name, action in config.alarms.items()}
    changed = config.model_copy(
        update={
            "optim": config.optim.model_copy(update=optim),
            "trainer": c.model_copy(
                update={"seed": c.seed + PILOT_SEEDS, "checkpoint_minutes": None}
            ),
            "evaluation": config.evaluation.model_copy(update=looks),
            "alarms": alarms,
        }
    )
    return with_length(changed, iterations, iterations)


def pilot_prompts(config: Config, prompts: Sequence[str]) -> Sequence[str]:
    """The training prompts on which pilots are evaluated, each once: pairs of pictures repeat
    theirs."""
    return [*dict.fromkeys(prompts)][: min(PILOT_PROMPTS, config.evaluation.num_prompts)]


def check_pilots(config: Config, prompts: Sequence[str]) -> None:
    """UserError for so few training prompts that no gain has an error, so that none is above it."""
    found = len(pilot_prompts(config, prompts))
    if found < FEWEST_VALUES:
        raise UserError(
            f"--find-rate: pilots would be evaluated on {counted(found, 'training prompt')}, and the error of "
            f"a gain takes {FEWEST_VALUES}; raise evaluation.num_prompts, or name more prompts in prompts.train"
        )


class Pilots:
    """Runs pilots with the objects of a run: `parts` are the arguments of its trainer. The policy's
    weights and the rewards' states are those of the beginning before each pilot, and after the
    last."""

    def __init__(self, parts: Mapping[str, Any], shared_base: SharedBase | None = None) -> None:
        self.config: Config = parts["config"]
        self.parts = parts
        self.shared_base = shared_base  # of the evaluations on training prompts
        self.parameters = list(parts["policy"].trainable_parameters())
        self.weights = [parameter.detach().to("cpu", copy=True) for parameter in self.parameters]
        self.world = parts["shards"].world
        self.rewards: Mapping[str, Reward] = parts["rewards"] | parts["judges"]
        self.states = {name: copy.deepcopy(reward.state) for name, reward in self.rewards.items()}
        self.base: tuple[Row, Evaluation] | None = None

    def find(
        self,
        sweep: Sweep,
        run: Run,
        ends_at: float | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> float:
        """The rate that `sweep` takes, whose missing pilots are run; each is stored in `run` and
        told as it ends. They are shorter if their `PILOT_SHARE` of the time until `ends_at`
        (`time.monotonic`) is short."""
        length = sweep.pilots[0].iterations if sweep.pilots else None
        while rates := sweep.missing():
            began = time.monotonic()
            if length is None and ends_at is not None:
                length = self._length(
                    rates[0],
                    (ends_at - began) * PILOT_SHARE / (len(sweep.rates) + REPEATED * LONGER),
                )
            longer = len(sweep.pilots) >= len(sweep.rates)
            pilot = self._pilot(rates[0], length and length * (LONGER if longer else 1), began)
            tell(str(pilot))
            sweep.pilots.append(pilot)
            length = sweep.pilots[0].iterations
            if self.world.is_main:
                run.write_rates(sweep)
        self.reset()
        return sweep.choose()

    def _length(self, rate: float, seconds: float) -> int:
        """The iterations of a pilot that takes `seconds`, by the first iterations of one."""
        trainer = self._begun(rate, None)
        times = [trainer.iterate()["seconds"] for _ in range(MEASURED)]
        look = trainer.alarms.rows[0]["seconds"]
        most = trainer.config.trainer.iterations
        fits = math.floor((seconds - look) / statistics.median(times[1:]))
        return int(self.world.broadcast_text(str(min(most, max(MEASURED, fits)))))

    def _pilot(self, rate: float, length: int | None, began: float) -> Pilot:
        trainer = self._begun(rate, length)
        assert self.base is not None
        alarms: dict[str, str] = {}
        try:
            for row in trainer.train():
                alarms |= row.get("alarms", {})
        except Stopped as error:
            if type(error) is not Stopped:
                raise
            alarms[STOPPED] = str(error)
        found = np.full(len(trainer.heldout), math.nan)
        if trainer.final is not None:
            _, base = self.base
            weights = {name: entry.weight for name, entry in self.config.aims.items()}
            floors = dict(zip(weights, floors_of(self.config.aims, lambda: base), strict=True))
            sides = (base.scores, trainer.final.scores)
            before, after = (
                {
                    name: scores[name].minimum(floor).double().numpy()
                    for name, floor in floors.items()
                }
                for scores in sides
            )
            found = gains(before, after, weights)
        gain = gain_at(rate, [found], alarms)
        return Pilot(
            **vars(gain),
            iterations=trainer.config.trainer.iterations,
            seconds=time.monotonic() - began,
        )

    def _begun(self, rate: float, length: int | None) -> Trainer:
        """A trainer at the beginning of a pilot; its evaluation of the base model is that of the
        first pilot."""
        self.reset()
        said = self.parts["notify"]
        trainer = Trainer(
            **{
                **self.parts,
                "config": pilot_config(self.config, rate, length),
                "heldout": pilot_prompts(self.config, self.parts["prompts"]),
                "run_dir": None,
                "trackers": [],
                "notify": lambda message: said(f"pilot at {rate:g}: {message}"),
            }
        )
        if self.base is None:
            trainer.shared_base = self.shared_base
            row = trainer.evaluate()
            assert trainer.evaluator.baseline is not None
            self.base = row, trainer.evaluator.baseline
        row, base = self.base
        trainer.alarms.rows, trainer.alarms.history, trainer.evaluator.baseline = (
            [row],
            {0: base.scores},
            base,
        )
        return trainer

    @torch.no_grad()
    def reset(self) -> None:
        """Weights and states as at the beginning, and no trainer in memory."""
        gc.collect()  # a trainer refers to itself, and holds moments and averages
        for parameter, weight in zip(self.parameters, self.weights, strict=True):
            parameter.copy_(weight)
        for name, reward in self.rewards.items():
            if self.states[name] is not None or reward.state is not None:
                reward.state = copy.deepcopy(self.states[name])
