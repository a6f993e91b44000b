"""Results as tables: of a run, an evaluation, a study."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from g2rpo.cli.output import say
from g2rpo.core import plugins
from g2rpo.core.errors import counted
from g2rpo.core.events import Results
from g2rpo.core.statistics import Comparison, Interval, figures
from g2rpo.lab.check_model import ModelCheck
from g2rpo.lab.compare.study import StudyDirectory
from g2rpo.lab.judging import Judging
from g2rpo.lab.report.history import read_runs, summary_of
from g2rpo.lab.untrained import in_figures, in_words, told
from g2rpo.train.monitor.pictures import clip_of
from g2rpo.train.run.folder import Run
from g2rpo.train.run.lock import fresh_directory


def show_run(results: Results, console: Console) -> None:
    """Shows the results of a finished run, and commands to continue with."""
    directory, run = results.directory, Run(results.directory)
    console.print(run_table(results.table, len(results.heldout), results.trained, console.width))
    for line in summary_of(*read_runs([directory])):
        say(console, line)
    clip, code = clip_of(run.before_after), plugins.repeated()
    again = fresh_directory(directory.parent, directory.resolve().name)
    own_code = code if results.plugins else []
    repeat: list[str | Path] = ["train", run.config]
    if run.votes.is_file():
        repeat = ["teach", run.config, "--votes", run.votes]
    files = {
        "before/after": clip if clip.is_file() else run.before_after,
        "curves": run.curves,
        "weights": run.weights,
        "metrics": run.log,
        "report": command("report", directory),
        "draw": command("sample", directory, results.heldout[0], *own_code),
        "repeat": command(*repeat, "--run-dir", again, *code),
    }
    for what, where in files.items():
        say(console, f"{what:>13}  {where}")


def command(*arguments: str | Path) -> str:
    """A command of g2rpo, quoted for a shell: words with single quotes in double ones, where that
    needs no escape."""

    def quoted(word: str) -> str:
        return f'"{word}"' if "'" in word and not set('"$`!\\') & set(word) else shlex.quote(word)

    return " ".join(["g2rpo", *(quoted(str(word)) for word in arguments)])


def add_columns(
    table: Table, width: int, title: str, names: Sequence[str], numbers: Sequence[str]
) -> None:
    """Adds a column of names, unwrapped unless they take more than a quarter of `width`, and
    columns of numbers."""
    table.add_column(title, overflow="fold", no_wrap=max(map(len, names)) <= width // 4)
    for column in numbers:
        table.add_column(column, justify="right" if column else "left", overflow="fold")


def run_table(
    table: Mapping[str, Comparison], prompts: int, trained: Sequence[str], width: int
) -> Table:
    """The table of base against tuned, for a console of `width`."""
    out = Table(title=f"{counted(prompts, 'held-out prompt')}, same noise; ± 95 % interval")
    add_columns(out, width, "reward", list(table), ["base", "tuned", "change", ""])
    for name, row in table.items():
        use = "trained on" if name in trained else "judged only"
        out.add_row(name, *row.cells[:2], _coloured(row.change), use)
    return out


def show_evaluation(judging: Judging, console: Console) -> None:
    """Shows a finished evaluation, and where its files are."""
    console.print(evaluation_table(judging, console.width))
    if judging.config.controls:
        console.print(controls_table(judging, console.width))
        found = judging.controls()
        if len(judging.sides) > 1:
            names = told(found, list(judging.chosen_by))
            for line in (*in_words(found, names), *in_figures(found, names)):
                say(console, line)
    kept = judging.files
    files = {"numbers": kept.results, "pictures": kept.pictures, "grids": kept.grids}
    for what, file in files.items():
        say(console, f"{what:>9}  {file}")


def evaluation_table(judging: Judging, width: int) -> Table:
    """The table of results for a console of `width`."""
    sides = judging.sides
    table = Table(title=f"{counted(len(judging.prompts), 'prompt')}, means with 95 % intervals")
    table.add_column("steps", justify="right", overflow="fold")
    change = ["change, same noise"] if len(sides) == 2 else []
    add_columns(table, width, "reward", list(judging.config.rewards), [*sides, *change, "missing"])
    for line in judging.results():
        cells = [str(line["steps"]), line["reward"], *(escape(f"{line[side]}") for side in sides)]
        if len(sides) == 2:
            cells.append(_coloured(line["change"]))
        scored = list(line.values())[-1].count
        table.add_row(
            *cells, str(len(judging.prompts) - scored) if scored < len(judging.prompts) else ""
        )
    return table


def controls_table(judging: Judging, width: int) -> Table:
    """Means of the base by every control and of the tuned model, with what a picture costs; the
    best control in bold."""
    found, names = judging.controls(), list(judging.config.rewards)
    steps = min(judging.config.steps)
    out = Table(
        title=f"without training, {steps} steps unless others are named: means, and the price of a picture"
    )
    add_columns(
        out, width, "sampled", [way.name for way in found.ways], ["evaluations", "readings", *names]
    )
    best = {
        name: [of[name].name for of in (found.best, found.best_of) if name in of] for name in names
    }
    for way in found.ways:
        means = {name: figures(way.means[name]) for name in names}
        cells = [
            f"[bold]{mean}[/]" if way.name in best[name] else mean for name, mean in means.items()
        ]
        out.add_row(way.name, str(way.evaluations), str(way.readings or ""), *cells)
    return out


def _coloured(change: Interval) -> str:
    colour = {1: "green", -1: "red", 0: "white"}[change.sign]
    return f"[{colour}]{escape(f'{change:+}')}[/]"


def show_study(study: StudyDirectory, console: Console) -> None:
    """Shows the tables of a study, and where its files are."""
    page = study.page.read_text(encoding="utf-8")
    if console.is_terminal:
        console.print(Markdown(page))
    else:
        say(console, page)
    for file in (study.results, study.page, study.curves):
        say(console, f"  {file}")


def show_checks(checks: Iterable[ModelCheck], console: Console) -> bool:
    """Shows each check as it is done, with what to do about one that failed; returns whether all
    passed."""
    passed = True
    for check in checks:
        passed &= check.passed
        mark = ("ok    ", "green") if check.passed else ("FAILED", "bold red")
        console.print(Text.assemble(mark, f"  {check.name:<9} ", check.found), soft_wrap=True)
        if not check.passed:
            say(console, f"        {check.remedy}")
    return passed
