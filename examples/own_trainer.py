"""A trainer of your own on the package's: here another rule decides which pictures of a group are
good.

python examples/own_trainer.py        # seconds, on a policy with a closed form

These members of `Trainer` are public:

sample_groups(prompts, algorithm, noise, rewards)   groups with their rewards [N, R, M, G]; each rank has its own groups
pictures(groups)                                    their pictures
learn_from(groups, advantages)                      optimizer steps, which end the iteration and return its row; advantages are
                                                    those of all ranks (`world.gather`)
iterate(), train()                                  one iteration; all of them
evaluate(), sample(prompts)                         held-out pictures; any pictures
base, final                                         evaluations of the base and of the weights as they are, or None
snapshot(), restore(it), set_rate(rate)             weights and moments; the learning rate
listening()                                         while entered, rows are written
save(), resume(), finish(), export()                the run directory
config, policy, algorithm, rewards, judges, prompts, heldout, world, run, iteration     what it was built of
"""

import torch

from g2rpo import api
from g2rpo.models.gaussian import GaussianPolicy


def brightness(images, prompts):
    """The mean of the pixels."""
    return images.flatten(1).mean(1)


def best_against_worst(rewards):
    """1 for the best picture of each group, -1 for the worst, 0 for the others: [N, R, M, G] -> [N,
    G]."""
    scores = rewards.mean((1, 2))
    advantages = torch.zeros_like(scores)
    advantages[torch.arange(len(scores)), scores.argmax(1)] = 1
    advantages[torch.arange(len(scores)), scores.argmin(1)] = -1
    return advantages


settings = [
    "trainer.prompts_per_iteration=2",
    "optim.learning_rate=0.1",
    "evaluation.num_prompts=2",
]
trainer = api.trainer(
    "scenes",
    settings,
    policy=GaussianPolicy(mean=-1.0, std=0.3),  # its prompts are numbers
    prompts=["0", "0.5"],
    heldout=["0.1", "0.2"],
    rewards={"bright": brightness},
    judges={},
)

with trainer.listening():  # with a run_dir it writes the log
    before = trainer.evaluate()
    while trainer.iteration < 20:
        groups = trainer.sample_groups()
        trainer.learn_from(groups, best_against_worst(groups.rewards))
    after = trainer.evaluate()

print(
    f"brightness of held-out pictures: {before['reward/bright']:.2f} -> {after['reward/bright']:.2f}"
)
