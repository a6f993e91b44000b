"""The settings of a demo: those of a run, or defaults for a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.app.evaluate import model_policy, reward_table
from g2rpo.assembly import components
from g2rpo.assembly.checks import check_plans
from g2rpo.assembly.rewards import check_rewards
from g2rpo.config import recipes
from g2rpo.config.algorithms import title_of
from g2rpo.config.resolve import resolve
from g2rpo.config.schema import Config, PolicyConfig, RewardTable, SamplingConfig
from g2rpo.core.data import Precision
from g2rpo.core.types import Algorithm
from g2rpo.lab.report.history import RunHistory
from g2rpo.lab.report.verdict import model_name, summary_of
from g2rpo.run.run import Run


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What a demo shows and how it samples."""

    title: str
    policy: PolicyConfig
    algorithm: Algorithm
    sampling: SamplingConfig
    precision: Precision
    rewards: RewardTable
    judges: RewardTable = field(default_factory=dict)
    seed: int = 42
    prompts: str = ""
    """A source of held-out prompts."""
    num_prompts: int | None = None
    """The number of held-out prompts to use."""
    steps: int | None = None
    """Step count of the run's evaluations."""
    training: str = "as it is"
    """A description of the training."""

    def check(self) -> None:
        """Checks before anything is loaded."""
        components.locate_pipeline(self.policy.path, self.policy.pipeline, self.policy.kind)
        check_rewards({**self.rewards, **self.judges})
        check_plans(self.algorithm, self.sampling)


def of_run(run: Path) -> DemoSettings:
    """The settings of a run."""
    c = Run(run).read_config(mention=False)
    weights = "an adapter" if c.policy.tuning == "lora" else "all weights"
    training = f"before and after training {weights} with {title_of(c.algorithm)[0]} on {' and '.join(c.rewards)}"
    settings = _of_config(f"Run {run.resolve().name}", c)
    return replace(settings, steps=c.evaluation.num_steps, training=training)


def _of_config(title: str, c: Config) -> DemoSettings:
    e = c.evaluation
    return DemoSettings(
        title=title,
        policy=c.policy,
        algorithm=c.algorithm,
        sampling=c.sampling,
        precision=c.precision,
        rewards=c.rewards,
        judges=e.rewards,
        seed=c.trainer.seed,
        prompts=e.prompts,
        num_prompts=e.num_prompts,
    )


RECIPES = {"testbed": ("The testbed", "scenes"), "words": ("Words", "words")}
"""Title and recipe of the embedded models."""
TAUGHT = {
    "testbed": ["rewards.scene_accuracy=", "rewards.scene_preference=1", "evaluation.rewards.scene_preference="],
    "words": ["rewards.ocr="],
}
"""What the tab "Teach" changes in these: no guard that says which pictures are right, which would teach that whatever is
clicked."""


def of_model(model: str, size: int | None, guidance: float | None, rewards: dict[str, Any] | None) -> DemoSettings:
    """The settings of a pipeline: an embedded one comes with its recipe, any other with the paper's algorithm."""
    policy = model_policy(model, size, guidance)
    table = reward_table(rewards or {})
    if model not in RECIPES:
        return DemoSettings(
            title=model,
            policy=policy,
            algorithm=GranularGRPO(),
            sampling=SamplingConfig(num_steps=16, shift="model"),
            precision=Precision(network=getattr(torch, policy.dtype)),
            rewards=table,
        )
    title, recipe = RECIPES[model]
    settings = replace(_of_config(title, resolve(recipes.settings(recipe), source=f"recipe {recipe}")), policy=policy)
    return replace(settings, rewards=table, judges={}) if table else settings


def demo_facts(settings: DemoSettings, log: RunHistory | None) -> str:
    """A description of model, training and results for the top of the page."""
    name = model_name(settings.policy)
    line = f"{'The' + name[3:] if name.startswith('the ') else name}, {settings.training}."
    return " ".join([line, *summary_of(log).sentences]) if log is not None else line
