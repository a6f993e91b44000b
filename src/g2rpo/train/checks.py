"""Everything that a run needs and lacks, in one message before anything is loaded: what its settings
contradict (`consistency`), and what is not there of models, files, servers and devices."""

from __future__ import annotations

import importlib.util
import inspect
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from g2rpo.config.schema import Config, PolicyConfig, grid_of
from g2rpo.config.work import trained_sigmas_of
from g2rpo.core import plugins
from g2rpo.core.contracts import name_of
from g2rpo.core.devices import pick_device
from g2rpo.core.errors import UserError, loading, placed
from g2rpo.core.files import in_bytes, is_hub_id
from g2rpo.core.http import TooSlow
from g2rpo.data.prompts import build_prompts
from g2rpo.models import attention, hub, load, quantized
from g2rpo.models.blueprint import build_shallow, read_blueprint, trained_on_meta
from g2rpo.models.hub import HubQuestion, answers_of
from g2rpo.models.pipeline_files import missing_parts
from g2rpo.rewards import catalogue
from g2rpo.rewards.catalogue import declared_by, defaults_of, reward_kind
from g2rpo.rewards.options import RewardConfig
from g2rpo.rewards.weights import TOKENIZER_FILES, fetch
from g2rpo.train.consistency import (
    CHECKS,
    Check,
    Wanted,
    refuse_all,
    refuse_listed,
    rewards_of,
    said,
    spec_of,
)
from g2rpo.train.monitor.trackers import check_trackers
from g2rpo.train.run.checkpoint import checkpoints
from g2rpo.train.run.folder import Run

SECONDS = 1.5
"""Seconds for servers to answer. Slower ones are not reported: they may be busy."""
LARGE_TRANSFORMER = 2**28
"""Bytes of a transformer from which on it takes longer to load than to build without weights."""


def check(
    config: Config, given: Mapping[str, Any] | None = None, directory: Path | None = None
) -> tuple[list[str], list[str]]:
    """The prompts to train on and the held-out ones. UserError names everything that is missing or
    wrong. The disk of `directory` must have space for the checkpoints."""
    given = given or {}
    run = Wanted(
        config,
        given,
        directory,
        {name: list(given.get(name, ())) for name in ("prompts", "heldout")},
    )
    for stage in STAGES:
        refuse_all(stage, run)
    return run.lists["prompts"], run.lists["heldout"]


def check_rewards_alone(table: Mapping[str, RewardConfig]) -> None:
    """Of rewards without a run: UserError names all options, libraries, files, servers and devices
    that are missing or wrong."""
    keyed = {f"rewards.{name}": entry for name, entry in table.items()}
    questions: dict[str, HubQuestion] = {}
    refuse_listed(
        [
            *said(catalogue.check_devices, keyed),
            *_faults_of_rewards(keyed, questions),
            *_answered(questions),
        ]
    )


def _device(run: Wanted) -> Iterator[str]:
    yield from lacks_of_device(run.config)


def _quantized(run: Wanted) -> None:
    if "policy" not in run.given:
        check_quantized(run.config)


def _kernel(run: Wanted) -> None:
    policy = run.config.policy
    if "policy" not in run.given:
        attention.check_attention(policy.attention, pick_device(policy.device))


def _trackers(run: Wanted) -> Iterator[str]:
    for name in run.config.trackers if "trackers" not in run.given else ():
        yield from said(check_trackers, [name])


def _options(run: Wanted) -> None:
    """Options of the policy must be the model's, and fit each other."""
    policy = run.config.policy
    if "policy" not in run.given:
        _, name = load.locate_pipeline(policy.path, policy.pipeline, policy.kind)
        load.policy_class(policy, name)


def _pipeline(run: Wanted) -> Iterator[str]:
    """All parts must be there, or be downloadable. A model that takes long to load must take the
    sizes and options."""
    config = run.config.policy
    if "policy" in run.given or (folder := _folder_of(config)) is None:
        return
    missing = "; ".join(missing_parts(folder))
    path, _ = load.locate_pipeline(config.path, config.pipeline, config.kind)
    far = is_hub_id(path) and hub.cached(path, "model_index.json") is not None
    why = hub.obstacle(path, SECONDS) if missing and far else ""
    if missing and why is not None:
        yield f"policy.path={config.path}: {missing}{why and f' ({path} {why})'}"
    elif (
        missing
        or sum(file.stat().st_size for file in (folder / "transformer").glob("*.safetensors"))
        > LARGE_TRANSFORMER
    ):
        policy, _ = build_shallow(read_blueprint(config), config)
        check_judged_size(run.config, policy)
        check_trained_steps(run.config, policy)


def _folder_of(config: PolicyConfig) -> Path | None:
    """The folder of a pipeline that is on this machine; None for a policy of the user's, which may
    not need all parts."""
    path, _ = load.locate_pipeline(config.path, config.pipeline, config.kind)
    index = hub.cached(path, "model_index.json") if is_hub_id(path) else None
    folder = index.parent if index is not None else Path(path)
    return folder if config.kind is None else None


def _read(run: Wanted, far: bool) -> Iterator[str]:
    """Reads local sources or, with `far`, those that may have to be downloaded."""
    for name, (key, source) in run.sources.items():
        if source.startswith("hf:") is not far:
            if not far and importlib.util.find_spec("datasets") is None:
                yield f"{key}={source}: reading datasets needs a library: pip install datasets"
            continue
        try:
            read = build_prompts(source, key)
        except UserError as error:
            yield str(error)
        else:
            run.lists[name] = (
                read[: run.config.evaluation.num_prompts] if name == "heldout" else read
            )


def _devices_of_rewards(run: Wanted) -> None:
    catalogue.check_devices(run.keyed)


def _rewards(run: Wanted) -> Iterator[str]:
    return _faults_of_rewards(run.keyed, run.questions)


def _faults_of_rewards(
    keyed: Mapping[str, RewardConfig], questions: dict[str, HubQuestion]
) -> Iterator[str]:
    for key, entry in keyed.items():
        yield from said(_faults_of_reward, key, entry, questions)


def _faults_of_reward(
    key: str, entry: RewardConfig, questions: dict[str, HubQuestion]
) -> Iterator[str]:
    """Unknown options and missing files of a reward; checks that need a server are added to
    `questions`."""
    name = key.rpartition("rewards.")[2]
    catalogue.check_rewards({name: entry})
    kind = reward_kind(name, entry)
    declared = declared_by(kind)
    if absent := [
        library for library in declared.libraries if importlib.util.find_spec(library) is None
    ]:
        yield f"{key}: needs {' and '.join(absent)}: pip install {' '.join(declared.libraries)}"
        return
    options = {**defaults_of(kind), **entry.options}
    missing = [option for option, value in options.items() if value is inspect.Parameter.empty]
    if missing:
        yield f"{key}.options.{missing[0]} is missing; {entry.kind} cannot do without it"
        return
    with placed(f"{key}.options.", UserError):
        declared.check_options(options)
    if declared.asks:
        questions[key] = partial(_ask_endpoint, kind, entry.options)
    for option, files in declared.files.items():
        if isinstance(place := options.get(option), str) and not plugins.is_code(place):
            _check_files(f"{key}.options.{option}", place, files, questions)


def _check_files(
    key: str, place: str, files: tuple[str, ...], questions: dict[str, HubQuestion]
) -> None:
    """Refuses a local path that contains none of `files`."""
    if is_hub_id(place):
        if hub.cached(place, *files) is None:
            questions[f"{key}={place}"] = partial(_ask_hub, place, files)
        return
    with placed(f"{key}: ", OSError):
        fetch(place, *files)


def _ask_hub(repository: str, files: tuple[str, ...]) -> str | None:
    why = hub.obstacle(repository, SECONDS)
    if why is None:
        return None
    return f"{why}; `{_download(repository, files)}` fetches it, or name a FOLDER that you have"


def _download(repository: str, files: tuple[str, ...]) -> str:
    """The command that fetches a repository; of one that gives a tokenizer alone, not its
    weights."""
    of_words = " --include '*.json' --include '*.txt' --include '*.model'"
    return f"hf download {repository}{of_words if files == TOKENIZER_FILES else ''}"


def _ask_endpoint(kind: Any, options: Mapping[str, Any]) -> str | None:
    """The problem of an endpoint, by the health check that the reward makes when it is built; None
    if there is none."""
    try:
        kind(**{**options, "endpoint": {**options.get("endpoint", {}), "timeout_s": SECONDS}})
    except TooSlow:
        return None
    except (OSError, ValueError, TypeError, UserError) as error:
        return str(error)
    return None


def _answers(run: Wanted) -> Iterator[str]:
    """A run that has not begun may do without what only judges."""
    begun = run.directory is not None and Run(run.directory).config.is_file()
    judges = () if begun else run.config.evaluation.rewards
    return _answered(run.questions, [f"evaluation.rewards.{name}" for name in judges])


def _answered(questions: Mapping[str, HubQuestion], optional: Sequence[str] = ()) -> Iterator[str]:
    """Asks all servers at once; `optional` rewards, by their keys, may be left out."""
    for what, answer in answers_of(questions, SECONDS).items():
        of = [key for key in optional if what == key or what.startswith(f"{key}.options.")]
        without = f"; {of[0]}= leaves this reward out" if of else ""
        yield f"{what}: {answer}{without}"


def _disk(run: Wanted) -> Iterator[str]:
    """There must be space for the kept checkpoints and the next one."""
    config, directory = run.config, run.directory
    folder = None if directory is None or "policy" in run.given else _folder_of(config.policy)
    if directory is None or folder is None or any(missing_parts(folder)):
        return
    copies = max(
        1, config.trainer.keep_checkpoints + 1 - len(checkpoints(Run(directory).checkpoints))
    )
    # the weights, their two moments, their average and old weights, all float32
    tensors = 3 + bool(config.optim.ema_decay) + config.algorithm.uses_old
    _, trained = trained_on_meta(config.policy)
    weights = sum(parameter.numel() for parameter in trained.values())
    needed = 4 * weights * (copies * tensors + 1)  # plus the exported weights
    place = next(
        path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir()
    )
    free = shutil.disk_usage(place).free
    if needed > free:
        remedy = "free some, name another --run-dir, or lower trainer.keep_checkpoints"
        yield f"{directory}: checkpoints and weights take {in_bytes(needed)}, {in_bytes(free)} are free; {remedy}"


def _targets(run: Wanted) -> Iterator[str]:
    """Rewards must be able to score the prompts, such as those that read a text in quotes."""
    for name, (key, source) in run.sources.items():
        for reward, entry in rewards_of(run.config, run.given, name == "heldout").items():
            kind = reward_kind(reward, entry)
            options = {**defaults_of(kind), **entry.options}
            if (
                run.lists[name]
                and (fault := declared_by(kind).fault(options, run.lists[name])) is not None
            ):
                yield f"rewards.{reward}: {fault} ({key}={source})"


def check_input_pictures(run: Wanted) -> None:
    """Prompts must have as many input pictures as the model takes."""
    if "policy" not in run.given and (spec := spec_of(run.config.policy)) is not None:
        for prompt in (*run.lists["prompts"], *run.lists["heldout"]):
            spec.check_pictures(prompt)


STAGES: Sequence[Sequence[Check]] = (
    (
        _device,
        *CHECKS,
        _quantized,
        _kernel,
        _trackers,
        _options,
        _pipeline,
        partial(_read, far=False),
        _devices_of_rewards,
        _rewards,
        _answers,
        _disk,
    ),
    (partial(_read, far=True),),  # only if nothing else is missing
    (_targets, check_input_pictures),
)
"""The checks in their order; all of a stage are made before any complaint is raised."""


def check_quantized(config: Config) -> None:
    """Refuses a `policy.quantize` that the run does not support."""
    policy = config.policy
    quantized.check_quantization(policy.quantize, policy.tuning)
    if policy.tuning == "full" and not policy.autocast:
        raise UserError(
            "policy.autocast=false: weights that are trained are float32, and need it; set policy.tuning=lora"
        )


def check_judged_size(config: Config, policy: Any) -> None:
    """Refuses a size of judged pictures that the policy cannot make."""
    if (size := config.judged_size) is None:
        return
    policy = getattr(policy, "policy", policy)  # of a CachedPolicy
    if not hasattr(policy, "sized"):
        raise UserError(
            f"evaluation.height, evaluation.width: a {type(policy).__name__} has one size; take them out"
        )
    with loading("evaluation.height, evaluation.width"):
        policy.check_size(*size)


def check_trained_steps(config: Config, policy: Any) -> None:
    """Refuses an algorithm that trains where a policy's trained weights do not act."""
    policy = getattr(policy, "policy", policy)  # of a CachedPolicy
    if getattr(policy, "trains_everywhere", True):
        return
    algorithm, steps = config.algorithm, config.sampling.num_steps
    sigmas = grid_of(config.sampling.shift, policy, steps)
    own = [step for step in range(steps) if policy.trains_at(float(sigmas[step]))]
    if wrong := [
        sigma for sigma in trained_sigmas_of(config, sigmas) if not policy.trains_at(sigma)
    ]:
        raise UserError(
            f"{name_of(algorithm)} trains at sigma {wrong[0]:.3f}, where the trained weights do not act (policy.lora_above="
            f"{policy.options.lora_above:g}); they do at steps {own} of {steps}. Change "
            "algorithm.branch_steps or its like, sampling.shift or policy.lora_above"
        )


def lacks_of_device(config: Config) -> Iterator[str]:
    """What the config asks and its device lacks; UserError for a device that is not here."""
    policy = config.policy
    if torch.device(pick_device(policy.device)).type != "mps":
        return
    if policy.dtype != "float32" and policy.autocast:
        yield "policy.device=mps: autocast is not supported there; set policy.dtype=float32, or policy.autocast=false for LoRA"
    for key, value, plain in (
        ("policy.quantize", policy.quantize, "none"),
        ("policy.compile", policy.compile, False),
        ("trainer.sharding", config.trainer.sharding, "none"),
    ):
        if value != plain:
            yield f"policy.device=mps: {key}={str(value).lower()} is not supported there; take it out"
