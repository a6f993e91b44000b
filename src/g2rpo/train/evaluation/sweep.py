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

from pydantic import AfterValidator, Field
from torch import Tensor

from g2rpo.config.schema import CacheFolder, Steps
from g2rpo.core.data import Row
from g2rpo.core.errors import UserError
from g2rpo.core.files import Inside, digest_of, write_whole
from g2rpo.core.images import to_uint8
from g2rpo.core.plain import Count, as_json, read_as
from g2rpo.core.statistics import interval
from g2rpo.core.types import Policy, Reward
from g2rpo.rewards.options import RewardTable
from g2rpo.train.evaluation.controls import NO_CONTROL, TUNED, Control
from g2rpo.train.evaluation.heldout import Evaluation
from g2rpo.train.evaluation.sampler import Drawing
from g2rpo.train.evaluation.untrained import RIGHT, Controls, against_controls
from g2rpo.train.monitor.pictures import clip_of, seconds_of
from g2rpo.train.monitor.scores import (
    Scored,
    picture_of,
    right_of,
    save_pictures,
    save_rows,
    score_rows,
    scores_of,
)

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


class JudgedSteps(Scored):
    """A row of an evaluation: a picture's file, and how it was made."""

    picture: str
    clip: str | None = None
    seed: int
    side: Side
    steps: Steps
    control: str | None = None


SWEEP_MAY_CHANGE = ("policy.device", "cache")
"""Settings that a resumed evaluation may change."""


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
    def folder(self) -> str:
        """The folder of its pictures in the evaluation's."""
        return f"pictures/steps_{self.steps:03d}/{self._whose}"

    def picture(self, index: int) -> str:
        """The path of a prompt's picture (of a clip the middle frame, beside the clip)."""
        return str(picture_of(Path(self.folder), index))


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

    def grid(self, steps: int) -> Path:
        """The first pictures with so many steps."""
        return self.path / f"grid_steps_{steps:03d}.png"


@dataclass
class Judging:
    """The evaluation that `config` describes, of `prompts`, in `directory`."""

    config: JudgingConfig
    prompts: Sequence[str]
    directory: Path

    @property
    def sides(self) -> list[Side]:
        """The sides that are evaluated: base, tuned."""
        tuned: list[Side] = ["tuned"] if self.config.weights else []
        return ["base", *tuned] if self.config.base or self.config.controls or not tuned else tuned

    @property
    def chosen_by(self) -> list[str]:
        """The rewards that choose the best of several draws."""
        return [name for name in self.config.rewards if name in self.config.trained] or list(
            self.config.rewards
        )

    def chunks(self) -> list[Chunk]:
        """All chunks, the base's first, because loading tuned weights may replace the base's."""
        c, count = self.config, len(self.prompts)
        plain: dict[Side, list[tuple[int, Control]]] = {
            side: [(steps, NO_CONTROL) for steps in sorted(set(c.steps))] for side in self.sides
        }
        turned = [(control.steps or min(c.steps), control) for control in c.controls]
        both: dict[Side, list[tuple[int, Control]]] = {"base": [], "control": turned, **plain}
        if c.controls and "tuned" in both:
            both["tuned control"] = [(min(c.steps), TUNED)]
        return [
            Chunk(side, steps, start, min(start + c.batch_size, count), control)
            for side, settings in both.items()
            for steps, control in settings
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
            prompts = self.prompts[chunk.start : chunk.stop]
            sampler = self.config.sampler(policy, chunk.steps)
            weights = {name: self.config.rewards[name].weight for name in self.chosen_by}
            evaluation = sampler.best(
                prompts,
                rewards,
                weights,
                first=chunk.start,
                control=chunk.control,
                kept=to_uint8,
            )
            self._store(chunk, evaluation, policy)
            advance(chunk.stop - chunk.start)

    def rows(self, *sides: Side) -> Iterator[Row]:
        """One row per picture of a complete evaluation, or of some of its sides: its file, prompt,
        index, seed, side, steps and scores."""
        for chunk in self.chunks():
            if sides and chunk.side not in sides:
                continue
            rows = self._finished(chunk)
            if rows is None:
                raise ValueError(f"{self.directory}: {chunk.name} is not finished")
            yield from rows

    def results(self) -> list[Row]:
        """Per step count and reward the means of base and tuned (those evaluated), and of their
        paired change, with intervals."""
        rows, table = list(self.rows()), []
        for steps in sorted(set(self.config.steps)):
            scores = {side: scores_where(rows, side=side, steps=steps) for side in self.sides}
            for name in self.config.rewards:
                of = {side: by_name[name] for side, by_name in scores.items()}
                line: Row = {
                    "steps": steps,
                    "reward": name,
                    **{side: interval(own) for side, own in of.items()},
                }
                if len(of) == 2:
                    line["change"] = interval(of["tuned"] - of["base"])
                table.append(line)
        return table

    def controls(self) -> Controls:
        """`against_controls` at the smallest of `steps`."""
        c, rows = self.config, list(self.rows())
        at, tuned = min(c.steps), "tuned" in self.sides
        base = scores_where(rows, side="base", steps=at)
        return against_controls(
            {
                control: scores_where(rows, side="control", control=str(control))
                for control in c.controls
            },
            base,
            at,
            {name: c.rewards[name].weight for name in self.chosen_by},
            scores_where(rows, side="tuned", steps=at) if tuned else None,
            scores_where(rows, side="tuned control") if tuned else None,
        )

    def write_results(self) -> Path:
        """Writes results.json and pictures.jsonl; returns the path of the former."""
        c = self.config
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
        files = EvaluationDirectory(self.directory)
        with self._writing():
            save_rows(files.pictures, self.rows())
            write_whole(files.results, as_json(report, 1).encode())
        return files.results

    def _finished(self, chunk: Chunk) -> list[Row] | None:
        """The rows of a chunk; None if it is not finished, or one of its pictures is gone."""
        path = self._scores(chunk)
        if not path.is_file():
            return None
        try:
            rows = read_as(list[JudgedSteps], path)
        except UserError:  # damaged: the chunk is repeated
            return None
        pictures = [chunk.picture(index) for index in range(chunk.start, chunk.stop)]
        files = [file for row in rows for file in (row.picture, row.clip) if file is not None]
        whole = [row.picture for row in rows] == pictures and all(
            (self.directory / file).is_file() for file in files
        )
        return [row.model_dump(exclude_unset=True) for row in rows] if whole else None

    def _store(self, chunk: Chunk, evaluation: Evaluation, policy: Policy) -> None:
        """Writes pictures, clips and, last, their scores, which marks the chunk as finished."""
        moving = evaluation.images.ndim == 5
        rows = [
            {
                "picture": (picture := chunk.picture(row["index"])),
                **({"clip": str(clip_of(Path(picture)))} if moving else {}),
                **row,
                "seed": self.config.seed,
                "side": chunk.side,
                "steps": chunk.steps,
                **({"control": str(chunk.control)} if chunk.control != NO_CONTROL else {}),
            }
            for row in score_rows(
                evaluation.prompts, evaluation.scores, evaluation.right, chunk.start
            )
        ]
        with self._writing():
            indices = range(chunk.start, chunk.stop)
            seconds = seconds_of(policy, evaluation.images.shape[1])
            save_pictures(self.directory / chunk.folder, evaluation.images, indices, seconds)
            scores = self._scores(chunk)
            scores.parent.mkdir(exist_ok=True)
            write_whole(scores, as_json(rows).encode())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns disk errors into `UserError`."""
        try:
            yield
        except OSError as error:
            again = "finished chunks are kept, and the same command goes on after them"
            raise UserError(
                f"{self.directory}: cannot be written ({error.strerror}); {again}"
            ) from error

    def _scores(self, chunk: Chunk) -> Path:
        return EvaluationDirectory(self.directory).chunks / f"{chunk.name}.json"


def scores_where(rows: Sequence[Row], **of: Any) -> dict[str, Tensor]:
    """Scores [N] by reward of the rows that have these values, in float64, and the verdicts where
    rewards define right pictures."""
    chosen = [row for row in rows if all(row.get(key) == value for key, value in of.items())]
    right = right_of(chosen)
    found = scores_of(chosen) | ({} if right is None else {RIGHT: right})
    return {name: values.double() for name, values in found.items()}
