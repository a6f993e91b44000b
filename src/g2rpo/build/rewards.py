"""Rewards from their names in a config."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from g2rpo import plugins
from g2rpo.build.components import pick_device
from g2rpo.config.given import refuse_mention
from g2rpo.config.schema import RewardConfig
from g2rpo.errors import UserError, did_you_mean, loading
from g2rpo.rewards.weights import parse_dtype
from g2rpo.rollout.frames import OnFrames
from g2rpo.types import Reward

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
WEIGHT_OPTIONS = ("path", "tokenizer", "processor", "clip", "detector")
"""Options of rewards that name a folder, a file or a hub repository."""
CODE_OPTIONS = {"function": "target", "geneval": "detector"}
"""By kind of reward, the option that may name code."""


def build_rewards(table: Mapping[str, RewardConfig], device: str = "cpu") -> dict[str, Reward]:
    """The rewards of a config, by their names there; models whose options name no device go to `device`."""
    check_rewards(table)
    check_devices(table)
    return configured({name: _build_reward(name, entry, device) for name, entry in table.items()}, table)


def configured(rewards: Mapping[str, Reward], table: Mapping[str, RewardConfig]) -> dict[str, Reward]:
    """The rewards with what `table` says of `frames`; UserError for frames of one that takes clips or latents."""
    chosen = {name: entry.frames for name, entry in table.items() if name in rewards and entry.frames is not None}
    for name in chosen:
        for kind, what in (("video", "whole clips"), ("latent", "latents")):
            if getattr(rewards[name], kind, False):
                raise UserError(f"rewards.{name}.frames: this reward takes {what} (its `{kind}` is true); take frames out")
    return {name: OnFrames(reward, chosen[name]) if name in chosen else reward for name, reward in rewards.items()}


def check_rewards(table: Mapping[str, RewardConfig]) -> None:
    """Refuses unknown rewards and options, before any weights are loaded."""
    plugins.require_all(code for entry in table.values() for code in (entry.kind, _code_of(entry)) if plugins.is_code(code))
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
        if plugins.is_code(named := _code_of(entry)):
            plugins.require(named)
        return plugins.find("rewards", entry.kind, REWARDS)
    except plugins.CodeNotAllowed:
        raise
    except UserError as error:
        raise UserError(f"rewards.{name}: {error}") from error


def _code_of(entry: RewardConfig) -> str:
    """What an option that may name code has."""
    return str(entry.options.get(CODE_OPTIONS.get(entry.kind, "")))


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
