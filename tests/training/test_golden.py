"""A recorded run of the Gaussian policy, so that a change of numbers is a decision and not an
accident.

Recorded by `python -m tests.training.test_golden`, which writes golden.json with the environment it
ran in. A change that is meant (another sampler, another default) records it anew and says so in the
changelog.
"""

import json
import platform
from pathlib import Path

import pytest
import torch

from tests.support.runs import trainer

GOLDEN = Path(__file__).with_name("golden.json")


def numbers() -> list[dict]:
    torch.manual_seed(0)  # to show that nothing depends on it
    rows = trainer(None, "trainer.iterations=3", "algorithm.update_every=branch")
    return [
        {
            key: value
            for key, value in row.items()
            if isinstance(value, int | float) and "seconds" not in key
        }
        for row in (rows.iterate(), rows.iterate(), rows.iterate(), rows.evaluate())
    ]


def test_numbers_are_the_recorded_ones():
    """Float32 sums in another order on another processor: 1e-6 of values of size 1, magnified by
    Adam's normalisation."""
    recorded = json.loads(GOLDEN.read_text())["rows"]
    for got, want in zip(numbers(), recorded, strict=True):
        assert got == pytest.approx(want, rel=2e-3, abs=2e-5)


if __name__ == "__main__":
    stamp = {
        "command": "python -m tests.training.test_golden",
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    GOLDEN.write_text(json.dumps({**stamp, "rows": numbers()}, indent=1) + "\n")
