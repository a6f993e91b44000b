"""What the untrained model reaches with other sampler settings, or as the best of several pictures,
beside the tuned model.

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
from g2rpo.core.statistics import RIGHT, Interval, fixed, paired, percent
from g2rpo.train.evaluation.controls import TUNED, Control
from g2rpo.train.evaluation.sampler import utility

CHOSEN_FROM = (2, 4, 8, 16)
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

    def mean_in_words(self, name: str) -> str:
        return percent(self.means[name]) if name == RIGHT else fixed(self.means[name], 3)


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
            scored = [way for way in ways if not math.isnan(way.means[name] + base)]
            way = max(scored, key=lambda way: way.means[name], default=None)
            if way and (not way.leads or way.leads[name].count):
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
    `compare --controls` show. The base first; then the sampler settings, the best of 2, 4, ...
    draws, chosen by the trained rewards with their `weights`, and the tuned model, plain and as
    `TUNED`."""

    def way(
        kind: Kind, name: str, evaluations: int, scores: ControlScores, readings: int = 0
    ) -> Way:
        return Way(
            kind=kind,
            name=name,
            evaluations=evaluations,
            readings=readings,
            means={of: float(values.double().nanmean()) for of, values in scores.items()},
            changes=_changes(base, scores),
            leads={} if tuned is None else _changes(scores, tuned),
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


def _changes(before: ControlScores, after: ControlScores) -> dict[str, Interval]:
    return {
        name: paired(values, after[name], share=name == RIGHT).change
        for name, values in before.items()
    }


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


def in_words(found: Controls, names: Sequence[str]) -> list[str]:
    """A sentence for each of `names`: what the tuned model reaches, and whether that is clearly more
    than the base with its best sampler settings and as the best of several, on the same prompts."""
    return [_sentence(found, name) for name in names if name in found.best]


def in_figures(found: Controls, names: Sequence[str]) -> list[str]:
    """What these cost, and that the tuned model is better with its control, where that is clear."""
    said = []
    for name in names:
        for way in (best[name] for best in (found.best, found.best_of) if name in best):
            instead = f"{way.price} instead of {found.ways[0].evaluations}"
            said.append(f"{way.name[0].upper()}{way.name[1:]}: {instead}.")
        for way in found.of("tuned knob"):
            if way.leads[name].sign < 0:
                by = "" if name == RIGHT else f" in {name}"
                reached = f"the tuned model reaches {way.mean_in_words(name)}{by}"
                said.append(f"Sampled with {TUNED} {reached}.")
    return list(dict.fromkeys(said))


def _sentence(found: Controls, name: str) -> str:
    knob, several, (tuned,) = found.best[name], found.best_of.get(name), found.of("tuned")
    reached = tuned.mean_in_words(name)
    start = f"{reached} are right" if name == RIGHT else f"{name} is {reached}"
    chosen = (
        f" and {several.mean_in_words(name)} as the {several.name} pictures ({_lead_over(several, name)})"
        if several
        else ""
    )
    return (
        f"On {found.prompts} of these prompts {start} after training, without it {knob.mean_in_words(name)} with "
        f"the best sampler settings ({knob.name}; {_lead_over(knob, name)}){chosen}."
    )


def _lead_over(way: Way, name: str) -> str:
    """Whether the tuned model is clearly ahead of this way, and its lead."""
    lead = way.leads[name]
    judged = {1: "training gained more", -1: "training gained less", 0: "no clear difference"}
    clear = judged[lead.sign] if math.isfinite(lead.low) else "too few prompts to tell"
    return f"{clear}: {lead.in_words(name == RIGHT)}"
