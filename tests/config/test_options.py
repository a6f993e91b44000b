"""THE list of options: everything that a config accepts. A new one is a decision: it is added here,
and explained in docs/."""

import dataclasses
import inspect
from typing import get_args, get_origin, get_type_hints

from pydantic import BaseModel

from g2rpo.config.algorithms import ALGORITHMS
from g2rpo.config.schema import Config
from g2rpo.core import plugins
from g2rpo.rewards.catalogue import REWARDS, RewardConfig

OPTIONS = """
alarms: what a run does about hacking is its owner's choice
algorithm.advantage_clip: published values differ
algorithm.advantage_scale: EPG's, in units of the rewards
algorithm.branch_schedule: "turns" costs a fraction and is as good in one world of two (studies/registered.md)
algorithm.branch_steps: which steps get noise is G2RPO's own choice; each recipe has its steps
algorithm.ceiling: in units of the rewards, so it depends on them
algorithm.churn: FDFO's noise; its preset for another model differs
algorithm.clip_range: published values differ by orders of magnitude
algorithm.compression: 0.4 in MixGRPO-Flash, 0.2 in its frozen form
algorithm.divergence_limit: Flow-DPPO's trust region
algorithm.eta: the amount of noise; it differs by model and number of steps
algorithm.granularities: G2RPO's own choice, varied in its paper
algorithm.group_size: memory, cost and variance
algorithm.kl_weight: published values differ, 0 among them
algorithm.likelihood: EPG's paper compares four
algorithm.merged_steps: E-GRPO's; which steps to merge depends on the grid
algorithm.mixing: DiffusionNFT's and DiffusionOPSD's beta: 1 for one reward, 0.1 for several
algorithm.name: the algorithm
algorithm.noise_weight: TempFlow-GRPO's; it belongs to eta
algorithm.normalized: EPG's published settings differ
algorithm.objective: EPG's paper has two
algorithm.old_schedule: published schedules differ by task
algorithm.power: AWM's form of the error; 1 is the plain one
algorithm.query_sigma: DiffusionOPSD's state; it differs by model
algorithm.radius: DiffusionOPSD's trust region
algorithm.reward_mix: how several rewards become one advantage; papers differ
algorithm.schedule: MixGRPO's window moves or stays
algorithm.segments: PAVE-GRPO's numbers of parts
algorithm.share: DiffusionNFT's and EPG's times, their cost; a study varies them
algorithm.step_weights: Self-OPD's choice of steps; a comparison takes G2RPO's
algorithm.steps_drawn: the same: how many, its cost
algorithm.strength: DGPO's beta: 100 for OCR, 10 for PickScore
algorithm.tail: three ends of a tail in published code
algorithm.target_steps: DiffusionOPSD's cost: gradients of the reward
algorithm.times: trained times of AWM and DGPO are their cost
algorithm.update_every: how often the weights move in a rollout
algorithm.window_iterations: MixGRPO's pace
algorithm.window_size: MixGRPO's window
evaluation.every: cost
evaluation.every_minutes: the same for an iteration whose time nobody knows yet
evaluation.height: trained small, judged at the size of use
evaluation.num_prompts: cost and the width of intervals
evaluation.num_steps: trained with few, judged with the steps of use
evaluation.prompts: the held-out prompts
evaluation.width: with height
optim.decay: cosine gained in two worlds (studies/registered.md)
optim.ema_decay: published values differ, 0 among them
optim.ema_every: 8 steps in Flow-GRPO, 1 in DiffusionNFT
optim.ema_warmup: in Flow-GRPO's code, not in FlowBP's
optim.learning_rate: the most important number of a run
optim.max_grad_norm: published values differ
optim.warmup_iterations: published values differ
optim.weight_decay: published values differ
policy.adapter: a user's own LoRA
policy.attention: kernels differ by card and installation
policy.autocast: published code has it, diffusers' pipelines do not
policy.compile: seconds or minutes of start-up against speed
policy.detach_negative: FlowBP's and DGPO's code have it
policy.device: the machine
policy.dtype: memory against rounding
policy.gradient_checkpointing: memory against time
policy.guidance_scale: the model's input
policy.height: size and cost
policy.kind: a model of one's own
policy.lora_above: words lose their letters without (studies/late_steps.md)
policy.lora_alpha: published values differ
policy.lora_init: two ways in published code
policy.lora_rank: published values differ; memory
policy.lora_targets: published lists differ by model
policy.max_sequence_length: a model's published value
policy.negative_prompt: a user's own
policy.num_frames: length of a video
policy.offload: memory
policy.path: the model
policy.pipeline: a recipe's values are for one kind of model
policy.published_pictures: to reproduce G2RPO's code to the bit
policy.quantize: memory
policy.truncate_timesteps: three ways in published code
policy.tuning: LoRA or all weights
policy.vae_tiling: memory of large pictures
policy.width: with height
prompts.cache: a folder that machines share
prompts.train: the prompts
recipe: the name of a run's recipe, kept with its config
rewards.NAME.frames.every: cost of videos
rewards.NAME.frames.reduce: mean or worst frame
rewards.NAME.kind: the reward
rewards.NAME.options.aspects: what a judge is asked about
rewards.NAME.options.batch_size: memory of the reward
rewards.NAME.options.clip: the weights that a head belongs to
rewards.NAME.options.contains: Flow-GRPO's rule of reading
rewards.NAME.options.detect: whole pictures that are one line need no detector
rewards.NAME.options.detector: GenEval's weights, or one's own detector
rewards.NAME.options.device: where the reward computes
rewards.NAME.options.dtype: memory of the reward
rewards.NAME.options.endpoint: retries, timeout and key of a server
rewards.NAME.options.exact: only a whole word counts in words
rewards.NAME.options.form: the question of a judge
rewards.NAME.options.image_size: tokens of a picture, the cost of a judge
rewards.NAME.options.instruction: the words of a question
rewards.NAME.options.max_tokens: of an answer; models that think need more
rewards.NAME.options.model: the judge
rewards.NAME.options.negative: raises or lowers
rewards.NAME.options.options: those of a function
rewards.NAME.options.partial: a share of what is right is easier to learn than all of it
rewards.NAME.options.path: the weights
rewards.NAME.options.processor: those of the tokenizer, where there is no hub
rewards.NAME.options.quality: JPEG's, as in published code
rewards.NAME.options.range: a template of one's own may ask for scores to 10 or 100
rewards.NAME.options.request: what a server takes besides
rewards.NAME.options.score: which of several scores of a model
rewards.NAME.options.share: of the patches that are compared: edits change few
rewards.NAME.options.size: pixels that DINO sees
rewards.NAME.options.squeeze: ocr: narrower lines are read faster; the recipe words sets it
rewards.NAME.options.target: a function of one's own
rewards.NAME.options.template: the words of a question
rewards.NAME.options.tokenizer: where there is no hub
rewards.NAME.options.url: the server
rewards.NAME.options.width: the width of a line that is read
rewards.NAME.weight: the balance of several rewards
sampling.batch_size: memory
sampling.decode_batch_size: memory of the VAE
sampling.guidance_scale: trained without guidance at half the cost
sampling.num_steps: cost
sampling.precision: to reproduce G2RPO's code to the bit
sampling.shift: published values differ
sampling.tails.forecast: cheaper tails (studies/registered.md)
sampling.tails.solver: DiffusionNFT samples by dpmpp2m
trackers: where a run is watched
trainer.checkpoint_every: loss of a crash against disk
trainer.checkpoint_minutes: the same for an iteration whose time nobody knows yet
trainer.iterations: length
trainer.keep_checkpoints: disk
trainer.max_hours: the time that a queue gives a run
trainer.micro_batch_size: memory
trainer.prompts_per_iteration: cost and variance
trainer.seed: repetition
trainer.shard_group: networks of clusters differ
trainer.sharding: memory against communication
"""
"""Each with the reason why it is no constant."""


def leaves(kind, prefix):
    """The dotted keys below a group; of rewards, which evaluations have too, those in one place."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        fields = {
            name: field.annotation
            for name, field in kind.model_fields.items()
            if name not in ("algorithm", "options")
        }
    elif dataclasses.is_dataclass(kind):
        fields = {
            field.name: get_type_hints(kind)[field.name] for field in dataclasses.fields(kind)
        }
    else:
        # an optional one
        group = next((each for each in get_args(kind) if dataclasses.is_dataclass(each)), None)
        yield from leaves(group, prefix) if group else [prefix]
        return
    for name, inner in fields.items():
        if get_origin(inner) is dict and get_args(inner)[1] is RewardConfig:
            yield from leaves(RewardConfig, "rewards.NAME") if not prefix else []
        else:
            yield from leaves(inner, f"{prefix}.{name}" if prefix else name)


def options():
    algorithms = {field.name for kind in ALGORITHMS.values() for field in dataclasses.fields(kind)}
    kinds = [plugins.find_class("rewards", name, REWARDS) for name in REWARDS]
    rewards = {name for kind in kinds for name in inspect.signature(kind).parameters}
    return {
        *leaves(Config, ""),
        *(f"algorithm.{name}" for name in algorithms),
        *(f"rewards.NAME.options.{name}" for name in rewards),
    }


def test_options_are_those_of_the_list():
    listed = [line.partition(": ")[0] for line in OPTIONS.strip().splitlines()]
    assert sorted(options()) == sorted(listed)
