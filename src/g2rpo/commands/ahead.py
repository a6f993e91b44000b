"""Work before the work: the embeddings a run will need, so that its text encoders can leave the device."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.filesize import decimal

from g2rpo.commands.progress import counter, say
from g2rpo.config import Config
from g2rpo.embeddings import CachedPolicy
from g2rpo.prompts import PromptOrder
from g2rpo.trainer import Trainer


def encode_ahead(policy: CachedPolicy, prompts: Sequence[str], console: Console) -> bool:
    """Stores the embeddings of `prompts` and parks the text encoders; False, and nothing is parked, if they do not fit.

    One prompt tells how large the rest will be, so a disk that is too small is known at once and stays as free as it was.
    """
    missing = policy.missing(prompts)
    if missing:
        if not policy.fill(missing[:1]):
            return False
        assert policy.store is not None  # fill has stored one
        size = decimal(policy.store.size(missing[0]) * len(missing))
        if not policy.store.fits(len(missing) - 1, like=missing[0]):
            policy.warn(f"embedding cache {policy.store.folder}: {len(missing)} prompts need {size}, more than is free")
            return False
        say(console, f"encoding {len(missing)} prompts, {size} in {policy.store.folder}")
        with counter(console, "prompts") as progress:
            task = progress.add_task("encoding", total=len(missing), completed=1)
            if not policy.fill(missing[1:], lambda: progress.advance(task)):
                return False
    policy.park()
    return True


def prompts_to_come(trainer: Trainer) -> list[str]:
    """The different prompts that this rank will meet in the iterations that are left, and the held-out ones."""
    left = range(trainer.iteration, trainer.config.trainer.iterations)
    return _different([trainer.prompts_of(iteration) for iteration in left], trainer.own_heldout())


def prompts_of_run(config: Config, order: PromptOrder, heldout: Sequence[str]) -> list[str]:
    """The different prompts of a whole run, and the held-out ones."""
    number = config.trainer.prompts_per_iteration
    return _different([order.batch(iteration, number) for iteration in range(config.trainer.iterations)], heldout)


def _different(batches: Sequence[Sequence[str]], heldout: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([*(prompt for batch in batches for prompt in batch), *heldout]))
