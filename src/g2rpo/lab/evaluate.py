"""`g2rpo evaluate`: any model, with and without tuned weights, scored by any rewards at several
step counts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from g2rpo.config.resolve import listed_differences, read_yaml, resolve_as
from g2rpo.config.schema import Config
from g2rpo.core import plugins
from g2rpo.core.devices import pick_device
from g2rpo.core.errors import UserError, counted, placed, refuse
from g2rpo.core.events import Emit, Line, Progress, cautions, silent
from g2rpo.core.files import FileDigests, is_empty, local, write_whole
from g2rpo.core.images import digest_of_prompts
from g2rpo.core.plain import Section
from g2rpo.core.stopping import stoppable
from g2rpo.data.prompts import build_prompts
from g2rpo.lab.judging import (
    AGAIN,
    SWEEP_MAY_CHANGE,
    Chunk,
    EvaluationDirectory,
    Judging,
    JudgingConfig,
)
from g2rpo.lab.sample import tune
from g2rpo.models.blueprint import blueprint_of, build_shallow
from g2rpo.models.load import find_pipeline, load_pipeline
from g2rpo.models.pipeline_files import check_weights
from g2rpo.rewards.catalogue import RewardKind, find_rewards
from g2rpo.rollout.guidance import guidance_of, guided_by_hand
from g2rpo.train.checks import check_rewards_alone
from g2rpo.train.consistency import faults_of_clips
from g2rpo.train.contents import of_kind
from g2rpo.train.evaluation.controls import default_controls
from g2rpo.train.persistence import take_stored
from g2rpo.train.run.folder import Run
from g2rpo.train.run.lock import first_usable, held

Held = TypeVar("Held", bound=Section)
EMBEDDED_SIZES = {"testbed": (64, 64, 16), "words": (32, 96, 20)}
"""Height and width of what the embedded models draw, and tokens of their longest prompts."""


def run_settings(run: Path, weights: Path | None = None, base: bool = False) -> dict[str, Any]:
    """Settings that repeat a run's own evaluation, with all its rewards; its weights are the run's
    own, others, or those of the `base`."""
    settings = config_settings(Run(run).read_config())
    for entry in settings["rewards"].values():
        if entry["kind"] == "pairs":  # of `g2rpo teach`: fitted to what was clicked
            entry["options"].setdefault("path", str(Run(run).pairs))
    return settings if base else {**settings, "weights": str(weights or Run(run).weights)}


def config_settings(config: Config) -> dict[str, Any]:
    """The same for the base model of a run of `config`."""
    settings = {
        "policy": config.judged.model_dump(mode="json"),
        "prompts": config.evaluation.prompts,
        "num_prompts": config.evaluation.num_prompts,
        "cache": config.prompts.cache,
        "rewards": {
            name: entry.model_dump(mode="json") for name, entry in config.all_rewards.items()
        },
        "trained": config.trained,
        "steps": [config.judged_steps],
        "shift": config.sampling.shift,
        "seed": config.trainer.seed,
    }
    if config.sampling.batch_size != "auto":
        settings["batch_size"] = config.sampling.batch_size
    return settings


def model_settings(model: str, size: int | None, guidance: float | None) -> dict[str, Any]:
    """Default settings for a pipeline without a run."""
    height, width, length = EMBEDDED_SIZES.get(model, (1024, 1024, None))
    height, width = (height, width) if size is None else (size, size)
    policy = {"path": model, "height": height, "width": width, "guidance_scale": guidance}
    return {"policy": {**policy, "max_sequence_length": length}}


def rewards_named(names: str) -> dict[str, Any]:
    """Rewards from a comma-separated list, or from a YAML file written like a config's
    `rewards:`."""
    if names.endswith((".yaml", ".yml")):
        return read_yaml(Path(names))
    named = [name.strip() for name in names.split(",") if name.strip()]
    if code := next(filter(plugins.is_code, named), None):
        line = f'{code.rpartition(":")[2]}: {{kind: "{code}"}}'
        raise UserError(
            f"--rewards {code}: is code; write {line} in a YAML file, and allow it by --plugin"
        )
    return {name: {} for name in named}


def step_counts(text: str) -> list[int]:
    """[10, 20] of "10,20"."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UserError(
            f"--steps {text}: should be numbers with commas between them, like 10,20,50"
        ) from None


def with_controls(config: JudgingConfig) -> JudgingConfig:
    """The evaluation with the default controls of its model."""
    policy, _ = build_shallow(blueprint_of(find_pipeline(config.policy)), config.policy)
    scale, by_hand = guidance_of(policy), guided_by_hand(policy)
    controls = default_controls(min(config.steps), scale, by_hand)
    return config.model_copy(update={"controls": controls})


def evaluate(
    given: dict[str, Any],
    overrides: Sequence[str],
    out: Path | None,
    controls: bool = False,
    emit: Emit = silent,
) -> Judging:
    """Runs the evaluation of the settings `given` and `overrides` in the folder `out`, or finishes
    one begun there; without `out`, in the first of evaluation, evaluation-2 ... that holds no other.
    `controls` adds the default ones."""
    config = resolve_as(JudgingConfig, given, overrides, "evaluation")
    if controls:
        config = with_controls(config)
    kinds = find_rewards(config.rewards).values()  # cheap checks first
    refuse(fault for kind in kinds for fault in kind.faults())
    refuse(faults_of_clips(kinds, config.policy))
    prompts = build_prompts(config.prompts, "prompts")[: config.num_prompts]
    config = config.model_copy(update={"contents": _contents(config, prompts, kinds)})
    out = out or first_usable("evaluation", partial(_check_folder, config=config))
    _check_folder(out, config)
    judging = Judging(prompts=prompts, config=config, files=EvaluationDirectory(out))
    with held(out, cautions(emit)), stoppable(f"stopped; {AGAIN}"):
        _check_folder(out, config)
        missing = judging.missing()
        if missing:
            _judge(judging, missing, emit)
        judging.write_results()
        for steps in judging.steps:
            judging.save_grid(steps)
    return judging


def _contents(
    config: JudgingConfig, prompts: Sequence[str], kinds: Collection[RewardKind]
) -> dict[str, str]:
    """Digests of prompts, tuned weights, model and the user's code and files of rewards, to detect
    changes before the evaluation is continued."""
    digests = find_pipeline(config.policy).digests()
    contents = {
        "prompts": digest_of_prompts(prompts),
        "model": digests.pop("policy.path"),
        **digests,
        **{f"rewards.{kind.name}": words for kind in kinds if (words := of_kind(kind))},
    }
    if config.weights is not None:
        weights, of = local(config.weights), FileDigests(None)
        check_weights(weights)
        contents["weights"] = (
            of.of(weights) if weights.is_file() else of.of_folders(weights, [weights])
        )
    return contents


def _check_folder(out: Path, config: JudgingConfig) -> None:
    """Refuses a folder that contains anything other than this evaluation."""
    other = held_settings(JudgingConfig, EvaluationDirectory(out).settings, "evaluation")
    if other and (listed := listed_differences(config, other, SWEEP_MAY_CHANGE)):
        raise UserError(
            f"{out} holds an evaluation with other settings:{listed}\nName another --out for this one."
        )


def held_settings(kind: type[Held], path: Path, what: str) -> Held | None:
    """The settings that are in the file `path` of a folder, of an evaluation or a study; None in an
    empty one, UserError in one that holds anything else."""
    if path.is_file():
        return resolve_as(kind, read_yaml(path), source=str(path))
    if not is_empty(path.parent):
        raise UserError(
            f"{path.parent} is not empty and holds no {what} (no {path.name}); name another --out"
        )
    return None


def _judge(judging: Judging, missing: Sequence[Chunk], emit: Emit) -> None:
    """Builds the policy and rewards and evaluates the missing chunks."""
    config, out = judging.config, judging.files.path
    kinds = check_rewards_alone(config.rewards)
    emit(Line(f"building the policy and {counted(len(config.rewards), 'reward')} ..."))
    prompts = (
        prompt
        for chunk in missing
        for prompt in chunk.control.guiding.encoded(judging.prompts[chunk.start : chunk.stop])
    )
    loaded = load_pipeline(config.policy, tuning="frozen")
    loaded.warn_of(judging.prompts, cautions(emit))
    policy = loaded.policy_after_encoding(prompts, config.cache, cautions(emit), emit=emit)
    use_weights = partial(tune, policy, config)
    device = pick_device(config.policy.device)
    rewards = {name: kind.build(device) for name, kind in kinds.items()}
    if config.weights is not None:
        take_stored(rewards, local(config.weights).parent, cautions(emit))
    done = len(judging.chunks()) - len(missing)
    if done:
        emit(Line(f"{done} of {len(judging.chunks())} chunks in {out} are finished already"))

    with placed(f"{out}: cannot be written (", OSError, after="); name another --out"):
        out.mkdir(parents=True, exist_ok=True)
        write_whole(judging.files.settings, config.to_yaml().encode())
    pictures, total = 0, sum(len(chunk.places) for chunk in missing)

    def advance(more: int) -> None:
        nonlocal pictures
        pictures += more
        emit(Progress("judging", "pictures", pictures, total))

    advance(0)
    judging.run(missing, policy, use_weights, rewards, advance)
