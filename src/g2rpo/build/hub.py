"""Whether the Hugging Face Hub would give something, asked once: its own library tries for half a minute."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, get_token, try_to_load_from_cache

from g2rpo.rewards.transport import NoAnswer, Refused, Unreachable, request_json


def cached(repository: str, *files: str) -> Path | None:
    """The first of some files of a repository that the local cache holds."""
    found = (try_to_load_from_cache(repository, file) for file in files)
    return next((Path(path) for path in found if isinstance(path, str)), None)


def obstacle(repository: str, timeout_s: float = 1.5) -> str | None:
    """Why files of `repository` cannot be downloaded; None if they can, or if nothing is known within `timeout_s`."""
    absent = "is not in the local hub cache, and"
    if constants.HF_HUB_OFFLINE:
        return f"{absent} HF_HUB_OFFLINE forbids to download it"
    try:
        request_json(f"{constants.ENDPOINT}/api/models/{repository}/auth-check", token=get_token(), timeout_s=timeout_s)
    except Refused as error:
        return f"{absent} the hub refuses it ({error}); a gated model needs its licence accepted there, then `hf auth login`"
    except Unreachable:
        return f"{absent} {constants.ENDPOINT} cannot be reached"
    except NoAnswer:  # slow, or what it says is no JSON: a download may still work
        return None
    return None
