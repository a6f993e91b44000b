"""Training steps of DanceGRPO, MixGRPO and Flow-GRPO, restated from their published formulas.

One member, one step and one optimizer step after another, with a batch of one and the bare
diffusers transformer. Nothing here is g2rpo's: prompts' embeddings, drawn noise and scores of
finished latents are given. A restatement runs in the dtype of its network's weights, so that
float64 tells how much of a difference is rounding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Flux:
    """FLUX's velocity as the published loops of DanceGRPO and MixGRPO call it: floor(1000 sigma),
    autocast over the weights.

    Without `truncate` the network sees sigma itself.
    """

    transformer: torch.nn.Module
    text: list[dict[str, Tensor]]
    side: int  # of the square of latent tokens
    autocast: torch.dtype | None = None
    guidance: float = 3.5
    truncate: bool = True

    def __call__(self, x, sigma, prompt):
        given = self.text[prompt]
        dtype = self.autocast or x.dtype
        rows, columns = torch.meshgrid(
            torch.arange(self.side), torch.arange(self.side), indexing="ij"
        )
        places = torch.stack([torch.zeros_like(rows), rows, columns], -1).reshape(-1, 3).to(dtype)
        with torch.autocast("cpu", dtype, enabled=self.autocast is not None):
            return self.transformer(
                hidden_states=x,
                timestep=torch.tensor([int(sigma * 1000)]) / 1000
                if self.truncate
                else sigma.reshape(1),
                guidance=torch.tensor([self.guidance], dtype=dtype),
                encoder_hidden_states=given["prompt_embeds"],
                pooled_projections=given["pooled_prompt_embeds"],
                txt_ids=torch.zeros(given["prompt_embeds"].shape[1], 3, dtype=dtype),
                img_ids=places,
                return_dict=False,
            )[0]


@dataclass
class StableDiffusion3:
    """SD3's velocity as Flow-GRPO's code calls it: 1000 sigma, and both sides of the guidance in
    one call."""

    transformer: torch.nn.Module
    text: list[dict[str, Tensor]]
    guidance: float = 4.5

    def __call__(self, x, sigma, prompt):
        given = self.text[prompt]
        without, with_prompt = self.transformer(
            hidden_states=torch.cat([x, x]),
            timestep=(1000 * sigma).to(x.dtype).repeat(2),
            encoder_hidden_states=torch.cat(
                [given["negative_prompt_embeds"], given["prompt_embeds"]]
            ),
            pooled_projections=torch.cat(
                [given["negative_pooled_prompt_embeds"], given["pooled_prompt_embeds"]]
            ),
            return_dict=False,
        )[0].chunk(2)
        return without + self.guidance * (with_prompt - without)


Network = Callable[[Tensor, Tensor, int], Tensor]


def flow_sde(eta):
    """Flow-GRPO: mean = x (1 + s^2 / (2 sigma) dt) + v (1 + s^2 (1 - sigma) / (2 sigma)) dt, std =
    s sqrt(-dt), with s = eta sqrt(sigma / (1 - sigma)) and the second sigma in that denominator at
    the first step."""

    def step(x, v, sigmas, i):
        sigma, dt = sigmas[i], sigmas[i + 1] - sigmas[i]
        s = torch.sqrt(sigma / (1 - (sigmas[1] if i == 0 else sigma))) * eta
        mean = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
        return mean, s * torch.sqrt(-dt)

    return step


def dance_sde(eta):
    """DanceGRPO: mean = x + v dt - eta^2 / 2 score dt, score = -(x - (1 - sigma) x0) / sigma^2; std
    = eta sqrt(-dt)."""

    def step(x, v, sigmas, i):
        sigma, dt = sigmas[i], sigmas[i + 1] - sigmas[i]
        image = x - sigma * v
        score = -(x - image * (1 - sigma)) / sigma**2
        return x + dt * v - 0.5 * eta**2 * score * dt, eta * torch.sqrt(-dt)

    return step


def log_prob(x_next, mean, std):
    entries = -((x_next - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
    return entries.mean()


@dataclass
class Member:
    """One trajectory: latents[i] is the one before step i."""

    prompt: int
    latents: list[Tensor]
    log_probs: dict[int, Tensor]
    advantage: Tensor = field(default_factory=lambda: torch.zeros(()))

    @property
    def final(self):
        return self.latents[-1]


@torch.no_grad()
def sample(network, prompt, x, sigmas, noise, step):
    """Stochastic at the steps that `noise` has, the ODE elsewhere."""
    member = Member(prompt, [x], {})
    for i in range(len(sigmas) - 1):
        v = network(x, sigmas[i], prompt)
        x = x.to(sigmas.dtype)
        if i in noise:
            mean, std = step(x, v, sigmas, i)
            x = mean + std * noise[i].to(v.dtype)
            member.log_probs[i] = log_prob(x, mean, std)
        else:
            x = x + v * (sigmas[i + 1] - sigmas[i])
        member.latents.append(x)
    return member


def normalised(scores):
    """DanceGRPO's and MixGRPO's advantages of one group: (r - mean) / (std + 1e-8), the unbiased
    std."""
    return (scores - scores.mean()) / (scores.std() + 1e-8)


def surrogate(network, member, i, sigmas, step, clip):
    """max(-A r, -A clip(r)) of one member at one step, and where the step is bound now."""
    x = member.latents[i].to(sigmas.dtype)
    mean, std = step(x, network(member.latents[i], sigmas[i], member.prompt), sigmas, i)
    ratio = torch.exp(log_prob(member.latents[i + 1], mean, std) - member.log_probs[i])
    a = member.advantage
    return torch.maximum(-a * ratio, -a * ratio.clamp(1 - clip, 1 + clip)), (mean, std)


@dataclass
class Update:
    """What one optimizer step saw."""

    loss: float
    norm: float  # of the gradient, before it is clipped
    gradients: list[Tensor]  # clipped

    @property
    def flat(self):
        return torch.cat([gradient.flatten() for gradient in self.gradients])


@dataclass
class Learner:
    """AdamW with the gradient's norm clipped at 1, and the updates that it made."""

    parameters: list[torch.nn.Parameter]
    rate: float
    epsilon: float = 1e-8
    weight_decay: float = 1e-4
    updates: list[Update] = field(default_factory=list)

    def __post_init__(self):
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=self.rate, eps=self.epsilon, weight_decay=self.weight_decay
        )

    @classmethod
    def of(cls, t, parameters):
        """With the rate and the epsilon of the trainer `t`."""
        (group,) = t.learner.optimizer.param_groups
        return cls(list(parameters), t.learner.learning_rate, group["eps"])

    def update(self, losses):
        """One optimizer step along the sum of `losses`, each backwards on its own."""
        self.optimizer.zero_grad()
        total = 0.0
        for loss in losses:
            value = loss()
            value.backward()
            total += float(value.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, 1.0))
        self.updates.append(Update(total, norm, [p.grad.clone() for p in self.parameters]))
        self.optimizer.step()


def window_updates(network, learner, groups, trained, sigmas, step, *, accumulate, clip=1e-4):
    """The second half of DanceGRPO's and MixGRPO's iteration: every GPU has a group, and the
    weights move after `accumulate` members of each; a loss is divided by accumulated members and
    trained steps, and gradients are means over the GPUs."""
    share = accumulate * len(trained) * len(groups)
    for start in range(0, len(groups[0]), accumulate):
        losses = [
            lambda member=member, i=i: surrogate(network, member, i, sigmas, step, clip)[0] / share
            for group in groups
            for member in group[start : start + accumulate]
            for i in trained
        ]
        learner.update(losses)


def batch_normalised(scores):
    """Flow-GRPO's advantages [groups, members]: the group's mean, and the population's std of the
    whole batch + 1e-4."""
    return (scores - scores.mean(1, keepdim=True)) / (scores.std(correction=0) + 1e-4)


def flow_grpo_updates(
    network, reference, learner, groups, sigmas, step, *, parts, beta, per_time, clip=1e-4
):
    """The second half of Flow-GRPO's iteration: members of zero advantage are filtered out, and for
    each of `parts` batches the loss is the mean over members and over steps 0 .. T-2 of the
    surrogate and beta |mean - mean_ref|^2 / (2 std^2) (Eq. 14), or with `per_time` over 2 s^2,
    without |dt|.

    The published code shuffles members into the batches; here a batch has equally many of each
    group.
    """
    size = len(groups[0]) // parts
    steps = range(len(sigmas) - 2)
    for part in range(parts):
        batch = [
            member
            for group in groups
            for member in group[part * size : (part + 1) * size]
            if member.advantage != 0
        ]

        def loss(member, i, batch=batch):
            policy, (mean, std) = surrogate(network, member, i, sigmas, step, clip)
            with torch.no_grad():
                base, _ = step(
                    member.latents[i],
                    reference(member.latents[i], sigmas[i], member.prompt),
                    sigmas,
                    i,
                )
            time = sigmas[i] - sigmas[i + 1] if per_time else 1.0
            return (policy + beta * time * ((mean - base) ** 2).mean() / (2 * std**2)) / (
                len(batch) * len(steps)
            )

        learner.update(
            [
                lambda member=member, i=i, loss=loss: loss(member, i)
                for member in batch
                for i in steps
            ]
        )
