"""`g2rpo teach`: a session in the browser, or its answers from a file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from g2rpo.config.read import completed, load_config
from g2rpo.config.schema import Config
from g2rpo.core.errors import UserError
from g2rpo.core.events import Emit, Line, Results, cautions, silent
from g2rpo.lab.serving import Address, needing_gradio
from g2rpo.lab.teach import rounds
from g2rpo.lab.teach.session import CLICKS, Session
from g2rpo.train.build import Request, build
from g2rpo.train.checks import check
from g2rpo.train.run.folder import Run, entered

THIS_MACHINE = Address("127.0.0.1", 7861)
TEACH_OVERRIDES = (
    "rewards.clicks={kind: pairs}",
    "policy.tuning=lora",
    "algorithm.name=g2rpo",
    "algorithm.granularities=[1]",
    "algorithm.branch_steps=[0,1,2]",
    "algorithm.branch_schedule=turns",
    "sampling.tails.forecast=true",
    "trainer.prompts_per_iteration=4",
    "optim.decay=constant",
    "optim.ema_decay=0",
    "evaluation.num_prompts=96",
    "alarms.decline=off",
    "alarms.hacking=off",
)
"""What a session changes in a recipe, before the user's overrides. The two alarms compare scores of
the reward `clicks`, whose meaning changes with every answer."""
GUARDS_WEIGHT = 0.1
"""The weight of all guards together, that of the clicks being 1: with more they are a second aim
(studies/teach.md)."""
ADAPTER_RATE = 3
"""The learning rate of an adapter, as a multiple of that of all weights, with which both learn
alike (scenes)."""


def teach_config(recipe: str, overrides: Sequence[str], notify: Callable[[str], None]) -> Config:
    """The config of a session: a recipe with `TEACH_OVERRIDES`, whose other rewards guard what else is good,
    with a tenth of the weight of the clicks. A weight of the clicks among `overrides` leaves guards
    as they are. Where the recipe trains all weights, an adapter takes `ADAPTER_RATE` times its rate.
    The config of a session stays as it is."""
    plain = load_config(recipe, [])
    if CLICKS in plain.rewards:
        return load_config(recipe, overrides, notify)
    named = dict(override.split("=", 1) for override in overrides if "=" in override)
    if named.get("algorithm.name", "g2rpo") != "g2rpo":
        raise UserError(f"teach: learns by g2rpo, not by algorithm.name={named['algorithm.name']}")
    own = list(TEACH_OVERRIDES)
    if plain.policy.tuning == "full":
        own.append(f"optim.learning_rate={ADAPTER_RATE * plain.optim.learning_rate:g}")
    config = load_config(recipe, [*own, *overrides], notify)
    if named.keys() & {"rewards.clicks", "rewards.clicks.weight"}:
        return config
    guards = {name: one.weight for name, one in config.rewards.items() if name != CLICKS}
    scale = GUARDS_WEIGHT / (sum(guards.values()) or 1.0)
    weighted = {
        name: config.rewards[name].model_copy(update={"weight": float(f"{scale * weight:.4g}")})
        for name, weight in guards.items()
    }
    return config.model_copy(update={"rewards": {**config.rewards, **weighted}})


@contextmanager
def opened(
    recipe: str,
    overrides: Sequence[str] = (),
    run_dir: Path | None = None,
    *,
    stored: Path | None = None,
    where: Address | None = None,
    emit: Emit = silent,
) -> Iterator[Session]:
    """A session that has begun, in a run directory of its own, on a recipe; or on a run that `g2rpo
    teach` began, whose answers are repeated first. `stored` is a file of answers to repeat as
    well. With an address, which is tried before anything loads, nobody waits for learning."""
    notify, begun = cautions(emit), Run(Path(recipe))
    resume = begun.config.is_file()
    if resume and not begun.votes.is_file():
        raise UserError(
            f"{recipe}: was not begun by g2rpo teach (it has no votes.jsonl); name a recipe"
        )
    if resume and run_dir is not None:
        raise UserError(f"--run-dir is for a recipe; {recipe} goes on where it is")
    if resume:
        config, run_dir = begun.read_config(overrides, notify, mention=False), begun.path
    else:
        config = completed(teach_config(recipe, overrides, notify), notify)
    repeated = rounds.read_votes(stored) if stored is not None else []
    if where is not None:
        check(config)  # a taken port hides no mistake in the config
        where.check()
    with entered(config, run_dir, resume, notify) as folder:
        request = Request(config=config, run_dir=folder, notify=notify, emit=emit)
        session = Session(trainer=build(request), background=where is not None, notify=notify)
        with session.begun():
            session.repeat(repeated)
            yield session


def teach(
    recipe: str,
    overrides: Sequence[str] = (),
    run_dir: Path | None = None,
    *,
    stored: Path | None = None,
    where: Address = THIS_MACHINE,
    stop: threading.Event | None = None,
    emit: Emit = silent,
) -> Path:
    """Serves a session until it is finished in the page, interrupted, or `stop` is set; with
    `stored` answers it only repeats them. Returns the run directory."""
    serves, ended = stored is None, stop or threading.Event()
    if serves:
        with needing_gradio("teach"):
            from g2rpo.lab.page import page_of, serve_until
            from g2rpo.lab.teach.page import teach_view
    address = where if serves else None
    with opened(recipe, overrides, run_dir, stored=stored, where=address, emit=emit) as session:
        trainer = session.trainer
        if serves:
            views = {"Teach": partial(teach_view, session, ended.set)}
            title = f"Teach {trainer.config.recipe or 'a model'}"
            ends = '"Finish", or Ctrl-C, ends the session and keeps what was learnt'
            serve_until(ended, page_of(title, "g2rpo teach", "", views), where, emit, ends)
            emit(Line("comparing base and taught ..."))
        table = session.finish()
    shown = list(trainer.rewards), trainer.config.policy.kind is not None
    emit(Results(trainer.run.path, table, trainer.heldout, *shown))
    return trainer.run.path
