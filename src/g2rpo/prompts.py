"""Prompts from files, and an order that is a function of the iteration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch

from g2rpo.errors import UserError
from g2rpo.seeding import generator_for


def read_prompts(path: Path) -> list[str]:
    """Prompts of a UTF-8 file: one a line (blank lines are skipped), or .jsonl with an object that holds "prompt" a line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise UserError(f"prompt file {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"prompt file {path}: is not UTF-8 (byte {error.start}); convert it, say with iconv") from None
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if path.suffix == ".jsonl":
        prompts = [_from_json(path, number, line) for number, line in numbered]
    else:
        prompts = [line for _, line in numbered]
    if not prompts:
        raise UserError(f"prompt file {path}: is empty; write one prompt a line")
    return prompts


def _from_json(path: Path, number: int, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (json.JSONDecodeError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str) or not prompt.strip():
        wanted = '{"prompt": "a red circle"}'
        raise UserError(f"prompt file {path}, line {number}: should be an object like {wanted}, is {line[:80]}")
    return prompt.strip()


class PromptOrder:
    """Every epoch is its own shuffle of all prompts; which prompts an iteration gets depends on nothing but its number."""

    def __init__(self, prompts: Sequence[str], seed: int) -> None:
        self.prompts = list(prompts)
        self.seed = seed
        self._shuffle = lru_cache(maxsize=2)(self._shuffled)

    def batch(self, iteration: int, size: int) -> list[str]:
        """The prompts of an iteration that takes `size` of them; an epoch's end may fall inside."""
        places = range(iteration * size, (iteration + 1) * size)
        return [self.prompts[self._shuffle(place // len(self.prompts))[place % len(self.prompts)]] for place in places]

    def _shuffled(self, epoch: int) -> list[int]:
        return torch.randperm(len(self.prompts), generator=generator_for(self.seed, "prompts", epoch)).tolist()
