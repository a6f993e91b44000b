"""Classes by name: built-ins, entry points of installed packages, and the user's own files and
modules.

    g2rpo                  a built-in
    mine                   an entry point of an installed package, in the group g2rpo.algorithms, g2rpo.models, ...
    my_file.py:Mine        something in a file
    package.module:Mine    something in a module that Python can import

Importing code runs it. Files and modules are therefore imported only after `allow`, which the
command line calls for names that the user has typed; a config that only mentions them is refused
(docs/security.md). A file that was allowed once stays allowed while its content is the same; the
digests are in the user's own `trusted_file`, never in a run.

Here is also what config.yaml says of objects that have no name, and what keeps torch's settings as
they were before foreign code ran.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic_core import to_jsonable_python

from g2rpo.core.errors import UserError, did_you_mean, where
from g2rpo.core.files import is_other, local, real, refuse_other, write_whole
from g2rpo.core.plain import read_as

_CODE = re.compile(r"(?P<source>[^:]+\.py|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)")
_allowed: set[str] = set()


class CodeNotAllowed(UserError):
    """A config mentions code that the user has not named at the command line."""

    def __init__(self, names: Sequence[str]) -> None:
        sources = dict.fromkeys(name.rpartition(":")[0] for name in names)
        self.options = [word for source in sources for word in ("--plugin", source)]
        named = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} code that a config names"
        super().__init__(
            f"{named}. Importing runs it: read it, then add {' '.join(self.options)} to the command"
        )


def is_code(name: str) -> bool:
    """Whether `name` has the form FILE.py:NAME or MODULE:NAME."""
    return _CODE.fullmatch(name) is not None


def allow(name: str) -> None:
    """Allows code to be imported by this process, and a file by later ones too. `name` is FILE.py
    or MODULE, with or without :NAME; UserError for anything else.
    """
    source = name.partition(":")[0]
    if not is_code(f"{source}:x"):
        raise UserError(
            f"'{name}' is no code; name a file (my_file.py) or a module (package.module)"
        )
    key = _key(source)
    _allowed.add(key)
    digest = _digest_of_code(key)
    known = _trusted()
    if digest is not None and known.get(key) != digest:
        path = trusted_file()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(path, json.dumps({**known, key: digest}, indent=1).encode())
        except OSError:
            return  # a home that cannot be written: the name is to be typed again


def trusted_file() -> Path:
    """The digests of the files that this user has allowed, by path."""
    return (
        local(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "g2rpo" / "trusted_code.json"
    )


def _trusted() -> dict[str, str]:
    path = trusted_file()
    hint = "delete it, and name your code with --plugin again"
    return read_as(dict[str, str], path, hint) if path.is_file() else {}


def _digest_of_code(key: str) -> str | None:
    """The SHA-256 of a file's content; None for a module and for a file that cannot be read."""
    try:
        code = key.endswith(".py") and not is_other(Path(key))
        return hashlib.sha256(Path(key).read_bytes()).hexdigest() if code else None
    except OSError:
        return None  # importing it says why


def _may_run(source: str) -> bool:
    """Whether code was allowed in this process, or is a file that was allowed in an earlier one and
    has not changed."""
    key = _key(source)
    if (
        key not in _allowed
        and (digest := _digest_of_code(key)) is not None
        and _trusted().get(key) == digest
    ):
        _allowed.add(key)
    return key in _allowed


def repeated() -> list[str]:
    """The `--plugin` options that allow the same code in another command; files below the current
    folder by their relative path."""
    here = Path.cwd()
    codes = [
        str(Path(code).relative_to(here)) if Path(code).is_relative_to(here) else code
        for code in sorted(_allowed)
    ]
    return [word for code in codes for word in ("--plugin", code)]


def require(name: str) -> None:
    """Raises `CodeNotAllowed` unless the file or module of `name` was allowed; nothing is
    imported."""
    require_all([name])


def require_all(names: Iterable[str]) -> None:
    """The same for several names, in one message."""
    if refused := [name for name in dict.fromkeys(names) if not _may_run(name.rpartition(":")[0])]:
        raise CodeNotAllowed(refused)


def available(group: str, builtin: Mapping[str, str]) -> dict[str, str]:
    """Short names of a group ("algorithms", "policies", ...), each with its MODULE:NAME; built-ins
    come first."""
    installed = {entry.name: entry.value for entry in entry_points(group=f"g2rpo.{group}")}
    return {**installed, **builtin}


def find_class(group: str, name: str, builtin: Mapping[str, str]) -> Any:
    """The class or function called `name` in a group. Raises `CodeNotAllowed` for a file or module
    that was not allowed, and UserError for an unknown name, missing code, or code that cannot be
    imported.
    """
    if is_code(name):
        require(name)
        return load(name)
    # first: reading all installed entry points is slow. Errors in built-ins are bugs and not caught
    if name in builtin:
        module, _, attribute = builtin[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    if name.endswith(".py"):
        raise UserError(f"{name} is a file; name what it defines after a colon, as {name}:NAME")
    known = available(group, builtin)
    if name not in known:
        raise UserError(
            f"unknown {group.removesuffix('s')} '{name}'.{did_you_mean(name, known)} Your own: FILE.py:NAME or MODULE:NAME."
        )
    module, _, attribute = known[name].partition(":")
    return _attribute(_import(module, name), attribute, name)


def load(name: str) -> Any:
    """The class or function FILE.py:NAME or MODULE:NAME, without the check of `require`; UserError
    if it cannot be imported."""
    source, _, attribute = name.rpartition(":")
    return _attribute(_import(source, name), attribute, name)


def _key(source: str) -> str:
    """A normal form of the ways to name a file."""
    return str(real(local(source))) if source.endswith(".py") else source


def _attribute(module: ModuleType, attribute: str, name: str) -> Any:
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if found is None:
        own = [
            key
            for key, value in vars(module).items()
            if callable(value) and value.__module__ == module.__name__
        ]
        raise UserError(f"{name}: there is no '{attribute}'.{did_you_mean(attribute, own)}")
    return found


def _import(source: str, name: str) -> ModuleType:
    """The module of a file or module name, run once; UserError if it cannot be imported."""
    try:
        with keeping_settings(source):
            return (
                load_file(refuse_other(local(source)))
                if source.endswith(".py")
                else importlib.import_module(source)
            )
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{name}: there is no file {source}") from None
    except Exception as error:  # anything the user's code raises
        raise UserError(
            f"{name}: cannot be imported: {type(error).__name__}: {error}{where(error)}"
        ) from error


def load_file(file: Path) -> ModuleType:
    """The module in a Python file, run once per path. Raises FileNotFoundError, and what the file
    raises."""
    file = real(file)
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    module_name = f"g2rpo_plugin_{file.stem}_{zlib.crc32(str(file).encode()):08x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None  # the name ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # as an import does: dataclasses look up their module by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


PYTHON = "python"
"""The name of every such object."""


@dataclass(frozen=True)
class Mentioned:
    """An algorithm of config.yaml that is not made: its name and its fields."""

    name: str
    fields: Mapping[str, Any]


def refuse_object(key: str, name: str) -> None:
    """UserError if an object was given for this key of a config."""
    if name == PYTHON:
        raise UserError(
            f"{key}={name}: this run was begun from Python with an object for it; resume it from the program that began "
            "it (api.trainer), or name another in its place"
        )


def recorded(algorithm: Any) -> dict[str, Any]:
    """The fields of `algorithm` as plain data."""
    if isinstance(algorithm, Mentioned):
        return dict(algorithm.fields)
    fields = (
        [field.name for field in dataclasses.fields(algorithm)]
        if dataclasses.is_dataclass(algorithm)
        else vars(algorithm)
    )
    values = {name: getattr(algorithm, name) for name in fields if name != "name"}
    plain: dict[str, Any] = to_jsonable_python(
        values, fallback=lambda value: PYTHON, inf_nan_mode="strings"
    )
    return plain


log = logging.getLogger(__name__)


@cache
def _settings() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """How each is read and set, by its name."""
    import torch

    cudnn = torch.backends.cudnn
    return {
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        # without one torch asks no code of Python's for the device of a new tensor
        "default device": (
            torch.get_default_device,
            lambda device: torch.set_default_device(None if device.type == "cpu" else device),
        ),
        "grad mode": (torch.is_grad_enabled, torch._C._set_grad_enabled),
        "number of threads": (torch.get_num_threads, torch.set_num_threads),
        "deterministic mode": (
            torch.get_deterministic_debug_mode,
            torch.set_deterministic_debug_mode,
        ),
        "precision of products": (
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        ),
        **{
            f"cudnn.{name}": (partial(getattr, cudnn, name), partial(setattr, cudnn, name))
            for name in ("enabled", "benchmark", "deterministic")
        },
    }


@contextmanager
def keeping_settings(who: str) -> Iterator[None]:
    """Sets back what the code inside leaves changed, and says so once: the run would compute
    otherwise. Random numbers are not among them: g2rpo's are from generators of their own."""
    before = {name: get() for name, (get, _) in _settings().items()}
    try:
        yield
    finally:
        for name, (get, put) in _settings().items():
            if (left := get()) != before[name]:
                put(before[name])
                _say(f"{who} left torch's {name} at {left}; it is {before[name]} again")


@cache
def _say(message: str) -> None:
    log.warning("%s", message)
