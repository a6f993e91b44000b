"""A session from a recipe or from a run that was begun."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from g2rpo.app.build import Request, build
from g2rpo.app.events import Emit, cautions, silent
from g2rpo.assembly.adapters import completed
from g2rpo.assembly.components import pick_device
from g2rpo.assembly.config import load_config
from g2rpo.config.schema import Config
from g2rpo.core.errors import UserError
from g2rpo.lab.teach.session import OVERRIDES, Session
from g2rpo.rewards import votes
from g2rpo.rewards.votes import Vote
from g2rpo.runs.directory import RunDirectory
from g2rpo.runs.lifecycle import entered, read_config
from g2rpo.runtime.distributed import joined

GUARDED = 0.5
"""The weight of the clicks, as a share of that of the guards: with equal weights pictures break before a taste is met."""
AHEAD = 2
"""Groups that lie ready: one is shown while the answer to the one before is learnt from."""
ADAPTER = 3
"""The learning rate of an adapter, as a multiple of that of all weights, with which both learn alike (scenes)."""


def teach_config(recipe: str, overrides: Sequence[str], notify: Callable[[str], None]) -> Config:
    """The config of a session: a recipe with `OVERRIDES` and the reward `clicks`, which weighs half as much as all other
    rewards together, the guards. Where the recipe trains all weights, an adapter takes `ADAPTER` times its rate. A config with
    the reward `clicks` is a session's, and stays as it is."""
    plain = load_config(recipe, [])
    if "clicks" in plain.rewards:
        return load_config(recipe, overrides, notify)
    guards = load_config(recipe, ["rewards.clicks=1", *overrides]).rewards
    weight = GUARDED * sum(reward.weight for name, reward in guards.items() if name != "clicks") or 1  # 1: without a guard
    own = [*OVERRIDES, f"rewards.clicks={weight:g}"]
    if plain.policy.tuning == "full":
        own.append(f"optim.learning_rate={ADAPTER * plain.optim.learning_rate:g}")
    return load_config(recipe, [*own, *overrides], notify)


@contextmanager
def opened(
    recipe: str,
    overrides: Sequence[str] = (),
    run_dir: Path | None = None,
    *,
    ahead: int | None = None,
    stored: Path | None = None,
    emit: Emit = silent,
) -> Iterator[Session]:
    """A session that has begun, in a run directory of its own, on a recipe; or on a run that `g2rpo teach` began, whose answers
    are repeated first. `stored` is a file of answers to repeat as well. `ahead` is `AHEAD`, or that of the answers."""
    notify = cautions(emit)
    begun = RunDirectory(Path(recipe))
    if begun.config.is_file():
        if not begun.votes.is_file():
            raise UserError(f"{recipe}: was not begun by g2rpo teach (it has no votes.jsonl); name a recipe")
        config, run_dir, resume = read_config(begun.path, overrides, notify, mention=False), begun.path, True
    else:
        config, resume = completed(teach_config(recipe, overrides, notify), notify), False
    repeated: list[Vote] = votes.read(stored) if stored is not None else []
    given = {vote.ahead for vote in (votes.read(begun.votes) if resume else []) + repeated}
    if len(given | ({ahead} if ahead is not None else set())) > 1:
        raise UserError(
            f"--ahead {ahead or ''}: these answers were given with {sorted(given)}, on which pictures depend; leave it out"
        )
    ahead = ahead or next(iter(given), AHEAD)
    with joined(pick_device(config.policy.device), config.trainer.rank_timeout_s) as world, ExitStack() as stack:
        chosen = stack.enter_context(entered(config, run_dir, resume, notify)) if world.is_main else ""
        folder = Path(world.broadcast_text(str(chosen)))
        trainer = build(Request(config=config, run_dir=folder, world=world, notify=notify, emit=emit))
        session = Session(trainer=trainer, ahead=ahead, notify=notify if world.is_main else lambda words: None)
        with session.begun():
            session.repeat(repeated)
            yield session
