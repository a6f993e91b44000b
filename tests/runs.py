"""A whole run on the Gaussian policy: seconds instead of minutes, every line of the trainer the same."""

from pathlib import Path

from g2rpo.config.resolve import resolve
from g2rpo.config.schema import Config
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.runtime.distributed import ALONE
from g2rpo.runtime.sharding import Replicated
from g2rpo.training.trainer import Trainer

PLAIN = {
    "recipe": "gaussian",
    "policy": {"path": "none", "height": 4, "width": 4},
    "algorithm": {"group_size": 6, "branch_steps": [0, 1, 2], "granularities": [1, 2]},
    "rewards": {"bright": 1.0},
    "prompts": {"train": "none"},
    "sampling": {"num_steps": 6, "batch_size": 32},
    "optim": {"learning_rate": 0.05},
    "trainer": {"iterations": 4, "prompts_per_iteration": 2, "checkpoint_every": 2},
    "evaluation": {"prompts": "none", "num_prompts": 3, "every": 2, "rewards": {"dark": 1.0}, "pictures": 2},
}
PROMPTS = ["0", "0.1", "0.2", "-0.1", "-0.2"]


def brightness(images, prompts):
    return images.flatten(1).mean(1)


def darkness(images, prompts):
    return -brightness(images, prompts)


def config(*overrides: str) -> Config:
    return resolve(PLAIN, overrides)


def trainer(
    run_dir: Path | None, *overrides: str, policy=None, rewards=None, prompts=PROMPTS, world=ALONE, sharding=None, **more
) -> Trainer:
    return Trainer(
        config=config(*overrides),
        policy=policy or GaussianPolicy(),
        rewards=rewards or {"bright": brightness},
        prompts=prompts,
        run_dir=run_dir,
        shards=sharding or Replicated(world),
        **{"heldout": prompts[:3], "judges": {"dark": darkness}, **more},
    )
