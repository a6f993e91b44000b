"""`g2rpo train`: opens a run, trains, and reports progress."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from g2rpo.app.build import checked_parts
from g2rpo.app.contents import contents_of
from g2rpo.app.events import Emit, Line, Results, Trained, Training, cautions, silent
from g2rpo.app.prediction import Predict, beside_plan
from g2rpo.app.preflight import check
from g2rpo.app.stopping import Stopping
from g2rpo.assembly import components
from g2rpo.assembly.adapters import completed
from g2rpo.assembly.config import load_config
from g2rpo.config.schema import Config
from g2rpo.core.errors import RolledBack, UserError, counted
from g2rpo.core.files import digest_of
from g2rpo.core.types import Reward
from g2rpo.monitor.metrics import Row
from g2rpo.rollout.planning import count_per_prompt
from g2rpo.runs.directory import RunDirectory
from g2rpo.runs.lifecycle import check_contents, claim, entered, read_config, record_start
from g2rpo.runtime.distributed import ALONE, World, joined
from g2rpo.training.checkpoint import newest_iteration
from g2rpo.training.pace import MEASURED, PROBE, planned, seconds_in
from g2rpo.training.pilots import Pilots
from g2rpo.training.rates import Sweep, read_sweep
from g2rpo.training.trainer import Trainer


def open_run(
    config: Config,
    directory: Path,
    resume: bool,
    accept_changes: bool,
    notify: Callable[[str], None],
    world: World = ALONE,
    given: Mapping[str, Any] | None = None,
    emit: Emit = silent,
    sweep: Sweep | None = None,
    ends_at: float | None = None,
) -> Trainer:
    """A trainer for a new or resumed run in `directory`, whose lock the caller must hold. The rate of a run that has not begun
    is chosen by the pilots of `sweep`, of which those that are missing are run."""
    given = given or {}
    prompts, heldout = check(config, given, directory, emit)
    given = {"prompts": prompts, "heldout": heldout, **given}
    prompts, heldout = given["prompts"], given["heldout"]
    if resume and world.is_main:
        for change in check_contents(directory, contents_of(config, prompts, heldout, given), accept_changes):
            notify(f"goes on with {change}")
    parts = checked_parts(config, directory, notify, world, given, emit, sweep is not None)
    trainer = Trainer(**parts)
    if world.is_main:
        claim(directory, config)  # only now: wrong input leaves nothing behind
    if sweep is not None and sweep.rate is None:
        del trainer  # its average and old weights
        parts["config"] = _with_found_rate(parts, directory, sweep, ends_at, emit)
        trainer = Trainer(**parts)
    if ends_at is not None and not trainer.files.run.starts.is_file():
        parts["config"] = _planned(trainer, ends_at)
        parts["heldout"] = given["heldout"] = heldout[: parts["config"].evaluation.num_prompts]
        trainer = Trainer(**parts)
        if world.is_main:
            claim(directory, trainer.config)
    if resume:
        for complaint in trainer.resume():
            notify(complaint)
    if world.is_main:
        contents = contents_of(trainer.config, prompts, trainer.heldout, given)
        record_start(directory, trainer.iteration, trainer.policy.device, contents)
    return trainer


def _planned(trainer: Trainer, ends_at: float) -> Config:
    """The config of a run that has not begun, planned for its time by timed evaluations of a few held-out prompts."""
    prompts, evaluator, calls = trainer.heldout[:PROBE], trainer.evaluator, [0.0]

    def timed(prompts: Sequence[str], rewards: Mapping[str, Reward]) -> tuple[float, float]:
        """Seconds of a picture: until the network has been called for the last time, and afterwards."""
        calls[:] = [time.monotonic()]
        evaluator.evaluate(0, lambda rows: calls.append(time.monotonic()), prompts, rewards=rewards)
        count = len(trainer.world.shard_or_all(prompts))
        return (calls[-1] - calls[0]) / count, (time.monotonic() - calls[-1]) / count

    timed(prompts[:1], evaluator.judged_by)  # the first call is slow
    sampled, scored = timed(prompts, trainer.rewards)
    row, look = sampled / evaluator.sampler.num_steps, sum(timed(prompts, evaluator.judged_by))
    world, division = trainer.world, trainer.division
    working = division.prompts.size * division.plans.size  # ranks between which an iteration is divided
    looking = world.size if len(trainer.heldout) >= world.size else 1
    measured = world.broadcast_text(json.dumps([row / working, scored / working, look / looking, ends_at - time.monotonic()]))
    row, scored, look, left = json.loads(measured)
    return planned(trainer.config, row, scored, look, len(trainer.heldout), left)


def _with_found_rate(parts: Mapping[str, Any], directory: Path, sweep: Sweep, ends_at: float | None, emit: Emit) -> Config:
    """The config with the rate that `sweep` takes; both are written."""
    config, run = parts["config"], RunDirectory(directory)
    emit(Line(f"short runs at {len(sweep.rates)} learning rates on training prompts; gain in standard deviations of the base:"))
    rate = Pilots(parts).find(sweep, run, ends_at, lambda line: emit(Line(f"  {line}")))
    emit(Line(f"{rate:g} is taken: the nearest to yours of those within an error of the best gain, without an alarm"))
    config = _at_rate(config, rate)
    if parts["shards"].world.is_main:
        claim(directory, config)
        sweep.rate = rate
        sweep.write(run)
    return config


def _at_rate(config: Config, rate: float) -> Config:
    return config.model_copy(update={"optim": config.optim.model_copy(update={"learning_rate": rate})})


def train(
    recipe: str | None,
    overrides: Sequence[str],
    run_dir: Path | None,
    resume: bool,
    accept_changes: bool = False,
    stopping: Stopping | None = None,
    within: str | None = None,
    emit: Emit = silent,
    find_rate: bool = False,
    predict: Predict | None = None,
) -> Path | None:
    """Runs a recipe to its end on all processes of a launch; returns the run directory, None on ranks other than 0.

    With `resume` the run in `run_dir` continues, with its own config if `recipe` is None or its own recipe; if there is none
    yet, that of `recipe` begins. A stop signal (`stopping`) saves a checkpoint first. `within` is the time that the run may
    take, with its earlier starts: its number of iterations and its evaluations are fitted to it. With `find_rate` pilots around
    the config's learning rate choose one first; a resumed run finishes the pilots that it began. After a few iterations the
    plan that `predict` makes is reported beside what was measured.
    """
    ends_at = None if within is None else time.monotonic() + seconds_in(within)
    notes: list[str] = []
    begun = run_dir is not None and RunDirectory(run_dir).config.is_file()
    if resume and run_dir is not None and (recipe is None or (begun and recipe == read_config(run_dir).recipe)):
        config = read_config(run_dir, overrides, notes.append, mention=False)
    elif recipe is not None:
        config = completed(load_config(recipe, overrides, notes.append), notes.append)
        if find_rate and resume and begun and run_dir is not None:
            config = _at_rate(config, read_config(run_dir).optim.learning_rate)
    else:
        raise UserError("name a recipe (`g2rpo recipes` lists them) or a config.yaml; `g2rpo resume RUN` continues a run")
    _refuse_clicks_of_nobody(config)
    with joined(_device(config), config.trainer.rank_timeout_s) as world, ExitStack() as stack:
        if not world.is_main:
            emit = silent
        for note in notes:
            emit(Line(note))
        fingerprint = torch.tensor(list(bytes.fromhex(digest_of(config.model_dump(mode="json")))))
        if others := world.differing(fingerprint):
            raise UserError(
                f"ranks {others} were started with another config than rank 0; give all the same recipe and overrides"
            )
        chosen = stack.enter_context(entered(config, run_dir, resume, cautions(emit))) if world.is_main else ""
        directory = Path(world.broadcast_text(str(chosen)))
        _run(config, directory, resume, world, accept_changes, stopping, ends_at, emit, find_rate, predict)
        return directory if world.is_main else None


def _refuse_clicks_of_nobody(config: Config) -> None:
    """UserError for a reward `clicks` without a stored session, as the config of a session has it: all its scores are 0."""
    for name, entry in config.rewards.items():
        if entry.kind == "clicks" and not entry.options.get("run"):
            raise UserError(
                f"rewards.{name}: has no clicks to be fitted to; rewards.{name}.options.run=RUN names a session. `g2rpo teach "
                "RUN` goes on with one, and `g2rpo teach RUN/config.yaml --votes RUN/votes.jsonl` repeats it"
            )


def _device(config: Config) -> str:
    """The device of a run; if it is not available, the message also lists everything else that is missing."""
    try:
        return components.pick_device(config.policy.device)
    except UserError:
        check(config)
        raise


def _run(
    config: Config,
    directory: Path,
    resume: bool,
    world: World,
    accept_changes: bool = False,
    stopping: Stopping | None = None,
    ends_at: float | None = None,
    emit: Emit = silent,
    find_rate: bool = False,
    predict: Predict | None = None,
) -> None:
    """Trains on one rank."""
    stopping = stopping or Stopping("")
    run = RunDirectory(directory)
    sweep = read_sweep(run)
    if sweep is None and find_rate and not newest_iteration(run.checkpoints):
        sweep = Sweep.around(config.optim.learning_rate)
    if ends_at is not None and sweep is not None:
        ends_at -= sweep.seconds  # of earlier starts
    name = config.recipe or "training"
    ranks = f" on {world.size} ranks" if world.size > 1 else ""
    rewards = counted(len(config.rewards), "reward")
    emit(Line(f"{ranks}: building the policy, {rewards} and the prompts ...", title=name))
    notify = cautions(emit) if world.is_main else lambda text: print(f"rank {world.rank}: {text}", file=sys.stderr)
    if sweep is not None:
        stopping.message = f"stopped while pilots were run; `g2rpo resume {directory}` goes on with those that are missing"
    trainer = open_run(config, directory, resume, accept_changes, notify, world, emit=emit, sweep=sweep, ends_at=ends_at)
    if resume:
        emit(Line(f"resuming after iteration {trainer.iteration}" if trainer.iteration else "nothing to resume: it begins"))
    if ends_at is not None:
        trainer.clock.ends_at = ends_at - sum(row["seconds"] for row in trainer.alarms.rows)  # of earlier starts
    began = time.perf_counter()
    ended: RolledBack | None = None
    stopping.message = f"stopped at once; {trainer.files.command} goes on from the last checkpoint"
    try:
        with stopping.after(partial(setattr, trainer, "stopping", True)):
            train_all(trainer, emit, predict)
    except RolledBack as error:  # the restored weights are evaluated and written like any result
        ended = error
    stopping.message = (
        f"stopped while base and tuned were compared; all iterations are done, and {trainer.files.command} finishes"
    )
    emit(Trained(time.perf_counter() - began, trainer.evaluator.controls_on > 0))
    table = trainer.finish()
    emit(Results(directory, table, trainer.heldout, list(trainer.rewards), config.policy.kind is not None))
    if ended is not None:
        raise ended


def train_all(trainer: Trainer, emit: Emit, predict: Predict | None = None) -> None:
    """Runs the training, and reports its evaluations of the network, its rows of metrics, and the plan that `predict` makes."""
    config = trainer.config

    def evaluations(iterations: int) -> int:
        prompts, tails = trainer.own_prompts * trainer.world.size, config.sampling.tails  # as `on_evaluations` counts
        own = [trainer.division.plans.shard(trainer.plans(each)) for each in range(iterations)]
        return sum(prompts * count_per_prompt(config.algorithm, plans, tails) for plans in own)

    iterations, iteration = config.trainer.iterations, trainer.iteration
    done, total = evaluations(iteration), evaluations(iterations)

    def report(more: int = 0, row: Row | None = None) -> None:
        nonlocal done
        done += more
        emit(Training(iteration, iterations, done, total, row))

    report()
    if not iteration:
        emit(Line(f"first the base model draws {counted(len(trainer.heldout), 'held-out prompt')}, which are scored ..."))
    trained: list[Row] = []
    trainer.on_evaluations = lambda count: report(count * trainer.world.size)
    for row in trainer.train():
        if trainer.config.trainer.iterations != iterations:  # fitted to a time
            iterations = trainer.config.trainer.iterations
            total = evaluations(iterations)
        if row["kind"] == "train":
            iteration = row["iteration"]
            trained.append(row)
        report(row=row)
        if predict is not None and len(trained) == MEASURED:
            try:
                if (both := beside_plan(trainer, trained, predict)) is not None:
                    emit(Line(f"by plan on {both.card}: {both}"))
            except UserError as error:  # of the plan, which training does not need
                emit(Line(str(error)))
            predict = None
