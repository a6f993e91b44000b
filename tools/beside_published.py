"""Runs functions of published code beside this package's on the same latents, scores and tiny FLUX, and prints how far apart.

The published code is not part of this package. Clone it first, and name the folders:

    git clone https://github.com/Bujiazi/GRPO-Series
    python -m tools.beside_published pave_grpo=GRPO-Series

tests/published holds restatements of the same formulas, for a machine that has no clones.
"""

import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch

from g2rpo.errors import UserError
from g2rpo.training.trainer import Trainer
from tests.published.second_half import Beside, Models, Objective, Seen, tiny
from tests.tiny import save_flux

GROUP, STEPS = 4, (0, 3)


def pave_grpo(folder: Path, code: Path) -> Beside:
    """src/method_pavegrpo.py: compute_loss."""
    method = _module(code, "src.method_pavegrpo")
    options = ("algorithm.name=pave_grpo", f"algorithm.group_size={GROUP}", f"algorithm.branch_steps={list(STEPS)}")
    trainer = tiny(folder, *options)
    args = Namespace(group_size=GROUP, sde_stepidx=list(STEPS), sde_eta=0.8, seg_list=[2, 3], adv_clip_max=5.0)
    return Beside(trainer, _groups(trainer, lambda models, *given: method.compute_loss(args, models.trained, *given)))


def _groups(trainer: Trainer, loss: Callable) -> Objective:
    """An objective of GRPO-Series: a loss for each prompt and branch step, with the published code's own arguments."""

    def terms(models: Models, seen: Seen) -> list[Callable[[], torch.Tensor]]:
        made = []
        for prompt, text in enumerate(models.text):
            own = [index for index, rollout in enumerate(seen.rollouts) if rollout.prompt == prompt]
            rewards = torch.cat([torch.zeros(1), *(seen.rewards[index, 0, 0] for index in own)])  # the anchor's comes first
            latents: list = [None] * (max(STEPS) + 1)
            landed = {}
            for index in own:
                (taken,) = seen.rollouts[index].transitions
                latents[taken.step], landed[str(taken.step)] = taken.x, [taken.x_next]
            places = torch.cartesian_prod(torch.arange(1), torch.arange(8), torch.arange(8)).float()
            given = (rewards, text["sequence"], text["pooled"], torch.full([1], 3.5), trainer.sigmas)
            made += [
                lambda step=step, anchor=[latents, places], landed=landed, given=given: (
                    loss(models, anchor, landed, *given, step) / len(seen.rollouts)
                )
                for step in STEPS
            ]
        return made

    return terms


def _module(code: Path, name: str):
    """A module of a clone; only what was named at the command line is imported."""
    if not (code / Path(*name.split("."))).with_suffix(".py").is_file():
        raise UserError(f"{code}: has no {name.replace('.', '/')}.py; clone the repository that this tool's help names")
    sys.path.insert(0, str(code))
    try:
        return __import__(name, fromlist=["_"])
    finally:
        sys.path.remove(str(code))


METHODS = {"pave_grpo": pave_grpo}


def main(words: list[str]) -> None:
    if not words or any(word.partition("=")[0] not in METHODS for word in words):
        raise SystemExit(f"{__doc__}\nNames: {', '.join(METHODS)}")
    print("| algorithm | function | loss | gradient | weights after 3 updates |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        save_flux(Path(folder))
        for name, code in (word.split("=", 1) for word in words):
            found = METHODS[name](Path(folder), Path(code)).differences()
            print(f"| {name} | {METHODS[name].__doc__} |", " | ".join(f"{value:.1e}" for value in found.values()), "|")


if __name__ == "__main__":
    main(sys.argv[1:])
