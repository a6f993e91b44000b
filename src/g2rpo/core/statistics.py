"""Base against tuned: the mean change of paired values, its 95 % interval and its words. Samples in
proportion, spread and rank correlation within groups; and how numbers and times are written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from pydantic import Field
from scipy.special import stdtr, stdtrit
from torch import Tensor

from g2rpo.core.plain import Figure

Z = 1.96
"""Standard errors to either side of a 95 % interval of a normal distribution."""
FEWEST_VALUES = 8
"""The fewest values for which a mean has an interval."""
SMALL_EFFECT = 0.2
"""A smaller change is slight, in standard deviations of the base's scores (Cohen 1988: a small
effect)."""
RIGHT = "right pictures"
"""A name beside those of rewards: the share of right pictures."""


@dataclass(frozen=True)
class Interval:
    """A mean of `count` values and the ends of its interval; NaN where there are too few values."""

    mean: Figure
    low: Figure
    high: Figure
    count: int

    def within(self, low: float, high: float) -> Interval:
        """The same with ends that the mean can have."""
        return Interval(self.mean, max(self.low, low), min(self.high, high), self.count)

    @property
    def sign(self) -> int:
        """1 or -1 if all of it is above or below 0, else 0."""
        return (self.low > 0) - (self.high < 0)

    def __format__(self, sign: str) -> str:
        """MEAN ± HALF, or MEAN [LOW, HIGH] if its halves differ; MEAN alone where there are too few
        values. `sign` "+" is for changes."""
        mean, low, high = (f"{value:{sign}.3f}" for value in (self.mean, self.low, self.high))
        below, above = self.mean - self.low, self.high - self.mean
        if math.isclose(below, above, rel_tol=1e-6, abs_tol=1e-9):
            return f"{mean} ± {above:.3f}"
        return f"{mean} [{low}, {high}]" if math.isfinite(self.low) else mean

    def in_words(self, share: bool, digits: int = 3) -> str:
        """A change: +0.52, +0.47 to +0.57, or of a share in percent: +52 points, +47 to +57."""
        scale, digits, unit = (100, 0, " points") if share else (1, digits, "")
        mean, low, high = (signed(scale * end, digits) for end in (self.mean, self.low, self.high))
        return f"{mean}{unit}, {low} to {high}" if math.isfinite(self.low) else f"{mean}{unit}"


@dataclass(frozen=True)
class Comparison:
    """Base against tuned: means over the same prompts from the same noise, and what is known of
    their difference. results.json has the first five."""

    base: Figure
    tuned: Figure
    error: Figure
    """Standard error of the mean paired difference; NaN for fewer than two prompts, and for several
    seeds, where `measured` has the interval."""
    count: Annotated[int, Field(ge=0)] = 0
    """Prompts that both have a value for."""
    spread: Figure = math.nan
    """Standard deviation of the base's values over these prompts; of several seeds their mean."""
    share: bool = False
    """Whether the values are 1 and 0, as of right pictures."""
    seeds: int = 1
    measured: Interval | None = field(default=None, repr=False)
    """The change; None: Student's t interval of `error`."""

    @property
    def change(self) -> Interval:
        """The mean difference, with its 95 % interval."""
        if self.measured is not None:
            return self.measured
        mean, half = self.tuned - self.base, half_width(self.error, self.count)
        return Interval(mean, mean - half, mean + half, self.count)

    @property
    def effect(self) -> Interval:
        """The change in units of `spread`; NaN where that is not known or 0."""
        one, unit = self.change, self.spread or math.nan
        return Interval(one.mean / unit, one.low / unit, one.high / unit, one.count)

    @property
    def verdict(self) -> str:
        """ "higher", "lower" or no clear change, by the interval; "slightly" if it is clear and
        small."""
        if not self.count:
            return "no scores"
        if self.count < FEWEST_VALUES:
            return "too few prompts"
        if not math.isfinite(self.change.low):
            return "unknown"
        if not self.change.sign:
            return "no clear change"
        way = "higher" if self.change.sign > 0 else "lower"
        return f"slightly {way}" if abs(self.effect.mean) < SMALL_EFFECT else way

    @property
    def chance_of_fall(self) -> float:
        """The p-value of a fall: Student's t, one-sided, paired; 1 for fewer than `FEWEST_VALUES`
        values, of which no interval is given either. If all differences are equal, the t-test is
        undefined; a fall then has the sign test's 2^-N."""
        if self.count < FEWEST_VALUES:
            return 1.0
        change = self.tuned - self.base
        if self.error == 0:
            return 0.5**self.count if change < 0 else 1.0
        return float(stdtr(self.count - 1, change / self.error))

    @property
    def stored(self) -> dict[str, Any]:
        """What results.json has of it."""
        names = ("base", "tuned", "error", "count", "spread")
        return {name: getattr(self, name) for name in names}

    @property
    def digits(self) -> int:
        """Decimals that leave two significant figures of the change's standard error."""
        return decimals_of((self.change.high - self.change.low) / (2 * Z))

    def effect_in_words(self, unit: str = "s.d.") -> str:
        """The effect with its interval; "" where it is not known."""
        one = self.effect
        if math.isnan(one.mean):
            return ""
        few = self.count < FEWEST_VALUES
        ends = "" if few else f" ({signed(one.low, 2)} to {signed(one.high, 2)})"
        return f"{signed(one.mean, 2)} {unit}{ends}"

    def sentence(self, name: str) -> str:
        """The end of a sentence: whether the score `name` changed, and how much in standard
        deviations, which say more than its own units; of a share the points."""
        judged, few = self.verdict, ""
        if judged == "too few prompts":
            scored = f"{self.count} prompt{'s' * (self.count != 1)} with scores"
            few = f", only {scored}; {FEWEST_VALUES} are needed to say more"
        if self.share:
            base = f"before training {percent(self.base)}"
            over = f" over {self.seeds} seeds" if self.seeds > 1 else ""
            doubt = ", no clear change" if judged == "no clear change" else ""
            return base + (few or f" ({self.change.in_words(share=True)}{over}){doubt}")
        if not self.count:
            return f"{name} gave no scores"
        how = "slightly" if judged.startswith("slightly") else ""
        moved = {"higher": "rose", "lower": "fell"}.get(judged.split()[-1])
        said = f"{moved} {how}".strip() if moved else "did not clearly change"
        values = f"from {fixed(self.base, self.digits)} to {fixed(self.tuned, self.digits)}"
        return f"{name} {said}, {self.effect_in_words('standard deviations') or values}{few}"

    @property
    def cells(self) -> tuple[str, str, str]:
        """Base, tuned and their change, for tables: "0.410", "0.930", "+0.520 ± 0.050"."""
        return f"{self.base:.3f}", f"{self.tuned:.3f}", f"{self.change:+}"

    def __str__(self) -> str:
        """0.410 → 0.930 (+0.520 ± 0.050); 41 % → 93 % of a share."""
        base, tuned, change = self.cells
        if self.share:
            return f"{percent(self.base)} → {percent(self.tuned)}"
        return f"{base} → {tuned} ({change})"


def paired(
    before: ArrayLike | Tensor, after: ArrayLike | Tensor, *, share: bool = False
) -> Comparison:
    """Values [N] of prompts, or [S, N] of training seeds by prompts, against others of the same; in
    float64; only those that have both count. The interval is that of `interval`, no wider than it can
    be (`possible`; of a `share` 0 to 1)."""
    wide = (torch.as_tensor(values, dtype=torch.float64) for values in (before, after))
    base, tuned = torch.broadcast_tensors(*wide)
    if base.ndim == 2 and len(base) == 1:
        base, tuned = base[0], tuned[0]
    change, both = interval(tuned - base), ~(base.isnan() | tuned.isnan())
    means = float(base[both].mean()), float(tuned[both].mean())
    low, high = (0.0, 1.0) if share else possible(torch.stack([base, tuned]))
    change = change.within(low - means[0], high - means[0])
    if base.ndim == 2:  # their values are not independent
        spread = float(group_std(base.where(both, torch.nan)).nanmean())
        count = int(both.any(0).sum())
        return Comparison(*means, math.nan, count, spread, share, len(base), change)
    base, tuned = base[both], tuned[both]
    several = len(base) > 1
    error = float((tuned - base).std()) / math.sqrt(len(base)) if several else math.nan
    spread = float(base.std()) if several else math.nan
    return Comparison(*means, error, len(base), spread, share, 1, change)


def possible(scores: ArrayLike | Tensor) -> tuple[float, float]:
    """The ends that a mean of such scores can have: 0 and 1, where scores between these reach them,
    and else none."""
    every = torch.as_tensor(scores, dtype=torch.float64)
    every = every[~every.isnan()]
    if not len(every) or every.min() < 0 or every.max() > 1:
        return -math.inf, math.inf
    return 0.0 if every.min() == 0 else -math.inf, 1.0 if every.max() == 1 else math.inf


def interval_of_scores(scores: Tensor) -> Interval:
    """The `interval` of their mean, no wider than it can be."""
    return interval(scores).within(*possible(scores))


def interval(
    values: ArrayLike, *, resamples: int = 2000, level: float = 0.95, seed: int = 0
) -> Interval:
    """The mean of `values`, [N] prompts or [S, N] training seeds by prompts, and its interval. NaN
    values are left out.

    For a difference of two models on the same prompts pass the differences, prompt by prompt: their
    interval is far narrower than those of the two means.

    Over prompts alone it is Student's t. Of several seeds, seeds and prompts are resampled
    independently of one another ("pigeonhole bootstrap", Owen 2007, arXiv 0712.1111, for crossed
    random effects), because the effect of a seed is shared by all prompts and the effect of a
    prompt by all seeds. For large S and N its variance is rather too large than too small; with S
    seeds the variance between them is underestimated by the factor (S - 1) / S, as by any
    bootstrap, which matters for two or three. Resamples of NaN alone are left out.
    """
    every = np.atleast_2d(np.asarray(values, dtype=np.float64))
    valid = ~np.isnan(every)
    count = int(valid.sum())
    mean = float(every[valid].mean()) if count else math.nan
    if len(every) == 1 or count < 2:
        error = float(every[valid].std(ddof=1) / np.sqrt(count)) if count > 1 else math.nan
        half = half_width(error, count, level)
        return Interval(mean, mean - half, mean + half, count)
    random = np.random.default_rng(seed)
    seeds, prompts = (
        random.multinomial(size, np.full(size, 1 / size), resamples) for size in every.shape
    )
    totals = ((seeds @ np.where(valid, every, 0)) * prompts).sum(1)
    counts = ((seeds @ valid) * prompts).sum(1)
    low, high = np.quantile(
        (totals / np.maximum(counts, 1))[counts > 0], [(1 - level) / 2, (1 + level) / 2]
    )
    return Interval(mean, float(low), float(high), count)


def half_width(error: float, count: int, level: float = 0.95) -> float:
    """Half of the t interval of a mean of `count` values with this standard error; NaN for fewer
    than `FEWEST_VALUES`."""
    return (
        float(stdtrit(count - 1, (1 + level) / 2)) * error if count >= FEWEST_VALUES else math.nan
    )


def rise(values: Sequence[float]) -> tuple[float, float]:
    """The rise of the least squares line from the first of `values` to the last, and half of its 95 %
    t interval, NaN for fewer than nine values. Exact for independent normal noise around a line."""
    count = len(values)
    if count < 3:
        return math.nan, math.nan
    middle, mean = (count - 1) / 2, sum(values) / count
    spread = sum((x - middle) ** 2 for x in range(count))
    slope = sum((x - middle) * (y - mean) for x, y in enumerate(values)) / spread
    rest = sum((y - mean - slope * (x - middle)) ** 2 for x, y in enumerate(values))
    error = math.sqrt(rest / (count - 2) / spread) * (count - 1)
    return slope * (count - 1), half_width(error, count - 1)


def in_proportion(outcomes: Sequence[Hashable], count: int) -> list[int]:
    """The indices of `count` items (all, if there are fewer), in their order: of each outcome as
    large a share as among all, rounded by the largest remainders, and of that outcome the first
    ones."""
    count = min(count, len(outcomes))
    exact = {each: count * many / len(outcomes) for each, many in Counter(outcomes).items()}
    left = {each: int(share) for each, share in exact.items()}
    by_remainder = sorted(exact, key=lambda each: left[each] - exact[each])
    for each in by_remainder[: count - sum(left.values())]:
        left[each] += 1
    taken = []
    for place, outcome in enumerate(outcomes):
        if left[outcome]:
            left[outcome] -= 1
            taken.append(place)
    return taken


def group_std(rewards: Tensor) -> Tensor:
    """Unbiased standard deviation over the last axis, NaN left out; NaN where fewer than two values
    are valid. Float64."""
    valid = ~rewards.isnan()
    values = torch.where(valid, rewards, 0).double()
    count = valid.sum(-1)
    mean = values.sum(-1) / count
    deviation = torch.where(valid, values - mean[..., None], 0)
    return torch.where(count > 1, deviation.square().sum(-1) / (count - 1), torch.nan).sqrt()


def ranks(values: Tensor) -> Tensor:
    """Ranks from 1 over the last axis; equal values share the mean of theirs. NaN has no rank and
    takes none. Float64."""
    one, other = values[..., :, None], values[..., None, :]
    return torch.where(
        values.isnan(), torch.nan, (other < one).sum(-1).double() + ((other == one).sum(-1) + 1) / 2
    )


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's rank correlation over the last axis, in [-1, 1]: Pearson's of the ranks, so ties
    are allowed.

    Members without both values are left out. NaN where fewer than two are left or where either side
    is constant: a group whose rewards are all equal ranks nothing.
    """
    valid = ~(a.isnan() | b.isnan())
    middle = (valid.sum(-1, keepdim=True) + 1) / 2
    x, y = (torch.where(valid, ranks(v.masked_fill(~valid, torch.nan)) - middle, 0) for v in (a, b))
    return (x * y).sum(-1) / (x.square().sum(-1) * y.square().sum(-1)).sqrt()


def or_nan(value: float | None) -> float:
    """A number of a log or a table; NaN for null."""
    return math.nan if value is None else float(value)


def decimals_of(error: float) -> int:
    """Decimals of a number with two significant figures of its standard `error`; 3 where that is
    not known or 0."""
    return min(6, max(0, 1 - math.floor(math.log10(error)))) if 0 < error < math.inf else 3


def fixed(value: float, digits: int) -> str:
    """A number with `digits` decimals; a dash for NaN."""
    return f"{value:,.{digits}f}".replace("-", "−") if math.isfinite(value) else "–"


def signed(value: float, digits: int) -> str:
    """The same with its sign."""
    return f"{value:+,.{digits}f}".replace("-", "−") if math.isfinite(value) else "–"


def percent(share: float, digits: int = 0) -> str:
    """A share: 93 %; a dash for NaN."""
    return f"{100 * share:.{digits}f}\N{NO-BREAK SPACE}%" if math.isfinite(share) else "–"


def figures(value: float | None) -> str:
    """Three significant figures, zeros at the end included; a dash for none."""
    return (
        "–" if value is None or math.isnan(value) else f"{value:#.3g}".rstrip(".").replace("-", "−")
    )


def in_time(seconds: float) -> str:
    """A formatted time: 0.8 s, 42 s, 5 min 1 s, 3 h 20 min."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
