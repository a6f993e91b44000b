"""The model of a demo: a run's, or any other, with its rewards, as a config says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from g2rpo.config.algorithms import title_of
from g2rpo.config.read import load_config
from g2rpo.config.resolve import resolve
from g2rpo.config.schema import Config, grid_of
from g2rpo.core.contracts import plans_of
from g2rpo.core.data import Prompt
from g2rpo.core.devices import pick_device
from g2rpo.core.errors import UserError
from g2rpo.core.images import check_counts
from g2rpo.core.plans import Plan
from g2rpo.core.rewards import Reward
from g2rpo.data.testbed import knows, why_unknown
from g2rpo.lab.evaluate import model_settings
from g2rpo.lab.report.history import model_name
from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.models.load import build_policy, find_pipeline, load_weights
from g2rpo.rewards.catalogue import build_rewards
from g2rpo.rollout.guidance import guided_by_hand
from g2rpo.rollout.memory import BatchSizes, batch_sizes
from g2rpo.train.checks import check_rewards_alone
from g2rpo.train.consistency import fitting_plans, refuse_all
from g2rpo.train.evaluation.controls import Need
from g2rpo.train.evaluation.sampler import Sampler, sampler_of
from g2rpo.train.found import named_rewards
from g2rpo.train.persistence import take_stored

RECIPES = {"testbed": "scenes", "words": "words"}
"""Recipes of the embedded models."""
MODEL_ALONE = {
    "algorithm": {"name": "g2rpo"},
    "rewards": {},
    "prompts": {"train": "starter:train"},
    "sampling": {"num_steps": 16, "shift": "model"},
    "optim": {"learning_rate": 1e-4},
    "trainer": {"iterations": 1},
    "evaluation": {"prompts": ""},
}
"""The settings of any other model: G2RPO with the paper's. It is not trained here."""
MAX_PROMPT = 500
"""Characters of a prompt."""
Tuned = Literal["nothing", "adapter", "all weights"]


def config_of_model(
    model: str, size: int | None, guidance: float | None, rewards: Mapping[str, Any] | None
) -> Config:
    """The config of a pipeline: an embedded one has its recipe, any other `MODEL_ALONE`. `rewards`
    replace all others."""
    settings: dict[str, Any] = MODEL_ALONE
    if model in RECIPES:
        settings = load_config(RECIPES[model], []).model_dump(mode="json")
    own = model_settings(model, size, guidance)
    if rewards:
        own |= {"rewards": rewards, "evaluation": {**settings["evaluation"], "rewards": {}}}
    return resolve({**settings, **own}, source="the demo")


def check_demo(config: Config) -> None:
    """UserError for what can be known to be wrong before anything is loaded."""
    find_pipeline(config.policy)
    check_rewards_alone(config.all_rewards)
    refuse_all((fitting_plans,), named_rewards(config))


def what_it_is(config: Config, training: str) -> str:
    """The model and its training as a sentence."""
    name = model_name(config.policy)
    return f"{'The' + name[3:] if name.startswith('the ') else name}, {training}."


def training_of(config: Config) -> str:
    """What a run of `config` trained."""
    weights = "an adapter" if config.policy.tuning == "lora" else "all weights"
    return f"before and after training {weights} with {title_of(config.algorithm)[0]}"


@dataclass(kw_only=True)
class DemoModel:
    """A model with its rewards, and how it is sampled and trained by its `config`; not thread-safe.

    `sampler` is that of evaluations, of the prompts `heldout`. `tuned` says which weights were
    loaded; the policy's `base()` is then the untrained model. `rewards` are those of the
    advantages; `judges` only score.
    """

    config: Config
    sampler: Sampler
    sizes: BatchSizes
    rewards: Mapping[str, Reward]
    judges: Mapping[str, Reward]
    tuned: Tuned = "nothing"
    heldout: Sequence[str] = ()

    @property
    def policy(self) -> DiffusersPolicy:
        return cast(DiffusersPolicy, self.sampler.policy)

    @property
    def sigmas(self) -> Tensor:
        """The sigma grid of training."""
        return grid_of(self.config.sampling.shift, self.policy, self.config.sampling.num_steps)

    @property
    def plans(self) -> list[Plan]:
        """The plans of the first iteration."""
        return plans_of(
            self.config.algorithm, self.config.sampling.num_steps, 0, self.config.trainer.seed
        )

    @property
    def weights(self) -> Tensor:
        """Those of the rewards, [R]."""
        return torch.tensor([entry.weight for entry in self.config.rewards.values()])

    @property
    def input_pictures(self) -> tuple[int, int]:
        """How many of them a prompt takes, at least and at most."""
        return getattr(self.policy, "input_pictures", (0, 0))

    def acts(self, needs: Need) -> bool:
        """Whether a setting that needs this changes anything."""
        return {
            "nothing": True,
            "own guidance": self.policy.guidable,
            "guidance by hand": guided_by_hand(self.policy),
            "rewards": bool(self.rewards),
            "adapter": self.tuned == "adapter",
        }[needs]

    @property
    def meanings(self) -> dict[str, str]:
        """What each reward measures: the first sentences of its documentation, if it has any."""
        every = {**self.rewards, **self.judges}.items()
        told = {name: inspect.getdoc(reward) or "" for name, reward in every}
        return {name: " ".join(it.split("\n\n")[0].split()) for name, it in told.items() if it}

    def explain(self, prompt: str) -> str:
        """Why a prompt is none of the model's world; "" if it is, or if nothing is known of it."""
        return why_unknown(self.config.policy.path, prompt)

    @property
    def knows(self) -> str:
        """What the model can draw, in words; "" if nothing is known of it."""
        return knows(self.config.policy.path)

    def prompt(self, text: str, images: Sequence[str] = ()) -> tuple[str, int | None]:
        """The prompt with these words and input pictures, and its number if it is a held-out one;
        without pictures, those of the held-out prompt with the same words. UserError for none, for
        too many characters, or another number of pictures."""
        text = text.strip()
        if not text:
            raise UserError("write a prompt first")
        if len(text) > MAX_PROMPT:
            raise UserError(f"the prompt has {len(text)} characters; {MAX_PROMPT} are allowed")
        known = [str(prompt) for prompt in self.heldout]
        number = known.index(text) if text in known and not images else None
        prompt = Prompt(text, images) if number is None else self.heldout[number]
        if images or self.input_pictures[0]:
            check_counts([prompt], self.input_pictures)
        return prompt, number


def open_model(
    config: Config, weights: Path | None, notify: Callable[[str], None], heldout: Sequence[str] = ()
) -> DemoModel:
    """Builds the model and the rewards of `config`, and loads tuned weights."""
    device = pick_device(config.policy.device)
    rewards, judges = (
        build_rewards(table, device) for table in (config.rewards, config.evaluation.rewards)
    )
    policy = build_policy(config.policy, tuning="frozen", keep_base=True)
    policy.text.park()  # they are on the device only while they encode
    tuned: Tuned = "nothing"
    if weights is not None:
        load_weights(policy, weights, config.policy.path)
        take_stored({**rewards, **judges}, weights.parent, notify)
        tuned = "adapter" if policy.sampling.own else "all weights"
    s = config.sampling
    return DemoModel(
        config=config,
        sampler=sampler_of(config, policy, batch_size=1, decode_batch_size=1),
        sizes=batch_sizes(s.batch_size, s.decode_batch_size, 1, policy.device, notify),
        rewards=rewards,
        judges=judges,
        tuned=tuned,
        heldout=heldout,
    )
