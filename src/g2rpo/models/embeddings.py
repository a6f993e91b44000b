"""Text embeddings on disk: every prompt is encoded once per set of text encoders, for all runs."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from g2rpo.core.contracts import check_embeddings
from g2rpo.core.data import Cond
from g2rpo.core.errors import UserError, counted, loading, shown
from g2rpo.core.events import Emit, Line, Progress, silent
from g2rpo.core.files import FileDigests, cache_root, digest_of, in_bytes, local, write_whole
from g2rpo.core.images import content_of
from g2rpo.models.options import PolicyConfig
from g2rpo.models.text import TextEncoders

FORMAT = 3
"""Part of every key. Increase it when the meaning of stored tensors changes; old files are then not
found."""
RAGGED = "ragged/"
"""Prefix of the names of tensors whose length depends on the prompt."""
KEPT = 2**26
"""Bytes of rows that are kept in memory where none are on disk: all of a tiny model's."""
DISK_RESERVE = 2**30
"""Bytes of the disk that the cache leaves free, so that checkpoints still fit."""


class DamagedEmbedding(ValueError):
    """A stored file that cannot be read, is truncated, changed, or another prompt's."""


class EmbeddingStore:
    """Conditioning rows in a folder, one safetensors file per prompt (its text and its pictures'
    content), below a folder per `identity`.

    `identity` is plain data with everything besides the prompt on which the tensors depend: the
    text encoders' content, dtype, lengths. Files are written whole or not at all, and carry a
    checksum. Several processes may share a store. OSError if the folder cannot be written.
    """

    def __init__(
        self, root: Path, identity: Mapping[str, Any], reserve: int = DISK_RESERVE
    ) -> None:
        self.reserve = reserve
        self.digests = FileDigests(None)
        self.folder = root / digest_of({"format": FORMAT, **identity})[:20]
        self.folder.mkdir(parents=True, exist_ok=True)
        # for readers of the folder
        write_whole(self.folder / "identity.json", json.dumps(dict(identity), indent=1).encode())

    def __contains__(self, prompt: str) -> bool:
        return self._path(prompt).is_file()

    def read(self, prompt: str) -> Cond | None:
        """The row of one prompt, on the CPU; None if it was never stored, `DamagedEmbedding` if the
        file is not intact."""
        path = self._path(prompt)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                notes = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        except (OSError, SafetensorError) as error:
            raise DamagedEmbedding(f"{path} cannot be read, or is truncated ({error})") from None
        if notes.get("prompt") != str(prompt) or notes.get("sha256") != _checksum(tensors):
            raise DamagedEmbedding(f"{path} was changed after it was written")
        ragged = {name: (tensors.pop(name),) for name in list(tensors) if name.startswith(RAGGED)}
        return Cond(tensors, {name.removeprefix(RAGGED): value for name, value in ragged.items()})

    def write(self, prompt: str, row: Cond) -> None:
        """Stores one row. Raises OSError if fewer than `reserve` bytes would remain free."""
        every = {
            **row.tensors,
            **{f"{RAGGED}{name}": value for name, (value,) in row.ragged.items()},
        }
        tensors = {name: value.detach().cpu().contiguous() for name, value in every.items()}
        notes = {"prompt": str(prompt), "sha256": _checksum(tensors)}
        content = safetensors.torch.save(tensors, metadata=notes)
        if shutil.disk_usage(self.folder).free < self.reserve + len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
        path = self._path(prompt)
        path.parent.mkdir(exist_ok=True)
        write_whole(path, content)

    def size(self, prompt: str) -> int:
        """Bytes of a stored row."""
        return self._path(prompt).stat().st_size

    def fits(self, prompts: int, like: str) -> bool:
        """Whether `prompts` more rows of the size of that of `like` fit on the disk."""
        return prompts * self.size(like) + self.reserve <= shutil.disk_usage(self.folder).free

    def _path(self, prompt: str) -> Path:
        name = hashlib.sha256(
            "\0".join([prompt, *content_of(prompt, self.digests)]).encode()
        ).hexdigest()
        return self.folder / name[:2] / f"{name}.safetensors"


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(repr((name, str(value.dtype), tuple(value.shape))).encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def encoded(encoder: TextEncoders, prompt: str) -> Cond:
    """The row of one prompt; UserError for what raises, as encoders and tokenizers do that do not
    fit each other."""
    with loading(f"the text encoders cannot encode {shown(str(prompt))}"):
        row = encoder.encode([prompt])
    return check_embeddings(row, prompt)


class CachedEncoder:
    """Encodes each prompt once with `encoder`, and reads it from `store` afterwards.

    They are encoded one at a time, so a row does not depend on its batch, and a run repeats bit
    for bit with a cold cache, a warm one, or none (`store=None`: the first `KEPT` bytes of rows stay
    in memory). If the disk is full, `notify` is called once and later prompts are encoded each
    time.
    """

    def __init__(
        self, encoder: TextEncoders, store: EmbeddingStore | None, *, notify: Callable[[str], None]
    ) -> None:
        self.encoder, self.store, self.notify = encoder, store, notify
        self.full = store is None  # no further rows are stored
        self.encoded = 0  # number of prompts that were not stored
        self._kept: dict[str, Cond] = {}
        self._room = KEPT if store is None else 0

    def encode(self, prompts: Sequence[str]) -> Cond:
        """Conditioning for each prompt, on the encoder's device."""
        rows = {prompt: self._row(prompt) for prompt in dict.fromkeys(prompts)}
        return Cond.join([rows[prompt] for prompt in prompts])

    def missing(self, prompts: Iterable[str]) -> list[str]:
        """The distinct prompts that are not stored."""
        distinct = dict.fromkeys(prompts)
        return [prompt for prompt in distinct if self.store is None or prompt not in self.store]

    def park(self) -> None:
        """Moves the text encoders off the device."""
        self.encoder.park()

    def _row(self, prompt: str) -> Cond:
        if self.store is not None:
            try:
                found = self.store.read(prompt)
            except DamagedEmbedding as damage:
                self.notify(f"embedding cache: {damage}; encoding the prompt again")
                found = None
            if found is not None:
                return check_embeddings(found, prompt).to(self.encoder.device)
        if prompt in self._kept:
            return self._kept[prompt]
        self.encoded += 1
        row = encoded(self.encoder, prompt)
        if row.nbytes <= self._room:
            self._kept[prompt] = row
            self._room -= row.nbytes
        if self.store is not None and not self.full:
            try:
                self.store.write(prompt, row)
            except OSError as error:
                self.full = True
                free = "no further prompts are stored; free some space, or set prompts.cache to another disk's folder"
                self.notify(f"embedding cache {self.store.folder}: {error.strerror}; {free}")
        return row


def encode_ahead(encoder: CachedEncoder, prompts: Sequence[str], emit: Emit = silent) -> bool:
    """Stores the embeddings of `prompts` and parks the text encoders; False, and nothing is parked,
    if they do not fit.

    The size of the first embedding predicts the rest, so a disk that is too small is detected
    before it is filled.
    """
    store, missing = encoder.store, encoder.missing(prompts)
    if store is None or encoder.full:
        return False
    with encoder.encoder.at_work() if missing else nullcontext():
        for done, prompt in enumerate(missing, 1):
            encoder.encode([prompt])
            if encoder.full:
                return False
            if done == 1:
                size = in_bytes(store.size(prompt) * len(missing))
                these = counted(len(missing), "prompt")
                if not store.fits(len(missing) - 1, like=prompt):
                    encoder.notify(
                        f"embedding cache {store.folder}: {these} need {size}, more than is free"
                    )
                    return False
                emit(Line(f"encoding {these}, {size} in {store.folder}"))
            emit(Progress("encoding", "prompts", done, len(missing)))
    encoder.park()
    return True


class EncodedPrompts:
    """Encodes `prompts`, one at a time, and keeps their conditioning in memory; the text encoders
    then leave the device."""

    def __init__(self, encoder: TextEncoders, prompts: Iterable[str]) -> None:
        self._rows = {prompt: encoded(encoder, prompt) for prompt in dict.fromkeys(prompts)}
        encoder.park()

    def encode(self, prompts: Sequence[str]) -> Cond:
        """Conditioning for each of these prompts, on the encoder's device. KeyError for a prompt
        that is not among them."""
        return Cond.join([self._rows[prompt] for prompt in prompts])


Stored = CachedEncoder | EncodedPrompts
"""Conditioning that a policy takes in place of its text encoders'."""

NOT_IN_EMBEDDINGS = {
    "path", "pipeline", "device", "height", "width", "num_frames", "guidance_scale", "tuning",
    "lora_rank", "lora_alpha", "lora_targets", "lora_init", "lora_above", "gradient_checkpointing", "truncate_timesteps",
    "detach_negative", "published_pictures", "vae_tiling", "quantize", "offload", "attention", "autocast", "compile", "adapter",
}  # fmt: skip
"""Settings of a policy that text embeddings do not depend on. All others are part of their key."""
OF_PICTURES = {"height", "width", "vae_tiling"}
"""Those on which encoded input pictures depend."""
NO_ENCODERS = ("transformer", "scheduler")
"""How parts of a pipeline are named that encode nothing; its VAE encodes input pictures."""


def open_store(
    cache: str,
    options: PolicyConfig,
    content: Callable[[FileDigests, Callable[[str], bool]], Mapping[str, Any]],
    *,
    edits: bool,
    guided: bool,
) -> EmbeddingStore | None:
    """The store of `prompts.cache`: "auto", "off" (None) or a folder. `content` identifies the parts
    of the pipeline that a predicate of their names chooses; `edits`: input pictures are encoded too,
    `guided`: the negative prompt is."""
    if cache == "off":
        return None
    root = local(cache) if cache != "auto" else cache_root() / "embeddings"
    left_out = NOT_IN_EMBEDDINGS - (OF_PICTURES if edits else set())
    unread = NO_ENCODERS if edits else (*NO_ENCODERS, "vae")
    try:
        root.mkdir(parents=True, exist_ok=True)
        identity = {
            **content(FileDigests(root / "digests.json"), lambda part: not part.startswith(unread)),
            "settings": options.model_dump(mode="json", exclude=left_out),
            "guided": guided,
            "libraries": _libraries(),
        }
        return EmbeddingStore(root, identity)
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
