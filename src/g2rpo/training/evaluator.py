"""Held-out evaluation of a run: pictures, scores and their change from the base model's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from g2rpo.evaluation.heldout import (
    Comparison,
    Evaluation,
    compare,
    compare_right,
    evaluate,
    evaluation_of_all,
    iteration_name,
    least_scores,
    load_evaluation,
    save_evaluation,
    save_scores,
    scores_after,
)
from g2rpo.monitor.alarms import judged_gain
from g2rpo.monitor.clips import seconds_of
from g2rpo.monitor.curves import save_curves
from g2rpo.monitor.image_statistics import image_statistics, statistics_row
from g2rpo.monitor.metrics import Row, read_metrics
from g2rpo.monitor.pictures import Strip, save_grid, save_moving_grid
from g2rpo.runtime.memory import BatchSizes
from g2rpo.runtime.sharding import Replicated
from g2rpo.training.learner import Learner
from g2rpo.training.model_card import RESULTS
from g2rpo.training.run_files import RunFiles, clips_path, pictures_path
from g2rpo.types import Policy, Reward

BASELINE = "baseline.safetensors"  # the base model's evaluation: comparing with it needs no second copy of the weights


@dataclass(kw_only=True)
class Evaluator:
    """Evaluates the (averaged) weights on `heldout` prompts by `rewards`, which are trained on, and `judges`, which are not.

    Pictures are sampled on the grid `sigmas` from fixed noise of `seed`; the first `shown` are kept as a grid.
    """

    policy: Policy
    learner: Learner
    rewards: Mapping[str, Reward]
    judges: Mapping[str, Reward]
    heldout: Sequence[str]
    sigmas: Tensor
    seed: int
    shown: int
    sizes: BatchSizes
    shards: Replicated
    files: RunFiles
    baseline: Evaluation | None = None
    """The base model's evaluation, once there is one."""
    _base_look: dict[str, Tensor] = field(default_factory=dict)

    def own(self) -> Sequence[str]:
        """The held-out prompts that this rank evaluates: all of them if there are fewer prompts than ranks."""
        return self.shards.world.shard_or_all(self.heldout)

    def evaluate(self, iteration: int, on_rows: Callable[[int], None]) -> Evaluation:
        """Held-out pictures and all their scores; `on_rows` is called after every call of the network."""
        own, world = self.own(), self.shards.world

        def evaluated() -> Evaluation:
            return evaluate(
                self.policy,
                own,
                {**self.rewards, **self.judges},
                self.sigmas,
                seed=self.seed,
                batch_size=self.sizes.rollout,
                decode_batch_size=self.sizes.decode,
                first=world.first(len(self.heldout)) if len(own) < len(self.heldout) else 0,
                on_rows=on_rows,
            )

        with self.learner.averaged(), self.files.naming(iteration), self.shards.sampling():
            evaluation = self.sizes.fit(evaluated)
        return evaluation_of_all(world, evaluation, self.heldout) if len(own) < len(self.heldout) else evaluation

    def row(self, iteration: int, evaluation: Evaluation) -> Row:
        """Stores an evaluation (at iteration 0 the base model's) and returns its row for the log."""
        if iteration == 0:
            self.baseline = evaluation
        if self.files.writes:
            if iteration == 0:
                with self.files.written(BASELINE) as path:
                    save_evaluation(path, evaluation)
            with self.files.written(scores_after(iteration)) as path:
                save_scores(path, evaluation)
            self._save_grid(iteration_name(iteration), {"": evaluation}, f"after iteration {iteration}")
        row: Row = {"kind": "eval", "iteration": iteration}
        row |= {f"reward/{name}": mean for name, mean in evaluation.means().items()}
        base = self.base()
        if base is None:
            return row
        row |= {f"stderr/{name}": change.error for name, change in compare(base, evaluation).items()}
        if (right := compare_right(base, evaluation)) is not None:
            row |= {"right": right.tuned, "right_stderr": right.error}
        row["judged_gain"] = judged_gain(base.scores, evaluation.scores, list(self.judges or self.rewards))
        return row | self._picture_statistics(base, evaluation)

    def base(self) -> Evaluation | None:
        """The base model's evaluation, of this process or read from the run directory; None if there is none."""
        if self.baseline is None and self.files.folder is not None:
            stored = load_evaluation(self.files.folder / BASELINE, self.heldout)
            self.baseline = stored if self.shards.world.is_main else replace(stored, images=stored.images[:0].clone())
        return self.baseline

    def finish(self, tuned: Evaluation, iteration: int, rolled_back_from: int | None) -> dict[str, Comparison]:
        """Compares base and tuned; writes the table, the before/after grid and the curves."""
        base = self.base()
        if base is None:
            raise ValueError("this trainer has neither evaluated the base model nor a run_dir that holds its evaluation")
        table = compare(base, tuned)
        if not self.files.writes:
            return table
        results: dict[str, Any] = {"iteration": iteration, "prompts": len(base.prompts)}
        results["rewards"] = {name: asdict(row) for name, row in table.items()}
        if (right := compare_right(base, tuned)) is not None:
            results["right"] = asdict(right)
        self._save_grid("before_after", {"base": base, "tuned": tuned}, "both rows from the same noise", right)
        if rolled_back_from is not None:
            results["rolled_back_from"] = rolled_back_from
        with self.files.written(RESULTS) as path:
            path.write_text(json.dumps(results, indent=1))
        with self.files.written("curves.png") as path:
            save_curves(path, read_metrics(self.files.directory), list(self.rewards))
        return table

    def _picture_statistics(self, base: Evaluation, evaluation: Evaluation) -> Row:
        """Image statistics beside the base's: computed on rank 0, which has all pictures, and sent to every rank."""
        row: Row = {}
        world = self.shards.world
        if world.is_main:
            self._base_look = self._base_look or image_statistics(base.images)
            row = statistics_row(self._base_look, image_statistics(evaluation.images))
        return dict(json.loads(world.broadcast_text(json.dumps(row))))

    def _save_grid(self, name: str, rows: Mapping[str, Evaluation], which: str, right: Comparison | None = None) -> None:
        """Pictures of the first held-out prompts with the scores that are trained on, a row for each labelled evaluation."""
        n = self.shown
        strips = [
            Strip(one.images[:n], label, {reward: one.scores[reward][:n] for reward in self.rewards}, one.right)
            for label, one in rows.items()
        ]
        prompts = list(self.heldout)[:n]
        note = f"The first {len(prompts)} of {len(self.heldout)} held-out prompts, in their order; {which}."
        if least := least_scores({**self.rewards, **self.judges}):
            note += f" Right: {' and '.join(f'{reward} at least {value:g}' for reward, value in least.items())}."
        if right is not None:
            shares = f"the base draws {100 * right.base:.0f} % right and the tuned model {100 * right.tuned:.0f} %"
            note += f" Of all {len(self.heldout)}, {shares}."
        if strips[0].images.ndim == 5:
            with self.files.written(clips_path(name)) as path:
                save_moving_grid(path, strips, prompts, note, seconds_of(self.policy, strips[0].images.shape[1]))
        with self.files.written(pictures_path(name)) as path:
            save_grid(path, strips, prompts, note)
