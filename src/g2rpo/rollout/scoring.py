"""From final latents to rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from g2rpo.core.contracts import finite_rows
from g2rpo.core.data import as_prompt
from g2rpo.core.errors import RewardFailed, UserError, counted, out_of_device_memory, where
from g2rpo.core.events import doing
from g2rpo.core.plans import Rollout
from g2rpo.core.rewards import Frames, Reward, Scorer, as_rewards
from g2rpo.core.types import Policy
from g2rpo.rollout.memory import BatchSizes, bounded_by

AT_ONCE = 16
"""The largest number of frames in one call of a reward."""


@torch.no_grad()
def decode(policy: Policy, latents: Tensor, batch_size: int) -> Tensor:
    """Images [N, 3, H, W], or clips [N, T, 3, H, W], on the CPU, `batch_size` at a time."""
    with bounded_by("decode"):
        return torch.cat([policy.decode(part).cpu() for part in latents.split(batch_size)])


def decode_rollout(policy: Policy, rollout: Rollout, sizes: BatchSizes) -> Tensor:
    """The pictures [M, G, 3, H, W], or clips, of a group, by tails and members."""
    finals = rollout.finals
    return decode(policy, finals.flatten(0, 1), sizes.decode).unflatten(0, finals.shape[:2])


def score(
    rewards: Mapping[str, Scorer],
    images: Tensor | None,
    prompts: Sequence[str],
    latents: Tensor | None = None,
    batch_size: int | None = None,
) -> Tensor:
    """Scores [R, N] of N images and their latents, rewards in their order; infinite scores become
    NaN, and so does every score of a picture or a latent that is not finite, which rewards see as
    black.

    `images` may be None if all rewards take latents, `latents` if none does. A reward sees at most
    `batch_size` pictures at once, and an out-of-memory error names this size; without one it sees
    all, and such errors are passed on. Raises `RewardFailed` with the reward's name if it raises an
    exception or returns another shape.
    """
    prompts = [as_prompt(prompt) for prompt in prompts]
    rows, every = [], len(prompts) or 1
    finite = finite_rows(images, latents)
    if not finite.all():
        images, latents = (
            seen if seen is None else seen.nan_to_num(0, 0, 0) for seen in (images, latents)
        )
    for name, reward in as_rewards(rewards).items():
        if (scored := latents if reward.latent else images) is None:
            raise UserError(
                f"reward '{name}' scores {'latents' if latents is None else 'pictures'}, and there are none here"
            )
        parts, size = [], batch_size or every
        for start in range(0, every, size):
            given, texts = scored[start : start + size], prompts[start : start + size]
            bounded = bounded_by("decode") if batch_size else nullcontext()
            many = counted(len(texts), "picture")
            now = doing(f"scoring {many} by {name}")
            with naming_reward(name, f"failed on {many}"), bounded, now:
                of_frames = given.ndim == 5 and not (reward.video or reward.latent)
                # a reward may write into its argument, so it gets a copy
                parts.append(
                    _by_frames(reward, given, texts)
                    if of_frames
                    else reward.scores(given.clone(), texts)
                )
        rows.append(torch.cat(parts))
    return torch.stack(rows).where(finite, torch.nan) if rows else torch.zeros(0, len(prompts))


def _by_frames(reward: Reward, clips: Tensor, prompts: Sequence[str]) -> Tensor:
    """Scores [B] of clips [B, T, 3, H, W] by a reward of pictures; NaN where no frame has a
    score."""
    frames = reward.frames or Frames()
    chosen = clips[:, :: frames.every]
    pictures = chosen.flatten(0, 1)
    asked = [prompt for prompt in prompts for _ in range(chosen.shape[1])]
    parts = [
        reward.scores(pictures[i : i + AT_ONCE].clone(), asked[i : i + AT_ONCE])
        for i in range(0, len(pictures), AT_ONCE)
    ]
    scores = torch.cat(parts).unflatten(0, chosen.shape[:2])
    if frames.reduce == "mean":
        return scores.nanmean(1)
    least = scores.where(~scores.isnan(), torch.inf).amin(1)
    return least.where(least.isfinite(), torch.nan)


def weighted_scores(
    policy: Policy,
    rewards: Mapping[str, Reward],
    weights: Tensor,
    prompts: Sequence[str],
    x: Tensor,
    rows: Sequence[int],
) -> Tensor:
    """The sum of the weighted scores [B] of latents x for `rows` of the prompts, on their device,
    with gradient."""
    images = x if all(reward.latent for reward in rewards.values()) else policy.decode(x)
    total, asked = torch.zeros(len(x), device=x.device), [as_prompt(prompts[row]) for row in rows]
    for (name, reward), weight in zip(rewards.items(), weights.tolist(), strict=True):
        if not weight:
            continue
        with naming_reward(name, f"failed on {counted(len(x), 'picture')}"):
            scores = reward.answer(x if reward.latent else images, asked).to(total)
            total = total + weight * scores
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
        raise RewardFailed(
            f"reward '{name}' {what}: {type(error).__name__}: {error}{where(error)}"
        ) from error


def score_rollouts(
    policy: Policy,
    rollouts: Sequence[Rollout],
    rewards: Mapping[str, Scorer],
    prompts: Sequence[str],
    sizes: BatchSizes,
    lap: Callable[[str], None] = lambda phase: None,
) -> Tensor:
    """Rewards [N, R, M, G] of N rollouts of one shape; `prompts` are the rows of the conditioning
    that they refer to. Of plans with a baseline [N, R, M, G + 1], the ODE's picture at the end
    (`above_baseline`).

    At most `sizes.decode` pictures are decoded at a time: an iteration's are gigabytes. Nothing is if
    all rewards take latents. `lap` is called at the end of each phase, "decode" or "rewards".
    """
    scored = as_rewards(rewards)
    seen = not all(reward.latent for reward in scored.values())
    latents = torch.cat([rollout.scored.flatten(0, 1) for rollout in rollouts])
    texts = [prompts[rollout.prompt] for rollout in rollouts for _ in range(rollout.pictures)]
    tails, members = rollouts[0].scored.shape[:2]
    parts = []
    size = sizes.decode
    for start in range(0, len(latents), size):
        batch = latents[start : start + size]
        images = decode(policy, batch, size) if seen else None
        lap("decode")
        parts.append(score(scored, images, texts[start : start + size], batch, size))
        lap("rewards")
    return torch.cat(parts, 1).unflatten(1, (len(rollouts), tails, members)).transpose(0, 1)


def of_members(scores: Tensor, members: int) -> Tensor:
    """The rewards [N, R, M, G] of a group's members, of scores by `score_rollouts`."""
    return scores[..., :members]


def above_baseline(scores: Tensor, members: int) -> Tensor:
    """The rewards [N, R, M, G] that advantages are taken of: those of members, less that of the
    ODE's picture where there is one."""
    rewards, baseline = scores[..., :members], scores[..., members:]
    return rewards - baseline if baseline.shape[-1] else rewards
