"""Controls: what the untrained model reaches with other sampler settings (free knobs) or as the best of several pictures.

A gain of training counts if it exceeds these, at their price: network evaluations and reward readings of a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, NonNegativeFloat, model_validator
from torch import Tensor

from g2rpo.config.schema import Section, Steps
from g2rpo.core.flow import flow_sde, ode_step, sde_kernel
from g2rpo.core.seeding import generator_for
from g2rpo.core.statistics import FEWEST, Interval, interval
from g2rpo.evaluation.best_of import best_of
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.guidance import Guidance
from g2rpo.rollout.tails import Tails

NOISES = (0.0, 0.3, 0.5, 0.7)
"""Scales of the initial noise."""
STEPS = (2, 5)
"""Multiples of the number of steps."""
GUIDANCE = (0.5, 1.5, 2.0, 3.0)
"""Multiples of the guidance scale of a model that is sampled with one."""
CFG, EARLY = 3.0, 0.3
"""The scale of guidance by hand, and the share of steps that early guidance acts in."""
DRAWS = 16
"""Pictures of a prompt among which the best are chosen."""
CHOSEN_FROM = (2, 4, 8, 16)
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
    """The model's own guidance scale."""
    cfg: NonNegativeFloat | None = None
    """The scale of guidance by hand: classifier-free, with a second evaluation, of the negative prompt. For models that have no
    classifier-free guidance of their own."""
    negative_prompt: str = ""
    """Of guidance by hand."""
    guided_steps: Steps | None = None
    """`guidance` or `cfg` acts in so many first steps; None: in all."""
    solver: Literal["euler", "dpmpp2m", "forecast", "sde"] = "euler"
    draw: Annotated[int, Field(ge=0, lt=DRAWS)] = 0
    """Which initial noise of the prompt; 0 is that of the evaluation."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.negative_prompt and self.cfg is None:
            raise ValueError("negative_prompt is for guidance by hand: set cfg, or policy.negative_prompt of a guided model")
        if self.guided_steps is not None and self.cfg is None and self.guidance is None:
            raise ValueError("guided_steps says where guidance acts: set guidance or cfg")
        return self

    @property
    def knobs(self) -> dict[str, float | str]:
        """What is changed, by name."""
        against = f" against {self.negative_prompt!r}" if self.negative_prompt else ""
        where = f" in the first {self.guided_steps} steps" if self.guided_steps else ""
        named = {
            "initial noise x": self.noise,
            "steps": self.steps,
            "guidance": None if self.guidance is None else f"{self.guidance:g}{'' if self.cfg is not None else where}",
            "guidance by hand": None if self.cfg is None else f"{self.cfg:g}{against}{where}",
            "solver": self.solver,
            "draw": self.draw,
        }
        plain = {"initial noise x": 1.0, "solver": "euler", "draw": 0}
        return {name: value for name, value in named.items() if value is not None and value != plain.get(name)}

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {value:g}" if isinstance(value, int | float) else f"{name} {value}" for name, value in self.knobs.items()
        )

    @property
    def guiding(self) -> Guidance:
        """The guidance that it asks for."""
        return Guidance(self.guidance, self.cfg, self.negative_prompt, self.guided_steps)

    def evaluations(self, num_steps: int) -> int:
        """Network evaluations of a picture that is otherwise sampled with `num_steps`."""
        steps = self.steps or num_steps
        evaluated = [step for step in range(steps) if self.solver != "forecast" or step == 0 or step % 2]
        by_hand = 0 if self.cfg is None else self.guided_steps or steps
        return len(evaluated) + sum(step < by_hand for step in evaluated)

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
TUNED = Control(noise=0.5)
"""The control of the tuned model."""


def default_controls(num_steps: int, guidance: float | None, by_hand: bool) -> list[Control]:
    """One knob at a time, at the `num_steps` and the guidance scale of a run (None: the model is sampled without one), and the
    draws that the best are chosen from. `by_hand`: the model has no classifier-free guidance of its own."""
    early = max(1, round(EARLY * num_steps))
    return [
        *(Control(noise=scale) for scale in NOISES),
        *(Control(steps=steps) for steps in sorted({min(times * num_steps, 250) for times in STEPS}) if steps > num_steps),
        *(Control(guidance=times * guidance) for times in GUIDANCE if guidance),
        *([Control(cfg=CFG, guided_steps=early), Control(cfg=CFG)] if by_hand else []),
        *([Control(guidance=2 * guidance, guided_steps=early)] if guidance and not by_hand else []),
        *(Control(solver=solver) for solver in ("dpmpp2m", "forecast", "sde")),
        *(Control(draw=draw) for draw in range(1, DRAWS)),
    ]


PROMPTS, SHARE = 32, 0.2
"""The most held-out prompts of a run's controls, and the largest share of the run's network evaluations for them."""
SPREAD_PROMPTS, SPREAD_NOISES, SPREAD_RIGHT, SPREAD_SHARE = 8, 4, 2, 0.1
"""Held-out prompts and initial noises of each for the spread within a prompt; the fewest prompts for that of right pictures;
the largest share of the run's network evaluations."""


def run_controls(num_steps: int, guidance: float | None, by_hand: bool) -> list[Control]:
    """The default controls that a run samples: those of at most twice its steps."""
    every = default_controls(num_steps, guidance, by_hand)
    return [control for control in every if (control.steps or 0) <= 2 * num_steps]


def evaluations_of(controls: Sequence[Control], num_steps: int) -> int:
    """Network evaluations of a run's controls for a prompt, with the one of the tuned model."""
    return sum(control.evaluations(num_steps) for control in (*controls, TUNED)) if controls else 0


def prompts_within(asked: bool | Literal["auto"], heldout: int, cost: int, evaluations: float) -> int:
    """The number of held-out prompts on which a run samples controls, at `cost` network evaluations a prompt; 0: none."""
    most = min(PROMPTS, heldout)
    if asked == "auto":
        most = min(most, int(SHARE * evaluations / cost))
        return most if most >= FEWEST else 0
    return most if asked else 0


Scores = Mapping[str, Tensor]
"""Values [N] of N prompts, by reward or `RIGHT`."""


class Ends(Section):
    """A mean and its 95 % interval; None where there are too few values."""

    mean: float | None
    low: float | None
    high: float | None
    count: int

    @property
    def interval(self) -> Interval:
        """With NaN for None."""
        mean, low, high = (math.nan if end is None else end for end in (self.mean, self.low, self.high))
        return Interval(mean, low, high, self.count)


class Way(Section):
    """One way of sampling: what a picture costs in network evaluations and readings of the trained rewards, means by name, and
    changes from the base on the same prompts and noise."""

    name: str
    evaluations: int
    readings: int
    means: dict[str, float | None]
    changes: dict[str, Ends]


class Best(Section):
    """By one score the best of some ways, and how far the tuned model is above it, where there is one."""

    way: str
    mean: float
    base: float
    tuned: float | None = None
    lead: Ends | None = None


class Controls(Section):
    """What the untrained model reaches on some prompts: in results.json."""

    prompts: int
    ways: list[Way]
    best: dict[str, Best]
    """By name, among the free knobs."""
    best_of: dict[str, Best]
    """By name, the best of the most draws."""
    tuned_control: dict[str, Ends] = Field(default_factory=dict)
    """By name, the change of the tuned model with `TUNED`."""
    training: int | None = None
    """Network evaluations of the training, of the size that is judged."""


def against_controls(
    controls: Mapping[Control, Scores],
    base: Scores,
    num_steps: int,
    weights: Mapping[str, float],
    tuned: Scores | None = None,
    tuned_control: Scores | None = None,
    training: int | None = None,
) -> Controls:
    """Compares scores of the base by control, and of the tuned model (`tuned_control`: as `TUNED`), all of the same prompts.
    The best of several draws is chosen by the trained rewards with their `weights`."""
    knobs = {control: scores for control, scores in controls.items() if not control.draw}
    draws = [base, *(controls[draw] for draw in map(_draw, range(1, DRAWS)) if draw in controls)]
    several = {f"best of {n}": _best_of(draws, weights, n) for n in CHOSEN_FROM if n <= len(draws)}

    def way(name: str, evaluations: int, scores: Scores, readings: int = 0) -> Way:
        means = {of: _mean(values) for of, values in scores.items()}
        changes = {of: _ends(values - base[of]) for of, values in scores.items()}
        return Way(name=name, evaluations=evaluations, readings=readings, means=means, changes=changes)

    ways = [way("base", num_steps, base)]
    ways += [way(str(control), control.evaluations(num_steps), scores) for control, scores in knobs.items()]
    ways += [way(f"best of {n}", n * num_steps, several[f"best of {n}"], n) for n in CHOSEN_FROM if n <= len(draws)]
    ways += [way("tuned", num_steps, tuned)] if tuned is not None else []
    ways += [way(f"tuned, {TUNED}", num_steps, tuned_control)] if tuned_control is not None else []
    return Controls(
        prompts=len(next(iter(base.values()))),
        ways=ways,
        best=_best({str(control): scores for control, scores in knobs.items()}, base, tuned),
        best_of=_best(dict(list(several.items())[-1:]), base, tuned),
        tuned_control={name: _ends(of - tuned[name]) for name, of in (tuned_control or {}).items()} if tuned else {},
        training=training,
    )


def _draw(draw: int) -> Control:
    return Control(draw=draw)


def _best_of(draws: Sequence[Scores], weights: Mapping[str, float], n: int) -> Scores:
    return best_of({name: torch.stack([draw[name] for draw in draws], -1) for name in draws[0]}, weights, n)


def _best(ways: Mapping[str, Scores], base: Scores, tuned: Scores | None) -> dict[str, Best]:
    """By name the way with the highest mean; names without scores are left out."""
    best = {}
    for name, before in base.items():
        means = {way: mean for way, scores in ways.items() if (mean := _mean(scores[name])) is not None}
        start = _mean(before)
        if not means or start is None:
            continue
        way = max(means, key=means.__getitem__)
        found = Best(way=way, mean=means[way], base=start)
        if tuned is not None:
            lead = _ends(tuned[name] - ways[way][name])
            if not lead.count:
                continue
            found = found.model_copy(update={"tuned": _mean(tuned[name]), "lead": lead})
        best[name] = found
    return best


def told(found: Controls, trained: Sequence[str]) -> list[str]:
    """The score names that summarise a run: right pictures, or the trained rewards."""
    return [RIGHT] if RIGHT in found.best else list(trained)


def in_words(found: Sequence[Controls], names: Sequence[str]) -> list[str]:
    """A sentence for each of `names`: base, best free knob, best of several and tuned model, on the same prompts; means over
    runs."""
    return [_sentence(found, name) for name in names if all(name in one.best for one in found)]


def in_figures(found: Sequence[Controls], names: Sequence[str]) -> list[str]:
    """What these cost, and how far the tuned model is above each."""
    said = []
    for name in names:
        kinds = [one.best for one in found], [one.best_of for one in found]
        known = [[best[name] for best in kind] for kind in kinds if all(name in best for best in kind)]
        said += [_lead_over(found, best, name) for best in known]
        said += _with_tuned_control(found, name)
    return said + (_paid_back(found) if found and all(one.training and one.best_of for one in found) else [])


def _sentence(found: Sequence[Controls], name: str) -> str:
    best, several = [one.best[name] for one in found], [one.best_of[name] for one in found if name in one.best_of]
    base, knob, tuned, of = (
        _value(sum(values) / max(1, len(values)), name)
        for values in (
            [one.base for one in best],
            [one.mean for one in best],
            [one.tuned or 0.0 for one in best],
            [one.mean for one in several],
        )
    )
    chosen = f", {of} as the {several[0].way} pictures" if several else ""
    start = f"{base} are right" if name == RIGHT else f"{name} is {base}"
    return (
        f"On {found[0].prompts} of these prompts {start} without training, {knob} with the best free knob "
        f"({_ways(best)}){chosen}, and {tuned} after training."
    )


def _lead_over(found: Sequence[Controls], best: Sequence[Best], name: str) -> str:
    """The price of the best ways of a kind, by run, and the tuned model's lead over them."""
    ways = [next(way for way in one.ways if way.name == own.way) for one, own in zip(found, best, strict=True)]
    evaluations = " or ".join(str(count) for count in sorted({way.evaluations for way in ways}))
    read = f" and {ways[0].readings} readings of the trained rewards" if ways[0].readings else ""
    leads = [own.lead for own in best if own.lead is not None]
    means = [lead.mean or 0.0 for lead in leads]
    low, high = (leads[0].low, leads[0].high) if len(leads) == 1 else (min(means), max(means))
    judged, ends = "no clear difference", ""
    if low is not None and high is not None:
        judged = "training gained more" if low > 0 else "training gained less" if high < 0 else judged
        ends = f", {_lead(low, name)} to {_lead(high, name)}" + (f" over {len(leads)} seeds" if len(leads) > 1 else "")
    by = "" if name == RIGHT else f" in {name}"
    points = " points" if name == RIGHT else ""
    way = _ways(best)
    return (
        f"{way[0].upper()}{way[1:]}: {evaluations} network evaluations{read} a picture instead of "
        f"{found[0].ways[0].evaluations}; {judged}{by} ({_lead(sum(means) / len(means), name)}{points}{ends})."
    )


def _with_tuned_control(found: Sequence[Controls], name: str) -> list[str]:
    """That the tuned model is better with its control; nothing where that is not clear."""
    changes = [one.tuned_control[name] for one in found if name in one.tuned_control]
    if not changes or any((change.low or 0.0) <= 0 for change in changes):
        return []
    reached = [mean for one in found for way in one.ways[-1:] if (mean := way.means[name]) is not None]
    value = _value(sum(reached) / len(reached), name)
    return [f"Sampled with {TUNED} the tuned model reaches {value}{'' if name == RIGHT else f' in {name}'}."]


def _paid_back(found: Sequence[Controls]) -> list[str]:
    """From how many pictures on training has cost less than choosing the best of several."""
    several = [way for way in found[0].ways if way.readings]
    training = sum(one.training or 0 for one in found) / len(found)
    more = several[-1].evaluations - found[0].ways[0].evaluations
    pictures = math.ceil(training / more)
    return [
        f"Training took {training:,.0f} network evaluations; the {several[-1].name} takes {more} more a picture than the tuned "
        f"model, and so costs more from {pictures:,} pictures on."
    ]


def _ways(best: Sequence[Best]) -> str:
    return " or ".join(dict.fromkeys(one.way for one in best))


def _value(value: float, name: str) -> str:
    return f"{100 * value:.0f}\N{NO-BREAK SPACE}%" if name == RIGHT else f"{value:.3f}"


def _lead(value: float, name: str) -> str:
    return (f"{100 * value:+.0f}" if name == RIGHT else f"{value:+.3f}").replace("-", "\N{MINUS SIGN}")


def _mean(values: Tensor) -> float | None:
    return finite(float(values.double().nanmean()))


def _ends(values: Tensor) -> Ends:
    found = interval(values)
    return Ends(mean=finite(found.mean), low=finite(found.low), high=finite(found.high), count=found.count)


def finite(value: float) -> float | None:
    """The value; None for NaN and infinities, which JSON lacks."""
    return value if math.isfinite(value) else None
