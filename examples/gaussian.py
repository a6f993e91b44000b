"""G2RPO from end to end in one script, on a policy with a closed form: seconds, no downloads.

    python examples/gaussian.py [PICTURE.png]

The "model" is flow matching between noise and a Gaussian, with the exact velocity; what is trained
is the Gaussian's mean. The reward is highest for one grey, so the optimal mean is known; the
picture shows how training approaches it.
"""

import sys
from functools import partial

import matplotlib.pyplot as plt
import torch

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.core.flow import sigma_grid
from g2rpo.core.noise import generator_for
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.memory import batch_sizes
from g2rpo.rollout.scoring import score_rollouts
from g2rpo.train.updater import Updater

STEPS, ITERATIONS, GREY = 10, 60, 0.75

policy = GaussianPolicy(mean=-1.0, std=0.3)
algorithm = GranularGRPO(branch_steps=(0, 1, 2, 3), granularities=(1, 2), tail="closed")
sigmas = sigma_grid(STEPS, shift=3.0)
kernel = algorithm.kernel(sigmas)
optimizer = torch.optim.Adam(policy.trainable_parameters(), lr=0.1)
sizes = batch_sizes("auto", "auto", 64, policy.device, print)
updater = Updater(
    policy=policy,
    algorithm=algorithm,
    optimizer=optimizer,
    sigmas=sigmas,
    sizes=sizes,
    max_grad_norm=1.0,
)


def greyness(images, prompts):
    """Minus the mean squared distance of the pixels from GREY."""
    return -(images - GREY).square().flatten(1).mean(1)


def pictures(number=200):
    """What the policy draws now: plain sampling, no exploration."""
    engine = Engine(policy=policy, cond=policy.encode(["0"] * number), sigmas=sigmas)
    return policy.decode(engine.sample(engine.initial(partial(generator_for, "look"))))


before, curve, spread = pictures(), [], []
prompts = ["0", "0"]  # to this policy a prompt is a number that shifts the mean
for iteration in range(ITERATIONS):
    # anchors, branches, tails
    engine = Engine(policy=policy, cond=policy.encode(prompts), sigmas=sigmas)
    rollouts = engine.rollout(
        algorithm.plans(STEPS), algorithm.group_size, kernel, partial(generator_for, iteration)
    )
    # [groups, 1, granularities, G]
    rewards = score_rollouts(policy, rollouts, {"grey": greyness}, prompts, sizes)
    advantages = algorithm.advantages(rewards, torch.ones(1))  # [groups, G]
    # for losses that draw noise; this one does not
    draw = partial(generator_for, iteration, "train")
    examples = [
        e
        for rollout, own in zip(rollouts, advantages, strict=True)
        for e in algorithm.examples(rollout, own, draw)
    ]
    updater.update(examples, policy.encode(prompts))
    curve.append(rewards.mean().item())
    # by branch step
    spread.append(rewards.std(-1).mean(dim=(1, 2)).reshape(len(prompts), -1).mean(0))
after = pictures()

target = torch.logit(torch.tensor(GREY)).item()
reached = policy.trainable_parameters()[0].mean().item()
print(f"mean of the policy: -1.00 -> {reached:.2f}; the grey that is wanted lies at {target:.2f}")
print(f"reward: {greyness(before, None).mean():.4f} -> {greyness(after, None).mean():.4f}")

figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
left.plot(curve)
left.set(title="reward of the explored pictures", xlabel="iteration")
middle.hist(
    [before.flatten(), after.flatten()],
    bins=60,
    density=True,
    label=["before", "after"],
    histtype="stepfilled",
    alpha=0.7,
)
middle.axvline(GREY, color="black", linestyle=":", label="wanted")
middle.set(title="pixels", xlabel="grey")
middle.legend()
right.plot(torch.stack(spread[:10]).mean(0), marker="o", label="first ten iterations")
right.plot(torch.stack(spread[-10:]).mean(0), marker="s", linestyle="--", label="last ten")
right.set(title="spread of the reward within groups", xlabel="branch step", xticks=range(4))
right.legend()
out = sys.argv[1] if len(sys.argv) > 1 else "gaussian.png"
figure.savefig(out, dpi=120)
print(f"the picture: {out}")
