"""From finished latents to rewards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from g2rpo.errors import RewardFailed, UserError, counted, out_of_device_memory, where
from g2rpo.rollout.frames import OnFrames
from g2rpo.runtime.memory import bounded_by
from g2rpo.types import Policy, Reward, Rollout


@dataclass
class Stopwatch:
    """Seconds by phase on `clock`, read off between laps."""

    seconds: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Discards the time since the last lap."""
        self._last = self.clock()

    def lap(self, phase: str) -> None:
        """Adds the time since the last lap to `phase`."""
        now = self.clock()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


@torch.no_grad()
def decode(policy: Policy, latents: Tensor, batch_size: int) -> Tensor:
    """Images [N, 3, H, W], or clips [N, T, 3, H, W], on the CPU, `batch_size` at a time."""
    with bounded_by("decode"):
        return torch.cat([policy.decode(part).cpu() for part in latents.split(batch_size)])


def scores_latents(reward: Reward) -> bool:
    """Whether a reward takes final latents instead of pictures."""
    return bool(getattr(reward, "latent", False))


def score(
    rewards: Mapping[str, Reward], images: Tensor | None, prompts: Sequence[str], latents: Tensor | None = None
) -> Tensor:
    """Scores [R, N] of N images and their latents, rewards in their order; infinite scores become NaN.

    `images` may be None if all rewards take latents, `latents` if none does.
    Raises `RewardFailed` with the reward's name if it raises an exception or returns another shape. Out-of-memory errors are
    passed on.
    """
    rows, count = [], len(prompts)
    for name, reward in rewards.items():
        if (given := latents if scores_latents(reward) else images) is None:
            raise UserError(f"reward '{name}' scores {'latents' if latents is None else 'pictures'}, and there are none here")
        with naming_reward(name, f"failed on {counted(count, 'picture')}"):
            answer = _scored(reward, given, prompts)
            if answer is None:
                raise ValueError(f"should return {count} scores, one per image, but returned None")
            values = torch.as_tensor(answer).detach().float().cpu()
        if values.shape != (count,):
            raise RewardFailed(
                f"reward '{name}' should return {count} scores, one per image, but returned {list(values.shape)}"
            )
        rows.append(values.where(values.isfinite(), torch.nan))
    return torch.stack(rows)


def weighted_scores(
    policy: Policy, rewards: Mapping[str, Reward], weights: Tensor, prompts: Sequence[str], x: Tensor, rows: Sequence[int]
) -> Tensor:
    """The sum of the weighted scores [B] of latents x for `rows` of the prompts, on their device, with gradient."""
    images = policy.decode(x) if not all(map(scores_latents, rewards.values())) else x
    total, asked = torch.zeros(len(x), device=x.device), [prompts[row] for row in rows]
    for (name, reward), weight in zip(rewards.items(), weights.tolist(), strict=True):
        with naming_reward(name, f"failed on {counted(len(x), 'picture')}"):
            total = total + weight * reward(x if scores_latents(reward) else images, asked).to(total)
    return total


@contextmanager
def naming_reward(name: str, what: str) -> Iterator[None]:
    """Raises `RewardFailed` with the name of the reward whose code raised something else."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if out_of_device_memory(error):
            raise
        raise RewardFailed(f"reward '{name}' {what}: {type(error).__name__}: {error}{where(error)}") from error


def _scored(reward: Reward, images: Tensor, prompts: Sequence[str]) -> Tensor:
    """The reward's scores; of clips [B, T, 3, H, W] by their frames, unless the reward has `video = True` and takes clips."""
    if images.ndim == 5 and not (getattr(reward, "video", False) or scores_latents(reward)):
        reward = OnFrames(reward)
    own = images if isinstance(reward, OnFrames) else images.clone()  # a reward may write into its argument
    return reward(own, list(prompts))


def score_in_batches(
    rewards: Mapping[str, Reward],
    images: Tensor | None,
    prompts: Sequence[str],
    batch_size: int,
    latents: Tensor | None = None,
) -> Tensor:
    """`score` of at most `batch_size` pictures at a time, which is the size to lower where memory runs out."""

    def part(values: Tensor | None, start: int) -> Tensor | None:
        return None if values is None else values[start : start + batch_size]

    with bounded_by("decode"):
        starts = range(0, len(prompts), batch_size)
        parts = [score(rewards, part(images, i), prompts[i : i + batch_size], part(latents, i)) for i in starts]
    return torch.cat(parts, 1)


def score_rollouts(
    policy: Policy,
    rollouts: Sequence[Rollout],
    rewards: Mapping[str, Reward],
    prompts: Sequence[str],
    batch_size: int,
    watch: Stopwatch,
) -> Tensor:
    """Rewards [N, R, M, G] of N rollouts of one shape; `prompts` are the rows of the conditioning that they refer to.

    Nothing is decoded if all rewards take latents.
    """
    seen = not all(map(scores_latents, rewards.values()))
    latents = torch.cat([rollout.finals.flatten(0, 1) for rollout in rollouts])
    asked = [prompts[rollout.prompt] for rollout in rollouts for _ in range(rollout.finals.shape[:2].numel())]
    parts = []
    for start in range(0, len(latents), batch_size):  # pictures of one batch at a time: an iteration's are gigabytes
        own = latents[start : start + batch_size]
        images = decode(policy, own, batch_size) if seen else None
        watch.lap("decode")
        parts.append(score_in_batches(rewards, images, asked[start : start + batch_size], batch_size, own))
        watch.lap("rewards")
    return torch.cat(parts, 1).unflatten(1, (len(rollouts), *rollouts[0].finals.shape[:2])).transpose(0, 1)
