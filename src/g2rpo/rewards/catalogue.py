"""What a config says of rewards, and their names: each is found once, as a `RewardKind`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_type_hints

import torch
from pydantic import AfterValidator, BeforeValidator, Field, JsonValue

from g2rpo.core import plugins
from g2rpo.core.devices import pick_device
from g2rpo.core.errors import UserError, did_you_mean, loading, placed, refuse
from g2rpo.core.events import doing
from g2rpo.core.plain import Count, Section, as_json, parse_as
from g2rpo.core.plugins import keeping_settings, refuse_object
from g2rpo.core.rewards import CallableReward, Frames, Reward, Scorer, as_reward


def _not_negative(weight: float) -> float:
    """Refuses a reward to be lowered: alarms, the best evaluation and reports take a higher score
    for the better one."""
    if weight < 0:
        raise ValueError(
            "should be at least 0, since a higher score is the better one; to lower it, negate the score itself"
        )
    return weight


class RewardConfig(Section):
    """One reward: its kind, options and weight."""

    kind: str
    weight: Annotated[float, AfterValidator(_not_negative)] = 1.0
    options: dict[str, JsonValue] = {}
    frames: Frames | None = None
    """Which frames of clips a reward of pictures scores; None: every fourth, their mean."""


def _reward_table(value: Any) -> Any:
    """Allows `name: 1.0` (a weight) and `name: {weight: ...}`, where the name is also the kind."""
    if not isinstance(value, Mapping):
        return value
    table = {}
    for name, entry in value.items():
        if isinstance(entry, int | float) and not isinstance(entry, bool):
            entry = {"weight": entry}
        elif entry is None:
            entry = {}
        table[name] = {"kind": name, **entry} if isinstance(entry, Mapping) else entry
    return table


RewardName = Annotated[str, Field(pattern=r"^[\w+-][\w.+-]*$", max_length=100)]
"""The name appears in tables, charts and file names."""


RewardTable = Annotated[dict[RewardName, RewardConfig], BeforeValidator(_reward_table)]


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


@dataclass(frozen=True)
class RewardKind:
    """A reward that a config names at `key`: its settings, and the class or function that makes its
    scores."""

    key: str
    entry: RewardConfig
    maker: Any

    @property
    def name(self) -> str:
        return self.key.rpartition("rewards.")[2]

    @property
    def declared(self) -> type[Reward]:
        """The class with the declarations: the maker if it is a `Reward`; other classes and
        functions declare nothing."""
        own = isinstance(self.maker, type) and issubclass(self.maker, Reward)
        return self.maker if own else CallableReward

    @property
    def is_reward_class(self) -> bool:
        """Whether the maker is a `Reward`, so that its declarations count."""
        return self.declared is self.maker

    @property
    def defaults(self) -> dict[str, Any]:
        """The options that the reward takes, a class's arguments, or a function's after pictures and
        prompts, with their defaults; `inspect.Parameter.empty` where it needs one."""
        every = list(inspect.signature(self.maker).parameters.values())
        own = every if isinstance(self.maker, type) else every[2:]
        return {
            option.name: None
            if option.kind in (option.VAR_POSITIONAL, option.VAR_KEYWORD)
            else option.default
            for option in own
        }

    @property
    def options(self) -> dict[str, Any]:
        return {**self.defaults, **self.entry.options}

    @property
    def device(self) -> str | None:
        """The device that its options name; None where it goes to the run's."""
        device = self.entry.options.get("device")
        return None if device is None or not self.is_reward_class else str(device)

    def faults(self) -> Iterator[str]:
        """Unknown options, and values that they cannot have."""
        secrets = list(_secrets_in(self.entry.options))
        for key in secrets:
            yield (
                f"{self.key}.options.{key}: a token or a password would end in configs and logs. Put it in an environment "
                "variable, and name that: endpoint.token_env=NAME, or the name as an option of a reward of yours"
            )
        if secrets:
            return  # what is said of a value repeats it
        built_in = self.entry.kind in REWARDS
        types = get_type_hints(self.maker.__init__, include_extras=True) if built_in else {}
        types |= SHARED_OPTIONS if self.is_reward_class else {}
        known = list(self.defaults)
        for option, value in self.entry.options.items():
            if option not in known:
                yield f"{self.key}.options: unknown option '{option}'.{did_you_mean(option, known)}"
            elif option in types:
                with placed(f"{self.key}.options.{option}: "):
                    parse_as(types[option], as_json(value))

    def build(self, device: str) -> Reward:
        """The reward with the config's `frames`; a model whose options name no device goes to
        `device`."""
        on_device = {"device": device} if "device" in self.defaults else {}
        hint = self._weights_hint()
        with (
            doing(f"loading the reward {self.name}"),
            keeping_settings(f"the reward {self.name}"),
            loading(f"{self.key}: cannot be loaded", hint),
        ):
            given = {**on_device, **self.entry.options}
            if given.get("device") == "auto":
                given["device"] = pick_device("auto")
            made = self.maker
            reward = (
                as_reward(made(**given)) if isinstance(made, type) else CallableReward(made, given)
            )
        return with_frames(self.name, reward, self.entry)

    def _weights_hint(self) -> str:
        """The weights that the reward reads and how to get them, as the end of a message."""
        given = self.options
        reads = [
            f"{option}={given[option]}"
            for option in self.declared.files
            if isinstance(given.get(option), str)
        ]
        if not reads:
            return ""
        where = f"{self.key}.options.{reads[0].partition('=')[0]}=FOLDER"
        fetch = "`hf download OWNER/NAME` fetches a repository"
        return f"\nIt reads {', '.join(reads)}. {fetch}; {where} uses a folder that you have."


def find_rewards(table: Mapping[str, RewardConfig]) -> dict[str, RewardKind]:
    """The kinds of the rewards of a table, by their names. UserError for an unknown kind, or code
    that is not allowed, which one message names."""
    plugins.require_all(code for entry in table.values() for code in _codes(entry))
    return {name: find_reward(f"rewards.{name}", entry) for name, entry in table.items()}


def find_reward(key: str, entry: RewardConfig) -> RewardKind:
    """The kind of one reward, whose entry is at `key` of the config; UserError as `find_rewards`."""
    refuse_object(f"{key}.kind", entry.kind)
    try:
        made = plugins.find_class("rewards", entry.kind, REWARDS)
        found = RewardKind(key, entry, made)
        plugins.require_all(_code_options(found))
        if "__call__" not in dir(made):  # `callable` is true of every class
            raise UserError(f"{entry.kind}: is no reward, it has no __call__(images, prompts)")
        return found
    except plugins.CodeNotAllowed:
        raise
    except UserError as error:
        raise UserError(f"{key}: {error}") from error


def _codes(entry: RewardConfig) -> list[str]:
    """The code that an entry names, as far as it is known without importing any."""
    if plugins.is_code(entry.kind):
        return [entry.kind]
    if entry.kind not in REWARDS:
        return []
    return _code_options(RewardKind("", entry, plugins.find_class("rewards", entry.kind, REWARDS)))


def _code_options(kind: RewardKind) -> list[str]:
    code = str(kind.entry.options.get(kind.declared.code_option))
    return [code] if plugins.is_code(code) else []


def check_rewards(table: Mapping[str, RewardConfig]) -> None:
    """Refuses unknown rewards and options; nothing is loaded."""
    for kind in find_rewards(table).values():
        refuse(kind.faults())


def build_rewards(table: Mapping[str, RewardConfig], device: str = "cpu") -> dict[str, Reward]:
    """The rewards of a table, by their names."""
    kinds = find_rewards(table)
    for kind in kinds.values():
        refuse(kind.faults())
    refuse(faults_of_devices(kinds.values()))
    return {name: kind.build(device) for name, kind in kinds.items()}


def with_frames(name: str, scorer: Scorer, entry: RewardConfig | None) -> Reward:
    """The reward with the `frames` of its entry; UserError for those of a reward that takes clips
    or latents."""
    reward = as_reward(scorer)
    if entry is None or entry.frames is None:
        return reward
    refuse(faults_of_frames(f"rewards.{name}", reward, entry))
    if reward is scorer:
        reward = CallableReward(reward)  # the object may have other frames under another name
    reward.frames = entry.frames
    return reward


def faults_of_frames(key: str, reward: Reward | type[Reward], entry: RewardConfig) -> Iterator[str]:
    """Of frames of a reward (or its class) that takes clips or latents."""
    if entry.frames is not None and (reward.video or reward.latent):
        what, kind = ("whole clips", "video") if reward.video else ("latents", "latent")
        yield f"{key}.frames: this reward takes {what} (its `{kind}` is true); take frames out"


def faults_of_devices(kinds: Iterable[RewardKind]) -> Iterator[str]:
    """Devices of rewards that this machine lacks; a plan for another machine may name them."""
    wanted = {kind.key: kind.device for kind in kinds if kind.device is not None}
    on_gpu = [key for key, device in wanted.items() if device.startswith("cuda")]
    if on_gpu and not torch.cuda.is_available():
        overrides = " ".join(f"{key}.options.device=cpu" for key in on_gpu)
        yield (
            f"torch sees no GPU here, and {' and '.join(on_gpu)} should be on one (device=cuda). `g2rpo train words` and "
            f"`g2rpo train scenes` need none. This run without one, which is slow: {overrides}"
        )
        return
    for key, device in wanted.items():
        pick_device(device, f"{key}.options.device")


def _secrets_in(value: Any) -> Iterator[str]:
    """The dotted keys of settings whose names say that they hold a secret."""
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        if inner is not None and SECRET.fullmatch(str(key).lower().replace("-", "_")):
            yield str(key)
        yield from (f"{key}.{each}" for each in _secrets_in(inner))
