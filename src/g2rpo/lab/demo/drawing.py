"""One prompt as the base model draws it, as the tuned one does, and as the base does with free
knobs; each with its price."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from torch import Tensor

from g2rpo.core.errors import UserError, counted
from g2rpo.lab.demo.model import DemoModel
from g2rpo.rollout.guidance import guided_by
from g2rpo.train.evaluation.controls import NO_CONTROL, Control
from g2rpo.train.evaluation.heldout import Evaluation


@dataclass(frozen=True)
class Drawn:
    """One picture, or clip, with its scores by every reward."""

    name: str
    title: str
    evaluation: Evaluation
    price: str
    """What it cost."""
    knobs: str = ""
    """The sampler settings with which it was drawn."""

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
    """One prompt drawn by the base model and, from the same noise, by the tuned one; and by the
    base model with other sampler settings."""

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
    strength: float = 1.0,
    control: Control = NO_CONTROL,
    images: Sequence[str] = (),
) -> DrawnPrompt:
    """Draws and scores `prompt`, with its input pictures in `images`, as `g2rpo sample` draws its
    first with this seed (None: as evaluations do).

    A held-out prompt is drawn as by the run's evaluations, from the noise of its number. All
    pictures have the steps and the guidance of `control`; the base model draws once more with all
    of it, if there is more. UserError for wrong settings.
    """
    asked, number = model.prompt(prompt, images)
    seed = model.sampler.seed if seed is None else seed
    steps = control.steps or model.sampler.num_steps
    scale = model.policy.guidance_scale if control.guidance is None else control.guidance
    sampler, rewards = (
        replace(model.sampler, num_steps=steps, seed=seed),
        {**model.rewards, **model.judges},
    )
    weights = {name: model.config.rewards[name].weight for name in model.rewards}
    more = control.model_copy(update={"steps": None, "guidance": None})
    if more.best_of > 1 and not weights:
        raise UserError("the best of several pictures needs a reward that chooses it")

    def drawn(name: str, title: str, control: Control = NO_CONTROL, tuned: bool = False) -> Drawn:
        with guided_by(model.policy, scale), nullcontext() if tuned else model.policy.base():
            found = sampler.best([asked], rewards, weights, first=number or 0, control=control)
        return Drawn(name, title, found, control.price(steps), str(control))

    if model.tuned == "adapter":
        model.policy.sampling.scale(strength)
    settings = [
        *([f"held-out prompt {number + 1}"] if number is not None else []),
        f"seed {seed}",
        counted(steps, "step"),
        *([f"guidance {scale:g}"] if model.policy.guidable else []),
        *([f"strength {strength:g}"] if model.tuned == "adapter" else []),
    ]
    return DrawnPrompt(
        model=model,
        prompt=asked,
        base=drawn("base", "Base model"),
        tuned=drawn("tuned", "After training", tuned=True) if model.tuned != "nothing" else None,
        free=drawn("free", "Base model, other sampler settings", more)
        if more != NO_CONTROL
        else None,
        settings=" · ".join(settings),
    )
