"""The names of a run's files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from g2rpo.core.files import Inside


@dataclass(frozen=True)
class RunFiles:
    """What the folder of a run holds. Naming a file neither reads nor creates it."""

    folder: Path | None

    @property
    def path(self) -> Path:
        if self.folder is None:
            raise ValueError("this trainer has no run_dir to write to")
        return self.folder

    config = Inside("config.yaml")  # resolved; `g2rpo train runs/NAME/config.yaml` repeats the run
    starts = Inside("starts.jsonl")  # a row per start or resume (`records.Start`)
    plan = Inside("plan.json")  # the plan beside what was measured (`records.PlannedAndMeasured`)
    # a row per iteration and evaluation (`records.TrainingRow`, `EvaluationRow`)
    log = Inside("metrics.jsonl")
    checkpoints = Inside("checkpoints")
    # until the first checkpoint: a run that is killed before begins again
    unsaved = Inside(".unsaved")
    # weights of the best evaluation, where one is better than the base's
    best = Inside("checkpoints/best")
    # the base's evaluation; so no second copy of the weights is needed
    baseline = Inside("baseline.safetensors")
    first_group = Inside("samples/first_group")  # pictures of one group of the first iteration
    group_scores = Inside("samples/first_group/scores.jsonl")
    group_grid = Inside("samples/first_group.png")
    before_after = Inside("samples/before_after.png")
    curves = Inside("curves.png")
    # base against tuned; written when a run finishes (`records.RunResults`)
    results = Inside("results.json")
    adapter = Inside("adapter")  # trained weights of a LoRA
    transformer = Inside("transformer")  # and of full fine-tuning
    votes = Inside("votes.jsonl")  # a line per answer of `g2rpo teach` (`lab.teach.votes`)
    pairs = Inside("pairs.jsonl")  # the answers as pairs, once it is finished
    report = Inside("report.html")
    exports = Inside("export")

    def scores(self, iteration: int) -> Path:
        """The table of held-out scores after an iteration (`train.monitor.scores`)."""
        return self.path / "scores" / f"{_named(iteration)}.jsonl"

    def pictures(self, iteration: int) -> Path:
        """The folder of the held-out pictures that are kept after an iteration."""
        return self.path / "samples" / _named(iteration)

    def grid(self, iteration: int) -> Path:
        """The first of them side by side."""
        return self.pictures(iteration).with_suffix(".png")


def _named(iteration: int) -> str:
    return f"iteration_{iteration:06d}"
