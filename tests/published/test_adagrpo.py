"""AdaGRPO's choice of prompts, advantages and training step against a restatement of its formulas,
on the tiny FLUX."""

from functools import partial

import torch

from tests.published.neighbours import flow_sde, log_prob, normalised
from tests.published.second_half import Beside, tiny

SETTING = (
    "algorithm.name=adagrpo",
    "algorithm.group_size=4",
    "algorithm.branch_steps=[0,3]",
    "algorithm.candidates=3",
    "trainer.prompts_per_iteration=1",
)


class Published:
    """Its running averages, and what they make of an iteration."""

    def __init__(self, sigmas):
        self.sigmas, self.mean, self.variance, self.chosen = sigmas, None, None, []

    def choose(self, seen):
        prompts, scores = seen.candidates[0], seen.candidates[1][:, 0]
        mean, variance = float(scores.mean()), float(scores.var(correction=0))
        self.mean = mean if self.mean is None else 0.8 * self.mean + 0.2 * mean
        self.variance = variance if self.variance is None else 0.8 * self.variance + 0.2 * variance
        self.chosen.append((prompts[int((scores - self.mean).abs().argmin())], seen.prompts[0]))

    def advantages(self, scores):
        z = (scores - self.mean) / (self.variance**0.5 + 1e-8)
        positive, negative = z > 0, z < 0
        if bool(positive.any()) and bool(negative.any()):
            z[positive], z[negative] = (
                z[positive] / z[positive].sum(),
                z[negative] / z[negative].abs().sum(),
            )
        else:
            z = z - z.mean()
        return normalised(scores).clamp(-5, 5) + z.clamp(-5, 5)

    def term(self, models, rollout, advantage, g, share):
        (taken,) = rollout.transitions
        v = models.velocity("trained", taken.x, self.sigmas[taken.step], 0)
        density = log_prob(
            taken.x_next[g : g + 1], *flow_sde(0.7)(taken.x, v, self.sigmas, taken.step)
        )
        return -share * advantage * (density - density.detach()).exp()

    def objective(self, models, seen):
        self.choose(seen)
        return [
            partial(self.term, models, rollout, advantage, g, 1 / (2 * 4))
            for rollout, rewards in zip(seen.rollouts, seen.rewards, strict=True)
            for g, advantage in enumerate(self.advantages(rewards[0, 0].clone()))
        ]


def test_choices_losses_gradients_and_weights_are_the_published_ones(flux_directory):
    ours = tiny(flux_directory, *SETTING)
    published = Published(ours.sigmas)
    apart = Beside(ours, published.objective).differences()
    assert all(theirs == own for theirs, own in published.chosen)
    assert torch.tensor(
        ours.loop.algorithm_state.state["mean"] + ours.loop.algorithm_state.state["variance"]
    ).allclose(torch.tensor([published.mean, published.variance]), rtol=1e-5, atol=0)
    assert apart["loss"] < 5e-6 and apart["gradient"] < 2e-5 and apart["weights"] < 2e-3
