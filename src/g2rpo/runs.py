"""Run directories: one run each, never overwritten by another."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

from g2rpo import __version__
from g2rpo.config import AlarmsConfig, Config
from g2rpo.devices import accelerator
from g2rpo.errors import UserError
from g2rpo.files import write_whole
from g2rpo.settings import differences, read_yaml, resolve

CONFIG = "config.yaml"
STARTS = "starts.jsonl"
MAY_CHANGE = (
    "trainer.iterations",
    "trainer.keep_checkpoints",
    "trainer.rank_timeout_s",
    "trainer.micro_batch_size",
    "trainer.sharding",
    "sampling.batch_size",
    "sampling.decode_batch_size",
    "trainer.max_unscored",
    "trainer.max_skipped",
    "policy.device",
    "prompts.cache",
    "trackers",
    "recipe",
    *(f"alarms.{name}" for name in AlarmsConfig.model_fields),
)
"""Keys that a resumed run may set anew; nothing already computed depends on them, and what comes only by rounding."""


def choose_directory(config: Config, run_dir: Path | None, resume: bool) -> Path:
    """The directory for a run of `config`; nothing is written.

    Without `run_dir` a fresh `runs/NAME`, `runs/NAME-2`, ... is taken. A directory that holds a run is only entered with
    `resume` and the same config.
    """
    if resume and run_dir is None:
        raise UserError("--resume continues a run: name its directory with --run-dir")
    directory = run_dir or _fresh(Path("runs"), config.recipe or "run")
    existing = directory / CONFIG
    if existing.is_file() and not resume:
        raise UserError(f"{directory} already holds a run; continue it with --resume, or name another --run-dir")
    if existing.is_file():
        _check_same(config, read_config(directory), directory)
    elif directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        raise UserError(f"{directory} is not empty and holds no run (no {CONFIG}); name another --run-dir")
    elif resume:
        raise UserError(f"{directory} holds no run to resume (no {CONFIG})")
    return directory


def claim(directory: Path, config: Config) -> None:
    """Makes a chosen directory this run's, by writing config.yaml."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / CONFIG, config.to_yaml().encode())
    except OSError as error:
        raise UserError(f"{directory}: cannot be written ({error.strerror})") from None


def record_start(directory: Path, iteration: int, device: torch.device) -> None:
    """Appends to starts.jsonl what starts (or resumes, after `iteration` > 0) the run: when, which software, which device."""
    threads = torch.get_num_threads()
    cpu = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    start = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "iteration": iteration,
        "g2rpo": __version__,
        "commit": source_commit(Path(__file__).resolve().parents[2]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": module.get_device_name(device) if (module := accelerator(device)) is not None else cpu,
    }
    with (directory / STARTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(start) + "\n")


def source_commit(root: Path) -> str | None:
    """The commit of the checkout at `root`, with "-dirty" if files differ from it; None if it is no checkout (an installed
    package) or there is no git to ask."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def read_config(run_dir: Path) -> Config:
    """The config of an existing run."""
    path = run_dir / CONFIG
    if not path.is_file():
        raise UserError(f"{run_dir} is no run directory (no {CONFIG})")
    return resolve(read_yaml(path), source=str(path))


def weights_path(run_dir: Path) -> Path:
    """Where a finished run keeps its weights: `adapter/` or `transformer/`."""
    for folder in ("adapter", "transformer"):
        if (run_dir / folder).is_dir():
            return run_dir / folder
    raise UserError(f"{run_dir} has no weights yet (neither adapter/ nor transformer/); has it finished?")


def _check_same(config: Config, other: Config, directory: Path) -> None:
    changed = {key: pair for key, pair in differences(config, other).items() if key not in MAY_CHANGE}
    if changed:
        listed = "\n".join(f"  {key}: {theirs!r} there, {ours!r} here" for key, (ours, theirs) in changed.items())
        raise UserError(f"{directory} belongs to a run with another config:\n{listed}\nName another --run-dir for this one.")


def _fresh(root: Path, name: str) -> Path:
    stem = re.sub(r"[^\w.-]+", "-", name)
    candidate, number = root / stem, 1
    while candidate.exists():
        number += 1
        candidate = root / f"{stem}-{number}"
    return candidate
