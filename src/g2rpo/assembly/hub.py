"""Whether files can be downloaded from the Hugging Face Hub, with a time limit (its library retries for half a minute)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from huggingface_hub import constants, get_token, try_to_load_from_cache

from g2rpo.rewards.transport import NoAnswer, Refused, Unreachable, request_json

Question = Callable[[], str | None]
"""A description of a problem, or None; may be slow."""


def cached(repository: str, *files: str) -> Path | None:
    """The first of `names` in the local cache of a repository."""
    found = (try_to_load_from_cache(repository, file) for file in files)
    return next((Path(path) for path in found if isinstance(path, str)), None)


def obstacle(repository: str, timeout_s: float = 1.5) -> str | None:
    """Why files of `repository` cannot be downloaded; None if they can, or if nothing is known within `timeout_s`."""
    return at_once({repository: partial(_obstacle, repository, timeout_s)}, timeout_s).get(repository)


def _obstacle(repository: str, timeout_s: float) -> str | None:
    absent = "is not in the local hub cache, and"
    if constants.HF_HUB_OFFLINE:
        return f"{absent} HF_HUB_OFFLINE forbids to download it"
    try:
        request_json(f"{constants.ENDPOINT}/api/models/{repository}/auth-check", token=get_token(), timeout_s=timeout_s)
    except Refused as error:
        return f"{absent} the hub refuses it ({error}); a gated model needs its licence accepted there, then `hf auth login`"
    except Unreachable:
        return f"{absent} {constants.ENDPOINT} cannot be reached"
    except NoAnswer:  # slow, or no valid JSON: a download may still work
        return None
    return None


def at_once(questions: Mapping[str, Question], seconds: float) -> dict[str, str]:
    """The answers to several questions within `seconds`; None for those without an answer.

    Late threads are abandoned: a name lookup cannot be interrupted.
    """
    answers: dict[str, str | None] = {}

    def ask(what: str, question: Question) -> None:
        answers[what] = question()

    threads = [threading.Thread(target=ask, args=each, daemon=True) for each in questions.items()]
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {what: answer for what in questions if (answer := answers.get(what)) is not None}
