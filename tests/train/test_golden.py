"""A recorded run of the Gaussian policy, so that a change of numbers is a decision and not an
accident.

Recorded by `python -m tests.train.test_golden`, which writes golden.json with the environment it
ran in. A change that is meant (another sampler, another default) records it anew and says so in the
changelog.
"""

import json
import platform
from pathlib import Path

import pytest
import torch

from g2rpo.train import learner
from tests.support.runs import reordered_row, trainer

GOLDEN = Path(__file__).with_name("golden.json")
OPTIONS = ("trainer.iterations=3", "algorithm.update_every=branch", "optim.learning_rate=0.2")


def numbers() -> list[dict]:
    """With an epsilon of Adam that is larger than gradients (0.002 in each weight): rounding of a
    gradient that is nearly 0 would move its weight as far as any."""
    torch.manual_seed(0)  # to show that nothing depends on it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner, "EPSILON", 0.01)
        rows = trainer(None, *OPTIONS)
    return [
        {
            key: value
            for key, value in row.items()
            if isinstance(value, int | float) and "seconds" not in key
        }
        for row in (rows.iterate(), rows.iterate(), rows.iterate(), rows.evaluate())
    ]


def test_numbers_are_the_recorded_ones():
    """Another processor adds in another order."""
    recorded = json.loads(GOLDEN.read_text())["rows"]
    for got, want in zip(numbers(), recorded, strict=True):
        assert got == reordered_row(want)


if __name__ == "__main__":
    stamp = {
        "command": "python -m tests.train.test_golden",
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    GOLDEN.write_text(json.dumps({**stamp, "rows": numbers()}, indent=1) + "\n")
