"""Learning from pictures in files that people judged: Diffusion-DPO on pairs, for flows.

for each pair or mark, `times` times:    examples
    draw sigma and one noise; x = (1 - sigma) x0 + sigma noise
    gain = |v_base - u|^2 - |v - u|^2,  u = noise - x0: how much better than the untrained model the
    trained one knows the picture, a mean over entries; both without guidance    gains
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import logsigmoid

from g2rpo.algorithms.flow_grpo import window
from g2rpo.algorithms.forward_process import mean_square
from g2rpo.core.data import Batch, Example, Loss
from g2rpo.core.normal import in_float64, per_row
from g2rpo.core.plain import STRICT, Count
from g2rpo.core.plans import Plan, Rollout
from g2rpo.core.types import Algorithm, Draw, Network


@dataclass(config=STRICT, frozen=True, kw_only=True)
class FromJudged(Algorithm):
    """The common part. `times` are drawn for each pair or mark. A place on the sampler's grid is
    logit-normal (0, 1), and sigma lies between its neighbours. `held_out` is the share of the
    prompts whose pictures only tell whether the model prefers what people do."""

    times: Count = 1
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.1
    update_every: Literal["rollout"] = "rollout"

    uses_base: ClassVar[bool] = True

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        return [window(0, 0, num_steps, shared_noise=False)]

    def advantages(self, rewards: Tensor, weights: Tensor) -> Tensor:
        """1 for good pictures, -1 for others, of marks [N, 1, 1, G]."""
        return 2 * rewards[:, 0, 0] - 1

    def examples(self, rollout: Rollout, advantages: Tensor, draw: Draw) -> list[Example]:
        """One for each time. All pictures of the group are noised alike; it is one member."""
        x, found = rollout.finals[0], []
        for time in range(self.times):
            place = torch.randn(1, generator=draw("times", time)).sigmoid()
            noise = torch.randn(x[:1].shape, generator=draw("noise", time))
            data = {"place": place, "noise": noise}
            found.append(Example(rollout.prompt, 0, x, advantages[:1], data))
        return found

    def metrics(self, log: Mapping[str, Tensor]) -> dict[str, float]:
        """`Loss.log` has gains and errors by row, and by member whether its implicit reward is as
        people judged."""
        gain, good = log["gain"], log["mark"] > 0
        return {
            "implicit_accuracy": float(log["right"].mean()),
            "gain/good": float(gain[good].mean()),
            "gain/bad": float(gain[~good].mean()),
            "velocity_error": float(log["velocity_error"].mean()),
        }

    def gains(self, batch: Batch, network: Network) -> tuple[Tensor, Tensor]:
        """The gains of all rows, in float64, since they are small differences; and the trained
        model's errors."""
        size = len(batch.x) // len(batch.data["noise"])
        noise = batch.data["noise"].to(batch.x).repeat_interleave(size, 0)
        sigma = sigma_at(batch.sigmas, batch.data["place"]).repeat_interleave(size).to(batch.x)
        each = per_row(sigma, batch.x)
        at = (1 - each) * batch.x + each * noise, sigma, batch.prompts
        with network.unguided():
            base, velocity = network.base_velocity(*at), network.velocity(*at)
        target = in_float64(noise - batch.x)
        error, before = (mean_square(in_float64(v) - target) for v in (velocity, base))
        return before - error, error


def sigma_at(sigmas: Tensor, place: Tensor) -> Tensor:
    """The sigmas [B] at places [B] from 0 to 1 on a grid [T + 1], linear between its steps."""
    at = place.to(sigmas) * (len(sigmas) - 1)
    step = at.long().clamp(max=len(sigmas) - 2)
    return sigmas[step].lerp(sigmas[step + 1], at - step)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class FlowDPO(FromJudged):
    """Diffusion-DPO, arXiv 2311.12908, on velocities as in Flow-GRPO's and Flow-Factory's code;
    defaults of the former's for SD3.5 Medium.

        pairs of a chosen picture w and a rejected one l, noised alike     examples
        margin = beta/2 (gain_w - gain_l)                                  loss
        minimise  -log sigmoid(margin)                                     loss

    gain_w - gain_l is -[(|v - u|_w^2 - |v_base - u|_w^2) - (the same of l)]. `beta` is for means
    over entries (published: 100 to 500; 5000 for noise of SD1.5 and SDXL); code that sums over
    entries has the same loss at beta divided by their number."""

    name: Literal["flow_dpo"] = "flow_dpo"
    title: ClassVar[str] = "Flow-DPO"
    paper: ClassVar[str] = "2311.12908"
    group_size: Literal[2] = 2
    beta: PositiveFloat = 100.0

    judged: ClassVar[Literal["pairs"]] = "pairs"

    def loss(self, batch: Batch, network: Network) -> Loss:
        gains, errors = self.gains(batch, network)
        chosen, rejected = gains[0::2], gains[1::2]
        margin = self.beta / 2 * (chosen - rejected)
        marks = torch.tensor([1.0, -1.0]).repeat(len(margin))
        log = logged(gains, errors, marks, margin)
        return Loss(-logsigmoid(margin).to(batch.x.dtype), log)


def logged(gains: Tensor, errors: Tensor, marks: Tensor, implicit: Tensor) -> dict[str, Tensor]:
    """`Loss.log` of gains, errors and marks by row, and of implicit rewards by member, positive
    where they are as people judged."""
    right = (implicit > 0).to(implicit) + 0.5 * (implicit == 0)
    found = {"gain": gains, "velocity_error": errors, "mark": marks, "right": right}
    return {name: values.detach() for name, values in {**found, "implicit": implicit}.items()}
