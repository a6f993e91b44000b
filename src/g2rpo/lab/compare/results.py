"""The results of a study: results.json, a page of tables, and curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from g2rpo.core.errors import UserError
from g2rpo.core.files import whole_file, write_whole
from g2rpo.core.plain import as_json, read_as
from g2rpo.core.statistics import Interval
from g2rpo.evaluation.sweep import EvaluationDirectory
from g2rpo.evaluation.untrained import Controls
from g2rpo.lab.compare.outcomes import (
    History,
    Knob,
    Outcome,
    Point,
    best_knobs,
    curve,
    lines,
    read_judged,
)
from g2rpo.lab.compare.study import Study, StudyDirectory
from g2rpo.monitor.curves import CurveLine, Panel, save_figure, small_multiples
from g2rpo.run.rates import RateGain

FREE = {"best": "no training: best free knob", "best_of": "no training: best of several"}


@dataclass(frozen=True)
class _WithControls:
    """Of an evaluation's results.json."""

    controls: Controls


@dataclass(frozen=True)
class Cell:
    """The results of a cell: its learning rate, what its pilots gained, and its runs and their evaluations, one per seed."""

    learning_rate: float
    gains: Sequence[RateGain]
    runs: Mapping[Path, History]
    judged: Sequence[Path]

    def spent(self, rates: Sequence[float]) -> dict[str, Any]:
        """The mean cost of a run."""
        runs = list(self.runs.values())
        return {
            "learning_rate": self.learning_rate,
            "at_edge": len(rates) > 1 and self.learning_rate in (min(rates), max(rates)),
            "iterations": runs[0].iterations[-1],
            "evaluations": float(np.mean([run.work[-1] for run in runs])),
            "pictures": float(np.mean([run.pictures for run in runs])),
            "seconds": float(np.mean([run.seconds[-1] for run in runs])),
        }


@dataclass(frozen=True)
class StudyResults:
    """The table of a study whose results are in `out`, and the best free knobs of the base at its first number of steps."""

    study: Study
    out: Path
    table: Sequence[Outcome]
    knobs: Sequence[Knob]
    trained: Sequence[str]
    """The rewards that are trained on."""
    prompts: int


def write_results(
    study: Study,
    out: Path,
    cells: Mapping[str, Cell],
    base: Path,
    trained: Sequence[str],
    prices: Mapping[str, float],
    controls: Path | None = None,
) -> StudyResults:
    """Writes results.json, results.md and curves.png; `base` and `controls` are evaluations of the
    base and of its free knobs."""
    for cell in cells.values():
        _check_alike({folder: run.iterations for folder, run in cell.runs.items()})
    runs = {folder: run for cell in cells.values() for folder, run in cell.runs.items()}
    _check_alike({folder: {name: len(of) for name, of in run.scores[0].items()} for folder, run in runs.items()})
    judged = {folder: read_judged(folder) for folder in (base, *(one for cell in cells.values() for one in cell.judged))}
    _check_alike({folder: {key: len(of) for key, of in scores.items()} for folder, scores in judged.items()})
    untrained = judged[base]
    scores = {
        name: {key: np.stack([judged[one][key] for one in cell.judged]) for key in untrained} for name, cell in cells.items()
    }
    knobs = []
    if controls is not None:
        found = read_as(_WithControls, EvaluationDirectory(controls).results).controls
        knobs = best_knobs(found, {reward for _, reward in untrained})
    rewards = next(iter(runs.values())).scores[0]
    curves = {reward: {name: curve([*cell.runs.values()], reward) for name, cell in cells.items()} for reward in rewards}
    spent = {name: cell.spent(study.rates) for name, cell in cells.items()}
    gains = {name: cell.gains for name, cell in cells.items() if cell.gains}
    results = StudyResults(study, out, lines(untrained, scores), knobs, trained, len(next(iter(untrained.values()))))
    stored = {
        "study": study.model_dump(mode="json"),
        "prompts": results.prompts,
        "intervals": "95% over training seeds and held-out prompts: crossed bootstrap, 2000 resamples; of one seed Student's t",
        "evaluations_count": "rollout evaluations, and 3 for each latent of a training pass (4 with a KL term)",
        "seconds_per_evaluation": dict(prices),
        "pilots": gains,
        "spent": spent,
        "judged": results.table,
        **({"controls": knobs} if knobs else {}),
        "curves": curves,
    }
    files = StudyDirectory(out)
    write_whole(files.results, as_json(stored, 1).encode())
    write_whole(files.page, markdown(results, spent, gains).encode())
    save_study_curves(files.curves, curves, trained)
    return results


def markdown(results: StudyResults, spent: Mapping[str, Mapping[str, Any]], gains: Mapping[str, Sequence[RateGain]]) -> str:
    """The results as a page."""
    study = results.study
    own = [f"{amount:g} for {cell}" for cell, amount in study.budgets.items()]
    budget = ", ".join([f"{study.budget:g} {study.unit}", *own])
    costs = []
    for cell, cost in spent.items():
        edge = " (edge of the sweep)" if cost["at_edge"] else ""
        numbers = [f"{cost[key]:,.0f}" for key in ("evaluations", "pictures", "seconds")]
        costs.append([cell, f"{cost['learning_rate']:g}{edge}", str(cost["iterations"]), *numbers])
    parts = [
        f"# {', '.join(study.cells)} on {study.recipe}",
        f"Budget of a run: {budget}. {study.seeds} seeds, {results.prompts} held-out prompts, one noise for all. "
        "Brackets: 95 % intervals over seeds and prompts.",
        "## Spent, per run",
        _rows(["cell", "learning rate", "iterations", "network evaluations*", "pictures", "seconds of training"], costs),
        "\\* of rollouts, and three for each latent of a training pass, four with a KL term.",
    ]
    rewards = list(dict.fromkeys(line.reward for line in results.table))
    head = ["cell", *(f"{name} ({'trained' if name in results.trained else 'judged'})" for name in rewards)]
    first, *others = study.cells
    for steps in study.steps:
        at = {(line.cell, line.reward): line for line in results.table if line.steps == steps}
        changes = [[cell, *(f"{at[cell, name].change:+}" for name in rewards)] for cell in study.cells]
        if steps == study.steps[0]:
            changes += [[label, *knobs] for label, knobs in knob_rows(results.knobs, rewards)]
        parts += [f"## {steps} steps: change against the base", _rows(head, changes)]
        if others:
            leads = [[cell, *(f"{at[cell, name].lead:+}" for name in rewards)] for cell in others]
            parts += [f"## {steps} steps: lead over {first}", _rows(head, leads)]
    if gains:
        parts.append(
            "## Pilots: gain in the trained rewards, in standard deviations of the base, on training prompts\n\n"
            "In brackets a standard error below and above. Taken is the smallest rate that is within a standard error of the "
            "best and has no alarm that the model gets worse."
        )
        tried = [
            [cell, *(_pilot(one, one.rate == spent[cell]["learning_rate"]) for one in pilots)] for cell, pilots in gains.items()
        ]
        parts.append(_rows(["cell", *(f"{rate:g}" for rate in study.rates)], tried))
    return "\n\n".join(parts) + "\n"


def _pilot(tried: RateGain, chosen: bool) -> str:
    gain = f"{Interval(tried.gain, tried.low, tried.high, count=0):+}"
    alarms = "" if tried.sound else f" {', '.join(tried.alarms)}"
    return (f"**{gain}**" if chosen else gain) + alarms


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def knob_rows(knobs: Sequence[Knob], rewards: Sequence[str]) -> list[tuple[str, list[str]]]:
    """What no training gives, for a table: a label, and a cell for every reward."""
    rows = []
    for kind, label in FREE.items():
        if of := {knob.reward: knob for knob in knobs if knob.kind == kind}:
            rows.append((label, [_knob(of.get(name)) for name in rewards]))
    return rows


def _knob(knob: Knob | None) -> str:
    if knob is None:
        return "–"
    readings = f" and {knob.readings} readings" if knob.readings else ""
    return f"{knob.change:+}, {knob.control}; {knob.evaluations} evaluations{readings} a picture"


def _check_alike(found: Mapping[Path, Any]) -> None:
    """UserError for a folder that has something else than the first, so that its scores cannot be set beside the first's."""
    first, *others = found
    for folder in others:
        if found[folder] != found[first]:
            raise UserError(
                f"{folder}: has other evaluations than {first}; delete the wrong one, and the same command makes it again"
            )


def save_study_curves(path: Path, curves: Mapping[str, Mapping[str, Sequence[Point]]], trained: Sequence[str]) -> None:
    """Draws curves[reward][cell]: a row of panels per reward, against iterations, network evaluations and seconds."""
    spent_in: dict[str, Callable[[Point], float]] = {
        "iterations": lambda point: point.iteration,
        "network evaluations, training included": lambda point: point.work,
        "seconds of training": lambda point: point.seconds,
    }
    rows = []
    for reward, cells in curves.items():
        title = f"{reward} ({'trained on' if reward in trained else 'judged only'}): change"
        rows.append(
            [
                Panel(title if not number else "", change_lines(cells, spent), label)
                for number, (label, spent) in enumerate(spent_in.items())
            ]
        )
    with whole_file(path) as unfinished:
        save_figure(unfinished, small_multiples(rows, legend=True, zero=True))


def change_lines(cells: Mapping[str, Sequence[Point]], spent: Callable[[Point], float]) -> list[CurveLine]:
    """By cell the changes from the base with their intervals, against what was spent."""
    lines = []
    for style, (cell, points) in enumerate(cells.items()):
        changes = [point.change for point in points]
        ends = [(change.low, change.high) for change in changes]
        means, x = [change.mean for change in changes], [spent(point) for point in points]
        lines.append(CurveLine(cell, x, means, style, ends, "marked"))
    return lines
