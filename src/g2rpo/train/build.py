"""From a request for a run to its trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from g2rpo.config.schema import Config
from g2rpo.core.devices import pick_device
from g2rpo.core.distributed import ALONE, World
from g2rpo.core.errors import UserError, counted
from g2rpo.core.events import Emit, Line, silent
from g2rpo.core.images import check_counts, check_inputs
from g2rpo.core.types import Policy, Reward
from g2rpo.data.prompts import starter_caution, trained_on
from g2rpo.models import load
from g2rpo.models.load import warn_of_prompts
from g2rpo.models.sharding import Replicated, Sharded
from g2rpo.rewards.catalogue import build_rewards, configured, declared_by, reward_kind
from g2rpo.train.ahead import policy_after_encoding, prompts_to_come
from g2rpo.train.checks import check, check_judged_size, check_trained_steps
from g2rpo.train.consistency import rewards_of
from g2rpo.train.contents import contents_of
from g2rpo.train.dry_run import try_own_code
from g2rpo.train.monitor.trackers import build_trackers
from g2rpo.train.ranks import build_sharding, divided
from g2rpo.train.run.checkpoint import newest_iteration
from g2rpo.train.run.folder import Run
from g2rpo.train.trainer import Trainer

FIRST_PROMPTS, SHOWN_TARGETS, SHOWN_LETTERS = 2, 3, 80
"""How many prompts and targets are shown when a run starts, and how many letters of each."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A run that is asked for: by `g2rpo train`, `resume` or `teach`, or from Python.

    `given` has objects in place of what the config names: policy, rewards, judges, prompts,
    heldout, trackers. The caller holds the lock of `run_dir`; without one nothing is written. `began`
    is when its process started, by `time.monotonic`.
    """

    config: Config
    given: Mapping[str, Any] = field(default_factory=dict)
    run_dir: Path | None = None
    resume: bool = False
    accept_changes: bool = False
    began: float = field(default_factory=time.monotonic)
    world: World = ALONE
    notify: Callable[[str], None] = print
    emit: Emit = silent

    @property
    def run(self) -> Run | None:
        """The run's folder."""
        return None if self.run_dir is None else Run(self.run_dir)


def build(request: Request) -> Trainer:
    """The trainer of a request, at the iteration of its newest checkpoint. UserError names
    everything that is missing or wrong before anything is loaded or written."""
    config, given, run, main = request.config, request.given, request.run, request.world.is_main
    check_inputs([*given.get("prompts", ()), *given.get("heldout", ())])
    prompts, heldout = check(config, given, request.run_dir)
    show_prompts(config, given, prompts, heldout, request.emit)
    if request.resume and run is not None and main:
        check_length(config, run)
        changes = run.check_contents(
            contents_of(config, prompts, heldout, given), request.accept_changes
        )
        for change in changes:
            request.notify(f"goes on with {change}")
    trainer = Trainer(config=config, **trainer_parts(request, prompts, heldout))
    if run is None:
        return trainer
    if main:
        run.claim(config)  # only now: wrong input leaves nothing behind
    for complaint in trainer.resume() if request.resume else ():
        request.notify(complaint)
    if main:
        contents = contents_of(config, prompts, trainer.heldout, given)
        run.record_start(trainer.iteration, trainer.policy.device, contents)
    return trainer


def check_length(config: Config, run: Run) -> None:
    """Refuses fewer iterations than a run has made: its config would repeat another run."""
    iterations, done = config.trainer.iterations, newest_iteration(run.checkpoints)
    if iterations < done:
        raise UserError(
            f"trainer.iterations={iterations}: {run.path} has made {done}; trainer.iterations={done} ends it there"
        )


def trainer_parts(
    request: Request,
    prompts: Sequence[str],
    heldout: Sequence[str],
) -> dict[str, Any]:
    """The arguments of the trainer beside its config. Prompts are encoded before policy and rewards
    are on the device."""
    config, given, world = request.config, request.given, request.world
    divided(config, world)
    for said in (
        starter_caution(config.prompts.train, config.evaluation.prompts),
        trained_on(prompts, heldout),
    ):
        if world.is_main and said is not None:
            request.notify(said)
    try_own_code(config, {**given, "prompts": prompts, "heldout": heldout})
    sharding = build_sharding(config, world)
    policy = (
        _given_policy(request)
        if "policy" in given
        else _policy(request, sharding, prompts, heldout)
    )
    check_judged_size(config, policy)
    check_trained_steps(config, policy)
    if (takes := getattr(policy, "input_pictures", None)) is not None:
        check_counts([*prompts, *heldout], takes)
    tables = {"rewards": config.rewards, "judges": config.evaluation.rewards}
    device = pick_device(config.policy.device)
    rewards: dict[str, Mapping[str, Reward]] = {
        key: configured(given[key], table) if key in given else build_rewards(table, device)
        for key, table in tables.items()
    }
    for table in rewards.values():
        for name, reward in table.items():
            if (said := reward.prepare(config.policy.height, config.policy.width)) is not None:
                request.emit(Line(f": {said}", title=f"rewards.{name}"))
    return {
        "policy": policy,
        **rewards,
        "prompts": prompts,
        "heldout": heldout,
        "run_dir": request.run_dir,
        "began": request.began,
        "notify": request.notify,
        "shards": sharding or Replicated(world),
        "trackers": given["trackers"] if "trackers" in given else build_trackers(config.trackers),
    }


def _given_policy(request: Request) -> Policy:
    sharding = request.config.trainer.sharding
    if sharding != "none":
        raise UserError(
            f"trainer.sharding={sharding} divides a policy as it is built; one that is given is whole"
        )
    return request.given["policy"]


def _policy(
    request: Request, sharding: Sharded | None, prompts: Sequence[str], heldout: Sequence[str]
) -> Policy:
    """The policy of the config, once the prompts of the run are encoded."""
    config, world = request.config, request.world
    for said in load.model_cautions(config.policy):
        request.notify(said)
    loaded = load.load_pipeline(
        config.policy, seed=config.trainer.seed, keep_base=config.algorithm.uses_base
    )
    if world.is_main:
        warn_of_prompts(loaded, [*prompts, *heldout], request.notify)
    begun = newest_iteration(request.run.checkpoints) if request.run is not None else 0
    to_come = prompts_to_come(config, prompts, heldout, world, begun)
    return policy_after_encoding(
        loaded,
        config.prompts.cache,
        to_come,
        request.notify,
        sharding,
        request.emit,
    )


def show_prompts(
    config: Config,
    given: Mapping[str, Any],
    prompts: Sequence[str],
    heldout: Sequence[str],
    emit: Emit,
) -> None:
    """Reports the first prompts of each list that the config names, and the texts that rewards look
    for."""
    lists: list[tuple[str, str, str, Sequence[str]]] = []
    if "prompts" not in given:
        lists.append(("training", "prompts.train", config.prompts.train, prompts))
    if "heldout" not in given:
        lists.append(("held-out", "evaluation.prompts", config.evaluation.prompts, heldout))
    for _, key, source, texts in lists:
        first = ", ".join(_short(prompt) for prompt in texts[:FIRST_PROMPTS])
        held = counted(len(texts), "prompt")
        emit(Line(f"={source}: {held}, first {first}", title=key))
    for kind, _, _, texts in lists:
        for name, entry in rewards_of(config, given, heldout=kind == "held-out").items():
            reward = declared_by(reward_kind(name, entry))
            read = _texts_read(reward, texts) if reward.wants else None
            if read is not None:
                emit(Line(f" in {kind} prompts: {read}", title=f"rewards.{name}"))


def _texts_read(reward: type[Reward], prompts: Sequence[str]) -> str | None:
    """How many prompts name no text, and examples of the texts that a reward reads in others; None
    if it reads none."""
    targets = {prompt: reward.target(prompt) for prompt in prompts}
    read = {prompt: text for prompt, text in targets.items() if isinstance(text, str)}
    if not read:
        return None
    absent = sum(targets[prompt] is None for prompt in prompts)
    shown = "; ".join(
        f"{text!r} from {_short(prompt)}" for prompt, text in list(read.items())[:SHOWN_TARGETS]
    )
    none = (
        f"{absent} of {len(prompts)} name no text and get no score"
        if absent
        else f"all {len(prompts)} name a text"
    )
    return f"{none}. Read are {shown}"


def _short(prompt: str) -> str:
    return repr(str(prompt) if len(prompt) <= SHOWN_LETTERS else f"{prompt[:SHOWN_LETTERS]}...")
