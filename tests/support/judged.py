"""Runs on judged pictures with the Gaussian policy."""

from pathlib import Path

import torch

from g2rpo.core.data import Judged, Prompt
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.training.trainer import Trainer
from tests.support.runs import brightness, config, darkness


class Encodes(GaussianPolicy):
    """Its latents of a picture are the picture's mean, as the logit that its decoder inverts."""

    def latents_of(self, files):
        means = [torch.tensor(int(path[-5]) / 10).logit() for path in files]
        return torch.stack([mean.expand(3, self.size, self.size) for mean in means])


def pairs(count, folder=Path("none")):
    """Pairs of a brighter and a darker picture, which need not exist."""
    files = [[str(folder / f"{number}_{level}.png") for level in (7, 3)] for number in range(count)]
    return [
        Judged.of(Prompt(str(number / 100)), own, (True, False)) for number, own in enumerate(files)
    ]


def marks_of(pairs):
    return [
        Judged.of(one, [path], [good])
        for one in pairs
        for path, good in zip(one.pictures, one.good, strict=True)
    ]


def trainer(name, prompts, *overrides, run_dir=None, policy=None, **more):
    return Trainer(
        config=config(f"algorithm.name={name}", "optim.learning_rate=0.02", *overrides),
        policy=policy or Encodes(),
        rewards={},
        prompts=prompts,
        heldout=["0", "0.1", "0.2"],
        judges={"bright": brightness, "dark": darkness},
        run_dir=run_dir,
        **more,
    )
