"""Output of `g2rpo train` during training and at the end."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.table import Table

from g2rpo.app.progress import QUIET, Fitted, Items, Rate, Steady, add_names, pace, say, say_items
from g2rpo.core import plugins
from g2rpo.evaluation.heldout import Comparison
from g2rpo.lab.report.history import read_runs
from g2rpo.lab.report.verdict import summary
from g2rpo.monitor.metrics import Row
from g2rpo.rollout.planning import count_per_prompt
from g2rpo.runs.directory import RunDirectory, moving
from g2rpo.runs.lifecycle import fresh_directory
from g2rpo.training.trainer import Trainer

BETWEEN = 2.0
"""Shortest time between the lines of two iterations, in seconds, if there is no terminal."""


def watch_training(trainer: Trainer, console: Console, quiet: float = QUIET) -> None:
    """Runs the training with a progress bar and a line for every evaluation. Without a terminal, a line is printed after an
    iteration if the last one is `BETWEEN` seconds old, and after `quiet` seconds without one.
    """
    config, total = trainer.config, trainer.config.trainer.iterations

    def evaluations(iterations: int) -> int:
        prompts, tails = config.trainer.prompts_per_iteration, config.sampling.tails
        return sum(prompts * count_per_prompt(config.algorithm, trainer.plans(each), tails) for each in range(iterations))

    first, began, last = evaluations(trainer.iteration), time.monotonic(), -BETWEEN
    count = TextColumn("{task.fields[iteration]}/{task.fields[iterations]}")

    def line(task: Task) -> str:
        share = f"{100 * task.completed / task.total:.1f} %" if task.total else ""
        passed, of = timedelta(seconds=round(time.monotonic() - began)), task.fields["iterations"]
        head = f"{passed}  {task.fields['iteration']}/{of} iterations, {share}"
        said = [f"{name} {value}" for name, value in [*_alarms(task.fields["alarms"]), *task.fields["rewards"]]]
        return "  ".join([head, *said, *pace(task, "evaluations")])

    with Steady(count, BarColumn(bar_width=12), _Rewards(), Rate("eval"), console=console, line=line, quiet=quiet) as progress:
        task = progress.add_task(
            "",
            start=False,
            total=evaluations(total),
            completed=first,
            first=first,
            iterations=total,
            iteration=trainer.iteration,
            rewards=(),
            alarms=(),
        )
        if trainer.iteration:
            progress.start_task(task)
        else:
            say(progress.console, f"first the base model draws {len(trainer.heldout)} held-out prompts, which are scored ...")
        trainer.on_evaluations = lambda done: progress.advance(task, done * trainer.world.size)
        for row in trainer.train():
            if trainer.config.trainer.iterations != total:  # fitted to a time
                total = trainer.config.trainer.iterations
                progress.update(task, total=evaluations(total), iterations=total)
            if row["kind"] == "train":
                alarms = list(row.get("alarms", ()))
                progress.update(task, rewards=_rewards(row), alarms=alarms, iteration=row["iteration"])
                if time.monotonic() - last >= BETWEEN:
                    last = time.monotonic()
                    progress.tell()
            else:
                progress.start_task(task)  # the base's evaluation is not part of the remaining work
                said = [*_alarms(list(row.get("alarms", ()))), *_rewards(row)]
                say_items(progress.console, f"held-out pictures after iteration {row['iteration']}:", said)


class _Rewards(ProgressColumn):
    """The rewards of the last iteration and the number of active alarms, in the remaining width."""

    def render(self, task: Task) -> Fitted:
        alarms = task.fields["alarms"]
        return Fitted([*([("alarms", str(len(alarms)))] if alarms else []), *task.fields["rewards"]])


def _alarms(names: Sequence[str]) -> Items:
    return [("alarm:", ", ".join(names))] if names else []


def _rewards(row: Row) -> Items:
    return [(key.removeprefix("reward/"), f"{value:.3f}") for key, value in row.items() if key.startswith("reward/")]


def show_results(trainer: Trainer, table: dict[str, Comparison], directory: Path, console: Console) -> None:
    """Shows the results of a finished run, and commands to continue with."""
    console.print(results_table(table, len(trainer.heldout), list(trainer.rewards), console.width))
    say(console, summary(*read_runs([directory])))
    run = RunDirectory(directory)
    again, code = fresh_directory(directory.parent, directory.resolve().name), plugins.repeated()
    for what, where in (
        ("before/after", next(path for path in (moving(run.before_after), run.before_after) if path.is_file())),
        ("curves", run.curves),
        ("weights", run.weights),
        ("metrics", run.log),
        ("report", _command("report", directory)),
        ("draw", _command("sample", directory, trainer.heldout[0], *(code if trainer.config.policy.kind else []))),
        ("repeat", _command("train", run.config, "--run-dir", again, *code)),
    ):
        say(console, f"{what:>13}  {where}")


def _command(*arguments: str | Path) -> str:
    """The command quoted for a shell."""
    return " ".join(["g2rpo", *map(_quoted, map(str, arguments))])


def _quoted(word: str) -> str:
    """A word as a shell reads it; in double quotes if single ones would have to be escaped."""
    return f'"{word}"' if "'" in word and not set('"$`!\\') & set(word) else shlex.quote(word)


def results_table(table: dict[str, Comparison], prompts: int, trained: Sequence[str], width: int) -> Table:
    """The table of base against tuned, for a console of `width`."""
    out = Table(title=f"{prompts} held-out prompts, same noise; ± 95 % interval")
    add_names(out, "reward", list(table), width)
    for column in ("base", "tuned", "change", ""):
        out.add_column(column, justify="right" if column else "left", overflow="fold")
    for name, row in table.items():
        change = row.tuned - row.base
        colour = "green" if change > row.margin else "red" if change < -row.margin else "white"
        use = "trained on" if name in trained else "judged only"
        out.add_row(name, f"{row.base:.3f}", f"{row.tuned:.3f}", f"[{colour}]{change:+.3f}{row.within}[/]", use)
    return out
