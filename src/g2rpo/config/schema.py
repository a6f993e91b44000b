"""The schema of a run's configuration. `resolve` builds one from files and overrides."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
)
from torch import Tensor

from g2rpo.config.algorithms import AnyAlgorithm
from g2rpo.core.data import Precision
from g2rpo.core.flow import scheduler_grid, sigma_grid
from g2rpo.core.plain import Count, Section
from g2rpo.core.types import Policy
from g2rpo.models.options import PolicyConfig
from g2rpo.rewards.catalogue import RewardTable
from g2rpo.rollout.tails import Tails

Shift = PositiveFloat | Literal["model", "scheduler"]
"""The time shift of the sigma grid. "model": the one that the pipeline is deployed with at this
size; "scheduler": the same on the grid of diffusers' scheduler, which SD3's pipelines use
(`flow.scheduler_grid`)."""


Steps = Annotated[int, Field(ge=1, le=250)]
"""The number of denoising steps."""


def _off(value: Any) -> Any:
    """Restores "off", which YAML 1.1 reads as false."""
    return "off" if value is False else value


CacheFolder = Annotated[str, BeforeValidator(_off)]


class PromptsConfig(Section):
    """Sources of prompts, and the cache of their embeddings.

    A source is a file (.txt with a prompt a line; .csv, .tsv, .json, .jsonl or .parquet with a
    column "prompt", "prompts", "caption" or "text", or FILE:COLUMN), a dataset
    (hf:OWNER/NAME:SPLIT:COLUMN), "starter:train" (for real models) or "testbed:train".
    """

    train: str
    cache: CacheFolder = "auto"
    """A folder, "auto" for embeddings/ in $G2RPO_CACHE or ~/.cache/g2rpo, or "off". Other text
    encoders, and other versions (as 5.1 after 5.0) of transformers or diffusers, encode again."""


BatchSize = Count | Literal["auto"]


class SamplingConfig(Section):
    """Settings of the sampler, shared by rollouts and evaluation."""

    num_steps: Annotated[int, Field(ge=2, le=250)]
    shift: Shift = 3.0
    guidance_scale: NonNegativeFloat | None = None
    """The guidance scale of rollouts and training passes; held-out pictures keep
    policy.guidance_scale, which is the default. 0 turns classifier-free guidance off, which halves
    the evaluations of training."""
    batch_size: BatchSize = 64
    """Rows of one network call. "auto": as many as leave a fifth of the GPU's memory free; 32 on a
    CPU."""
    decode_batch_size: BatchSize = 64
    """Images of one VAE call. "auto": likewise; 8 on a CPU."""
    precision: Literal["float32", "published"] = "float32"
    """Precision of latents, velocities and noise. "published": as in G2RPO's code, latents are
    bfloat16 where noise enters, and velocities and noise are, and so their products with a step's
    coefficients; the latents after the noise are float32."""
    tails: Tails = Tails()
    """Cheaper, approximate tails of rollouts; exact by default."""


Share = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """AdamW with betas 0.9 and 0.999 and epsilon 1e-8, the learning rate schedule and the moving
    average of the weights."""

    learning_rate: PositiveFloat
    weight_decay: NonNegativeFloat = 1e-4
    max_grad_norm: PositiveFloat = 1.0
    warmup_iterations: Annotated[int, Field(ge=0)] = 0
    decay: Literal["constant", "cosine"] = "constant"
    """Times the warm-up; "cosine" falls from 1 towards 0 over all iterations."""
    ema_decay: Share = 0.0
    """Evaluation and the saved weights use an exponential moving average; 0 turns it off."""
    ema_every: Count | None = None
    """Optimizer steps between updates of the average; None: one after each iteration."""
    ema_warmup: bool = False
    """The average begins at the untrained weights, and its decay rises as (1 + t) / (10 + t) with
    the optimizer steps t, up to `ema_decay`. Flow-GRPO's is ema_decay=0.9 ema_every=8
    ema_warmup=true."""


class TrainerConfig(Section):
    """Length of training, batch sizes, ranks and checkpoints."""

    iterations: Count
    prompts_per_iteration: Count = 1
    """Prompts of an iteration, over all ranks."""
    micro_batch_size: Count = 64
    """Latents of one training pass; gradients accumulate over passes."""
    checkpoint_every: Count = 50
    checkpoint_minutes: PositiveFloat | None = None
    """A checkpoint also after the first iteration that ends so many minutes after the last one."""
    keep_checkpoints: Count = 2
    max_hours: PositiveFloat | None = None
    """Hours from the start of the process after which it stops: after an iteration, in time for an
    evaluation and a checkpoint, with exit code 75. A resumed run has as many again."""
    sharding: Literal["none", "training", "full"] = "none"
    """For full fine-tuning on several ranks: "full" shards weights, gradients and moments, and each
    call gathers layer by layer; "training" also samples with gathered weights in `policy.dtype`:
    faster, but needs their memory."""
    shard_group: Count | Literal["all", "node"] = "all"
    """Ranks that a weight is divided over: all, those of a node, or a number. If these are fewer
    than all, every such group holds all shards, and groups send each other only gradients, once an
    update: hybrid sharding, for slow networks."""
    seed: Annotated[int, Field(ge=0)] = 42


class EvaluationConfig(Section):
    """Held-out prompts with fixed noise; `rewards` only score them and are not trained on."""

    prompts: str
    num_prompts: Count = 64
    every: Count = 20
    every_minutes: PositiveFloat | None = None
    """An evaluation also once training since the last one has taken so many minutes (`seconds` of
    the log); the first after the base model's already after a twelfth of them. Weights do not
    depend on when pictures are judged."""
    num_steps: Steps | None = None
    """None: `sampling.num_steps`."""
    height: Count | None = None
    """Of judged pictures; None: `policy.height`."""
    width: Count | None = None
    """None: `policy.width`."""
    rewards: RewardTable = {}


Action = Annotated[Literal["off", "warn", "stop"], BeforeValidator(_off)]
"""The action of an alarm: nothing; a warning; or save and end the run."""


Alarm = Literal[
    "drift",
    "masked",
    "silent",
    "saturated",
    "hacking",
    "decline",
    "pictures",
    "diversity",
]
"""The name of an alarm; `train.monitor.alarms.ALARMS` says when each is raised."""


def _as_list(value: Any) -> Any:
    """Allows `trackers=wandb` for `trackers=[wandb]`."""
    return [value] if isinstance(value, str) else value


Trackers = Annotated[list[str], BeforeValidator(_as_list)]


class Config(Section):
    """One run."""

    recipe: str = ""
    policy: PolicyConfig
    algorithm: AnyAlgorithm
    rewards: RewardTable
    prompts: PromptsConfig
    sampling: SamplingConfig
    optim: OptimConfig
    trainer: TrainerConfig
    evaluation: EvaluationConfig
    alarms: dict[Literal[Alarm, "action"], Action] = {"action": "warn"}
    """The action of each alarm; "action" is that of all that are not named."""
    trackers: Trackers = ["tensorboard"]
    """Trackers that show the log during a run; metrics.jsonl is always written."""

    @property
    def precision(self) -> Precision:
        """The dtypes of rollout and training pass."""
        network = getattr(torch, self.policy.dtype)
        if self.sampling.precision == "float32":
            return Precision(network)
        return Precision(network, anchor=torch.bfloat16, step=torch.bfloat16)

    @property
    def trained(self) -> list[str]:
        """The rewards that are trained on: one of weight 0 only scores, in training too."""
        return [name for name, entry in self.rewards.items() if entry.weight]

    @property
    def all_rewards(self) -> RewardTable:
        """Those in training, and the judges."""
        return {**self.rewards, **self.evaluation.rewards}

    @property
    def judged_steps(self) -> int:
        """The steps of judged pictures."""
        return self.evaluation.num_steps or self.sampling.num_steps

    @property
    def judged(self) -> PolicyConfig:
        """The policy with the size of judged pictures."""
        size = {
            name: getattr(self.evaluation, name) or getattr(self.policy, name)
            for name in ("height", "width")
        }
        return self.policy.model_copy(update=size)

    @property
    def judged_size(self) -> tuple[int, int] | None:
        """Height and width of judged pictures; None where they are those of training."""
        size = self.judged.height, self.judged.width
        return size if size != (self.policy.height, self.policy.width) else None

    def changed(self, group: str, **values: Any) -> Config:
        """With other values in one of its groups, which are not checked again."""
        return self.model_copy(update={group: getattr(self, group).model_copy(update=values)})

    def action_of(self, alarm: str) -> Action:
        """The action of an alarm."""
        actions = {str(name): action for name, action in self.alarms.items()}
        return actions.get(alarm) or actions.get("action", "warn")


def grid_of(shift: Shift, policy: Policy, num_steps: int) -> Tensor:
    """The sigmas [num_steps + 1] that a config's shift means for a policy; "model" means its
    `grid`, where it has one."""
    if shift == "model" and (own := getattr(policy, "grid", None)) is not None:
        return Tensor(own(num_steps))
    if shift == "scheduler":
        return scheduler_grid(num_steps, policy.shift)
    return sigma_grid(num_steps, policy.shift if shift == "model" else float(shift))


MAY_CHANGE = (
    "trainer.iterations",
    "trainer.checkpoint_every",
    "trainer.checkpoint_minutes",
    "trainer.keep_checkpoints",
    "trainer.max_hours",
    "trainer.micro_batch_size",
    "trainer.sharding",
    "trainer.shard_group",
    "sampling.batch_size",
    "sampling.decode_batch_size",
    "policy.device",
    # of these the contents are compared (`train.contents`)
    "policy.path",
    "policy.adapter",
    "prompts.train",
    "evaluation.prompts",
    "evaluation.every_minutes",
    "prompts.cache",
    "trackers",
    "recipe",
    "alarms",  # this key itself differs when one table is empty
    "alarms.action",
    *(f"alarms.{name}" for name in get_args(Alarm)),
)
"""Keys that a resumed run may change, because nothing already computed depends on them. Results to
come change by rounding alone, but for two keys: `trainer.iterations` sets the length of
`optim.decay=cosine`, and an alarm may end the run."""
