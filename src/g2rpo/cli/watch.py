"""`g2rpo watch`: whether a run works, as lines on a terminal or as a page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from g2rpo.app.stopping import until_ctrl_c
from g2rpo.cli import options
from g2rpo.cli.life import LIFE
from g2rpo.cli.output import Output, console, say
from g2rpo.core.errors import counted
from g2rpo.core.plain import printable

if TYPE_CHECKING:
    from g2rpo.lab.watch.folder import Watched
    from g2rpo.lab.watch.told import Rise, Told

commands = typer.Typer()
EVERY = 2.0
"""Seconds between two looks at the folder."""
COLOURS = {"better": "green", "worse": "red"}


@commands.command(rich_help_panel=options.RESULTS_PANEL)
def watch(
    run: Annotated[Path, typer.Argument(help="The folder of a run, which may be in training.")],
    once: Annotated[
        bool, typer.Option("--once", help="Print it once, as without a terminal.")
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Show the report, live, in the browser.")
    ] = False,
    port: options.PortOption = 7862,
) -> None:
    """Tell whether a run works while it trains: exit code 1 if it ended early."""
    from g2rpo.lab.watch.folder import read

    seen = read(run)
    if serve:
        from g2rpo.lab.watch.page import serve as serve_page

        serve_page(run, port, Output())
        return
    LIFE.pause()
    if once or not console.is_terminal:
        console.print(block(seen, console))
    else:
        with until_ctrl_c(), Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(block(seen, console), refresh=True)
                if seen.over:
                    break
                time.sleep(EVERY)
                seen = read(run)
    if seen.finished:
        _verdict(run)
    if seen.ended or seen.lost or seen.rolled_back:
        raise typer.Exit(1)


def _verdict(run: Path) -> None:
    """The summary of the report, which loads torch: after everything else."""
    from g2rpo.lab.report.history import read_runs
    from g2rpo.lab.report.verdict import summary_of

    say(console, " ".join(summary_of(*read_runs([run])).sentences))


def block(seen: Watched, console: Console) -> RenderableType:
    """A run in lines."""
    from g2rpo.lab.watch.told import tell

    told = tell(seen)
    lines: list[RenderableType] = [
        _line(told.answer, "bold"),
        _line(f"{told.name}: {told.pace}"),
        _line(f"now: {told.state}" if not seen.over else told.state),
    ]
    if told.judged:
        lines.append(_judged_table(told))
    if told.trained:
        lines.append(_trained_table(told))
    if told.missing:
        lines.append(_line(told.missing))
    lines += [_line(f"alarm: {said}", "bold red") for said in told.alarms]
    if not told.alarms and seen.rows:
        lines.append(_line("no alarm"))
    return Group(*lines, *map(_line, told.notes))


def _line(words: str, style: str = "") -> Text:
    return Text(printable(words), style)  # prompts and errors may have any text


def _judged_table(told: Told) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    after = f"after {told.looked}" if told.looked else ""
    table.add_column(f"held out, {counted(told.heldout, 'prompt')}", overflow="fold")
    for column in ("base", after):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("change ± 95 %" if told.looked else "", no_wrap=True)
    table.add_column("")
    for one in told.judged:
        changed = (one.now, *_rise(one.rise)) if told.looked else ()
        table.add_row(escape(one.name), one.base, *changed)
    return table


def _trained_table(told: Told) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("in training", overflow="fold")
    table.add_column("over the run", no_wrap=True)
    for column in ("now", "noise"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("rise ± 95 %", no_wrap=True)
    table.add_column("")
    for one in told.trained:
        table.add_row(escape(one.name), one.bars, one.now, f"± {one.noise}", *_rise(one.rise))
    return table


def _rise(rise: Rise) -> tuple[str, Text]:
    return rise.size, Text(rise.word, style=COLOURS.get(rise.word, ""))
