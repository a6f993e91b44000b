"""`g2rpo teach`, a session in the browser or its answers from a file; and `g2rpo agree`, for what it stored."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from g2rpo.app.build import Request, build
from g2rpo.app.evaluate import reward_table
from g2rpo.app.events import Emit, Line, Results, cautions, silent
from g2rpo.app.serving import check_address, token_for
from g2rpo.assembly.adapters import completed
from g2rpo.assembly.components import pick_device
from g2rpo.assembly.config import load_config
from g2rpo.assembly.rewards import build_rewards
from g2rpo.config.schema import Config
from g2rpo.core.errors import UserError
from g2rpo.core.statistics import Interval
from g2rpo.lab.teach.background import Lesson, follow
from g2rpo.lab.teach.session import OVERRIDES, Session
from g2rpo.lab.web import needing_gradio
from g2rpo.rewards import votes
from g2rpo.rewards.taste import agreement_interval, agreement_of
from g2rpo.rewards.votes import Vote
from g2rpo.rollout.scoring import score
from g2rpo.run.run import Run, entered
from g2rpo.runtime.distributed import joined

GUARDED = 0.5
"""The weight of the clicks, as a share of that of the guards: with equal weights pictures break before a taste is met."""
GROUPS_AHEAD = 2
"""Groups that lie ready: one is shown while the answer to the one before is learnt from."""
ADAPTER_RATE = 3
"""The learning rate of an adapter, as a multiple of that of all weights, with which both learn alike (scenes)."""


def teach_config(recipe: str, overrides: Sequence[str], notify: Callable[[str], None]) -> Config:
    """The config of a session: a recipe with `OVERRIDES` and the reward `clicks`, which weighs half as much as all other
    rewards together, the guards. Where the recipe trains all weights, an adapter takes `ADAPTER_RATE` times its rate. A config
    with the reward `clicks` is a session's, and stays as it is."""
    plain = load_config(recipe, [])
    if "clicks" in plain.rewards:
        return load_config(recipe, overrides, notify)
    guards = load_config(recipe, ["rewards.clicks=1", *overrides]).rewards
    weight = GUARDED * sum(reward.weight for name, reward in guards.items() if name != "clicks") or 1  # 1: without a guard
    own = [*OVERRIDES, f"rewards.clicks={weight:g}"]
    if plain.policy.tuning == "full":
        own.append(f"optim.learning_rate={ADAPTER_RATE * plain.optim.learning_rate:g}")
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
    are repeated first. `stored` is a file of answers to repeat as well. `ahead` is `GROUPS_AHEAD`, or that of the answers."""
    notify = cautions(emit)
    begun = Run(Path(recipe))
    if begun.config.is_file():
        if not begun.votes.is_file():
            raise UserError(f"{recipe}: was not begun by g2rpo teach (it has no votes.jsonl); name a recipe")
        config, run_dir, resume = begun.read_config(overrides, notify, mention=False), begun.path, True
    else:
        config, resume = completed(teach_config(recipe, overrides, notify), notify), False
    repeated: list[Vote] = votes.read(stored) if stored is not None else []
    given = {vote.ahead for vote in (votes.read(begun.votes) if resume else []) + repeated}
    if len(given | ({ahead} if ahead is not None else set())) > 1:
        raise UserError(
            f"--ahead {ahead or ''}: these answers were given with {sorted(given)}, on which pictures depend; leave it out"
        )
    ahead = ahead or next(iter(given), GROUPS_AHEAD)
    with joined(pick_device(config.policy.device)) as world, ExitStack() as stack:
        chosen = stack.enter_context(entered(config, run_dir, resume, notify)) if world.is_main else ""
        folder = Path(world.broadcast_text(str(chosen)))
        trainer = build(Request(config=config, run_dir=folder, world=world, notify=notify, emit=emit))
        session = Session(trainer=trainer, ahead=ahead, notify=notify if world.is_main else lambda words: None)
        with session.begun():
            session.repeat(repeated)
            yield session


def teach(
    recipe: str,
    overrides: Sequence[str] = (),
    run_dir: Path | None = None,
    *,
    stored: Path | None = None,
    prompt: str | None = None,
    ahead: int | None = None,
    host: str = "127.0.0.1",
    port: int = 7861,
    token_env: str | None = None,
    stop: threading.Event | None = None,
    emit: Emit = silent,
) -> Path:
    """Serves a session until interrupted, or until `stop` is set, and then finishes the run; with `stored` answers it only
    repeats them. Returns the run directory."""
    opening = partial(opened, recipe, overrides, run_dir, ahead=ahead, stored=stored, emit=emit)
    if int(os.environ.get("RANK", 0)):  # under torchrun rank 0 serves the page
        with opening() as session:
            follow(session, prompt or session.wrong_prompt)
            session.finish()
        return session.trainer.run.path
    token = token_for(host, token_env)
    lesson = Lesson(opening, prompt)
    if stored is None:
        check_address(host, port)
        with needing_gradio("teach"):
            from g2rpo.lab.teach import page
            from g2rpo.lab.web.page import serve_until
    with closing(lesson):
        trainer = lesson.begin().session.trainer
        if stored is None:
            ended = stop or threading.Event()
            built = page.teach_page(lesson, f"Teach {trainer.config.recipe or 'a model'}", ended.set)
            ends = '"Finish", or Ctrl-C, ends the session and keeps what was learnt'
            serve_until(ended, built, host, port, token, emit, ends)
            emit(Line("comparing base and taught ..."))
        _, table = lesson.finish() or (None, {})
    rewards = list(trainer.rewards)
    emit(Results(trainer.run.path, table, trainer.heldout, rewards, trainer.config.policy.kind is not None))
    return trainer.run.path


def agree(directory: Path, rewards: Mapping[str, object]) -> dict[str, Interval]:
    """By reward the share of pairs of a liked and another picture of a group that it orders as the person did, ties counting
    one half: mean over the groups of a session, and the 95 % interval of `agreement_interval`. A name without settings is the
    session's own reward or judge of that name, else a kind with its defaults. UserError for a run without answers."""
    own = _rewards_of(directory)
    table = reward_table({name: entry or own.get(name, {}) for name, entry in rewards.items()})
    if any(entry.kind == "clicks" and "run" not in entry.options for entry in table.values()):
        raise UserError(
            "clicks: is fitted to these answers, so they cannot judge it; the page of a session shows its agreement"
        )
    answered = list(votes.answered(directory))
    built = build_rewards(table, pick_device("auto"))
    shares: dict[str, list[float]] = {name: [] for name in built}
    for vote, images in answered:
        scores = score(built, images, [vote.prompt] * len(images), batch_size=16, members=len(images))
        for name, values in zip(built, scores, strict=True):
            if not values.isnan().any():
                shares[name].append(agreement_of(values.double().numpy(), vote.liked))
    return {name: _interval(values) for name, values in shares.items()}


def _rewards_of(directory: Path) -> dict[str, object]:
    """The settings of a session's rewards and judges by name; none of a folder without a config."""
    if not Run(directory).config.is_file():
        return {}
    config = Run(directory).read_config()
    return {name: one.model_dump(mode="json") for name, one in {**config.evaluation.rewards, **config.rewards}.items()}


def _interval(shares: Sequence[float]) -> Interval:
    around = agreement_interval(shares, 0.95)
    return Interval(float(np.mean(shares)) if shares else math.nan, max(0.0, around.low), min(1.0, around.high), len(shares))
