"""From the name of a pipeline to a policy: it is found once, checked, and loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from g2rpo.core.devices import pick_device
from g2rpo.core.errors import UserError, counted, loading, placed, refuse, shown
from g2rpo.core.events import Emit, doing, silent
from g2rpo.core.files import FileDigests, digest_of, is_hub_id, local
from g2rpo.core.plugins import refuse_object
from g2rpo.data.testbed import knows, pipeline_dir, why_unknown
from g2rpo.models import catalogue, hub, pipelines, quantized
from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.models.embeddings import CachedEncoder, Stored, encode_ahead, open_store
from g2rpo.models.meta import few_modules
from g2rpo.models.modular import pipeline_class
from g2rpo.models.offload import faults_of_offload
from g2rpo.models.options import PolicyConfig, TuningMode
from g2rpo.models.pipeline_files import (
    INDEX,
    caution,
    check_adapters,
    class_in,
    faults_of_files,
    index_of,
    missing_parts,
    options_in,
    parts_in,
    read_index,
)
from g2rpo.models.pipelines import check_options, read_pipeline
from g2rpo.models.sharding import Sharded
from g2rpo.models.spec import PipelineSpec
from g2rpo.models.text import TextEncoders, warn_of_long

EMBEDDED = ("testbed", "words")
"""Names of the pipelines that come with the package."""


@dataclass(frozen=True)
class Pipeline:
    """A pipeline that `options` name, found: the folder in which it lies, or its hub id; its class;
    and the class of its policy. In the options the adapter's name is that of its file."""

    options: PolicyConfig
    path: str
    kind: str
    policy: type[DiffusersPolicy]

    @property
    def name(self) -> str:
        return self.options.path

    @property
    def spec(self) -> PipelineSpec:
        return self.policy.spec

    @cached_property
    def folder(self) -> Path | None:
        """Its folder on this machine, which may be one of the hub's local cache."""
        if os.path.isdir(self.path):
            return Path(self.path)
        index = index_of(self.path)
        return None if index is None else index.parent

    @property
    def default_policy(self) -> bool:
        """Whether its policy is the one for its class, and so needs all of its parts."""
        return self.options.kind is None

    def missing(self) -> str:
        """What its folder lacks of its parts; "" for nothing."""
        return "" if self.folder is None else "; ".join(missing_parts(self.folder))

    @property
    def commit(self) -> str:
        """The commit of a hub's pipeline in its local cache."""
        if self.folder is None:
            raise UserError(
                f"policy.path={self.path}: is not in the local hub cache; download it, or name a folder"
            )
        return self.folder.name

    def identity(self) -> str:
        """A cheap identity: a folder's file names and sizes, or a hub id's commit."""
        root = Path(self.path)
        if not root.is_dir():
            return f"{self.path}@{self.commit}"
        files = [
            path
            for path in sorted(root.rglob("[!.]*"))
            if path.is_file() and ".cache" not in path.relative_to(root).parts
        ]
        return digest_of(
            [[path.relative_to(root).as_posix(), path.stat().st_size] for path in files]
        )

    def digests(self) -> dict[str, str]:
        """By the config's keys the identity, and the digest of the adapter, if there is one."""
        digests = {"policy.path": self.identity()}
        if (adapter := self.options.adapter) is not None:
            digests["policy.adapter"] = f"sha256 {FileDigests(None).of(Path(adapter))[:16]}"
        return digests

    def content(self, digests: FileDigests, reads: Callable[[str], bool]) -> dict[str, Any]:
        """The identity of the parts that are read: their content and the options in the index, or
        hub id and commit."""
        root = Path(self.path)
        if not root.is_dir():
            return {"pipeline": self.kind, "hub": self.path, "commit": self.commit}
        index = read_index(self.path)
        folders = [root / part for part in parts_in(index) if reads(part)]
        content = digests.of_folders(root, folders)
        return {"pipeline": self.kind, "content": content, "options": options_in(index)}

    def caution(self) -> str | None:
        """What to say of a model that is distilled to few steps."""
        return caution(self.name, self.path)

    def faults_of_files(self) -> Iterator[str]:
        for fault in faults_of_files(self.path, self.spec.optional):
            yield f"policy.path={self.name}: {fault}"

    def faults(self, tuning: TuningMode) -> Iterator[str]:
        """What keeps it from being loaded and tuned so; UserError for targets that it lacks. No weights
        are read."""
        options = self.options
        if self.default_policy:
            yield from self.faults_of_files()
        if tuning == "lora":
            targets = options.lora_targets or self.spec.lora_targets
            check_adapters(self.path, targets, each=options.lora_targets is not None)

    def load(
        self, *, tuning: TuningMode | None = None, seed: int = 0, keep_base: bool = False
    ) -> Loaded:
        """Reads it into host memory. `tuning` replaces the options' ("frozen" for sampling);
        `keep_base` is needed by a KL term under full fine-tuning."""
        options, tuning = self.options, tuning or self.options.tuning
        device = pick_device(options.device)
        setting = {"tuning": tuning, "device": device, "seed": seed, "keep_base": keep_base}
        with _loading(self.name):
            read = read_pipeline(
                pipeline_class(self.spec.pipeline_class),
                self.path,
                getattr(torch, options.dtype),
                tuning,
                vae_dtype=getattr(torch, self.spec.vae_dtype(options.dtype)),
            )
            text = TextEncoders(read, self.spec, options, device)
            return Loaded(self, read, text, setting)


def faults_of_options(options: PolicyConfig, tuning: TuningMode) -> Iterator[str]:
    """What this machine and its libraries lack of a policy's options."""
    yield from quantized.faults_of_quantization(options.quantize, tuning)
    device = pick_device(options.device)
    yield from faults_of_offload(options, tuning, device)
    yield from pipelines.faults_of_attention(options.attention, device)


def find_pipeline(options: PolicyConfig) -> Pipeline:
    """The pipeline of these options. UserError if it is not there, has no policy, or is another than
    `options.pipeline`; and for options that it lacks."""
    path, kind = location_of(options.path)
    check_pipeline(options.path, kind, options.pipeline, options.kind)
    return Pipeline(hub.located(options), path, kind, policy_class(options, kind))


def load_pipeline(
    options: PolicyConfig,
    *,
    tuning: TuningMode | None = None,
    seed: int = 0,
    keep_base: bool = False,
) -> Loaded:
    """The pipeline of these options, found, checked and read: `Pipeline.load`."""
    found, mode = find_pipeline(options), tuning or options.tuning
    refuse(faults_of_options(options, mode))
    refuse(found.faults(mode))
    if found.default_policy and os.path.isdir(found.path) and (missing := found.missing()):
        raise UserError(f"policy.path={options.path}: {missing}")
    return found.load(tuning=tuning, seed=seed, keep_base=keep_base)


def build_policy(options: PolicyConfig, **setting: Any) -> DiffusersPolicy:
    """The policy of `load_pipeline(options, **setting)`, at once."""
    return load_pipeline(options, **setting).policy()


@dataclass(frozen=True)
class Loaded:
    """A pipeline in host memory. Its text encoders can be used before the policy is built, that is
    before the transformer occupies the device."""

    found: Pipeline
    pipeline: Any
    text: TextEncoders
    setting: Mapping[str, Any]
    """What the policy's constructor takes besides."""

    def policy(
        self, sharding: Sharded | None = None, stored: Stored | None = None
    ) -> DiffusersPolicy:
        """The policy, on its device; `sharding` shards the trained weights, and `stored` has
        conditioning in place of the text encoders'."""
        with _loading(self.found.name):
            policy = self.found.policy(
                self.pipeline, self.found.options, **self.setting, sharding=sharding, text=self.text
            )
        policy.stored = stored
        return policy

    def cached(self, cache: str, notify: Callable[[str], None]) -> CachedEncoder:
        """The text encoders with their embeddings cached as in `prompts.cache`."""
        text, edits = self.text, bool(self.found.spec.pictured)
        content, options = self.found.content, self.found.options
        store = open_store(cache, options, content, edits=edits, guided=text.guided)
        return CachedEncoder(text, store, notify=notify)

    def policy_after_encoding(
        self,
        prompts: Iterable[str],
        cache: str,
        notify: Callable[[str], None],
        sharding: Sharded | None = None,
        emit: Emit = silent,
    ) -> DiffusersPolicy:
        """The policy with its embeddings cached as in `prompts.cache`; those of `prompts` are
        computed first.

        The text encoders then leave the device. Without a cache, or without disk space for all,
        they move to the device with the first prompt and stay.
        """
        stored = self.cached(cache, notify)
        encode_ahead(stored, list(dict.fromkeys(prompts)), emit)
        policy = self.policy(sharding, stored)
        if policy.compiled is not None:
            policy.compiled.notify = notify
        return policy

    def warn_of(self, prompts: Sequence[str], notify: Callable[[str], None]) -> None:
        """Tells of prompts that the model does not read to their end, or, if it is an embedded one,
        does not know."""
        warn_of_long(self.text, prompts, notify)
        path, distinct = self.found.name, list(dict.fromkeys(filter(None, prompts)))
        strange = [prompt for prompt in distinct if why_unknown(path, prompt)]
        if strange:
            notify(
                f"{len(strange)} of {counted(len(distinct), 'prompt')} {'is' if len(strange) == 1 else 'are'} nothing that the "
                f"model {path} has learnt, such as {shown(str(strange[0]))}; it knows {knows(path)}"
            )


@contextmanager
def _loading(path: str) -> Iterator[None]:
    failed = loading(f"policy.path={path}: the pipeline cannot be loaded")
    with doing(f"loading the model {path}"), failed, few_modules():
        yield


def load_weights(policy: DiffusersPolicy, weights: Path, path: str, strength: float = 1.0) -> None:
    """Loads tuned weights into the policy of the pipeline at `path`."""
    with loading(f"{weights}: the weights do not fit {path}"):
        policy.load(weights, strength)


def policy_class(options: PolicyConfig, name: str) -> type[DiffusersPolicy]:
    """The policy for a pipeline of class `name`, or the one that `options.kind` names: that of a
    `PipelineSpec`, or a class. UserError for options that it lacks."""
    found = catalogue.find_policy(options.kind or name)
    kind = DiffusersPolicy.of(found) if isinstance(found, PipelineSpec) else found
    if not (isinstance(kind, type) and issubclass(kind, DiffusersPolicy)):
        raise UserError(
            f"policy.kind={options.kind}: is neither a PipelineSpec nor a class of DiffusersPolicy; "
            "a model without diffusers is trained from Python (examples/pixels.py)"
        )
    check_options(kind.spec, options)
    return kind


def location_of(name: str) -> tuple[str, str]:
    """(where the pipeline of that name lies, its class name)."""
    refuse_object("policy.path", name)
    if name in EMBEDDED:
        name = str(pipeline_dir(name))
    path = str(local(name))
    # unlike those of `Path`, these functions do not raise for names that are too long
    here = os.path.isdir(path)
    if here and index_of(path) is None:
        raise UserError(f"policy.path={name}: is no diffusers pipeline, it has no model_index.json")
    if not here and not is_hub_id(name):
        raise UserError(
            f"policy.path={name}: is no directory; give a diffusers pipeline's folder, a hub id, 'testbed' or 'words'"
        )
    return (path, class_in(path)) if here else (name, _hub_class(name))


def check_pipeline(name: str, kind: str, expected: str | None, chosen: str | None = None) -> None:
    """UserError for a pipeline class without a policy, unless policy.kind is `chosen`, and for one
    that is not `expected`."""
    said = f"policy.path={name}: is a {kind}"
    if chosen is None and kind in catalogue.FLOW_MAPS:
        raise UserError(
            f"{said}, a flow map: its velocity depends on the time to which a step goes, which noise and other step sizes "
            "change. Train the base model; the distilled one loads its adapter with load_lora_weights"
        )
    if chosen is None and kind not in catalogue.pipeline_names():
        own = "docs/extending.md declares another flow pipeline in a file, and `g2rpo check-model` tries it"
        raise UserError(
            f"{said}, which has no policy here: docs/models.md lists the classes that have one; {own}"
        )
    if expected is not None and kind != expected:
        hint = "take a recipe for it, or set policy.pipeline= and check every value"
        raise UserError(f"{said}, but this recipe is for a {expected}; {hint}")


def _hub_class(name: str) -> str:
    # the folders of a pipeline; beside them are often the same weights in one file
    fetch = f"hf download {name} --include '*/*' --include '*{INDEX}'"
    hint = f"`{fetch}` fetches it (after `hf auth login` for a gated model), or policy.path=FOLDER names one that you have"
    why = None if index_of(name) is not None else hub.obstacle(name)
    if why is not None:
        raise UserError(f"policy.path={name}: is no local directory, and {why}\n{hint}")
    before = f"policy.path={name}: is no local directory, and the hub does not give it: "
    with placed(before, UserError, after=f"\n{hint}"):
        return class_in(name)


def quiet_bars() -> None:
    """Turns off the progress bars of diffusers and transformers, which this imports."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
