"""The nano file and the README's lines are the package: the file's weights are equal to the bit
after two iterations, the lines' gradient within rounding."""

from pathlib import Path
from types import SimpleNamespace

import torch

from examples import nano_g2rpo
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.config import recipes
from g2rpo.config.resolve import resolve
from g2rpo.core.data import Batch
from g2rpo.core.flow import sigma_grid
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.train.build import Request, build
from g2rpo.train.updater import Trained
from tests.support.pages import ROOT, blocks
from tests.support.reference import rollout
from tests.support.tolerances import rounding

SMALL = """
algorithm.group_size=3 algorithm.branch_steps=[0,2] algorithm.granularities=[1,2]
sampling.num_steps=4 sampling.batch_size=1 sampling.decode_batch_size=1 trainer.micro_batch_size=1
trainer.prompts_per_iteration=2 trainer.iterations=2 optim.decay=constant optim.ema_decay=0
trackers=[]
"""
"""With rows of one call: sums of larger calls may be taken in another order."""


def test_two_iterations_are_the_packages_to_the_bit(tmp_path):
    assert len(Path(nano_g2rpo.__file__).read_text("utf-8").splitlines()) <= 150
    config = resolve(recipes.recipe_settings("scenes"), SMALL.split())
    trainer = build(Request(config=config, run_dir=tmp_path))
    for _ in range(2):
        trainer.iterate()
    size = {"places": 2, "group": 3, "num_steps": 4, "branch_steps": (0, 2), "rows": 1}
    mine = list(nano_g2rpo.train(iterations=2, **size).parameters())
    theirs = list(trainer.policy.transformer.parameters())
    base = list(nano_g2rpo.Flow(1).network.parameters())
    assert all(map(torch.equal, mine, theirs)) and not all(map(torch.equal, mine, base))
    assert len(mine) == len(theirs) == len(base)


def test_the_readmes_lines_have_the_packages_gradient():
    """One group of the Gaussian policy, advantages not clipped at 5. Both sides do the same float32
    operations but for the eps of group_normalize (1e-8 of a std near .1) and the order of sums:
    roundings of a hundred operations, of numbers up to three times as large as the noise."""
    policy, sigmas, k = GaussianPolicy(size=2), sigma_grid(8, 3.0), 2
    algorithm = GranularGRPO(branch_steps=(k,), tail="closed", advantage_clip=99)
    cond, (plan,) = policy.encode(["0.1"]), algorithm.plans(8)

    def generator(*key):
        return torch.Generator().manual_seed(len(repr(key)))

    def reward(pictures):
        return pictures[:, 0].mean((1, 2))

    def v(x, sigma, prompt=None):
        return policy.velocity(x, sigma.expand(len(x)), cond.rows([0] * len(x)))

    sampled = rollout(policy, cond, sigmas, plan, 12, algorithm.kernel(sigmas), generator)
    scores = torch.stack([reward(policy.decode(each)) for each in sampled.finals])
    advantages = algorithm.advantages(scores[None, None], torch.ones(1))[0]
    (example,) = algorithm.examples(sampled, advantages, generator)
    batch = Batch.of([example], sigmas, first=True)
    values = algorithm.loss(batch, Trained(policy, cond)).values
    (expected,) = torch.autograd.grad(values.mean(), policy.mean)

    walk = SimpleNamespace(velocity=torch.no_grad()(v))  # what `finish` of the nano file asks
    names = {
        **vars(nano_g2rpo),
        **{"v": v, "sigmas": sigmas, "k": k, "c": algorithm.clip_range, "picture": policy.decode},
        "reward": reward,
        "x": policy.noise([generator(0, "initial")]),
        "noise": torch.randn(12, 3, 2, 2, generator=generator(0, "branch", k, k)),
        "ode": lambda x, start, size: nano_g2rpo.finish(walk, x, sigmas, start, size, None),
    }
    readme = blocks((ROOT / "README.md").read_text("utf-8"))
    (lines,) = [block.code for block in readme if block.language == "python"]
    exec(lines, names)
    (found,) = torch.autograd.grad(names["loss"], policy.mean)
    assert expected.abs().max() > 0
    close = rounding(100, size=3 * expected.abs().max())
    torch.testing.assert_close(found, expected, **close)
