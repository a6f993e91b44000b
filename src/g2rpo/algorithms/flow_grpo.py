"""Flow-GRPO and what descends from it: Fast, Flow-CPS, GRPO-Guard, Flow-DPPO, TempFlow-GRPO,
DanceGRPO, MixGRPO.

for each prompt:
    sample group_size members; in a window of steps by an SDE, elsewhere by the ODE         kernel, plans
    score the images; A = the group-normalised reward, the same for all steps of a member   advantages
    ratio = p_theta(x_next | x) / p_old(x_next | x); minimise the clipped surrogate         policy_gradient, policy_loss
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from g2rpo.algorithms.policy_gradient import PolicyGradient, TakenSteps
from g2rpo.core.flow import cps_kernel, dance_sde, flow_sde, sde_kernel
from g2rpo.core.noise import draw_below, generator_for
from g2rpo.core.objectives import RewardMix, clipped_surrogate, mix_rewards
from g2rpo.core.plain import Count, GroupSize, UpdateEverySetting, hyper_parameters
from g2rpo.core.plans import Plan
from g2rpo.core.types import Kernel

BelowOne = Annotated[float, Field(gt=0, lt=1)]
"""The noise level of Flow-CPS: at 1 a step keeps nothing of its latent."""


def window(
    start: int,
    stop: int,
    num_steps: int,
    shared_noise: bool,
    trained: tuple[int, ...] | None = None,
) -> Plan:
    """A plan with stochastic steps start .. stop - 1 and the ODE before and after."""
    tails = (tuple(range(stop, num_steps + 1)),)
    return Plan(start, stop, tails, shared_noise=shared_noise, trained=trained)


@hyper_parameters
class GRPO(PolicyGradient):
    """The common part. The fields are hyper-parameters; class attributes are what defines an
    algorithm, and are set by its class.

    `eta` is the noise level of the stochastic step (`kernel`). `reward_mix`: see
    `objectives.mix_rewards`. `update_every` is "rollout" for one averaged update, "branch" for one
    after every step index, or a number of members: the group is split into parts of that size, with
    an update after each. With one update per rollout the clip is never active."""

    name: str = ""
    group_size: GroupSize = 24
    eta: PositiveFloat = 0.7
    clip_range: PositiveFloat = 1e-4
    advantage_clip: PositiveFloat = 5.0
    reward_mix: RewardMix = "rewards"
    kl_weight: NonNegativeFloat = 0.0
    update_every: UpdateEverySetting = "rollout"

    shared_noise: ClassVar[bool] = False
    """Whether the members of a group start from one initial noise."""
    batch_std: ClassVar[bool] = False
    """Whether advantages are divided by the std of all rewards, not the group's
    (`objectives.group_normalize`)."""
    population_std: ClassVar[bool] = False
    """Whether that is the population's std, plus 1e-4 (`objectives.mix_rewards`)."""
    noisy_last_step: ClassVar[bool] = False
    """Whether noise is added at the last step too, as the published samplers of Flow-GRPO do. It
    stays in the image, and its density is too narrow to train on. On SD3's deployed grid
    (sampling.shift=scheduler) it is negligible, on other grids it is visible in the pictures."""

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        """Every step but the last is stochastic and trained."""
        last = num_steps - 1
        if self.noisy_last_step:
            return [window(0, num_steps, num_steps, self.shared_noise, tuple(range(last)))]
        return [window(0, last, num_steps, self.shared_noise)]

    def kernel(self, sigmas: Tensor) -> Kernel:
        return sde_kernel(flow_sde(sigmas, self.eta))

    def advantages(self, rewards: Tensor, weights: Tensor) -> Tensor:
        mixed = mix_rewards(
            rewards, weights, self.reward_mix, self.batch_std, population_std=self.population_std
        )
        return mixed.clamp(-self.advantage_clip, self.advantage_clip)

    def policy_loss(self, steps: TakenSteps) -> Tensor:
        return clipped_surrogate(self.log_ratio(steps), steps.advantages, self.clip_range)


@hyper_parameters
class FlowGRPO(GRPO):
    """Flow-GRPO: Training Flow Matching Models via Online RL, arXiv 2505.05470; defaults for SD3.5
    Medium on GenEval and OCR (10 steps, 48 prompts an update; PickScore: `kl_weight` 0.01;
    FLUX.1-dev: 0).

    Every step is stochastic, all but the last are trained, each member has its own initial noise,
    and a KL term keeps the policy near the base model."""

    name: Literal["flow_grpo"] = "flow_grpo"
    title: ClassVar[str] = "Flow-GRPO"
    paper: ClassVar[str] = "2505.05470"
    kl_weight: NonNegativeFloat = 0.04
    update_every: UpdateEverySetting = 12

    batch_std: ClassVar[bool] = True
    population_std: ClassVar[bool] = True
    drop_zero_advantages: ClassVar[bool] = True
    noisy_last_step: ClassVar[bool] = True

    def kl_penalty(self, kl: Tensor, steps: TakenSteps) -> Tensor:
        """The published code's |mean - mean_base|^2 / (2 g^2). The paper's Eq. 14 is the KL itself,
        with std^2 = g^2 |dsigma|, for which early code took `kl_weight` 0.004 (PickScore 0.001):
        studies/five_algorithms.md."""
        return kl * steps.dsigma


@hyper_parameters
class FlowCPS(GRPO):
    """Flow-CPS: Coefficients-Preserving Sampling for Reinforcement Learning with Flow Matching,
    arXiv 2509.05952; defaults for SD3.5 Medium on GenEval and OCR (10 steps; PickScore: `kl_weight`
    0.01; FLUX.1-dev: 0 and `eta` 0.9).

    Flow-GRPO with another stochastic step (`flow.cps_kernel`), at every step but the last, where it
    is the ODE: it removes as much predicted noise as it adds, so the noise in the latents matches
    their sigma, and the images that rewards score have no residual noise. Its log-prob is a squared
    distance: log-ratios are 2 std^2 times those of a density, so `clip_range` has another scale,
    and so has `kl_weight`, which multiplies |mean - mean_base|^2."""

    name: Literal["flow_cps"] = "flow_cps"
    title: ClassVar[str] = "Flow-CPS"
    paper: ClassVar[str] = "2509.05952"
    eta: BelowOne = 0.7
    kl_weight: NonNegativeFloat = 0.04
    update_every: UpdateEverySetting = 12

    batch_std: ClassVar[bool] = True
    population_std: ClassVar[bool] = True
    drop_zero_advantages: ClassVar[bool] = True

    def kernel(self, sigmas: Tensor) -> Kernel:
        return cps_kernel(self.eta)


@hyper_parameters
class FlowGRPOFast(FlowCPS):
    """Flow-GRPO-Fast (the repository of arXiv 2505.05470); defaults for SD3.5 Medium and FLUX.1-dev
    without guidance (10 and 6 steps).

    Only a window of `window_size` steps, drawn in every iteration within the first half, is
    stochastic and trained. As in the published recipes, these are Flow-CPS's steps."""

    name: Literal["flow_grpo_fast"] = "flow_grpo_fast"  # type: ignore[assignment]
    title: ClassVar[str] = "Flow-GRPO-Fast"
    paper: ClassVar[str] = "2505.05470"
    eta: BelowOne = 0.8
    clip_range: PositiveFloat = 1e-5
    kl_weight: NonNegativeFloat = 0.0
    window_size: Count = 3

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        choices = num_steps // 2 - self.window_size + 1
        if choices < 1:
            raise ValueError(
                f"window_size={self.window_size} does not fit into the first half of num_steps={num_steps}"
            )
        start = draw_below(choices, seed, "window", iteration)
        return [window(start, start + self.window_size, num_steps, self.shared_noise)]


@hyper_parameters
class GRPOGuard(GRPO):
    """GRPO-Guard, arXiv 2510.22319: Flow-GRPO with a ratio that is normalised step by step;
    defaults for SD3.5 Medium (10 steps, 48 prompts an update). The clip range is that of the
    normalised ratio.

    For x' sampled by the old policy, log p_theta(x') - log p_old(x') is normal with mean -b and a
    variance that both depend on the step, b = |mean_theta - mean_old|^2 / (2 std^2). So ratios lie
    below 1 and the upper clip is rarely active. Guard adds b and multiplies by std; then it divides
    the loss by |dsigma|, to equalise the steps' gradients. `correction`: "member" adds each
    member's own b back, as in the paper (Eq. 8); "batch" the mean of b over the members of a
    training pass at the same step, as the published code does. Only with "batch" does an update
    depend on `trainer.micro_batch_size`."""

    name: Literal["grpo_guard"] = "grpo_guard"
    title: ClassVar[str] = "GRPO-Guard"
    paper: ClassVar[str] = "2510.22319"
    clip_range: PositiveFloat = 2e-6
    update_every: UpdateEverySetting = 12

    correction: ClassVar[Literal["member", "batch"]] = "member"
    population_std: ClassVar[bool] = True
    drop_zero_advantages: ClassVar[bool] = True
    noisy_last_step: ClassVar[bool] = True

    def log_ratio(self, steps: TakenSteps) -> Tensor:
        bias = (
            steps.old_kl
            if self.correction == "member"
            else mean_of_each_step(steps.old_kl, steps.step)
        )
        return steps.std * (super().log_ratio(steps) + bias)

    def policy_loss(self, steps: TakenSteps) -> Tensor:
        return super().policy_loss(steps) / steps.dsigma


def mean_of_each_step(values: Tensor, step: Tensor) -> Tensor:
    """For each entry of values [B] the mean over all entries of its step; step [B]."""
    same = (step[:, None] == step).to(values)
    return same @ values / same.sum(1)


@hyper_parameters
class FlowDPPO(FlowGRPO):
    """Flow-DPPO: Divergence Proximal Policy Optimization for Diffusion Models, arXiv 2606.11025;
    defaults are Flow-GRPO's for SD3.5 Medium, without its KL term.

    Flow-GRPO without the clip. The kernels of a step are normals, so the divergence between the
    policy and the one that sampled is known exactly, and not only at the sample that was drawn as
    the ratio is. A member is left out of an update where the divergence has reached
    `divergence_limit` and its advantage increases it; members that decrease it are kept. The limit
    bounds |mean - mean_old|^2 / (2 std^2), a mean over entries (published: 1e-5). `clip_range` has
    no effect on the loss; it only sets the log's clip_fraction and the limit of the alarm `drift`.
    """

    name: Literal["flow_dppo"] = "flow_dppo"  # type: ignore[assignment]
    title: ClassVar[str] = "Flow-DPPO"
    paper: ClassVar[str] = "2606.11025"
    kl_weight: NonNegativeFloat = 0.0
    divergence_limit: PositiveFloat = 1e-5

    def policy_loss(self, steps: TakenSteps) -> Tensor:
        """-A r; 0 where the limit is reached and r has moved in the direction of A."""
        ratio, advantages = self.log_ratio(steps).exp(), steps.advantages
        away = ((ratio > 1) & (advantages > 0)) | ((ratio < 1) & (advantages < 0))
        return torch.where(away & (steps.old_kl >= self.divergence_limit), 0.0, -advantages * ratio)


@hyper_parameters
class TempFlowGRPO(GRPO):
    """TempFlow-GRPO: When Timing Matters for GRPO in Flow Models, arXiv 2508.04324; defaults for
    SD3.5 Medium (10 steps; FLUX.1-dev: `eta` 0.9 and `noise_weight` 1.73).

    Like G2RPO it branches off the ODE by one stochastic step at a time, here at every step but the
    last, with granularity 1. It adds a weight for each step, proportional to its noise.
    `noise_weight` is one over the mean noise of the trained steps, so that steps weigh 1 on
    average: 2.25 for SD3.5's grid and eta 0.7, 1.73 for FLUX.1-dev's at 1024x1024 and eta 0.9. With
    another, KL is stronger or weaker against the reward. The published runs take four initial
    noises of each prompt, each with a group of six of its own. Here a prompt has one initial noise
    an iteration: four times the prompts are as many groups."""

    name: Literal["tempflow_grpo"] = "tempflow_grpo"
    title: ClassVar[str] = "TempFlow-GRPO"
    paper: ClassVar[str] = "2508.04324"
    group_size: GroupSize = 6
    kl_weight: NonNegativeFloat = 0.004
    noise_weight: PositiveFloat = 2.25
    update_every: UpdateEverySetting = 3

    shared_noise: ClassVar[bool] = True
    population_std: ClassVar[bool] = True
    drop_zero_advantages: ClassVar[bool] = True

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        return [
            window(step, step + 1, num_steps, self.shared_noise) for step in range(num_steps - 1)
        ]

    def policy_loss(self, steps: TakenSteps) -> Tensor:
        return self.noise_weight * steps.std * super().policy_loss(steps)


@hyper_parameters
class DanceGRPO(GRPO):
    """DanceGRPO: Unleashing GRPO on Visual Generation, arXiv 2505.07818; defaults for FLUX.1-dev
    (16 steps, 16 GPUs).

    All members of a group start from one noise, and every step but the last is stochastic with a
    constant diffusion coefficient. `trained_fraction` of the stochastic steps, drawn in every
    iteration, is trained."""

    name: Literal["dancegrpo"] = "dancegrpo"
    title: ClassVar[str] = "DanceGRPO"
    paper: ClassVar[str] = "2505.07818"
    group_size: GroupSize = 12
    eta: PositiveFloat = 0.3
    reward_mix: RewardMix = "advantages"
    update_every: UpdateEverySetting = 4

    shared_noise: ClassVar[bool] = True
    trained_fraction: ClassVar[float] = 0.6

    def kernel(self, sigmas: Tensor) -> Kernel:
        return sde_kernel(dance_sde(self.eta))

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        noisy = num_steps - 1
        shuffled = torch.randperm(
            noisy, generator=generator_for(seed, "trained steps", iteration)
        ).tolist()
        trained = sorted(shuffled[: max(1, int(noisy * self.trained_fraction))])
        return [window(0, noisy, num_steps, self.shared_noise, tuple(trained))]


@hyper_parameters
class MixGRPO(GRPO):
    """MixGRPO: Unlocking Flow-based GRPO Efficiency with Mixed ODE-SDE, arXiv 2507.21802; defaults
    for FLUX.1-dev (25 steps, 300 iterations).

    Only a window of `window_size` steps is stochastic and trained, and it moves from the noise
    towards the image during training. It stays for `window_iterations`, then moves on by `stride`
    ("progressive"). "decay" shortens the stay linearly from 10 to 1; "exp_decay" by exp(-(start -
    13) / 10) from step 13 on; "random" draws its first step in every iteration; "frozen" never
    moves it. At the end it is truncated, and then restarts. As in the published code, the last two
    steps are never stochastic."""

    name: Literal["mixgrpo"] = "mixgrpo"
    title: ClassVar[str] = "MixGRPO"
    paper: ClassVar[str] = "2507.21802"
    group_size: GroupSize = 12
    reward_mix: RewardMix = "advantages"
    update_every: UpdateEverySetting = 3
    window_size: Count = 4
    schedule: Literal["progressive", "random", "decay", "exp_decay", "frozen"] = "progressive"
    window_iterations: Count = 25

    shared_noise: ClassVar[bool] = True
    stride: ClassVar[int] = 1

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        start = self.window_start(num_steps, iteration, seed)
        return [
            window(
                start, min(start + self.window_size, num_steps - 2), num_steps, self.shared_noise
            )
        ]

    def window_start(self, num_steps: int, iteration: int, seed: int = 0) -> int:
        """The window's first step in an iteration, counted from 0; always below num_steps - 2."""
        end = num_steps - 2
        if end < 1:
            raise ValueError(
                f"the last two steps are never stochastic: num_steps must be at least 3, got {num_steps}"
            )
        if self.schedule == "frozen":
            return 0
        if self.schedule == "random":
            return draw_below(max(1, end - self.window_size + 1), seed, "window", iteration)
        start = 0
        while iteration >= (stay := self._stay(start, end)):
            iteration -= stay
            start += self.stride
            if start >= end:
                start = 0
        return start

    def _stay(self, start: int, end: int) -> int:
        """The number of iterations with the window at `start`."""
        if self.schedule == "decay":
            gone = start / end
            return max(1, int(10 * (1 - gone) + gone))
        if self.schedule == "exp_decay":
            return math.ceil(self.window_iterations * math.exp(-0.1 * max(0, start - 13)))
        return self.window_iterations

    def advantages(self, rewards: Tensor, weights: Tensor) -> Tensor:
        """With weights of rewards divided by their sum, as in the published code."""
        total = weights.abs().sum()
        return super().advantages(rewards, weights / total if total > 0 else weights)


@hyper_parameters
class MixGRPOFlash(MixGRPO):
    """MixGRPO-Flash: fewer steps after the window, which are not trained, with DPM-Solver++(2M).

    Of the n = num_steps - (last stochastic step) points after the window, int(n * compression)
    remain, evenly spread and rounded to the sigma grid, at least the two ends. The published Flash*
    is schedule=frozen with compression=0.2."""

    name: Literal["mixgrpo_flash"] = "mixgrpo_flash"  # type: ignore[assignment]
    title: ClassVar[str] = "MixGRPO-Flash"
    paper: ClassVar[str] = "2507.21802"
    window_iterations: Count = 20
    compression: Annotated[float, Field(gt=0, le=1)] = 0.4

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        (plan,) = super().plans(num_steps, iteration, seed)
        way = num_steps - plan.merge
        jumps = max(int((way + 1) * self.compression), 2) - 1
        tail = tuple(plan.merge + round(way * jump / jumps) for jump in range(jumps + 1))
        return [dataclasses.replace(plan, tails=(tail,), solver="dpmpp2m")]
