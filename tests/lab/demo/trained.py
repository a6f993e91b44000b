"""A finished run of the tiny FLUX, which draws other pictures than its base."""

import pytest

from g2rpo.cli.main import main
from g2rpo.train.run.folder import Run
from tests.support.commands import write_tiny

BRIGHT = ["rewards.scene_accuracy=", "rewards.brightness=1"]
"""Brightness has a score for any picture, and scene_accuracy for few prompts."""


def train_tiny(folder, flux_directory, *overrides):
    command = ["train", str(write_tiny(folder, flux_directory)), "--run-dir", str(folder / "run")]
    judged = "evaluation.rewards.scene_accuracy=1", "prompts.cache=off", "optim.learning_rate=0.05"
    with pytest.raises(SystemExit) as stop:
        main([*command, *BRIGHT, *judged, *overrides])
    assert not stop.value.code
    return Run(folder / "run")
