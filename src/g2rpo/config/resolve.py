"""Builds a config, or any other group of settings, from recipes, files and `key=value` overrides.

Unknown keys, wrong types and values out of range are refused with a `UserError` that names the key.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError

from g2rpo.config.algorithms import ALGORITHMS, algorithm_class, with_name
from g2rpo.config.given import is_mention
from g2rpo.config.schema import Config, Section
from g2rpo.core import plugins
from g2rpo.core.errors import UserError, did_you_mean
from g2rpo.core.plain import DEPTH, parse_yaml, read_text
from g2rpo.core.types import Algorithm

LARGEST_YAML = 2**18
"""Largest YAML file in bytes, 50 times the longest recipe."""

CODE_KEYS = ("name", "kind", "target", "detector", "trackers")
"""Last parts of keys whose values may name code."""

SHORT = {
    "lr": "optim.learning_rate",
    "steps": "sampling.num_steps",
    "rank": "policy.lora_rank",
    "prompt": "prompts.train",
    "prompts": "prompts.train",
}
"""Abbreviations of keys."""

REWARD_TABLES = ("rewards", "evaluation.rewards")
TAKES_OUT = ("", "~")
"""Values of an override that take a reward out."""

SMALLEST = 1e-18
"""The smallest absolute value of a nonzero setting; the largest is its inverse."""

G = TypeVar("G", bound=Section)


def resolve(
    data: Mapping[str, Any],
    overrides: Sequence[str] = (),
    source: str = "config",
    notify: Callable[[str], None] = lambda message: None,
    mention: bool = False,
) -> Config:
    """The config of `data` (as read from YAML) with `key=value` overrides; `source` names it in messages.

    Hyper-parameters of different algorithms are independent even if their names agree. So an override of `algorithm.name`
    replaces the whole group by that algorithm's published defaults, and `notify` is called with what was left out. With
    `mention`, an algorithm whose code may not be imported is a `given.Mentioned` one; without, it is refused.
    """
    allow_code(overrides)
    return resolve_as(Config, _with_other_algorithm(data, overrides, source, notify), overrides, source, mention)


def allow_code(overrides: Sequence[str]) -> None:
    """Allows code that overrides name: the user has named it, at the command line or as an argument."""
    for override in overrides:
        key, _, value = override.partition("=")
        if key.rpartition(".")[2] in CODE_KEYS and plugins.is_code(value):
            plugins.allow(value)


def resolve_as(
    kind: type[G], data: Mapping[str, Any], overrides: Sequence[str] = (), source: str = "config", mention: bool = False
) -> G:
    """As `resolve`, for any kind of group."""
    allow_code(overrides)
    merged: dict[str, Any] = _copied(data)
    for override in overrides:
        _override(merged, override)
    if isinstance(given := merged.get("algorithm"), Mapping):
        _class_in(given, source, mention)
    try:
        group = kind.model_validate(merged, context={"mention": mention})
    except ValidationError as error:
        raise UserError("\n".join(_complaints(error, partial(_near, kind, merged), merged, source))) from None
    _check_sizes(group, source)
    return group


def codes_in(data: Any, key: str = "") -> Iterator[str]:
    """The code that settings name."""
    if isinstance(data, Mapping):
        for inner, value in data.items():
            yield from codes_in(value, str(inner))
    elif isinstance(data, list):
        for value in data:
            yield from codes_in(value, key)
    elif key in CODE_KEYS and isinstance(data, str) and plugins.is_code(data):
        yield data


def _with_other_algorithm(
    data: Mapping[str, Any], overrides: Sequence[str], source: str, notify: Callable[[str], None]
) -> Mapping[str, Any]:
    """`data` without its hyper-parameters, if an override names another algorithm."""
    given = data.get("algorithm")
    asked = [override.partition("=")[2].strip() for override in overrides if override.startswith("algorithm.name=")]
    if not asked or not isinstance(given, Mapping) or asked[-1] == with_name(given)["name"]:
        return data
    defaults = _class_in({"name": asked[-1]}, source, mention=False)
    left = ", ".join(
        f"{key}={value}" for key, value in given.items() if key != "name" and getattr(defaults, key, None) != value
    )
    if left:
        whose = "its" if plugins.is_code(asked[-1]) else "its published"
        notify(f"algorithm.name={asked[-1]}: {whose} defaults; {source}'s {left} are left out")
    return {**data, "algorithm": {}}


def parse_options(assignments: Sequence[str]) -> dict[str, Any]:
    """A mapping from `key=value` assignments, parsed like overrides."""
    options: dict[str, Any] = {}
    allow_code(assignments)
    for assignment in assignments:
        _override(options, assignment)
    return options


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; only plain data, no tags that construct objects."""
    try:
        data = parse_yaml(read_text(path, LARGEST_YAML))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: should hold groups like 'policy:' and 'algorithm:', but holds {type(data).__name__}")
    return data


def absent_reward(data: Mapping[str, Any], override: str) -> str | None:
    """The key of an override that removes a reward (`rewards.clip=`) which `data` does not have; otherwise None."""
    key, equals, text = override.partition("=")
    group, _, name = key.rpartition(".")
    if group not in REWARD_TABLES or not equals or text.strip() not in TAKES_OUT:
        return None
    return None if name in _at(data, group) else key


def _at(data: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    """The mapping at a dotted key; empty if there is none."""
    inner: Any = data
    for part in group.split("."):
        inner = inner.get(part) if isinstance(inner, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def differences(a: Section, b: Section) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both values."""
    left, right = dict(_leaves(a.model_dump(mode="json"))), dict(_leaves(b.model_dump(mode="json")))
    return {key: (left.get(key), right.get(key)) for key in {**left, **right} if left.get(key) != right.get(key)}


def listed_differences(ours: Section, theirs: Section, may_change: Collection[str] = ()) -> str:
    """The keys that differ but may not, with both values, a line each; "" for none."""
    changed = differences(ours, theirs).items()
    return "".join(f"\n  {key}: {there!r} there, {here!r} here" for key, (here, there) in changed if key not in may_change)


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
    if (absent := absent_reward(data, override)) is not None:
        group, _, name = absent.rpartition(".")
        raise UserError(f"{absent}=: there is no reward '{name}' to remove.{did_you_mean(name, _at(data, group))}")
    if not equals or not key:
        raise UserError(f"'{override}' is no override; write key=value, for example trainer.iterations=100")
    for table in REWARD_TABLES:
        if plugins.is_code(code := key.removeprefix(f"{table}.")) and code != key:
            name = f"{table}.{code.rpartition(':')[2]}"
            raise UserError(f"{key}: code is a reward's kind, not its name; write {name}.kind={code}")
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
    if value is None and text.strip() in TAKES_OUT and last in data:
        del data[last]  # `rewards.clip=` removes a reward
    else:
        data[last] = value


def _number(text: str) -> Any:
    """A number like 1e-4, which YAML 1.1 reads as a string."""
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def _fields(kind: Any) -> dict[str, Any] | None:
    """Field names and types of a config group, None if `kind` is no group."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: Algorithm if name == "algorithm" else field.annotation for name, field in kind.model_fields.items()}
    if kind is Algorithm:
        return {name: hint for each in ALGORITHMS.values() for name, hint in (_fields(each) or {}).items()}
    if get_origin(kind) is dict and get_origin(names := get_args(kind)[0]) is Literal:
        return dict.fromkeys(get_args(names), get_args(kind)[1])
    if get_args(kind)[1:] == (NoneType,):  # an optional group
        return _fields(get_args(kind)[0])
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    return None


def key_of(word: str, fields: Mapping[str, Any] | None = None) -> str | None:
    """The dotted key that a word, with or without a group, may mean; None if there is none."""
    fields = fields if fields is not None else _fields(Config) or {}
    groups = reversed(list(fields.items()))  # of equal names the first group's
    known = {inner: f"{group}.{inner}" for group, kind in groups for inner in (_fields(kind) or {})}
    if "." in word:
        known = {f"{group}.{inner}": f"{group}.{inner}" for group, kind in fields.items() for inner in (_fields(kind) or {})}
    if word in SHORT:
        return SHORT[word] if SHORT[word] in known.values() else None
    near = [] if word in fields else difflib.get_close_matches(word, known, n=1, cutoff=0.8)
    return known[near[0]] if near else None


def _class_in(data: Mapping[str, Any], source: str, mention: bool) -> Any:
    """The class of an algorithm's mapping; None for an object, or for code that may not be imported if `mention` allows
    that."""
    name = str(with_name(data)["name"])
    if is_mention(name):
        return None
    try:
        return algorithm_class(name)
    except plugins.CodeNotAllowed:
        if mention:
            return None
        raise
    except UserError as error:
        raise UserError(f"{source}: algorithm.name: {str(error).removeprefix('algorithm.')}") from None


def _check_sizes(group: Section, source: str) -> None:
    """Refuses numbers whose square overflows or underflows float32; options of rewards are not checked."""
    for key, leaf in _leaves(group.model_dump(mode="json")):
        for number in _numbers(leaf) if "options" not in key.split(".") else ():
            if number and not SMALLEST <= abs(number) <= 1 / SMALLEST:
                wanted = f"should be 0, or from {SMALLEST:g} to {1 / SMALLEST:g} in size"
                raise UserError(f"{source}: {key}: {wanted}, got {number:g}")


def _numbers(leaf: Any) -> Iterator[float]:
    if isinstance(leaf, float):
        yield leaf
    elif isinstance(leaf, list | Mapping):
        for inner in leaf.values() if isinstance(leaf, Mapping) else leaf:
            yield from _numbers(inner)


def _place(loc: Sequence[int | str], data: Any, missing: bool) -> tuple[str, Any]:
    """The dotted key of pydantic's location, without the members of unions, and the value of `data` there."""
    parts = []
    for part in loc:
        held = data if isinstance(data, Mapping) else dict(enumerate(data)) if isinstance(data, list) else {}
        if part in held:
            parts.append(str(part))
            data = held[part]
    return ".".join([*parts, *([str(loc[-1])] if missing else [])]), data


def _complaints(error: ValidationError, near: Callable[[str], str], data: Any, source: str, prefix: str = "") -> Iterator[str]:
    """What pydantic found wrong with `data`, a line each, by dotted keys; `near` ends what is said of an unknown one."""
    for problem in error.errors():
        what, wrong = problem["type"], problem["input"]
        key, value = _place(problem["loc"], data, what == "missing")
        key = prefix + key
        of_key = problem["loc"][-1:] == ("[key]",)
        if isinstance(inner := problem.get("ctx", {}).get("error"), ValidationError):  # an algorithm's own fields
            yield from _complaints(inner, near, value, source, f"{key}.")
        elif what in ("extra_forbidden", "unexpected_keyword_argument") or (of_key and what == "literal_error"):
            yield f"{source}: unknown key '{key}'.{near(key)}"
        elif of_key:
            space = "; YAML needs a space after ':'" if ":" in str(wrong) else ""
            yield f"{source}: {key} is no name: write letters, digits and . _ + -{space}"
        elif what == "missing":
            yield f"{source}: '{key}' is missing"
        elif what in ("model_type", "dataclass_type", "dict_type") and isinstance(wrong, str | int | float):
            wanted = f"name={wrong}" if key == "algorithm" else f"{wrong}=1" if key.endswith("rewards") else "KEY=VALUE"
            yield f"{source}: {key} is a group of settings, got {wrong!r:.200}; write {key}.{wanted:.200}"
        else:
            given = f", got {repr(wrong)[:200]}" if not isinstance(wrong, Mapping) else ""
            message = problem["msg"].removeprefix("Value error, ")
            if what in ("tuple_type", "list_type") and isinstance(wrong, str | int | float):
                given += f"; write it in brackets: [{wrong}]"
            yield f"{source}: {key}: {message[0].lower()}{message[1:]}{given}"


def _near(kind: Any, data: Mapping[str, Any], key: str) -> str:
    """The settings that an unknown key may mean, as the end of a message."""
    groups: list[str] = []
    rest = key.split(".")  # an unknown key may have dots of its own
    while len(rest) > 1:
        inner = get_args(kind)[-1] if get_origin(kind) in (dict, list) else (_fields(kind) or {}).get(rest[0])
        if inner is None:
            break
        kind = inner
        groups.append(rest.pop(0))
    group, name = ".".join(groups), ".".join(rest)
    if kind is Algorithm:
        kind = algorithm_class(str(with_name(_at(data, "algorithm"))["name"]))
    fields = _fields(kind) or {}
    elsewhere = key_of(name, None if group else fields)
    if elsewhere and (not group or (elsewhere.endswith(f".{name}") and not elsewhere.startswith(f"{group}."))):
        return f" Did you mean '{elsewhere}'?"
    return did_you_mean(name, fields, f"{group}." if group else "")
