"""Entering, claiming and reading run directories: one run each, never overwritten."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import torch
from pydantic import BaseModel

from g2rpo import __version__
from g2rpo.config.resolve import absent_reward, allow_code, codes_in, listed_differences, read_yaml, resolve
from g2rpo.config.schema import Alarm, Config
from g2rpo.core import plugins
from g2rpo.core.errors import UserError, counted
from g2rpo.core.files import append_line, is_empty, remove_unfinished, write_whole, writing
from g2rpo.core.plain import as_json, read_lines_as
from g2rpo.run.lock import InUse, held
from g2rpo.run.run import Run
from g2rpo.runtime.devices import accelerator

MAY_CHANGE = (
    "trainer.iterations",
    "trainer.checkpoint_every",
    "trainer.checkpoint_minutes",
    "trainer.keep_checkpoints",
    "trainer.micro_batch_size",
    "trainer.sharding",
    "trainer.shard_group",
    "sampling.batch_size",
    "sampling.decode_batch_size",
    "policy.device",
    "evaluation.every_minutes",
    "prompts.cache",
    "trackers",
    "recipe",
    "evaluation.controls",
    "alarms",  # none has an action of its own
    *(f"alarms.{name}" for name in get_args(Alarm)),
)
"""Keys that a resumed run may change: nothing already computed depends on them, and later results only by rounding."""


class Start(BaseModel):
    """A start of a run, or a resume after `iteration` > 0: time, software, device, and digests of what the config names
    (`app.contents`)."""

    time: str = "unknown"
    iteration: int = 0
    g2rpo: str = "unknown"
    commit: str | None = None
    python: str = "unknown"
    torch: str = "unknown"
    device: str = "unknown"
    contents: dict[str, str] = {}


@contextmanager
def entered(config: Config, run_dir: Path | None, resume: bool, notify: Callable[[str], None] = print) -> Iterator[Path]:
    """The directory for a run of `config`, locked while entered; if it was created here and is still empty, it is removed.

    Without `run_dir` a fresh `runs/NAME`, `runs/NAME-2`, ... is taken. A directory that holds a run is only entered with
    `resume` and the same config; with `resume` a directory may hold none yet.
    """
    if resume and run_dir is None:
        raise UserError("--resume continues a run: name its directory with --run-dir")
    with ExitStack() as stack:
        if run_dir is None:
            directory = enter_fresh(stack, Path("runs"), config.recipe or "run", notify)
        else:
            directory = run_dir
            Run(directory).check(config, resume)  # before it is touched
            stack.enter_context(held(directory, notify))
            Run(directory).check(config, resume)  # unchanged since the last process released it
        yield directory


def check_directory(config: Config, directory: Path, resume: bool) -> None:
    """Refuses a directory in which a run of `config` cannot begin, or with `resume` continue if there is one; nothing is
    written."""
    if Run(directory).config.is_file():
        if not resume:
            raise UserError(
                f"{directory} already holds a run; `g2rpo resume {directory}` continues it (from Python: resume=True), "
                "or name another --run-dir"
            )
        _check_same(config, Run(directory).read_config(), directory)
    elif not is_empty(directory):
        raise UserError(f"{directory} is not empty and holds no run (no config.yaml); name another --run-dir")


def claim(directory: Path, config: Config) -> None:
    """Marks a directory as this run's by writing config.yaml."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_unfinished(directory)
        write_whole(Run(directory).config, config.to_yaml().encode())
    except OSError as error:
        raise UserError(f"{directory}: cannot be written ({error.strerror})") from None


def record_start(directory: Path, iteration: int, device: torch.device, contents: Mapping[str, str] | None = None) -> None:
    """Appends a `Start` with these `contents` to starts.jsonl."""
    threads = torch.get_num_threads()
    cpu = f"CPU, {counted(threads, 'thread')}"
    start = Start(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        iteration=iteration,
        g2rpo=__version__,
        commit=source_commit(Path(__file__).resolve().parents[2]),
        python=platform.python_version(),
        torch=torch.__version__,
        device=module.get_device_name(device) if (module := accelerator(device)) is not None else cpu,
        contents=dict(contents or {}),
    )
    path = Run(directory).starts
    with writing(path):
        append_line(path, as_json(start.model_dump()))


def read_starts(directory: Path) -> list[Start]:
    """The lines of `record_start`, oldest first; UserError for any other line."""
    path = Run(directory).starts
    return read_lines_as(Start, path) if path.exists() else []


def check_contents(directory: Path, contents: Mapping[str, str], accept: bool) -> list[str]:
    """Refuses to continue with other prompts, model or reward code than at the run's last start. With `accept` it returns the
    changes. Held-out prompts may never change: the base model was evaluated on the first ones.
    """
    starts = [start for start in Run(directory).read_starts() if start.contents]
    before = starts[-1].contents if starts else dict(contents)
    keys = [key for key in {**before, **contents} if before.get(key) != contents.get(key)]
    changed = [f"{key}: {before.get(key, 'nothing')} then, {contents.get(key, 'nothing')} now" for key in keys]
    if not changed or (accept and "evaluation.prompts" not in keys):
        return changed
    go_on = (
        "Held-out prompts cannot change within a run, whose base model was evaluated on them; begin another run."
        if "evaluation.prompts" in keys
        else "To continue with them add --accept-changes; the base model keeps its scores."
    )
    listed = "\n".join(f"  {line}" for line in changed)
    raise UserError(f"{directory}: what its config names has changed since the last start:\n{listed}\n{go_on}")


def source_commit(root: Path) -> str | None:
    """The commit of the checkout at `root`, with "-dirty" if files differ from it; None if it is no checkout (an installed
    package) or git is missing."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def read_config(
    run_dir: Path,
    overrides: Sequence[str] = (),
    notify: Callable[[str], None] = lambda message: None,
    *,
    mention: bool = True,
) -> Config:
    """The config of an existing run, with overrides as for `config.resolve.resolve`.

    An algorithm whose code the user has not named is a `given.Mentioned` one; without `mention` it is refused.
    """
    path = Run(run_dir).config
    if not path.is_file():
        raise UserError(f"{run_dir} is no run directory (no config.yaml)")
    data = read_yaml(path)
    if not mention:
        allow_code(overrides)
        plugins.require_all(codes_in(data))  # in one message
    taken_out = [override for override in overrides if absent_reward(data, override)]  # when the run began
    return resolve(data, [each for each in overrides if each not in taken_out], str(path), notify, mention)


def _check_same(config: Config, other: Config, directory: Path) -> None:
    if listed := listed_differences(config, other, MAY_CHANGE):
        how = f"`g2rpo resume {directory}` continues that run; `g2rpo train` with another --run-dir starts this one."
        raise UserError(f"{directory} belongs to a run with another config:{listed}\n{how}")


def enter_fresh(stack: ExitStack, root: Path, name: str, notify: Callable[[str], None] = print) -> Path:
    """Enters the first of ROOT/NAME, ROOT/NAME-2, ... that does not exist; concurrent commands get different ones."""
    while True:
        directory = fresh_directory(root, name)
        with ExitStack() as attempt:
            try:
                attempt.enter_context(held(directory, notify))
            except InUse:
                continue
            if is_empty(directory):  # else another run has come and gone
                stack.enter_context(attempt.pop_all())
                return directory


def first_usable(name: str, check: Callable[[Path], None]) -> Path:
    """NAME, or the first of NAME-2, NAME-3 ... that `check` does not refuse."""
    candidate, number = Path(name), 1
    while True:
        try:
            check(candidate)
            return candidate
        except UserError:
            number += 1
            candidate = Path(f"{name}-{number}")


def fresh_directory(root: Path, name: str) -> Path:
    """`root/NAME`, or the first of `root/NAME-2`, `root/NAME-3` ... that does not exist."""
    stem = re.sub(r"[^\w.-]+", "-", name)
    if not stem.strip("."):
        raise UserError(f"recipe: {name!r} cannot name a folder below {root}/; name one with --run-dir")
    candidate, number = root / stem, 1
    while candidate.exists():
        number += 1
        candidate = root / f"{stem}-{number}"
    return candidate
