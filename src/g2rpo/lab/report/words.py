"""Formatting of numbers and times in the report."""

from __future__ import annotations

import math

from g2rpo.config.schema import PolicyConfig


def model_name(policy: PolicyConfig) -> str:
    """A description of the model."""
    return "the tiny FLUX that comes with g2rpo" if policy.path in ("testbed", "words") else policy.path


def decimals(error: float) -> int:
    """The decimals of a number with this standard error: two significant figures of the error."""
    return 3 if not math.isfinite(error) or error <= 0 else min(6, max(0, 1 - math.floor(math.log10(error))))


def fixed(value: float, digits: int) -> str:
    """A number with `digits` decimals; a dash for NaN."""
    return f"{value:,.{digits}f}".replace("-", "−") if math.isfinite(value) else "–"


def signed(value: float, digits: int) -> str:
    """The same with its sign."""
    return f"{value:+,.{digits}f}".replace("-", "−") if math.isfinite(value) else "–"


def figures(value: float | None) -> str:
    """Three significant figures, zeros at the end included; a dash for none."""
    return "–" if value is None else f"{value:#.3g}".rstrip(".").replace("-", "−")


def span(seconds: float) -> str:
    """A formatted time: 0.8 s, 42 s, 5 min 1 s, 3 h 20 min."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
