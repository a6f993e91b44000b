"""The configuration of a run: what it may hold, and how recipes, files and `key=value` overrides become one.

Unknown keys, wrong types and values out of range are refused with a `UserError` that names the key.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    ValidationError,
)

from g2rpo.algorithms.dancegrpo import DanceGRPO
from g2rpo.algorithms.flow_cps import FlowCPS
from g2rpo.algorithms.flow_grpo import FlowGRPO
from g2rpo.algorithms.flow_grpo_fast import FlowGRPOFast
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.algorithms.grpo_guard import GRPOGuard
from g2rpo.algorithms.mixgrpo import MixGRPO, MixGRPOFlash
from g2rpo.algorithms.tempflow_grpo import TempFlowGRPO
from g2rpo.errors import UserError, did_you_mean
from g2rpo.plain import DEPTH, parse_yaml, read_text
from g2rpo.rollout.tails import Tails
from g2rpo.sharding import ShardingMode
from g2rpo.types import Policy

Dtype = Literal["float32", "bfloat16"]
LARGEST = 2**18
"""Bytes of a YAML file; our longest recipe has a fiftieth of that."""
Count = Annotated[int, Field(gt=0, le=10**6)]
"""More than a million is a slip of the finger, and takes the memory before anybody can say so."""
Shift = PositiveFloat | Literal["model"]
"""The time shift of the sigma grid; "model": the one that the pipeline is deployed with at this size."""


class Group(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def to_yaml(self) -> str:
        data = self.model_dump(mode="json")
        text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
        if "\x85" in text:  # a line end in YAML, which PyYAML would write as it is and read as a space
            text = yaml.safe_dump(data, sort_keys=False)
        return text


G = TypeVar("G", bound=Group)


class PolicyConfig(Group):
    """The model and which of its weights are trained."""

    path: str
    """A diffusers pipeline: a directory, a hub id, or "testbed" for the one inside the package."""
    pipeline: str | None = None
    """The class that the pipeline must have; a recipe's values are for one kind of model. None: any that is known."""
    height: Count
    width: Count
    guidance_scale: NonNegativeFloat = 3.5
    """FLUX: the embedded one. SD3: of classifier-free guidance, which costs a second evaluation; up to 1 turns it off."""
    negative_prompt: str | None = None
    """For models with classifier-free guidance."""
    max_sequence_length: Annotated[int, Field(gt=0, le=4096)] | None = None
    """Tokens of the long prompt encoder. None: what the model takes by default (FLUX 512, SD3 256)."""
    tuning: Literal["lora", "full"] = "lora"
    lora_rank: Count = 32
    lora_alpha: PositiveFloat = 64.0
    lora_targets: list[str] | None = None
    dtype: Dtype = "float32"
    device: str = "auto"
    gradient_checkpointing: bool = False
    truncate_timesteps: bool = False
    vae_tiling: bool = False


class RewardConfig(Group):
    """One reward: which one, with which options, and how much its advantages count."""

    kind: str
    weight: float = 1.0
    options: dict[str, Any] = {}


def _reward_table(value: Any) -> Any:
    """Allows `name: 1.0` (a weight) and `name: {weight: ...}`, where the name is also the kind."""
    if not isinstance(value, Mapping):
        return value
    table = {}
    for name, entry in value.items():
        if isinstance(entry, int | float) and not isinstance(entry, bool):
            entry = {"weight": entry}
        elif entry is None:
            entry = {}
        table[name] = {"kind": name, **entry} if isinstance(entry, Mapping) else entry
    return table


RewardName = Annotated[str, Field(pattern=r"^[\w+-][\w.+-]*$", max_length=100)]
"""It becomes a column in tables and charts, and a part of names in files."""
RewardTable = Annotated[dict[RewardName, RewardConfig], BeforeValidator(_reward_table)]


def _off(value: Any) -> Any:
    """YAML 1.1 reads off as false; people mean the word."""
    return "off" if value is False else value


CacheFolder = Annotated[str, BeforeValidator(_off)]


class PromptsConfig(Group):
    """Where prompts come from, and where their embeddings are kept.

    A source is a file (.txt with a prompt a line; .jsonl or .parquet, FILE:COLUMN if the column is not "prompt"), a dataset
    (hf:OWNER/NAME:SPLIT:COLUMN), or "testbed:train".
    """

    train: str
    cache: CacheFolder = "auto"
    """A folder, "auto" for embeddings/ in $G2RPO_CACHE or ~/.cache/g2rpo, or "off"."""


BatchSize = Count | Literal["auto"]


class SamplingConfig(Group):
    """The sampler that rollouts and evaluation share."""

    num_steps: Annotated[int, Field(ge=2, le=250)]
    shift: Shift = 3.0
    batch_size: BatchSize = 64
    """Rows of one network call. "auto": as many as leave a fifth of the GPU's memory free; 64 on a CPU."""
    decode_batch_size: BatchSize = 64
    """Images of one VAE call. "auto": likewise; 8 on a CPU."""
    prompts_at_once: Count | None = None
    """Prompts rolled out together; None: all of an iteration. With fewer, the pictures of those before are decoded and scored
    meanwhile, by another thread, and fewer latents wait for it."""
    anchor_dtype: Dtype = "float32"
    sample_dtype: Dtype = "float32"
    tails: Tails = Tails()
    """What the tails of a rollout may save at the price of an error in the reward; nothing unless asked for."""


Share = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Group):
    """AdamW and what surrounds it."""

    learning_rate: PositiveFloat
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 1e-4
    max_grad_norm: PositiveFloat = 1.0
    warmup_iterations: Annotated[int, Field(ge=0)] = 0
    decay: Literal["constant", "cosine"] = "constant"
    """What the rate does after the warm-up; "cosine" reaches zero at the last iteration."""
    ema_decay: Share = 0.0
    """Evaluation and the saved weights use an exponential moving average; 0 turns it off."""


class TrainerConfig(Group):
    """How long, how much at a time, and what is kept."""

    iterations: Count
    prompts_per_iteration: Count = 1
    """Of all ranks together."""
    micro_batch_size: Count = 64
    """Latents of one training pass; gradients accumulate over passes."""
    checkpoint_every: Count = 50
    keep_checkpoints: Count = 2
    sharding: ShardingMode = "none"
    """For full fine-tuning on several ranks: "full" divides weights, gradients and moments over them, and each call gathers
    layer after layer; "training" too, but samples with whole weights in `policy.dtype`: faster, where there is room."""
    rank_timeout_s: Annotated[float, Field(gt=0, le=10**7)] = 1800
    """How long a rank waits for another before it takes it for lost."""
    max_unscored: Count = 5
    """After so many iterations in a row in which a reward gave no score at all, the run stops."""
    max_skipped: Count = 10
    """After so many updates in a row with a non-finite gradient, none of them applied, the run stops."""
    seed: int = 42


class EvaluationConfig(Group):
    """Held-out prompts with fixed noise; `rewards` are judged on, not trained on."""

    prompts: str
    num_prompts: Count = 64
    every: Count = 20
    num_steps: Count | None = None
    """None: the sampler's."""
    rewards: RewardTable = {}
    pictures: Count = 8


Action = Annotated[Literal["off", "warn", "stop", "rollback"], BeforeValidator(_off)]
"""What an alarm does: nothing; say so; save and end the run; or end it with the weights of its best evaluation."""


class AlarmsConfig(Group):
    """What a run does that goes wrong; docs/alarms.md says when an alarm is raised."""

    action: Action = "warn"
    """Of every alarm that has no other below."""
    drift: Action | None = None
    """Rollout and training pass disagree about log-probs."""
    silent: Action | None = None
    """Most groups teach nothing."""
    masked: Action | None = None
    """Groups without scores."""
    saturated: Action | None = None
    """Advantages at their clip."""
    hacking: Action | None = None
    """A held-out reward falls while a trained one rises."""
    decline: Action | None = None
    """A held-out reward falls, and no trained one rises."""
    pictures: Action | None = None
    """Pictures leave the base model's range of brightness, contrast, saturation, clipping or detail."""

    def of(self, alarm: str) -> Action:
        """What `alarm` does."""
        return getattr(self, alarm) or self.action


def _listed(value: Any) -> Any:
    """Allows `trackers=wandb` for `trackers=[wandb]`."""
    return [value] if isinstance(value, str) else value


Trackers = Annotated[list[Literal["tensorboard", "wandb", "trackio"]], BeforeValidator(_listed)]

AnyAlgorithm = GranularGRPO | FlowGRPO | FlowGRPOFast | FlowCPS | GRPOGuard | DanceGRPO | MixGRPO | MixGRPOFlash | TempFlowGRPO
ALGORITHMS = {kind.name: kind for kind in get_args(AnyAlgorithm)}


def _named(value: Any) -> Any:
    """G2RPO is what an algorithm without a name is."""
    return {"name": GranularGRPO.name, **value} if isinstance(value, Mapping) else value


class Config(Group):
    """One run."""

    recipe: str = ""
    policy: PolicyConfig
    algorithm: Annotated[Annotated[AnyAlgorithm, Field(discriminator="name")], BeforeValidator(_named)]
    rewards: RewardTable
    prompts: PromptsConfig
    sampling: SamplingConfig
    optim: OptimConfig
    trainer: TrainerConfig
    evaluation: EvaluationConfig
    alarms: AlarmsConfig = AlarmsConfig()
    trackers: Trackers = ["tensorboard"]
    """Where the log is shown while a run goes on; metrics.jsonl is written in any case."""


def shift_of(shift: Shift, policy: Policy) -> float:
    """The number that a config's shift means for a policy."""
    return policy.shift if shift == "model" else float(shift)


def resolve(
    data: Mapping[str, Any],
    overrides: Sequence[str] = (),
    source: str = "config",
    note: Callable[[str], None] = lambda message: None,
) -> Config:
    """The config of `data` (as read from YAML) with `key=value` overrides; `source` names it in messages.

    A hyper-parameter of one algorithm is none of another's, even where the names agree. So an override of `algorithm.name`
    replaces the whole group by that algorithm's published defaults, and `note` hears what was left out.
    """
    return resolve_as(Config, _with_other_algorithm(data, overrides, source, note), overrides, source)


def resolve_as(kind: type[G], data: Mapping[str, Any], overrides: Sequence[str] = (), source: str = "config") -> G:
    """The same for any kind of group."""
    merged: dict[str, Any] = _copied(data)
    for override in overrides:
        _override(merged, override)
    _check_keys(kind, merged, "", source)
    try:
        return kind.model_validate(merged)
    except ValidationError as error:
        raise UserError("\n".join(_complaints(error, source))) from None


def _with_other_algorithm(
    data: Mapping[str, Any], overrides: Sequence[str], source: str, note: Callable[[str], None]
) -> Mapping[str, Any]:
    """`data` without its hyper-parameters, if an override names another algorithm than theirs."""
    given = data.get("algorithm")
    asked = [override.partition("=")[2].strip() for override in overrides if override.startswith("algorithm.name=")]
    if not asked or not isinstance(given, Mapping) or asked[-1] == _named(given)["name"] or asked[-1] not in ALGORITHMS:
        return data
    defaults = ALGORITHMS[asked[-1]]
    left = ", ".join(
        f"{key}={value}" for key, value in given.items() if key != "name" and getattr(defaults, key, None) != value
    )
    if left:
        note(f"algorithm.name={asked[-1]}: its published defaults; {source}'s {left} are left out")
    return {**data, "algorithm": {}}


def parse_options(assignments: Sequence[str]) -> dict[str, Any]:
    """A mapping from `key=value` words, as overrides read them."""
    options: dict[str, Any] = {}
    for assignment in assignments:
        _override(options, assignment)
    return options


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; only plain data, no tags that construct objects."""
    try:
        data = parse_yaml(read_text(path, LARGEST))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: should hold groups like 'policy:' and 'algorithm:', but holds {type(data).__name__}")
    return data


def differences(a: Group, b: Group) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both values."""
    left, right = dict(_leaves(a.model_dump(mode="json"))), dict(_leaves(b.model_dump(mode="json")))
    return {key: (left.get(key), right.get(key)) for key in {**left, **right} if left.get(key) != right.get(key)}


def _copied(data: Any) -> Any:
    return {key: _copied(value) for key, value in data.items()} if isinstance(data, Mapping) else data


def _leaves(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(data, Mapping) and data:
        for key, value in data.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, data


def _override(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"'{override}' is no override; write key=value, for example trainer.iterations=100")
    try:
        value = parse_yaml(text)
    except ValueError as error:
        hint = "write a number, a word or a list like [1,2]"
        reason = "" if str(error).startswith("is no YAML") else f" (it {error})"
        raise UserError(f"{key}: '{text:.80}' is no value{reason}; {hint}") from None
    if isinstance(value, str):
        value = _number(value)
    *groups, last = key.split(".")
    if len(groups) > DEPTH:
        raise UserError(f"'{key:.80}...' names a key inside {len(groups)} others; at most {DEPTH} are read")
    for group in groups:
        inner = data.get(group)
        if not isinstance(inner, dict):
            inner = data[group] = {} if inner is None else {"weight": inner} if isinstance(inner, int | float) else {}
        data = inner
    if value is None and text.strip() in ("", "~") and last in data:
        del data[last]  # `rewards.clip=` takes a reward out
    else:
        data[last] = value


def _number(text: str) -> Any:
    """YAML 1.1 reads 1e-4 as a word; people mean the number."""
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def _fields(kind: Any) -> dict[str, Any] | None:
    """Field names and types of a config group, None if `kind` is no group."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    if kind == AnyAlgorithm:
        return {name: hint for each in ALGORITHMS.values() for name, hint in (_fields(each) or {}).items()}
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    return None


def _check_keys(kind: Any, data: Any, prefix: str, source: str) -> None:
    if kind == AnyAlgorithm and isinstance(data, Mapping):
        name = str(_named(data)["name"])
        if name not in ALGORITHMS:
            raise UserError(f"{source}: algorithm.name: unknown algorithm '{name}'.{did_you_mean(name, ALGORITHMS)}")
        kind = ALGORITHMS[name]
    fields = _fields(kind)
    if get_origin(kind) is dict and isinstance(data, Mapping):
        for name, entry in data.items():
            _check_keys(get_args(kind)[1], entry, f"{prefix}{name}.", source)
    if fields is None or not isinstance(data, Mapping):
        return
    for key, value in data.items():
        if key not in fields:
            near = did_you_mean(str(key), fields)
            elsewhere = [group for group, inner in fields.items() if key in (_fields(inner) or {})]
            if elsewhere and not prefix:
                near = f" Did you mean '{elsewhere[0]}.{key}'?"
            raise UserError(f"{source}: unknown key '{prefix}{key}'.{near}")
        _check_keys(fields[key], value, f"{prefix}{key}.", source)


def _is_member(part: int | str) -> bool:
    """Whether a part of pydantic's location names the member of a union that was tried, and no key."""
    return part in (*ALGORITHMS, "int", "constrained-int", "constrained-float") or str(part).startswith(("literal[", "tuple["))


def _complaints(error: ValidationError, source: str) -> Iterator[str]:
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"] if not _is_member(part))
        if problem["type"] == "missing":
            yield f"{source}: '{key}' is missing"
        else:
            given = f", got {repr(problem['input'])[:200]}" if not isinstance(problem["input"], Mapping) else ""
            message = problem["msg"].removeprefix("Value error, ")
            yield f"{source}: {key}: {message[0].lower()}{message[1:]}{given}"
