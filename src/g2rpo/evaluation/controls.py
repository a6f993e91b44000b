"""Free knobs of sampling, as controls: what the untrained model does with a smaller first noise, more steps, another guidance
scale or another solver. A gain of training counts where it exceeds the best of these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from g2rpo.config.schema import Section, Steps
from g2rpo.flow import flow_sde, ode_step, sde_kernel
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.tails import Tails
from g2rpo.seeding import generator_for
from g2rpo.statistics import Interval, bootstrap_mean
from g2rpo.types import Policy

NOISES = (0.0, 0.3, 0.5, 0.7)
"""Scales of the first noise."""
STEPS = (2, 5)
"""Multiples of the number of steps."""
GUIDANCE = (0.5, 1.5, 2.0, 3.0)
"""Multiples of the guidance scale of a model that is sampled with one."""
TAILS = {"euler": Tails(), "ab2": Tails(solver="ab2"), "dpmpp2m": Tails(solver="dpmpp2m"), "forecast": Tails(forecast=True)}
ETA = 0.7
"""Of the stochastic solver, "sde": Flow-GRPO's noise on all steps but the last."""


class Control(Section):
    """How pictures are sampled: settings that cost no training. Those that are left out are the evaluation's own."""

    noise: Annotated[NonNegativeFloat, Field(le=10)] = 1.0
    """The first noise is multiplied by it."""
    steps: Steps | None = None
    guidance: NonNegativeFloat | None = None
    solver: Literal["euler", "ab2", "dpmpp2m", "forecast", "sde"] = "euler"

    @property
    def knobs(self) -> dict[str, float | str]:
        """What is changed, by name."""
        named = {"first noise x": self.noise, "steps": self.steps, "guidance": self.guidance, "solver": self.solver}
        plain = {"first noise x": 1.0, "solver": "euler"}
        return {name: value for name, value in named.items() if value is not None and value != plain.get(name)}

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {value:g}" if isinstance(value, int | float) else f"{name} {value}" for name, value in self.knobs.items()
        )

    def sample(self, engine: Engine, x: Tensor, seed: int, first: int) -> Tensor:
        """Latents at sigma = 0 from first noise x, whose rows are the prompts `first`, `first` + 1, ..."""
        x = x * self.noise
        if self.solver != "sde":
            return engine.sample(x, TAILS[self.solver])
        kernel, rows = sde_kernel(flow_sde(engine.sigmas, ETA)), range(len(x))
        for step in range(engine.num_steps):
            v, here, there = engine.velocity(x, [step] * len(x), rows), engine.sigmas[step], engine.sigmas[step + 1]
            if there == 0:
                return ode_step(x, v, here, there)
            noise = [torch.randn(x.shape[1:], generator=generator_for(seed, "sde", first + row, step)) for row in rows]
            x = kernel(x, v, here, there).sample(torch.stack(noise).to(x.device))
        return x

    @contextmanager
    def guiding(self, policy: Policy) -> Iterator[None]:
        """While entered, the policy has the control's guidance scale."""
        if self.guidance is None:
            yield
            return
        own: Any = getattr(policy, "policy", policy)  # of a CachedPolicy
        before, own.guidance_scale = own.guidance_scale, self.guidance
        try:
            yield
        finally:
            own.guidance_scale = before


PLAIN = Control()


def guidance_of(policy: object) -> float | None:
    """The guidance scale with which a policy samples; None without one."""
    scale = getattr(getattr(policy, "policy", policy), "guidance_scale", None)
    return scale if scale is not None and scale > 1 else None


def default_controls(num_steps: int, guidance: float | None) -> list[Control]:
    """One knob at a time, at the `num_steps` and the guidance scale of a run; None: the model is sampled without one."""
    return [
        *(Control(noise=scale) for scale in NOISES),
        *(Control(steps=min(times * num_steps, 250)) for times in STEPS),
        *(Control(guidance=times * guidance) for times in GUIDANCE if guidance),
        *(Control(solver=solver) for solver in ("ab2", "dpmpp2m", "forecast", "sde")),
    ]


@dataclass(frozen=True)
class Best:
    """The control with the highest mean of a reward, and how far the tuned model is above it on the same prompts."""

    control: str
    mean: float
    lead: Interval


def best_control(controls: Mapping[str, ArrayLike], tuned: ArrayLike, seed: int = 0) -> Best | None:
    """The best of scores [N] by control, against tuned ones; NaN is no score. None if no control has any."""
    scores = {name: np.asarray(values, dtype=np.float64) for name, values in controls.items()}
    means = {name: float(np.nanmean(values)) for name, values in scores.items() if not np.isnan(values).all()}
    if not means:
        return None
    best = max(means, key=lambda name: means[name])
    return Best(best, means[best], bootstrap_mean(np.asarray(tuned, dtype=np.float64) - scores[best], seed=seed))
