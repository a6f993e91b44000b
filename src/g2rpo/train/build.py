"""From a request for a run to its trainer: find, check, build, resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from g2rpo.config.schema import Config
from g2rpo.core.devices import pick_device
from g2rpo.core.distributed import ALONE, World
from g2rpo.core.errors import UserError, counted, cut
from g2rpo.core.events import Emit, Line, silent
from g2rpo.core.images import check_counts, check_inputs
from g2rpo.core.objectives import updates_once
from g2rpo.core.rewards import Reward, Scorer
from g2rpo.core.types import Policy
from g2rpo.data.prompts import starter_caution, trained_on
from g2rpo.models.sharding import Replicated, Sharded
from g2rpo.rewards.catalogue import RewardConfig, RewardKind, with_frames
from g2rpo.train.checks import check, check_policy
from g2rpo.train.contents import contents_of
from g2rpo.train.found import NOTHING, Found, Given
from g2rpo.train.monitor.trackers import build_trackers
from g2rpo.train.ranks import build_sharding, prompts_to_come
from g2rpo.train.run.checkpoint import newest_iteration
from g2rpo.train.run.folder import Run
from g2rpo.train.trainer import Trainer

FIRST_PROMPTS, SHOWN_TARGETS, SHOWN_LETTERS = 2, 3, 80
"""How many prompts and targets are shown when a run starts, and how many letters of each."""


@dataclass(frozen=True)
class Planned:
    """Seconds of an iteration, on average, bytes at the peak, and seconds of compiling (0: as it
    is), on a card by its datasheet."""

    card: str
    seconds: float
    memory: int
    compiling: float = 0.0


Predict = Callable[[Config, int, Sequence[str], Sequence[str]], Planned | None]
"""The plan of a run of a config on so many ranks, with its training and held-out prompts, on this
machine's device; None if there is none, as for a CPU; UserError if it could not be made."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A run that is asked for: by `g2rpo train`, `resume` or `teach`, or from Python.

    The caller holds the lock of `run_dir`; without one nothing is written. `began` is when its
    process started, by `time.monotonic`.
    """

    config: Config
    given: Given = NOTHING
    run_dir: Path | None = None
    resume: bool = False
    accept_changes: bool = False
    began: float = field(default_factory=time.monotonic)
    world: World = ALONE
    notify: Callable[[str], None] = print
    emit: Emit = silent
    predict: Predict | None = None


def build(request: Request) -> Trainer:
    """The trainer of a request, at the iteration of its newest checkpoint. UserError names
    everything that is missing or wrong before anything is loaded or written."""
    given, run, main = request.given, Run(request.run_dir), request.world.is_main
    check_inputs([*(given.prompts or ()), *(given.heldout or ())])
    found = check(request.config, given, request.run_dir, request.world)
    show_prompts(found, request.emit)
    contents = contents_of(found) if main and request.run_dir is not None else {}
    if request.resume and main:
        run.check_length(request.config)
        for change in run.check_contents(contents, request.accept_changes):
            request.notify(f"goes on with {change}")
    trainer = trainer_of(found, request)
    if request.run_dir is None:
        return trainer
    if main:
        run.claim(request.config)  # only now: wrong input leaves nothing behind
    for complaint in trainer.resume() if request.resume else ():
        request.notify(complaint)
    if main:
        run.record_start(trainer.iteration, trainer.policy.device, contents)
    return trainer


def trainer_of(found: Found, request: Request) -> Trainer:
    """The trainer of what was found. Prompts are encoded before policy and rewards are on the
    device."""
    config, given, world = found.config, found.given, request.world
    if world.is_main:
        source = starter_caution(config.prompts.train, config.evaluation.prompts)
        for said in (source, trained_on(found.prompts, found.heldout)):
            if said is not None:
                request.notify(said)
    sharding = build_sharding(config, world)
    policy = given.policy
    if policy is None:
        policy = built_policy(found, request, sharding)
    check_policy(config, policy)
    if (takes := getattr(policy, "input_pictures", None)) is not None:
        check_counts([*found.prompts, *found.heldout], takes)
    rewards = built_rewards(given.rewards, found.rewards, config.rewards, request)
    judges = built_rewards(given.judges, found.judges, config.evaluation.rewards, request)
    trackers = build_trackers(config.trackers) if given.trackers is None else given.trackers
    return Trainer(
        config=config,
        policy=policy,
        rewards=rewards,
        judges=judges,
        prompts=found.prompts,
        heldout=found.heldout,
        run_dir=request.run_dir,
        trackers=trackers,
        shards=sharding or Replicated(world),
        began=request.began,
        notify=request.notify,
    )


def built_policy(found: Found, request: Request, sharding: Sharded | None) -> Policy:
    """The policy of the config, once the prompts of the run are encoded."""
    config, world, notify = found.config, request.world, request.notify
    pipeline = found.pipeline
    assert pipeline is not None  # else it was refused
    if (caution := pipeline.caution()) is not None:
        notify(caution)
    if config.policy.compile == "auto":
        compiled = bool(world.total(world.is_main and pays_to_compile(found, request))[0])
        pipeline = replace(
            pipeline, options=pipeline.options.model_copy(update={"compile": compiled})
        )
    loaded = pipeline.load(seed=config.trainer.seed, keep_base=config.algorithm.uses_base)
    if world.is_main:
        loaded.warn_of([*found.prompts, *found.heldout], notify)
    run = request.run_dir
    begun = 0 if run is None else newest_iteration(Run(run).checkpoints)
    to_come = prompts_to_come(config, found.prompts, found.heldout, world, begun)
    cache, emit = config.prompts.cache, request.emit
    return loaded.policy_after_encoding(to_come, cache, notify, sharding, emit)


def why_not_compiled(config: Config) -> str | None:
    """Why `policy.compile=auto` leaves a run as it is, whatever compiling would save."""
    if config.policy.offload or config.trainer.sharding != "none":
        return "weights come and go"
    if not updates_once(config.algorithm):
        return "a rollout has several updates, whose ratios other rounding in rollouts would move"
    return None


def pays_to_compile(found: Found, request: Request) -> bool:
    """Whether by plan `policy.compile=auto` compiles, which a line says on a GPU."""
    config, asked = found.config, "policy.compile=auto"
    if torch.device(pick_device(config.policy.device)).type != "cuda":
        return False
    if (why := why_not_compiled(config)) is None and request.predict is not None:
        try:
            plan = request.predict(config, request.world.size, found.prompts, found.heldout)
        except UserError as error:
            why = str(error)
        else:
            if plan is not None and plan.compiling:
                request.notify(f"{asked}: blocks are compiled, in {plan.compiling:.0f} s by plan")
                return True
            if plan is not None:
                why = "by plan it would not save twice what it takes"
    request.notify(f"{asked}: blocks run as they are: {why or 'there is no plan'}")
    return False


def built_rewards(
    given: Mapping[str, Scorer] | None,
    kinds: Mapping[str, RewardKind],
    table: Mapping[str, RewardConfig],
    request: Request,
) -> dict[str, Reward]:
    """The given rewards with the frames of their entries in `table`, or those of the `kinds`."""
    policy = request.config.policy
    device = pick_device(policy.device)
    if given is None:
        rewards = {name: kind.build(device) for name, kind in kinds.items()}
    else:
        rewards = {name: with_frames(name, given[name], table.get(name)) for name in given}
    for name, reward in rewards.items():
        if (said := reward.prepare(policy.height, policy.width)) is not None:
            request.emit(Line(f": {said}", title=f"rewards.{name}"))
    return rewards


def show_prompts(found: Found, emit: Emit) -> None:
    """Reports the first prompts of each list that the config names, and the texts that rewards look
    for."""
    for key, source, prompts, _ in found.lists():
        first = ", ".join(repr(cut(str(each), SHOWN_LETTERS)) for each in prompts[:FIRST_PROMPTS])
        held = counted(len(prompts), "prompt")
        emit(Line(f"={source}: {held}, first {first}", title=key))
    for key, _, prompts, kinds in found.lists():
        which = "training" if key == "prompts.train" else "held-out"
        for kind in kinds:
            read = _texts_read(kind.declared, prompts) if kind.declared.wants else None
            if read is not None:
                emit(Line(f" in {which} prompts: {read}", title=f"rewards.{kind.name}"))


def _texts_read(reward: type[Reward], prompts: Sequence[str]) -> str | None:
    """How many prompts name no text, and examples of the texts that a reward reads in others; None
    if it reads none."""
    targets = {prompt: reward.target(prompt) for prompt in prompts}
    read = {prompt: text for prompt, text in targets.items() if isinstance(text, str)}
    if not read:
        return None
    shown = "; ".join(
        f"{text!r} from {cut(str(prompt), SHOWN_LETTERS)!r}"
        for prompt, text in list(read.items())[:SHOWN_TARGETS]
    )
    none = f"all {len(prompts)} name a text"
    if absent := sum(targets[prompt] is None for prompt in prompts):
        none = f"{absent} of {len(prompts)} name no text and get no score"
    return f"{none}. Read are {shown}"
