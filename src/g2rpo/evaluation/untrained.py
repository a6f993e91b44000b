"""What the untrained model reaches with free knobs, or as the best of several pictures, beside the tuned model.

A gain of training counts if it exceeds these, at their price: network evaluations and reward readings of a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from pydantic import Field
from torch import Tensor

from g2rpo.core.plain import Section
from g2rpo.core.statistics import Interval, group_std, interval
from g2rpo.evaluation.controls import TUNED, Control

CHOSEN_FROM = (2, 4, 8, 16)
RIGHT = "right pictures"
"""A name beside those of rewards: the share of right pictures."""
ControlScores = Mapping[str, Tensor]
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
    controls: Mapping[Control, ControlScores],
    base: ControlScores,
    num_steps: int,
    weights: Mapping[str, float],
    tuned: ControlScores | None = None,
    tuned_control: ControlScores | None = None,
    training: int | None = None,
) -> Controls:
    """Compares scores of the base by control, and of the tuned model (`tuned_control`: as `TUNED`), all of the same prompts.
    The best of several draws is chosen by the trained rewards with their `weights`."""
    knobs = {control: scores for control, scores in controls.items() if not control.draw}
    draws = [base, *(scores for control, scores in controls.items() if control.draw and control == Control(draw=control.draw))]
    drawn = {name: torch.stack([draw[name] for draw in draws], -1) for name in base}
    counts = [n for n in CHOSEN_FROM if n <= len(draws)]
    several = {f"best of {n}": best_of(drawn, weights, n) for n in counts}

    def way(name: str, evaluations: int, scores: ControlScores, readings: int = 0) -> Way:
        means = {of: _mean(values) for of, values in scores.items()}
        changes = {of: _ends(values - base[of]) for of, values in scores.items()}
        return Way(name=name, evaluations=evaluations, readings=readings, means=means, changes=changes)

    ways = [way("base", num_steps, base)]
    ways += [way(str(control), control.evaluations(num_steps), scores) for control, scores in knobs.items()]
    ways += [way(f"best of {n}", n * num_steps, several[f"best of {n}"], n) for n in counts]
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


def best_of(scores: Mapping[str, Tensor], weights: Mapping[str, float], n: int) -> dict[str, Tensor]:
    """The expected scores [N] by name of the best of n pictures, from scores [N, S] of S >= n pictures of each prompt; the best
    has the highest `utility`."""
    by = utility(scores, weights)
    return {name: expected_of_best(by, values, n) for name, values in scores.items()}


def utility(scores: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """What pictures [N, S] are chosen by: the weighted sum of their trained rewards, each as its deviation from the prompt's
    mean in units of its standard deviation within a prompt. As in training, a missing score counts as the mean."""
    total = torch.zeros_like(next(iter(scores.values())), dtype=torch.float64)
    for name, weight in weights.items():
        values = scores[name].double()
        deviation = (values - values.nanmean(-1, keepdim=True)).nan_to_num()
        spread = group_std(values).square().nanmean().sqrt()
        total += weight * deviation / (spread if spread > 0 else 1.0)
    return total


def expected_of_best(by: Tensor, of: Tensor, n: int) -> Tensor:
    """The expected value `of` [N] of the picture that is highest in `by` [N, S] among n of the S, drawn without replacement,
    which is unbiased for n new pictures. One of equally good pictures is taken by lot; missing values are left out."""
    count = by.shape[-1]
    of_rank = torch.tensor([math.comb(rank, n - 1) / math.comb(count, n) for rank in range(count)], dtype=torch.float64)
    chance = torch.empty_like(by, dtype=torch.float64).scatter_(-1, by.argsort(-1), of_rank.expand(by.shape))
    equal = (by[..., :, None] == by[..., None, :]).double()
    chance = (equal * chance[..., None, :]).sum(-1) / equal.sum(-1)
    known = ~of.isnan()
    return (chance * of.double()).where(known, 0).sum(-1) / chance.where(known, 0).sum(-1)


def _best(ways: Mapping[str, ControlScores], base: ControlScores, tuned: ControlScores | None) -> dict[str, Best]:
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
