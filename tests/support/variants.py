"""Variants of a test: all run in `make test-all`, which CI runs at every change, and a few of them
in `make test`."""

import pytest


def few(variants, quick):
    """`variants` as parameters, with all marked `slow` for which `quick(variant)` is false."""
    parameters = []
    for variant in variants:
        values = variant if isinstance(variant, tuple) else (variant,)
        parameters.append(pytest.param(*values, marks=() if quick(variant) else pytest.mark.slow))
    assert any(not each.marks for each in parameters), "no variant is left for `make test`"
    return parameters
