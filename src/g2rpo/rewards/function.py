"""Any Python function as a reward, named by the file it stands in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from g2rpo.errors import UserError
from g2rpo.plugins import is_code, load
from g2rpo.rewards.pixels import check_batch


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


class FunctionReward:
    """Scores by `function(images, prompts, **options)`; a class is made with `options` and then called.

    `target` is the function or class, or its place as "path/to/file.py:name".

    The function gets images [B, 3, H, W], float in [0, 1] as they were decoded, and the prompts, under no_grad. It returns B
    numbers: a tensor, an array or a list, in which None, NaN and infinity mean "no score". Its attributes `right`,
    `right_in_words`, `video`, `latent`, `waits`, `state` and `observe`, if it has them, are the reward's (`types.Reward`). Its
    exceptions are not caught.
    Raises ValueError if the function cannot be loaded.
    """

    def __init__(self, target: str | Callable[..., Any], *, options: Mapping[str, Any] | None = None) -> None:
        found = load_function(target) if isinstance(target, str) else target
        given = dict(options or {})
        self.target = target if isinstance(target, str) else found.__qualname__
        self.function: Any = found(**given) if isinstance(found, type) else found
        self.options = {} if isinstance(found, type) else given
        self.right, self.right_in_words = (getattr(self.function, name, None) for name in ("right", "right_in_words"))
        self.video, self.latent, self.waits = (bool(getattr(self.function, n, False)) for n in ("video", "latent", "waits"))

    @property
    def state(self) -> Any:
        """That of the function; AttributeError if it has none."""
        return self.function.state

    @state.setter
    def state(self, state: Any) -> None:
        self.function.state = state

    @property
    def observe(self) -> Any:
        """That of the function; AttributeError if it has none."""
        return self.function.observe

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores [B], float32 on CPU; ValueError if the function returns anything but B numbers."""
        if not self.latent:
            check_batch(images[:, 0] if images.ndim == 5 else images, prompts)
        answer = self.function(images, list(prompts), **self.options)
        if isinstance(answer, list | tuple):
            answer = [torch.nan if value is None else float(value) for value in answer]
        wanted = f"should return {len(images)} numbers, one per image, but returned"
        if answer is None:
            raise ValueError(f"{self.target} {wanted} None")
        scores = torch.as_tensor(answer, dtype=torch.float32).detach().cpu()
        if scores.shape != (len(images),):
            raise ValueError(f"{self.target} {wanted} the shape {list(scores.shape)}")
        return scores.where(torch.isfinite(scores), torch.nan)
