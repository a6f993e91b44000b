"""Controls: other sampler settings, which cost no training, and other initial noises.

What the untrained model reaches with them is compared in `lab.untrained`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, NonNegativeFloat, model_validator
from torch import Tensor

from g2rpo.config.schema import Steps
from g2rpo.core.errors import counted
from g2rpo.core.flow import flow_sde, ode_step, sde_kernel
from g2rpo.core.noise import generator_for
from g2rpo.core.plain import Section
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.guidance import Guidance
from g2rpo.rollout.tails import Tails

NOISES = (0.0, 0.3, 0.5, 0.7)
"""Scales of the initial noise."""
STEP_MULTIPLES = (2, 5)
"""Multiples of the number of steps."""
GUIDANCE = (0.5, 1.5, 2.0, 3.0)
"""Multiples of the guidance scale of a model that is sampled with one."""
CFG, EARLY = 3.0, 0.3
"""The scale of guidance by hand, and the share of steps that early guidance acts in."""
DRAWS = 16
"""Pictures of a prompt among which the best are chosen."""
TAILS = {"euler": Tails(), "dpmpp2m": Tails(solver="dpmpp2m"), "forecast": Tails(forecast=True)}
ETA = 0.7
"""Of the stochastic solver, "sde": Flow-GRPO's noise on all steps but the last."""


Need = Literal["nothing", "own guidance", "guidance by hand", "rewards", "adapter"]
"""What a model needs for a setting to act."""


@dataclass(frozen=True)
class Offer:
    """How a page offers a setting: its label, what it does and costs, its range, and what it needs
    to act. A setting without a range is a text."""

    label: str
    help: str
    range: tuple[float, float, float] | None = None
    """The smallest value, the largest one and the distance between two."""
    needs: Need = "nothing"


class Control(Section):
    """How a picture is sampled: settings that cost no training. Those that are left out are the
    evaluation's own."""

    steps: Annotated[Steps | None, Offer("Steps", "An evaluation each.", (1, 100, 1))] = None
    guidance: Annotated[
        NonNegativeFloat | None,
        Offer("Guidance", "The model's own scale.", (0, 20, 0.1), "own guidance"),
    ] = None
    """The model's own guidance scale."""
    cfg: Annotated[
        NonNegativeFloat | None,
        Offer(
            "Guidance by hand",
            f"0: none; {CFG:g} is usual. A second evaluation in each guided step.",
            (0, 10, 0.5),
            "guidance by hand",
        ),
    ] = None
    """The scale of guidance by hand: classifier-free, with a second evaluation, of the negative
    prompt. For models that have no classifier-free guidance of their own."""
    negative_prompt: Annotated[
        str,
        Offer(
            "Guided away from this prompt",
            "Empty: from pictures of nothing in particular.",
            None,
            "guidance by hand",
        ),
    ] = ""
    """Of guidance by hand."""
    guided_steps: Annotated[
        Steps | None,
        Offer(
            "Guided steps, from the first", "Of guidance by hand.", (1, 100, 1), "guidance by hand"
        ),
    ] = None
    """`guidance` or `cfg` acts in so many first steps; None: in all."""
    noise: Annotated[
        NonNegativeFloat,
        Field(le=10),
        Offer("Initial noise, times", "Costs nothing.", (0, 1.5, 0.05)),
    ] = 1.0
    """The initial noise is multiplied by it."""
    best_of: Annotated[
        int,
        Field(ge=1, le=DRAWS),
        Offer(
            "Best of several pictures",
            "By the trained rewards, which read each of them.",
            (1, DRAWS, 1),
            "rewards",
        ),
    ] = 1
    """The best of so many pictures, from as many initial noises, by the trained rewards."""
    solver: Literal["euler", "dpmpp2m", "forecast", "sde"] = "euler"
    draw: Annotated[int, Field(ge=0, lt=DRAWS)] = 0
    """Which initial noise of the prompt; 0 is that of the evaluation."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.negative_prompt and self.cfg is None:
            raise ValueError(
                "negative_prompt is for guidance by hand: set cfg, or policy.negative_prompt of a guided model"
            )
        if self.guided_steps is not None and self.cfg is None and self.guidance is None:
            raise ValueError("guided_steps says where guidance acts: set guidance or cfg")
        if self.best_of > 1 and self.draw:
            raise ValueError("best_of draws from several initial noises: leave draw out")
        return self

    @property
    def knobs(self) -> dict[str, float | str]:
        """What is changed, by name."""
        against = f" against {self.negative_prompt!r}" if self.negative_prompt else ""
        where = ""
        if self.guided_steps:
            many = "step" if self.guided_steps == 1 else f"{self.guided_steps} steps"
            where = f" in the first {many}"
        named = {
            "initial noise x": self.noise,
            "steps": self.steps,
            "guidance": None
            if self.guidance is None
            else f"{self.guidance:g}{'' if self.cfg is not None else where}",
            "guidance by hand": None if self.cfg is None else f"{self.cfg:g}{against}{where}",
            "solver": self.solver,
            "draw": self.draw,
            "best of": self.best_of,
        }
        plain = {"initial noise x": 1.0, "solver": "euler", "draw": 0, "best of": 1}
        return {
            name: value
            for name, value in named.items()
            if value is not None and value != plain.get(name)
        }

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {value:g}" if isinstance(value, int | float) else f"{name} {value}"
            for name, value in self.knobs.items()
        )

    @property
    def guiding(self) -> Guidance:
        """The guidance that it asks for."""
        return Guidance(self.guidance, self.cfg, self.negative_prompt, self.guided_steps)

    def evaluations(self, num_steps: int) -> int:
        """Network evaluations of a picture that is otherwise sampled with `num_steps`."""
        steps = self.steps or num_steps
        evaluated = [
            step for step in range(steps) if self.solver != "forecast" or step == 0 or step % 2
        ]
        by_hand = 0 if self.cfg is None else self.guided_steps or steps
        return self.best_of * (len(evaluated) + sum(step < by_hand for step in evaluated))

    def price(self, num_steps: int) -> str:
        """What a picture that is otherwise sampled with `num_steps` costs."""
        readings = f", {counted(self.best_of, 'reading')}" if self.best_of > 1 else ""
        return f"{counted(self.evaluations(num_steps), 'evaluation')}{readings}"

    def sample(self, engine: Engine, x: Tensor, seed: int, first: int) -> Tensor:
        """Latents at sigma = 0 from initial noise x, whose rows are the prompts `first`, `first` +
        1, ..."""
        x = x * self.noise
        if self.solver != "sde":
            return engine.sample(x, TAILS[self.solver])
        kernel, rows = sde_kernel(flow_sde(engine.sigmas, ETA)), range(len(x))
        for step in range(engine.num_steps):
            v = engine.velocity(x, [step] * len(x), rows)
            here, there = engine.sigmas[step], engine.sigmas[step + 1]
            if there == 0:
                return ode_step(x, v, here, there)
            noise = [
                torch.randn(x.shape[1:], generator=generator_for(seed, "sde", first + row, step))
                for row in rows
            ]
            x = kernel(x, v, here, there).sample(torch.stack(noise).to(x.device))
        return x


def offers(of: type[Section] = Control) -> dict[str, Offer]:
    """By name how the settings of a section are offered."""
    found = {
        name: [it for it in field.metadata if isinstance(it, Offer)]
        for name, field in of.model_fields.items()
    }
    return {name: those[0] for name, those in found.items() if those}


NO_CONTROL = Control()
TUNED = Control(noise=0.5)
"""The control of the tuned model."""


def default_controls(num_steps: int, guidance: float | None, by_hand: bool) -> list[Control]:
    """One setting at a time, at the `num_steps` and the guidance scale of a run (None: the model is
    sampled without one), and the draws that the best are chosen from. `by_hand`: the model has no
    classifier-free guidance of its own."""
    early = max(1, round(EARLY * num_steps))
    return [
        *(Control(noise=scale) for scale in NOISES),
        *(
            Control(steps=steps)
            for steps in sorted({min(times * num_steps, 250) for times in STEP_MULTIPLES})
            if steps > num_steps
        ),
        *(Control(guidance=times * guidance) for times in GUIDANCE if guidance),
        *([Control(cfg=CFG, guided_steps=early), Control(cfg=CFG)] if by_hand else []),
        *([Control(guidance=2 * guidance, guided_steps=early)] if guidance and not by_hand else []),
        *(Control(solver=solver) for solver in ("dpmpp2m", "forecast", "sde")),
        *(Control(draw=draw) for draw in range(1, DRAWS)),
    ]
