"""Whether files can be downloaded from the Hugging Face Hub, with a time limit (its library retries
for half a minute), and where an adapter lies, there or here."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath

from huggingface_hub import constants, get_token, try_to_load_from_cache

from g2rpo.core.errors import UserError, loading
from g2rpo.core.files import RunFiles, local
from g2rpo.core.http import NoAnswer, Refused, Unreachable, request_json
from g2rpo.models.adapter_files import PEFT_CONFIG, PEFT_WEIGHTS
from g2rpo.models.adapters import ADAPTER_FILE
from g2rpo.models.options import PolicyConfig

KNOWN_FILES = (ADAPTER_FILE, PEFT_WEIGHTS)
"""The names that diffusers and peft give to an adapter; others are taken where they are the only
one."""
HubQuestion = Callable[[], str | None]
"""A description of a problem, or None; may be slow."""


def cached(repository: str, *files: str) -> Path | None:
    """The first of `files` in the local cache of a repository."""
    found = (try_to_load_from_cache(repository, file) for file in files)
    return next((Path(path) for path in found if isinstance(path, str)), None)


def obstacle(repository: str, timeout_s: float = 1.5) -> str | None:
    """Why files of `repository` cannot be downloaded; None if they can, or if nothing is known
    within `timeout_s`."""
    return answers_of({repository: partial(_obstacle, repository, timeout_s)}, timeout_s).get(
        repository
    )


def _obstacle(repository: str, timeout_s: float) -> str | None:
    absent = "is not in the local hub cache, and"
    if constants.HF_HUB_OFFLINE:
        return f"{absent} HF_HUB_OFFLINE forbids to download it"
    try:
        request_json(
            f"{constants.ENDPOINT}/api/models/{repository}/auth-check",
            object,
            token=get_token(),
            timeout_s=timeout_s,
        )
    except Refused as error:
        return f"{absent} the hub refuses it ({error}); a gated model needs its licence accepted there, then `hf auth login`"
    except Unreachable:
        return f"{absent} {constants.ENDPOINT} cannot be reached"
    except NoAnswer:  # slow, or no valid JSON: a download may still work
        return None
    except UserError as error:  # of the environment's proxies
        return f"{absent} cannot be downloaded: {error}"
    return None


def find_adapter(name: str) -> Path:
    """The file of the adapter that policy.adapter names; of the hub's it is downloaded if need
    be."""
    place, said = local(name), f"policy.adapter={name}"
    run = RunFiles(place)
    if os.path.isfile(run.adapter / ADAPTER_FILE):
        return run.adapter / ADAPTER_FILE
    if os.path.isfile(run.config):
        raise UserError(
            f"{said}: is a run without an adapter; it is not finished, or it trained all weights"
        )
    if os.path.isdir(place):
        path = place / _only(said, [path.name for path in place.iterdir()])
    elif os.path.exists(place):
        path = place
    elif found := re.fullmatch(r"([\w-][\w.-]*/[\w-][\w.-]*?)(?:/(.+\.safetensors))?", name):
        path = _adapter_of(said, *found.groups())
    else:
        raise UserError(
            f"{said}: there is no such file or folder; give a .safetensors file, or OWNER/NAME[/FILE] of the hub"
        )
    if path.suffix != ".safetensors":
        raise UserError(
            f"{said}: is no .safetensors file; a pickle could run code, so convert it (safetensors.torch.save_file)"
        )
    return path


def located(config: PolicyConfig) -> PolicyConfig:
    """The config with the file of its adapter in place of its name."""
    if config.adapter is None:
        return config
    return config.model_copy(update={"adapter": str(find_adapter(config.adapter))})


def _adapter_of(said: str, repository: str, file: str | None) -> Path:
    """The file of an adapter of the hub, in its local cache, with peft's config beside it where
    there is one."""
    from huggingface_hub import hf_hub_download, list_repo_files

    if (found := cached(repository, *([file] if file else KNOWN_FILES))) is not None:
        return found
    if file is None and (readme := cached(repository, "README.md", ".gitattributes")) is not None:
        with suppress(UserError):  # an adapter of another name that was downloaded before
            return readme.parent / _only(said, [path.name for path in readme.parent.iterdir()])
    if (why := obstacle(repository)) is not None:
        raise UserError(f"{said}: is no file or folder here, and {why}")
    with loading(f"{said}: is no file or folder here, and the hub does not give it"):
        files = list_repo_files(repository)
        chosen = file or _only(said, files)
        config = PurePosixPath(chosen).with_name(PEFT_CONFIG).as_posix()
        if config in files:
            hf_hub_download(repository, config)
        return Path(hf_hub_download(repository, chosen))


def _only(said: str, files: Sequence[str]) -> str:
    """The adapter among a folder's files."""
    found = [file for file in files if file.endswith(".safetensors")]
    for name in KNOWN_FILES:
        if name in found:
            return name
    if len(found) == 1:
        return found[0]
    if not found and any(file.endswith((".bin", ".pt", ".ckpt")) for file in files):
        raise UserError(
            f"{said}: holds pickles only, which could run code; convert them (safetensors.torch.save_file)"
        )
    raise UserError(
        f"{said}: should hold one .safetensors file, or {ADAPTER_FILE}; it holds {', '.join(sorted(found)) or 'none'}"
    )


def answers_of(questions: Mapping[str, HubQuestion], seconds: float) -> dict[str, str]:
    """The answers to several questions within `seconds`; None for those without an answer.

    Late threads are abandoned: a name lookup cannot be interrupted.
    """
    answers: dict[str, str | None] = {}

    def ask(what: str, question: HubQuestion) -> None:
        answers[what] = question()

    threads = [threading.Thread(target=ask, args=each, daemon=True) for each in questions.items()]
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {what: answer for what in questions if (answer := answers.get(what)) is not None}
