"""The trainer: prompts -> rollout -> rewards -> advantages -> loss -> update, one iteration after the other."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from g2rpo.config.schema import Config, grid_of
from g2rpo.core.capabilities import KeepsOldWeights, candidates_of, check_complete, differentiates_rewards, keeps_old, state_of
from g2rpo.core.contracts import advantages_of, choice_of
from g2rpo.core.errors import Preempted
from g2rpo.core.input_pictures import images_of
from g2rpo.core.seeding import generator_for
from g2rpo.core.types import Algorithm, Cond, Example, Plan, Policy, Reward, as_rewards
from g2rpo.evaluation.controls import evaluations_of
from g2rpo.evaluation.heldout import Comparison, Evaluation
from g2rpo.evaluation.sampler import sampler_of
from g2rpo.evaluation.work import plans_in, work_in_pictures
from g2rpo.monitor.alarms import alarms_of
from g2rpo.monitor.metrics import Row, gaps, read_metrics
from g2rpo.monitor.scores import read_scores
from g2rpo.monitor.trackers import TensorBoard, Tracker
from g2rpo.prompts.order import PromptOrder
from g2rpo.rollout.guidance import in_training, sized
from g2rpo.rollout.scoring import decode, weighted_scores
from g2rpo.runtime.distributed import World
from g2rpo.runtime.folders import writing
from g2rpo.runtime.memory import batch_sizes
from g2rpo.runtime.sharding import WHOLE, Replicated
from g2rpo.training.collector import Collected, Collector
from g2rpo.training.early_stop import EarlyStop
from g2rpo.training.evaluator import Evaluator, evaluation_due, free_knobs
from g2rpo.training.first_group import save_first_group
from g2rpo.training.header import header_of
from g2rpo.training.learner import Learner
from g2rpo.training.model_card import write_card
from g2rpo.training.pace import MEASURED, fitted, with_length
from g2rpo.training.persistence import Persistence
from g2rpo.training.ranks import divided
from g2rpo.training.reward_states import learn, observe, stateful
from g2rpo.training.rows import of_cost, of_groups
from g2rpo.training.run_files import RunFiles
from g2rpo.training.stopwatch import Stopwatch
from g2rpo.training.updater import Updater, UpdateStats, check_differentiable, check_groups

LOOKED_AT = 4
"""Members of a group from whose pictures rewards learn."""


@dataclass(repr=False, kw_only=True)
class Trainer:
    """Trains `policy` on `rewards` by `config`, and writes `run_dir`.

    `judges` are rewards that score held-out pictures and are not trained on. `run_dir=None` writes nothing. `notify` is called
    when batch sizes are found, or halved because memory ran out, and when `trackers` fail. `shards` holds the ranks and the
    placement of the weights: every rank has a trainer, with its share of the prompts; rank 0 writes. After `stopping` is set on
    any rank, `train` saves after the current iteration, or during an evaluation, and raises `Preempted`. With `ends_at`, a time
    of `time.monotonic`, the number of iterations follows from what they take (`training.pace`).
    """

    config: Config
    policy: Policy
    rewards: Mapping[str, Reward]
    prompts: Sequence[str]
    heldout: Sequence[str]
    judges: Mapping[str, Reward] = field(default_factory=dict)
    run_dir: Path | None = None
    notify: Callable[[str], None] = print
    shards: Replicated = WHOLE
    on_evaluations: Callable[[int], None] = lambda rows: None
    trackers: Sequence[Tracker] = field(default_factory=lambda: [TensorBoard()])
    ends_at: float | None = None

    def __post_init__(self) -> None:
        c = self.config
        self.rewards, self.judges = as_rewards(self.rewards), as_rewards(self.judges)
        self.iteration = 0
        self.saved_at = time.monotonic()
        self.stopping = False
        self.fitted = False  # whether the number of iterations was fitted to `ends_at`
        self.rolled_back_from: int | None = None
        self.final: Evaluation | None = None  # of the weights as they are
        self.files = RunFiles(self.run_dir, self.world, self.notify)
        self.division = divided(c, self.world)
        self.own_prompts = c.trainer.prompts_per_iteration // self.division.prompts.size
        self.algorithm = c.algorithm
        check_complete(self.algorithm)
        check_differentiable(self.algorithm, self.rewards)
        check_groups(self.algorithm, {**self.rewards, **self.judges}, c.policy.tuning, c.trainer.sharding)
        self.memory = state_of(self.algorithm)
        self.sigmas = grid_of(c.sampling.shift, self.policy, c.sampling.num_steps)
        entries = self.policy.noise([generator_for("alarms")]).numel()
        self.alarms = alarms_of(c, self.algorithm, self.sigmas, entries)
        self.alarms.moving = frozenset(name for name, reward in self.rewards.items() if reward.learns_every)
        self.early_stop = EarlyStop(config=c, rewards=list(self.rewards), alarms=self.alarms, files=self.files)
        stateful({**self.rewards, **self.judges})  # refuses a state that no checkpoint can hold
        self.weights = torch.tensor([c.rewards[name].weight for name in self.rewards])
        self.order = PromptOrder(self.prompts, c.trainer.seed)
        self.learner = Learner(self.policy.trainable_parameters(), c.optim, self.shards, keeps_old(self.algorithm))
        asked = c.sampling.batch_size, c.sampling.decode_batch_size, c.trainer.micro_batch_size
        self.sizes = batch_sizes(*asked, self.policy.device, self.notify)
        self.sizes.in_step = self.shards.in_step
        self.collector = Collector(
            policy=self.policy,
            rewards=self.rewards,
            config=c.sampling,
            precision=c.precision,
            sigmas=self.sigmas,
            sizes=self.sizes,
            shards=self.shards,
            seed=c.trainer.seed,
            first=self.division.prompts.first(c.trainer.prompts_per_iteration),
            among=self.division.plans,
            on_evaluations=lambda rows: self.on_evaluations(rows),
        )
        self.updater = Updater(
            policy=self.policy,
            algorithm=self.algorithm,
            optimizer=self.learner.optimizer,
            sigmas=self.sigmas,
            sizes=self.sizes,
            max_grad_norm=c.optim.max_grad_norm,
            shards=self.shards,
            step_dtype=c.precision.step,
            old=self.learner.as_old,
        )
        sampler = sampler_of(c, self.policy)
        self.evaluator = Evaluator(
            sampler=sampler,
            learner=self.learner,
            rewards=self.rewards,
            judges=self.judges,
            weights={name: entry.weight for name, entry in c.rewards.items()},
            heldout=self.heldout,
            sizes=self.sizes,
            shards=self.shards,
            files=self.files,
            **free_knobs(c, self.policy, sampler.num_steps, len(self.heldout), self.run_dir is not None),
        )
        self.persistence = Persistence(
            policy=self.policy,
            learner=self.learner,
            memory=self.memory,
            rewards={**self.rewards, **self.judges},
            shards=self.shards,
            files=self.files,
            keep=c.trainer.keep_checkpoints,
            header=partial(header_of, c),
        )

    @property
    def _keeps_base(self) -> bool:
        """Whether the base model can still be sampled after training; a divided one is for the loss alone."""
        return self.config.policy.tuning == "lora" or (self.algorithm.uses_base and not self.shards.divided)

    def __repr__(self) -> str:
        of = f"iteration {self.iteration} of {self.config.trainer.iterations}"
        return f"Trainer({self.config.recipe or 'no recipe'!r}, {of}, run_dir={self.run_dir})"

    @property
    def world(self) -> World:
        """The ranks that train together."""
        return self.shards.world

    def train(self) -> Iterator[Row]:
        """Runs the remaining iterations; yields a row per iteration and per evaluation as they are logged."""
        self.saved_at = time.monotonic()
        with self.files.log(self.iteration, self.config.model_dump(mode="json"), self.trackers) as logged:
            self._fit_to_time()  # without time left the run has ended, and is evaluated
            if self._evaluation_due():
                yield logged(self._evaluate_unless_stopped())
                self._stop_if_asked()
                self.early_stop.end_if_asked(self.iteration, self.roll_back)
            self._fit_to_time()
            while self.iteration < self.config.trainer.iterations:
                yield (row := logged(self.iterate()))
                self.early_stop.check_limits(row, self.updater.skipped_in_a_row, self.save)
                self._stop_if_asked()  # an evaluation that the interrupted run did not finish
                self._fit_to_time()
                if self._evaluation_due():
                    yield logged(self._evaluate_unless_stopped())
                    self._stop_if_asked()
                if self._checkpoint_due():
                    self.save()
                self.early_stop.end_if_asked(self.iteration, self.roll_back)

    def _fit_to_time(self) -> None:
        """With `ends_at`, fits the number of iterations to the time that is left, by rank 0's clock."""
        if self.ends_at is None or not self.iteration:
            return
        looks = [row for row in self.alarms.rows if row["kind"] == "eval"]
        train = [row["seconds"] for row in self.alarms.rows if row["kind"] == "train"]
        if not looks or not train:  # of a lost log
            return
        steps, e = self.evaluator.sampler.num_steps, self.evaluator
        knobs = evaluations_of(e.controls, steps) * e.controls_on / (steps * len(self.heldout))
        look = looks[-1]["seconds"] / (1 if self._keeps_base or looks[-1]["iteration"] else 1 + knobs)
        finishing = look * (0.25 + knobs * self._keeps_base)  # files, pictures, and free knobs that are still to be sampled
        left = self.ends_at - time.monotonic() - finishing
        config = fitted(self.config, self.iteration, train, look, left, first=not self.fitted)
        if self.iteration < MEASURED and left > look:  # the first ones are slow: too early for more than to end
            config = self.config
        asked = (config.trainer.iterations, config.evaluation.every)
        iterations, every = json.loads(self.world.broadcast_text(json.dumps(asked)))
        if self.iteration < MEASURED and iterations > self.iteration:
            return
        self.fitted = True
        if (iterations, every) == (self.config.trainer.iterations, self.config.evaluation.every):
            return
        self.config = self.early_stop.config = with_length(self.config, iterations, every)
        if self.files.writes:
            with self.files.written(self.files.run.config) as path:
                path.write_text(self.config.to_yaml(), encoding="utf-8")

    def iterate(self) -> Row:
        """Runs one iteration; returns its metrics."""
        self.final, watch = None, Stopwatch()
        prompts = self.prompts_of(self.iteration)
        cond = self.policy.encode(prompts)
        watch.lap("encode")
        self._find_sizes(cond)
        with self._sampling():
            prompts, cond, choice = self._choose(prompts, cond, watch)
            self.updater.algorithm = algorithm = self.algorithm_now()
            collected = self.collector.collect(algorithm, self.iteration, cond, prompts, watch)
            rewards = self.world.gather(collected.rewards)  # an algorithm may look at the whole batch
            watch.lap("waiting")
            observe(self.rewards, self.iteration, rewards)
            learnt = learn(self.rewards, self.iteration, partial(self._looked_at, collected, prompts), self.world)
        advantages = advantages_of(algorithm, rewards, self.weights)
        own = self.world.shard(advantages)
        stats, rate = self._update(self._examples(algorithm, collected, own), cond, prompts)
        watch.lap("update")

        groups = self.collector.plans(algorithm, self.iteration) * self.config.trainer.prompts_per_iteration
        if self.memory is not None:
            learnt |= self.memory.observe(self.iteration, [plan.branch for plan in groups], rewards, self.weights)
        if self.iteration == 0 and self.files.writes and self._compares:
            save_first_group(self.files, self.policy, self.sizes, list(self.rewards), prompts, collected, own)
        self.iteration += 1
        row: Row = {
            "kind": "train",
            "iteration": self.iteration,
            **of_groups(groups, list(self.rewards), rewards, advantages, algorithm.advantage_clip),
            **learnt,
            **stats.summary(algorithm),
            "learning_rate": rate,
            **of_cost([*choice, collected], self.world, self.sizes, watch, self.policy.device),
        }
        self.early_stop.see(row)
        return row

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """While entered, the policy has the weights, guidance and assistant of rollouts, and rewards name their files by the
        iteration."""
        a = self.algorithm
        old = isinstance(a, KeepsOldWeights) and a.uses_old and a.samples_old(self.learner.steps)
        weights = self.learner.as_old() if old else nullcontext()
        with self.files.naming(self.iteration), weights, in_training(self.policy, self.config.sampling.guidance_scale):
            yield

    def _examples(self, algorithm: Algorithm, collected: Collected, advantages: Tensor) -> list[Example]:
        """What this rank's groups, with their advantages [N, G], give to learn from."""
        examples: list[Example] = []
        for rollout, values in zip(collected.rollouts, advantages, strict=True):
            place = self.collector.first + rollout.prompt
            draw = partial(self.collector.noise, self.iteration, place, "examples", rollout.plan.branch)
            examples += algorithm.examples(rollout, values, draw)
        return examples

    def _update(self, examples: Sequence[Example], cond: Cond, prompts: Sequence[str]) -> tuple[UpdateStats, float]:
        """The optimizer steps of an iteration, with their statistics and the learning rate."""
        if differentiates_rewards(self.algorithm):
            self.updater.reward = partial(weighted_scores, self.policy, self.rewards, self.weights, prompts)
        rate = self.learner.set_rate(self.iteration, self.config.trainer.iterations)
        with in_training(self.policy, self.config.sampling.guidance_scale):
            stats = self.updater.update(examples, cond)
        self.learner.update_average()
        if isinstance(self.algorithm, KeepsOldWeights):
            self.learner.update_old(self.algorithm.old_decay(self.learner.steps))
        return stats, rate

    @property
    def _compares(self) -> bool:
        """Whether pictures of a group are scored beside each other."""
        return not (differentiates_rewards(self.algorithm) or all(reward.latent for reward in self.rewards.values()))

    def _looked_at(self, collected: Collected, prompts: Sequence[str]) -> tuple[Tensor, list[str]]:
        """The first `LOOKED_AT` pictures of every group's first tail, and their prompts: what rewards learn from."""
        latents = torch.cat([rollout.finals[0, :LOOKED_AT] for rollout in collected.rollouts])
        texts = [prompts[one.prompt] for one in collected.rollouts for _ in one.finals[0, :LOOKED_AT]]
        return self.sizes.fit(lambda: decode(self.policy, latents, self.sizes.decode)), texts

    def plans(self, iteration: int | None = None) -> list[Plan]:
        """The config's plans of an iteration, by default the current one (`algorithm_now` may have others)."""
        return plans_in(self.config, self.iteration if iteration is None else iteration)

    def algorithm_now(self) -> Algorithm:
        """The algorithm of the current iteration: the config's, or its state's (`AlgorithmState.at`)."""
        return self.algorithm if self.memory is None else self.memory.at(self.iteration)

    def prompts_of(self, iteration: int) -> list[str]:
        """This rank's prompts of an iteration; where the algorithm chooses among them, the candidates of each place in turn."""
        places = self.config.trainer.prompts_per_iteration
        return self.division.prompts.shard(self.order.batch(iteration, places * candidates_of(self.algorithm)))

    def _choose(self, prompts: list[str], cond: Cond, watch: Stopwatch) -> tuple[list[str], Cond, list[Collected]]:
        """The prompts chosen by the algorithm's state, their rows of `cond`, and the samples made for the choice."""
        each = candidates_of(self.algorithm)
        if each == 1:
            return prompts, cond, []
        anchors = self.collector.anchors(each, self.iteration, cond, prompts, watch)
        rewards = self.world.gather(anchors.rewards)[:, :, 0, 0].unflatten(0, (-1, each))
        chosen = choice_of(self.algorithm, self.memory, self.iteration, rewards, self.weights)
        first = self.division.prompts.first(len(chosen))
        rows = [place * each + chosen[first + place] for place in range(self.own_prompts)]
        return [prompts[row] for row in rows], cond.rows(rows), [anchors]

    def evaluate(self) -> Row:
        """Evaluates the (averaged) weights on held-out prompts; returns the row for the log."""
        watch = Stopwatch()
        evaluation = self.final = self.score_heldout()
        if self.iteration == 0:
            self.early_stop.check_base(evaluation.scores)
        spread = self.evaluator.spread(self.iteration, lambda rows: self._leave_if_asked())
        if self.iteration == 0 and not self._keeps_base:
            self._sample_controls()
        watch.lap("evaluation")
        row = self.evaluator.row(self.iteration, evaluation, spread)
        row["seconds"] = watch.seconds["evaluation"]
        self.early_stop.see(row, evaluation.scores)
        # on all ranks together: shards are gathered
        if self.early_stop.may_roll_back and self.world.total(self.alarms.best_so_far)[0]:
            self.persistence.keep_best(self.iteration)
        return row

    def _sample_controls(self) -> None:
        """Samples the controls while the policy is the base model, unless they are stored or cost too much."""
        if self.evaluator.controls_on and not self.evaluator.has_controls():
            self.evaluator.sample_controls(self.iteration, lambda rows: self._leave_if_asked())

    def score_heldout(self) -> Evaluation:
        """Held-out pictures of the (averaged) weights with all scores. On a single rank, raises `Preempted` if `stopping` is
        set meanwhile."""
        if self.sizes.auto:
            self._find_sizes(self.policy.encode(self.evaluator.own()[:1]))
        return self.evaluator.evaluate(self.iteration, lambda rows: self._leave_if_asked())

    def sample(self, prompts: Sequence[str], seed: int = 0) -> Tensor:
        """Pictures [B, 3, H, W] in [0, 1], or clips, of the (averaged) weights; picture i starts from noise (seed, i)."""
        with self.learner.averaged():
            return self.evaluator.sampler_now(seed=seed).pictures(prompts)

    def finish(self) -> dict[str, Comparison]:
        """Compares base and tuned on held-out prompts; writes weights, table, before/after grid, curves and a model card."""
        weights = self.export() if self.run_dir is not None else Path()
        tuned = self.score_heldout() if self.final is None else self.final
        tuned_control = self.evaluator.sample_tuned_control(self.iteration, lambda rows: self._leave_if_asked())
        if self._keeps_base:
            with self.policy.base():
                self._sample_controls()
        training = round(work_in_pictures(self.config))
        table = self.evaluator.finish(tuned, self.iteration, self.rolled_back_from, tuned_control, training)
        if self.files.writes:
            with self.files.holding(), writing(weights):
                edits = any(images_of(prompt) for prompt in self.heldout)
                own = {name: getattr(self.policy, name) for name in ("deployed", "lora_loader") if hasattr(self.policy, name)}
                own["against"] = self.evaluator.against
                write_card(self.files.run.path, weights, self.config, table, len(self.heldout), edits, **own)
        return table

    def export(self) -> Path:
        """Writes the (averaged) weights as diffusers reads them and returns their path. All ranks must call it; rank 0
        writes."""
        return self.persistence.export("adapter" if self.config.policy.tuning == "lora" else "transformer", self.iteration)

    def save(self) -> Path | None:
        """Writes a checkpoint from which `resume` continues bit for bit; returns its path, None without a run directory."""
        self.saved_at = time.monotonic()
        return self.persistence.save(self.iteration)

    def resume(self) -> list[str]:
        """Restores the newest checkpoint that is intact and fits, if there is one; returns what is wrong with newer ones and
        with the log."""
        self.final = None
        found, complaints = self.persistence.resume()
        if found is None:
            return complaints
        self.iteration, directory = found, self.files.run.path
        self.alarms.rows = [row for row in read_metrics(directory) if row["iteration"] <= found]
        evaluated = [row["iteration"] for row in self.alarms.rows if row["kind"] == "eval"]
        tables = {iteration: self.files.run.scores(iteration) for iteration in evaluated}
        names = [*self.rewards, *self.judges]
        self.alarms.history = {
            iteration: read_scores(table, names, len(self.heldout)) for iteration, table in tables.items() if table.is_file()
        }
        return [*complaints, *gaps(directory, self.alarms.rows, found)]

    def roll_back(self) -> int:
        """Restores the weights of the best evaluation, for `finish` and `export`, and returns its iteration; checkpoints are
        unchanged."""
        self.final = None
        best = self.persistence.take_best(self.iteration)
        self.rolled_back_from, self.iteration = self.iteration, best
        return best

    def _evaluation_due(self) -> bool:
        """Whether an evaluation is due on any rank: they have different clocks."""
        due = evaluation_due(self.config.evaluation, self.iteration, self.config.trainer.iterations, self.alarms.rows)
        return self.world.total(due)[0] > 0

    def _checkpoint_due(self) -> bool:
        c = self.config.trainer
        if self.iteration % c.checkpoint_every == 0 or self.iteration == c.iterations or self.early_stop.asked:
            return True
        minutes = c.checkpoint_minutes
        return minutes is not None and self.world.total(time.monotonic() - self.saved_at >= 60 * minutes)[0] > 0

    def _evaluate_unless_stopped(self) -> Row:
        try:
            return self.evaluate()
        except Preempted:
            self._save_what_was_learnt()
            self.early_stop.end_if_asked(self.iteration, self.roll_back)
            raise

    def _leave_if_asked(self) -> None:
        """Raises `Preempted` if `stopping` is set; with several ranks a no-op, since they must stop together."""
        if self.stopping and self.world.size == 1:
            raise self._preempted()

    def _stop_if_asked(self) -> None:
        """Saves and raises `Preempted`, on all ranks, if `stopping` is set on any."""
        if self.world.total(self.stopping)[0]:
            self._save_what_was_learnt()
            self.early_stop.end_if_asked(self.iteration, self.roll_back)
            raise self._preempted()

    def _save_what_was_learnt(self) -> None:
        if self.iteration:
            self.save()

    def _preempted(self) -> Preempted:
        self.stopping = False
        return Preempted(f"stopped after iteration {self.iteration}, as asked; {self.files.how_to_continue}")

    def _find_sizes(self, cond: Cond) -> None:
        """Measures batch sizes that are `auto`, up to the largest that an iteration can use."""
        if self.sizes.auto:
            members = self.own_prompts * len(self.division.plans.shard(self.plans())) * self.algorithm.group_size
            most = max(members, len(self.evaluator.own()))
            size = self.config.judged_size  # the larger of the two is measured
            larger = size is not None and math.prod(size) > self.config.policy.height * self.config.policy.width
            with self.shards.sampling(), sized(self.policy, size if larger else None):
                self.sizes.find(self.policy, cond.rows([0]), self.policy.noise([generator_for("memory")]), most)
