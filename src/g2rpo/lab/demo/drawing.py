"""One prompt as the base model draws it, as the tuned one does, and as the base does with free knobs; each with its price."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from g2rpo.core.errors import UserError, counted
from g2rpo.evaluation.controls import NO_CONTROL, Control
from g2rpo.evaluation.heldout import Evaluation
from g2rpo.evaluation.untrained import utility
from g2rpo.lab.demo.model import DemoModel
from g2rpo.rollout.guidance import guided_by

MAX_STRENGTH = 2.0
"""Of the adapter."""


@dataclass(frozen=True)
class Drawn:
    """One picture, or clip, with its scores by every reward."""

    name: str
    title: str
    evaluation: Evaluation
    price: str
    """What it cost."""
    knobs: str = ""
    """The free knobs with which it was drawn."""

    @property
    def picture(self) -> Tensor:
        return self.evaluation.images[0]

    @property
    def scores(self) -> dict[str, float]:
        return {name: float(values) for name, values in self.evaluation.scores.items()}

    @property
    def right(self) -> bool | None:
        """Whether it is right, if a reward defines that."""
        right = self.evaluation.right
        return None if right is None or right.isnan().any() else bool(right)


@dataclass(frozen=True)
class DrawnPrompt:
    """One prompt drawn by the base model and, from the same noise, by the tuned one; and by the base model with free knobs."""

    model: DemoModel
    prompt: str
    base: Drawn
    tuned: Drawn | None
    free: Drawn | None
    settings: str
    """The settings of the drawing, as text."""

    @property
    def missing(self) -> list[str]:
        """The rewards that have no score for it."""
        return [name for name, value in self.base.scores.items() if math.isnan(value)]


def draw(
    model: DemoModel,
    prompt: str,
    *,
    seed: int | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    strength: float = 1.0,
    control: Control = NO_CONTROL,
    best_of: int = 1,
    images: Sequence[str] = (),
) -> DrawnPrompt:
    """Draws and scores `prompt`, with its input pictures in `images`, as `g2rpo sample` draws its first with this seed. None:
    as evaluations do.

    A held-out prompt is drawn as by the run's evaluations, from the noise of its number. The base model draws it again under
    `control`, as the best of so many by the trained rewards, unless these change nothing. UserError for wrong settings.
    """
    asked, number = model.prompt(prompt, images)
    seed = model.sampler.seed if seed is None else seed
    steps, scale = steps or model.sampler.num_steps, model.policy.guidance_scale if guidance is None else guidance
    sampler, rewards = replace(model.sampler, num_steps=steps, seed=seed), {**model.rewards, **model.judges}
    if best_of > 1 and not model.rewards:
        raise UserError("the best of several pictures needs a reward that chooses it")

    def drawn(control: Control = NO_CONTROL, tuned: bool = False) -> Evaluation:
        with guided_by(model.policy, scale), nullcontext() if tuned else model.policy.base():
            return sampler.evaluate([asked], rewards, first=number or 0, control=control)

    if model.tuned == "adapter":
        model.policy.tuning.scale(strength)
    price, changes = counted(steps, "evaluation"), control != NO_CONTROL or best_of > 1
    base = Drawn("base", "Base model", drawn(), price)
    tuned = Drawn("tuned", "After training", drawn(tuned=True), price) if model.tuned != "nothing" else None
    free = _free(model, drawn, control, best_of, steps) if changes else None
    settings = [
        *([f"held-out prompt {number + 1}"] if number is not None else []),
        f"seed {seed}",
        counted(steps, "step"),
        *([f"guidance {scale:g}"] if model.policy.guidable else []),
        *([f"strength {strength:g}"] if model.tuned == "adapter" else []),
    ]
    return DrawnPrompt(model, asked, base, tuned, free, " · ".join(settings))


def _free(model: DemoModel, drawn: Callable[[Control], Evaluation], control: Control, best_of: int, steps: int) -> Drawn:
    """The best of so many pictures that are `drawn` under `control`; the first of ties."""
    several = [drawn(control.model_copy(update={"draw": draw})) for draw in range(best_of)]
    cost, knobs, place = counted(best_of * control.evaluations(steps), "evaluation"), [str(control)], 0
    if best_of > 1:
        cost += f", {counted(best_of, 'reading')}"
        knobs.append(f"best of {best_of} by {', '.join(model.rewards)}")
        scores = {name: torch.stack([one.scores[name] for one in several], -1) for name in model.rewards}
        place = int(utility(scores, dict(zip(model.rewards, model.weights.tolist(), strict=True)))[0].argmax())
    told = ", ".join(filter(None, knobs))
    return Drawn("free", "Base model, with free knobs", several[place], cost, told)
