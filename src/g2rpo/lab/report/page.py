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
from g2rpo.config.algorithms import config_name
from g2rpo.config.resolve import differences, resolve
from g2rpo.core.errors import UserError
from g2rpo.core.files import write_whole
from g2rpo.lab.report.charts import alarm_mark, compact, key_mark
from g2rpo.lab.report.history import RewardChange, RunHistory, SeedGroup, read_runs, rollout_seconds, seed_groups
from g2rpo.lab.report.panels import cost_charts, granularity_table, health, look_charts, reward_charts, step_charts
from g2rpo.lab.report.pictures import first_group, pictures, shown_pictures
from g2rpo.lab.report.verdict import decimals, effect, figures, fixed, in_time, model_name, signed, summary_of, verdict
from g2rpo.monitor.alarms import ALARM_ADVICE
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
    environment.filters |= {"compact": compact, "figures": figures, "fixed": fixed, "signed": signed}
    environment.globals |= {
        "decimals": decimals,
        "effect": effect,
        "first_group": first_group,
        "from_recipe": from_recipe,
        "key_mark": key_mark,
        "phases": phases,
        "states": sentences_of_runs,
        "summary": summary_of,
        "verdict": verdict,
    }
    environment.tests["finite"] = math.isfinite
    groups = seed_groups(runs)
    keys = {run.name: key_mark(group.style) for group in groups for run in group.runs}
    runs = [run for group in groups for run in group.runs]
    shown = pictures(runs)
    frames = [frame for each in shown for frame in shown_pictures(each)]
    charts, constants = health(groups)
    return environment.get_template("page.html").render(
        title=" · ".join(keys),
        runs=runs,
        keys=keys,
        several=len(runs) > 1,
        groups=groups,
        facts=table_of(facts, runs),
        results=results(groups),
        alarms=[(run, one) for run in runs for one in run.alarms()],
        advice=ALARM_ADVICE,
        alarm_key=alarm_mark(),
        pictures=dict(zip(keys, shown, strict=True)),
        marked=any(frame["right"] is not None for frame in frames),
        edited=any(card["input"] for each in shown for card in each["cards"]),
        looks=look_charts(groups),
        rewards=reward_charts(groups),
        steps=step_charts(groups),
        granularities=granularity_table(groups),
        health=charts,
        constants=constants,
        cost=cost_charts(groups),
        costs=table_of(costs, runs),
        apart=between(runs),
        version=__version__,
    )


def state(run: RunHistory) -> str:
    """One sentence: finished, or how far it got."""
    total = run.config.trainer.iterations
    if run.finished:
        return f"Finished: {total} iterations."
    if not run.rows:
        return f"Unfinished: nothing is logged yet of {total} iterations."
    again = ""
    if run.results and (left := run.results.rolled_back_from) is not None:
        if run.iteration <= left:
            best = f"the weights are those after {run.results.iteration}, the best evaluation"
            return f"Ended by an alarm after {run.iteration} of {total} iterations: {best}."
    elif run.results:
        again = f" It had finished after {run.results.iteration}, and was extended."
    return f"Unfinished: {run.iteration} of {total} iterations are logged; the run goes on, or it stopped early.{again}"


def sentences_of_runs(line: SeedGroup) -> list[tuple[bool, str]]:
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
    c, plan = run.config, run.files.read_plan()
    judged = f"; judged at {c.judged.width} × {c.judged.height}" if c.judged_size else ""
    told = {
        "Model": model_name(c.policy),
        "Trained": f"an adapter (LoRA of rank {c.policy.lora_rank})" if c.policy.tuning == "lora" else "all weights",
        "Continues": c.policy.adapter,
        "Assistant in training": c.policy.assistant,
        "Pictures": f"{c.policy.width} × {c.policy.height} pixels, {c.sampling.num_steps} steps{judged}",
        "Algorithm": config_name(c.algorithm),
        "Recipe": c.recipe or "–",
        "Trained on": ", ".join(f"{name} × {entry.weight:g}" for name, entry in c.rewards.items()),
        "Judged only": ", ".join(c.evaluation.rewards) or "–",
        "Prompts": f"{c.prompts.train}, {c.trainer.prompts_per_iteration} an iteration",
        "Held-out prompts": c.evaluation.prompts,
        "Iterations": f"{run.iteration} of {c.trainer.iterations}",
        "Time": in_time(run.seconds),
        "Seed": str(c.trainer.seed),
        "Learning rate": pilots(run),
        "Plan": plan and f"on {plan.card}, {plan}",
    }
    if run.starts:
        first, last, again = run.starts[0], run.starts[-1], len(run.starts) - 1
        resumed = f", resumed {'once' if again == 1 else f'{again} times'}" if again else ""
        told |= {
            "Started": first.time.replace("T", " ").replace("+00:00", " UTC") + resumed,
            "Software": f"g2rpo {last.g2rpo}, torch {last.torch}, Python {last.python}",
            "Device": last.device,
            "Commit": last.commit,
        }
    return {name: text for name, text in told.items() if text}


def pilots(run: RunHistory) -> str | None:
    """The rate that pilots chose, and their gains in standard deviations of the base."""
    sweep = run.files.read_rates()
    if sweep is None or sweep.rate is None:
        return None
    tried = sorted(sweep.pilots, key=lambda pilot: pilot.rate)
    rates = ", ".join(f"{pilot.rate:g}" for pilot in tried)
    gains = ", ".join(f"{pilot.gain:+.2f}{' (alarm)' if pilot.alarms else ''}" for pilot in tried)
    return f"{sweep.rate:g}, chosen from {rates} by short runs on training prompts, with gains of {gains}"


def results(groups: Sequence[SeedGroup]) -> list[list[dict[str, Any]]]:
    """The headline table by reward: base against tuned for every line that has both, with the places of the change and of its
    interval on a scale that all lines of a reward share."""
    told: dict[str, list[tuple[SeedGroup, RewardChange]]] = {}
    for group in groups:
        for change in group.changes():
            told.setdefault(change.reward, []).append((group, change))
    rows = []
    for own in sorted(told.values(), key=lambda own: not any(change.trained for _, change in own)):
        ends = [[change.change, *change.interval] for _, change in own]
        reach = max([abs(end) for each in ends for end in each if math.isfinite(end)], default=0.0) or 1.0
        rows.append(
            [
                {"group": group, "change": change, "places": [50 + 45 * end / reach for end in each]}
                for (group, change), each in zip(own, ends, strict=True)
            ]
        )
    return rows


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
        "Training": in_time(total["seconds"]),
        "… an iteration": in_time(total["seconds"] / len(iterations)),
        "Evaluation": in_time(sum(row["seconds"] for row in run.evaluations)),
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
    return [(name, in_time(value), 100 * value / whole if whole else 0.0) for name, value in spent.items()]


def between(runs: Sequence[RunHistory]) -> list[tuple[str, list[str]]]:
    """Config keys in which the runs differ, with the value of each."""
    rows: dict[str, list[str]] = {}
    for place, run in enumerate(runs):
        for key, (first, own) in differences(runs[0].config, run.config).items():
            rows.setdefault(key, [_word(first)] * len(runs))[place] = _word(own)
    return list(rows.items())


def from_recipe(run: RunHistory) -> list[tuple[str, str, str]] | None:
    """(key, recipe's value, run's value) where they differ; None if the run's recipe is unknown."""
    if run.config.recipe not in recipes.names():
        return None
    recipe = resolve(recipes.settings(run.config.recipe), source=f"recipe {run.config.recipe}")
    return [(key, _word(theirs), _word(own)) for key, (theirs, own) in differences(recipe, run.config).items()]


def _word(value: Any) -> str:
    return "–" if value is None else str(value)
