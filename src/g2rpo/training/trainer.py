"""The trainer: prompts -> rollout -> rewards -> advantages -> loss -> update, one iteration after the other."""

from __future__ import annotations

import json
import math
import shlex
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from g2rpo.algorithms.contracts import advantages_of, plans_of
from g2rpo.config.schema import Config, grid_of
from g2rpo.errors import Preempted, RewardFailed, RolledBack, Stopped, UserError
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
    load_tensors,
    sample_images,
    save_evaluation,
    save_scores,
    scores_after,
)
from g2rpo.files import whole_file
from g2rpo.monitor.alarms import ADVICE, judged_gain, watch_of
from g2rpo.monitor.curves import save_curves
from g2rpo.monitor.diagnostics import diagnose, reward_metrics
from g2rpo.monitor.image_statistics import image_statistics, statistics_row
from g2rpo.monitor.metrics import MetricsLog, Row, gaps, read_metrics
from g2rpo.monitor.pictures import Strip, save_grid
from g2rpo.monitor.trackers import Feed, TensorBoard, Tracker
from g2rpo.prompts.order import PromptOrder
from g2rpo.rollout.planning import count_evaluations
from g2rpo.rollout.scoring import Stopwatch
from g2rpo.rollout.tails import TailNetwork
from g2rpo.runtime.distributed import ALONE, World
from g2rpo.runtime.folders import held, whole, writing
from g2rpo.runtime.memory import batch_sizes
from g2rpo.runtime.sharding import Replicated
from g2rpo.seeding import generator_for
from g2rpo.training.checkpoint import Checkpoint, latest_checkpoint, save_checkpoint
from g2rpo.training.learner import Learner
from g2rpo.training.sampler import Sampler
from g2rpo.training.updater import Updater
from g2rpo.types import Algorithm, Cond, Draw, Plan, Policy, Reward, Rollout

BASELINE = "baseline.safetensors"  # the base model's evaluation, so that before/after needs no second copy of the weights
BEST = "checkpoints/best"  # the weights of the best evaluation, where an alarm may go back to them


@dataclass
class Trainer:
    """Trains `policy` on `rewards` as `config` says, and leaves everything worth keeping in `run_dir`.

    `judges` score held-out pictures but are not trained on. `run_dir=None` keeps nothing, for experiments in a notebook.
    `tail_network` finishes members where `sampling.tails` asks for another network than the policy's. `notify` hears of batch
    sizes that were found, or halved because memory ran out, and of `trackers` that fail. Every rank of `world` has a trainer of
    its own, alike but for the prompts that it is dealt; only the leader's writes. `sharding` is the policy's, where its weights
    are in pieces. After `stopping` is set, on any rank, `train` saves after the iteration at hand, or in the midst of an
    evaluation, and raises `Preempted`.
    """

    config: Config
    policy: Policy
    rewards: Mapping[str, Reward]
    prompts: Sequence[str]
    heldout: Sequence[str]
    judges: Mapping[str, Reward] = field(default_factory=dict)
    run_dir: Path | None = None
    tail_network: TailNetwork | None = None
    notify: Callable[[str], None] = print
    world: World = ALONE
    sharding: Replicated | None = None
    on_evaluations: Callable[[int], None] = lambda rows: None
    trackers: Sequence[Tracker] = field(default_factory=lambda: [TensorBoard()])

    def __post_init__(self) -> None:
        c = self.config
        if c.sampling.tails.own_network and self.tail_network is None:
            raise ValueError("sampling.tails asks for a network of its own: pass a tail_network (see policies.fast)")
        self.iteration = 0
        self.stopping = False
        self.rolled_back_from: int | None = None
        self.endings: set[str] = set()  # "stop" or "rollback", as alarms that are new in this iteration ask
        self.unscored = dict.fromkeys(self.rewards, 0)  # iterations in a row without any score
        self.shards = self.sharding or Replicated(self.world)
        self.own_prompts = self.world.share(c.trainer.prompts_per_iteration, "trainer.prompts_per_iteration")
        self._baseline: Evaluation | None = None
        self._base_look: dict[str, Tensor] = {}
        self._shown = c.evaluation.pictures
        self.algorithm = c.algorithm
        self.memory = self.algorithm.memory(c.sampling.num_steps, partial(count_evaluations, tails=c.sampling.tails))
        self.sigmas = grid_of(c.sampling.shift, self.policy, c.sampling.num_steps)
        self.evaluated_on = grid_of(c.sampling.shift, self.policy, c.evaluation.num_steps or c.sampling.num_steps)
        self.kernel = self.algorithm.kernel(self.sigmas)
        entries = self.policy.noise([generator_for("alarms")]).numel()
        self.alarms = watch_of(c, self.algorithm, self.sigmas, entries)
        self.may_roll_back = any(c.alarms.of(name) == "rollback" for name in ADVICE)
        if self.may_roll_back and self.run_dir is None:
            raise ValueError("alarms: going back to the best evaluation needs a run_dir that keeps it")
        self.weights = torch.tensor([c.rewards[name].weight for name in self.rewards])
        self.order = PromptOrder(self.prompts, c.trainer.seed)
        self.learner = Learner(self.policy.trainable_parameters(), c.optim, self.shards)
        self.sizes = batch_sizes(
            c.sampling.batch_size,
            c.sampling.decode_batch_size,
            c.trainer.micro_batch_size,
            self.policy.device,
            self.notify,
        )
        self.sizes.in_step = self.shards.in_step
        self.sampler = Sampler(
            self.policy,
            self.rewards,
            c.sampling,
            self.sigmas,
            self.sizes,
            self.shards,
            c.trainer.seed,
            self.world.first(c.trainer.prompts_per_iteration),
            self.tail_network,
            lambda rows: self.on_evaluations(rows),
        )
        self.updater = Updater(
            self.policy,
            self.algorithm,
            self.learner.optimizer,
            self.sigmas,
            self.sizes,
            c.optim.max_grad_norm,
            self.shards,
            getattr(torch, c.sampling.step_dtype),
        )

    @property
    def writes(self) -> bool:
        """Whether this trainer keeps the run: one rank does."""
        return self.run_dir is not None and self.world.leads

    @property
    def command(self) -> str:
        """What continues this run, as messages name it."""
        return f"`g2rpo resume {shlex.quote(str(self.run_dir))}`" if self.run_dir is not None else "nothing that was kept"

    def train(self) -> Iterator[Row]:
        """Runs the remaining iterations; yields a row per iteration and per evaluation as they are logged."""
        c = self.config.trainer
        with self._log() as logged:
            if self._is_to_be_judged():
                yield logged(self._evaluate_unless_stopped())
                self._stop_if_asked()
                self._heed_alarms()
            while self.iteration < c.iterations:
                yield (row := logged(self.iterate()))
                self._give_up_on(row)
                self._stop_if_asked()  # a run that goes on begins with the evaluation
                if self._is_to_be_judged():
                    yield logged(self._evaluate_unless_stopped())
                    self._stop_if_asked()
                if self.iteration % c.checkpoint_every == 0 or self.iteration == c.iterations or self.endings:
                    self.save()
                self._heed_alarms()

    def iterate(self) -> Row:
        """One iteration, straight down; returns its metrics."""
        watch = Stopwatch()
        prompts = self.prompts_of(self.iteration)
        cond = self.policy.encode(prompts)
        watch.lap("encode")

        self._find_sizes(cond)
        algorithm = self.algorithm_now()
        with self._naming_the_iteration():
            sampled = self.sampler.sample(algorithm, self.iteration, cond, prompts, watch)
        rollouts, rewards = sampled.rollouts, self.world.gather(sampled.rewards)  # an algorithm may look at the whole batch
        advantages = advantages_of(algorithm, rewards, self.weights)
        examples = [
            example
            for rollout, own in zip(rollouts, self.world.deal(advantages), strict=True)
            for example in algorithm.examples(rollout, own, self._draws(rollout))
        ]

        rate = self.learner.set_rate(self.iteration, self.config.trainer.iterations)
        stats = self.updater.update(examples, cond)
        self.learner.update_average()
        watch.lap("update")

        branches = [rollout.plan.branch for rollout in rollouts] * self.world.size  # on every rank the same ones
        tails = [rollout.plan.tail_names for rollout in rollouts] * self.world.size
        learnt = self.memory.observe(self.iteration, branches, rewards, self.weights) if self.memory else {}
        images = sum(rollout.finals[:, :, 0].shape[:2].numel() for rollout in rollouts)
        evaluations, images, halved = self.world.total(sampled.evaluations, images, self.sizes.halved)
        self.iteration += 1
        row: Row = {
            "kind": "train",
            "iteration": self.iteration,
            **reward_metrics(list(self.rewards), rewards, advantages, self.algorithm.advantage_clip),
            **diagnose(branches, tails, list(self.rewards), rewards, advantages),
            **learnt,
            **stats.summary(self.algorithm),
            "learning_rate": rate,
            "evaluations": evaluations,
            "images": images,
            "batch_size": self.sizes.rollout,
            "decode_batch_size": self.sizes.decode,
            "micro_batch_size": self.sizes.micro,
            "out_of_memory": halved,
            "ranks": self.world.size,
            "seconds": sum(watch.seconds.values()),
            "seconds_overlapped": sampled.seconds_overlapped,
            **{f"seconds/{phase}": seconds for phase, seconds in watch.seconds.items()},
        }
        self._announce(self.alarms.see(row), row)
        return row

    def plans(self, iteration: int | None = None) -> list[Plan]:
        """The plans of an iteration, by default the one at hand, as they are known ahead (`algorithm_now` may make others)."""
        iteration = self.iteration if iteration is None else iteration
        return plans_of(self.algorithm, self.config.sampling.num_steps, iteration, self.config.trainer.seed)

    def algorithm_now(self) -> Algorithm:
        """The algorithm of the iteration at hand: the config's, or what its memory has made of it so far."""
        return self.algorithm if self.memory is None else self.memory.at(self.iteration)

    def _draws(self, rollout: Rollout) -> Draw:
        """Chance for what is learnt from a rollout of the iteration at hand."""
        return partial(self.sampler.noise, self.iteration, rollout.prompt, "examples", rollout.plan.branch)

    def prompts_of(self, iteration: int) -> list[str]:
        """This rank's prompts of an iteration."""
        return self.world.deal(self.order.batch(iteration, self.config.trainer.prompts_per_iteration))

    def own_heldout(self) -> Sequence[str]:
        """The held-out prompts that this rank judges: all of them where there are fewer than ranks."""
        return self.world.deal_enough(self.heldout)

    def evaluate(self) -> Row:
        """Judges the (averaged) weights on held-out prompts, and paints the first few."""
        watch = Stopwatch()
        evaluation = self.judge()
        watch.lap("evaluation")
        if self.iteration == 0:
            self._baseline = evaluation
        if self.run_dir is not None and self.world.leads:
            if self.iteration == 0:
                with self._written(BASELINE) as path:
                    save_evaluation(path, evaluation)
            with self._written(scores_after(self.iteration)) as path:
                save_scores(path, evaluation)
            self._paint(iteration_name(self.iteration), {"": evaluation}, f"after iteration {self.iteration}")
        means = {f"reward/{name}": mean for name, mean in evaluation.means().items()}
        base = self._base()
        table = compare(base, evaluation) if base is not None else {}
        errors = {f"stderr/{name}": change.error for name, change in table.items()}
        row: Row = {"kind": "eval", "iteration": self.iteration, **means, **errors}
        if base is not None and (right := compare_right(base, evaluation)) is not None:
            row |= {"right": right.tuned, "right_stderr": right.error}
        if base is not None:
            row["judged_gain"] = judged_gain(base.scores, evaluation.scores, list(self.judges or self.rewards))
            row |= self._picture_statistics(base, evaluation)
        row["seconds"] = watch.seconds["evaluation"]
        self._announce(self.alarms.see(row, evaluation.scores), row)
        if self.may_roll_back and self.world.total(self.alarms.best_so_far)[0]:  # together: pieces are gathered
            self._keep_best()
        return row

    def _picture_statistics(self, base: Evaluation, evaluation: Evaluation) -> Row:
        """Pictures beside the base's, in numbers: by the leader, who has them all, for every rank."""
        row: Row = {}
        if self.world.leads:
            self._base_look = self._base_look or image_statistics(base.images)
            row = statistics_row(self._base_look, image_statistics(evaluation.images))
        return dict(json.loads(self.world.text_of_leader(json.dumps(row))))

    def judge(self) -> Evaluation:
        """Held-out pictures and all their scores, of the (averaged) weights. `Preempted`, where this is the only rank, if
        `stopping` is set meanwhile."""
        c = self.config
        own = self.own_heldout()
        if self.sizes.auto:
            self._find_sizes(self.policy.encode(own[:1]))

        def judged() -> Evaluation:
            return evaluate(
                self.policy,
                own,
                {**self.rewards, **self.judges},
                self.evaluated_on,
                seed=c.trainer.seed,
                batch_size=self.sizes.rollout,
                decode_batch_size=self.sizes.decode,
                first=self.world.first(len(self.heldout)) if len(own) < len(self.heldout) else 0,
                on_rows=lambda rows: self._leave_if_asked(),
            )

        with self.learner.averaged(), self._naming_the_iteration(), self.shards.sampling():
            evaluation = self.sizes.fit(judged)
        return evaluation_of_all(self.world, evaluation, self.heldout) if len(own) < len(self.heldout) else evaluation

    def sample(self, prompts: Sequence[str], seed: int = 0) -> Tensor:
        """Pictures [B, 3, H, W] in [0, 1] of the (averaged) weights, on the CPU; picture i starts from noise (seed, i)."""
        rows, decoded = self.sizes.rollout, self.sizes.decode
        with self.learner.averaged():
            return sample_images(self.policy, prompts, self.evaluated_on, seed=seed, batch_size=rows, decode_batch_size=decoded)

    def finish(self) -> dict[str, Comparison]:
        """Base against tuned on the held-out prompts; writes the table, the before/after grid and the curves."""
        tuned = self.judge()
        base = self._base()
        if base is None:
            raise ValueError("this trainer has neither evaluated the base model nor a run_dir that holds its evaluation")
        table = compare(base, tuned)
        if self.writes:
            rewards = {name: asdict(row) for name, row in table.items()}
            results = {"iteration": self.iteration, "prompts": len(base.prompts), "rewards": rewards}
            if (right := compare_right(base, tuned)) is not None:
                results["right"] = asdict(right)
            self._paint("before_after", {"base": base, "tuned": tuned}, "both rows from the same noise", right)
            if self.rolled_back_from is not None:
                results["rolled_back_from"] = self.rolled_back_from
            with self._written("results.json") as path:
                path.write_text(json.dumps(results, indent=1))
            with self._written("curves.png") as path:
                save_curves(path, read_metrics(self._directory()), list(self.rewards))
        return table

    def export(self) -> Path:
        """Writes the (averaged) weights as diffusers reads them, and returns where; for all ranks to call, one writes."""
        folder = self._directory() / ("adapter" if self.config.policy.tuning == "lora" else "transformer")
        with self.learner.averaged(), self._holding():
            if not self.writes:  # but their pieces are gathered
                return self.policy.save(folder) if self.sharding is not None else folder
            with writing(folder), whole(folder) as unfinished:
                saved = self.policy.save(unfinished)
        return folder / saved.relative_to(unfinished)

    def save(self) -> Path | None:
        """Writes a checkpoint from which `resume` continues bit for bit, and returns where; None where nothing is kept.

        It holds whole tensors, so that any number of ranks can go on from it; the leader's CPU has them all at once.
        Raises `Stopped` instead if the weights of the ranks have parted.
        """
        if parted := self.shards.parted(list(self.learner.parameters)):
            raise Stopped(f"iteration {self.iteration}: the weights of ranks {parted} are not rank 0's; nothing was saved")
        if self.run_dir is None:
            return None
        tensors, state = self.learner.whole()
        if not self.writes:
            return None
        state["algorithm"] = self.memory.state if self.memory else {}
        kept = self.config.trainer.keep_checkpoints
        with self._holding():
            return save_checkpoint(self.run_dir / "checkpoints", self.iteration, tensors, state, kept)

    def resume(self) -> list[str]:
        """Continues from the newest checkpoint that is intact and fits, if there is one; returns what is wrong with newer ones,
        and what the log lacks."""

        def take(found: Checkpoint) -> None:
            _, tensors, state = found
            self.learner.take(tensors, state)
            if self.memory is not None:
                self.memory.state = state["algorithm"]

        found, complaints = latest_checkpoint(self._directory() / "checkpoints", take)
        if self.world.differing(torch.tensor([found[0] if found else 0])):
            raise UserError(f"ranks see different checkpoints in {self.run_dir}: it must be a folder that all of them share")
        if found is None:
            return complaints
        self.iteration = found[0]
        self.alarms.rows = [row for row in read_metrics(self._directory()) if row["iteration"] <= self.iteration]
        judged = [row["iteration"] for row in self.alarms.rows if row["kind"] == "eval"]
        scores = {iteration: self._directory() / scores_after(iteration) for iteration in judged}
        self.alarms.history = {i: load_tensors(path) for i, path in scores.items() if path.is_file()}  # old runs kept none
        return [*complaints, *gaps(self._directory(), self.alarms.rows, self.iteration)]

    def roll_back(self) -> None:
        """Takes the weights of the best evaluation, for `finish` and `export`; what `resume` continues from stays."""
        found, _ = latest_checkpoint(self._directory() / BEST, until=self.iteration)
        if found is None:
            raise Stopped(
                f"stopped by an alarm after iteration {self.iteration}; no weights were kept to go back to: {BEST} is empty"
            )
        self.rolled_back_from = self.iteration
        self.iteration, tensors, _ = found
        self.learner.take_weights(tensors["weights"])

    def _keep_best(self) -> None:
        """Keeps the (averaged) weights that were judged best."""
        with self.learner.averaged():
            tensors = self.learner.weights()
            if self.writes:
                save_checkpoint(self._directory() / BEST, self.iteration, tensors, {}, keep=1)

    def _is_to_be_judged(self) -> bool:
        """Whether an evaluation is due that the log does not have yet: after this iteration, or after the one that a run was
        stopped in."""
        every, last = self.config.evaluation.every, self.config.trainer.iterations
        due = self.iteration % every == 0 or self.iteration >= last
        known = any(row["kind"] == "eval" and row["iteration"] == self.iteration for row in self.alarms.rows)
        return self.world.total(self.iteration == 0 or (due and not known))[0] > 0

    def _evaluate_unless_stopped(self) -> Row:
        try:
            return self.evaluate()
        except Preempted:
            self._save_what_was_learnt()
            raise

    def _leave_if_asked(self) -> None:
        """Raises `Preempted` if `stopping` is set; several ranks go on, and stop together."""
        if self.stopping and self.world.size == 1:
            raise self._preempted()

    def _stop_if_asked(self) -> None:
        """Saves and raises `Preempted`, on all ranks, if `stopping` is set on any."""
        if self.world.total(self.stopping)[0]:
            self._save_what_was_learnt()
            self._heed_alarms()
            raise self._preempted()

    def _save_what_was_learnt(self) -> None:
        if self.iteration:
            self.save()

    def _preempted(self) -> Preempted:
        self.stopping = False
        return Preempted(f"stopped after iteration {self.iteration}, as asked; {self.command} continues it")

    def _announce(self, new: Sequence[str], row: Row) -> None:
        """Says which alarms are new in a row, and remembers what they ask for."""
        for name in new:
            self.endings |= {self.config.alarms.of(name)} & {"stop", "rollback"}
            if self.world.leads:
                self.notify(
                    f"alarm after iteration {row['iteration']}: {name}: {row['alarms'][name]}. What helps: {ADVICE[name]}"
                )

    def _heed_alarms(self) -> None:
        """Ends the run if one of the alarms of this iteration asks for it; a checkpoint is written."""
        asked, self.endings = self.endings, set()
        if "rollback" in asked:
            self.roll_back()
            best = f"the weights are those of iteration {self.iteration}, the best evaluation kept"
            stopped = f"stopped by an alarm after iteration {self.rolled_back_from}"
            raise RolledBack(f"{stopped}; {best}; {self.command} goes on without going back")
        if "stop" in asked and self.iteration < self.config.trainer.iterations:
            raise Stopped(f"stopped by an alarm after iteration {self.iteration}; {self.command} goes on in spite of it")

    def _base(self) -> Evaluation | None:
        """The base model's evaluation, by this process or by the one that began the run; None if neither kept it."""
        if self._baseline is None and self.run_dir is not None:
            stored = load_evaluation(self.run_dir / BASELINE, self.heldout)
            self._baseline = stored if self.world.leads else replace(stored, images=stored.images[:0].clone())
        return self._baseline

    def _find_sizes(self, cond: Cond) -> None:
        """Settles batch sizes that are left to be found, with the largest that an iteration could use as a bound."""
        if self.sizes.auto:
            members = self.own_prompts * len(self.plans()) * self.algorithm.group_size
            most = max(members, len(self.own_heldout()))
            with self.shards.sampling():
                self.sizes.find(self.policy, cond.rows([0]), self.policy.noise([generator_for("memory")]), most)

    def _give_up_on(self, row: Row) -> None:
        """Raises `Stopped` when nothing has been learnt for too long; the weights are as the last good update left them."""
        limits = self.config.trainer
        for name in self.rewards:
            self.unscored[name] = self.unscored[name] + 1 if math.isnan(row[f"reward/{name}"]) else 0
            if self.unscored[name] >= limits.max_unscored:
                how_long = f"{self.unscored[name]} iterations in a row (trainer.max_unscored)"
                raise Stopped(f"iteration {self.iteration}: reward '{name}' gave no score at all in {how_long}")
        if self.updater.skipped_in_a_row >= limits.max_skipped:
            self.save()
            how_long = f"{self.updater.skipped_in_a_row} updates in a row (trainer.max_skipped)"
            raise Stopped(
                f"iteration {self.iteration}: the gradient was not finite in {how_long}; the weights before are saved"
            )

    @contextmanager
    def _log(self) -> Iterator[Callable[[Row], Row]]:
        """A function that keeps a row and shows it to the trackers; on ranks that do not write it does nothing."""
        if not self.writes:
            yield lambda row: row
            return
        directory, config = self._directory(), self.config.model_dump(mode="json")
        with (
            self._holding(),
            MetricsLog(directory, self.iteration) as log,
            Feed(self.trackers, directory, self.iteration, config, self.notify) as feed,
        ):

            def logged(row: Row) -> Row:
                log.write(row)
                feed.log(
                    row,
                    {"eval/samples": directory / _picture(iteration_name(row["iteration"]))} if row["kind"] == "eval" else {},
                )
                return row

            yield logged

    @contextmanager
    def _holding(self) -> Iterator[None]:
        """Keeps other processes out of the run directory, where this trainer writes it."""
        if not self.writes:
            yield
            return
        with held(self._directory(), self.notify):
            yield

    @contextmanager
    def _written(self, name: str) -> Iterator[Path]:
        """Where to write a file of the run, which is then there as a whole; `Stopped` if the disk refuses."""
        path = self._directory() / name
        with self._holding(), writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as unfinished:
                yield unfinished

    @contextmanager
    def _naming_the_iteration(self) -> Iterator[None]:
        try:
            yield
        except RewardFailed as error:
            raise RewardFailed(f"after iteration {self.iteration}: {error}{self._keep_traceback(error)}") from error.__cause__

    def _keep_traceback(self, error: BaseException) -> str:
        """Writes the traceback of an error's cause into the run directory; returns where, as the end of a message."""
        if self.run_dir is None or not self.run_dir.is_dir() or error.__cause__ is None:
            return ""
        path = self.run_dir / f"traceback_rank{self.world.rank}.txt"
        try:
            path.write_text("".join(traceback.format_exception(error.__cause__)), encoding="utf-8")
        except OSError as full:
            return f"\nThe whole traceback could not be written to {path} ({full.strerror})."
        return f"\nThe whole traceback is in {path}; {self.command} goes on from the last checkpoint."

    def _paint(self, name: str, rows: Mapping[str, Evaluation], which: str, right: Comparison | None = None) -> None:
        """Pictures of the first held-out prompts with the scores that are trained on, a row for each labelled evaluation."""
        n, judges = self._shown, {**self.rewards, **self.judges}
        strips = [
            Strip(one.images[:n], label, {reward: one.scores[reward][:n] for reward in self.rewards}, one.right)
            for label, one in rows.items()
        ]
        prompts = list(self.heldout)[:n]
        note = f"The first {len(prompts)} of {len(self.heldout)} held-out prompts, in their order; {which}."
        if least := least_scores(judges):
            note += f" Right: {' and '.join(f'{reward} at least {value:g}' for reward, value in least.items())}."
        if right is not None:
            shares = f"the base draws {100 * right.base:.0f} % right and the tuned model {100 * right.tuned:.0f} %"
            note += f" Of all {len(self.heldout)}, {shares}."
        with self._written(_picture(name)) as path:
            save_grid(path, strips, prompts, note)

    def _directory(self) -> Path:
        if self.run_dir is None:
            raise ValueError("this trainer has no run_dir to write to")
        return self.run_dir


def _picture(name: str) -> str:
    return f"samples/{name}.png"
