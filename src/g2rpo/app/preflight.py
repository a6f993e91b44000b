"""Reports everything that a run needs and lacks in one message, before anything is loaded."""

from __future__ import annotations

import importlib.util
import inspect
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from g2rpo.app.events import Emit, Line, silent
from g2rpo.app.pipeline_folder import trained_parameters
from g2rpo.assembly import components, hub
from g2rpo.assembly.blueprint import build_shallow, read_blueprint
from g2rpo.assembly.hub import Question, at_once
from g2rpo.assembly.pipeline_files import missing_parts
from g2rpo.assembly.prompts import build_prompts
from g2rpo.assembly.rewards import check_clips, check_devices, check_rewards, declared_by, defaults_of, reward_kind
from g2rpo.config.given import Mentioned
from g2rpo.config.schema import Config, RewardConfig
from g2rpo.core import plugins
from g2rpo.core.capabilities import (
    AsksServer,
    ChecksOptions,
    ReadsTargets,
    TakesOneSize,
    differentiates_rewards,
    fault_of,
    keeps_old,
)
from g2rpo.core.errors import UserError, counted
from g2rpo.core.files import in_bytes, is_hub_id
from g2rpo.core.types import as_rewards
from g2rpo.monitor.trackers import check_trackers
from g2rpo.rewards.transport import TooSlow
from g2rpo.rewards.weights import fetch
from g2rpo.runs.directory import RunDirectory
from g2rpo.training.checkpoint import checkpoints
from g2rpo.training.updater import check_differentiable, check_groups

SECONDS = 1.5
"""Seconds for servers to answer. Slower ones are not reported: they may be busy."""
LARGE = 2**28
"""Bytes of a transformer from which on it takes longer to load than to build without weights."""
FIRST_PROMPTS, SHOWN_TARGETS, SHOWN_LETTERS = 2, 3, 80
"""How many prompts and targets are shown when a run starts, and how many letters of each."""


def check(
    config: Config, given: Collection[str] = (), directory: Path | None = None, emit: Emit = silent
) -> tuple[list[str], list[str]]:
    """The prompts to train on and the held-out ones. UserError names everything that is missing or wrong.

    `emit` gets the first prompts of each list, and what rewards read in them.

    Objects in `given` (policy, rewards, judges, prompts, heldout, trackers) are not checked. If the run's `directory` is given,
    its disk must have space for the checkpoints.
    """
    findings = _Findings()
    _check_settings(findings, config, given)
    folder = None if "policy" in given else findings.tried(_check_pipeline, config)
    prompts = _Prompts(config, given)
    prompts.read(findings, far=False)
    findings.tried(check_devices, _keyed_rewards(config, given))
    for key, entry in _keyed_rewards(config, given).items():
        findings.tried(_check_reward, key, entry, findings.questions)
    findings.ask()
    if folder is not None and directory is not None:
        findings.tried(_check_room, config, folder, directory)
    findings.refuse()
    prompts.read(findings, far=True)
    findings.refuse()
    prompts.check_targets(findings, config, given)
    findings.refuse()
    prompts.show(config, given, emit)
    return prompts.train, prompts.heldout


@dataclass
class _Findings:
    """Problems found, and questions to servers that are still to be asked, by subject."""

    errors: list[UserError] = field(default_factory=list)
    questions: dict[str, Question] = field(default_factory=dict)

    def tried(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The result of `call`; None, and a problem, if it raises UserError."""
        try:
            return call(*arguments)
        except UserError as error:
            if str(error) not in map(str, self.errors):
                self.errors.append(error)

    def add(self, message: str) -> None:
        self.errors.append(UserError(message))

    def ask(self) -> None:
        """Asks all open questions."""
        for what, answer in at_once(self.questions, SECONDS).items():
            self.add(f"{what}: {answer}")

    def refuse(self) -> None:
        """Raises UserError if anything is wrong: the only one, or a list."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            lines = ["- " + str(error).replace("\n", "\n  ") for error in self.errors]
            fetch = dict.fromkeys(re.findall(r"`(hf download [^` ]+)", "\n".join(lines)))
            if len(fetch) > 1:
                lines += [
                    "To download all of it (`g2rpo plan` estimates its size; `hf auth login` first for gated models):",
                    *fetch,
                ]
            raise UserError("\n".join([f"{len(self.errors)} things are missing or wrong:", *lines]))


class _Prompts:
    """The lists of prompts that are not in `given`."""

    def __init__(self, config: Config, given: Collection[str]) -> None:
        self.train: list[str] = []
        self.heldout: list[str] = []
        self.most = config.evaluation.num_prompts
        self.sources = {"prompts": ("prompts.train", config.prompts.train)}
        self.sources["heldout"] = ("evaluation.prompts", config.evaluation.prompts)
        self.sources = {name: source for name, source in self.sources.items() if name not in given}

    def read(self, findings: _Findings, far: bool) -> None:
        """Reads local sources or, with `far`, those that may have to be downloaded (only if nothing else is missing)."""
        for name, (key, source) in self.sources.items():
            if source.startswith("hf:") is not far:
                if not far and importlib.util.find_spec("datasets") is None:
                    findings.add(f"{key}={source}: reading datasets needs a library: pip install datasets")
                continue
            read = findings.tried(build_prompts, source, key) or []
            if name == "prompts":
                self.train = read
            else:
                self.heldout = read[: self.most]

    def show(self, config: Config, given: Collection[str], emit: Emit) -> None:
        """Reports the first prompts of each list, and the texts that rewards look for."""
        for name, (key, source) in self.sources.items():
            prompts = self._of(name)
            first = ", ".join(_short(prompt) for prompt in prompts[:FIRST_PROMPTS])
            emit(Line(f"={source}: {counted(len(prompts), 'prompt')}, first {first}", title=key))
        for name in self.sources:
            for reward, kind, _ in self._scored_by(name, config, given):
                if (texts := _texts_read(kind, self._of(name))) is not None:
                    kinds = "training" if name == "prompts" else "held-out"
                    emit(Line(f" in {kinds} prompts: {texts}", title=f"rewards.{reward}"))

    def check_targets(self, findings: _Findings, config: Config, given: Collection[str]) -> None:
        """Refuses rewards for prompts that they cannot score, such as those without a text in quotes."""
        for name, (key, source) in self.sources.items():
            texts = self._of(name)
            for reward, kind, options in self._scored_by(name, config, given):
                if texts and (fault := fault_of(declared_by(kind), options, texts)) is not None:
                    findings.add(f"rewards.{reward}: {fault} ({key}={source})")

    def _of(self, name: str) -> list[str]:
        return self.train if name == "prompts" else self.heldout

    def _scored_by(self, name: str, config: Config, given: Collection[str]) -> list[tuple[str, Any, dict[str, Any]]]:
        """Name, kind and options of the rewards of these prompts; training prompts are not judged by held-out rewards."""
        rewards = _rewards(config, {*given, "judges"} if name == "prompts" else given)
        kinds = {reward: reward_kind(reward, entry) for reward, entry in rewards.items()}
        return [(reward, kind, {**defaults_of(kind), **rewards[reward].options}) for reward, kind in kinds.items()]


def _texts_read(kind: Any, prompts: Sequence[str]) -> str | None:
    """How many prompts name no text, and examples of the texts that `kind` reads in others; None if it reads none."""
    if not isinstance(reads := declared_by(kind), ReadsTargets):
        return None
    targets = {prompt: reads.target(prompt) for prompt in prompts}
    read = {prompt: target for prompt, target in targets.items() if isinstance(target, str)}
    if not read:
        return None
    absent = sum(targets[prompt] is None for prompt in prompts)
    shown = "; ".join(f"{target!r} from {_short(prompt)}" for prompt, target in list(read.items())[:SHOWN_TARGETS])
    none = f"{absent} of {len(prompts)} name no text and get no score" if absent else f"all {len(prompts)} name a text"
    return f"{none}. Read are {shown}"


def _short(prompt: str) -> str:
    return repr(str(prompt) if len(prompt) <= SHOWN_LETTERS else f"{prompt[:SHOWN_LETTERS]}...")


def _rewards(config: Config, given: Collection[str]) -> dict[str, RewardConfig]:
    """All rewards of a config, trained and held-out."""
    return {key.rpartition(".")[2]: entry for key, entry in _keyed_rewards(config, given).items()}


def _keyed_rewards(config: Config, given: Collection[str]) -> dict[str, RewardConfig]:
    """The same by their keys in the config."""
    keyed = {"rewards": ("rewards", config.rewards), "judges": ("evaluation.rewards", config.evaluation.rewards)}
    tables = [keyed[kind] for kind in keyed if kind not in given]
    return {f"{key}.{name}": entry for key, table in tables for name, entry in table.items()}


def _check_settings(findings: _Findings, config: Config, given: Collection[str]) -> None:
    """Checks settings of the config, alone and against this machine."""
    findings.tried(components.pick_device, config.policy.device)
    for name in sorted(set(config.rewards) & set(config.evaluation.rewards)):
        findings.add(f"evaluation.rewards.{name}: a trained reward has this name already; it is judged anyway")
    if not config.rewards:
        findings.add("rewards: is empty; name at least one, for example rewards.scene_accuracy=1")
    elif not any(entry.weight for entry in config.rewards.values()):
        findings.add(f"rewards: every weight is 0, so nothing is learned; set one, for example rewards.{min(config.rewards)}=1")
    findings.tried(components.check_plans, config.algorithm, config.sampling)
    if not isinstance(config.algorithm, Mentioned):
        findings.tried(_check_comparisons, config, given)
        if "rewards" not in given and differentiates_rewards(config.algorithm):
            findings.tried(_check_gradients, config)
    if "policy" not in given:
        findings.tried(_check_sides, config, given)
        findings.tried(check_clips, _rewards(config, given), config.policy)
        findings.tried(components.check_quantized, config)
        findings.tried(components.check_attention, config.policy)
    for name in config.trackers if "trackers" not in given else ():
        findings.tried(check_trackers, [name])


def _check_gradients(config: Config) -> None:
    """Refuses rewards without the gradient that the algorithm learns from."""
    check_differentiable(config.algorithm, as_rewards({name: reward_kind(name, it) for name, it in config.rewards.items()}))


def _check_comparisons(config: Config, given: Collection[str]) -> None:
    """Refuses rewards that compare the pictures of a group where there are none."""
    kinds = {name: reward_kind(name, entry) for name, entry in _rewards(config, given).items()}
    known = {name: kind for name, kind in kinds.items() if declared_by(kind) is kind}
    check_groups(config.algorithm, known, config.policy.tuning, config.trainer.sharding)


def _check_sides(config: Config, given: Collection[str]) -> None:
    """Refuses rewards that take pictures of one size where the run's, or the held-out ones, have another."""
    for name, entry in _rewards(config, given).items():
        kind = declared_by(reward_kind(name, entry))
        side = kind.side if isinstance(kind, TakesOneSize) else None
        for size in (config.judged, *([config.policy] if name in config.rewards else [])):
            if side is not None and (size.height, size.width) != (side, side):
                made = f"here they have {size.height}x{size.width}"
                raise UserError(f"rewards.{name}: {entry.kind} takes pictures of {side}x{side}, and {made}; take it out")


def _check_pipeline(run: Config) -> Path | None:
    """The folder of a pipeline that is on this machine. UserError if a part of it is missing and cannot be downloaded, or if a
    model that takes long to load refuses a size or an option."""
    config = run.policy
    path, _ = components.locate_pipeline(config.path, config.pipeline, config.kind)
    index = hub.cached(path, "model_index.json") if is_hub_id(path) else None
    folder = index.parent if index else Path(path)
    if config.kind is not None:
        return None  # a user's policy may not need all components
    missing = "; ".join(missing_parts(folder))
    why = hub.obstacle(path, SECONDS) if missing and index else ""
    if missing and why is not None:
        raise UserError(f"policy.path={config.path}: {missing}{why and f' ({path} {why})'}")
    if missing or sum(file.stat().st_size for file in (folder / "transformer").glob("*.safetensors")) > LARGE:
        components.check_trained_steps(run, build_shallow(read_blueprint(config), config)[0])
    return None if missing else folder


def _check_reward(key: str, entry: RewardConfig, questions: dict[str, Question]) -> None:
    """Refuses unknown options and missing files of a reward; checks that need a server are added to `questions`."""
    name = key.rpartition("rewards.")[2]
    check_rewards({name: entry})
    kind = reward_kind(name, entry)
    declared = declared_by(kind)
    if absent := [library for library in declared.libraries if importlib.util.find_spec(library) is None]:
        raise UserError(f"{key}: needs {' and '.join(absent)}: pip install {' '.join(declared.libraries)}")
    options = {**defaults_of(kind), **entry.options}
    for option, value in options.items():
        if value is inspect.Parameter.empty:
            raise UserError(f"{key}.options.{option} is missing; {entry.kind} cannot do without it")
    try:
        if isinstance(declared, ChecksOptions):
            declared.check_options(options)
    except UserError as error:
        raise UserError(f"{key}.options.{error}") from None
    if isinstance(declared, AsksServer) and declared.asks:
        questions[key] = partial(_ask_endpoint, kind, entry.options)
    for option, files in declared.files.items():
        if isinstance(place := options.get(option), str) and not plugins.is_code(place):
            _check_files(f"{key}.options.{option}", place, files, questions)


def _check_files(key: str, place: str, files: tuple[str, ...], questions: dict[str, Question]) -> None:
    """Refuses a local path that contains none of `files`."""
    if is_hub_id(place):
        if hub.cached(place, *files) is None:
            questions[f"{key}={place}"] = partial(_ask_hub, place)
        return
    try:
        fetch(place, *files)
    except OSError as error:
        raise UserError(f"{key}: {error}") from None


def _ask_hub(repository: str) -> str | None:
    why = hub.obstacle(repository, SECONDS)
    return why and f"{why}; `hf download {repository}` fetches it, or name a FOLDER that you have"


def _ask_endpoint(kind: Any, options: Mapping[str, Any]) -> str | None:
    """The problem of an endpoint, by the health check that the reward makes when it is built; None if there is none."""
    try:
        kind(**{**options, "timeout_s": SECONDS})
    except TooSlow:
        return None
    except (OSError, ValueError, TypeError) as error:
        return str(error)
    return None


def _check_room(config: Config, pipeline: Path, directory: Path) -> None:
    """Refuses a disk without space for the kept checkpoints and the next one."""
    copies = max(1, config.trainer.keep_checkpoints + 1 - len(checkpoints(RunDirectory(directory).checkpoints)))
    # the weights, their two moments, their average and old weights, all float32
    tensors = 3 + bool(config.optim.ema_decay) + keeps_old(config.algorithm)
    needed = 4 * trained_parameters(config.policy, pipeline) * (copies * tensors + 1)  # plus the exported weights
    place = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        remedy = "free some, name another --run-dir, or lower trainer.keep_checkpoints"
        raise UserError(f"{directory}: checkpoints and weights take {in_bytes(needed)}, {in_bytes(free)} are free; {remedy}")
