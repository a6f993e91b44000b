"""Controls: the untrained model sampled with a smaller initial noise, more steps, another guidance scale or another solver
(free knobs of sampling). A gain of training counts if it exceeds the best of these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from g2rpo.config.schema import Section, Steps
from g2rpo.core.flow import flow_sde, ode_step, sde_kernel
from g2rpo.core.seeding import generator_for
from g2rpo.core.statistics import Interval, interval
from g2rpo.monitor.metrics import Row
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.tails import Tails

NOISES = (0.0, 0.3, 0.5, 0.7)
"""Scales of the initial noise."""
STEPS = (2, 5)
"""Multiples of the number of steps."""
GUIDANCE = (0.5, 1.5, 2.0, 3.0)
"""Multiples of the guidance scale of a model that is sampled with one."""
RIGHT = "right pictures"
"""A name beside those of rewards: the share of right pictures."""
TAILS = {"euler": Tails(), "dpmpp2m": Tails(solver="dpmpp2m"), "forecast": Tails(forecast=True)}
ETA = 0.7
"""Of the stochastic solver, "sde": Flow-GRPO's noise on all steps but the last."""


class Control(Section):
    """How pictures are sampled: settings that cost no training. Those that are left out are the evaluation's own."""

    noise: Annotated[NonNegativeFloat, Field(le=10)] = 1.0
    """The initial noise is multiplied by it."""
    steps: Steps | None = None
    guidance: NonNegativeFloat | None = None
    solver: Literal["euler", "dpmpp2m", "forecast", "sde"] = "euler"

    @property
    def knobs(self) -> dict[str, float | str]:
        """What is changed, by name."""
        named = {"initial noise x": self.noise, "steps": self.steps, "guidance": self.guidance, "solver": self.solver}
        plain = {"initial noise x": 1.0, "solver": "euler"}
        return {name: value for name, value in named.items() if value is not None and value != plain.get(name)}

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {value:g}" if isinstance(value, int | float) else f"{name} {value}" for name, value in self.knobs.items()
        )

    def sample(self, engine: Engine, x: Tensor, seed: int, first: int) -> Tensor:
        """Latents at sigma = 0 from initial noise x, whose rows are the prompts `first`, `first` + 1, ..."""
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


PLAIN = Control()


def default_controls(num_steps: int, guidance: float | None) -> list[Control]:
    """One knob at a time, at the `num_steps` and the guidance scale of a run; None: the model is sampled without one."""
    return [
        *(Control(noise=scale) for scale in NOISES),
        *(Control(steps=steps) for steps in sorted({min(times * num_steps, 250) for times in STEPS}) if steps > num_steps),
        *(Control(guidance=times * guidance) for times in GUIDANCE if guidance),
        *(Control(solver=solver) for solver in ("dpmpp2m", "forecast", "sde")),
    ]


@dataclass(frozen=True)
class Best:
    """The control with the highest mean of a reward, and how far the tuned model is above it on the same prompts."""

    control: str
    mean: float
    lead: Interval


PROMPTS, FEWEST, SHARE = 64, 16, 0.1
"""The most and the fewest held-out prompts of a run's controls, and the largest share of the run's network evaluations for
them; the same share applies to the spread within a prompt."""
SPREAD_PROMPTS, SPREAD_NOISES, SPREAD_RIGHT = 8, 4, 2
"""Held-out prompts and initial noises of each for the spread within a prompt; the fewest prompts for that of right pictures."""


def run_controls(num_steps: int, guidance: float | None) -> list[Control]:
    """The default controls that a run samples: those of at most twice its steps."""
    return [control for control in default_controls(num_steps, guidance) if (control.steps or 0) <= 2 * num_steps]


def prompts_within(asked: bool | Literal["auto"], heldout: int, cost: int, evaluations: float) -> int:
    """The number of held-out prompts on which a run samples controls, at `cost` network evaluations a prompt; 0: none."""
    most = min(PROMPTS, heldout)
    if asked == "auto":
        most = min(most, int(SHARE * evaluations / cost))
        return most if most >= FEWEST else 0
    return most if asked else 0


def against_controls(
    controls: Mapping[str, Mapping[str, Tensor]], base: Mapping[str, Tensor], tuned: Mapping[str, Tensor]
) -> Row:
    """As JSON: the means of scores [N] by control and score name, and for each name the best control beside base and tuned."""
    means: Row = {control: {name: _mean(values) for name, values in scores.items()} for control, scores in controls.items()}
    best: Row = {}
    for name, before in base.items():
        found = best_control({control: scores[name] for control, scores in controls.items()}, tuned[name])
        if found is not None and found.lead.count:
            sides = {"base": _mean(before), "tuned": _mean(tuned[name])}
            best[name] = {"control": found.control, "mean": found.mean, "lead": numbers(found.lead), **sides}
    return {"prompts": len(next(iter(base.values()))), "means": means, "best": best}


def in_words(found: Sequence[Row], names: Sequence[str]) -> str:
    """A sentence for each of `names`, on the best control of the runs that sampled any (`against_controls`)."""
    return " ".join(_sentence(found, name) for name in names if all(name in one["best"] for one in found))


def told(found: Mapping[str, Any], trained: Sequence[str]) -> list[str]:
    """The score names that summarise a run: right pictures, or the trained rewards."""
    return [RIGHT] if RIGHT in found["best"] else list(trained)


def _sentence(found: Sequence[Row], name: str) -> str:
    best, share = [one["best"][name] for one in found], name == RIGHT
    leads = [one["lead"]["mean"] for one in best]
    lead = sum(leads) / len(best)
    mean, tuned = (sum(one[side] for one in best) / len(best) for side in ("mean", "tuned"))
    low, high = (best[0]["lead"]["low"], best[0]["lead"]["high"]) if len(best) == 1 else (min(leads), max(leads))
    judged, ends = "no clear difference", ""
    if low is not None and high is not None:
        judged = "training gained more" if low > 0 else "training gained less" if high < 0 else judged
        ends = f", {_lead(low, share)} to {_lead(high, share)}" + (f" over {len(best)} seeds" if len(best) > 1 else "")
    knobs = f"{len(found[0]['means'])} free knobs ({' or '.join(dict.fromkeys(one['control'] for one in best))})"
    made = f"makes {_value(mean, share)} right" if share else f"has {name} {_value(mean, share)}"
    numbers = f"{_lead(lead, share)}{' points' if share else ''}{ends}"
    against = f"on {found[0]['prompts']} of these prompts, the tuned model {_value(tuned, share)}"
    return f"Without training, the best of {knobs} {made} {against}: {judged} ({numbers})."


def _value(value: float, share: bool) -> str:
    return f"{100 * value:.0f}\N{NO-BREAK SPACE}%" if share else f"{value:.3f}"


def _lead(value: float, share: bool) -> str:
    return (f"{100 * value:+.0f}" if share else f"{value:+.3f}").replace("-", "\N{MINUS SIGN}")


def _mean(values: Tensor) -> float | None:
    return finite(float(values.double().nanmean()))


def numbers(of: Interval) -> Row:
    """As JSON."""
    return {key: finite(value) for key, value in asdict(of).items()}


def finite(value: float) -> float | None:
    """The value; None for NaN and infinities, which JSON lacks."""
    return value if math.isfinite(value) else None


def best_control(controls: Mapping[str, ArrayLike], tuned: ArrayLike) -> Best | None:
    """The best of scores [N] by control, against tuned ones; NaN is no score. None if no control has any."""
    scores = {name: np.asarray(values, dtype=np.float64) for name, values in controls.items()}
    if (best := highest(scores)) is None:
        return None
    control, mean = best
    return Best(control, mean, interval(np.asarray(tuned, dtype=np.float64) - scores[control]))


def highest(scores: Mapping[str, NDArray[np.float64]]) -> tuple[str, float] | None:
    """The control whose scores [N] have the highest mean, and that mean; NaN is no score. None if no control has any."""
    means = {name: float(np.nanmean(values)) for name, values in scores.items() if not np.isnan(values).all()}
    return max(means.items(), key=lambda item: item[1]) if means else None
