"""Plans as tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from g2rpo.cli.output import say, warn
from g2rpo.core.errors import UserError, counted
from g2rpo.core.files import in_bytes, is_hub_id
from g2rpo.core.statistics import percent
from g2rpo.lab.plan import answer as answers
from g2rpo.lab.plan.answer import OnCard, PlanAnswer, on_cards
from g2rpo.lab.plan.cards import CARDS
from g2rpo.lab.plan.counting import CountedIteration, Counts
from g2rpo.lab.plan.kernels import TIME_SPREAD
from g2rpo.lab.plan.memory import BYTES_IN_FILES, CONTEXT_BYTES, SLACK
from g2rpo.lab.plan.plan import COUNTS_OF_ITERATION, Estimate, Target, find_target
from g2rpo.lab.plan.seconds import PlannedSeconds

MORE = "--all shows work, memory and time in tables."


def planned_answer(
    recipe: str,
    overrides: Sequence[str],
    device: str | None,
    memory: float | None,
    ranks: tuple[int, int | None],
    cards: bool,
    every: bool,
) -> tuple[Any, Callable[[Console], None]]:
    """What `g2rpo plan` answers: as plain data, and a function that prints it. `ranks`: in all, and
    on a machine; `every`: with tables."""
    if cards and (device, memory) != (None, None):
        raise UserError("--cards is about every card; leave --device and --memory out")
    if cards:
        rows = on_cards(recipe, overrides, *ranks)
        return {key: row.plain() for key, row in rows.items()}, partial(show_cards, recipe, rows)
    answered = answers.plan(
        recipe, overrides, device=device, memory=memory, ranks=ranks[0], ranks_per_node=ranks[1]
    )
    return answered.plain(), partial(show_plan, answered, every)


def show_plan(answer: PlanAnswer, every: bool, console: Console) -> None:
    """Prints whether the run fits and how long it takes, what it is, and what the plan does not
    know; with `every` the tables of work, memory and time."""
    plan, policy = answer.plan, answer.plan.config.policy
    lines, brief = _verdict(answer), answer.target.limited and not every
    if brief:  # asked is whether it fits, and how
        lines = [lines[0], " ".join(map(str.strip, [*lines[1:], *answer.notes, MORE]))]
    console.print(lines[0], highlight=False)
    for line in lines[1:]:
        say(console, line)
    if brief:
        return
    licence = "" if answer.licence is None else f"; {answer.licence}"
    say(
        console,
        f"{answer.recipe}: {policy.path}, {_millions(plan.model.parameters)} parameters, "
        f"{_millions(plan.trained_parameters)} trained ({policy.tuning}, {policy.dtype}), "
        f"{policy.width}x{policy.height}{licence}",
    )
    if answer.seconds:
        if answer.fits:
            say(console, _bought(answer))
    else:
        say(
            console,
            f"Time on {answer.target.name}: not planned, but told by `g2rpo train` after its first iteration; "
            "with --within 5m it stops in time. On GPUs: --cards, or --device rtx4090.",
        )
    if every:
        _show_tables(answer, console)
    for note in answer.notes:
        warn(console, note)
    if not every:
        say(console, MORE)


def _show_tables(answer: PlanAnswer, console: Console) -> None:
    plan, shapes = answer.plan, answer.plan.model.shapes
    pictured = shapes.cond.get("image_latents")
    beside = f", {pictured[0]} of an input picture of a megapixel" if pictured else ""
    say(console, f"{shapes.image_tokens} image tokens{beside} and {shapes.text_tokens} of text")
    if plan.ranks > 1:
        all_prompts = plan.ranks * plan.counts.prompts
        own = f"{plan.counts.prompts} of {all_prompts} prompts"
        say(console, f"Below: one of {plan.ranks} ranks, with {own}.")
    console.print(_work_table(plan))
    console.print(_memory_table(plan, answer.target))
    if answer.seconds:
        console.print(_time_table(answer.seconds, plan.counts))
        say(console, _after_ten_minutes(answer))


def show_cards(recipe: str, rows: Mapping[str, OnCard], console: Console) -> None:
    """Prints a table; overrides, which are long, stand below it by their numbers."""
    caption = "memory as drivers give it, with 5 % for gaps and 1 GiB for CUDA; time by datasheet, rewards on the CPU aside"
    columns = ("--device", "needed", "of", "to spare", "the run", "with")
    table = _aligned_table(
        f"{escape(recipe)} on cards", columns, ("--device", "with"), caption=caption
    )
    numbers: dict[str, int] = {}
    noted: dict[str, dict[str, None]] = {}
    for key, row in sorted(rows.items(), key=lambda item: item[1].capacity):
        figures = in_bytes(row.needed), in_bytes(row.capacity)
        if row.overrides is None:
            with_ = "does not fit"
            table.add_row(key, *figures, "", "", with_, style="dim")
        else:
            changed = " ".join(row.overrides)
            with_ = (
                f"changes {numbers.setdefault(changed, len(numbers) + 1)}"
                if changed
                else "as it is"
            )
            table.add_row(
                key, *figures, in_bytes(row.capacity - row.needed), planned(row.seconds), with_
            )
        for note in row.notes:
            noted.setdefault(note, {})[with_] = None
    console.print(table)
    for changed, number in numbers.items():
        say(console, f"changes {number}: {changed}")
    for note, of in noted.items():
        everywhere = all(note in row.notes for row in rows.values())
        warn(console, note if everywhere else f"{', '.join(of)}: {note}")


def _aligned_table(
    title: str, columns: Sequence[str], left: Collection[str] = ("",), **style: Any
) -> Table:
    """A table whose columns are to the right, but those that are named."""
    table = Table(title=title, title_justify="left", caption_justify="left", **style)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return table


def _work_table(plan: Estimate) -> Table:
    counts, rows = plan.counts, plan.network_rows
    varying = len(counts.kinds) > 1
    table = _aligned_table(
        "work", ("", "an iteration, on average" if varying else "an iteration", "the run")
    )

    def row(name: str, of: Callable[[CountedIteration], float]) -> None:
        table.add_row(
            name, f"{counts.mean(of):,.{1 if varying else 0}f}", f"{counts.total(of):,.0f}"
        )

    evaluations = COUNTS_OF_ITERATION["evaluations"]
    each = sorted({evaluations(iteration) / counts.prompts for iteration, _ in counts.kinds})
    span = " to ".join(f"{number:,.10g}" for number in dict.fromkeys((each[0], each[-1])))
    row(f"network evaluations: {counted(counts.prompts, 'prompt')} x {span}", evaluations)
    if rows > 1:
        row(
            "  rows of the network: guidance takes two an evaluation",
            lambda it: it.network_rows(rows),
        )
    row("rows of the training pass, forward and backward", COUNTS_OF_ITERATION["training_rows"])
    if plan.config.algorithm.uses_base or plan.config.algorithm.uses_old:
        row(
            "  and without gradient, under the untrained or the old weights",
            COUNTS_OF_ITERATION["reference_rows"],
        )
    row("optimizer steps", COUNTS_OF_ITERATION["optimizer_steps"])
    row("pictures decoded", COUNTS_OF_ITERATION["images"])
    for name in plan.config.rewards:
        row(f"pictures scored by {name}", COUNTS_OF_ITERATION["images"])
    times, judged = counts.times_evaluated, ", ".join(plan.config.all_rewards)
    evaluated = f"{counted(counts.heldout, 'prompt')} x {counts.heldout_steps}"
    table.add_section()
    table.add_row("", "an evaluation", counted(times, "evaluation"))
    for name, once in {
        f"network evaluations: {evaluated}": counts.heldout_evaluations,
        f"pictures decoded, and scored by {judged}": counts.heldout,
    }.items():
        table.add_row(name, f"{once:,}", f"{once * times:,}")
    if counts.spread:
        table.add_row("network evaluations for diversity", "", f"{counts.spread:,}")
    return table


def _memory_table(plan: Estimate, target: Target) -> Table:
    memory = plan.memory
    table = _aligned_table("memory", ("", " "))

    def section(title: str, sizes: Mapping[str, int]) -> None:
        table.add_section()
        table.add_row(f"[italic]{title}[/]")
        for name, size in sizes.items():
            if size:
                table.add_row(f"  {name}", in_bytes(size))

    section("stays, from the first update on", memory.parts)
    section("comes and goes", memory.working)
    section("peaks", memory.moments)
    table.add_section()
    if target.cuda:
        table.add_row(
            f"needed: the largest, {percent(SLACK)} for gaps and {in_bytes(CONTEXT_BYTES)} for CUDA (assumed)",
            in_bytes(memory.needed),
        )
    table.add_row(f"there is, on {target.name}", in_bytes(target.capacity))
    table.add_section()
    table.add_row("the machine's own memory, to load the models", in_bytes(memory.host))
    copies = plan.config.trainer.keep_checkpoints + 1  # those that are kept, and the next one
    table.add_row(
        f"disk: {copies} checkpoints at a time, and the final weights", in_bytes(memory.written)
    )
    if memory.embeddings:
        table.add_row(
            f"disk: embeddings of {plan.distinct_prompts:,} prompts", in_bytes(memory.embeddings)
        )
    for name, size in memory.files.items():
        if size:
            row = f"download and disk: the files of {name}, with {BYTES_IN_FILES} to {2 * BYTES_IN_FILES} bytes a parameter"
            table.add_row(row, f"{in_bytes(size)} to {in_bytes(2 * size)}")
    return table


def _time_table(seconds: PlannedSeconds, counts: Counts) -> Table:
    table = _aligned_table("time", ("", "an iteration", "the run"), caption=seconds.basis)
    for name, once in seconds.iteration.items():
        table.add_row(name, planned(once), planned(once * counts.iterations))
    for name in ("encoding prompts ahead", "compiling"):
        if once := getattr(seconds, name.split()[0]):
            table.add_row(name, "", planned(once))
    evaluations = (
        f"{counted(counts.times_evaluated, 'evaluation')}, {planned(seconds.evaluation)} each"
    )
    table.add_row(evaluations, "", planned(seconds.evaluation * counts.times_evaluated))
    if counts.spread:
        beside = counts.looks - counts.times_evaluated
        table.add_row("diversity", "", planned(seconds.evaluation * beside))
    table.add_row(
        "together", planned(sum(seconds.iteration.values())), planned(seconds.run), style="bold"
    )
    return table


def _after_ten_minutes(answer: PlanAnswer) -> str:
    """What one should see by then, and what collapse looks like."""
    reached = answer.reached
    assert reached is not None
    if not reached.evaluated:
        return "After 10 minutes, loading aside, the base is still being evaluated."
    after = " and ".join(map(str, reached.evaluated))
    done = f"iteration {reached.iteration} of {answer.plan.counts.iterations}"
    return (
        f"After 10 minutes, loading aside: {done}, evaluated after {after}. `g2rpo report` shows it; "
        "the alarms hacking, decline, pictures and diversity are what collapse looks like."
    )


def _bought(answer: PlanAnswer) -> str:
    """How many iterations some times buy (`trainer.max_hours`)."""
    whole, told = answer.plan.counts.iterations, []
    for hours, count in answer.bought.items():
        told.append(f"{'all ' if count == whole else ''}{count} in {hours} h")
        if count == whole:
            break
    return f"Of {whole} iterations: {', '.join(told)}. --within 3h stops in that time; `g2rpo resume` goes on."


def _verdict(answer: PlanAnswer) -> list[str]:
    """Whether it fits, and else what would make it fit."""
    plan, target, alternative = answer.plan, answer.target, answer.alternative
    there = f"{in_bytes(plan.memory.needed)} of {in_bytes(target.capacity)}"
    if not target.cuda:
        there += ", this machine's RAM"
    where = f"{plan.ranks} x {target.name}, each" if plan.ranks > 1 else target.name
    if answer.fits:
        took = f", {_planned_in(answer.seconds.run)}" if answer.seconds else ""
        files = sum(plan.memory.files.values())
        far = is_hub_id(plan.config.policy.path)
        fetch = f"; {in_bytes(files)} to {in_bytes(2 * files)} to download" if far else ""
        return [f"[green]It fits[/] {where}: {there}{took}{fetch}."]
    holding = [key for key in CARDS if find_target(key).holds(plan)]
    each = (
        "no card here would hold a rank" if plan.ranks > 1 else "no single card here would hold it"
    )
    elsewhere = f"; it would on {', '.join(holding)}" if holding else f", and {each}"
    shown = elsewhere if target.cuda and not target.limited else ""
    said = [f"[bold red]It does not fit[/] {where}: {there}{shown}."]
    if alternative is None:
        return [
            *said,
            "Nothing that this command knows makes it fit; a smaller model or picture might.",
        ]
    took = f" and takes {_planned_in(alternative.seconds.run)}" if alternative.seconds else ""
    given = " ".join(alternative.overrides)
    return [*said, f"With `{given}` it needs {in_bytes(alternative.needed)}{took}."]


def _millions(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def duration(seconds: float) -> str:
    """1.2 s, 3 min, 5.1 h, 12.3 days."""
    size, unit = unit_of(seconds)
    return f"{_digits(seconds / size, unit)} {unit}"


def _planned_in(seconds: float) -> str:
    return f"{planned(seconds).replace(', ', ' (')})"


def planned(seconds: float) -> str:
    """A planned duration, with the interval in which nine of ten lie: 5.0 h, 4.2 to 5.8."""
    size, unit = unit_of(seconds)
    low, high = (_digits(seconds * bound / size, unit) for bound in TIME_SPREAD)
    return f"{duration(seconds)}, {low} to {high}"


def unit_of(seconds: float) -> tuple[int, str]:
    """The largest unit of which there are two at least, in seconds, and its name."""
    larger = ((86400, "days"), (3600, "h"), (60, "min"))
    return next(((size, unit) for size, unit in larger if seconds >= 2 * size), (1, "s"))


def _digits(number: float, unit: str) -> str:
    return f"{number:.0f}" if unit == "s" and number >= 20 else f"{number:.1f}"
