"""The report of runs as one self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from g2rpo import __version__
from g2rpo.config import recipes
from g2rpo.config.algorithms import name_of
from g2rpo.config.resolve import differences, resolve
from g2rpo.core.errors import UserError
from g2rpo.core.files import write_whole
from g2rpo.lab.report.charts import alarm_mark, compact, key_mark
from g2rpo.lab.report.group import first_group
from g2rpo.lab.report.history import Change, RunHistory, read_runs, rollout_seconds
from g2rpo.lab.report.panels import cost_charts, granularity_table, health, look_charts, reward_charts, step_charts
from g2rpo.lab.report.pictures import frames_of, pictures
from g2rpo.lab.report.seeds import SeedGroup, seed_groups
from g2rpo.lab.report.verdict import effect, summary, verdict
from g2rpo.lab.report.words import decimals, figures, fixed, model_name, signed, span
from g2rpo.monitor.alarms import ADVICE
from g2rpo.run.run import Run


def templates_of(package: str) -> Environment:
    """The HTML templates of a package; what they are given is escaped."""
    return Environment(
        loader=PackageLoader(package), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def compare_style() -> str:
    """The style sheet of pairs of pictures that lie beside each other or one over the other."""
    return files("g2rpo.lab.report").joinpath("templates/compare.css").read_text(encoding="utf-8")


def write_page(directories: Sequence[Path], out: Path | None) -> Path:
    """Writes the page of these runs and returns where, by default RUN/report.html for one run and ./report.html for several; an
    older one is replaced."""
    runs = read_runs(directories)
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
    environment = templates_of("g2rpo.lab.report")
    environment.filters |= {"compact": compact, "span": span}
    lines = seed_groups(runs)
    runs = [run for line in lines for run in line.runs]
    styles = [style for style, line in enumerate(lines) for _ in line.runs]
    charts, constants = health(lines)
    return environment.get_template("page.html").render(
        title=" · ".join(run.name for run in runs),
        runs=runs,
        several=len(runs) > 1,
        lines=lines,
        seeds=any(len(line.runs) > 1 for line in lines),
        keys=[key_mark(style) for style in styles],
        line_keys=[key_mark(style) for style in range(len(lines))],
        samples={look: key_mark(0, look) for look in ("marked", "faint", "pale", "range")} | {"alarm": alarm_mark()},
        summaries=[summary(line) for line in lines],
        states=[states(line) for line in lines],
        facts=table_of(facts, runs),
        results=results(lines),
        controls=[controls(run) for run in runs],
        alarms=alarms(runs, styles),
        pictures=(shown := pictures(runs)),
        marked=any(frame["right"] is not None for run in shown for frame in frames_of(run)),
        edited=any(card["input"] for run in shown for card in run["cards"]),
        groups=[first_group(run) for run in runs],
        looks=look_charts(lines),
        rewards=reward_charts(lines),
        steps=step_charts(lines),
        granularities=granularity_table(lines),
        health=charts,
        constants=constants,
        cost=cost_charts(lines),
        costs=table_of(costs, runs),
        phases=[phases(run) for run in runs],
        apart=between(runs),
        recipes=[from_recipe(run) for run in runs],
        version=__version__,
    )


def state(run: RunHistory) -> str:
    """One sentence: finished, or how far it got."""
    total = run.config.trainer.iterations
    if run.finished:
        return f"Finished: {total} iterations."
    if not run.rows:
        return f"Unfinished: nothing is logged yet of {total} iterations."
    if run.results and run.results.rolled_back_from and run.iteration <= run.results.rolled_back_from:
        best = f"the weights are those after {run.results.iteration}, the best evaluation"
        return f"Ended by an alarm after {run.iteration} of {total} iterations: {best}."
    once = run.results if not run.rolled_back else None
    again = f" It had finished after {once.iteration}, and was extended." if once else ""
    return f"Unfinished: {run.iteration} of {total} iterations are logged; the run goes on, or it stopped early.{again}"


def states(line: SeedGroup) -> list[tuple[bool, str]]:
    """By run whether it has finished, and a sentence; one for runs of which the same can be said."""
    told = [(run.finished, state(run)) for run in line.runs]
    if len(set(told)) == 1:
        return told[:1]
    return [(finished, f"{run.name}: {said}") for run, (finished, said) in zip(line.runs, told, strict=True)]


def table_of(of: Callable[[RunHistory], dict[str, str]], runs: Sequence[RunHistory]) -> list[tuple[str, list[str]]]:
    """Rows (name, value by run) from `of(run)` of each run; a dash for a missing value."""
    told = [of(run) for run in runs]
    names = dict.fromkeys(name for each in told for name in each)
    return [(name, [each.get(name, "–") for each in told]) for name in names]


def facts(run: RunHistory) -> dict[str, str]:
    """Model, rewards, prompts, length and software of a run."""
    c = run.config
    weights = ", ".join(f"{name} × {entry.weight:g}" for name, entry in c.rewards.items())
    told = {
        "Model": model_name(c.policy),
        "Trained": f"an adapter (LoRA of rank {c.policy.lora_rank})" if c.policy.tuning == "lora" else "all weights",
        **({"Continues": c.policy.adapter} if c.policy.adapter else {}),
        **({"Assistant in training": c.policy.assistant} if c.policy.assistant else {}),
        "Pictures": f"{c.policy.width} × {c.policy.height} pixels, {c.sampling.num_steps} steps"
        + (f"; judged at {c.judged.width} × {c.judged.height}" if c.judged_size else ""),
        "Algorithm": name_of(c.algorithm),
        "Recipe": c.recipe or "–",
        "Trained on": weights,
        "Judged only": ", ".join(c.evaluation.rewards) or "–",
        "Prompts": f"{c.prompts.train}, {c.trainer.prompts_per_iteration} an iteration",
        "Held-out prompts": c.evaluation.prompts,
        "Iterations": f"{run.iteration} of {c.trainer.iterations}",
        "Time": span(run.seconds),
        "Seed": str(c.trainer.seed),
        **pilots(run),
        **({} if (both := run.files.read_plan()) is None else {"Plan": f"on {both.card}, {both}"}),
    }
    if run.starts:
        first, last = run.starts[0], run.starts[-1]
        resumed = (
            f", resumed {len(run.starts) - 1} times" if len(run.starts) > 2 else ", resumed once" if len(run.starts) > 1 else ""
        )
        told |= {
            "Started": first.time.replace("T", " ").replace("+00:00", " UTC") + resumed,
            "Software": f"g2rpo {last.g2rpo}, torch {last.torch}, Python {last.python}",
            "Device": last.device,
        }
        if last.commit:
            told["Commit"] = last.commit
    return told


def pilots(run: RunHistory) -> dict[str, str]:
    """The rate that pilots chose, and their gains in standard deviations of the base."""
    sweep = run.files.read_rates()
    if sweep is None or sweep.rate is None:
        return {}
    tried = sorted(sweep.pilots, key=lambda pilot: pilot.rate)
    rates = ", ".join(f"{pilot.rate:g}" for pilot in tried)
    gains = ", ".join(f"{pilot.gain:+.2f}{' (alarm)' if pilot.alarms else ''}" for pilot in tried)
    return {"Learning rate": f"{sweep.rate:g}, chosen from {rates} by short runs on training prompts, with gains of {gains}"}


def results(lines: Sequence[SeedGroup]) -> list[dict[str, Any]]:
    """The headline table: base against tuned for every reward, and for every line that has both."""
    told = [(style, line, change) for style, line in enumerate(lines) for change in line.changes()]
    reach: dict[str, float] = {}
    for _, _, c in told:
        ends = [abs(end) for end in (c.change, *c.interval) if math.isfinite(end)]
        reach[c.reward] = max([reach.get(c.reward, 0.0), *ends])
    order = list(dict.fromkeys(c.reward for _, _, c in sorted(told, key=lambda one: not one[2].trained)))
    rows = []
    for style, line, c in sorted(told, key=lambda one: (order.index(one[2].reward), one[0])):
        change, digits = c.change, decimals(c.error)
        rows.append(
            {
                "reward": c.reward,
                "use": "trained on" if c.trained else "judged only",
                "run": line.name,
                "style": style,
                "iteration": ", ".join(str(each) for each in sorted({*line.judged_after})),
                "base": fixed(c.base, digits),
                "tuned": fixed(c.tuned, digits),
                "change": signed(change, digits),
                "interval": _interval(c, digits),
                "places": _places((change, *c.interval), reach[c.reward]),
                "verdict": verdict(c),
                "effect": effect(c),
            }
        )
    return rows


def _places(values: Sequence[float], reach: float) -> list[float | None]:
    """Where values lie on a scale from -reach to reach, as shares of a plot that is a little wider; None for NaN."""
    return [0.5 + 0.45 * value / (reach or 1.0) if math.isfinite(value) else None for value in values]


def _interval(change: Change, digits: int) -> str:
    if not math.isfinite(change.error):
        return ""
    if change.seeds > 1:
        return f"({' to '.join(signed(end, digits) for end in change.interval)})"
    return f"± {change.margin:.{digits}f}" if math.isfinite(change.margin) else ""


def controls(run: RunHistory) -> dict[str, Any] | None:
    """The table of controls: their means and prices, between those of base and tuned on the same prompts."""
    if not (found := run.controls()):
        return None
    (of,) = found
    rows = []
    for way in of.ways:
        best = {name for name, one in of.best.items() if one.way == way.name}
        cells = [(figures(way.means.get(name)), name in best) for name in of.best]
        rows.append((way.name, way.evaluations, way.readings or "", cells))
    return {"names": list(of.best), "prompts": of.prompts, "rows": rows}


def alarms(runs: Sequence[RunHistory], styles: Sequence[int]) -> list[dict[str, Any]]:
    """Every alarm of every run: iteration, observation, and advice."""
    return [
        {
            "name": one.name,
            "key": key_mark(style),
            "run": run.name,
            "when": str(one.first) if one.first == one.last else f"{one.first} to {one.last}",
            "said": one.said,
            "advice": ADVICE.get(one.name, ""),  # logs of other versions may have other alarms
        }
        for style, run in zip(styles, runs, strict=True)
        for one in run.alarms()
    ]


def costs(run: RunHistory) -> dict[str, str]:
    """Totals and rates from the log."""
    iterations = run.iterations
    if not iterations:
        return {}
    total = {key: sum(row[key] for row in iterations) for key in ("evaluations", "images", "seconds")}
    return {
        "Network evaluations": f"{total['evaluations']:,}",
        "… a second of rollout": compact(total["evaluations"] / sum(map(rollout_seconds, iterations)), 3),
        "Pictures scored": f"{total['images']:,}",
        "… a second": compact(total["images"] / total["seconds"], 3),
        "Training": span(total["seconds"]),
        "… an iteration": span(total["seconds"] / len(iterations)),
        "Evaluation": span(sum(row["seconds"] for row in run.evaluations)),
    }


def phases(run: RunHistory) -> list[tuple[str, str, float]]:
    """Phases of the training and the evaluation: names, times, and shares of the whole in percent."""
    spent: dict[str, float] = {}
    for row in run.iterations:
        for key in row:
            if key.startswith("seconds/"):
                spent[key.removeprefix("seconds/")] = spent.get(key.removeprefix("seconds/"), 0.0) + row[key]
    if run.evaluations:
        spent["evaluation"] = sum(row["seconds"] for row in run.evaluations)
    whole = sum(spent.values())
    return [(name, span(value), 100 * value / whole if whole else 0.0) for name, value in spent.items()]


def between(runs: Sequence[RunHistory]) -> list[tuple[str, list[str]]]:
    """Config keys in which the runs differ, with the value of each."""
    first = runs[0].config
    apart = [differences(first, run.config) for run in runs]
    keys = list(dict.fromkeys(key for each in apart for key in each))
    own = {key: next(pair[0] for each in apart for k, pair in each.items() if k == key) for key in keys}
    return [(key, [_word(each[key][1] if key in each else own[key]) for each in apart]) for key in keys]


def from_recipe(run: RunHistory) -> list[tuple[str, str, str]] | None:
    """(key, recipe's value, run's value) where they differ; None if the run's recipe is unknown."""
    if run.config.recipe not in recipes.names():
        return None
    recipe = resolve(recipes.settings(run.config.recipe), source=f"recipe {run.config.recipe}")
    return [(key, _word(theirs), _word(own)) for key, (theirs, own) in differences(recipe, run.config).items()]


def _word(value: Any) -> str:
    return "–" if value is None else str(value)
