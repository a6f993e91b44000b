"""Rewards from their names in a config."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_type_hints

import torch

from g2rpo.core import plugins
from g2rpo.core.devices import pick_device
from g2rpo.core.errors import UserError, did_you_mean, loading, placed
from g2rpo.core.plain import Count, as_json, parse_as
from g2rpo.core.plugins import keeping_settings, refuse_object
from g2rpo.core.types import CallableReward, Reward, Scorer, as_reward
from g2rpo.rewards.options import RewardConfig

REWARDS = {  # the only list of built-in rewards: their classes declare everything else
    "hpsv2": "g2rpo.rewards.clip:HPSv2",
    "hpsv3": "g2rpo.rewards.hpsv3:HPSv3",
    "clip_score": "g2rpo.rewards.clip:CLIPScore",
    "pickscore": "g2rpo.rewards.clip:PickScore",
    "image_reward": "g2rpo.rewards.image_reward:ImageReward",
    "aesthetic": "g2rpo.rewards.clip:Aesthetic",
    "geneval": "g2rpo.rewards.geneval:GenEval",
    "vlm_judge": "g2rpo.rewards.vlm:VLMJudge",
    "http": "g2rpo.rewards.remote:RemoteReward",
    "function": "g2rpo.rewards.analytic:FunctionReward",
    "ocr": "g2rpo.rewards.ocr:OCR",
    "pairs": "g2rpo.rewards.pairs:Pairs",
    "jpeg_size": "g2rpo.rewards.analytic:JPEGSize",
    "brightness": "g2rpo.rewards.analytic:Brightness",
    "saturation": "g2rpo.rewards.analytic:Saturation",
    "similarity": "g2rpo.rewards.analytic:Similarity",
    "dino_similarity": "g2rpo.rewards.dino:DinoSimilarity",
    "scene_accuracy": "g2rpo.data.testbed.rewards:SceneAccuracy",
    "scene_clip": "g2rpo.data.testbed.rewards:SceneCLIP",
    "scene_preference": "g2rpo.data.testbed.rewards:ScenePreference",
    "word_colour": "g2rpo.data.testbed.rewards:WordColour",
    "word_paper": "g2rpo.data.testbed.rewards:WordPaper",
    "word_drawing": "g2rpo.data.testbed.rewards:WordDrawing",
    "word_letters": "g2rpo.data.testbed.rewards:WordLetters",
}
SECRET = re.compile(
    r"(\w+_)?(pass(word|wd)|secret|authorization|cookie|credentials?)|((api|auth|access|bearer|user)_?)?token|\w*(api|access|secret|auth)_?key|bearer"
)
"""Names of options that hold a token or a password."""
SHARED_OPTIONS: dict[str, Any] = {
    "dtype": Literal["float32", "float16", "bfloat16"],
    "batch_size": Count,
}
"""Types of the options that every reward with a model has."""


def build_rewards(table: Mapping[str, RewardConfig], device: str = "cpu") -> dict[str, Reward]:
    """The rewards of a config, by their names there; models whose options name no device go to
    `device`."""
    check_rewards(table)
    check_devices({f"rewards.{name}": entry for name, entry in table.items()})
    return configured(
        {name: _build_reward(name, entry, device) for name, entry in table.items()}, table
    )


def configured(
    rewards: Mapping[str, Scorer], table: Mapping[str, RewardConfig]
) -> dict[str, Reward]:
    """The rewards with the `frames` in `table`; UserError for frames of a reward that takes clips
    or latents."""
    return {name: _configured(name, scorer, table.get(name)) for name, scorer in rewards.items()}


def _configured(name: str, scorer: Scorer, entry: RewardConfig | None) -> Reward:
    reward = as_reward(scorer)
    if entry is None or entry.frames is None:
        return reward
    check_frames(name, reward, entry)
    if reward is scorer:
        reward = CallableReward(reward)  # the object may have other frames under another name
    reward.frames = entry.frames
    return reward


def check_frames(name: str, reward: Reward | type[Reward], entry: RewardConfig) -> None:
    """Refuses frames of a reward (or its class) that takes clips or latents."""
    if entry.frames is not None and (reward.video or reward.latent):
        what, kind = ("whole clips", "video") if reward.video else ("latents", "latent")
        raise UserError(
            f"rewards.{name}.frames: this reward takes {what} (its `{kind}` is true); take frames out"
        )


def check_rewards(table: Mapping[str, RewardConfig]) -> None:
    """Refuses unknown rewards and options, before any weights are loaded."""
    plugins.require_all(code for entry in table.values() for code in _codes(entry))
    for name, entry in table.items():
        kind = reward_kind(name, entry)
        types = get_type_hints(kind.__init__, include_extras=True) if entry.kind in REWARDS else {}
        types |= SHARED_OPTIONS if declared_by(kind) is kind else {}
        for key in _secrets_in(entry.options):
            raise UserError(
                f"rewards.{name}.options.{key}: a token or a password would end in configs and logs. Put it in an environment "
                "variable, and name that: endpoint.token_env=NAME, or the name as an option of a reward of yours"
            )
        known = list(defaults_of(kind))
        for option, value in entry.options.items():
            if option not in known:
                raise UserError(
                    f"rewards.{name}.options: unknown option '{option}'.{did_you_mean(option, known)}"
                )
            if option in types:
                with placed(f"rewards.{name}.options.{option}: "):
                    parse_as(types[option], as_json(value))


def _secrets_in(value: Any) -> Iterator[str]:
    """The dotted keys of settings whose names say that they hold a secret."""
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        if inner is not None and SECRET.fullmatch(str(key).lower().replace("-", "_")):
            yield str(key)
        yield from (f"{key}.{each}" for each in _secrets_in(inner))


def check_devices(entries: Mapping[str, RewardConfig]) -> None:
    """Refuses devices of rewards, given by their keys in the config, that this machine lacks; a
    plan for another machine may name them."""
    wanted: dict[str, str] = {}
    for key, entry in entries.items():
        device = entry.options.get("device")
        kind = reward_kind(key.rpartition("rewards.")[2], entry)
        if device is not None and declared_by(kind) is kind:
            wanted[key] = str(device)
    on_gpu = [key for key, device in wanted.items() if device.startswith("cuda")]
    if on_gpu and not torch.cuda.is_available():
        overrides = " ".join(f"{key}.options.device=cpu" for key in on_gpu)
        raise UserError(
            f"torch sees no GPU here, and {' and '.join(on_gpu)} should be on one (device=cuda). `g2rpo train words` and "
            f"`g2rpo train scenes` need none. This run without one, which is slow: {overrides}"
        )
    for key, device in wanted.items():
        pick_device(device, f"{key}.options.device")


def reward_kind(name: str, entry: RewardConfig) -> Any:
    """The class or function of a reward; code in its options must be allowed too."""
    refuse_object(f"rewards.{name}.kind", entry.kind)
    try:
        kind = plugins.find("rewards", entry.kind, REWARDS)
        plugins.require_all(_code_options(kind, entry))
        call = (
            any("__call__" in vars(base) for base in kind.__mro__)
            if isinstance(kind, type)
            else callable(kind)
        )
        if not call:
            raise UserError(f"{entry.kind}: is no reward, it has no __call__(images, prompts)")
        return kind
    except plugins.CodeNotAllowed:
        raise
    except UserError as error:
        raise UserError(f"rewards.{name}: {error}") from error


def declared_by(kind: Any) -> type[Reward]:
    """The class with the declarations of a kind: itself if it is a `Reward`; other classes and
    functions declare nothing."""
    return kind if isinstance(kind, type) and issubclass(kind, Reward) else CallableReward


def _codes(entry: RewardConfig) -> list[str]:
    """The code that an entry names, as far as it is known without importing any."""
    if plugins.is_code(entry.kind):
        return [entry.kind]
    return (
        _code_options(plugins.find("rewards", entry.kind, REWARDS), entry)
        if entry.kind in REWARDS
        else []
    )


def _code_options(kind: Any, entry: RewardConfig) -> list[str]:
    return (
        [code]
        if plugins.is_code(code := str(entry.options.get(declared_by(kind).code_option)))
        else []
    )


def defaults_of(kind: Any) -> dict[str, Any]:
    """The options that a reward takes, a class's arguments, or a function's after pictures and
    prompts, with their defaults; `inspect.Parameter.empty` where it needs one."""
    options = list(inspect.signature(kind).parameters.values())[
        0 if isinstance(kind, type) else 2 :
    ]
    return {
        option.name: None
        if option.kind in (option.VAR_POSITIONAL, option.VAR_KEYWORD)
        else option.default
        for option in options
    }


def _build_reward(name: str, entry: RewardConfig, device: str) -> Reward:
    kind = reward_kind(name, entry)
    placed = {"device": device} if "device" in defaults_of(kind) else {}
    hint = _weights_hint(name, kind, entry.options)
    with keeping_settings(f"the reward {name}"), loading(f"rewards.{name}: cannot be loaded", hint):
        given = {**placed, **entry.options}
        if given.get("device") == "auto":
            given["device"] = pick_device("auto")
        return as_reward(kind(**given)) if isinstance(kind, type) else CallableReward(kind, given)


def _weights_hint(name: str, kind: Any, options: Mapping[str, Any]) -> str:
    """The weights that a reward reads and how to get them, as the end of a message."""
    given = {**defaults_of(kind), **options}
    reads = [
        f"{option}={given[option]}"
        for option in declared_by(kind).files
        if isinstance(given.get(option), str)
    ]
    if not reads:
        return ""
    where = f"rewards.{name}.options.{reads[0].partition('=')[0]}=FOLDER"
    return f"\nIt reads {', '.join(reads)}. `hf download OWNER/NAME` fetches a repository; {where} uses a folder that you have."
