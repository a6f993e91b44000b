"""The report of runs as one self-contained HTML page."""

from __future__ import annotations

import math
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from g2rpo import __version__
from g2rpo.config import recipes
from g2rpo.config.algorithms import config_name
from g2rpo.config.resolve import differences, resolve
from g2rpo.core.errors import UserError, counted
from g2rpo.core.files import write_whole
from g2rpo.core.statistics import RIGHT, Comparison, fixed, in_time, percent, signed
from g2rpo.lab.report.charts import (
    compact,
    key_mark,
    look_charts,
    noise_table,
    reward_charts,
    update_charts,
)
from g2rpo.lab.report.history import (
    RunHistory,
    SeedGroup,
    model_name,
    seed_groups,
    summary_of,
)
from g2rpo.lab.report.pictures import first_group, pictures
from g2rpo.train.monitor.alarms import HELPS
from g2rpo.train.run.folder import Run

ONE_PAGE_AT_A_TIME = Lock()
"""Threads share matplotlib's settings."""
LEAST_SHARE = 0.005
"""Of a run's time: shorter phases are left out."""


def templates_of(package: str) -> Environment:
    """The HTML templates of a package; what they are given is escaped."""
    environment = Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["coded"] = coded
    return environment


def coded(text: str) -> Markup:
    """Text in which a command stands in backticks, as HTML."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def write_page(runs: Sequence[RunHistory], out: Path | None) -> Path:
    """Writes the page of these runs and returns where, by default RUN/report.html for one run and
    ./report.html for several; an older one is replaced."""
    path = out or (runs[0].files if len(runs) == 1 else Run(Path())).report
    page = render(runs).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, page)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    return path


def render(runs: Sequence[RunHistory]) -> str:
    """The page of one or several runs."""
    groups = seed_groups(runs)
    runs = [run for group in groups for run in group.runs]
    with ONE_PAGE_AT_A_TIME:
        updates, constants = update_charts(groups)
        return environment.get_template("page.html").render(
            runs=runs,
            keys={run.name: key_mark(group.style) for group in groups for run in group.runs},
            groups=groups,
            results=results(groups),
            alarms=[(run, one) for run in runs for one in run.alarms()],
            pictures=list(zip(runs, pictures(runs), strict=True)),
            rewards=reward_charts(groups),
            looks=look_charts(groups),
            updates=updates,
            constants=constants,
            noise={axis: noise_table(groups, axis) for axis in ("step", "granularity")},
            costs=table_of(costs, runs),
            facts=table_of(facts, runs),
            settings=settings(runs),
        )


def state(run: RunHistory) -> str:
    """One sentence: finished, or how far it got."""
    total = counted(run.config.trainer.iterations, "iteration")
    if run.finished:
        return f"Finished: {total}."
    if not run.rows:
        return f"Unfinished: nothing is logged yet of {total}."
    again = ""
    if run.results:
        again = f" It had finished after {run.results.iteration}, and was extended."
    return f"Unfinished: {run.iteration} of {total} are logged; the run goes on, or it stopped early.{again}"


def states(group: SeedGroup) -> dict[str, list[RunHistory]]:
    """The runs of a line by what is said of their state."""
    told: dict[str, list[RunHistory]] = {}
    for run in group.runs:
        told.setdefault(state(run), []).append(run)
    return told


def results(
    groups: Sequence[SeedGroup],
) -> list[tuple[str, float, list[tuple[SeedGroup, Comparison]]]]:
    """By score, right pictures and trained rewards first, the largest end of an interval, and the
    change of every line."""
    trained = {name for group in groups for name in group.config.trained}
    names, rows = dict.fromkeys(name for group in groups for name in group.changes), []
    for name in sorted(names, key=lambda name: (name != RIGHT, name not in trained)):
        own = [(group, group.changes[name]) for group in groups if name in group.changes]
        changes = [one.change for _, one in own]
        ends = [abs(end) for one in changes for end in (one.mean, one.low, one.high)]
        rows.append((name, max(filter(math.isfinite, ends), default=0) or 1, own))
    return rows


def table_of(
    of: Callable[[RunHistory], dict[str, Any]], runs: Sequence[RunHistory]
) -> list[tuple[str, list[str]]]:
    """Rows (name, value by run) from `of(run)` of each run, those with a value; a dash for a
    missing one."""
    told = [of(run) for run in runs]
    names = dict.fromkeys(name for each in told for name, value in each.items() if value)
    return [(name, [each.get(name) or "–" for each in told]) for name in names]


def facts(run: RunHistory) -> dict[str, Any]:
    """Model, rewards, prompts, length and software of a run."""
    c, plan = run.config, run.files.read_plan()
    judged = f"; judged at {c.judged.width} × {c.judged.height}" if c.judged_size else ""
    told: dict[str, Any] = {
        "Model": model_name(c.policy),
        "Trained": f"an adapter (LoRA of rank {c.policy.lora_rank})"
        if c.policy.tuning == "lora"
        else "all weights",
        "Continues": c.policy.adapter,
        "Pictures": f"{c.policy.width} × {c.policy.height} pixels, {c.sampling.num_steps} steps{judged}",
        "Algorithm": config_name(c.algorithm),
        "Recipe": c.recipe,
        "Trained on": ", ".join(f"{name} × {entry.weight:g}" for name, entry in c.rewards.items()),
        "Judged only": ", ".join(c.evaluation.rewards),
        "Prompts": f"{c.prompts.train}, {c.trainer.prompts_per_iteration} an iteration",
        "Held-out prompts": c.evaluation.prompts,
        "Iterations": f"{run.iteration} of {c.trainer.iterations}",
        "Seed": str(c.trainer.seed),
        "Learning rate": f"{c.optim.learning_rate:g}",
        "Plan": plan and f"on {plan.card}, {plan}",
    }
    if run.starts:
        first, last = run.starts[0], run.starts[-1]
        told |= {
            "Started": first.time.replace("T", " ").replace("+00:00", " UTC"),
            "Resumed": len(run.starts) > 1 and f"{len(run.starts) - 1} ×",
            "Software": f"g2rpo {last.g2rpo}, torch {last.torch}, Python {last.python}",
            "Device": last.device,
            "Commit": last.commit,
        }
    return told


def costs(run: RunHistory) -> dict[str, str]:
    """Totals from the log, and the time of every phase."""
    spent = defaultdict[str, float](float)
    for row in run.iterations:
        for key in row:
            if key.startswith("seconds/"):
                spent[f"… {key.removeprefix('seconds/')}"] += row[key]
    spent["… held-out evaluations"] = sum(row["seconds"] for row in run.evaluations)
    training = sum(row["seconds"] for row in run.iterations)
    told = {"Time": in_time(run.seconds)} | {
        phase: f"{in_time(seconds)}, {percent(seconds / run.seconds)}"
        for phase, seconds in spent.items()
        if seconds > LEAST_SHARE * run.seconds
    }
    if run.iterations:
        pictures = sum(row["images"] for row in run.iterations)
        told["An iteration"] = in_time(training / len(run.iterations))
        told["Network evaluations"] = f"{sum(row['evaluations'] for row in run.iterations):,}"
        told["Pictures scored"] = f"{pictures:,}, {compact(pictures / training, 3)} a second"
    return told


def settings(runs: Sequence[RunHistory]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Config keys in which the runs differ, from the recipe that all began from or, where this
    version has no such, from one another: heads, and rows of (key, values)."""
    heads, configs = [run.name for run in runs], [run.config for run in runs]
    (recipe, *others) = {config.recipe for config in configs}
    if not others and recipe in recipes.names():
        heads = [f"recipe {recipe}", *heads]
        configs = [resolve(recipes.recipe_settings(recipe), source=f"recipe {recipe}"), *configs]
    rows: dict[str, list[str]] = {}
    for place, config in enumerate(configs):
        for key, (first, own) in differences(configs[0], config).items():
            rows.setdefault(key, [_word(first)] * len(configs))[place] = _word(own)
    return heads, list(rows.items())


def _word(value: Any) -> str:
    return "–" if value is None else str(value)


environment = templates_of("g2rpo.lab.report")
environment.filters |= {
    "fixed": fixed,
    "quoted": lambda path: shlex.quote(str(path)),
    "signed": signed,
}
environment.globals |= {
    "advice": HELPS,
    "first_group": first_group,
    "key_mark": key_mark,
    "states": states,
    "summary": summary_of,
    "version": __version__,
}
environment.tests["finite"] = math.isfinite
