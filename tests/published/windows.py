"""DanceGRPO's and MixGRPO's iterations on the tiny FLUX: ours, and restated."""

from functools import cached_property

import torch

from g2rpo.core.data import Precision
from tests.published import side_by_side
from tests.published.neighbours import Flux, Learner, normalised, window_updates
from tests.published.side_by_side import Restated, agree
from tests.support import policies
from tests.support.runs import trainer, with_precision

__all__ = ["Windows", "agree", "normalised"]

PROMPTS = ["a red circle", "two blue square left of a circle", "a square", "blue"]
COMMON = (
    # a network call has one row there, and in bfloat16 the kernels differ by the batch
    "sampling.batch_size=1",
    "trainer.micro_batch_size=1",
    "trainer.prompts_per_iteration=2",
    "rewards={tilt: 3.0, spread: 1.0}",
    "evaluation.rewards={}",
)


def tilt(images, prompts):
    return (images[..., :16] - images[..., 16:]).flatten(1).mean(1)


def spread(images, prompts):
    return images.flatten(1).std(1)


REWARDS = {"tilt": tilt, "spread": spread}


class Windows(side_by_side.Pair):
    """Two iterations of one algorithm.

    `step` is the stochastic step, `accumulate` how many members make an update, and `mix` makes one
    advantage of a group's scores [2, G]. With `autocast`, bfloat16, the measure is what float32
    makes of the same, and half of it is allowed.
    """

    def __init__(self, directory, overrides, autocast, step, accumulate, mix):
        self.autocast, self.step, self.accumulate, self.mix = autocast, step, accumulate, mix
        self.share = 0.5 if autocast else 4.0
        # a clip at 1e-4 of a ratio that is known to 1e-5 depends on the last bit
        self.clip = 100.0 if autocast else 1e-4
        size = {"height": 32, "width": 32, "max_sequence_length": 12}
        more = {"tuning": "full", "keep_base": False, "truncate_timesteps": True}
        policy = policies.load(directory, **size, **more, dtype=autocast or torch.float32)
        options = [*COMMON, *overrides, f"algorithm.clip_range={self.clip}"]
        ours = trainer(None, *options, policy=policy, rewards=REWARDS, prompts=PROMPTS)
        if autocast:  # the latents at which noise enters stay float32 there
            with_precision(ours, Precision(torch.bfloat16, step=torch.bfloat16))
        super().__init__(ours)

    @cached_property
    def measure(self):
        return self.restate(torch.float32) if self.autocast else super().measure

    def restate(self, dtype=None, off=0.0):
        """The same iterations from the formulas, computed in `dtype`, or as ours are."""
        t, dtype = self.ours.t, dtype or self.autocast or torch.float32
        transformer = side_by_side.nudged(self.start, off)
        network = Flux(transformer, [], 8, dtype if dtype != torch.float32 else None)
        learner = Learner.of(t, transformer.parameters())
        result = Restated(learner)
        for iteration in range(2):
            (plan,) = t.plans(iteration)
            noisy = range(plan.branch, plan.merge)
            trained = [i for i in noisy if plan.trains(i)]
            network.text = side_by_side.texts(t, iteration, dtype)
            groups = [
                side_by_side.walked(
                    t, network, iteration, prompt, t.sigmas, self.step, noisy=noisy, dtype=dtype
                )
                for prompt in range(len(network.text))
            ]
            for group in groups:
                self._score(group)
            given = network, learner, groups, trained, t.sigmas, self.step
            window_updates(*given, accumulate=self.accumulate, clip=self.clip)
            result.groups.append(groups)
            result.trained.append(trained)
        return result

    def _score(self, group):
        pictures = self.ours.t.policy.decode(torch.cat([member.final for member in group]))
        advantages = self.mix(torch.stack([reward(pictures, []) for reward in REWARDS.values()]))
        for member, advantage in zip(group, advantages, strict=True):
            member.advantage = advantage
