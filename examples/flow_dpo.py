"""Flow-DPO on pairs of pictures: a loop of your own on the package's policy and learner.

python examples/flow_dpo.py scenes pairs/pairs.jsonl runs/dpo    # prints where the adapter is

Diffusion-DPO (arXiv 2311.12908) on velocities, as in the code of Flow-GRPO (yifan123/flow_grpo,
scripts/train_sd3_dpo.py):

    for each pair of a chosen picture w and a rejected one l, with one sigma and one noise:
        x = (1 - sigma) x0 + sigma noise,  u = noise - x0
        gain = |v_base - u|^2 - |v - u|^2, means over entries, without guidance       gains
        minimise  -log sigmoid(beta/2 (gain_w - gain_l))                              loss

The file has a line {"prompt": ..., "chosen": "a.png", "rejected": "b.png"} a pair. It encodes pictures as
FLUX.1 does; another class of pipelines needs another `latents_of`. A head fitted to the same pairs and
trained on by G2RPO needs fewer of them (docs/pairs.md).
"""

import json
import sys
from pathlib import Path

import torch
from diffusers import FluxPipeline
from torch.nn.functional import logsigmoid

from g2rpo import api
from g2rpo.core.images import cut_picture
from g2rpo.core.types import unguided

BETA = 100.0
PAIRS = 16  # of an update
UPDATES = 100
RATE = 5e-5


@torch.no_grad()
def latents_of(policy, file):
    """The latents [1, tokens, channels] of a picture file, cut and resized to the policy's size."""
    vae, options = policy.pipeline.vae, policy.options
    picture = cut_picture(str(file), options.width, options.height).to(vae.device, vae.dtype)
    z = vae.encode(2 * picture - 1).latent_dist.mode()
    z = (z - vae.config.shift_factor) * vae.config.scaling_factor
    return FluxPipeline._pack_latents(z, *z.shape).float()


def gains(policy, cond, rows, x0, noise, sigma):
    """How much better than the base the policy knows pictures x0 [B, ...], of the prompts `rows` of
    `cond`; [B], in float64, since they are small differences."""
    s = sigma.view(-1, *[1] * (x0.dim() - 1))
    x, target, prompts = (1 - s) * x0 + s * noise, (noise - x0).double(), cond.rows(rows)
    with unguided(policy):
        with torch.no_grad(), policy.base():
            base = policy.velocity(x, sigma, prompts)
        velocity = policy.velocity(x, sigma, prompts)
    errors = [(v.double() - target).square().flatten(1).mean(1) for v in (base, velocity)]
    return errors[0] - errors[1]


def loss(chosen, rejected, beta=BETA):
    """Of gains [P] of the chosen and the rejected pictures."""
    return -logsigmoid(beta / 2 * (chosen - rejected)).mean()


def train(recipe, file, run_dir, updates=UPDATES, **more):
    """Trains an adapter on the pairs of a file, prints the loss and the share of right margins, and
    exports the weights."""
    file = Path(file)
    pairs = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    settings = [f"optim.learning_rate={RATE}", "policy.tuning=lora"]
    trainer = api.trainer(recipe, settings, run_dir, **more)
    policy, learner = trainer.policy, trainer.learner
    draw = torch.Generator().manual_seed(0)
    for update in range(updates):
        own = [pairs[i] for i in torch.randint(len(pairs), (PAIRS,), generator=draw).tolist()]
        files = [file.parent / pair[side] for side in ("chosen", "rejected") for pair in own]
        x0 = torch.cat([latents_of(policy, path) for path in files])
        noise = (
            torch.randn(x0[:PAIRS].shape, generator=draw).to(x0).repeat(2, *[1] * (x0.dim() - 1))
        )
        sigma = torch.randn(PAIRS, generator=draw).sigmoid().repeat(2).to(x0)
        cond = policy.encode([pair["prompt"] for pair in own])
        chosen, rejected = gains(policy, cond, [*range(PAIRS)] * 2, x0, noise, sigma).chunk(2)
        value = loss(chosen, rejected)
        learner.optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(learner.parameters, 1.0)
        learner.optimizer.step()
        right = float((chosen > rejected).float().mean())
        print(f"update {update + 1}/{updates}: loss {value.item():.4f}, right {right:.2f}")
    return trainer.export()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    print(train(*sys.argv[1:]))
