"""THE list of options: everything that a config accepts. A new one is a decision: it is added here, and explained in docs/."""

import dataclasses
import inspect
from typing import get_args, get_origin, get_type_hints

from pydantic import BaseModel

from g2rpo.assembly.rewards import REWARDS
from g2rpo.config.algorithms import ALGORITHMS
from g2rpo.config.schema import Config, RewardConfig
from g2rpo.core import plugins

OPTIONS = """
alarms
algorithm.advantage_clip algorithm.branch_schedule algorithm.branch_steps algorithm.candidates
algorithm.ceiling algorithm.churn algorithm.clip_range algorithm.compression algorithm.divergence_limit
algorithm.eta algorithm.forget algorithm.granularities
algorithm.group_size algorithm.kl_weight
algorithm.merged_steps algorithm.mixing algorithm.name algorithm.noise_weight
algorithm.old_schedule
algorithm.power algorithm.reward_mix algorithm.schedule
algorithm.segments algorithm.share algorithm.strength algorithm.tail
algorithm.times algorithm.trained_fraction algorithm.update_every algorithm.window_iterations
algorithm.window_size
evaluation.controls evaluation.every evaluation.every_minutes evaluation.height
evaluation.num_prompts evaluation.num_steps evaluation.prompts evaluation.width
optim.decay optim.ema_decay optim.ema_every optim.ema_warmup optim.learning_rate
optim.max_grad_norm optim.warmup_iterations optim.weight_decay
policy.adapter policy.assistant policy.assistant_in_evaluation policy.attention policy.autocast policy.compile
policy.detach_negative policy.device policy.dtype policy.expert policy.gradient_checkpointing policy.guidance_scale
policy.guidance_scale_2 policy.height
policy.kind policy.lora_above policy.lora_alpha policy.lora_init policy.lora_rank policy.lora_targets policy.max_sequence_length
policy.negative_prompt policy.num_frames policy.path
policy.pipeline policy.published_pictures policy.quantize policy.truncate_timesteps policy.tuning policy.vae_tiling
policy.width
prompts.cache prompts.train
recipe
rewards.NAME.frames.every rewards.NAME.frames.reduce
rewards.NAME.kind
rewards.NAME.options.aspects
rewards.NAME.options.batch_size rewards.NAME.options.clip
rewards.NAME.options.contains
rewards.NAME.options.detect rewards.NAME.options.detector rewards.NAME.options.device rewards.NAME.options.dtype
rewards.NAME.options.every rewards.NAME.options.exact rewards.NAME.options.folder rewards.NAME.options.form
rewards.NAME.options.fps rewards.NAME.options.image_size
rewards.NAME.options.instruction rewards.NAME.options.iterations
rewards.NAME.options.max_tokens rewards.NAME.options.model rewards.NAME.options.negative
rewards.NAME.options.options rewards.NAME.options.pairs rewards.NAME.options.partial rewards.NAME.options.path
rewards.NAME.options.processor rewards.NAME.options.quality rewards.NAME.options.request rewards.NAME.options.endpoint
rewards.NAME.options.run rewards.NAME.options.score rewards.NAME.options.share rewards.NAME.options.size
rewards.NAME.options.target rewards.NAME.options.template
rewards.NAME.options.tokenizer rewards.NAME.options.url
rewards.NAME.options.width
rewards.NAME.weight
sampling.batch_size sampling.decode_batch_size sampling.guidance_scale sampling.num_steps sampling.precision
sampling.shift
sampling.tails.forecast sampling.tails.solver
trackers
trainer.checkpoint_every trainer.checkpoint_minutes trainer.iterations trainer.keep_checkpoints trainer.micro_batch_size
trainer.prompts_per_iteration trainer.seed trainer.shard_group trainer.sharding
"""


def leaves(kind, prefix):
    """The dotted keys below a group; of rewards, which evaluations have too, those in one place."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        fields = {name: field.annotation for name, field in kind.model_fields.items() if name not in ("algorithm", "options")}
    elif dataclasses.is_dataclass(kind):
        fields = {field.name: get_type_hints(kind)[field.name] for field in dataclasses.fields(kind)}
    else:
        group = next((each for each in get_args(kind) if dataclasses.is_dataclass(each)), None)  # an optional one
        yield from leaves(group, prefix) if group else [prefix]
        return
    for name, inner in fields.items():
        if get_origin(inner) is dict and get_args(inner)[1] is RewardConfig:
            yield from leaves(RewardConfig, "rewards.NAME") if not prefix else []
        else:
            yield from leaves(inner, f"{prefix}.{name}" if prefix else name)


def options():
    algorithms = {field.name for kind in ALGORITHMS.values() for field in dataclasses.fields(kind)}
    kinds = [plugins.find("rewards", name, REWARDS) for name in REWARDS]
    rewards = {name for kind in kinds for name in inspect.signature(kind).parameters}
    return {
        *leaves(Config, ""),
        *(f"algorithm.{name}" for name in algorithms),
        *(f"rewards.NAME.options.{name}" for name in rewards),
    }


def test_options_are_those_of_the_list():
    assert sorted(options()) == sorted(OPTIONS.split())
