"""What the untrained model reaches with other sampler settings, or as the best of several pictures, beside the
tuned model.

A gain of training counts if it exceeds these, at their price: network evaluations and reward
readings of a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from g2rpo.core.errors import counted, refuse
from g2rpo.core.plain import Count, Figure, Section
from g2rpo.core.statistics import Interval, group_std, interval
from g2rpo.train.evaluation.controls import TUNED, Control

CHOSEN_FROM = (2, 4, 8, 16)
RIGHT = "right pictures"
"""A name beside those of rewards: the share of right pictures."""
ControlScores = Mapping[str, Tensor]
"""Values [N] of N prompts, by reward or `RIGHT`."""


Kind = Literal["base", "knob", "several", "tuned", "tuned knob"]


class Way(Section):
    """One way of sampling, a row of the table of controls: base or tuned model, other sampler settings, the
    best of several pictures. Means and changes are by name."""

    kind: Kind
    name: str
    evaluations: Count
    """Network evaluations of a picture."""
    readings: Annotated[int, Field(ge=0, le=10**6)]
    """Readings of the trained rewards of a picture."""
    means: dict[str, Figure]
    changes: dict[str, Interval]
    """From the base, on the same prompts and noise."""
    leads: dict[str, Interval] = Field(default_factory=dict)
    """Of the tuned model over this way, where there is one."""

    @property
    def price(self) -> str:
        """Of a picture."""
        readings = (
            f" and {counted(self.readings, 'reading')} of the trained rewards"
            if self.readings
            else ""
        )
        return f"{counted(self.evaluations, 'network evaluation')}{readings} a picture"


class Controls(Section):
    """What the untrained model reaches on some prompts, way by way: in results.json."""

    prompts: Count
    ways: Annotated[list[Way], Field(min_length=1)]
    """The base first."""

    @model_validator(mode="after")
    def _whole(self) -> Controls:
        refuse(self._faults(), ValueError)
        return self

    def _faults(self) -> Iterator[str]:
        base, tuned = self.ways[0], self.of("tuned")
        if self.of("base") != [base] or len(tuned) > 1:
            yield "ways: should begin with the base, and have it and the tuned model once"
        for way in self.ways:
            told = way.means.keys(), way.changes.keys(), way.leads.keys()
            names = base.means.keys()
            if told != (names, names, names if tuned else {}.keys()):
                yield f"ways: {way.name} has not the same scores as the base"
            if way.kind == "several" and way.evaluations <= base.evaluations:
                yield f"ways: {way.name} takes no more evaluations than the base"

    def of(self, *kinds: Kind) -> list[Way]:
        return [way for way in self.ways if way.kind in kinds]

    @property
    def best(self) -> dict[str, Way]:
        """By name the sampler settings with the highest mean."""
        return self._best(self.of("knob"))

    @property
    def best_of(self) -> dict[str, Way]:
        """By name the best of the most pictures."""
        return self._best(self.of("several")[-1:])

    def _best(self, ways: Sequence[Way]) -> dict[str, Way]:
        """Names that cannot be compared, for want of scores, are left out."""
        best = {}
        for name, base in self.ways[0].means.items():
            scored = [way for way in ways if not math.isnan(way.means[name])]
            way = max(scored, key=lambda way: way.means[name], default=None)
            if (
                way is not None
                and not math.isnan(base)
                and (not way.leads or way.leads[name].count)
            ):
                best[name] = way
        return best


def against_controls(
    controls: Mapping[Control, ControlScores],
    base: ControlScores,
    num_steps: int,
    weights: Mapping[str, float],
    tuned: ControlScores | None = None,
    tuned_control: ControlScores | None = None,
) -> Controls:
    """The table of controls, from the base's scores by control and the tuned model's
    (`tuned_control`: as `TUNED`), all of the same prompts: the rows that `evaluate --controls` and
    `compare --controls` show. The base first; then the
    sampler settings, the best of 2, 4, ... draws, chosen by the trained rewards with their `weights`, and
    the tuned model, plain and as `TUNED`."""

    def way(
        kind: Kind, name: str, evaluations: int, scores: ControlScores, readings: int = 0
    ) -> Way:
        return Way(
            kind=kind,
            name=name,
            evaluations=evaluations,
            readings=readings,
            means={of: float(values.double().nanmean()) for of, values in scores.items()},
            changes={of: _change(of, base[of], values) for of, values in scores.items()},
            leads={}
            if tuned is None
            else {of: _change(of, values, tuned[of]) for of, values in scores.items()},
        )

    ways = [way("base", "base", num_steps, base)]
    draws = [base]
    for control, scores in controls.items():
        if not control.draw:
            read = control.best_of if control.best_of > 1 else 0
            ways.append(way("knob", str(control), control.evaluations(num_steps), scores, read))
        elif control == Control(draw=control.draw):
            draws.append(scores)
    drawn = {name: torch.stack([draw[name] for draw in draws], -1) for name in base}
    by = utility(drawn, weights)
    for n in CHOSEN_FROM:
        if n <= len(draws):
            best = {name: expected_of_best(by, values, n) for name, values in drawn.items()}
            ways.append(way("several", f"best of {n}", n * num_steps, best, n))
    if tuned is not None:
        ways.append(way("tuned", "tuned", num_steps, tuned))
    if tuned_control is not None:
        ways.append(way("tuned knob", f"tuned, {TUNED}", num_steps, tuned_control))
    return Controls(prompts=len(next(iter(base.values()))), ways=ways)


def _change(name: str, before: Tensor, after: Tensor) -> Interval:
    """From `before` to `after`, values of one name by prompt."""
    found, start = interval(after - before), float(before.double().nanmean())
    return found.within(0.0 - start, 1 - start) if name == RIGHT else found


def utility(scores: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """What pictures [N, S] are chosen by: the weighted sum of their trained rewards, each as its
    deviation from the prompt's mean in units of its standard deviation within a prompt. A missing
    score counts as the mean."""
    total = torch.zeros_like(next(iter(scores.values())), dtype=torch.float64)
    for name, weight in weights.items():
        values = scores[name].double()
        deviation = (values - values.nanmean(-1, keepdim=True)).nan_to_num()
        spread = group_std(values).square().nanmean().sqrt()
        total += weight * deviation / (spread if spread > 0 else 1.0)
    return total


def expected_of_best(by: Tensor, of: Tensor, n: int) -> Tensor:
    """The expected value `of` [N] of the picture that is highest in `by` [N, S] among n of the S,
    drawn without replacement, which is unbiased for n new pictures. One of equally good pictures is
    taken by lot; missing values are left out."""
    count = by.shape[-1]
    of_rank = torch.tensor(
        [math.comb(rank, n - 1) / math.comb(count, n) for rank in range(count)], dtype=torch.float64
    )
    chance = torch.empty_like(by, dtype=torch.float64).scatter_(
        -1, by.argsort(-1), of_rank.expand(by.shape)
    )
    equal = (by[..., :, None] == by[..., None, :]).double()
    chance = (equal * chance[..., None, :]).sum(-1) / equal.sum(-1)
    known = ~of.isnan()
    return (chance * of.double()).where(known, 0).sum(-1) / chance.where(known, 0).sum(-1)


def told(found: Controls, trained: Sequence[str]) -> list[str]:
    """The score names that summarise a run: right pictures, or the trained rewards."""
    return [RIGHT] if RIGHT in found.best else list(trained)


def in_words(found: Sequence[Controls], names: Sequence[str]) -> list[str]:
    """A sentence for each of `names`: what the tuned model reaches, and whether that is clearly more
    than the base with its best sampler settings and as the best of several, on the same prompts;
    means over runs."""
    return [_sentence(found, name) for name in names if all(name in one.best for one in found)]


def in_figures(found: Sequence[Controls], names: Sequence[str]) -> list[str]:
    """What these cost, and how the tuned model is with its control."""
    said = []
    for name in names:
        kinds = [one.best for one in found], [one.best_of for one in found]
        said += [
            _price_of(found, [best[name] for best in kind])
            for kind in kinds
            if all(name in best for best in kind)
        ]
        said += _with_tuned_control(found, name)
    return list(dict.fromkeys(said))


def _sentence(found: Sequence[Controls], name: str) -> str:
    knobs = [one.best[name] for one in found]
    several = [one.best_of[name] for one in found if name in one.best_of]
    tuned = _mean_over([way for one in found for way in one.of("tuned")], name)
    start = f"{tuned} are right" if name == RIGHT else f"{name} is {tuned}"
    chosen = (
        f" and {_mean_over(several, name)} as the {several[0].name} pictures ({_lead_over(several, name)})"
        if several
        else ""
    )
    return (
        f"On {found[0].prompts} of these prompts {start} after training, without it {_mean_over(knobs, name)} with "
        f"the best sampler settings ({_named(knobs)}; {_lead_over(knobs, name)}){chosen}."
    )


def _lead_over(best: Sequence[Way], name: str) -> str:
    """Whether the tuned model is clearly ahead of the best ways of a kind, by run, and its lead."""
    leads = [way.leads[name] for way in best]
    means = [lead.mean for lead in leads]
    low, high = (leads[0].low, leads[0].high) if len(leads) == 1 else (min(means), max(means))
    judged, ends = "too few prompts to tell", ""
    if math.isfinite(low):
        judged = (
            "training gained more"
            if low > 0
            else "training gained less"
            if high < 0
            else "no clear difference"
        )
        ends = f", {_lead(low, name)} to {_lead(high, name)}" + (
            f" over {len(leads)} seeds" if len(leads) > 1 else ""
        )
    points = " points" if name == RIGHT else ""
    return f"{judged}: {_lead(sum(means) / len(means), name)}{points}{ends}"


def _price_of(found: Sequence[Controls], best: Sequence[Way]) -> str:
    """The price of the best ways of a kind, by run."""
    price = " or ".join(dict.fromkeys(way.price for way in best))
    way = _named(best)
    return f"{way[0].upper()}{way[1:]}: {price} instead of {found[0].ways[0].evaluations}."


def _with_tuned_control(found: Sequence[Controls], name: str) -> list[str]:
    """That the tuned model is better with its control; nothing where that is not clear."""
    ways = [way for one in found for way in one.of("tuned knob")]
    if not ways or not all(way.leads[name].high < 0 for way in ways):
        return []
    by = "" if name == RIGHT else f" in {name}"
    return [f"Sampled with {TUNED} the tuned model reaches {_mean_over(ways, name)}{by}."]


def _named(ways: Sequence[Way]) -> str:
    return " or ".join(dict.fromkeys(way.name for way in ways))


def _mean_over(ways: Sequence[Way], name: str) -> str:
    """The mean of these ways, one of each run."""
    return _value(sum(way.means[name] for way in ways) / len(ways), name)


def _value(value: float, name: str) -> str:
    return f"{100 * value:.0f}\N{NO-BREAK SPACE}%" if name == RIGHT else f"{value:.3f}"


def _lead(value: float, name: str) -> str:
    return (f"{100 * value:+.0f}" if name == RIGHT else f"{value:+.3f}").replace(
        "-", "\N{MINUS SIGN}"
    )
