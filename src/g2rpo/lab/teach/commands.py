"""`g2rpo teach`, a session in the browser or its answers from a file; and `g2rpo agree`, for what
it stored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from g2rpo.app.build import Request, build
from g2rpo.app.evaluate import reward_table
from g2rpo.app.events import Emit, Line, Results, cautions, silent
from g2rpo.app.serving import Address
from g2rpo.assembly.adapters import completed
from g2rpo.assembly.checks import check, check_rewards_alone
from g2rpo.assembly.components import pick_device
from g2rpo.assembly.config import load_config
from g2rpo.assembly.rewards import build_rewards
from g2rpo.config.schema import Config
from g2rpo.core.errors import UserError
from g2rpo.core.input_pictures import cut, open_picture
from g2rpo.core.statistics import Interval
from g2rpo.lab.teach.session import OVERRIDES, Lesson, Session
from g2rpo.lab.web import needing_gradio
from g2rpo.prompts.judged import sharing
from g2rpo.rewards import votes
from g2rpo.rewards.taste import agreement_of, mean_agreement
from g2rpo.rollout.scoring import score
from g2rpo.run.run import Run, entered
from g2rpo.runtime.distributed import joined, number_in

HERE = Address("127.0.0.1", 7861)
GUARDED = 0.1
"""The share of its weight that a guard keeps: with more it is a second aim (studies/teach.md)."""
ADAPTER_RATE = 3
"""The learning rate of an adapter, as a multiple of that of all weights, with which both learn
alike (scenes)."""
UNGUARDED = {
    "scenes": [
        "rewards.scene_accuracy=",
        "rewards.scene_preference=1",
        "evaluation.rewards.scene_preference=",
    ],
    "words": ["rewards.ocr="],
}
"""What takes from these recipes the guard that says which pictures are right: it would teach that,
whatever is clicked."""


def teach_config(recipe: str, overrides: Sequence[str], notify: Callable[[str], None]) -> Config:
    """The config of a session: a recipe with those of `OVERRIDES` that its algorithm has and the
    reward `clicks`, beside which all other rewards, the guards, together weigh a tenth. A weight of the
    clicks among `overrides` leaves guards as they are. Where the recipe trains all weights, an adapter takes
    `ADAPTER_RATE` times its rate. A config with the reward `clicks` is a session's, and stays as it
    is."""
    plain = load_config(recipe, [])
    if "clicks" in plain.rewards:
        return load_config(recipe, overrides, notify)
    asked = load_config(recipe, ["rewards.clicks=1", *overrides])
    own = ["rewards.clicks=1"]
    for override in OVERRIDES:
        group, _, name = override.partition("=")[0].rpartition(".")
        if group != "algorithm" or hasattr(asked.algorithm, name):
            own.append(override)
    if plain.policy.tuning == "full":
        own.append(f"optim.learning_rate={ADAPTER_RATE * plain.optim.learning_rate:g}")
    named = {override.partition("=")[0] for override in overrides}
    if not named & {"rewards.clicks", "rewards.clicks.weight"}:
        overrides = [*overrides, *_guarding(asked)]
    return load_config(recipe, [*own, *overrides], notify)


def _guarding(config: Config) -> list[str]:
    """Overrides that make guards of the other rewards, ten times as much as which the clicks weigh."""
    guards = {name: one.weight for name, one in config.rewards.items() if name != "clicks"}
    own = [f"rewards.{name}.weight={GUARDED * weight:.4g}" for name, weight in guards.items()]
    return (
        [*own, f"rewards.clicks.weight={sum(guards.values()):.4g}"] if sum(guards.values()) else []
    )


def _asked(
    recipe: str, overrides: Sequence[str], run_dir: Path | None, notify: Callable[[str], None]
) -> tuple[Config, Path | None, bool]:
    """The config of a session, its folder, and whether `recipe` is a session that goes on."""
    begun = Run(Path(recipe))
    if not begun.config.is_file():
        return completed(teach_config(recipe, overrides, notify), notify), run_dir, False
    if not begun.votes.is_file():
        raise UserError(
            f"{recipe}: was not begun by g2rpo teach (it has no votes.jsonl); name a recipe"
        )
    return begun.read_config(overrides, notify, mention=False), begun.path, True


@contextmanager
def opened(
    recipe: str,
    overrides: Sequence[str] = (),
    run_dir: Path | None = None,
    *,
    stored: Path | None = None,
    prompt: str = "",
    background: bool = False,
    emit: Emit = silent,
) -> Iterator[Session]:
    """A session that has begun, in a run directory of its own, on a recipe; or on a run that `g2rpo
    teach` began, whose answers are repeated first. `stored` is a file of answers to repeat as
    well."""
    notify = cautions(emit)
    notes: list[str] = []
    config, run_dir, resume = _asked(recipe, overrides, run_dir, notes.append)
    repeated = votes.read(stored) if stored is not None else []
    with joined(pick_device(config.policy.device)) as world, ExitStack() as stack:
        if not world.is_main:
            emit = silent
        for note in notes:
            cautions(emit)(note)
        chosen = (
            stack.enter_context(entered(config, run_dir, resume, notify)) if world.is_main else ""
        )
        folder = Path(world.broadcast_text(str(chosen)))
        session = Session(
            trainer=build(
                Request(config=config, run_dir=folder, world=world, notify=notify, emit=emit)
            ),
            background=background,
            prompt=prompt,
            notify=notify if world.is_main else lambda words: None,
        )
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
    where: Address = HERE,
    stop: threading.Event | None = None,
    emit: Emit = silent,
) -> Path:
    """Serves a session until it is finished in the page, interrupted, or `stop` is set; with
    `stored` answers it only repeats them. Returns the run directory."""
    opening = partial(
        opened, recipe, overrides, run_dir, stored=stored, prompt=prompt or "", emit=emit
    )
    lesson = Lesson(partial(opening, background=stored is None))
    follows = number_in("RANK", 0) > 0  # under torchrun rank 0 serves the page
    serves = stored is None and not follows
    if serves:
        # what is wrong with the config is said first, and a taken port before anything is loaded
        check(_asked(recipe, overrides, run_dir, lambda note: None)[0])
        where.check()
        with needing_gradio("teach"):
            from g2rpo.lab.teach.page import teach_view
            from g2rpo.lab.web.page import page_of, serve_until
    with closing(lesson):
        session = lesson.begin()
        trainer = session.trainer
        if follows:
            session.follow()
        if serves:
            ended = stop or threading.Event()
            title = f"Teach {trainer.config.recipe or 'a model'}"
            page = page_of(
                title, "g2rpo teach", "", {"Teach": partial(teach_view, lesson, ended.set)}
            )
            ends = '"Finish", or Ctrl-C, ends the session and keeps what was learnt'
            serve_until(ended, page, where, emit, ends)
            emit(Line("comparing base and taught ..."))
        ended_with = lesson.finish()
    if not follows:
        votes.write_pairs(trainer.run.path)
    if ended_with is not None and not follows:
        shown = list(trainer.rewards), trainer.config.policy.kind is not None
        emit(Results(trainer.run.path, ended_with[1], trainer.heldout, *shown))
    return trainer.run.path


def agree(source: Path, rewards: Mapping[str, object]) -> dict[str, Interval]:
    """Of a session, or another source of pairs (`votes.judged_in`). By reward the share of pairs of
    a liked and another picture of a group that it orders as the person did, ties counting one half:
    mean over the groups of a session, or pairs that share pictures, and the 95 % interval of
    `agreement_interval`. A name without settings is the session's own reward or judge of that name,
    else a kind with its defaults. UserError for a source without answers."""
    own: dict[str, object] = {}
    if Run(source).config.is_file():
        config = Run(source).read_config()
        own |= {
            name: one.model_dump(mode="json")
            for name, one in {**config.evaluation.rewards, **config.rewards}.items()
        }
    table = reward_table({name: entry or own.get(name, {}) for name, entry in rewards.items()})
    if any(entry.kind == "clicks" and "run" not in entry.options for entry in table.values()):
        raise UserError(
            "clicks: is fitted to these answers, so they cannot judge it; the page of a session shows its agreement"
        )
    check_rewards_alone(table)
    answered = list(_answered(source))
    built = build_rewards(table, pick_device("auto"))
    shares: dict[str, dict[int, list[float]]] = {name: {} for name in built}
    for group, prompt, liked, images in answered:
        scores = score(built, images, [prompt] * len(images), batch_size=16)
        for name, values in zip(built, scores, strict=True):
            if not values.isnan().any():
                share = agreement_of(values.double().numpy(), liked)
                shares[name].setdefault(group, []).append(share)
    return {
        name: mean_agreement([float(np.mean(values)) for values in groups.values()])
        for name, groups in shares.items()
    }


def _answered(source: Path) -> Iterator[tuple[int, str, Sequence[int], Tensor]]:
    """(group, prompt, liked members, pictures [G, 3, H, W]) of a session's answers, or of pairs, at
    the size of the chosen picture."""
    if (session := votes.session_of(source)) is not None:
        for group, (vote, images) in enumerate(votes.answered(session)):
            yield group, vote.prompt, vote.liked, images
        return
    pairs = votes.judged_in(source, "pairs")
    for group, pair in zip(sharing(pairs), pairs, strict=True):
        width, height = open_picture(pair.pictures[0], "pairs").size
        yield group, pair, (0,), torch.cat([cut(path, width, height) for path in pair.pictures])
