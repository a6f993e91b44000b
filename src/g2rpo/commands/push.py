"""`g2rpo push`: a run's weights and card to a repository on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from g2rpo.commands.progress import say
from g2rpo.errors import UserError
from g2rpo.runs import weights_path


def push(run: Path, repository: str, *, private: bool, console: Console, api: Any = None) -> str:
    """Uploads the weights folder of `run` and returns its address; `api` is an HfApi, by default one with the stored token."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    if repository.count("/") != 1:
        raise UserError(f"'{repository}' is no repository; write owner/name")
    folder = weights_path(run)
    if not (folder / "README.md").is_file():
        raise UserError(f"{folder} has no model card; has the run finished?")
    api = api or HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        address = str(api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Weights tuned with g2rpo"))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(f"{repository}: the hub refused the upload: {error}") from error
    say(console, f"pushed {folder} to {address}")
    return address
