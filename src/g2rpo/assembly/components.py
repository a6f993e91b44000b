"""From a config to a policy, and the checks before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from g2rpo.assembly import hub, pipeline_files
from g2rpo.assembly.meta import few_modules
from g2rpo.assembly.pipeline_files import INDEX, class_in, missing_parts
from g2rpo.config.schema import Config, PolicyConfig, grid_of
from g2rpo.config.work import trained_sigmas_of
from g2rpo.core.contracts import name_of
from g2rpo.core.distributed import World, number_in
from g2rpo.core.errors import UserError, loading, placed, refuse
from g2rpo.core.files import is_hub_id, local
from g2rpo.core.given import refuse_object
from g2rpo.models import attention, catalogue, quantized
from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.models.options import TuningMode
from g2rpo.models.pipelines import check_options, read_pipeline
from g2rpo.models.sharding import Sharded
from g2rpo.models.spec import PipelineSpec
from g2rpo.models.text import TextEncoders

EMBEDDED = ("testbed", "words")
"""Names of the pipelines that come with the package."""


def build_sharding(config: Config, world: World) -> Sharded | None:
    """The weight placement of `trainer.sharding`; UserError if it is not possible."""
    node = number_in("LOCAL_WORLD_SIZE", 0) or None
    check_sharding(config, world.size, node)
    if config.trainer.sharding == "none":
        return None
    whole, group = config.trainer.sharding == "training", shard_group(config, world.size, node)
    return Sharded(world, pick_device(config.policy.device), whole_samples=whole, group=group)


def shard_group(config: Config, ranks: int, node: int | None) -> int:
    """The ranks that a weight is divided over, of `ranks` in nodes of `node` (None: unknown), in a
    config that `check_sharding` takes."""
    asked = config.trainer.shard_group
    return {"all": ranks, "node": node or 0}[asked] if isinstance(asked, str) else asked


def check_sharding(config: Config, ranks: int, node: int | None = None) -> None:
    """Refuses a `trainer.sharding` that does not fit the number of ranks (in nodes of `node`) or
    other settings."""
    refuse(_faults_of_sharding(config, ranks, node))


def _faults_of_sharding(config: Config, ranks: int, node: int | None) -> Iterator[str]:
    if config.trainer.sharding == "none":
        if config.trainer.shard_group != "all":
            yield "trainer.shard_group divides what trainer.sharding shards, which is none; set sharding, or take it out"
        return
    asked = f"trainer.sharding={config.trainer.sharding}"
    if config.policy.tuning != "full":
        yield f"{asked} divides what policy.tuning=full trains; adapters are small; with lora every rank holds all weights"
    if ranks == 1:
        how = "start them with torchrun (plan for them with --ranks)"
        yield f"{asked} divides weights over several processes: {how}, or take it out"
    if config.policy.compile:
        yield f"{asked}: policy.compile is not for weights that come and go in each block; take it out"
    if config.trainer.sharding == "full" and config.sampling.batch_size == "auto":
        yield f"{asked}: sampling.batch_size=auto is each rank's own, but they gather weights together; give a number"
    divided = f"trainer.shard_group={config.trainer.shard_group}"
    if config.trainer.shard_group == "node" and node is None:
        yield f"{divided} needs LOCAL_WORLD_SIZE, which torchrun sets; set it, or give a number"
    group = shard_group(config, ranks, node)
    if ranks % group:
        yield f"{divided}: {ranks} ranks are no multiple of {group}; take a divisor of {ranks}"
    if group == 1:
        yield f"{divided}: one rank would hold all weights, as with trainer.sharding=none; set that"


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


def check_judged_size(config: Config, policy: Any) -> None:
    """Refuses a size of judged pictures that the policy cannot make."""
    if (size := config.judged_size) is None:
        return
    policy = getattr(policy, "policy", policy)  # of a CachedPolicy
    if not hasattr(policy, "sized"):
        raise UserError(
            f"evaluation.height, evaluation.width: a {type(policy).__name__} has one size; take them out"
        )
    with loading("evaluation.height, evaluation.width"):
        policy.check_size(*size)


def check_trained_steps(config: Config, policy: Any) -> None:
    """Refuses an algorithm that trains where a policy's trained weights do not act."""
    policy = getattr(policy, "policy", policy)  # of a CachedPolicy
    if getattr(policy, "trains_everywhere", True):
        return
    algorithm, steps = config.algorithm, config.sampling.num_steps
    sigmas = grid_of(config.sampling.shift, policy, steps)
    own = [step for step in range(steps) if policy.trains_at(float(sigmas[step]))]
    if wrong := [
        sigma for sigma in trained_sigmas_of(config, sigmas) if not policy.trains_at(sigma)
    ]:
        raise UserError(
            f"{name_of(algorithm)} trains at sigma {wrong[0]:.3f}, where the trained weights do not act (policy.lora_above="
            f"{policy.options.lora_above:g}); they do at steps {own} of {steps}. Change "
            "algorithm.branch_steps or its like, sampling.shift or policy.lora_above"
        )


def model_cautions(config: PolicyConfig) -> list[str]:
    """Cautions about a model, printed before it is trained."""
    folder = str(local(config.path))
    said = pipeline_files.caution(config.path, folder if os.path.isdir(folder) else config.path)
    return [said] if said is not None else []


def pick_device(name: str, key: str = "policy.device") -> str:
    """The device `name`, the value of a config's `key`; "auto" is a GPU if there is one, "cuda" the
    GPU of the local rank.

    UserError for a device that torch or this machine lacks.
    """
    if name == "auto":
        # mps is asked for: nobody has measured it yet
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(
            f"{key}={name}: is no device; write cpu, cuda, cuda:1, mps or, for policy.device, auto"
        ) from None
    sees, without = f"{key}={name}: torch sees", f"{key}=cpu needs none"
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"{sees} no GPU of Apple's here; {without}")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        auto = "policy.device=auto takes what there is"
        raise UserError(
            f"{sees} {count} CUDA devices here; {auto if key == 'policy.device' else without}"
        )
    return name


def lacks_of_device(config: Config) -> Iterator[str]:
    """What the config asks and its device lacks; UserError for a device that is not here."""
    policy = config.policy
    if torch.device(pick_device(policy.device)).type != "mps":
        return
    if policy.dtype != "float32" and policy.autocast:
        yield "policy.device=mps: autocast is not supported there; set policy.dtype=float32, or policy.autocast=false for LoRA"
    for key, value, plain in (
        ("policy.quantize", policy.quantize, "none"),
        ("policy.compile", policy.compile, False),
        ("trainer.sharding", config.trainer.sharding, "none"),
    ):
        if value != plain:
            yield f"policy.device=mps: {key}={str(value).lower()} is not supported there; take it out"


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
