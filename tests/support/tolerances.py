"""Tolerances of float comparisons, by what makes two numbers differ.

- The same kernels with the same shapes, twice on one machine: `EXACT`.
- A short formula in float32, beside its closed form: `rounding`.
- The same terms added in another order (batches, micro-batches, ranks): `reordered`.
- A tiny network in batches of another size, or beside another implementation: `network`.
- Weights after AdamW: `adam`, in a run with a large `g2rpo.train.learner.EPSILON`. With the
  usual one a step is the gradient divided by its own size, so where a gradient is nearly 0 its
  rounding moves the weight by up to the learning rate, and no smaller tolerance holds everywhere.

Defaults suit some comparisons only: 1e-6 of pytest.approx is for Python's floats and float64,
and assert_close's 1e-5 for nothing that is not of size 1. A tolerance of what is drawn at random
is some standard errors, of a published number half of its last digit; such stand beside the number.
"""

import math
from typing import TypedDict

import pytest

UNIT = 2.0**-24
"""One rounding in float32 moves a value by at most this share of itself."""
BFLOAT16, FLOAT64 = 2.0**-9, 2.0**-53


class Tolerance(TypedDict):
    """As torch and numpy take it."""

    rtol: float
    atol: float


EXACT = Tolerance(rtol=0.0, atol=0.0)


def rounding(steps: int, size: float = 0.0, unit: float = UNIT) -> Tolerance:
    """Of a value that `steps` roundings led to, on both sides together.

    Each is at most a `unit` of the value, so n of them are at most n units; and as they are up or
    down by chance, 6 sqrt(n) units but for one case in a hundred million. Where larger values are
    subtracted their roundings stay: `size` is the largest on the way.
    """
    share = min(steps, 6 * math.sqrt(steps)) * unit
    return Tolerance(rtol=share, atol=share * size)


def reordered(terms: int, size: float, unit: float = UNIT) -> Tolerance:
    """Of two sums of the same `terms`, of which each order rounds all but one time less; `size` is
    the sum of their absolute values (for a mean, their mean absolute value)."""
    return Tolerance(rtol=0.0, atol=rounding(2 * (terms - 1), size, unit)["atol"])


def network(size: float, passes: int = 1, unit: float = UNIT) -> Tolerance:
    """Of what a tiny transformer or VAE of `tests.support` computes, up to `size`, in `passes` one
    after another.

    The longest way through one has about 16 matrix products with rows of 64 terms of either sign,
    whose partial sums are on average half as large, in squares, as the sum: 16 x 64 / 2 roundings
    of its size, on either side. Between layers errors do not grow: with each weight one rounding
    off, velocities of the tiny FLUX and SD3 are at most 1.0 units of the largest off. (Measured
    between batches of 1 and 4, with SSE, AVX2 and AVX-512: at most 4 units, of 192 allowed.)
    """
    return Tolerance(rtol=0.0, atol=rounding(1024 * passes, size, unit)["atol"])


def adam(rate: float, updates: int, gradient: float, epsilon: float = 1.0) -> Tolerance:
    """Of weights after `updates` whose gradients are at most `gradient` apart.

    A step is `rate` m / (sqrt(v) + epsilon). It changes with m by at most 1 / epsilon, and with
    sqrt(v), which m does not exceed in a few updates, by m / (sqrt(v) + epsilon)^2 <= 1 / (4 epsilon).
    """
    return Tolerance(rtol=0.0, atol=1.25 * rate * updates * gradient / epsilon)


def near(expected, tolerance: Tolerance, **options):
    """`expected` of Python's numbers, for `==`."""
    return pytest.approx(expected, rel=tolerance["rtol"], abs=tolerance["atol"], **options)
