"""The nano file is the package: after two iterations every weight is equal to the bit."""

from pathlib import Path

import torch

from examples import nano_g2rpo
from g2rpo.app.build import Request, build
from g2rpo.config import recipes
from g2rpo.config.resolve import resolve

SMALL = [
    "algorithm.group_size=3",
    "algorithm.branch_steps=[0,2]",
    "algorithm.granularities=[1,2]",
    "sampling.num_steps=5",
    "sampling.batch_size=1",  # rows of one call: sums of larger calls may be taken in another order
    "sampling.decode_batch_size=1",
    "trainer.micro_batch_size=1",
    "trainer.prompts_per_iteration=2",
    "trainer.iterations=2",
    "optim.decay=constant",
    "optim.ema_decay=0",
    "trackers=[]",
]


def test_it_is_short():
    assert len(Path(nano_g2rpo.__file__).read_text("utf-8").splitlines()) <= 150


def test_two_iterations_are_the_packages_to_the_bit(tmp_path):
    trainer = build(Request(config=resolve(recipes.settings("scenes"), SMALL), run_dir=tmp_path))
    for _ in range(2):
        trainer.iterate()
    nano = nano_g2rpo.train(
        iterations=2, places=2, group=3, num_steps=5, branch_steps=(0, 2), rows=1
    )
    before = nano_g2rpo.Flow(1).network
    moved = 0
    for mine, theirs, base in zip(
        nano.parameters(),
        trainer.policy.policy.transformer.parameters(),
        before.parameters(),
        strict=True,
    ):
        assert torch.equal(mine, theirs)
        moved += int((mine != base).sum())
    assert moved
