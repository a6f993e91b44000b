"""Plain data from untrusted YAML, JSON and text files: no code, no expansion, no loops, no blocking
reads."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import stat
from codecs import BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass as pydantic_dataclass

from g2rpo.core.errors import placed, refuse, shown

T = TypeVar("T")

Count = Annotated[int, Field(gt=0, le=10**6)]
"""More than a million is a typing error, and would exhaust memory before any message."""

Iteration = Annotated[int, Field(ge=0, le=10**6)]
"""The number of finished iterations."""

Number = Annotated[int | float, Field(ge=-1e300, le=1e300)]
"""A finite number, with whose squares one can still reckon."""


def _no_infinity(value: float) -> float:
    if abs(value) > 1e300:
        raise ValueError("Value should be a finite number, or NaN")
    return value


Figure = Annotated[
    float,
    Field(allow_inf_nan=True),
    AfterValidator(_no_infinity),
    BeforeValidator(lambda value: math.nan if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None),
]
"""A number that may be unknown: NaN, and null in JSON."""

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
Kind = TypeVar("Kind")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def hyper_parameters(kind: type[Kind]) -> type[Kind]:
    """Makes a class a frozen dataclass whose fields are checked in YAML and in Python alike:

    @hyper_parameters
    class Mine(PolicyGradient):
        group_size: GroupSize = 12
    """
    return pydantic_dataclass(kind, config=STRICT, frozen=True, kw_only=True)  # type: ignore[return-value]


GroupSize = Annotated[int, Field(ge=2, le=10_000)]
"""A group of one has no advantage; more than these is a typing error, and would exhaust memory
before any message."""

UpdateEverySetting = Literal["rollout", "branch"] | Count
"""`types.UpdateEvery` with its limit."""


def distinct(values: tuple[T, ...]) -> tuple[T, ...]:
    """ValueError for a value that is named twice."""
    if len(set(values)) < len(values):
        raise ValueError(f"should name each number once, got {list(values)}")
    return values


Distinct = AfterValidator(distinct)

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""The beginning of a file in whose place git has left a pointer."""

BYTE_ORDER_MARKS = {
    BOM_UTF32_LE: "UTF-32",  # begins with that of UTF-16
    BOM_UTF32_BE: "UTF-32",
    BOM_UTF16_LE: "UTF-16",
    BOM_UTF16_BE: "UTF-16",
}
"""Byte order marks of other codings than UTF-8."""

LARGEST_FILE = 2**28
"""Bytes of the largest file that is read; logs, which grow, may be four times as large."""

DEEPEST_NESTING = 32
"""Deepest nesting of lists and mappings; configs have five levels."""


class Section(BaseModel):
    """A group of settings; unknown ones are refused."""

    model_config = ConfigDict(frozen=True, **STRICT)

    def to_yaml(self) -> str:
        data = self.model_dump(mode="json")
        text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
        if "\x85" in text:  # line ends in YAML, which PyYAML writes verbatim and reads as spaces
            text = yaml.dump(data, Dumper=_Dumper, sort_keys=False)
        return text


class _Dumper(yaml.SafeDumper):
    """Texts that `_Loader` would read as something else are written in quotes."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1's plain types, and YAML 1.2's numbers like 1e-4. No aliases (a few lines could expand to billions of values, or to
    cycles), no tags, no dates (they would not survive a round trip)."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own way)
        first: [
            (tag, pattern)
            for tag, pattern in known
            if not tag.endswith((":timestamp", ":merge", ":value"))
        ]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        refuse(self._faults(), ValueError)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def _faults(self) -> Iterator[str]:
        """What the next node may not be."""
        if self.check_event(yaml.AliasEvent):
            yield "has an alias (*name); write the value out"
        if self.peek_event().tag is not None:
            yield "has a tag (!name); only plain values are read"
        if self.depth > DEEPEST_NESTING:
            yield f"is nested more than {DEEPEST_NESTING} levels deep"

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise ValueError(f"has the key '{key.value}' twice")
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: Any) -> Any:
        text = super().construct_scalar(node)
        if not is_text(text):
            raise ValueError("has a character that no text may have (NUL or a lone surrogate)")
        return text

    def construct_yaml_int(self, node: Any) -> int:
        if len(node.value) > 20 or abs(number := super().construct_yaml_int(node)) >= 2**63:
            raise ValueError(f"has a whole number of more than 63 bits, {node.value:.20}...")
        refuse(_other_bases(node.value, number), ValueError)
        return number

    def construct_yaml_float(self, node: Any) -> float:
        if not math.isfinite(number := super().construct_yaml_float(node)):
            raise ValueError(f"has a number that is not finite, {node.value:.20}")
        refuse(_other_bases(node.value, number), ValueError)
        return number


def _other_bases(text: str, number: float) -> Iterator[str]:
    """What YAML 1.1 reads otherwise than people do: octal numbers by a leading 0, sexagesimal ones
    by colons."""
    base = 60 if ":" in text else 8 if re.match(r"[-+]?0[0-7_]+$", text) else None
    if base is not None:
        yield f"has {text}, which YAML reads to base {base}: {number}; write the number that you mean"


for _of in (_Loader, _Dumper):
    _of.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )
for _kind in ("int", "float"):
    _Loader.add_constructor(
        f"tag:yaml.org,2002:{_kind}", getattr(_Loader, f"construct_yaml_{_kind}")
    )


def parse_yaml(text: str) -> Any:
    """The plain data (None, bool, int, float, str, list, dict) in `text`. ValueError says what is
    wrong with it.

    Refused: tags, aliases, duplicate keys, more than `DEEPEST_NESTING` levels, non-finite numbers, integers
    beyond 64 bits, numbers to base 8 or 60, NUL and lone surrogates. Dates are strings.
    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506 (a restricted SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"is no YAML: {_place_of(error)}") from None


def _place_of(error: yaml.YAMLError) -> str:
    """ "line 2, column 1: found character '\\t' that cannot start any token" """
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return str(error)
    spaces = "; indent with spaces" if "'\\t'" in problem else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}{spaces}"


def is_text(text: str) -> bool:
    """Whether `text` can be written to files, terminals and file names: no NUL, no lone
    surrogate."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def printable(text: str) -> str:
    """`text` on one line, with spaces in the place of what no terminal should get."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


class Repeated(ValueError):
    """An object has a key twice."""


def parse_json(text: str | bytes) -> Any:
    """The data in `text`; ValueError also if it is nested too deeply, or `Repeated`."""
    try:
        return json.loads(text, object_pairs_hook=_each_once)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    held: dict[str, Any] = {}
    for key, value in pairs:
        if key in held:
            raise Repeated(f"has the key {shown(key)} twice")
        held[key] = value
    return held


def read_as(kind: type[T], path: Path, hint: str = "") -> T:
    """The JSON of a file as `kind`: a pydantic model, a dataclass, or any type that pydantic reads.

    Types are strict: no text becomes a number. Raises UserError, which names the file and the wrong
    value and ends with `hint`, also for a file that cannot be read.
    """
    with placed(f"{path}: ", after=hint and f"; {hint}"):
        return parse_as(kind, read_text(path))


def read_lines_as(kind: type[T], path: Path, hint: str = "") -> list[T]:
    """As `read_as`, of a log with a JSON value on each line; an incomplete last line is left
    out."""
    values, adapter, after = [], TypeAdapter(kind), hint and f"; {hint}"
    with placed(f"{path}: ", after=after):
        *lines, _ = _read_regular(path, 4 * LARGEST_FILE).split(b"\n")
    for number, line in enumerate(lines, 1):
        with placed(f"{path}, line {number}: ", after=after):
            values.append(_parsed(adapter, decoded(line)))
    return values


def parse_as(kind: type[T], text: str | bytes | bytearray) -> T:
    """The JSON in `text` as `kind` (`read_as`); ValueError names the first wrong value."""
    return _parsed(TypeAdapter(kind), text)


def checked_as(kind: type[T], value: Any) -> T:
    """`value`, of Python's types, as `kind`, as strictly as `parse_as`; ValueError names the first
    wrong value."""
    with _first_in_words():
        return TypeAdapter(kind).validate_python(value, strict=True)


def _parsed(adapter: TypeAdapter[T], text: str | bytes | bytearray) -> T:
    with _first_in_words():
        return adapter.validate_json(text, strict=True)


@contextmanager
def _first_in_words() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise ValueError(_first_of(error)) from None


def _first_of(error: ValidationError) -> str:
    """ "steps.3: Input should be a valid integer, got 'x'" of the first error."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "json_invalid":
        return f"is no JSON ({first['ctx']['error']})"
    if first["type"] == "value_error":  # of a validator of ours
        return f"{place + ': ' if place else ''}{first['ctx']['error']}"
    got = "" if first["type"] == "missing" else f", got {shown(first['input'])}"
    return f"{place + ': ' if place else ''}{first['msg']}{got}"


def as_json(value: Any, indent: int | None = None) -> str:
    """JSON of plain data and dataclasses; null for numbers that JSON lacks."""
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) or isinstance(value, Mapping):
        return {
            key: _plain(inner)
            for key, inner in (value if isinstance(value, Mapping) else vars(value)).items()
        }
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


LOCAL_KERNELS = (None, "eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")
"""Implementations of attention and experts that transformers contains; for others it can import
code from the hub."""


def refuse_hub_kernels(config: Any, place: str) -> None:
    """ValueError, which begins with `place`, for the config of a transformers model that names an
    implementation of attention or experts from elsewhere, also in a part of it."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if not key.endswith("_implementation"):
            refuse_hub_kernels(value, place)
        elif any(
            name not in LOCAL_KERNELS
            for name in (value.values() if isinstance(value, dict) else [value])
        ):
            raise ValueError(
                f"{place} has {key}={shown(value)}, which could be code from the hub; take it out of the file"
            )


def read_text(path: Path, largest: int = LARGEST_FILE) -> str:
    """The text of a UTF-8 file, with or without a byte order mark. Raises ValueError (not OSError)
    if it cannot be read."""
    return decoded(_read_regular(path, largest))


def _read_regular(path: Path, largest: int) -> bytes:
    """Reads regular files only: a pipe may never end."""
    with placed("cannot be read (", OSError, kind=ValueError, after=")"):
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):
            raise ValueError("cannot be read (it is no regular file)")
        if state.st_size > largest:
            raise ValueError(f"is {state.st_size} bytes large; at most {largest} are read")
        content = path.read_bytes()
    if content.startswith(LFS_POINTER):
        raise ValueError("is a pointer of git-lfs, not the file; `git lfs pull` fetches the file")
    return content


def decoded(content: bytes) -> str:
    """UTF-8 with or without a byte order mark, with line ends as files are read in text mode;
    ValueError for another coding. Which one it is, no program can tell from bytes alone."""
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        known = [name for mark, name in BYTE_ORDER_MARKS.items() if content.startswith(mark)]
        line = len(content[: error.start + 1].splitlines())
        hint = (
            f"`iconv -f {known[0]} -t UTF-8 OLD > NEW` converts it"
            if known
            else "`iconv -f ITS-CODING -t UTF-8 OLD > NEW` converts it, with the coding that it was "
            "written in, such as GBK, SHIFT_JIS, EUC-KR, WINDOWS-1251 or ISO-8859-1"
        )
        raise ValueError(f"is not UTF-8 (byte {error.start}, line {line}); {hint}") from None
