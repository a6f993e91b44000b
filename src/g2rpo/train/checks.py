"""Everything that a run needs and lacks, in one message before anything is loaded: what its settings
contradict (`consistency`), and what is not there of models, files, servers and devices."""

from __future__ import annotations

import importlib.util
import inspect
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from g2rpo.config.schema import Config, grid_of
from g2rpo.config.work import trained_sigmas_of
from g2rpo.core import plugins
from g2rpo.core.contracts import name_of
from g2rpo.core.devices import accelerator, pick_device
from g2rpo.core.distributed import ALONE, World
from g2rpo.core.errors import UserError, loading, placed
from g2rpo.core.files import in_bytes, is_hub_id
from g2rpo.core.http import TooSlow
from g2rpo.data.prompts import build_prompts
from g2rpo.models import hub
from g2rpo.models.blueprint import blueprint_of, build_shallow, trained_on_meta
from g2rpo.models.load import faults_of_options
from g2rpo.models.offload import faults_of_places, offloads
from g2rpo.rewards.catalogue import RewardConfig, RewardKind, faults_of_devices
from g2rpo.rewards.weights import TOKENIZER_FILES, fetch
from g2rpo.train.consistency import SETTINGS, Check, complaints_of, refuse_all, refuse_listed
from g2rpo.train.dry_run import tried
from g2rpo.train.found import NOTHING, Found, Given, Question, find, rewards_in
from g2rpo.train.monitor.trackers import faults_of_tracker
from g2rpo.train.ranks import divided, faults_of_sharding, ranks_of_node
from g2rpo.train.run.checkpoint import checkpoints
from g2rpo.train.run.folder import Run

ANSWER_S = 1.5
"""Seconds for servers to answer. Slower ones are not reported: they may be busy."""
LARGE_TRANSFORMER = 2**28
"""Bytes of a transformer from which on it takes longer to load than to build without weights."""


def refuse_run(found: Found) -> None:
    """UserError names everything that is missing or wrong. Prompts are read meanwhile."""
    # other checks ask the algorithm, which is refused
    absent = isinstance(found.config.algorithm, plugins.Mentioned)
    for checks in (SETTINGS,) if absent else CHECKS:
        refuse_all(checks, found)


def check(
    config: Config, given: Given = NOTHING, directory: Path | None = None, world: World = ALONE
) -> Found:
    """The values of all names of a config, checked as for a run in `directory` on these ranks."""
    found = find(config, given, directory, world)
    refuse_run(found)
    return found


def check_rewards_alone(table: Mapping[str, RewardConfig]) -> dict[str, RewardKind]:
    """Of rewards without a run: UserError names all options, libraries, files, servers and devices
    that are missing or wrong."""
    faults, questions = list[str](), dict[str, Question]()
    found = rewards_in("rewards", table, faults)
    kinds = found.values()
    refuse_listed(
        [
            *faults,
            *complaints_of(faults_of_devices, kinds),
            *_faults_of_rewards(kinds, questions),
            *_answers_to(questions),
        ]
    )
    return found


def _faults_of_device(found: Found) -> Iterator[str]:
    """What the config asks and its device lacks."""
    config, policy = found.config, found.config.policy
    if torch.device(pick_device(policy.device)).type != "mps":
        return
    if policy.dtype != "float32" and policy.autocast:
        yield "policy.device=mps: autocast is not supported there; set policy.dtype=float32, or policy.autocast=false for LoRA"
    for key, value, plain in (
        ("policy.quantize", policy.quantize, "none"),
        ("policy.compile", policy.compile is True, False),
        ("trainer.sharding", config.trainer.sharding, "none"),
    ):
        if value != plain:
            yield f"policy.device=mps: {key}={str(value).lower()} is not supported there; take it out"


def _ranks(found: Found) -> Iterator[str]:
    """Ranks must have equally many groups, and a sharding must fit them."""
    config, world = found.config, found.world
    yield from complaints_of(faults_of_sharding, config, world.size, ranks_of_node())
    if found.given.policy is not None and config.trainer.sharding != "none":
        yield (
            f"trainer.sharding={config.trainer.sharding} divides a policy as it is built; one that is given is whole"
        )
    divided(config, world)


def _options(found: Found) -> Iterator[str]:
    """Options of a policy that is built must be possible here."""
    if found.given.policy is None:
        yield from faults_of_autocast(found.config)
        yield from faults_of_options(found.config.policy, found.config.policy.tuning)


def faults_of_autocast(config: Config) -> Iterator[str]:
    if config.policy.tuning == "full" and not config.policy.autocast:
        yield "policy.autocast=false: weights that are trained are float32, and need it; set policy.tuning=lora"


def _trackers(found: Found) -> Iterator[str]:
    for name in found.config.trackers if found.given.trackers is None else ():
        yield from complaints_of(faults_of_tracker, name)


def _pipeline(found: Found) -> Iterator[str]:
    """All parts must be there, or be downloadable, and can be loaded and tuned. A model that is slow
    to load, or incomplete here, is first built without weights, to see that it takes sizes and
    options."""
    it = found.pipeline
    if it is None:
        return
    # a policy of the user's may not need all parts
    missing = it.missing() if it.default_policy else ""
    why = hub.obstacle(it.path, ANSWER_S) if missing and is_hub_id(it.path) else ""
    if missing and why is not None:
        yield f"policy.path={it.name}: {missing}{why and f' ({it.path} {why})'}"
        return
    yield from it.faults(found.config.policy.tuning)
    if not it.default_policy or it.folder is None:
        return
    weights = (it.folder / "transformer").glob("*.safetensors")
    options = found.config.policy
    if (
        missing
        or options.offload
        or sum(file.stat().st_size for file in weights) > LARGE_TRANSFORMER
    ):
        policy, _ = build_shallow(blueprint_of(it), options)
        check_policy(found.config, policy)
        device = torch.device(pick_device(options.device))
        if offloads(options, device):
            _, memory = accelerator(device).mem_get_info(device)
            yield from faults_of_places(options, policy.blocks, memory)


def check_policy(config: Config, policy: Any) -> None:
    """Refuses a size of judged pictures that the policy cannot make, and an algorithm that trains
    where a policy's trained weights do not act."""
    if (size := config.judged_size) is not None:
        if not hasattr(policy, "sized"):
            raise UserError(
                f"evaluation.height, evaluation.width: a {type(policy).__name__} has one size; take them out"
            )
        with loading("evaluation.height, evaluation.width"):
            policy.check_size(*size)
    if getattr(policy, "trains_everywhere", True):
        return
    algorithm, steps = config.algorithm, config.sampling.num_steps
    sigmas = grid_of(config.sampling.shift, policy, steps)
    own = [step for step in range(steps) if policy.trains_at(float(sigmas[step]))]
    trained = trained_sigmas_of(config, sigmas)
    if wrong := [sigma for sigma in trained if not policy.trains_at(sigma)]:
        raise UserError(
            f"{name_of(algorithm)} trains at sigma {wrong[0]:.3f}, where the trained weights do not act (policy.lora_above="
            f"{policy.options.lora_above:g}); they do at steps {own} of {steps}. Change "
            "algorithm.branch_steps or its like, sampling.shift or policy.lora_above"
        )


def _read(found: Found, far: bool) -> Iterator[str]:
    """Reads local sources of prompts or, with `far`, those that may have to be downloaded."""
    for name, (key, source) in found.sources.items():
        if source.startswith("hf:") is not far:
            if not far and importlib.util.find_spec("datasets") is None:
                yield f"{key}={source}: reading datasets needs a library: pip install datasets"
            continue
        try:
            read = build_prompts(source, key)
        except UserError as error:
            yield str(error)
        else:
            most = found.config.evaluation.num_prompts if name == "heldout" else None
            setattr(found, name, read[:most])


def _devices_of_rewards(found: Found) -> Iterator[str]:
    return faults_of_devices(found.kinds)


def _rewards(found: Found) -> Iterator[str]:
    return _faults_of_rewards(found.kinds, found.questions)


def _faults_of_rewards(
    kinds: Iterable[RewardKind], questions: dict[str, Question]
) -> Iterator[str]:
    for kind in kinds:
        yield from complaints_of(_faults_of_reward, kind, questions)


def _faults_of_reward(kind: RewardKind, questions: dict[str, Question]) -> Iterator[str]:
    """Unknown options and missing files of a reward; checks that need a server are added to
    `questions`."""
    faulty = list(kind.faults())
    yield from faulty
    declared, options = kind.declared, kind.options
    if faulty:
        return
    if absent := [
        library for library in declared.libraries if importlib.util.find_spec(library) is None
    ]:
        yield f"{kind.key}: needs {' and '.join(absent)}: pip install {' '.join(declared.libraries)}"
        return
    missing = [option for option, value in options.items() if value is inspect.Parameter.empty]
    if missing:
        yield f"{kind.key}.options.{missing[0]} is missing; {kind.entry.kind} cannot do without it"
        return
    with placed(f"{kind.key}.options.", UserError):
        declared.check_options(options)
    if declared.asks:
        questions[kind.key] = partial(_ask_endpoint, kind.maker, kind.entry.options)
    for option, files in declared.files.items():
        if isinstance(place := options.get(option), str) and not plugins.is_code(place):
            _check_weights(f"{kind.key}.options.{option}", place, files, questions)


def _check_weights(
    key: str, place: str, files: tuple[str, ...], questions: dict[str, Question]
) -> None:
    """Refuses a local path that contains none of `files`."""
    if is_hub_id(place):
        if hub.cached(place, *files) is None:
            questions[f"{key}={place}"] = partial(_ask_hub, place, files)
        return
    with placed(f"{key}: ", OSError):
        fetch(place, *files)


def _ask_hub(repository: str, files: tuple[str, ...]) -> str | None:
    why = hub.obstacle(repository, ANSWER_S)
    if why is None:
        return None
    # of one that gives a tokenizer alone, not its weights
    of_words = " --include '*.json' --include '*.txt' --include '*.model'"
    command = f"hf download {repository}{of_words if files == TOKENIZER_FILES else ''}"
    return f"{why}; `{command}` fetches it, or name a FOLDER that you have"


def _ask_endpoint(made: Any, options: Mapping[str, Any]) -> str | None:
    """The problem of an endpoint, by the health check that the reward makes when it is built; None
    if there is none."""
    try:
        made(**{**options, "endpoint": {**options.get("endpoint", {}), "timeout_s": ANSWER_S}})
    except TooSlow:
        return None
    except (OSError, ValueError, TypeError, UserError) as error:
        return str(error)
    return None


def _answers(found: Found) -> Iterable[str]:
    """A run that has not begun may do without what only judges."""
    begun = found.directory is not None and Run(found.directory).config.is_file()
    return _answers_to(found.questions, () if begun else found.judges.values())


def _answers_to(
    questions: Mapping[str, Question], optional: Iterable[RewardKind] = ()
) -> Iterator[str]:
    """Asks all servers at once; `optional` rewards may be left out."""
    keys = [kind.key for kind in optional]
    for what, answer in hub.answers_of(questions, ANSWER_S).items():
        of = [key for key in keys if what == key or what.startswith(f"{key}.options.")]
        without = f"; {of[0]}= leaves this reward out" if of else ""
        yield f"{what}: {answer}{without}"


def _disk(found: Found) -> Iterator[str]:
    """There must be space for the kept checkpoints and the next one."""
    config, directory, it = found.config, found.directory, found.pipeline
    whole = it is not None and it.default_policy and it.folder is not None and not it.missing()
    if directory is None or it is None or not whole:
        return
    kept = config.trainer.keep_checkpoints - len(checkpoints(Run(directory).checkpoints))
    # the weights, their two moments, their average and old weights, all float32
    tensors = 3 + bool(config.optim.ema_decay) + config.algorithm.uses_old
    _, trained = trained_on_meta(blueprint_of(it), config.policy)
    weights = sum(parameter.numel() for parameter in trained.values())
    needed = 4 * weights * (max(1, kept + 1) * tensors + 1)  # plus the exported weights
    place = next(
        path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir()
    )
    free = shutil.disk_usage(place).free
    if needed > free:
        remedy = "free some, name another --run-dir, or lower trainer.keep_checkpoints"
        yield f"{directory}: checkpoints and weights take {in_bytes(needed)}, {in_bytes(free)} are free; {remedy}"


def _targets(found: Found) -> Iterator[str]:
    """Rewards must be able to score the prompts, such as those that read a text in quotes."""
    for key, source, prompts, kinds in found.lists():
        for kind in kinds:
            fault = kind.declared.fault(kind.options, prompts) if prompts else None
            if fault is not None:
                yield f"rewards.{kind.name}: {fault} ({key}={source})"


def _input_pictures(found: Found) -> Iterator[str]:
    """Prompts must have as many input pictures as the model takes."""
    if found.spec is not None:
        for prompt in (*found.prompts, *found.heldout):
            found.spec.check_pictures(prompt)
    yield from ()


CHECKS: Sequence[Sequence[Check]] = (
    (
        _faults_of_device,
        _ranks,
        *SETTINGS,
        _options,
        _trackers,
        _pipeline,
        partial(_read, far=False),
        _devices_of_rewards,
        _rewards,
        _answers,
        _disk,
    ),
    (partial(_read, far=True),),  # only if nothing else is missing
    (_targets, _input_pictures),
    (tried,),
)
"""The checks in their order; all of a stage are made before any complaint is raised. The last one
calls own code."""
