"""From finished latents to rewards."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from g2rpo.errors import RewardFailed, UserError, where
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


def decode(policy: Policy, latents: Tensor, batch_size: int) -> Tensor:
    """Images [N, 3, H, W], or clips [N, T, 3, H, W], on the CPU, `batch_size` at a time."""
    with bounded_by("decode"):
        return torch.cat([policy.decode(part).cpu() for part in latents.split(batch_size)])


def score(rewards: Mapping[str, Reward], images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Scores [R, N] of images, rewards in their order; infinite scores become NaN.

    Raises `RewardFailed` with the reward's name if it raises an exception or returns another shape. Out-of-memory errors are
    passed on.
    """
    rows = []
    for name, reward in rewards.items():
        try:
            values = torch.as_tensor(_scored(reward, images, prompts)).detach().float().cpu()
        except (torch.OutOfMemoryError, UserError):
            raise
        except (Exception, SystemExit) as error:
            what = f"{type(error).__name__}: {error}{where(error)}"
            raise RewardFailed(f"reward '{name}' failed on {len(images)} pictures: {what}") from error
        if values.shape != (len(images),):
            shape = list(values.shape)
            raise RewardFailed(f"reward '{name}' should return {len(images)} scores, one per image, but returned {shape}")
        rows.append(values.where(values.isfinite(), torch.nan))
    return torch.stack(rows)


def _scored(reward: Reward, images: Tensor, prompts: Sequence[str]) -> Tensor:
    """The reward's scores; of clips [B, T, 3, H, W] by their frames, unless the reward has `video = True` and takes clips."""
    if images.ndim == 5 and not getattr(reward, "video", False):
        reward = OnFrames(reward)
    own = images if isinstance(reward, OnFrames) else images.clone()  # a reward may write into its argument
    return reward(own, list(prompts))


def score_in_batches(rewards: Mapping[str, Reward], images: Tensor, prompts: Sequence[str], batch_size: int) -> Tensor:
    """`score` of at most `batch_size` pictures at a time, which is the size to lower where memory runs out."""
    with bounded_by("decode"):
        starts = range(0, len(images), batch_size)
        parts = [score(rewards, images[i : i + batch_size], prompts[i : i + batch_size]) for i in starts]
    return torch.cat(parts, 1)


def score_rollouts(
    policy: Policy,
    rollouts: Sequence[Rollout],
    rewards: Mapping[str, Reward],
    prompts: Sequence[str],
    batch_size: int,
    watch: Stopwatch,
) -> Tensor:
    """Rewards [N, R, M, G] of N rollouts of one shape; `prompts` are the rows of the conditioning that they refer to."""
    latents = torch.cat([rollout.finals.flatten(0, 1) for rollout in rollouts])
    asked = [prompts[rollout.prompt] for rollout in rollouts for _ in range(rollout.finals.shape[:2].numel())]
    parts = []
    for start in range(0, len(latents), batch_size):  # pictures of one batch at a time: an iteration's are gigabytes
        images = decode(policy, latents[start : start + batch_size], batch_size)
        watch.lap("decode")
        parts.append(score_in_batches(rewards, images, asked[start : start + batch_size], batch_size))
        watch.lap("rewards")
    return torch.cat(parts, 1).unflatten(1, (len(rollouts), *rollouts[0].finals.shape[:2])).transpose(0, 1)
