"""The intervals of a mean and of a line's rise, and how numbers and times are written."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z = 1.96
"""Standard errors to either side of a 95 % interval of a normal distribution."""
FEWEST_VALUES = 8
"""The fewest values for which a mean has an interval."""


def half_width(error: float, count: int, level: float = 0.95) -> float:
    """Half of the t interval of a mean of `count` values with this standard error; NaN for fewer
    than `FEWEST_VALUES`."""
    from scipy.special import stdtrit

    return (
        float(stdtrit(count - 1, (1 + level) / 2)) * error
        if count >= FEWEST_VALUES
        else float("nan")
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
