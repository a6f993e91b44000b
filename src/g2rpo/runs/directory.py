"""The file names of runs, evaluations and studies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g2rpo.core.errors import UserError
from g2rpo.rewards import votes


class _Inside:
    """A path below that of a folder."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: Any, kind: type) -> Path:
        path: Path = folder.path / self.name
        return path


@dataclass(frozen=True)
class RunDirectory:
    """The files of the run in `path`. Naming a file neither reads nor creates it."""

    path: Path

    config = _Inside("config.yaml")  # resolved; `g2rpo train runs/NAME/config.yaml` repeats the run
    votes = _Inside(votes.FILE)  # a line per answer of `g2rpo teach` (`rewards.votes`)
    starts = _Inside("starts.jsonl")  # a row per start or resume (`lifecycle.record_start`)
    rates = _Inside("rates.json")  # the pilots that chose the learning rate (`training.pilots`)
    plan = _Inside("plan.json")  # the plan beside what was measured (`app.prediction`)
    log = _Inside("metrics.jsonl")  # a row per iteration and evaluation (`monitor.metrics`)
    tensorboard = _Inside("tensorboard")
    trackers = _Inside("trackers")  # what other trackers continue from
    checkpoints = _Inside("checkpoints")
    best = _Inside("checkpoints/best")  # weights of the best evaluation, where an alarm may go back to them
    baseline = _Inside(
        "baseline.safetensors"
    )  # the base model's evaluation; so a comparison needs no second copy of the weights
    control_scores = _Inside("scores/controls.safetensors")  # scores of the base model's controls, by control and reward
    first_group = _Inside("samples/first_group")  # pictures of one group of the first iteration
    group_scores = _Inside("samples/first_group/scores.jsonl")
    group_grid = _Inside("samples/first_group.png")
    before_after = _Inside("samples/before_after.png")
    curves = _Inside("curves.png")
    results = _Inside("results.json")  # base against tuned; written when a run finishes
    adapter = _Inside("adapter")  # trained weights of a LoRA
    transformer = _Inside("transformer")  # and of full fine-tuning
    report = _Inside("report.html")
    exports = _Inside("export")

    def scores(self, iteration: int) -> Path:
        """The table of held-out scores after an iteration (`monitor.scores`)."""
        return self.path / "scores" / f"{_named(iteration)}.jsonl"

    def group(self, round: int) -> Path:
        """The folder of the pictures of a group that was answered (`g2rpo teach`)."""
        return self.path / votes.FOLDER / f"{round:06d}"

    def pictures(self, iteration: int) -> Path:
        """The folder of the held-out pictures that are kept after an iteration."""
        return self.path / "samples" / _named(iteration)

    def grid(self, iteration: int) -> Path:
        """The first of them side by side."""
        return self.pictures(iteration).with_suffix(".png")

    def traceback(self, rank: int) -> Path:
        """Why a reward failed on a rank."""
        return self.path / f"traceback_rank{rank}.txt"

    @property
    def weights(self) -> Path:
        """The weights of a finished run: `adapter` or `transformer`. UserError if it has none."""
        for folder in (self.adapter, self.transformer):
            if folder.is_dir():
                return folder
        raise UserError(f"{self.path} has no weights yet (neither adapter/ nor transformer/); has it finished?")


@dataclass(frozen=True)
class EvaluationDirectory:
    """The files of the evaluation in `path` (`g2rpo evaluate`)."""

    path: Path

    settings = _Inside("settings.yaml")
    chunks = _Inside("chunks")  # scores of finished chunks
    pictures = _Inside("pictures.jsonl")  # the table of all pictures
    results = _Inside("results.json")
    grids = _Inside("grid_steps_*.png")

    def grid(self, steps: int) -> Path:
        """The first pictures with so many steps."""
        return self.path / f"grid_steps_{steps:03d}.png"


@dataclass(frozen=True)
class StudyDirectory:
    """The files of the study in `path` (`g2rpo compare`)."""

    path: Path

    study = _Inside("study.yaml")
    base = _Inside("judged/base")
    controls = _Inside("judged/controls")
    results = _Inside("results.json")
    page = _Inside("results.md")
    curves = _Inside("curves.png")


def _named(iteration: int) -> str:
    return f"iteration_{iteration:06d}"


def clip_of(picture: Path) -> Path:
    """The clip beside its middle frame."""
    return picture.with_suffix(".webp")


WEIGHTS = ("pytorch_lora_weights.safetensors", "config.json")
"""A folder of weights has one of these: of an adapter, or of a transformer."""


def check_weights(path: Path) -> None:
    """UserError for a path that cannot be tuned weights."""
    if not path.is_dir() and not (path.is_file() and path.suffix == ".safetensors"):
        what = "an adapter/ or a transformer/ that training wrote, or a .safetensors file of one"
        raise UserError(f"weights {path}: is no folder and no .safetensors file; name {what}")
    if path.is_dir() and not any((path / name).is_file() for name in WEIGHTS):
        raise UserError(f"weights {path}: holds neither {' nor '.join(WEIGHTS)}; of a run, name its adapter/ or transformer/")
