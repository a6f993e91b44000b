"""`g2rpo push`: a run's weights and card to a repository on the Hugging Face Hub."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from g2rpo.core.errors import UserError, placed
from g2rpo.train.model_card import CARD
from g2rpo.train.run.folder import Run


def push(run: Path, repository: str, *, private: bool, api: Any = None) -> str:
    """Uploads the weights folder of `run` and returns its address; `api` is an HfApi, by default
    one with the stored token."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id

    with placed(f"'{repository}' is no repository (", after="); write owner/name"):
        validate_repo_id(repository)
        if repository.count("/") != 1:
            raise ValueError("it has no owner")
    folder = Run(run).weights
    if not (folder / CARD).is_file():
        raise UserError(f"{folder} has no model card; has the run finished?")
    api = api or HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        return str(
            api.upload_folder(
                repo_id=repository, folder_path=folder, commit_message="Weights tuned with g2rpo"
            )
        )
    except Exception as error:  # without a network the exceptions are those of the HTTP library
        options = ["--private"] if private else []
        command = shlex.join(["g2rpo", "push", str(run), repository, *options])
        again = f"the weights stay in {folder}; `{command}` tries again"
        raise UserError(
            f"{repository}: the upload failed: {type(error).__name__}: {error}\n{again}"
        ) from error
