"""Held-out evaluation of a run: pictures, scores and their change from the base model's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from g2rpo.config.schema import Config
from g2rpo.core.data import Row
from g2rpo.core.seeding import seed_for
from g2rpo.core.statistics import Comparison
from g2rpo.core.types import Policy, Reward, as_reward
from g2rpo.evaluation.controls import (
    NO_CONTROL,
    SPREAD_NOISES,
    SPREAD_PROMPTS,
    SPREAD_RIGHT,
    SPREAD_SHARE,
    TUNED,
    Control,
    evaluations_of,
    prompts_within,
    run_controls,
)
from g2rpo.evaluation.heldout import (
    Evaluation,
    compare_evaluations,
    compare_right,
    evaluation_of_all,
    least_scores,
    load_evaluation,
    load_scores,
    right_in_words,
    save_evaluation,
)
from g2rpo.evaluation.sampler import Sampler, sampler_of
from g2rpo.evaluation.untrained import RIGHT, Controls, against_controls
from g2rpo.evaluation.work import work_in_pictures
from g2rpo.monitor.advice import DIVERSITIES
from g2rpo.monitor.alarms import judged_gain
from g2rpo.monitor.clips import reduced, seconds_of
from g2rpo.monitor.curves import curves, save_figure
from g2rpo.monitor.image_statistics import image_statistics, statistics_row
from g2rpo.monitor.image_statistics import spread as spread_of
from g2rpo.monitor.pictures import PictureRow, save_grid
from g2rpo.monitor.scores import SHOWN, chosen, save_inputs, save_pictures, save_rows, score_rows
from g2rpo.rollout.guidance import guidance_of, guided_by_hand
from g2rpo.run.run import Run
from g2rpo.runtime.memory import BatchSizes, OutOfMemory
from g2rpo.runtime.sharding import Replicated
from g2rpo.training.learner import Learner
from g2rpo.training.loop import Loop


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
    weights: Mapping[str, float]
    """Of `rewards`."""
    heldout: Sequence[str]
    sizes: BatchSizes
    shards: Replicated
    run: Run
    controls: Sequence[Control] = ()
    controls_on: int = 0
    """The number of held-out prompts for `controls`."""
    spread_on: int = 0
    """The number of held-out prompts for the spread within a prompt."""
    against: Controls | None = None
    """The controls against the tuned model, once they are compared."""
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

    def evaluations(self, prompts: Sequence[str], controls: Sequence[Control]) -> int:
        """This rank's network evaluations to evaluate `prompts` with each of `controls`."""
        steps = self.sampler.num_steps
        each = sum(control.evaluations(steps) for control in controls)
        return len(self.shards.world.shard_or_all(prompts)) * each

    def evaluate(
        self,
        iteration: int,
        on_rows: Callable[[int], None],
        prompts: Sequence[str] | None = None,
        control: Control = NO_CONTROL,
        seed: int | None = None,
        rewards: Mapping[str, Reward] | None = None,
        kept: Callable[[Tensor], Tensor] = reduced,
    ) -> Evaluation:
        """Pictures of the held-out prompts and all their scores, or of other `prompts` and with
        other sampler settings. `on_rows` is called after every call of the network, and with a
        number below 0 for calls that memory ran out after and that are repeated."""
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
                return sampler.evaluate(part, judged_by, first=first, control=control, kept=kept)
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

    def sample_controls(self, iteration: int, on_rows: Callable[[int], None]) -> None:
        """Stores the scores of all `controls`, unless they are stored or cost too much; to be
        called while the policy is the base model."""
        if not self.controls_on or self.stored_controls():
            return
        prompts = self.heldout[: self.controls_on]
        scores: dict[str, Tensor] = {}
        for control in self.controls:
            evaluation = self.evaluate(iteration, on_rows, prompts, control, kept=_first_value)
            scores |= {
                f"{control}/{name}": values for name, values in with_right(evaluation).items()
            }
        if self.run.writes:
            with self.run.written(self.run.control_scores) as path:
                save_file(scores, path)

    def sample_tuned_control(
        self, iteration: int, on_rows: Callable[[int], None]
    ) -> Evaluation | None:
        """The tuned model as `TUNED`, on the prompts of the stored controls; None without any."""
        prompts = self.heldout[: self.stored_controls()]
        if not prompts:
            return None
        return self.evaluate(iteration, on_rows, prompts, TUNED, kept=_first_value)

    def stored_controls(self) -> int:
        """On how many prompts scores of `controls` are stored, by rank 0's view of the disk. It
        may be another number than now, where an earlier start had another length."""
        run, count = self.run, 0
        if run.writes and self.controls and run.control_scores.is_file():
            count = len(next(iter(load_scores(run.control_scores).values())))
        return self.shards.world.total(count)[0]

    def _against(
        self, base: Evaluation, tuned: Evaluation, tuned_control: Evaluation | None, training: int
    ) -> Controls | None:
        """The stored controls against the tuned model, on the same prompts; None without any."""
        if tuned_control is None:
            return None
        count = len(tuned_control.prompts)
        sides = [with_right(side) for side in (base, tuned, tuned_control)]
        # of an earlier start without verdicts there are none to compare
        shared = [name for name in sides[0] if all(name in side for side in sides)]
        before, after, controlled = (
            {name: side[name][:count] for name in shared} for side in sides
        )
        names = [f"{control}/{name}" for control in self.controls for name in shared]
        stored = load_scores(self.run.control_scores, names)
        controls = {
            control: {name: stored[f"{control}/{name}"] for name in shared}
            for control in self.controls
        }
        return against_controls(
            controls,
            before,
            self.sampler.num_steps,
            self.weights,
            after,
            controlled,
            training,
        )

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
        tuned_control: Evaluation | None = None,
        training: int = 0,
    ) -> dict[str, Comparison]:
        """Compares base and tuned; writes the table, the before/after grid and the curves.
        `training` is the run's work."""
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
        if (against := self._against(base, tuned, tuned_control, training)) is not None:
            self.against, results["controls"] = against, against.model_dump(mode="json")
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


def with_right(evaluation: Evaluation) -> dict[str, Tensor]:
    """Scores, and verdicts where rewards define right pictures."""
    return evaluation.scores | ({} if evaluation.right is None else {RIGHT: evaluation.right})


def _first_value(images: Tensor) -> Tensor:
    """Of pictures that nobody looks at."""
    return images.flatten(1)[:, :1]


def _unscored(images: Tensor, prompts: Sequence[str]) -> Tensor:
    return torch.full((len(prompts),), torch.nan)


def evaluator_of(
    loop: Loop, judges: Mapping[str, Reward], heldout: Sequence[str], shards: Replicated, run: Run
) -> Evaluator:
    """The evaluator of a run, with its controls."""
    config, policy, sampler = loop.config, loop.policy, sampler_of(loop.config, loop.policy)
    return Evaluator(
        sampler=sampler,
        learner=loop.learner,
        rewards=loop.rewards,
        judges=judges,
        weights={name: entry.weight for name, entry in config.rewards.items()},
        heldout=heldout,
        sizes=loop.sizes,
        shards=shards,
        run=run,
        **free_knobs(config, policy, sampler.num_steps, len(heldout), run.folder is not None),
    )


def free_knobs(
    config: Config, policy: Policy, steps: int, heldout: int, writes: bool
) -> dict[str, Any]:
    """The controls of an evaluator, and the numbers of `heldout` prompts for them and for the
    spread within a prompt."""
    setting = config.evaluation.controls
    if setting is False:
        return {}
    controls = run_controls(steps, guidance_of(policy), guided_by_hand(policy))
    evaluations = work_in_pictures(config)
    cost = evaluations_of(controls, steps)
    looks = 1 + math.ceil(config.trainer.iterations / config.evaluation.every)
    spread_on = min(SPREAD_PROMPTS, heldout)
    affordable = (
        setting is True or spread_on * SPREAD_NOISES * steps * looks <= SPREAD_SHARE * evaluations
    )
    return {
        "controls": controls,
        "controls_on": prompts_within(setting, heldout, cost, evaluations) if writes else 0,
        "spread_on": spread_on if affordable else 0,
    }
