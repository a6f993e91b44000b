"""Whether the settings of a run fit each other: all that is known from its config alone.

A check is a function of a `Wanted` run. It yields complaints, or raises UserError for one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from g2rpo.config.schema import Config, PolicyConfig, SamplingConfig
from g2rpo.core.contracts import name_of, plans_of
from g2rpo.core.errors import UserError, placed
from g2rpo.core.plugins import Mentioned, refuse_object
from g2rpo.core.types import Algorithm, CallableReward, Reward, as_rewards
from g2rpo.models import catalogue, load
from g2rpo.models.hub import HubQuestion
from g2rpo.models.spec import PipelineSpec
from g2rpo.rewards.catalogue import check_frames, declared_by, reward_kind
from g2rpo.rewards.options import RewardConfig
from g2rpo.train.compatible import (
    check_differentiable,
)


@dataclass(frozen=True)
class Wanted:
    """A run that is to begin. Objects in `given` (policy, rewards, judges, prompts, heldout,
    trackers) are not checked."""

    config: Config
    given: Mapping[str, Any] = field(default_factory=dict)
    directory: Path | None = None
    lists: dict[str, list[str]] = field(default_factory=dict)
    """The prompts that have been read: "prompts" to train on, and "heldout"."""
    questions: dict[str, HubQuestion] = field(default_factory=dict)
    """What servers are still to be asked, by the config's key."""

    @property
    def sources(self) -> dict[str, tuple[str, str]]:
        """The keys and values of the config for lists that are not given."""
        named = {
            "prompts": ("prompts.train", self.config.prompts.train),
            "heldout": ("evaluation.prompts", self.config.evaluation.prompts),
        }
        return {name: source for name, source in named.items() if name not in self.given}

    @property
    def keyed(self) -> dict[str, RewardConfig]:
        """All rewards that are not given, trained and held-out, by their keys in the config."""
        held_out = {
            f"evaluation.rewards.{name}": entry
            for name, entry in self.config.evaluation.rewards.items()
        }
        trained = {f"rewards.{name}": entry for name, entry in self.config.rewards.items()}
        return {
            **({} if "rewards" in self.given else trained),
            **({} if "judges" in self.given else held_out),
        }

    @property
    def rewards(self) -> dict[str, RewardConfig]:
        """The same by their names."""
        return rewards_of(self.config, self.given)


def rewards_of(
    config: Config, given: Mapping[str, Any], heldout: bool = True
) -> dict[str, RewardConfig]:
    """The rewards of a config that are not given, by their names: those that are trained and, with
    `heldout`, those that judge held-out pictures."""
    trained = {} if "rewards" in given else config.rewards
    return {**trained, **(config.evaluation.rewards if heldout and "judges" not in given else {})}


Check = Callable[[Wanted], Iterable[str] | None]


def check_settings(config: Config) -> None:
    """UserError names all settings that do not fit each other."""
    refuse_all(CHECKS, Wanted(config))


def refuse_all(checks: Iterable[Check], run: Wanted) -> None:
    """UserError with the complaints of all checks, if there are any."""
    refuse_listed(complaint for each in checks for complaint in said(each, run))


def refuse_listed(complaints: Iterable[str]) -> None:
    """UserError with all complaints, if there are any."""
    if listed := list(dict.fromkeys(complaints)):
        raise UserError(_listed(listed))


def said(call: Callable[..., Any], *arguments: Any) -> Iterator[str]:
    """The complaints of a call, which yields or raises them."""
    try:
        yield from call(*arguments) or ()
    except UserError as error:
        yield str(error)


def _listed(complaints: Sequence[str]) -> str:
    """One complaint, or a list of several with the downloads that it names."""
    if len(complaints) == 1:
        return complaints[0]
    lines = ["- " + complaint.replace("\n", "\n  ") for complaint in complaints]
    fetch = dict.fromkeys(re.findall(r"`(hf download [^`]+)`", "\n".join(lines)))
    if len(fetch) > 1:
        lines += [
            "To download all of it (`g2rpo plan` estimates its size; `hf auth login` first for gated models), here or "
            f"where the hub can be reached, whose ~/.cache/huggingface/hub then goes to {constants.HF_HUB_CACHE}:",
            *fetch,
        ]
    return "\n".join([f"{len(complaints)} things are missing or wrong:", *lines])


def _repeated_names(run: Wanted) -> Iterator[str]:
    for name in sorted(set(run.config.rewards) & set(run.config.evaluation.rewards)):
        yield f"evaluation.rewards.{name}: is trained on, and so judged anyway; `evaluation.rewards.{name}=` takes it out"


def _weights(run: Wanted) -> Iterator[str]:
    rewards = run.config.rewards
    if not rewards:
        yield "rewards: is empty; name at least one, for example rewards.scene_accuracy=1"
    elif not any(entry.weight for entry in rewards.values()):
        yield f"rewards: every weight is 0, so nothing is learned; set one, for example rewards.{min(rewards)}=1"


def _plans(run: Wanted) -> None:
    check_plans(run.config.algorithm, run.config.sampling)


def _gradients(run: Wanted) -> None:
    """An algorithm that learns from the gradient of rewards needs rewards that have one."""
    config, known = run.config, _known_rewards(run)
    clips = (config.policy.num_frames or 1) > 1
    by_frames = frozenset(
        name
        for name, reward in known.items()
        if config.rewards[name].frames is not None
        or (clips and not (reward.video or reward.latent))
    )
    weights = {name: entry.weight for name, entry in config.rewards.items()}
    if not isinstance(config.algorithm, Mentioned):
        check_differentiable(config.algorithm, known, weights, by_frames)


def _known_rewards(run: Wanted) -> dict[str, Reward | type[Reward]]:
    """The rewards of a run, as far as it is known what they need: those that are given, functions,
    and classes of `Reward`. Of another class, and of what the kind "function" names, only the built
    reward says it, to the trainer."""
    if "rewards" in run.given:
        return {**as_rewards(run.given["rewards"])}
    known: dict[str, Reward | type[Reward]] = {}
    for name, entry in run.config.rewards.items():
        kind = reward_kind(name, entry)
        if not isinstance(kind, type):
            known[name] = CallableReward(kind)
        elif issubclass(kind, Reward) and not issubclass(kind, CallableReward):
            known[name] = kind
    return known


def _sides(run: Wanted) -> Iterator[str]:
    """Rewards that take pictures of one size need pictures of that size, in training and in
    evaluation."""
    config = run.config
    for name, entry in run.rewards.items() if "policy" not in run.given else ():
        side = declared_by(reward_kind(name, entry)).side
        for size in (config.judged, *([config.policy] if name in config.rewards else [])):
            if side is not None and (size.height, size.width) != (side, side):
                made = f"here they have {size.height}x{size.width}"
                yield f"rewards.{name}: {entry.kind} takes pictures of {side}x{side}, and {made}; take it out"
                break


def _clips(run: Wanted) -> None:
    if "policy" not in run.given:
        check_clips(run.rewards, run.config.policy)


def _frames(run: Wanted) -> None:
    for name, entry in run.rewards.items():
        check_frames(name, declared_by(reward_kind(name, entry)), entry)


def check_guidance(run: Wanted) -> Iterator[str]:
    """A guidance scale of training, and a negative prompt, need a model that is sampled with
    guidance."""
    scale, policy = run.config.sampling.guidance_scale, run.config.policy
    given = [] if scale is None else [f"sampling.guidance_scale={scale:g}"]
    given += ["policy.negative_prompt"] if policy.negative_prompt else []
    if not given or "policy" in run.given:
        return
    spec, deployed = spec_of(policy), policy.guidance_scale
    if spec is not None and not spec.guides(spec.guidance if deployed is None else deployed):
        for setting in given:
            yield f"{setting}: the model is sampled without guidance; take it out"


def spec_of(policy: PolicyConfig) -> PipelineSpec | None:
    """The spec of a model; None for a policy class without one."""
    if (known := catalogue.model_of(policy.path, policy.kind)) is not None:
        return known[0]
    _, name = load.locate_pipeline(policy.path, policy.pipeline, policy.kind)
    return catalogue.spec_of(policy.kind or name)


def check_plans(algorithm: Algorithm, sampling: SamplingConfig) -> None:
    """Refuses an algorithm that does not fit the sampler's steps, or whose solver does not fit the
    sampler's tails."""
    if isinstance(algorithm, Mentioned):
        refuse_object("algorithm.name", algorithm.name)
    plans = plans_of(algorithm, sampling.num_steps)
    with placed(f"algorithm {name_of(algorithm)} does not fit sampling.tails: "):
        sampling.tails.walked_by(plans)


CHECKS: Sequence[Check] = (
    _repeated_names,
    _weights,
    _plans,
    _gradients,
    _sides,
    _clips,
    _frames,
    check_guidance,
)
"""The checks in their order."""


def check_clips(table: Mapping[str, RewardConfig], policy: PolicyConfig) -> None:
    """Refuses rewards of clips for a policy that makes pictures; how many frames a policy of one's
    own makes is not known."""
    for name, entry in table.items():
        if (
            policy.kind is None
            and (policy.num_frames or 1) < 2
            and declared_by(reward_kind(name, entry)).video
        ):
            raise UserError(
                f"rewards.{name}: {entry.kind} scores clips, and here are pictures; take it out, or set policy.num_frames to "
                "two or more for a model that makes clips"
            )
