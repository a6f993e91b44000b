"""From a config to a policy, and the checks before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from g2rpo.core.devices import pick_device
from g2rpo.core.errors import UserError, counted, loading, placed, shown
from g2rpo.core.files import is_hub_id, local
from g2rpo.core.plugins import refuse_object
from g2rpo.data.testbed import knows, why_unknown
from g2rpo.models import attention, catalogue, hub, pipeline_files, quantized
from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.models.meta import few_modules
from g2rpo.models.options import PolicyConfig, TuningMode
from g2rpo.models.pipeline_files import INDEX, class_in, missing_parts
from g2rpo.models.pipelines import check_options, read_pipeline
from g2rpo.models.sharding import Sharded
from g2rpo.models.spec import PipelineSpec
from g2rpo.models.text import TextEncoders, warn_of_long

EMBEDDED = ("testbed", "words")
"""Names of the pipelines that come with the package."""


@dataclass(frozen=True)
class Loaded:
    """A pipeline in host memory, for a policy of class `kind`. Its text encoders can be used before
    the policy is built, that is before the transformer occupies the device.
    """

    config: PolicyConfig
    kind: type[DiffusersPolicy]
    pipeline: Any
    text: TextEncoders
    setting: Mapping[str, Any]
    """What the policy's constructor takes besides."""

    def policy(self, sharding: Sharded | None = None) -> DiffusersPolicy:
        """The policy, on its device; `sharding` shards the trained weights."""
        with _loading(self.config.path):
            return self.kind(
                self.pipeline, self.config, **self.setting, sharding=sharding, text=self.text
            )


def load_pipeline(
    config: PolicyConfig,
    *,
    seed: int = 0,
    tuning: TuningMode | None = None,
    keep_base: bool = False,
) -> Loaded:
    """The pipeline at `config.path`, for the policy of its class name.

    `tuning` replaces the config's ("frozen" for sampling); `keep_base` is needed by a KL term under
    full fine-tuning.
    """
    import diffusers

    path, name = locate_pipeline(config.path, config.pipeline, config.kind)
    if config.kind is None:
        pipeline_files.check_files(config.path, path, catalogue.optional_parts(name))
    device, tuning = pick_device(config.device), tuning or config.tuning
    quantized.check_quantization(config.quantize, tuning)
    attention.check_attention(config.attention, device)
    kind, config = policy_class(config, name), hub.located(config)
    spec = kind.spec
    if tuning == "lora":
        targets = config.lora_targets or spec.lora_targets
        pipeline_files.check_adapters(path, targets, each=config.lora_targets is not None)
    if (
        config.kind is None
        and os.path.isdir(path)
        and (missing := "; ".join(missing_parts(Path(path))))
    ):
        raise UserError(f"policy.path={config.path}: {missing}")
    setting = {"tuning": tuning, "device": device, "seed": seed, "keep_base": keep_base}
    with _loading(config.path):
        pipeline = read_pipeline(
            getattr(diffusers, spec.pipeline_class),
            path,
            getattr(torch, config.dtype),
            tuning,
            vae_dtype=getattr(torch, spec.vae_dtype(config.dtype)),
        )
        return Loaded(config, kind, pipeline, TextEncoders(pipeline, spec, config, device), setting)


@contextmanager
def _loading(path: str) -> Iterator[None]:
    with loading(f"policy.path={path}: the pipeline cannot be loaded"), few_modules():
        yield


def build_policy(config: PolicyConfig, **setting: Any) -> DiffusersPolicy:
    """The policy of `load_pipeline(config, **setting)`, at once."""
    return load_pipeline(config, **setting).policy()


def load_weights(policy: DiffusersPolicy, weights: Path, path: str, strength: float = 1.0) -> None:
    """Loads tuned weights into the policy of the pipeline at `path`."""
    with loading(f"{weights}: the weights do not fit {path}"):
        policy.load(weights, strength)


def policy_class(config: PolicyConfig, name: str) -> type[DiffusersPolicy]:
    """The policy for a pipeline of class `name`, or the one that `config.kind` names: that of a
    `PipelineSpec`, or a class. UserError for options that it lacks."""
    found = catalogue.find_policy(config.kind or name)
    kind = DiffusersPolicy.of(found) if isinstance(found, PipelineSpec) else found
    if not (isinstance(kind, type) and issubclass(kind, DiffusersPolicy)):
        raise UserError(
            f"policy.kind={config.kind}: is neither a PipelineSpec nor a class of DiffusersPolicy; "
            "a model without diffusers is trained from Python (examples/pixels.py)"
        )
    check_options(kind.spec, config)
    return kind


def model_cautions(config: PolicyConfig) -> list[str]:
    """Cautions about a model, printed before it is trained."""
    folder = str(local(config.path))
    said = pipeline_files.caution(config.path, folder if os.path.isdir(folder) else config.path)
    return [said] if said is not None else []


def locate_pipeline(
    name: str, expected: str | None = None, chosen: str | None = None
) -> tuple[str, str]:
    """(where the pipeline lies, its class name); refuses a class that has no policy, or is not the
    `expected` one."""
    refuse_object("policy.path", name)
    if name in EMBEDDED:
        from g2rpo.data.testbed import pipeline_dir

        name = str(pipeline_dir(name))
    path = str(local(name))
    # unlike those of `Path`, these functions do not raise for names that are too long
    here = os.path.isdir(path)
    if here and not os.path.isfile(os.path.join(path, INDEX)):
        raise UserError(f"policy.path={name}: is no diffusers pipeline, it has no model_index.json")
    if not here and not is_hub_id(name):
        raise UserError(
            f"policy.path={name}: is no directory; give a diffusers pipeline's folder, a hub id, 'testbed' or 'words'"
        )
    kind = class_in(path) if here else _hub_class(name)
    check_pipeline(name, kind, expected, chosen)
    return path if here else name, kind


def check_pipeline(name: str, kind: str, expected: str | None, chosen: str | None = None) -> None:
    """Refuses a pipeline class that has no policy, unless one is `chosen` (policy.kind), or is not
    the `expected` one."""
    said = f"policy.path={name}: is a {kind}"
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
    fetch = f"hf download {name} --include '*/*' --include {INDEX}"
    hint = f"`{fetch}` fetches it (after `hf auth login` for a gated model), or policy.path=FOLDER names one that you have"
    why = None if hub.cached(name, INDEX) is not None else hub.obstacle(name)
    if why is not None:
        raise UserError(f"policy.path={name}: is no local directory, and {why}\n{hint}")
    before = f"policy.path={name}: is no local directory, and the hub does not give it: "
    with placed(before, UserError, after=f"\n{hint}"):
        return class_in(name)


def warn_of_prompts(loaded: Loaded, prompts: Sequence[str], notify: Callable[[str], None]) -> None:
    """Tells of prompts that the model of `loaded` does not read to their end, or, if it is an
    embedded one, does not know."""
    warn_of_long(loaded.text, prompts, notify)
    path, distinct = loaded.config.path, list(dict.fromkeys(filter(None, prompts)))
    strange = [prompt for prompt in distinct if why_unknown(path, prompt)]
    if strange:
        notify(
            f"{len(strange)} of {counted(len(distinct), 'prompt')} {'is' if len(strange) == 1 else 'are'} nothing that the "
            f"model {path} has learnt, such as {shown(str(strange[0]))}; it knows {knows(path)}"
        )


def quiet_bars() -> None:
    """Without progress bars of model libraries, which this imports."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
