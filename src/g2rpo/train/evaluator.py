"""Held-out evaluation of a run: pictures, scores and their change from the base model's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo.config.schema import Config
from g2rpo.config.work import work_in_pictures
from g2rpo.core.data import Row
from g2rpo.core.noise import seed_for
from g2rpo.core.rewards import Reward, as_reward
from g2rpo.core.statistics import Comparison, percent
from g2rpo.models.sharding import Replicated
from g2rpo.rollout.memory import BatchSizes, OutOfMemory
from g2rpo.train.evaluation.heldout import (
    SHOWN,
    Evaluation,
    chosen,
    compare_evaluations,
    compare_right,
    evaluation_of_all,
    least_scores,
    load_evaluation,
    right_in_words,
    save_evaluation,
    save_inputs,
    save_pictures,
    save_rows,
    score_rows,
)
from g2rpo.train.evaluation.sampler import Sampler
from g2rpo.train.learner import Learner
from g2rpo.train.monitor.alarms import DIVERSITIES, judged_gain
from g2rpo.train.monitor.curves import curves, save_figure
from g2rpo.train.monitor.image_statistics import image_statistics, statistics_row
from g2rpo.train.monitor.image_statistics import spread as spread_of
from g2rpo.train.monitor.pictures import PictureRow, reduced, save_grid, seconds_of
from g2rpo.train.run.folder import Run

SPREAD_PROMPTS, SPREAD_NOISES, SPREAD_RIGHT, SPREAD_SHARE = 8, 4, 2, 0.1
"""Held-out prompts and initial noises of each for the spread within a prompt; the fewest prompts
for that of right pictures; the largest share of the run's network evaluations."""


@dataclass(kw_only=True)
class Evaluator:
    """What is kept of prompts that are drawn from fixed noise and scored (`Sampler.best`): of a
    run's held-out ones (`RunEvaluator`), or of those of `g2rpo evaluate`
    (`lab.judging.Judging`)."""

    prompts: Sequence[str]

    def writing(self, path: Path) -> AbstractContextManager[None]:
        """While entered, disk errors while `path` is written become one message."""
        raise NotImplementedError

    def keep(self, folder: Path, images: Tensor, places: Sequence[int], seconds: float) -> None:
        """Writes pictures, or clips of so many seconds, of the prompts at these places, and the
        prompts' input pictures."""
        with self.writing(folder):
            save_pictures(folder, images, places, seconds)
            save_inputs(folder, [self.prompts[place] for place in places], places)

    def keep_scores(self, path: Path, rows: Iterable[Row]) -> None:
        """Writes a table of scores, in the place of an older one."""
        with self.writing(path):
            save_rows(path, rows)

    def draw_grid(
        self,
        path: Path,
        sides: Mapping[str, Evaluation],
        names: Iterable[str],
        note: str,
        seconds: float,
    ) -> None:
        """Draws the pictures of evaluations of the same prompts by label, a row each, with their
        verdicts and the scores of `names`."""
        rows = [
            PictureRow(one.images, label, {name: one.scores[name] for name in names}, one.right)
            for label, one in sides.items()
        ]
        prompts = next(iter(sides.values())).prompts
        with self.writing(path):
            save_grid(path, rows, prompts, note, seconds)


@dataclass(kw_only=True)
class RunEvaluator(Evaluator):
    """Evaluates the (averaged) weights of a run by `rewards`, which are trained on, and `judges`,
    which are not. `SHOWN` of the pictures are kept."""

    sampler: Sampler
    learner: Learner
    rewards: Mapping[str, Reward]
    judges: Mapping[str, Reward]
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

    def writing(self, path: Path) -> AbstractContextManager[None]:
        return self.run.writing(path)

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
        return self.shards.world.shard_or_all(self.prompts)

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
        world, prompts = self.shards.world, self.prompts if prompts is None else prompts
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
            prompt for prompt in self.prompts[: self.spread_on] for _ in range(SPREAD_NOISES)
        ]
        verdict = least_scores(self.judged_by)
        rewards = {name: self.judged_by[name] for name in verdict} or {"none": as_reward(_unscored)}
        seed = seed_for(self.sampler.seed, "spread")
        found = self.evaluate(iteration, on_rows, repeated, seed=seed, rewards=rewards)

        def differ() -> Row:
            images = found.images.unflatten(0, (-1, SPREAD_NOISES))
            row = {"diversity": spread_of(images)}
            if found.right is not None:
                right = found.right.view(-1, SPREAD_NOISES)
                if (right.nansum(1) > 1).sum() >= SPREAD_RIGHT:
                    row["diversity_right"] = spread_of(images, right == 1)
            return row

        return self._on_main(differ)

    def _on_main(self, made: Callable[[], Row]) -> Row:
        """What rank 0, which has all pictures, makes of them, on every rank."""
        world = self.shards.world
        return dict(json.loads(world.broadcast_text(json.dumps(made() if world.is_main else {}))))

    def row(self, iteration: int, evaluation: Evaluation, spread: Row | None = None) -> Row:
        """Stores an evaluation (at iteration 0 the base model's) and returns its row for the log,
        with that of `spread`."""
        if iteration == 0:
            self.baseline = evaluation
        if self.run.writes:
            if iteration == 0:
                with self.run.written(self.run.baseline) as path:
                    save_evaluation(path, evaluation)
            self.rescore(iteration, evaluation)
            grid, which = self.run.grid(iteration), f"After iteration {iteration}"
            self._save_pictures(grid, [(iteration, evaluation)], which)
        row: Row = {"kind": "eval", "iteration": iteration}
        logged = [name for name in evaluation.scores if name not in self.unlogged]
        means = evaluation.means()
        row |= {f"reward/{name}": means[name] for name in logged}
        base = self.base()
        if base is None:
            return row
        changes = compare_evaluations(base, evaluation)
        row |= {f"stderr/{name}": changes[name].error for name in logged}
        counts = {name: changes[name].count for name in logged}
        row |= {f"scored/{name}": n for name, n in counts.items() if n < len(self.prompts)}
        if (right := compare_right(base, evaluation)) is not None:
            row |= {"right": right.tuned, "right_stderr": right.error}
        row |= spread or {}
        judges = list(self.judges or self.rewards)
        row["judged_gain"] = judged_gain(base.scores, evaluation.scores, judges)
        return row | self._on_main(lambda: self._picture_statistics(base, evaluation))

    def rescore(self, iteration: int, evaluation: Evaluation) -> None:
        """Stores the scores of an evaluation after an iteration."""
        if self.run.writes:
            rows = score_rows(evaluation.prompts, evaluation.scores, evaluation.right)
            self.keep_scores(self.run.scores(iteration), rows)

    def base(self) -> Evaluation | None:
        """The base model's evaluation, of this process or read from the run directory, with pictures
        on rank 0 alone; None if there is none."""
        if self.baseline is None and self.run.folder is not None:
            stored = load_evaluation(self.run.baseline, self.prompts, list(self.judged_by))
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
        results["rewards"] = {name: row.stored for name, row in table.items()}
        more = ""
        if (right := compare_right(base, tuned)) is not None:
            shares = f"{percent(right.base)} right and the tuned model {percent(right.tuned)}"
            more = f" Of all {len(base.prompts)}, the base draws {shares}."
            results["right"] = {**right.stored, "least": least_scores(self.judged_by)}
            if (words := right_in_words(self.judged_by)) is not None:
                results["right"]["in_words"] = words
        for key in DIVERSITIES.values():
            spreads = {row["iteration"]: row[key] for row in self.run.read_log() if key in row}
            if spreads.keys() >= {0, iteration}:
                means = {"base": spreads[0], "tuned": spreads[iteration]}
                count = min(SPREAD_PROMPTS, len(self.prompts))  # also of an earlier start
                results[key] = {"prompts": count, "noises": SPREAD_NOISES, **means}
        sides = [(0, base), (iteration, tuned)]
        self._save_pictures(self.run.before_after, sides, "Both rows from the same noise", more)
        self.run.write_results(results)
        with self.run.written(self.run.curves) as path:
            save_figure(
                path,
                curves(self.run.read_log(), list(self.rewards), len(base.prompts)),
            )
        return table

    def _picture_statistics(self, base: Evaluation, evaluation: Evaluation) -> Row:
        self._base_look = self._base_look or image_statistics(base.images)
        return statistics_row(self._base_look, image_statistics(evaluation.images))

    def _save_pictures(
        self, grid: Path, sides: Sequence[tuple[int, Evaluation]], which: str, more: str = ""
    ) -> None:
        """Keeps pictures of `chosen` held-out prompts, of evaluations by iteration, and draws a
        grid of them with the scores that are trained on: of the base, and of the tuned model."""
        places, how = chosen([one.right for _, one in sides], SHOWN, len(self.prompts))
        seconds = seconds_of(self.sampler.policy, sides[0][1].images.shape[1])
        shown = [one.at(places) for _, one in sides]
        for (iteration, _), one in zip(sides, shown, strict=True):
            self.keep(self.run.pictures(iteration), one.images, places, seconds)
        note = f"{how}.\n{which}."
        if least := least_scores(self.judged_by):
            said = [f"{reward} at least {value:g}" for reward, value in least.items()]
            note += f" Right: {' and '.join(said)}."
        rows = dict(zip(("base", "tuned") if len(shown) > 1 else ("",), shown, strict=True))
        self.draw_grid(grid, rows, self.rewards, note + more, seconds)


def _unscored(images: Tensor, prompts: Sequence[str]) -> Tensor:
    return torch.full((len(prompts),), torch.nan)


def spread_prompts(config: Config, steps: int, heldout: int) -> int:
    """The number of `heldout` prompts for the spread within a prompt; 0 where that would take more
    than `SPREAD_SHARE` of the run's network evaluations."""
    looks = 1 + math.ceil(config.trainer.iterations / config.evaluation.every)
    prompts = min(SPREAD_PROMPTS, heldout)
    takes = prompts * SPREAD_NOISES * steps * looks
    return prompts if takes <= SPREAD_SHARE * work_in_pictures(config) else 0
