"""Held-out evaluation of a policy: pictures of fixed prompts from fixed noise, scored by every reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from g2rpo.core.errors import UserError
from g2rpo.core.seeding import generator_for
from g2rpo.core.statistics import half_width
from g2rpo.core.types import Policy, Reward, Scorer, as_rewards
from g2rpo.evaluation.controls import PLAIN, Control
from g2rpo.monitor.clips import reduced
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.scoring import decode, score_in_batches
from g2rpo.runtime.distributed import World


@dataclass(frozen=True)
class Evaluation:
    """Pictures [N, 3, H, W] of `prompts`, or clips [N, T, 3, H, W], 8 bit, scores [N] by reward, and verdicts [N] if a reward
    defines right pictures.

    After an evaluation on several ranks, ranks other than 0 have only their own pictures.
    """

    prompts: tuple[str, ...]
    images: Tensor
    scores: dict[str, Tensor]
    right: Tensor | None = None

    def means(self) -> dict[str, float]:
        """Mean score by reward, missing scores left out; NaN where none is valid."""
        return {name: float(values[~values.isnan()].mean()) for name, values in self.scores.items()}


def sample_images(
    policy: Policy,
    prompts: Sequence[str],
    sigmas: Tensor,
    *,
    seed: int,
    batch_size: int,
    decode_batch_size: int,
    first: int = 0,
    on_rows: Callable[[int], None] = lambda rows: None,
) -> Tensor:
    """One picture per prompt by the plain ODE. Picture i starts from noise (seed, i), whatever the batch size or rank.

    `first` is the index of the first prompt if `prompts` are part of a longer list. `on_rows(rows)` is called after every call
    of the network; an exception from it ends the sampling.
    """
    images = []
    for start in range(0, len(prompts), batch_size):
        latents = _sample(policy, prompts[start : start + batch_size], sigmas, seed, first + start, on_rows)
        with torch.no_grad():
            images.append(decode(policy, latents, decode_batch_size))
    return torch.cat(images)


@torch.no_grad()
def _sample(
    policy: Policy,
    prompts: Sequence[str],
    sigmas: Tensor,
    seed: int,
    first: int,
    on_rows: Callable[[int], None],
    control: Control = PLAIN,
) -> Tensor:
    """Final latents of one batch of prompts, the first of which has the index `first`."""
    engine = Engine(policy=policy, cond=policy.encode(prompts), sigmas=sigmas, batch_size=len(prompts), on_rows=on_rows)
    noise = policy.noise([generator_for(seed, "picture", first + i) for i in range(len(prompts))])
    with control.guiding(policy):
        return control.sample(engine, noise, seed, first)


def evaluate(
    policy: Policy,
    prompts: Sequence[str],
    rewards: Mapping[str, Scorer],
    sigmas: Tensor,
    *,
    seed: int,
    batch_size: int,
    decode_batch_size: int,
    first: int = 0,
    on_rows: Callable[[int], None] = lambda rows: None,
    kept: Callable[[Tensor], Tensor] = reduced,
    control: Control = PLAIN,
) -> Evaluation:
    """Samples and scores `prompts`, `batch_size` at a time; num_steps network evaluations per prompt. `sigmas` have the steps
    that `control` asks for.

    `kept` selects what of pictures or clips, in 8 bit, is in the result: by default whole pictures, and clips reduced.

    A reward sees at most `decode_batch_size` pictures at once, as in training. `on_rows` as for `sample_images`.
    """
    pictures, scores = [], []
    for start in range(0, len(prompts), batch_size):
        part = prompts[start : start + batch_size]
        latents = _sample(policy, part, sigmas, seed, first + start, on_rows, control)
        with torch.no_grad():
            images = decode(policy, latents, decode_batch_size)
        scores.append(score_in_batches(rewards, images, part, decode_batch_size, latents))
        pictures.append(kept(images))
    by_reward = dict(zip(rewards, torch.cat(scores, 1), strict=True))
    return Evaluation(tuple(prompts), torch.cat(pictures), by_reward, verdicts(as_rewards(rewards), by_reward))


def verdicts(rewards: Mapping[str, Reward], scores: Mapping[str, Tensor]) -> Tensor | None:
    """Whether each picture is right, [N]: 1 if the score of every reward with an attribute `right` is at least that value, else
    0; NaN where one of them has no score. None if no reward has."""
    least = least_scores(rewards)
    return least_reached(least, scores) if least else None


def least_reached(least: Mapping[str, float], scores: Mapping[str, Tensor]) -> Tensor:
    """The same by the least scores of right pictures, at least one; scores may have any shape."""
    said = [(scores[name] >= value).float().where(~scores[name].isnan(), torch.nan) for name, value in least.items()]
    return torch.stack(said).amin(0)  # amin propagates NaN


def least_scores(rewards: Mapping[str, Reward]) -> dict[str, float]:
    """The least score of a right picture, for each reward that defines it; UserError if that is no number."""
    said = {name: reward.right for name, reward in rewards.items() if reward.right is not None}
    for name, value in said.items():
        _in_words(name, rewards[name])
        if not isinstance(value, int | float):
            raise UserError(f"reward '{name}': `right` is the least score of a right picture, a number; it is {value!r:.80}")
    return said


def right_in_words(rewards: Mapping[str, Reward]) -> str | None:
    """A description of right pictures, such as "Spells {} texts in the asked colour", with {} for a share of so many. None
    unless every reward that defines right pictures says it by its attribute `right_in_words`, and exactly one of these texts
    has {}."""
    said = dict.fromkeys(_in_words(name, rewards[name]) for name in least_scores(rewards))
    main = [words for words in said if words and "{}" in words]
    if None in said or len(main) != 1:
        return None
    return " ".join([main[0], " and ".join(words for words in said if words and words not in main)]).strip()


def _in_words(name: str, reward: Reward) -> str | None:
    words = reward.right_in_words
    if words is not None and not (isinstance(words, str) and words.count("{}") <= 1):
        raise UserError(f"reward '{name}': `right_in_words` is a text with {{}} once or never; it is {words!r:.80}")
    return words


def evaluation_of_all(world: World, own: Evaluation, prompts: Sequence[str]) -> Evaluation:
    """The evaluation of `prompts` gathered from all ranks."""
    scores = {name: world.gather(values) for name, values in own.scores.items()}
    right = None if own.right is None else world.gather(own.right)
    return Evaluation(tuple(prompts), world.gather_to_main(own.images), scores, right)


def save_evaluation(path: Path, evaluation: Evaluation) -> None:
    """Writes pictures, scores and verdicts to one safetensors file."""
    scores = {f"score/{name}": values for name, values in evaluation.scores.items()}
    right = {} if evaluation.right is None else {"right": evaluation.right}
    save_file({"images": evaluation.images.contiguous(), **scores, **right}, path)


def save_scores(path: Path, evaluation: Evaluation) -> None:
    """Writes the scores by reward to one safetensors file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(evaluation.scores, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a run's own safetensors file; UserError if it is missing or damaged."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); put it back, or start again in another --run-dir") from None


def load_evaluation(path: Path, prompts: Sequence[str]) -> Evaluation:
    """Reads a file of `save_evaluation` for these prompts; UserError if it is another."""
    stored = load_tensors(path)
    if "images" not in stored or any(len(values) != len(prompts) for values in stored.values()):
        raise UserError(f"{path}: does not hold {len(prompts)} pictures and their scores")
    scores = {name.removeprefix("score/"): values for name, values in stored.items() if name.startswith("score/")}
    return Evaluation(tuple(prompts), stored["images"], scores, stored.get("right"))


@dataclass(frozen=True)
class Comparison:
    """One reward, base against tuned on the same prompts and noise."""

    base: float
    tuned: float
    error: float
    """Standard error of the mean paired difference."""
    count: int
    """Prompts that both have a score for."""

    @property
    def margin(self) -> float:
        """Half of the change's 95 % interval; NaN where there are too few prompts."""
        return half_width(self.error, self.count)

    @property
    def within(self) -> str:
        """ " ± MARGIN"; "" where there is none."""
        return f" ± {self.margin:.3f}" if math.isfinite(self.margin) else ""


def compare(base: Evaluation, tuned: Evaluation) -> dict[str, Comparison]:
    """Base against tuned by reward; only prompts that both have a score for count."""
    return {name: paired(before, tuned.scores[name]) for name, before in base.scores.items()}


def compare_right(base: Evaluation, tuned: Evaluation) -> Comparison | None:
    """The share of pictures that are right, base against tuned; None if no reward defines it."""
    return None if base.right is None or tuned.right is None else paired(base.right, tuned.right)


def paired(before: Tensor, after: Tensor) -> Comparison:
    """Values [N] against others of the same prompts; only prompts that have both count."""
    both = ~(before.isnan() | after.isnan())
    difference = (after - before)[both]
    error = float(difference.std() / math.sqrt(len(difference))) if len(difference) > 1 else math.nan
    return Comparison(float(before[both].mean()), float(after[both].mean()), error, len(difference))
