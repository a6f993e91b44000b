"""A whole run on the Gaussian policy: seconds instead of minutes, every line of the trainer the
same."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from g2rpo.config.resolve import resolve
from g2rpo.config.schema import Config
from g2rpo.core.data import Cond, Precision
from g2rpo.core.distributed import ALONE
from g2rpo.core.images import read_inputs
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.models.sharding import Replicated
from g2rpo.train.collector import Groups
from g2rpo.train.listeners import Ask, Listener
from g2rpo.train.run.folder import Run
from g2rpo.train.trainer import Trainer
from tests.support.tolerances import UNIT, Tolerance, near, reordered

PLAIN = {
    "recipe": "gaussian",
    "policy": {"path": "none", "height": 4, "width": 4},
    "algorithm": {"group_size": 6, "branch_steps": [0, 1, 2], "granularities": [1, 2]},
    "rewards": {"bright": 1.0},
    "prompts": {"train": "none"},
    "sampling": {"num_steps": 6, "batch_size": 32},
    "optim": {"learning_rate": 0.05},
    "trainer": {"iterations": 4, "prompts_per_iteration": 2, "checkpoint_every": 2},
    "evaluation": {"prompts": "none", "num_prompts": 3, "every": 2, "rewards": {"dark": 1.0}},
}
ADVANTAGES = 4 * UNIT / 0.004
"""The share of themselves by which advantages of such a run, and gradients that they multiply,
differ when it is computed otherwise. Groups spread by 0.004 or more. Scores, of 1/2, are 4 units of
rounding apart: one of their own, and the 60 of each pixel, by chance 6 sqrt(2 x 60) / 4 after a
sigmoid, over sqrt(48) in the mean of so many."""
PROMPTS = ["0", "0.1", "0.2", "-0.1", "-0.2"]


class Clips(GaussianPolicy):
    """A policy whose pictures have a time axis: frames, each brighter than the one before, that
    last `seconds`."""

    seconds = 1.5

    def __init__(self, frames=3, **options):
        super().__init__(**options)
        self.frames = frames

    def decode(self, x):
        images = super().decode(x)
        return torch.stack([images * share for share in torch.linspace(0.5, 1, self.frames)], 1)


class Editing(GaussianPolicy):
    """Its pictures are as bright as the input picture of the prompt: from black, sigmoid(-2), to
    white, sigmoid(2)."""

    input_pictures = (1, 1)

    def encode(self, prompts):
        means = [np.asarray(read_inputs(prompt)[0]).mean() for prompt in prompts]
        return Cond({"shift": torch.tensor(means).float() / 64 - 2})


class Loaded:
    """A policy in the place of a pipeline that `load.load_pipeline` has read; it has no
    tokenizers."""

    def __init__(self, policy):
        self.text = policy
        policy.park, policy.at_work, policy.guided = lambda: None, nullcontext, False

    def policy(self, stored):
        self.text.encode = stored.encode
        return self.text

    def warn_of(self, prompts, notify): ...


def picture(path, colour=(255, 0, 0), size=(6, 4), **how):
    """A picture of one colour at `path`, which is returned as text."""
    Image.new("RGB", size, colour).save(path, **how)
    return str(path)


def brightness(images, prompts):
    """Added in float64, so rounded once in whatever order."""
    return images.flatten(1).mean(1, dtype=torch.float64).float()


brightness.differentiable = True  # type: ignore[attr-defined]


def darkness(images, prompts):
    return -brightness(images, prompts)


def fits(name: str) -> list[str]:
    """Overrides with which an algorithm's defaults fit a few steps."""
    return (
        ["algorithm.branch_steps=[0,2]", "algorithm.merged_steps=[1,2]"] if name == "e_grpo" else []
    )


def config(*overrides: str) -> Config:
    return resolve(PLAIN, overrides)


def trainer(
    run_dir: Path | None,
    *overrides: str,
    policy=None,
    rewards=None,
    prompts=PROMPTS,
    world=ALONE,
    sharding=None,
    **more,
) -> Trainer:
    return Trainer(
        config=config(*overrides),
        policy=policy or GaussianPolicy(),
        rewards={"bright": brightness} if rewards is None else rewards,
        prompts=prompts,
        run_dir=run_dir,
        shards=sharding or Replicated(world),
        **{"heldout": prompts[:3], "judges": {"dark": darkness}, **more},
    )


def with_precision(t: Trainer, precision: Precision) -> Trainer:
    """`t`, whose rollouts and training passes have dtypes that no config has."""
    of_rollouts = property(lambda config: precision)
    kind = type("Rounded", (Config,), {"precision": of_rollouts})
    t.collector.config = kind.model_construct(**vars(t.config))
    t.updater.step_dtype = precision.step
    return t


def smooth(t):
    """The trainer `t` with an epsilon of Adam's that is a thousand times gradients, and a rate that
    is larger by as much: what is rounded moves weights by no more than its share."""
    t.learner.learning_rate *= 1000
    t.learner.optimizer.param_groups[0]["eps"] = 1.0
    return t


def resumed(*arguments, **options) -> Trainer:
    """`trainer(...)`, from its run directory's newest usable checkpoint."""
    t = trainer(*arguments, **options)
    t.resume()
    return t


def fallen_back(run_dir: Path, *overrides: str) -> tuple[Trainer, str]:
    """`resumed` at iteration 2, because the newer checkpoint is of no use; and what is said about
    that."""
    t = trainer(run_dir, *overrides)
    (complaint,) = t.resume()
    assert t.iteration == 2
    return t, complaint


class Asking(Listener):
    """Asks for something once, after an iteration of a trainer, and notes what it hears."""

    def __init__(self, t: Trainer, ask: Ask, after: int):
        self.t, self.ask, self.after = t, ask, after
        self.heard: list[tuple] = []

    def hear_groups(self, groups, advantages):
        self.groups = groups
        self.heard.append(("groups", len(groups.prompts), advantages.shape[1]))

    def hear(self, row, evaluation):
        assert (row["kind"] == "eval") == (evaluation is not None)
        self.heard.append((row["kind"], row["iteration"], "alarms" in row))

    def asks(self):
        if self.t.iteration != self.after:
            return Ask.NOTHING
        asked, self.ask = self.ask, Ask.NOTHING
        return asked


def asking(t: Trainer, ask: Ask, after: int) -> Asking:
    """Such a listener, after the trainer's own."""
    mine = Asking(t, ask, after)
    t.listeners = [*t.listeners, mine]
    return mine


def groups_of(t: Trainer) -> Groups:
    """Those of one iteration, which is learnt from."""
    heard = asking(t, Ask.NOTHING, after=0)
    t.iterate()
    return heard.groups


def mean(t: Trainer) -> Tensor:
    """The Gaussian policy's weights as they are now."""
    return t.policy.mean.detach().clone()


def cut(t: Trainer, kind: str, iteration: int) -> None:
    """Trains until the row of `kind` after `iteration` has come, and no further, as if the process
    were killed then."""
    for row in t.train():
        if (row["kind"], row["iteration"]) == (kind, iteration):
            return


def finished(t: Trainer) -> Trainer:
    list(t.train())
    t.finish()
    return t


def untimed(rows) -> list[dict]:
    """Rows of a log without what differs from one run to the next."""
    return [
        {key: value for key, value in row.items() if not key.startswith(("seconds", "memory"))}
        for row in rows
    ]


def reordered_row(row: dict) -> dict:
    """`row` for `==`, of the same run with its sums in another order. Of 36 members or more one may
    be on the other side of a limit. The loss is a mean of at most 144 advantages of 1.6, which is 0,
    times ratios, which are 0.006 from 1. All else follows from advantages, their means and
    deviations."""
    share = 2 * ADVANTAGES

    def close(name, value):
        if name.endswith(("clip_fraction", "agreement")):
            return near(value, Tolerance(rtol=0.0, atol=1 / 36), nan_ok=True)
        beside = 0.0
        if name in ("loss", "ratio_deviation"):
            beside = reordered(144, 1.6)["atol"] + share * 1.6 * 0.006
        return near(value, Tolerance(rtol=share, atol=beside), nan_ok=True)

    return {
        name: close(name, value) if isinstance(value, float) else value
        for name, value in row.items()
    }


def log(run_dir: Path) -> list[dict]:
    """A run's log, `untimed`."""
    return untimed(Run(run_dir).read_log())
