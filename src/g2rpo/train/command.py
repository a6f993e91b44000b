"""`g2rpo train` and `g2rpo resume`: build a run, train it, and report progress."""

from __future__ import annotations

import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from g2rpo.config.read import read
from g2rpo.config.resolve import listed_differences
from g2rpo.config.schema import Config
from g2rpo.core import plugins
from g2rpo.core.data import Row
from g2rpo.core.devices import pick_device
from g2rpo.core.distributed import apart, joined
from g2rpo.core.errors import UserError, counted
from g2rpo.core.events import (
    Emit,
    Line,
    Progress,
    Results,
    TrainingEnded,
    TrainingProgress,
    cautions,
    silent,
)
from g2rpo.core.files import digest_of
from g2rpo.core.statistics import Comparison
from g2rpo.core.stopping import Stopping
from g2rpo.rollout.planning import count_evaluations
from g2rpo.train.build import Predict, Request, build
from g2rpo.train.checks import check
from g2rpo.train.model_card import CARD
from g2rpo.train.run.checkpoint import newest_iteration
from g2rpo.train.run.folder import Run, entered
from g2rpo.train.run.records import PlannedAndMeasured
from g2rpo.train.trainer import Trainer

MEASURED = 3
"""Iterations after which a plan is compared with what was measured."""


def train(
    recipe: str | None,
    overrides: Sequence[str],
    run_dir: Path | None,
    *,
    resume: bool = False,
    accept_changes: bool = False,
    stopping: Stopping | None = None,
    emit: Emit = silent,
    predict: Predict | None = None,
) -> Path | None:
    """Runs a recipe to its end on all processes of a launch; returns the run directory, None on
    ranks other than 0.

    With `resume` the run in `run_dir` continues, with its own config if `recipe` is None or its own
    recipe; if there is none yet, that of `recipe` begins. A stop signal (`stopping`) saves a
    checkpoint first. The plan that `predict` makes decides about `policy.compile=auto`, and after a
    few iterations is reported beside what was measured.
    """
    began = time.monotonic()
    notes: list[str] = []
    begun = Run(run_dir) if resume and run_dir is not None else None
    config = _config_of(recipe, overrides, begun, notes)
    stopping = stopping or Stopping("")
    try:
        device = pick_device(config.policy.device)
    except UserError:
        check(config)  # the message also lists everything else that is missing
        raise
    with joined(device) as world, ExitStack() as stack:
        if not world.is_main:
            emit = silent
        for note in notes:
            emit(Line(note))
        fingerprint = torch.tensor(list(bytes.fromhex(digest_of(config.model_dump(mode="json")))))
        if others := world.differing(fingerprint):
            raise UserError(
                f"ranks {others} were started with another config than rank 0; give all the same recipe and overrides"
            )
        rank = partial(print, f"rank {world.rank}:", file=sys.stderr)
        notify = cautions(emit) if world.is_main else rank
        if (said := apart()) is not None:
            notify(said)
        chosen = (
            stack.enter_context(entered(config, run_dir, resume, notify)) if world.is_main else ""
        )
        directory = Path(world.broadcast_text(str(chosen)))
        done = begun is not None and not accept_changes and world.is_main and is_done(begun, config)
        if world.total(done)[0]:
            iterations = config.trainer.iterations
            longer = ["resume", str(directory), f"trainer.iterations={2 * iterations}"]
            on = shlex.join(["g2rpo", *longer, *plugins.repeated()])
            emit(Line(f" has finished: all {iterations} iterations are done", title=str(directory)))
            emit(Line(f"`{on}` trains on; `{shlex.join(['g2rpo', 'report', str(directory)])}`"))
            return directory if world.is_main else None
        request = Request(
            config=config,
            run_dir=directory,
            resume=resume,
            accept_changes=accept_changes,
            began=began,
            world=world,
            notify=notify,
            emit=emit,
            predict=predict,
        )
        train_built(request, stopping)
        return directory if world.is_main else None


def is_done(run: Run, config: Config) -> bool:
    """Whether a run of just this `config` has finished, and has its weights and its checkpoint."""
    iterations = config.trainer.iterations
    return (
        run.config.is_file()
        and run.finished_at() == iterations == newest_iteration(run.checkpoints)
        and any((weights / CARD).is_file() for weights in (run.adapter, run.transformer))
        and not listed_differences(config, run.read_config())
    )


def _config_of(
    recipe: str | None, overrides: Sequence[str], run: Run | None, notes: list[str]
) -> Config:
    """The config of a recipe or of the `run` that is resumed; what was changed in it is added to
    `notes`. UserError for a reward `pairs` without a path, as a session of `g2rpo teach` has it:
    all its scores are 0."""
    begun = run is not None and run.config.is_file()
    if run is not None and (recipe is None or (begun and recipe == run.read_config().recipe)):
        config = run.read_config(overrides, notes.append, mention=False)
    elif recipe is not None:
        config = read(recipe, overrides, notes.append)
    else:
        raise UserError(
            "name a recipe (`g2rpo recipes` lists them) or a config.yaml; `g2rpo resume RUN` continues a run"
        )
    for name, entry in config.rewards.items():
        if entry.kind == "pairs" and not entry.options.get("path"):
            raise UserError(
                f"rewards.{name}.options.path: names no pairs; the clicks of a session are in RUN/pairs.jsonl. `g2rpo teach RUN` "
                "goes on with a session, and `g2rpo teach RUN/config.yaml --votes RUN/votes.jsonl` repeats it"
            )
    return config


def train_built(request: Request, stopping: Stopping) -> None:
    """Builds a run on one rank, trains it to its end, and compares base and tuned."""
    assert request.run_dir is not None
    directory = request.run_dir
    config, emit, ranks = request.config, request.emit, request.world.size
    on = f" on {ranks} ranks" if ranks > 1 else ""
    rewards = counted(len(config.rewards), "reward")
    building = f"{on}: building the policy, {rewards} and the prompts ..."
    emit(Line(building, title=config.recipe or "training"))
    trainer = build(request)
    if request.resume:
        at = trainer.iteration
        said = f"resuming after iteration {at}" if at else "nothing to resume: it begins"
        if at >= config.trainer.iterations:
            said = f"all {at} iterations are done; base and tuned are compared again"
        emit(Line(said))
    report = shlex.join(["g2rpo", "report", str(directory)])
    emit(Line(f"`{report}` in another terminal tells whether it works, and writes a page"))
    began = time.perf_counter()
    stopping.message = f"stopped at once; {trainer.run.command} goes on from the last checkpoint"
    with stopping.after(partial(setattr, trainer, "stopping", True)):
        train_all(trainer, emit, request.predict)
    done = "all iterations are done"
    stopping.message = (
        f"stopped while base and tuned were compared; {done}, and {trainer.run.command} finishes"
    )
    emit(TrainingEnded(time.perf_counter() - began))
    table = compare_all(trainer, emit)
    own = config.policy.kind is not None
    emit(Results(directory, table, trainer.heldout, list(trainer.rewards), own))


def train_all(trainer: Trainer, emit: Emit, predict: Predict | None = None) -> None:
    """Runs the training, and reports its evaluations of the network, its rows of metrics, and the
    plan that `predict` makes."""
    config = trainer.config

    def evaluations(iterations: int) -> int:
        # as `on_evaluations` counts
        prompts, tails = trainer.own_prompts * trainer.world.size, config.sampling.tails
        own = Counter(
            tuple(trainer.division.by_plan.shard(trainer.plans(each))) for each in range(iterations)
        )
        return sum(
            times * prompts * count_evaluations(plans, config.algorithm.group_size, tails)
            for plans, times in own.items()
        )

    iterations, iteration = config.trainer.iterations, trainer.iteration
    done, total = evaluations(iteration), evaluations(iterations)

    def report(more: int = 0, row: Row | None = None) -> None:
        nonlocal done
        done += more
        emit(TrainingProgress(iteration, iterations, done, total, row))

    report()
    if not iteration:
        heldout = counted(len(trainer.heldout), "held-out prompt")
        emit(Line(f"first the base model draws {heldout}, which are scored ..."))
    trained: list[Row] = []
    trainer.on_evaluations = lambda count: report(count * trainer.world.size)
    for row in trainer.train():
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


def compare_all(trainer: Trainer, emit: Emit) -> dict[str, Comparison]:
    """Compares base and tuned, and reports the evaluations of the network."""

    def report(done: int, total: int) -> None:
        emit(Progress("comparing", "evaluations", done, total))

    return trainer.finish(report)


def beside_plan(
    trainer: Trainer, rows: Sequence[Row], predict: Predict
) -> PlannedAndMeasured | None:
    """The plan beside the training `rows` of this start, which is stored; None without a plan, or
    if it is stored already."""
    if not trainer.run.writes or trainer.run.plan.is_file():
        return None
    found = {"batch_size": trainer.sizes.rollout, "decode_batch_size": trainer.sizes.decode}
    config = trainer.config.changed("sampling", **found)
    planned = predict(config, trainer.world.size, trainer.prompts, trainer.heldout)
    if planned is None:
        return None
    seconds = statistics.median(row["seconds"] for row in rows[1:])
    both = PlannedAndMeasured(
        **asdict(planned), measured_seconds=seconds, measured_memory=rows[-1].get("memory_peak")
    )
    trainer.run.write_plan(both)
    return both
