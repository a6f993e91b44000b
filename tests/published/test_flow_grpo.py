"""Flow-GRPO's whole training step, KL term and all, against a restatement from its published
formulas, on the tiny SD3."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from tests.published import side_by_side
from tests.published.neighbours import (
    Learner,
    StableDiffusion3,
    batch_normalised,
    flow_grpo_updates,
    flow_sde,
)
from tests.published.side_by_side import Restated, agree
from tests.published.windows import tilt
from tests.support import policies
from tests.support.runs import trainer

pytestmark = pytest.mark.slow

PROMPTS = ["a red circle", "two blue square left of a circle", "a square", "blue"]
GROUP, STEPS = 4, 5
SETTING = (
    "algorithm.name=flow_grpo",
    f"algorithm.group_size={GROUP}",
    "algorithm.update_every=2",
    f"sampling.num_steps={STEPS}",
    "sampling.shift=scheduler",
    "trainer.prompts_per_iteration=4",
    "rewards={tilt: 1.0}",
    "evaluation.rewards={}",
    "optim.learning_rate=7e-4",
)


def partial_tilt(images, prompts):
    """The last prompt's pictures are all alike to it."""
    return torch.where(
        torch.tensor([prompt == PROMPTS[-1] for prompt in prompts]), 0.5, tilt(images, prompts)
    )


SDE = flow_sde(0.7)


class Walks(side_by_side.Pair):
    """Two iterations with a KL term of weight `beta`."""

    def __init__(self, directory, overrides, beta, per_time):
        self.beta, self.per_time = beta, per_time
        size = {"height": 32, "width": 32, "max_sequence_length": 12}
        policy = policies.load(directory, **size, lora_rank=4, guidance_scale=4.5)
        # an adapter that has moved, or the first KL is 0 whatever its formula
        with torch.no_grad():
            for p in policy.trainable_parameters():
                p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
        options = (*SETTING, f"algorithm.kl_weight={beta}", *overrides)
        super().__init__(
            trainer(None, *options, policy=policy, rewards={"tilt": partial_tilt}, prompts=PROMPTS)
        )

    def restate(self, off=0.0, beta=None):
        t, transformer = self.ours.t, side_by_side.nudged(self.start, off)
        untrained = side_by_side.nudged(self.start, off)
        untrained.disable_adapters()
        network, base = StableDiffusion3(transformer, []), StableDiffusion3(untrained, [])
        learner = Learner.of(t, (p for p in transformer.parameters() if p.requires_grad))
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        scheduler.set_timesteps(STEPS)
        sigmas, result = scheduler.sigmas, Restated(learner)
        for iteration in range(2):
            network.text = base.text = side_by_side.texts(t, iteration, torch.float32)
            noise = {"noisy": range(STEPS), "dtype": torch.float32, "own": True}
            groups = [
                side_by_side.walked(t, network, iteration, prompt, sigmas, SDE, **noise)
                for prompt in range(len(PROMPTS))
            ]
            scores = torch.stack([*map(self._scores, groups, t.prompts_of(iteration))])
            for group, advantages in zip(
                groups, batch_normalised(scores).clamp(-5, 5), strict=True
            ):
                for member, advantage in zip(group, advantages, strict=True):
                    member.advantage = advantage
            term = {"beta": self.beta if beta is None else beta, "per_time": self.per_time}
            flow_grpo_updates(network, base, learner, groups, sigmas, SDE, parts=2, **term)
            result.groups.append(groups)
            result.trained.append(list(range(STEPS - 1)))
        return result

    def _scores(self, group, words):
        pictures = self.ours.t.policy.decode(torch.cat([member.final for member in group]))
        return partial_tilt(pictures, [words] * GROUP)


@pytest.fixture(scope="module", params=["g", "std"])
def pair(request, sd3_directory):
    """The KL term as the code has it, or the paper; its weight is large enough to be seen."""
    return Walks(
        sd3_directory,
        ("algorithm.name=tests.support.own_algorithms:PerStd",) if request.param == "std" else (),
        beta=1.0,
        per_time=request.param == "g",
    )


def test_samples_scores_gradients_and_weights_are_the_published_ones(pair):
    agree(pair)


def test_the_setting_has_what_is_to_be_tested(pair):
    """All steps are stochastic and the last is not trained; a silent group is filtered out; the KL
    term is a good part of a gradient; two updates an iteration."""
    first = pair.restated.groups[0]
    assert [sorted(member.log_probs) for member in first[0]] == [list(range(STEPS))] * GROUP
    assert pair.ours.collected[0][1].rollouts[0].transitions[-1].step == STEPS - 2
    assert sum(all(member.advantage == 0 for member in group) for group in first) == 1
    assert len(pair.ours.gradients) == 4
    with_kl, without = (
        restated.learner.updates[0].flat for restated in (pair.restated, pair.restate(beta=0.0))
    )
    assert side_by_side.distance(without, with_kl) > 0.1
