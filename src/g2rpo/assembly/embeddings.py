"""The cache of text embeddings, and the identity of what they come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from g2rpo.assembly import hub
from g2rpo.assembly.components import locate_pipeline
from g2rpo.assembly.pipeline_files import INDEX
from g2rpo.config.schema import PolicyConfig
from g2rpo.core.errors import UserError
from g2rpo.core.files import FileDigests, cache_root, digest_of, local
from g2rpo.policies.anyflow import DiffusersPolicy
from g2rpo.policies.embeddings import CachedEncoder, EmbeddingStore, Encoder
from g2rpo.policies.encoding import PictureEncoder

NOT_IN_EMBEDDINGS = {
    "path", "pipeline", "device", "height", "width", "num_frames", "guidance_scale", "guidance_scale_2", "expert", "tuning",
    "lora_rank", "lora_alpha", "lora_targets", "lora_init", "lora_above", "gradient_checkpointing", "truncate_timesteps",
    "detach_negative", "published_pictures", "vae_tiling", "quantize", "attention", "autocast", "compile", "adapter",
    "assistant", "assistant_in_evaluation",
}  # fmt: skip
"""Settings of a policy that text embeddings do not depend on. All others are part of their key."""


def cache_embeddings(
    text: Encoder, config: PolicyConfig, cache: str, notify: Callable[[str], None]
) -> CachedEncoder:
    """`text`, the encoders of `config`, with their embeddings cached as in `prompts.cache`: "auto",
    "off" or a folder."""
    store = None
    if cache != "off":
        root = local(cache) if cache != "auto" else cache_root() / "embeddings"
        try:
            root.mkdir(parents=True, exist_ok=True)
            edits = bool(getattr(text, "pictured", ()))
            parts = ("text_encoder", "tokenizer", *(["vae"] if edits else []))
            left_out = NOT_IN_EMBEDDINGS - ({"height", "width", "vae_tiling"} if edits else set())
            settings = {
                key: value
                for key, value in config.model_dump(mode="json").items()
                if key not in left_out
            }
            identity = {
                **_identity_of(config.path, FileDigests(root / "digests.json"), parts),
                "settings": settings,
                # whether the negative prompt is encoded too
                "guided": getattr(text, "guided", False),
            }
            store = EmbeddingStore(root, identity)
        except OSError as error:
            hint = "set prompts.cache (g2rpo evaluate: cache) to another folder, or to off"
            raise UserError(
                f"embedding cache {root}: cannot be written ({error.strerror}); {hint}"
            ) from None
    return CachedEncoder(text, store, notify=notify)


def cache_latents(
    policy: DiffusersPolicy, config: PolicyConfig, cache: str, notify: Callable[[str], None]
) -> CachedEncoder:
    """The encoder of picture files of a policy, whose latents are cached as in `prompts.cache`."""
    store = None
    if cache != "off":
        root = local(cache) if cache != "auto" else cache_root() / "embeddings"
        vae = _identity_of(config.path, FileDigests(root / "digests.json"), ("vae",))
        size = {"height": config.height, "width": config.width, "dtype": config.dtype}
        store = EmbeddingStore(root, {**vae, "latents": size})
    return CachedEncoder(PictureEncoder(policy), store, notify=notify)


def _identity_of(name: str, digests: FileDigests, parts: tuple[str, ...]) -> dict[str, str]:
    """The identity of a pipeline's parts whose names begin so: their content, or hub id and
    commit."""
    path, kind = locate_pipeline(name, chosen="any")
    root = Path(path)
    if not root.is_dir():
        return {"pipeline": kind, "hub": path, "commit": _commit(path)}
    folders = [folder for folder in sorted(root.iterdir()) if folder.name.startswith(parts)]
    return {"pipeline": kind, "content": digests.of_folders(root, folders)}


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
