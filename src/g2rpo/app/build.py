"""The trainer of a config: its policy, rewards and prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from g2rpo.app.ahead import of_controls, policy_after_encoding, prompts_to_come
from g2rpo.app.dry_run import try_own_code
from g2rpo.app.events import Emit, silent
from g2rpo.app.preflight import check
from g2rpo.assembly import components
from g2rpo.assembly.prompts import caution as prompts_caution
from g2rpo.assembly.prompts import trained_on
from g2rpo.assembly.rewards import build_rewards, configured
from g2rpo.config.schema import Config, RewardConfig
from g2rpo.core.errors import UserError
from g2rpo.core.input_pictures import check_counts, check_inputs
from g2rpo.core.types import Reward
from g2rpo.monitor.trackers import build_trackers
from g2rpo.runs.directory import RunDirectory
from g2rpo.runtime.distributed import ALONE, World
from g2rpo.runtime.sharding import Replicated
from g2rpo.training.checkpoint import newest_iteration
from g2rpo.training.pilots import pilot_config, pilot_prompts
from g2rpo.training.ranks import divided
from g2rpo.training.trainer import Trainer


def build_trainer(
    config: Config,
    run_dir: Path | None,
    notify: Callable[[str], None] = print,
    world: World = ALONE,
    given: Mapping[str, Any] | None = None,
    emit: Emit = silent,
) -> Trainer:
    """A trainer with the policy, rewards and prompts of `config`, or with the objects in `given`.

    Prompts are encoded before policy and rewards are on the device, with progress by `emit`. `notify(message)` is called for
    problems with the embedding cache, batch sizes and trackers. `given` may have the keys listed in `preflight.check`.
    """
    given = given or {}
    prompts, heldout = check(config, given, emit=emit)
    check_inputs([*given.get("prompts", ()), *given.get("heldout", ())])
    return Trainer(**checked_parts(config, run_dir, notify, world, {"prompts": prompts, "heldout": heldout, **given}, emit))


def checked_parts(
    config: Config,
    run_dir: Path | None,
    notify: Callable[[str], None],
    world: World,
    given: Mapping[str, Any],
    emit: Emit,
    pilots: bool = False,
) -> dict[str, Any]:
    """The arguments of the trainer of a config that `preflight.check` has passed; `given` has the prompts. The prompts of
    `pilots` are encoded with the others."""
    divided(config, world)
    prompts, heldout = given["prompts"], given["heldout"]
    if "policy" in given and config.trainer.sharding != "none":
        raise UserError(
            f"trainer.sharding={config.trainer.sharding} divides a policy as it is built; one that is given is whole"
        )
    for caution in (prompts_caution(config.prompts.train, config.evaluation.prompts), trained_on(prompts, heldout)):
        if world.is_main and caution is not None:
            notify(caution)
    try_own_code(config, given)
    sharding = components.build_sharding(config, world)
    if "policy" in given:
        policy = given["policy"]
    else:
        components.check_prompts(config.policy, [*prompts, *heldout])
        components.check_guidance(config)
        for caution in components.cautions(config.policy):
            notify(caution)
        loaded = components.load_pipeline(config.policy, seed=config.trainer.seed, keep_base=config.algorithm.uses_base)
        begun = newest_iteration(RunDirectory(run_dir).checkpoints) if run_dir is not None else 0
        to_come = prompts_to_come(config, prompts, heldout, world, begun)
        if pilots:
            to_come += prompts_to_come(pilot_config(config, 1.0), prompts, pilot_prompts(config, prompts), world)
        to_come += of_controls(config, loaded, heldout)
        policy = policy_after_encoding(loaded, config.prompts.cache, to_come, notify, sharding, emit)
    components.check_judged_size(config, policy)
    components.check_trained_steps(config, policy)
    if (takes := getattr(policy, "input_pictures", None)) is not None:
        check_counts([*prompts, *heldout], takes)
    device = components.pick_device(config.policy.device)

    def rewards_of(key: str, table: Mapping[str, RewardConfig]) -> dict[str, Reward]:
        return configured(given[key], table) if key in given else build_rewards(table, device)

    return {
        "config": config,
        "policy": policy,
        "rewards": rewards_of("rewards", config.rewards),
        "prompts": prompts,
        "heldout": heldout,
        "judges": rewards_of("judges", config.evaluation.rewards),
        "run_dir": run_dir,
        "notify": notify,
        "shards": sharding or Replicated(world),
        "trackers": given["trackers"] if "trackers" in given else build_trackers(config.trackers),
    }
