"""Whether the settings of a run fit each other: all that is known from its config alone.

A check is a function of a `Found` run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from huggingface_hub import constants

from g2rpo.config.algorithms import faults_of_gradients
from g2rpo.core.contracts import name_of, plans_of
from g2rpo.core.errors import UserError, placed
from g2rpo.core.plugins import Mentioned, refuse_object
from g2rpo.core.rewards import CallableReward, Reward, as_rewards
from g2rpo.models.options import PolicyConfig
from g2rpo.rewards.catalogue import RewardKind, faults_of_frames
from g2rpo.train.found import Found

Check = Callable[[Found], Iterable[str]]
"""What is wrong with a run. A check yields complaints, or raises UserError for its last one."""


def refuse_all(checks: Iterable[Check], found: Found) -> None:
    """UserError with what could not be found and with the complaints of all checks, if there are
    any."""
    every = list(found.faults)
    for check in checks:
        every += complaints_of(check, found)
    refuse_listed(every)


def refuse_listed(complaints: Iterable[str]) -> None:
    """UserError with all complaints, if there are any."""
    if listed := list(dict.fromkeys(complaints)):
        raise UserError(_listed(listed))


def complaints_of(check: Callable[..., Iterable[str]], *of: Any) -> list[str]:
    """What a check yields, and what it raises."""
    said: list[str] = []
    try:
        for complaint in check(*of):
            said += [complaint]  # one at a time: those before an error stay
    except UserError as error:
        said.append(str(error))
    return said


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


def _repeated_names(found: Found) -> Iterator[str]:
    config = found.config
    for name in sorted(set(config.rewards) & set(config.evaluation.rewards)):
        yield f"evaluation.rewards.{name}: is trained on, and so judged anyway; `evaluation.rewards.{name}=` takes it out"


def _weights(found: Found) -> Iterator[str]:
    rewards = found.config.rewards
    if not rewards:
        yield "rewards: is empty; name at least one, for example rewards.scene_accuracy=1"
    elif not any(entry.weight for entry in rewards.values()):
        yield f"rewards: every weight is 0, so nothing is learned; set one, for example rewards.{min(rewards)}=1"


def fitting_plans(found: Found) -> Iterator[str]:
    """An algorithm must fit the sampler's steps, and its solver the sampler's tails."""
    algorithm, sampling = found.config.algorithm, found.config.sampling
    if isinstance(algorithm, Mentioned):
        refuse_object("algorithm.name", algorithm.name)
    made = plans_of(algorithm, sampling.num_steps)
    with placed(f"algorithm {name_of(algorithm)} does not fit sampling.tails: "):
        sampling.tails.walked_by(made)
    yield from ()


def _gradients(found: Found) -> Iterator[str]:
    """An algorithm that learns from the gradient of rewards needs rewards that have one."""
    config, known = found.config, _known_rewards(found)
    clips = (config.policy.num_frames or 1) > 1
    by_frames = frozenset(
        name
        for name, reward in known.items()
        if config.rewards[name].frames is not None
        or (clips and not (reward.video or reward.latent))
    )
    weights = {name: entry.weight for name, entry in config.rewards.items()}
    if not isinstance(config.algorithm, Mentioned):
        yield from faults_of_gradients(config.algorithm, known, weights, by_frames)


def _known_rewards(found: Found) -> dict[str, Reward | type[Reward]]:
    """The rewards of a run, as far as it is known what they need: those that are given, functions,
    and classes of `Reward`. Of another class, and of what the kind "function" names, only the built
    reward says it, to the trainer."""
    if found.given.rewards is not None:
        return {**as_rewards(found.given.rewards)}
    known: dict[str, Reward | type[Reward]] = {}
    for name, kind in found.rewards.items():
        if not isinstance(kind.maker, type):
            known[name] = CallableReward(kind.maker)
        elif issubclass(kind.maker, Reward) and not issubclass(kind.maker, CallableReward):
            known[name] = kind.maker
    return known


def _sides(found: Found) -> Iterator[str]:
    """Rewards that take pictures of one size need pictures of that size, in training and in
    evaluation."""
    config = found.config
    for kind in found.kinds if found.given.policy is None else ():
        side, trained = kind.declared.side, kind.name in config.rewards
        for size in (config.judged, *([config.policy] if trained else [])):
            if side is not None and (size.height, size.width) != (side, side):
                made = f"here they have {size.height}x{size.width}"
                yield f"rewards.{kind.name}: {kind.entry.kind} takes pictures of {side}x{side}, and {made}; take it out"
                break


def _clips(found: Found) -> Iterator[str]:
    if found.given.policy is None:
        yield from faults_of_clips(found.kinds, found.config.policy)


def faults_of_clips(kinds: Iterable[RewardKind], policy: PolicyConfig) -> Iterator[str]:
    """Faults: rewards of clips beside a policy of pictures; not of policies of one's own, whose frames
    are unknown."""
    for kind in kinds:
        if policy.kind is None and (policy.num_frames or 1) < 2 and kind.declared.video:
            yield (
                f"rewards.{kind.name}: {kind.entry.kind} scores clips, and here are pictures; take it out, or set "
                "policy.num_frames to two or more for a model that makes clips"
            )


def _frames(found: Found) -> Iterator[str]:
    for kind in found.kinds:
        yield from faults_of_frames(f"rewards.{kind.name}", kind.declared, kind.entry)


def _guidance(found: Found) -> Iterator[str]:
    """A guidance scale of training, and a negative prompt, need a model that is sampled with
    guidance."""
    scale, policy, spec = found.config.sampling.guidance_scale, found.config.policy, found.spec
    given = [] if scale is None else [f"sampling.guidance_scale={scale:g}"]
    given += ["policy.negative_prompt"] if policy.negative_prompt else []
    if spec is None or spec.guides(
        spec.guidance if policy.guidance_scale is None else policy.guidance_scale
    ):
        return
    for setting in given:
        yield f"{setting}: the model is sampled without guidance; take it out"


SETTINGS: Sequence[Check] = (
    _repeated_names,
    _weights,
    fitting_plans,
    _gradients,
    _sides,
    _clips,
    _frames,
    _guidance,
)
"""Whether settings fit each other, in the order of complaints."""
