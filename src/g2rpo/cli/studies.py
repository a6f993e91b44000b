"""Commands before and around training: plan, compare."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from g2rpo.cli import options
from g2rpo.cli.output import Output, console, say
from g2rpo.core.errors import UserError

commands = typer.Typer()


@commands.command(cls=options.WithSettings, rich_help_panel=options.TRAINING)
def plan(
    recipe: options.RecipeOrFile,
    overrides: Annotated[list[str] | None, options.key_values("policy.lora_rank=64")] = None,
    device: Annotated[str | None, typer.Option(help="A card such as h200 or rtx4090; default this machine.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes, a device each, that share the prompts.")] = 1,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Of these, on one machine; default up to 8.")] = None,
    cards: Annotated[bool, typer.Option("--cards", help="What fits on every known card, and how.")] = False,
    within: Annotated[
        str | None, typer.Option(metavar="TIME", help="Overrides that fit a time such as 3h, and what they cost.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate a run's compute, memory and time before launching it."""
    from g2rpo.cli import plan as tables

    if cards:
        from g2rpo.lab.plan.fit import on_cards

        if device is not None:
            raise UserError("--cards is about every card; leave --device out")
        if within is not None:
            raise UserError("--cards and --within are two plans; name one")
        rows = on_cards(recipe, overrides or [], ranks, ranks_per_node)
        plain, show = {key: row.plain() for key, row in rows.items()}, partial(tables.show_cards, recipe, rows)
    elif within is not None:
        from g2rpo.lab.plan.fit import plan_within

        if ranks > 1:
            raise UserError("--within plans one process on a card; leave --ranks out")
        fitted = plan_within(recipe, overrides or [], within, device)
        plain, show = fitted.plain(), partial(tables.show_within, fitted, within)
    else:
        from g2rpo.lab.plan.answer import plan as answer

        answered = answer(recipe, overrides or [], device=device, ranks=ranks, ranks_per_node=ranks_per_node)
        plain, show = answered.plain(), partial(tables.show_plan, answered)
    if as_json:
        say(console, json.dumps(plain, indent=1))
    else:
        show(console)


@commands.command(cls=options.WithSettings, rich_help_panel=options.RESULTS)
def compare(
    recipe: options.RecipeOrFile,
    overrides: Annotated[list[str] | None, options.key_values("Of every run.")] = None,
    algorithms: Annotated[str, typer.Option(help="Names with commas between them; the recipe's own keeps its values.")] = "",
    cell: Annotated[
        list[str] | None,
        typer.Option(help="'NAME: KEY=VALUE ...', a variant of the recipe; budget=N gives it its own. May be given often."),
    ] = None,
    budget: Annotated[str, typer.Option(help="Of a run: iterations=60, evaluations=100000 or seconds=300.")] = "iterations=60",
    rates: Annotated[
        str | None, typer.Option(help="Learning rates to choose from, like 1e-4,2e-4; default the recipe's.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each cell.")] = 3,
    pilots: Annotated[int, typer.Option(min=1, help="Runs of each cell at each rate that choose one.")] = 3,
    steps: Annotated[
        str | None, typer.Option(help="Step counts of the evaluations, like 10,20,50; default the recipe's.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    controls: options.Controls = False,
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for all runs; a study already begun there is finished. Default study, or study-2 ..."),
    ] = None,
) -> None:
    """Compare algorithms or variants under one budget, each at its best learning rate, over several seeds."""
    from g2rpo.app.evaluate import step_counts
    from g2rpo.cli.results import show_study
    from g2rpo.lab.compare import study as words
    from g2rpo.lab.compare.workflow import compare as run

    results = run(
        recipe,
        overrides or [],
        words.parse_cells(algorithms, cell or []),
        words.parse_budget(budget),
        words.parse_rates(rates) if rates else None,
        seeds,
        pilots,
        step_counts(steps) if steps else None,
        jobs,
        out,
        controls,
        Output(),
    )
    show_study(results, console)
