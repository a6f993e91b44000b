"""The base model's evaluation as a file, which several runs may share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from g2rpo.config.schema import Config
from g2rpo.core.errors import UserError
from g2rpo.core.files import digest_of, whole_file, writing
from g2rpo.evaluation.heldout import (
    Evaluation,
    floors_of,
    load_evaluation,
    load_tensors,
    save_evaluation,
)
from g2rpo.run.files import RunFiles
from g2rpo.run.lock import InUse, held
from g2rpo.runtime.distributed import World

OF_TRAINING = {
    "": ("recipe", "algorithm", "optim", "alarms", "trackers", "prompts"),
    "trainer": (
        "iterations",
        "prompts_per_iteration",
        "micro_batch_size",
        "checkpoint_every",
        "checkpoint_minutes",
        "keep_checkpoints",
    ),
    "evaluation": ("every", "every_minutes", "controls", "rewards"),
    "policy": ("lora_rank", "lora_alpha", "lora_above", "lora_targets", "lora_init"),
}
"""Settings by section on which no evaluation of the base depends: an adapter that was not trained
adds exactly 0."""


@dataclass(frozen=True)
class SharedBase:
    """The base's evaluation in a `folder`. The first run that needs it makes it, and those that
    come meanwhile wait."""

    folder: Path
    world: World

    @property
    def file(self) -> Path:
        return self.folder / "baseline.safetensors"

    def evaluation(
        self,
        prompts: Sequence[str],
        names: Sequence[str],
        make: Callable[[], Evaluation],
        leave: Callable[[], None],
    ) -> Evaluation:
        """The evaluation of `prompts` by the rewards `names`: read, or made by `make` and written.
        All ranks call it; while they wait they call `leave`, which may raise an exception on
        all."""
        main = self.world.is_main
        with waiting(self.folder, self.world, leave):
            stored = self._stored(prompts, names) if main else None
            if self.world.total(stored is not None)[0]:
                return stored or read_base(self.file, prompts, names, self.world)
            made = make()
            if main:
                with writing(self.file), whole_file(self.file) as unfinished:
                    save_evaluation(unfinished, made)
            return made

    def _stored(self, prompts: Sequence[str], names: Sequence[str]) -> Evaluation | None:
        """None if there is none, or a damaged one, which is made again."""
        try:
            return load_evaluation(self.file, prompts, names)
        except UserError:
            return None


def shared_base(
    bases: Path, config: Config, contents: Mapping[str, str], world: World
) -> SharedBase:
    """Where runs of `config` keep their base's evaluation among `bases`: in a folder named by all
    that determines it. `contents` are digests of what the config names (`app.contents`)."""
    settings = config.model_dump(mode="json")
    rewards = {**settings["rewards"], **settings["evaluation"]["rewards"]}
    for section, keys in OF_TRAINING.items():
        part = settings[section] if section else settings
        for key in keys:
            part.pop(key)
    settings["scored"] = {name: {**rewards[name], "weight": 1} for name in sorted(rewards)}
    del settings["rewards"]
    named = {
        key: value for key, value in contents.items() if key not in ("prompts.train", "algorithm")
    }
    return SharedBase(bases / digest_of([settings, named])[:16], world)


def read_base(path: Path, prompts: Sequence[str], names: Sequence[str], world: World) -> Evaluation:
    """A stored evaluation of all `prompts` by the rewards `names`, in their order; pictures on rank
    0 alone."""
    stored = load_evaluation(path, prompts, names)
    return stored if world.is_main else replace(stored, images=stored.images[:0].clone())


def with_floors(run: RunFiles, config: Config) -> Config:
    """The run's `config` with floors at the base's mean as numbers; as they are where the run does
    not know them."""
    asked = any(entry.floor == "base" for entry in config.rewards.values())
    if not asked or not run.baseline.is_file():
        return config
    stored = load_tensors(run.baseline)
    scores = {
        name.removeprefix("score/"): values
        for name, values in stored.items()
        if name.startswith("score/")
    }
    floors = floors_of(config.rewards, lambda: Evaluation((), stored["images"], scores))
    rewards = {
        name: entry.model_copy(update={"floor": floor} if entry.floor == "base" else {})
        for (name, entry), floor in zip(config.rewards.items(), floors.tolist(), strict=True)
    }
    return config.model_copy(update={"rewards": rewards})


@contextmanager
def waiting(folder: Path, world: World, leave: Callable[[], None]) -> Iterator[None]:
    """While entered by all ranks, no other run can enter `folder`, which rank 0 holds; waits until
    none is in it, and calls `leave` meanwhile. Ranks meet at every attempt: none may be silent for
    as long as another run takes."""
    with ExitStack() as stack:
        while True:
            entered = False
            if world.is_main:
                with suppress(InUse):
                    stack.enter_context(held(folder))
                    entered = True
            if world.total(entered)[0]:
                break
            leave()
            time.sleep(0.2)
        yield
