"""Instructions that a judge was trained on, read from the files in which upstream publishes them."""

from __future__ import annotations

import ast
from pathlib import Path

from g2rpo.core.files import local
from g2rpo.core.plain import read_text


def read_instruction(place: str) -> str:
    """The text of a file, or with FILE.py:NAME the string that a Python file assigns to NAME; the file is read, not run.

    In an f-string every field must be a plain name, and stays as "{name}". Raises FileNotFoundError, or ValueError if the file
    assigns no such string.
    """
    path, _, name = place.rpartition(":") if ".py:" in place else (place, "", "")
    file = local(path)
    if not file.is_file():
        raise FileNotFoundError(f"{path}: no such file (an instruction is read from FILE.txt, or from FILE.py:NAME)")
    text = read_text(file)
    return _assigned(text, name, file) if name else text


def _assigned(source: str, name: str, file: Path) -> str:
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no Python file ({error})") from None
    found = [node.value for node in body if isinstance(node, ast.Assign) and _is_named(node.targets, name)]
    if not found:
        raise ValueError(f"{file} assigns nothing to {name}")
    if (text := _string(found[-1])) is None:
        raise ValueError(f"{file}: {name} is no plain string")
    return text


def _is_named(targets: list[ast.expr], name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def _string(node: ast.expr) -> str | None:
    """The string that an expression of literals means; None for any other expression."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.FormattedValue):
        return f"{{{node.value.id}}}" if isinstance(node.value, ast.Name) else None
    if isinstance(node, ast.JoinedStr):
        parts = [_string(part) for part in node.values]
        return None if None in parts else "".join(filter(None, parts))
    return None
