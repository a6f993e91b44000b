"""Commands that begin with a recipe or a run and train: train, resume, plan, encode, push; and
recipes."""

from __future__ import annotations

import gc
import json
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from g2rpo.cli import options
from g2rpo.cli.output import Output, console, say
from g2rpo.core.errors import UserError, counted
from g2rpo.core.stopping import stoppable

commands = typer.Typer()


@commands.command(cls=options.WithSettings, rich_help_panel=options.TRAINING_PANEL)
def train(
    recipe: options.RecipeOrNone = None,
    overrides: Annotated[list[str] | None, options.key_values(options.SETTINGS)] = None,
    run_dir: options.RunDirOption = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run in --run-dir, or begin it if there is none; also --resume=auto.",
        ),
    ] = False,
    accept_changes: options.AcceptOption = False,
    within: options.WithinOption = None,
) -> None:
    """Train a model on rewards."""
    if resume and recipe is not None and "=" in recipe and not recipe.endswith((".yaml", ".yml")):
        overrides, recipe = [recipe, *(overrides or [])], None
    if accept_changes and not resume:
        raise UserError("--accept-changes is for --resume; a new run has nothing to compare with")
    _train(recipe, overrides, run_dir, within, resume=resume, accept_changes=accept_changes)


@commands.command("resume", cls=options.WithSettings, rich_help_panel=options.TRAINING_PANEL)
def resume_run(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="The folder of a run that was interrupted, or that is to go on for longer.",
        ),
    ],
    overrides: Annotated[
        list[str] | None, options.key_values("Settings to change, such as trainer.iterations=200.")
    ] = None,
    accept_changes: options.AcceptOption = False,
    within: options.WithinOption = None,
) -> None:
    """Continue a run where it was stopped, with its own config."""
    _train(None, overrides, run, within, resume=True, accept_changes=accept_changes)


def _train(
    recipe: str | None,
    overrides: list[str] | None,
    run_dir: Path | None,
    within: str | None,
    **asked: Any,
) -> None:
    settings = [*(overrides or []), *options.max_hours(within)]
    # loading is slow
    with stoppable("stopped before training began; the same command begins again") as stopping:
        from g2rpo.lab.plan.plan import predict
        from g2rpo.train.command import train as run

        with Output() as emit:
            run(recipe, settings, run_dir, stopping=stopping, emit=emit, predict=predict, **asked)


@commands.command(cls=options.WithSettings, rich_help_panel=options.TRAINING_PANEL)
def plan(
    recipe: options.RecipeOrFile,
    overrides: Annotated[
        list[str] | None, options.key_values("Settings, as of `g2rpo train`: policy.lora_rank=64")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="A card such as h200 or rtx4090; default this machine.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(min=0.1, help="GB of it that the run may take: 12, 16.")
    ] = None,
    ranks: Annotated[
        int, typer.Option(min=1, help="Processes, each with a device, that divide the prompts.")
    ] = 1,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="How many of them are on one machine; default up to 8."),
    ] = None,
    cards: Annotated[
        bool,
        typer.Option(
            "--cards",
            help="Show for every known card whether the run fits, and with which settings.",
        ),
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Also print the tables of work, memory and time.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate a run's compute, memory and time before launching it."""
    from g2rpo.cli.plan import planned_answer

    if cards and (many := [word for word in overrides or [] if word.isdigit()]):
        raise UserError(f"--cards is about each kind of card; `--ranks {many[0]}` plans on several")
    gc.disable()  # imports make many objects and no garbage to speak of: a fifth of a plan's time
    try:
        plain, show = planned_answer(
            recipe, overrides or [], device, memory, (ranks, ranks_per_node), cards, every
        )
    finally:
        gc.enable()
    if as_json:
        say(console, json.dumps(plain, indent=1))
    else:
        show(console)


@commands.command(cls=options.WithSettings, rich_help_panel=options.TRAINING_PANEL)
def encode(
    recipe: options.RecipeOrFile,
    overrides: Annotated[
        list[str] | None, options.key_values("Settings, as of `g2rpo train`: prompts.cache=FOLDER")
    ] = None,
) -> None:
    """Store the text embeddings of a recipe's prompts ahead of training."""
    from g2rpo.lab.encode import encode as run

    with Output() as emit:
        count, new = run(recipe, overrides or [], emit)
    say(console, f"{counted(count, 'prompt')} stored, {new} of them new")


@commands.command(rich_help_panel=options.TRAINING_PANEL)
def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="Show one, with the reason for every value.",
            autocompletion=options.recipe_names,
        ),
    ] = None,
) -> None:
    """List the recipes, or explain one."""
    from g2rpo.config import recipes as known

    if name is None:
        _list_recipes()
    else:
        console.print(known.text(name), highlight=False, markup=False, soft_wrap=True)


def _list_recipes() -> None:
    """Prints all recipes by where they run, each with what it needs."""
    from g2rpo.cli.plan import duration
    from g2rpo.config import recipes as known

    column, needs = max(map(len, known.names())) + 2, known.needs()
    for title, held in known.groups().items():
        console.print(title, style="bold", highlight=False)
        for each in held:
            width = max(20, console.width - column)
            lines = textwrap.wrap(known.summary(each), width, break_on_hyphens=False)
            if (own := needs.get(each)) is not None:
                cards = f"{own.cards} x " if own.cards > 1 else ""
                rewards = f", rewards {own.rewards_gib:g} GiB" if own.rewards_gib else ""
                hours = duration(3600 * own.hours)
                on = f"{own.cards} H100" if own.cards > 1 else "an H100"
                lines.append(f"{cards}{own.gib:g} GiB; {hours} on {on}{rewards}")
            said = f"\n{'':{column}}".join(lines)
            console.print(Text.assemble((f"{each:<{column}}", "bold"), said), highlight=False)
    say(console, "Memory and hours are planned: `g2rpo plan RECIPE` has the whole.")
