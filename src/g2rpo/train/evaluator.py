"""Held-out evaluation of a run: pictures, scores and their change from the base model's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo.config.schema import Config
from g2rpo.config.work import work_in_pictures
from g2rpo.core.data import Row
from g2rpo.core.noise import seed_for
from g2rpo.core.statistics import Comparison
from g2rpo.core.types import Reward, as_reward
from g2rpo.models.sharding import Replicated
from g2rpo.rollout.memory import BatchSizes, OutOfMemory
from g2rpo.train.evaluation.heldout import (
    Evaluation,
    compare_evaluations,
    compare_right,
    evaluation_of_all,
    least_scores,
    load_evaluation,
    right_in_words,
    save_evaluation,
)
from g2rpo.train.evaluation.sampler import Sampler
from g2rpo.train.learner import Learner
from g2rpo.train.monitor.alarms import DIVERSITIES, judged_gain
from g2rpo.train.monitor.curves import curves, save_figure
from g2rpo.train.monitor.image_statistics import image_statistics, statistics_row
from g2rpo.train.monitor.image_statistics import spread as spread_of
from g2rpo.train.monitor.pictures import PictureRow, reduced, save_grid, seconds_of
from g2rpo.train.monitor.scores import (
    SHOWN,
    chosen,
    save_inputs,
    save_pictures,
    save_rows,
    score_rows,
)
from g2rpo.train.run.folder import Run

SPREAD_PROMPTS, SPREAD_NOISES, SPREAD_RIGHT, SPREAD_SHARE = 8, 4, 2, 0.1
"""Held-out prompts and initial noises of each for the spread within a prompt; the fewest prompts
for that of right pictures; the largest share of the run's network evaluations."""


@dataclass(kw_only=True)
class Evaluator:
    """Evaluates the (averaged) weights on `heldout` prompts by `rewards`, which are trained on, and
    `judges`, which are not.

    `SHOWN` of the pictures are kept.
    """

    sampler: Sampler
    learner: Learner
    rewards: Mapping[str, Reward]
    judges: Mapping[str, Reward]
    heldout: Sequence[str]
    sizes: BatchSizes
    shards: Replicated
    run: Run
    spread_on: int = 0
    """The number of held-out prompts for the spread within a prompt."""
    unlogged: Collection[str] = ()
    """Rewards whose scale changes during the run, so that their means are no curve."""
    baseline: Evaluation | None = None
    """The base model's evaluation, once there is one."""
    _base_look: dict[str, Tensor] = field(default_factory=dict)

    @property
    def judged_by(self) -> Mapping[str, Reward]:
        return {**self.rewards, **self.judges}

    def sampler_now(self, **changes: Any) -> Sampler:
        """The sampler with the batch sizes of this moment, which shrink when memory runs out, and
        other `changes`."""
        return replace(
            self.sampler,
            batch_size=self.sizes.rollout,
            decode_batch_size=self.sizes.decode,
            **changes,
        )

    def own(self) -> Sequence[str]:
        """The held-out prompts that this rank evaluates: all of them if there are fewer prompts
        than ranks."""
        return self.shards.world.shard_or_all(self.heldout)

    def evaluations(self) -> int:
        """This rank's network evaluations to evaluate the held-out prompts."""
        return len(self.own()) * self.sampler.num_steps

    def evaluate(
        self,
        iteration: int,
        on_rows: Callable[[int], None],
        prompts: Sequence[str] | None = None,
        seed: int | None = None,
        rewards: Mapping[str, Reward] | None = None,
    ) -> Evaluation:
        """Pictures of the held-out prompts and all their scores, or of other `prompts`.
        `on_rows` is called after every call of the network, and with a number below 0 for calls
        that memory ran out after and that are repeated."""
        world, prompts = self.shards.world, self.heldout if prompts is None else prompts
        part = world.shard_or_all(prompts)

        def evaluated() -> Evaluation:
            done = 0

            def count(rows: int) -> None:
                nonlocal done
                done += rows
                on_rows(rows)

            sampler = self.sampler_now(
                seed=self.sampler.seed if seed is None else seed, on_rows=count
            )
            judged_by = self.judged_by if rewards is None else rewards
            first = world.first(len(prompts)) if len(part) < len(prompts) else 0
            try:
                return sampler.evaluate(part, judged_by, first=first, kept=reduced)
            except OutOfMemory:
                on_rows(-done)
                raise

        with self.learner.averaged(), self.run.naming(iteration), self.shards.sampling():
            evaluation = self.sizes.fit(evaluated)
        return evaluation_of_all(world, evaluation, prompts)

    def spread(self, iteration: int, on_rows: Callable[[int], None]) -> Row:
        """How much pictures of one prompt differ (`image_statistics.spread`), for the log of every
        rank: `diversity`, and `diversity_right` of right ones if `SPREAD_RIGHT` prompts have two;
        empty if it is not sampled."""
        if not self.spread_on:
            return {}
        repeated = [
            prompt for prompt in self.heldout[: self.spread_on] for _ in range(SPREAD_NOISES)
        ]
        verdict = least_scores(self.judged_by)
        rewards = {name: self.judged_by[name] for name in verdict} or {"none": as_reward(_unscored)}
        seed = seed_for(self.sampler.seed, "spread")
        found = self.evaluate(iteration, on_rows, repeated, seed=seed, rewards=rewards)
        row, world = {}, self.shards.world
        if world.is_main:
            images = found.images.unflatten(0, (-1, SPREAD_NOISES))
            row["diversity"] = spread_of(images)
            right = (
                torch.zeros(images.shape[:2])
                if found.right is None
                else found.right.view(-1, SPREAD_NOISES)
            )
            if (right.nansum(1) > 1).sum() >= SPREAD_RIGHT:
                row["diversity_right"] = spread_of(images, right == 1)
        return dict(json.loads(world.broadcast_text(json.dumps(row))))

    def row(self, iteration: int, evaluation: Evaluation, spread: Row | None = None) -> Row:
        """Stores an evaluation (at iteration 0 the base model's) and returns its row for the log,
        with that of `spread`."""
        if iteration == 0:
            self.baseline = evaluation
        if self.run.writes:
            if iteration == 0:
                with self.run.written(self.run.baseline) as path:
                    save_evaluation(path, evaluation)
            self.keep_scores(iteration, evaluation)
            self._save_pictures(
                self.run.grid(iteration), [(iteration, evaluation)], f"After iteration {iteration}"
            )
        row: Row = {"kind": "eval", "iteration": iteration}
        logged = [name for name in evaluation.scores if name not in self.unlogged]
        means = evaluation.means()
        row |= {f"reward/{name}": means[name] for name in logged}
        base = self.base()
        if base is None:
            return row
        every = compare_evaluations(base, evaluation)
        changes = {name: every[name] for name in logged}
        row |= {f"stderr/{name}": change.error for name, change in changes.items()}
        few = {name: each.count for name, each in changes.items() if each.count < len(self.heldout)}
        row |= {f"scored/{name}": count for name, count in few.items()}
        if (right := compare_right(base, evaluation)) is not None:
            row |= {"right": right.tuned, "right_stderr": right.error}
        row |= spread or {}
        row["judged_gain"] = judged_gain(
            base.scores, evaluation.scores, list(self.judges or self.rewards)
        )
        return row | self._picture_statistics(base, evaluation)

    def keep_scores(self, iteration: int, evaluation: Evaluation) -> None:
        """Stores the scores of an evaluation after an iteration, in the place of earlier ones."""
        if not self.run.writes:
            return
        path = self.run.scores(iteration)
        with self.run.writing(path):
            save_rows(path, score_rows(evaluation.prompts, evaluation.scores, evaluation.right))

    def base(self) -> Evaluation | None:
        """The base model's evaluation, of this process or read from the run directory, with pictures
        on rank 0 alone; None if there is none."""
        if self.baseline is None and self.run.folder is not None:
            stored = load_evaluation(self.run.baseline, self.heldout, list(self.judged_by))
            own = stored.images if self.shards.world.is_main else stored.images[:0].clone()
            self.baseline = replace(stored, images=own)
        return self.baseline

    def finish(
        self,
        tuned: Evaluation,
        iteration: int,
    ) -> dict[str, Comparison]:
        """Compares base and tuned; writes the table, the before/after grid and the curves."""
        base = self.base()
        if base is None:
            raise ValueError(
                "this trainer has neither evaluated the base model nor a run_dir that holds its evaluation"
            )
        table = compare_evaluations(base, tuned)
        if not self.run.writes:
            return table
        results: dict[str, Any] = {"iteration": iteration, "prompts": len(base.prompts)}
        results["rewards"] = {name: asdict(row) for name, row in table.items()}
        if (right := compare_right(base, tuned)) is not None:
            results["right"] = {**asdict(right), "least": least_scores(self.judged_by)}
            if (words := right_in_words(self.judged_by)) is not None:
                results["right"]["in_words"] = words
        for key in DIVERSITIES.values():
            spreads = {row["iteration"]: row[key] for row in self.run.read_log() if key in row}
            if spreads.keys() >= {0, iteration}:
                means = {"base": spreads[0], "tuned": spreads[iteration]}
                count = min(SPREAD_PROMPTS, len(self.heldout))  # also of an earlier start
                results[key] = {"prompts": count, "noises": SPREAD_NOISES, **means}
        sides = [(0, base), (iteration, tuned)]
        self._save_pictures(self.run.before_after, sides, "Both rows from the same noise", right)
        self.run.write_results(results)
        with self.run.written(self.run.curves) as path:
            save_figure(
                path,
                curves(self.run.read_log(), list(self.rewards), len(base.prompts)),
            )
        return table

    def _picture_statistics(self, base: Evaluation, evaluation: Evaluation) -> Row:
        """Image statistics beside the base's: computed on rank 0, which has all pictures, and sent
        to every rank."""
        row: Row = {}
        world = self.shards.world
        if world.is_main:
            self._base_look = self._base_look or image_statistics(base.images)
            row = statistics_row(self._base_look, image_statistics(evaluation.images))
        return dict(json.loads(world.broadcast_text(json.dumps(row))))

    def _save_pictures(
        self,
        grid: Path,
        sides: Sequence[tuple[int, Evaluation]],
        which: str,
        right: Comparison | None = None,
    ) -> None:
        """Keeps pictures of `chosen` held-out prompts, of evaluations by iteration, and draws a
        grid of them with the scores that are trained on: a row for the base, and one for the tuned
        model."""
        places, how = chosen([one.right for _, one in sides], SHOWN, len(self.heldout))
        prompts = [self.heldout[place] for place in places]
        seconds = seconds_of(self.sampler.policy, sides[0][1].images.shape[1])
        picture_rows = []
        for label, (iteration, one) in zip(
            ("base", "tuned") if len(sides) > 1 else ("",), sides, strict=True
        ):
            scores = {reward: one.scores[reward][places] for reward in self.rewards}
            picture_rows.append(
                PictureRow(
                    one.images[places],
                    label,
                    scores,
                    None if one.right is None else one.right[places],
                )
            )
            folder = self.run.pictures(iteration)
            with self.run.writing(folder):
                save_pictures(folder, one.images[places], places, seconds)
                save_inputs(folder, prompts, places)
        note = f"{how}.\n{which}."
        if least := least_scores(self.judged_by):
            note += f" Right: {' and '.join(f'{reward} at least {value:g}' for reward, value in least.items())}."
        if right is not None:
            shares = f"the base draws {100 * right.base:.0f} % right and the tuned model {100 * right.tuned:.0f} %"
            note += f" Of all {len(self.heldout)}, {shares}."
        with self.run.writing(grid):
            save_grid(grid, picture_rows, prompts, note, seconds)


def _unscored(images: Tensor, prompts: Sequence[str]) -> Tensor:
    return torch.full((len(prompts),), torch.nan)


def spread_prompts(config: Config, steps: int, heldout: int) -> int:
    """The number of `heldout` prompts for the spread within a prompt; 0 where that would take more
    than `SPREAD_SHARE` of the run's network evaluations."""
    looks = 1 + math.ceil(config.trainer.iterations / config.evaluation.every)
    prompts = min(SPREAD_PROMPTS, heldout)
    takes = prompts * SPREAD_NOISES * steps * looks
    return prompts if takes <= SPREAD_SHARE * work_in_pictures(config) else 0
