"""Builds a config, or any other group of settings, from recipes, files and `key=value` overrides.

Unknown keys, wrong types and values out of range are refused with a `UserError` that names the key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from g2rpo.config.algorithms import ALGORITHMS, algorithm_class, with_name
from g2rpo.config.complaints import REWARD_TABLES, complaints, truths
from g2rpo.config.schema import Config
from g2rpo.core import plugins
from g2rpo.core.errors import UserError, did_you_mean, refuse
from g2rpo.core.plain import DEEPEST_NESTING, Section, parse_yaml, read_text
from g2rpo.core.plugins import PYTHON

LARGEST_YAML = 2**18
"""Largest YAML file in bytes, 50 times the longest recipe."""

CODE_KEYS = ("name", "kind", "target", "detector", "trackers")
"""Last parts of keys whose values may name code."""

TAKES_OUT = ("", "~")
"""Values of an override that take an entry out; "null" too takes out a reward."""

SMALLEST, LARGEST = 1e-18, 1e18
"""Absolute values of settings that are not 0."""

G = TypeVar("G", bound=Section)


def resolve(
    data: Mapping[str, Any],
    overrides: Sequence[str] = (),
    source: str = "config",
    notify: Callable[[str], None] = lambda message: None,
    mention: bool = False,
) -> Config:
    """The config of `data` (as read from YAML) with `key=value` overrides; `source` names it in
    messages.

    Hyper-parameters of different algorithms are independent even if their names agree. So an
    override of `algorithm.name` replaces the whole group by that algorithm's published defaults. A
    user's class that inherits from the algorithm of `data` is a variant of it, and keeps what it
    does not redefine. `notify` is called with what was kept or left out. With `mention`, an
    algorithm whose code may not be imported is a `plugins.Mentioned` one; without, it is refused.
    """
    allow_code(overrides)
    merged = _with_other_algorithm(data, overrides, source, notify)
    return resolve_as(Config, merged, overrides, source, mention)


def allow_code(overrides: Sequence[str]) -> None:
    """Allows code that overrides name: the user has named it, at the command line or as an
    argument."""
    for override in overrides:
        key, _, text = override.partition("=")
        try:
            value = parse_yaml(text)
        except ValueError:
            continue  # `_override` refuses it
        for code in codes_in(value, key.rpartition(".")[2]):
            plugins.allow(code)


def resolve_as(
    kind: type[G],
    data: Mapping[str, Any],
    overrides: Sequence[str] = (),
    source: str = "config",
    mention: bool = False,
) -> G:
    """As `resolve`, for any kind of group."""
    allow_code(overrides)
    merged: dict[str, Any] = _copied(data)
    for override in overrides:
        _override(merged, override)
    try:
        group = kind.model_validate(merged, context={"mention": mention})
        plain = group.model_dump(mode="json")
        said = [*truths(merged, plain), *_wrong_sizes(plain)]
    except ValidationError as error:
        said = list(complaints(error, kind, merged))
    if said:
        raise UserError("\n".join(f"{source}: {complaint}" for complaint in said))
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
    """`data` without its hyper-parameters, if an override names another algorithm. One of the
    user's that inherits from the recipe's keeps those whose defaults it does not change."""
    given = data.get("algorithm")
    asked = [
        override.partition("=")[2].strip(" '\"")
        for override in overrides
        if override.startswith("algorithm.name=")
    ]
    if not asked or not isinstance(given, Mapping) or asked[-1] == with_name(given)["name"]:
        return data
    kind = _class_in({"name": asked[-1]}, source, mention=False)
    recipes = _class_in(given, source, mention=True)
    own = asked[-1] not in ALGORITHMS
    stays = own and None not in (kind, recipes) and issubclass(kind, recipes)
    replaced = {override.partition("=")[0].removeprefix("algorithm.") for override in overrides}
    kept, stay, left = {}, {}, {}
    for key, value in given.items():
        if key == "name":
            continue
        if stays and getattr(kind, key, None) == getattr(recipes, key, None):
            kept[key] = value
            if key not in replaced:
                stay[key] = value
        elif getattr(kind, key, None) != value:
            left[key] = value
    if stay:
        notify(
            f"algorithm.name={asked[-1]}: a {recipes.__name__}, so {source}'s {_assigned(stay)} stay"
        )
    if left:
        whose = "its" if own else "its published"
        notify(
            f"algorithm.name={asked[-1]}: {whose} defaults; {source}'s {_assigned(left)} are left out"
        )
    return {**data, "algorithm": kept}


def _assigned(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())


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
        fault = "is empty" if data is None else "holds none"
        raise UserError(f"{path}: should hold groups like 'policy:' and 'algorithm:', but {fault}")
    return data


def absent_reward(data: Mapping[str, Any], override: str) -> str | None:
    """The key of an override that removes a reward (`rewards.clip=`) which `data` does not have;
    otherwise None."""
    key, equals, text = override.partition("=")
    group, _, name = key.rpartition(".")
    if group not in REWARD_TABLES or not equals or not _takes_out(key, text):
        return None
    return None if name in _at(data, group) else key


def _takes_out(key: str, text: str) -> bool:
    """Whether an override of `key` takes the entry out."""
    null = key.rpartition(".")[0] in REWARD_TABLES and text.strip() == "null"
    return null or text.strip() in TAKES_OUT


def _at(data: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    """The mapping at a dotted key; empty if there is none."""
    inner: Any = data
    for part in group.split("."):
        inner = inner.get(part) if isinstance(inner, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def differences(a: Section, b: Section) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both values."""
    left, right = dict(_leaves(a.model_dump(mode="json"))), dict(_leaves(b.model_dump(mode="json")))
    return {
        key: (left.get(key), right.get(key))
        for key in {**left, **right}
        if left.get(key) != right.get(key)
    }


def listed_differences(ours: Section, theirs: Section, may_change: Collection[str] = ()) -> str:
    """The keys that differ but may not, with both values, a line each; "" for none."""
    changed = differences(ours, theirs).items()
    return "".join(
        f"\n  {key}: {there!r} there, {here!r} here"
        for key, (here, there) in changed
        if key not in may_change
    )


def _copied(data: Any) -> Any:
    return (
        {key: _copied(value) for key, value in data.items()} if isinstance(data, Mapping) else data
    )


def _leaves(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(data, Mapping) and data:
        for key, value in data.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, data


def _override(data: dict[str, Any], override: str) -> None:
    refuse(_faults_of_override(data, override))
    key, _, text = override.partition("=")
    *groups, last = key.split(".")
    try:
        value = parse_yaml(text)
    except ValueError as error:
        hint = "write a number, a word or a list like [1,2]"
        reason = "" if str(error).startswith("is no YAML") else f" (it {error})"
        raise UserError(f"{key}: '{text:.80}' is no value{reason}; {hint}") from None
    refuse(_faults_of_comment(key, text, value))
    for group in groups:
        inner = data.get(group)
        if not isinstance(inner, dict):
            inner = data[group] = (
                {} if inner is None else {"weight": inner} if isinstance(inner, int | float) else {}
            )
        data = inner
    if _takes_out(key, text) and last in data:
        del data[last]  # `rewards.clip=` removes a reward
    else:
        data[last] = value


def _faults_of_override(data: Mapping[str, Any], override: str) -> Iterator[str]:
    key, equals, _ = override.partition("=")
    if (absent := absent_reward(data, override)) is not None:
        group, _, name = absent.rpartition(".")
        yield f"{absent}=: there is no reward '{name}' to remove.{did_you_mean(name, _at(data, group))}"
    if not equals or not key:
        yield f"'{override}' is no override; write key=value, for example trainer.iterations=100"
    for table in REWARD_TABLES:
        code = key.removeprefix(f"{table}.")
        if code != key and plugins.is_code(code):
            name = f"{table}.{code.rpartition(':')[2]}"
            yield f"{key}: code is a reward's kind, not its name; write {name}.kind={code}"
    if key.count(".") > DEEPEST_NESTING:
        yield f"'{key:.80}...' names a key inside {key.count('.')} others; at most {DEEPEST_NESTING} are read"


def _faults_of_comment(key: str, text: str, value: Any) -> Iterator[str]:
    """A comment of YAML, which `value` lacks: a colour or "file #2" is meant."""
    for begin in re.finditer(r"(^|\s)#", text):
        with suppress(ValueError):  # in quotes
            if parse_yaml(text[: begin.start()]) == value:
                yield f"{key}: '{text:.80}' has a comment, from the # on; write '{key}=\"{text:.80}\"'"


def _class_in(data: Mapping[str, Any], source: str, mention: bool) -> Any:
    """The class of an algorithm's mapping; None for an object, or for code that may not be imported
    if `mention` allows that."""
    name = str(with_name(data)["name"])
    if name == PYTHON:
        return None
    try:
        return algorithm_class(name)
    except plugins.CodeNotAllowed:
        if mention:
            return None
        raise
    except UserError as error:
        raise UserError(
            f"{source}: algorithm.name: {str(error).removeprefix('algorithm.')}"
        ) from None


def _wrong_sizes(plain: Mapping[str, Any]) -> Iterator[str]:
    """Numbers of a group whose square overflows or underflows float32; options of rewards are not
    checked."""
    wanted = f"should be 0, or from {SMALLEST:g} to {LARGEST:g} in size"
    for key, leaf in _leaves(plain):
        for number in _numbers(leaf) if "options" not in key.split(".") else ():
            if number and not SMALLEST <= abs(number) <= LARGEST:
                yield f"{key}: {wanted}, got {number:g}"


def _numbers(leaf: Any) -> Iterator[float]:
    if isinstance(leaf, float):
        yield leaf
    elif isinstance(leaf, list | Mapping):
        for inner in leaf.values() if isinstance(leaf, Mapping) else leaf:
            yield from _numbers(inner)
