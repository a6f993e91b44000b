"""All of G²RPO (arXiv 2510.01982) in torch and diffusers: python examples/nano_g2rpo.py, minutes on
two cores.

A flow model walks from noise (sigma = 1) to a picture (sigma = 0) by the ODE dx = v dsigma.
1. Walk once, from one noise: the anchor. The whole group shares it.
2. At one step k of it, take the step of the SDE (Eq. 2), with a new noise for each member.
3. Finish each member by the ODE, in steps of several sizes: the granularities.
4. A = sum over granularities of (reward - mean of the group) / std of the group (Eq. 8, 11).
5. Minimise max(-A r, -A clip(r)) with r = p(x_next | x) / p_old(x_next | x) (Eq. 12).
Rewards of a group differ by that one noise alone, so each speaks about its noise.

After two iterations all weights are the package's, bit for bit (tests/repository/test_nano.py).
"""

import hashlib
import itertools
import math

import torch
from diffusers import FluxPipeline

from g2rpo.data.testbed import pipeline_dir, prompts
from g2rpo.data.testbed.rewards import SceneAccuracy

SIZE, GUIDANCE, TOKENS = 64, 3.5, 16  # pixels, FLUX's input of guidance, tokens of a prompt


class Flow:
    """The velocity of a FLUX pipeline, and pictures of its latents."""

    def __init__(self, rows):
        self.pipe = FluxPipeline.from_pretrained(str(pipeline_dir()), torch_dtype=torch.float32)
        self.network, self.rows = self.pipe.transformer, rows

    def noise(self, generator):
        """One latent at sigma = 1."""
        shape = 1, self.network.config.in_channels // 4, SIZE, SIZE
        x, self.positions = self.pipe.prepare_latents(*shape, torch.float32, "cpu", generator)
        return x

    def velocity(self, x, sigma, prompt):
        """v(x, sigma) of latents x [B, ...], at most `rows` in a call."""
        text, pooled, text_ids = prompt
        answers = []
        for part in x.split(self.rows):
            each = len(part)
            answers += self.network(
                hidden_states=part,
                timestep=sigma.expand(each) * 1000 / 1000,  # as the pipeline rounds it
                guidance=torch.full((1,), GUIDANCE).expand(each),
                pooled_projections=pooled.expand(each, -1),
                encoder_hidden_states=text.expand(each, -1, -1),
                **{"txt_ids": text_ids, "img_ids": self.positions, "return_dict": False},
            )
        return torch.cat(answers)

    def pictures(self, x):
        """Pictures [B, 3, H, W] in [0, 1] of latents at sigma = 0."""
        vae, shown = self.pipe.vae, []
        for part in x.split(self.rows):
            latent = self.pipe._unpack_latents(part, SIZE, SIZE, self.pipe.vae_scale_factor)
            latent = latent / vae.config.scaling_factor + vae.config.shift_factor
            shown.append(self.pipe.image_processor.postprocess(vae.decode(latent)[0], "pt"))
        return torch.cat(shown)


def sde_step(x, v, sigmas, k, eta):
    """Mean and std of a stochastic step; the drift keeps the ODE's marginals for any noise g."""
    sigma, after = sigmas[k], sigmas[k + 1]
    g = eta * (sigma / (1 - torch.where(sigma >= 1, sigmas[1], sigma))).sqrt()
    of_x = 1 + g**2 / (2 * sigma) * (after - sigma)
    of_v = 1 + g**2 * (1 - sigma) / (2 * sigma)
    return of_x * x + (after - sigma) * (of_v * v), g * (sigma - after).sqrt()


def finish(flow, x, sigmas, k, size, prompt):
    """The ODE from step k to the picture, in jumps of `size` steps after a first single one."""
    tail = [k, *range(k + 1, len(sigmas) - 1, size), len(sigmas) - 1]
    for now, then in itertools.pairwise(tail):
        x = x + (sigmas[then] - sigmas[now]) * flow.velocity(x, sigmas[now], prompt)
    return x


def log_prob(x, mean, std):
    """The log density of each row, as a mean over its entries."""
    entries = -((x - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
    return entries.flatten(1).mean(1)


def normalized(rewards):
    """Advantages [G] within a group; 0 if all rewards are equal."""
    away = rewards.double() - rewards.double().mean()
    std = (away.square().sum() / (len(away) - 1)).sqrt()
    return torch.where(rewards.max() > rewards.min(), away / (std + 1e-8), 0).float()


def generator(*key):
    """Every draw has a generator of its own, so a run is a function of its seed."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def train(
    iterations=40, places=4, group=12, num_steps=10, branch_steps=(0, 1, 2, 3), granularities=(1, 2),
    eta=0.7, clip=1e-4, rate=2e-4, rows=96, seed=42,
):  # fmt: skip
    """Trains all weights on `places` prompts an iteration; returns the network."""
    flow, reward, known = Flow(rows), SceneAccuracy(partial=0.33), prompts("train")
    order = torch.randperm(len(known), generator=generator(seed, "prompts", 0)).tolist()
    sigmas = torch.linspace(1, 0, num_steps + 1)
    sigmas = 3 * sigmas / (1 + 2 * sigmas)  # more steps near the noise (shift 3)
    optimizer = torch.optim.AdamW(flow.network.parameters(), lr=rate, weight_decay=1e-4)

    for iteration in range(iterations):
        steps, scores = [], []
        with torch.no_grad():
            for place in range(places):
                text = known[order[iteration * places + place]]
                prompt = flow.pipe.encode_prompt(text, None, max_sequence_length=TOKENS)
                x = flow.noise(generator(seed, "rollout", iteration, place, "initial"))
                for k in range(max(branch_steps) + 1):
                    v = flow.velocity(x, sigmas[k], prompt)
                    if k in branch_steps:
                        own = generator(seed, "rollout", iteration, place, "branch", k, k)
                        mean, std = sde_step(x, v, sigmas, k, eta)
                        landed = mean + std * torch.randn(group, *x.shape[1:], generator=own)
                        advantage = 0
                        for size in granularities:
                            end = finish(flow, landed, sigmas, k + 1, size, prompt)
                            scores.append(reward(flow.pictures(end), [text] * group))
                            advantage = advantage + normalized(scores[-1])
                        steps.append((k, x, landed, prompt, advantage.clamp(-5, 5)))
                    x = x + (sigmas[k + 1] - sigmas[k]) * v

        optimizer.zero_grad()
        for k, x, landed, prompt, advantage in steps:
            v = flow.velocity(x, sigmas[k], prompt).expand_as(landed)
            new = log_prob(landed, *sde_step(x.expand_as(landed), v, sigmas, k, eta))
            ratio = (new - new.detach()).exp()  # 1 at the first update, but with a gradient
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))
            (loss.sum() / (group * len(steps))).backward()
        torch.nn.utils.clip_grad_norm_(flow.network.parameters(), 1.0)
        optimizer.step()
        print(f"{iteration + 1:3d}  reward {torch.cat(scores).mean():.3f}", flush=True)
    return flow.network


if __name__ == "__main__":
    train()
