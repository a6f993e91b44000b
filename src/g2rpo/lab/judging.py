"""An evaluation in a folder: base and tuned pictures at several step counts, scored, a chunk at a
time.

A chunk is finished when its file of scores exists; an interrupted evaluation continues with the
other chunks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from g2rpo.config.schema import CacheFolder, Steps
from g2rpo.core.data import Row
from g2rpo.core.errors import UserError, counted, placed
from g2rpo.core.files import Inside, digest_of, write_whole
from g2rpo.core.images import to_uint8
from g2rpo.core.plain import Count, as_json, read_as
from g2rpo.core.rewards import Reward
from g2rpo.core.statistics import interval_of_scores, paired
from g2rpo.core.types import Policy
from g2rpo.lab.untrained import Controls, against_controls
from g2rpo.rewards.catalogue import RewardTable
from g2rpo.train.evaluation.controls import NO_CONTROL, TUNED, Control
from g2rpo.train.evaluation.heldout import (
    SHOWN,
    Evaluation,
    Scored,
    picture_of,
    read_picture,
    right_of,
    score_rows,
    scores_of,
    values_of,
)
from g2rpo.train.evaluation.sampler import Drawing
from g2rpo.train.evaluator import Evaluator
from g2rpo.train.monitor.pictures import clip_of, read_clip, seconds_of

Side = Literal["base", "control", "tuned", "tuned control"]


def _different(controls: list[Control]) -> list[Control]:
    """Each control once, without one that changes nothing, which is the base. ValueError for two of
    one name, which names their files."""
    different = [control for control in dict.fromkeys(controls) if control != NO_CONTROL]
    names = [str(control) for control in different]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"two are named '{name}': their numbers count to six digits; take out one"
            )
    return different


class JudgingConfig(Drawing):
    """The model, prompts, rewards and sampling of an evaluation; without weights the base model
    alone."""

    base: bool = True
    """Whether the base model is evaluated beside tuned weights; with controls it is."""
    prompts: str
    """A source, as for training."""
    num_prompts: Count | None = None
    """Use the first `num_prompts` of the source; None: all."""
    cache: CacheFolder = "auto"
    """Where text embeddings are kept, as for training."""
    rewards: Annotated[RewardTable, Field(min_length=1)]
    steps: Annotated[list[Steps], Field(min_length=1)]
    controls: Annotated[list[Control], AfterValidator(_different)] = Field(default_factory=list)
    """Other sampler settings of the base model, sampled beside it with the smallest of `steps` or their own;
    with any, the tuned model is sampled as `TUNED` too."""
    trained: list[str] = Field(default_factory=list)
    """The rewards that choose the best of several draws; empty: all."""
    contents: dict[str, str] = Field(default_factory=dict)
    """Digests of the prompts, weights and model named above."""


SWEEP_MAY_CHANGE = ("policy.device", "cache")
"""Settings that a resumed evaluation may change."""
AGAIN = "finished chunks are kept, and the same command goes on after them"


class JudgedSteps(Scored):
    """A row of an evaluation: a picture's file, and how it was made."""

    picture: str
    clip: str | None = None
    seed: int
    side: Side
    steps: Steps
    control: str | None = None


@dataclass(frozen=True)
class Chunk:
    """Prompts `start .. stop-1` with one side's weights at one step count: the unit that is
    sampled, scored and stored."""

    side: Side
    steps: int
    start: int
    stop: int
    control: Control = NO_CONTROL

    @property
    def _whose(self) -> str:
        named = f"tuned {self.control}" if self.side == "tuned control" else str(self.control)
        words = re.sub("[^a-z0-9.]+", "_", named) or self.side
        # a negative prompt has any length and alphabet
        plain = len(words) <= 80 and not self.control.negative_prompt
        return words if plain else f"{words[:80]}_{digest_of(named)[:8]}"

    @property
    def name(self) -> str:
        return f"steps_{self.steps:03d}_{self._whose}_{self.start:06d}"

    @property
    def folder(self) -> Path:
        """The folder of its pictures in the evaluation's."""
        return Path("pictures", f"steps_{self.steps:03d}", self._whose)

    @property
    def places(self) -> range:
        """Those of its prompts."""
        return range(self.start, self.stop)


@dataclass(frozen=True)
class EvaluationDirectory:
    """The files of the evaluation in `path` (`g2rpo evaluate`)."""

    path: Path

    settings = Inside("settings.yaml")
    chunks = Inside("chunks")  # scores of finished chunks
    pictures = Inside("pictures.jsonl")  # the table of all pictures
    results = Inside("results.json")
    grids = Inside("grid_steps_*.png")

    @property
    def unfinished(self) -> bool:
        """Whether the results are not written yet."""
        return not self.results.is_file()

    def scores(self, chunk: Chunk) -> Path:
        """Those of a finished chunk."""
        return self.chunks / f"{chunk.name}.json"

    def grid(self, steps: int) -> Path:
        """The first pictures with so many steps."""
        return self.path / f"grid_steps_{steps:03d}.png"


@dataclass(kw_only=True)
class Judging(Evaluator):
    """The evaluation that `config` describes, of `prompts`, and its files."""

    config: JudgingConfig
    files: EvaluationDirectory

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        with placed(f"{self.files.path}: cannot be written (", OSError, after=f"); {AGAIN}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield

    @property
    def sides(self) -> list[Side]:
        """The sides that are evaluated: base, tuned."""
        tuned: list[Side] = ["tuned"] if self.config.weights else []
        return ["base", *tuned] if self.config.base or self.config.controls or not tuned else tuned

    @property
    def steps(self) -> list[int]:
        return sorted({*self.config.steps})

    @property
    def chosen_by(self) -> dict[str, float]:
        """The weights of the rewards that choose the best of several draws."""
        entries = self.config.rewards
        names = [name for name in entries if name in self.config.trained] or entries
        return {name: entries[name].weight for name in names}

    def chunks(self) -> list[Chunk]:
        """All chunks, the base's first, because loading tuned weights may replace the base's."""
        c, count, least = self.config, len(self.prompts), self.steps[0]
        turned = [(control.steps or least, control) for control in c.controls]
        asked: list[tuple[Side, int, Control]] = [
            (side, steps, NO_CONTROL) for side in self.sides for steps in self.steps
        ]
        last = len(self.steps) if "base" in self.sides else 0
        asked[last:last] = [("control", *each) for each in turned]
        if c.controls and "tuned" in self.sides:
            asked.append(("tuned control", least, TUNED))
        return [
            Chunk(side, steps, start, min(start + c.batch_size, count), control)
            for side, steps, control in asked
            for start in range(0, count, c.batch_size)
        ]

    def missing(self) -> list[Chunk]:
        """The chunks that are not finished."""
        return [chunk for chunk in self.chunks() if self._finished(chunk) is None]

    def run(
        self,
        chunks: Sequence[Chunk],
        policy: Policy,
        use_weights: Callable[[], None],
        rewards: Mapping[str, Reward],
        advance: Callable[[int], None] = lambda pictures: None,
    ) -> None:
        """Samples, scores and stores `chunks`; `use_weights` is called once, before the first tuned
        one.

        `advance(count)` is called after finished pictures. `UserError` for a disk error; finished
        chunks are kept.
        """
        tuned = False
        for chunk in chunks:
            if chunk.side.startswith("tuned") and not tuned:
                use_weights()
                tuned = True
            evaluation = self.config.sampler(policy, chunk.steps).best(
                self.prompts[chunk.start : chunk.stop],
                rewards,
                self.chosen_by,
                first=chunk.start,
                control=chunk.control,
                kept=to_uint8,
            )
            self._store(chunk, evaluation, seconds_of(policy, evaluation.images.shape[1]))
            advance(len(chunk.places))

    def rows(self, **of: Any) -> list[Row]:
        """A row for each picture of a complete evaluation, or for those that have these values: its
        file, prompt, index, seed, side, steps and scores."""
        found = []
        for chunk in self.chunks():
            if (rows := self._finished(chunk)) is None:
                raise ValueError(f"{self.files.path}: {chunk.name} is not finished")
            found += rows
        return _where(found, of)

    def results(self) -> list[Row]:
        """Per step count and reward the means of base and tuned (those evaluated), and of their
        paired change, with intervals."""
        rows, table = self.rows(), []
        for steps in self.steps:
            scores = {side: scores_where(rows, side=side, steps=steps) for side in self.sides}
            for name in self.config.rewards:
                of = {side: by_name[name] for side, by_name in scores.items()}
                line: Row = {"steps": steps, "reward": name}
                line |= {side: interval_of_scores(own) for side, own in of.items()}
                if len(of) == 2:
                    line["change"] = paired(of["base"], of["tuned"]).change
                table.append(line)
        return table

    def controls(self) -> Controls:
        """`against_controls` at the smallest of `steps`."""
        rows, at, tuned = self.rows(), self.steps[0], "tuned" in self.sides
        turned = {
            control: scores_where(rows, side="control", control=str(control))
            for control in self.config.controls
        }
        return against_controls(
            turned,
            scores_where(rows, side="base", steps=at),
            at,
            self.chosen_by,
            scores_where(rows, side="tuned", steps=at) if tuned else None,
            scores_where(rows, side="tuned control") if tuned else None,
        )

    def write_results(self) -> Path:
        """Writes results.json and pictures.jsonl; returns the path of the former."""
        c, path = self.config, self.files.results
        report: Row = {
            "model": c.policy.path,
            "weights": c.weights,
            "prompts": len(self.prompts),
            "seed": c.seed,
            "intervals": "95% t intervals over prompts",
            "results": self.results(),
        }
        if c.controls:
            report["controls"] = self.controls().model_dump(mode="json")
        self.keep_scores(self.files.pictures, self.rows())
        with self.writing(path):
            write_whole(path, as_json(report, 1).encode())
        return path

    def save_grid(self, steps: int) -> None:
        """Writes grid_steps_NNN.png, for clips also .webp: pictures of the first prompts with
        scores, one row per side."""
        shown, seconds = range(min(SHOWN, len(self.prompts))), 0.0
        sides: dict[str, Evaluation] = {}
        for side in self.sides:
            rows = [row for row in self.rows(side=side, steps=steps) if row["index"] in shown]
            files = [self.files.path / row["picture"] for row in rows]
            images = torch.stack([_read_painted(file) for file in files])
            if (first := clip_of(files[0])).is_file():
                seconds = read_clip(first)[1]
            prompts = tuple(self.prompts[place] for place in shown)
            sides[side] = Evaluation(prompts, images, scores_of(rows), right_of(rows))
        count, taken = counted(len(self.prompts), "prompt"), counted(steps, "step")
        note = f"The first {len(shown)} of {count}, in their order; from the same noise; {taken}."
        self.draw_grid(self.files.grid(steps), sides, self.config.rewards, note, seconds)

    def _finished(self, chunk: Chunk) -> list[Row] | None:
        """The rows of a chunk; None if it is not finished, or one of its pictures is gone."""
        path = self.files.scores(chunk)
        if not path.is_file():
            return None
        try:
            rows = read_as(list[JudgedSteps], path)
        except UserError:  # damaged: the chunk is repeated
            return None
        pictures = [str(picture_of(chunk.folder, index)) for index in chunk.places]
        files = [file for row in rows for file in (row.picture, row.clip) if file is not None]
        whole = [row.picture for row in rows] == pictures and all(
            (self.files.path / file).is_file() for file in files
        )
        return [row.model_dump(exclude_unset=True) for row in rows] if whole else None

    def _store(self, chunk: Chunk, evaluation: Evaluation, seconds: float) -> None:
        """Writes pictures, clips of so many seconds and, last, their scores, which marks the chunk
        as finished."""
        found, rows = evaluation, []
        for row in score_rows(found.prompts, found.scores, found.right, chunk.start):
            picture = picture_of(chunk.folder, row["index"])
            clip = {"clip": str(clip_of(picture))} if found.images.ndim == 5 else {}
            how = {"seed": self.config.seed, "side": chunk.side, "steps": chunk.steps}
            own = {} if chunk.control == NO_CONTROL else {"control": str(chunk.control)}
            rows.append({"picture": str(picture), **clip, **row, **how, **own})
        self.keep(self.files.path / chunk.folder, found.images, chunk.places, seconds)
        path = self.files.scores(chunk)
        with self.writing(path):
            write_whole(path, as_json(rows).encode())


def scores_where(rows: Sequence[Row], **of: Any) -> dict[str, Tensor]:
    """Scores [N] by reward of the rows that have these values, in float64, and the verdicts where
    rewards define right pictures."""
    return {name: values.double() for name, values in values_of(_where(rows, of)).items()}


def _where(rows: Sequence[Row], of: Mapping[str, Any]) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in of.items())]


def _read_painted(path: Path) -> Tensor:
    again = "); delete it and the same command paints it again"
    with placed(f"{path}: is damaged (", OSError, ValueError, after=again):
        return read_picture(path)
