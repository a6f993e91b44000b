"""Any Python function as a reward, named by its file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from g2rpo.core.errors import UserError
from g2rpo.core.plugins import is_code, load
from g2rpo.core.types import CallableReward, Scorer


def load_function(target: str) -> Callable[..., Any]:
    """The function or class called "path/to/file.py:name"; the file is run once per path. ValueError if there is none."""
    if not (is_code(target) and target.rpartition(":")[0].endswith(".py")):  # the form of a name that `plugins` must allow
        raise ValueError(f"a function is named 'path/to/file.py:function', got {target!r}")
    try:
        found = load(target)
    except UserError as error:
        raise ValueError(str(error)) from error
    if not callable(found):
        raise ValueError(f"{target}: is a {type(found).__name__}, not a function or class")
    return found


class FunctionReward(CallableReward):
    """Scores by `function(images, prompts, **options)`; a class is made with `options` and then called.

    `target` is the function or class, or its place as "path/to/file.py:name".

    The function gets images [B, 3, H, W], float in [0, 1] as they were decoded, and the prompts, under no_grad. It returns B
    numbers: a tensor, an array or a list, in which None, NaN and infinity mean "no score". Those of its attributes that a
    `types.Reward` has are the reward's. Its exceptions are not caught. Raises ValueError if the function cannot be loaded.
    """

    code_option = "target"

    def __init__(self, target: str | Scorer, *, options: Mapping[str, Any] | None = None) -> None:
        found: Any = load_function(target) if isinstance(target, str) else target
        if isinstance(found, type):
            super().__init__(found(**(options or {})))
        else:
            super().__init__(found, options)
