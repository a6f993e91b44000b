"""What a run's config names, found: each name becomes a value once. Checks, building and the digests
of a resumed run take these values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from g2rpo.config.schema import Config
from g2rpo.core.distributed import ALONE, World
from g2rpo.core.errors import UserError
from g2rpo.core.rewards import Scorer
from g2rpo.core.types import Policy
from g2rpo.models import catalogue
from g2rpo.models.load import Pipeline, find_pipeline
from g2rpo.models.spec import PipelineSpec
from g2rpo.rewards.catalogue import RewardConfig, RewardKind, find_reward
from g2rpo.train.monitor.trackers import Tracker

Question = Callable[[], str | None]
"""Asks a server; returns what is wrong, or None. May be slow."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """Objects from Python in place of what a config names; they are not checked before loading."""

    policy: Policy | None = None
    rewards: Mapping[str, Scorer] | None = None
    judges: Mapping[str, Scorer] | None = None
    prompts: Sequence[str] | None = None
    heldout: Sequence[str] | None = None
    trackers: Sequence[Tracker] | None = None


@dataclass(kw_only=True)
class Found:
    """A config with what its names mean. Names of which nothing is there are left out, and are among
    the `faults`."""

    config: Config
    given: Given
    directory: Path | None = None
    """The run's folder, if it is to be written."""
    world: World = ALONE
    """The ranks that train together."""
    pipeline: Pipeline | None = None
    """None where a policy is given."""
    spec: PipelineSpec | None = None
    """Of the pipeline; None for a policy class without one."""
    rewards: dict[str, RewardKind] = field(default_factory=dict)
    """Those that are trained on, by name, but for given ones."""
    judges: dict[str, RewardKind] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)
    heldout: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    questions: dict[str, Question] = field(default_factory=dict)
    """What servers are still to be asked, by the config's key."""

    @property
    def kinds(self) -> list[RewardKind]:
        """Of all rewards."""
        return [*self.rewards.values(), *self.judges.values()]

    @property
    def sources(self) -> dict[str, tuple[str, str]]:
        """The keys and values of the config for lists of prompts that are not given."""
        named = {
            "prompts": ("prompts.train", self.config.prompts.train),
            "heldout": ("evaluation.prompts", self.config.evaluation.prompts),
        }
        return {name: named[name] for name in named if getattr(self.given, name) is None}

    def lists(self) -> Iterator[tuple[str, str, list[str], Collection[RewardKind]]]:
        """Key, value and prompts of these lists, with the rewards that score them."""
        for name, (key, source) in self.sources.items():
            scored_by = self.kinds if name == "heldout" else self.rewards.values()
            yield key, source, getattr(self, name), scored_by

    @contextmanager
    def noting(self) -> Iterator[None]:
        """While entered, a UserError is a fault."""
        try:
            yield
        except UserError as error:
            self.faults.append(str(error))


NOTHING = Given()


def find(
    config: Config, given: Given = NOTHING, directory: Path | None = None, world: World = ALONE
) -> Found:
    """The values of all names of a config, but for prompts, which a check reads."""
    found = named_rewards(config, given)
    found.directory, found.world = directory, world
    found.prompts, found.heldout = list(given.prompts or ()), list(given.heldout or ())
    if given.policy is None:
        with found.noting():
            found.pipeline = find_pipeline(config.policy)
            found.spec = found.pipeline.spec
    return found


def find_settings(config: Config) -> Found:
    """As `find`, without looking for a published model, which may be absent: for plans."""
    found, policy = named_rewards(config), config.policy
    with found.noting():
        known = catalogue.model_of(policy.path, policy.kind)
        found.spec = known[0] if known is not None else find_pipeline(policy).spec
    return found


def named_rewards(config: Config, given: Given = NOTHING) -> Found:
    """The values of the names of rewards alone."""
    found = Found(config=config, given=given)
    if given.rewards is None:
        found.rewards = rewards_in("rewards", config.rewards, found.faults)
    if given.judges is None:
        table = config.evaluation.rewards
        found.judges = rewards_in("evaluation.rewards", table, found.faults)
    return found


def rewards_in(
    key: str, table: Mapping[str, RewardConfig], faults: list[str]
) -> dict[str, RewardKind]:
    """The rewards of the table at `key` of a config, by their names. Those of which nothing is
    there are left out, and are added to the `faults`."""
    kinds = {}
    for name, entry in table.items():
        try:
            kinds[name] = find_reward(f"{key}.{name}", entry)
        except UserError as error:
            faults.append(str(error))
    return kinds
