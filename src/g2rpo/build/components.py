"""From names in a config to objects: the only module that names concrete policies, rewards and prompt lists."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from g2rpo import plugins
from g2rpo.algorithms.contracts import name_of, plans_of
from g2rpo.build import hub, pipeline_check
from g2rpo.config.given import Mentioned, refuse_mention
from g2rpo.config.schema import Config, PolicyConfig, RewardConfig, SamplingConfig
from g2rpo.errors import UserError, did_you_mean, loading
from g2rpo.files import FileDigests, digest_of, is_hub_id, local
from g2rpo.monitor.trackers import Tracker
from g2rpo.plain import parse_json, read_text
from g2rpo.policies import attention, quantized
from g2rpo.policies.embeddings import CachedEncoder, EmbeddingStore, Encoder, cache_root
from g2rpo.policies.options import PolicyOptions
from g2rpo.policies.pipelines import PipelinePolicy
from g2rpo.policies.text import TextEncoders
from g2rpo.prompts.sources import STARTER, read_prompts
from g2rpo.rewards.weights import parse_dtype
from g2rpo.rollout.frames import OnFrames
from g2rpo.rollout.tails import TailNetwork, Tails
from g2rpo.runtime.distributed import World
from g2rpo.runtime.sharding import Sharded
from g2rpo.types import Algorithm, Reward

REWARDS = {
    "hpsv2": "g2rpo.rewards.hpsv2:HPSv2",
    "hpsv3": "g2rpo.rewards.hpsv3:HPSv3",
    "clip_score": "g2rpo.rewards.clip:CLIPScore",
    "pickscore": "g2rpo.rewards.pickscore:PickScore",
    "image_reward": "g2rpo.rewards.image_reward:ImageReward",
    "aesthetic": "g2rpo.rewards.aesthetic:Aesthetic",
    "geneval": "g2rpo.rewards.geneval:GenEval",
    "vlm_judge": "g2rpo.rewards.vlm:VLMJudge",
    "http": "g2rpo.rewards.remote:RemoteReward",
    "function": "g2rpo.rewards.function:FunctionReward",
    "ocr": "g2rpo.rewards.ocr:OCR",
    "jpeg_size": "g2rpo.rewards.analytic:JPEGSize",
    "brightness": "g2rpo.rewards.analytic:Brightness",
    "saturation": "g2rpo.rewards.analytic:Saturation",
    "similarity": "g2rpo.rewards.analytic:Similarity",
    "scene_accuracy": "g2rpo.testbed.rewards:SceneAccuracy",
    "scene_clip": "g2rpo.testbed.rewards:SceneCLIP",
    "scene_preference": "g2rpo.testbed.rewards:ScenePreference",
    "word_colour": "g2rpo.testbed.words.judges:WordColour",
    "word_paper": "g2rpo.testbed.words.judges:WordPaper",
    "word_drawing": "g2rpo.testbed.words.judges:WordDrawing",
    "word_letters": "g2rpo.testbed.words.judges:WordLetters",
}
POLICIES = {
    "FluxPipeline": "g2rpo.policies.flux:FluxPolicy",
    "StableDiffusion3Pipeline": "g2rpo.policies.sd3:SD3Policy",
    "Flux2Pipeline": "g2rpo.policies.catalogue:Flux2",
    "Flux2KleinPipeline": "g2rpo.policies.catalogue:Flux2Klein",
    "QwenImagePipeline": "g2rpo.policies.catalogue:QwenImage",
    "ZImagePipeline": "g2rpo.policies.catalogue:ZImage",
    "FluxKontextPipeline": "g2rpo.policies.catalogue:FluxKontext",
    "QwenImageEditPipeline": "g2rpo.policies.catalogue:QwenImageEdit",
    "QwenImageEditPlusPipeline": "g2rpo.policies.catalogue:QwenImageEditPlus",
    "WanPipeline": "g2rpo.policies.catalogue:Wan",
    "LTXPipeline": "g2rpo.policies.catalogue:LTX",
    "Lumina2Pipeline": "g2rpo.policies.catalogue:Lumina2",
    "ChromaPipeline": "g2rpo.policies.catalogue:Chroma",
    "CogView4Pipeline": "g2rpo.policies.catalogue:CogView4",
    "SanaPipeline": "g2rpo.policies.catalogue:Sana",
    "Krea2Pipeline": "g2rpo.policies.catalogue:Krea2",
}
TRACKERS = {
    "tensorboard": "g2rpo.monitor.trackers:TensorBoard",
    "wandb": "g2rpo.monitor.trackers:WandB",
    "trackio": "g2rpo.monitor.trackers:Trackio",
}
EMBEDDED = ("testbed", "words")
"""Names of the pipelines that come with the package."""
WEIGHT_OPTIONS = ("path", "tokenizer", "processor", "clip", "detector")
"""Options of rewards that name a folder, a file or a hub repository."""
CODE_OPTIONS = {"function": "target", "geneval": "detector"}
"""By kind of reward, the option that may name code."""


def build_sharding(config: Config, world: World) -> Sharded | None:
    """The weight placement of `trainer.sharding`; UserError if it is not possible."""
    check_sharding(config, world.size)
    if config.trainer.sharding == "none":
        return None
    return Sharded(world, pick_device(config.policy.device), whole_samples=config.trainer.sharding == "training")


def check_sharding(config: Config, ranks: int) -> None:
    """Refuses a `trainer.sharding` that does not fit the number of ranks or other settings."""
    asked = f"trainer.sharding={config.trainer.sharding}"
    if config.trainer.sharding == "none":
        return
    if config.policy.tuning != "full":
        raise UserError(
            f"{asked} divides what policy.tuning=full trains; adapters are small, so with lora every rank has it all"
        )
    if ranks == 1:
        how = "start them with torchrun (plan for them with --ranks)"
        raise UserError(f"{asked} divides weights over several processes: {how}, or take it out")
    if config.policy.compile:
        raise UserError(f"{asked}: policy.compile is not for weights that come and go in each block; take it out")
    if config.sampling.tails.own_network:
        raise UserError(
            f"{asked}: sampling.tails.compile, dtype and quantize copy weights that no rank has whole; take them out"
        )
    if config.trainer.sharding == "full" and config.sampling.batch_size == "auto":
        raise UserError(
            f"{asked}: sampling.batch_size=auto is each rank's own, but they gather weights together; give a number"
        )


def check_plans(algorithm: Algorithm, sampling: SamplingConfig) -> None:
    """Refuses an algorithm that does not fit the sampler's steps, or whose solver does not fit the sampler's tails."""
    if isinstance(algorithm, Mentioned):
        refuse_mention("algorithm.name", algorithm.name)
    plans = plans_of(algorithm, sampling.num_steps)
    try:
        sampling.tails.walked_by(plans)
    except ValueError as error:
        raise UserError(f"algorithm {name_of(algorithm)} does not fit sampling.tails: {error}") from None


def check_quantized(config: Config) -> None:
    """Refuses a `policy.quantize` that the run cannot have."""
    policy, tails = config.policy, config.sampling.tails
    quantized.check(policy.quantize, tuning=policy.tuning, dtype=policy.dtype, device=pick_device(policy.device))
    if policy.tuning == "full" and not policy.autocast:
        raise UserError("policy.autocast=false: weights that are trained are float32, and need it; set policy.tuning=lora")
    if policy.quantize != "none" and (tails.quantize != "none" or tails.dtype != "policy"):
        raise UserError(
            f"sampling.tails: policy.quantize={policy.quantize} is of tails too; leave out their quantize and dtype"
        )


def check_attention(config: PolicyConfig) -> None:
    """Refuses a `policy.attention` that this installation does not have for the run's device."""
    attention.check(config.attention, pick_device(config.device))


@dataclass(frozen=True)
class Loaded:
    """A pipeline in host memory, for a policy of class `kind` with `options`. Its text encoders can be used before the policy
    is built, that is before the transformer occupies the device.
    """

    config: PolicyConfig
    kind: type[PipelinePolicy]
    options: dict[str, Any]
    pipeline: Any
    text: TextEncoders

    def policy(self, sharding: Sharded | None = None) -> PipelinePolicy:
        """The policy, on its device; `sharding` shards the trained weights."""
        with _loading(self.config.path):
            return self.kind(self.pipeline, **self.options, sharding=sharding, text=self.text)


def load_pipeline(config: PolicyConfig, *, seed: int = 0, tuning: str | None = None, keep_base: bool = False) -> Loaded:
    """The pipeline at `config.path`, for the policy of its class name.

    `tuning` replaces the config's ("frozen" for sampling); `keep_base` is needed by a KL term under full fine-tuning.
    """
    path, name = locate_pipeline(config.path, config.pipeline, config.kind)
    if config.kind is None:
        pipeline_check.check_files(config.path, path)
    device = pick_device(config.device)
    quantized.check(config.quantize, tuning=tuning or config.tuning, dtype=config.dtype, device=device)
    attention.check(config.attention, device)
    kind, options = policy_options(config, name, device=device, seed=seed, tuning=tuning, keep_base=keep_base)
    with _loading(config.path):
        pipeline = kind.load_pipeline(path, **options)
        return Loaded(config, kind, options, pipeline, kind.encoders(pipeline, **options))


def _loading(path: str) -> AbstractContextManager[None]:
    return loading(f"policy.path={path}: the pipeline cannot be loaded")


def build_policy(config: PolicyConfig, *, sharding: Sharded | None = None, **options: Any) -> PipelinePolicy:
    """The policy of `load_pipeline(config, **options)`, at once."""
    return load_pipeline(config, **options).policy(sharding)


def policy_options(
    config: PolicyConfig, kind: str, *, device: str, seed: int = 0, tuning: str | None = None, keep_base: bool = False
) -> tuple[type[PipelinePolicy], dict[str, Any]]:
    """The policy class for pipelines of class `kind`, and its constructor's options from `config`."""
    policy = plugins.find("policies", config.kind or kind, POLICIES)
    for name in getattr(policy, "unsupported", ()):
        if getattr(config, name) not in (None, False):
            raise UserError(f"policy.{name}: a {kind} has no such option; take it out")
    given = {field.name: getattr(config, field.name) for field in fields(PolicyOptions) if hasattr(config, field.name)}
    changed = {"dtype": getattr(torch, config.dtype), "device": device, "tuning": tuning or config.tuning}
    return policy, {**given, **changed, "seed": seed, "keep_base": keep_base}


def check_prompts(config: PolicyConfig, prompts: Sequence[str]) -> None:
    """Refuses prompts with more or fewer input pictures than the policy takes, before anything is loaded."""
    _, name = locate_pipeline(config.path, config.pipeline, config.kind)
    check = getattr(plugins.find("policies", config.kind or name, POLICIES), "check_pictures", None)
    if check is not None:
        for prompt in prompts:
            check(prompt)


def cautions(config: PolicyConfig) -> list[str]:
    """What to say of a model before it is trained."""
    folder = str(local(config.path))
    said = pipeline_check.caution(config.path, folder if os.path.isdir(folder) else config.path)
    return [said] if said is not None else []


def build_tail_network(policy: PipelinePolicy, tails: Tails) -> TailNetwork | None:
    """The network for tails of `sampling.tails`; None if they use the policy's own."""
    if not tails.own_network:
        return None
    from g2rpo.policies.fast import FastNetwork

    return FastNetwork(policy, compile=tails.compile, dtype=tails.dtype, quantize=tails.quantize)


def pick_device(name: str, key: str = "policy.device") -> str:
    """The device `name`, the value of a config's `key`; "auto" is a GPU if there is one, "cuda" the GPU of the local rank.

    UserError for a device that torch or this machine lacks.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"{key}={name}: is no device; write cpu, cuda, cuda:1 or, for policy.device, auto") from None
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UserError(f"{key}={name}: torch sees {count} CUDA devices here; policy.device=auto takes what there is")
    return name


def locate_pipeline(name: str, expected: str | None = None, chosen: str | None = None) -> tuple[str, str]:
    """(where the pipeline lies, its class name); refuses a class that has no policy, or is not the `expected` one."""
    refuse_mention("policy.path", name)
    if name in EMBEDDED:
        from g2rpo.testbed import pipeline_dir

        name = str(pipeline_dir(name))
    path = local(name)
    if os.path.isdir(path):  # unlike Path.is_dir, it does not raise for names that are too long
        index = path / "model_index.json"
        if not index.is_file():
            raise UserError(f"policy.path={name}: is no diffusers pipeline, it has no model_index.json")
        try:
            kind = str(parse_json(read_text(index))["_class_name"])
        except (ValueError, KeyError, TypeError):
            raise UserError(f"policy.path={name}: its model_index.json names no pipeline class") from None
    elif not is_hub_id(name):
        raise UserError(
            f"policy.path={name}: is no directory; give a diffusers pipeline's folder, a hub id, 'testbed' or 'words'"
        )
    else:
        kind = _hub_class(name)
    check_pipeline(name, kind, expected, chosen)
    return str(path) if os.path.isdir(path) else name, kind


def check_pipeline(name: str, kind: str, expected: str | None, chosen: str | None = None) -> None:
    """Refuses a pipeline class that has no policy, unless one is `chosen` (policy.kind), or is not the `expected` one."""
    known = plugins.available("policies", POLICIES)
    if chosen is None and kind not in known:
        own = "policy.kind=FILE.py:NAME takes a policy of your own"
        why = f": {pipeline_check.REFUSED[kind]}" if kind in pipeline_check.REFUSED else f".{did_you_mean(kind, known)}"
        raise UserError(f"policy.path={name}: is a {kind}, which has no policy here{why}. Known: {', '.join(known)}; {own}.")
    if expected is not None and kind != expected:
        hint = "take a recipe for it, or set policy.pipeline= and check every value"
        raise UserError(f"policy.path={name}: is a {kind}, but this recipe is for a {expected}; {hint}")


def _hub_class(name: str) -> str:
    from huggingface_hub import hf_hub_download

    hint = f"`hf download {name} --local-dir FOLDER` (after `hf auth login` for a gated model), then policy.path=FOLDER"
    index = hub.cached(name, "model_index.json")
    if index is None and (why := hub.obstacle(name)) is not None:
        raise UserError(f"policy.path={name}: is no local directory, and {why}\n{hint}")
    try:
        return str(parse_json(read_text(index or Path(hf_hub_download(name, "model_index.json"))))["_class_name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"policy.path={name}: is no local directory, and the hub does not give it: {error}\n{hint}") from None


NOT_IN_EMBEDDINGS = {
    "path", "pipeline", "device", "height", "width", "num_frames", "guidance_scale", "tuning", "lora_rank", "lora_alpha",
    "lora_targets", "gradient_checkpointing", "truncate_timesteps", "published_pictures", "vae_tiling", "quantize",
    "attention", "autocast", "compile",
}  # fmt: skip
"""Settings of a policy that text embeddings do not depend on. All others are part of their key."""


def cache_embeddings(text: Encoder, config: PolicyConfig, cache: str, notify: Callable[[str], None]) -> CachedEncoder:
    """`text`, the encoders of `config`, with their embeddings cached as in `prompts.cache`: "auto", "off" or a folder."""
    store = None
    if cache != "off":
        root = local(cache) if cache != "auto" else cache_root() / "embeddings"
        try:
            root.mkdir(parents=True, exist_ok=True)
            edits = bool(getattr(text, "pictured", ()))
            left_out = NOT_IN_EMBEDDINGS - ({"height", "width", "vae_tiling"} if edits else set())
            settings = {key: value for key, value in config.model_dump(mode="json").items() if key not in left_out}
            identity = {
                **_text_identity(config.path, FileDigests(root / "digests.json"), ("vae",) if edits else ()),
                "settings": settings,
                "guided": getattr(text, "guided", False),  # whether the negative prompt is encoded too
            }
            store = EmbeddingStore(root, identity)
        except OSError as error:
            hint = "set prompts.cache (g2rpo evaluate: cache) to another folder, or to off"
            raise UserError(f"embedding cache {root}: cannot be written ({error.strerror}); {hint}") from None
    return CachedEncoder(text, store, notify=notify)


def _text_identity(name: str, digests: FileDigests, more: tuple[str, ...] = ()) -> dict[str, str]:
    """The identity of a pipeline's text encoders, tokenizers and `more` parts: their content, or hub id and commit."""
    path, kind = locate_pipeline(name, chosen="any")
    root = Path(path)
    if not root.is_dir():
        return {"pipeline": kind, "hub": path, "commit": _commit(path)}
    folders = [folder for folder in sorted(root.iterdir()) if folder.name.startswith(("text_encoder", "tokenizer", *more))]
    return {"pipeline": kind, "content": digests.of_folders(root, folders)}


def pipeline_identity(name: str) -> str:
    """A cheap identity of a pipeline: a folder's file names and sizes, or a hub id's commit."""
    path, _ = locate_pipeline(name, chosen="any")
    root = Path(path)
    if not root.is_dir():
        return f"{path}@{_commit(path)}"
    files = [path for path in sorted(root.rglob("[!.]*")) if path.is_file() and ".cache" not in path.relative_to(root).parts]
    return digest_of([[path.relative_to(root).as_posix(), path.stat().st_size] for path in files])


def _commit(hub_id: str) -> str:
    """The commit of a pipeline in the hub's local cache."""
    index = try_to_load_from_cache(hub_id, "model_index.json")
    if not isinstance(index, str):
        raise UserError(f"policy.path={hub_id}: is not in the local hub cache; download it, or name a folder")
    return Path(index).parent.name


def build_rewards(table: Mapping[str, RewardConfig], device: str = "cpu") -> dict[str, Reward]:
    """The rewards of a config, by their names there; models whose options name no device go to `device`."""
    check_rewards(table)
    check_devices(table)
    return configured({name: _build_reward(name, entry, device) for name, entry in table.items()}, table)


def configured(rewards: Mapping[str, Reward], table: Mapping[str, RewardConfig]) -> dict[str, Reward]:
    """The rewards with what `table` says of `frames` and `tf32`; UserError for frames of one that takes clips or latents."""
    for name, reward in rewards.items():
        if name in table and table[name].tf32:
            reward.tf32 = True  # type: ignore[attr-defined]
    chosen = {name: entry.frames for name, entry in table.items() if name in rewards and entry.frames is not None}
    for name in chosen:
        for kind, what in (("video", "whole clips"), ("latent", "latents")):
            if getattr(rewards[name], kind, False):
                raise UserError(f"rewards.{name}.frames: this reward takes {what} (its `{kind}` is true); take frames out")
    return {name: OnFrames(reward, chosen[name]) if name in chosen else reward for name, reward in rewards.items()}


def check_rewards(table: Mapping[str, RewardConfig]) -> None:
    """Refuses unknown rewards and options, before any weights are loaded."""
    for name, entry in table.items():
        refuse_mention(f"rewards.{name}.kind", entry.kind)
        known = _options_of(reward_kind(name, entry))
        for option in entry.options:
            if option not in known:
                raise UserError(f"rewards.{name}.options: unknown option '{option}'.{did_you_mean(option, known)}")
        if entry.kind in REWARDS:
            _check_common_options(f"rewards.{name}.options", entry.options)


def check_devices(table: Mapping[str, RewardConfig]) -> None:
    """Refuses devices of rewards that this machine lacks; a plan for another machine may name them."""
    for name, entry in table.items():
        if entry.kind in REWARDS and (device := entry.options.get("device")) is not None:
            pick_device(str(device), f"rewards.{name}.options.device")


def _check_common_options(key: str, options: Mapping[str, Any]) -> None:
    """Refuses wrong values of the options that rewards share."""
    if "dtype" in options:
        try:
            parse_dtype(options["dtype"])
        except ValueError as error:
            raise UserError(f"{key}.{error}") from None
    for name in ("batch_size", "concurrency", "workers"):
        value = options.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise UserError(f"{key}.{name} must be a whole number, at least 1, got {value!r:.80}")


def reward_kind(name: str, entry: RewardConfig) -> Any:
    """The class or function of a reward; code in its options must be allowed too."""
    try:
        named = str(entry.options.get(CODE_OPTIONS.get(entry.kind, "")))
        if plugins.is_code(named):
            plugins.require(named)
        return plugins.find("rewards", entry.kind, REWARDS)
    except UserError as error:
        raise type(error)(f"rewards.{name}: {error}") from error


def _options_of(kind: Any) -> list[str]:
    """The options that a reward takes: a class's arguments, or a function's after pictures and prompts."""
    return list(inspect.signature(kind).parameters)[0 if isinstance(kind, type) else 2 :]


def _build_reward(name: str, entry: RewardConfig, device: str) -> Reward:
    kind = reward_kind(name, entry)
    placed = {"device": device} if "device" in inspect.signature(kind).parameters else {}
    with loading(f"rewards.{name}: cannot be loaded", _weights_hint(name, kind, entry.options)):
        if not isinstance(kind, type):
            from g2rpo.rewards.function import FunctionReward

            return FunctionReward(kind, options={**placed, **entry.options})
        return kind(**{**placed, **entry.options})


def _weights_hint(name: str, kind: Any, options: Mapping[str, Any]) -> str:
    """The weights that a reward reads and how to get them, as the end of a message."""
    defaults = {option: parameter.default for option, parameter in inspect.signature(kind).parameters.items()}
    sources = {option: options.get(option, defaults.get(option)) for option in WEIGHT_OPTIONS}
    reads = [f"{option}={source}" for option, source in sources.items() if isinstance(source, str)]
    if not reads:
        return ""
    where = f"rewards.{name}.options.{reads[0].partition('=')[0]}=FOLDER"
    return f"\nIt reads {', '.join(reads)}. `hf download OWNER/NAME` fetches a repository; {where} uses a folder that you have."


def check_trackers(names: Sequence[str]) -> None:
    """Refuses a tracker whose library is not installed."""
    for name in names:
        plugins.find("trackers", name, TRACKERS)
        if name in TRACKERS and importlib.util.find_spec(name) is None:
            raise UserError(f"trackers: {name} is not installed; `pip install {name}`, or leave it out")


def build_trackers(names: Sequence[str]) -> list[Tracker]:
    """The trackers of a config; nothing of their libraries is imported yet."""
    check_trackers(names)
    return [plugins.find("trackers", name, TRACKERS)() for name in names]


TESTBED_LISTS = ("testbed:train", "testbed:heldout", "words:train", "words:heldout")
LISTS = (*TESTBED_LISTS, *STARTER)
"""Prompts that come with the package."""


def build_prompts(source: str, key: str) -> list[str]:
    """The prompts of a list that comes with the package, or of a source for `read_prompts`; `key` names the config entry."""
    refuse_mention(key, source)
    if source.startswith(("testbed", "words:", "starter:")) and source not in LISTS:
        raise UserError(f"{key}={source}: unknown list.{did_you_mean(source, LISTS)}")
    if source not in TESTBED_LISTS:
        try:
            return list[str](read_prompts(source))
        except UserError as error:
            absent = not source.startswith("hf:") and not os.path.exists(local(source))
            hint = f"; write a prompt a line there, or name your own with {key}=FILE, or {_starter(key)}" if absent else ""
            raise UserError(f"{key}={source}: {error}{hint}") from None
    from g2rpo.testbed import prompts

    world, _, split = source.partition(":")
    return list(prompts("train" if split == "train" else "heldout", world))


def _starter(key: str) -> str:
    return f"{key}=starter:{'heldout' if key.startswith('evaluation') else 'train'}, which comes with the package"
