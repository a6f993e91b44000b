"""What is wrong with settings, in words: the key, what is wrong there, and the nearest right
key."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError

from g2rpo.config.algorithms import ALGORITHMS, algorithm_class, with_name
from g2rpo.core import plugins
from g2rpo.core.errors import UserError, cut, did_you_mean, shown
from g2rpo.core.types import Algorithm

SHORT = {
    "lr": "optim.learning_rate",
    "steps": "sampling.num_steps",
    "rank": "policy.lora_rank",
    "prompt": "prompts.train",
    "prompts": "prompts.train",
    "kl": "algorithm.kl_weight",
    "beta": "algorithm.kl_weight",
}
"""Abbreviations of keys."""

REWARD_TABLES = ("rewards", "evaluation.rewards")

NOT_A_GROUP = ("model_type", "dataclass_type", "dict_type")
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
NOT_A_LIST = ("tuple_type", "list_type")


def keys_of(kind: Any, data: Any = None, prefix: str = "") -> Iterator[str]:
    """All dotted keys of a group of settings, its groups included.

    Tables and lists have the names that they have in `data`. An algorithm has the settings of the
    class that `data` names; without data, those of every built-in.
    """
    for name, inner in members_of(kind, data).items():
        yield f"{prefix}{name}"
        yield from keys_of(inner, _held(data).get(name), f"{prefix}{name}.")


def _held(data: Any) -> Mapping[Any, Any]:
    """What a mapping or a list holds, by key or place."""
    if isinstance(data, list):
        return dict(enumerate(data))
    return data if isinstance(data, Mapping) else {}


def members_of(kind: Any, data: Any = None) -> dict[Any, Any]:
    """The names and types of what a group, a table or a list holds; nothing for any other type."""
    if get_args(kind)[1:] == (NoneType,):
        kind = get_args(kind)[0]
    if kind is Algorithm:
        members = {"name": str}
        for each in _algorithms(data):
            members |= members_of(each)
        return members
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        types = {name: field.annotation for name, field in kind.model_fields.items()}
        return {name: Algorithm if name == "algorithm" else types[name] for name in types}
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    if get_origin(kind) not in (dict, list):
        return {}
    names, inner = get_args(kind)[0], get_args(kind)[-1]
    known = get_args(names) if get_origin(names) is Literal else _held(data)
    return dict.fromkeys(known, inner)


def _algorithms(data: Any) -> Iterable[Any]:
    if not isinstance(data, Mapping):
        return ALGORITHMS.values()
    try:
        return [algorithm_class(str(with_name(data)["name"]))]
    except UserError:  # an object's name, or code that may not be imported
        return []


def key_of(word: str, keys: Sequence[str]) -> str | None:
    """The one of `keys` that a word, with or without a group, may mean; None if there is none."""
    if word in SHORT:
        return SHORT[word] if SHORT[word] in keys else None
    groups = {key.partition(".")[0] for key in keys if "." in key}
    if word in groups:
        return None
    known: dict[str, str] = {}
    for key in keys:  # of equal names the first one's
        if key not in groups:
            known.setdefault(key if "." in word else key.rpartition(".")[2], key)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.8)
    return known[near[0]] if near else None


def _near(key: str, keys: Sequence[str]) -> str:
    """The settings that an unknown key may mean, as the end of a message."""
    groups = {each.rpartition(".")[0] for each in keys}
    group = key.rpartition(".")[0]
    while group not in groups:  # an unknown key may have dots of its own
        group = group.rpartition(".")[0]
    name = key[len(group) :].removeprefix(".")
    prefix = f"{group}." if group else ""
    beside = [each.removeprefix(prefix) for each in keys if each.rpartition(".")[0] == group]
    elsewhere = key_of(name, keys) or ""
    short = name in SHORT and not any(name in each for each in beside)
    same = elsewhere.endswith(f".{name}") and not elsewhere.startswith(prefix)
    if elsewhere and (not group or short or same):
        return f" Did you mean '{elsewhere}'?"
    return did_you_mean(name, beside, prefix)


def complaints(error: ValidationError, kind: Any, data: Mapping[str, Any]) -> Iterator[str]:
    """What pydantic found wrong with `data` as a group `kind`, each by its dotted key."""
    keys = list(keys_of(kind, data))
    for what, key, wrong, message in _problems(error, data):
        if what == "unknown":
            yield f"unknown key '{key}'.{_near(key, keys)}"
        elif what == "no name":
            yield f"{key} is no name: write letters, digits and . _ + -{_space(wrong)}"
        elif what == "missing":
            yield f"'{key}' is missing"
        elif what in NOT_A_GROUP and isinstance(wrong, str | int | float):
            spaced = "" if plugins.is_code(str(wrong)) else _space(wrong)
            wanted = spaced or f"; write {key}.{_example(key, wrong):.200}"
            is_reward = key.rpartition(".")[0] in REWARD_TABLES
            held = "a weight, or a group of settings" if is_reward else "a group of settings"
            yield f"{key} is {held}, got {shown(wrong)}{wanted}"
        else:
            listed = what in NOT_A_LIST and isinstance(wrong, str | int | float)
            brackets = f"; write it in brackets: [{cut(str(wrong), 100)}]" if listed else ""
            yield f"{key}: {message[0].lower()}{message[1:]}, got {shown(wrong)}{brackets}"


def truths(given: Any, plain: Any, key: str = "") -> Iterator[str]:
    """The numbers of a group as `plain` data that were `given` as true or false: pydantic takes
    these for 1 and 0."""
    if isinstance(given, bool) and type(plain) in (int, float):
        yield f"{key}: should be a number, got {given}"
    for name, inner in _held(given).items():
        yield from truths(inner, _held(plain).get(name), f"{key}.{name}".removeprefix("."))


def _problems(
    error: ValidationError, data: Any, prefix: str = ""
) -> Iterator[tuple[str, str, Any, str]]:
    """The type, dotted key, value and message of all problems, those of an algorithm included."""
    for problem in error.errors():
        what, loc = problem["type"], problem["loc"]
        key, value = _place(loc, data, what == "missing")
        inner = problem.get("ctx", {}).get("error")
        if isinstance(inner, ValidationError):  # an algorithm's own fields
            yield from _problems(inner, value, f"{prefix}{key}.")
            continue
        of_key = loc[-1:] == ("[key]",)
        if what in UNKNOWN or (of_key and what == "literal_error"):
            what = "unknown"
        elif of_key:
            what = "no name"
        message = problem["msg"].removeprefix("Value error, ")
        yield what, prefix + key, problem["input"], message


def _place(loc: Sequence[int | str], data: Any, missing: bool) -> tuple[str, Any]:
    """The dotted key of pydantic's location, without members of unions, and the value there."""
    parts = []
    for part in loc:
        if part in _held(data):
            parts.append(str(part))
            data = _held(data)[part]
    return ".".join([*parts, *([str(loc[-1])] if missing else [])]), data


def _space(wrong: Any) -> str:
    return "; YAML needs a space after ':'" if ":" in str(wrong) else ""


def _example(key: str, wrong: Any) -> str:
    """How to write a setting of the group `key`, in whose place there is a value."""
    if not isinstance(wrong, str):
        return "KEY=VALUE"
    if key in REWARD_TABLES:
        return f"{wrong}=1"
    if key.rpartition(".")[0] in REWARD_TABLES:
        return f"kind={wrong}"
    return f"name={wrong}" if key == "algorithm" else "KEY=VALUE"
