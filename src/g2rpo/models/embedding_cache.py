"""The cache of text embeddings, and the identity of what they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from g2rpo.core.errors import UserError
from g2rpo.core.files import FileDigests, cache_root, digest_of, local
from g2rpo.models import hub
from g2rpo.models.embeddings import CachedEncoder, EmbeddingStore, Encoder
from g2rpo.models.load import locate_pipeline
from g2rpo.models.options import PolicyConfig
from g2rpo.models.pipeline_files import INDEX, options_in, parts_in, read_file

NOT_IN_EMBEDDINGS = {
    "path", "pipeline", "device", "height", "width", "num_frames", "guidance_scale", "tuning",
    "lora_rank", "lora_alpha", "lora_targets", "lora_init", "lora_above", "gradient_checkpointing", "truncate_timesteps",
    "detach_negative", "published_pictures", "vae_tiling", "quantize", "attention", "autocast", "compile", "adapter",
}  # fmt: skip
"""Settings of a policy that text embeddings do not depend on. All others are part of their key."""


NO_ENCODERS = ("transformer", "scheduler")
"""How parts of a pipeline are named that encode nothing; its VAE encodes input pictures."""


def cache_embeddings(
    text: Encoder, config: PolicyConfig, cache: str, notify: Callable[[str], None]
) -> CachedEncoder:
    """`text`, the encoders of `config`, with their embeddings cached as in `prompts.cache`: "auto",
    "off" or a folder."""
    edits = bool(getattr(text, "pictured", ()))
    left_out = NOT_IN_EMBEDDINGS - ({"height", "width", "vae_tiling"} if edits else set())
    settings = config.model_dump(mode="json", exclude=left_out)
    unread = NO_ENCODERS if edits else (*NO_ENCODERS, "vae")
    # whether the negative prompt is encoded too
    more = {"settings": settings, "guided": getattr(text, "guided", False)}
    store = _store(config.path, cache, lambda part: not part.startswith(unread), more)
    return CachedEncoder(text, store, notify=notify)


def _store(
    pipeline: str, cache: str, reads: Callable[[str], bool], more: Mapping[str, Any]
) -> EmbeddingStore | None:
    """The store of what the parts that it `reads` of a pipeline make; None where `prompts.cache` is
    off."""
    if cache == "off":
        return None
    root = local(cache) if cache != "auto" else cache_root() / "embeddings"
    try:
        root.mkdir(parents=True, exist_ok=True)
        identity = _identity_of(pipeline, FileDigests(root / "digests.json"), reads)
        return EmbeddingStore(root, {**identity, **more, "libraries": _libraries()})
    except OSError as error:
        hint = "set prompts.cache (g2rpo evaluate: cache) to another folder, or to off"
        raise UserError(
            f"embedding cache {root}: cannot be written ({error.strerror}); {hint}"
        ) from None


def _libraries() -> dict[str, str]:
    """The versions of what encodes, without the last number: a patch that mends something else
    encodes no prompt again."""
    import diffusers  # not by a command that is refused
    import ftfy  # pipelines clean prompts with it
    import transformers

    every = (diffusers, ftfy, transformers)
    return {one.__name__: ".".join(one.__version__.split(".")[:2]) for one in every}


def _identity_of(name: str, digests: FileDigests, reads: Callable[[str], bool]) -> dict[str, Any]:
    """The identity of the parts of a pipeline: their content and the options in its index, or hub
    id and commit."""
    path, kind = locate_pipeline(name, chosen="any")
    root = Path(path)
    if not root.is_dir():
        return {"pipeline": kind, "hub": path, "commit": _commit(path)}
    index = read_file(path, INDEX)
    folders = [root / part for part in parts_in(index) if reads(part)]
    content = digests.of_folders(root, folders)
    return {"pipeline": kind, "content": content, "options": options_in(index)}


def pipeline_identity(name: str) -> str:
    """A cheap identity of a pipeline: a folder's file names and sizes, or a hub id's commit."""
    path, _ = locate_pipeline(name, chosen="any")
    root = Path(path)
    if not root.is_dir():
        return f"{path}@{_commit(path)}"
    files = [
        path
        for path in sorted(root.rglob("[!.]*"))
        if path.is_file() and ".cache" not in path.relative_to(root).parts
    ]
    return digest_of([[path.relative_to(root).as_posix(), path.stat().st_size] for path in files])


def _commit(hub_id: str) -> str:
    """The commit of a pipeline in the hub's local cache."""
    index = hub.cached(hub_id, INDEX)
    if index is None:
        raise UserError(
            f"policy.path={hub_id}: is not in the local hub cache; download it, or name a folder"
        )
    return index.parent.name
