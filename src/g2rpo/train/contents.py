"""Digests of what the names in a config refer to: prompts, models, reward code. A resumed run must
have the same."""

from __future__ import annotations

import hashlib
import inspect
import tokenize
from pathlib import Path
from typing import Any

from g2rpo.core import plugins
from g2rpo.core.files import FileDigests, digest_of, local
from g2rpo.core.images import digest_of_prompts
from g2rpo.rewards.catalogue import RewardKind
from g2rpo.train.found import Found

SMALL_FILE = 2**24  # bytes; larger files, which are weights, are compared by their size


def contents_of(found: Found) -> dict[str, str]:
    """A short description with a digest of the prompts, the model, and the files or the source of
    each reward.

    The file of a reward's or a model's code and the files and folders in a reward's options count;
    what code imports does not.
    """
    config, given, pipeline = found.config, found.given, found.pipeline
    rewards = {**(given.rewards or {}), **(given.judges or {})}
    digests = {
        "prompts.train": f"{len(found.prompts)} prompts, {_short_digest(digest_of_prompts(found.prompts))}",
        "evaluation.prompts": f"{len(found.heldout)} prompts, {_short_digest(digest_of_prompts(found.heldout))}",
        **({"policy.path": source_of(given.policy)} if pipeline is None else pipeline.digests()),
        "policy.kind": _of_code(config.policy.kind or ""),
        "algorithm": source_of(config.algorithm),
        **{f"rewards.{kind.name}": of_kind(kind) for kind in found.kinds},
        **{f"rewards.{name}": source_of(reward) for name, reward in rewards.items()},
    }
    return {key: words for key, words in digests.items() if words}


def source_of(thing: Any) -> str:
    """A digest of the source of a function, a class or an object's class; empty for g2rpo's own and
    if the source is not available."""
    kind = thing if inspect.isroutine(thing) or inspect.isclass(thing) else type(thing)
    if kind.__module__.partition(".")[0] == "g2rpo":
        return ""
    try:
        return f"source of {kind.__qualname__}, {_short_digest(hashlib.sha256(inspect.getsource(kind).encode()).hexdigest())}"
    # defined interactively, or not in a Python file
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return ""


def of_kind(kind: RewardKind) -> str:
    """Digests of a reward's code, if it is the user's, and of the local files in its options: those
    that its class declares, or any that code of the user's has."""
    given = kind.entry.options
    may = (
        {*kind.declared.files, kind.declared.code_option} if kind.is_reward_class else given.keys()
    )
    paths = [
        _file_of(value) for key, value in given.items() if key in may and isinstance(value, str)
    ]
    code = _of_code(kind.entry.kind) or source_of(kind.maker)
    files = [f"{path.name}: {_of_path(path)}" for path in paths if path is not None]
    return ", ".join(([code] if code else []) + files)


def _of_code(name: str) -> str:
    """A digest of the file in FILE.py:NAME; empty for any other name."""
    path = _file_of(name) if plugins.is_code(name) else None
    return "" if path is None else f"{path.name}: {_of_path(path)}"


def _file_of(value: str) -> Path | None:
    """The file or folder in an option, also of "file.py:function"."""
    for name in (value, value.rpartition(":")[0]):
        try:
            if name and local(name).exists():
                return local(name)
        except (OSError, ValueError):  # not a possible file name
            continue
    return None


def _of_path(path: Path) -> str:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return _short_digest(
            digest_of([[file.relative_to(path).as_posix(), file.stat().st_size] for file in files])
        )
    size = path.stat().st_size
    return _short_digest(FileDigests(None).of(path)) if size <= SMALL_FILE else f"{size} bytes"


def _short_digest(digest: str) -> str:
    return f"sha256 {digest[:16]}"
