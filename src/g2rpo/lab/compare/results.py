"""The results of a study: results.json, a page of tables, and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from g2rpo.core.errors import UserError
from g2rpo.core.files import write_whole
from g2rpo.core.plain import as_json, read_as
from g2rpo.core.statistics import Interval
from g2rpo.evaluation.controls import Controls
from g2rpo.evaluation.gains import RateGain
from g2rpo.evaluation.sweep import Judged as JudgedRow
from g2rpo.lab.compare.study import (
    AGAIN,
    History,
    Judged,
    Knob,
    Outcome,
    Study,
    best_knobs,
    curve,
    judged_scores,
    lines,
    save_curves,
)
from g2rpo.monitor.metrics import read_metrics
from g2rpo.monitor.scores import Row, read_rows
from g2rpo.runs.directory import EvaluationDirectory, StudyDirectory

FREE = {"best": "no training: best free knob", "best_of": "no training: best of several"}


@dataclass(frozen=True)
class _WithControls:
    """Of an evaluation's results.json."""

    controls: Controls


@dataclass(frozen=True)
class Cell:
    """The results of a cell: its learning rate, what its pilots gained, and its runs, one per seed."""

    learning_rate: float
    gains: Sequence[RateGain]
    folders: Sequence[Path]
    runs: Sequence[History]
    judged: Sequence[Path]

    def spent(self, rates: Sequence[float]) -> dict[str, Any]:
        """The mean cost of a run."""
        return {
            "learning_rate": self.learning_rate,
            "at_edge": len(rates) > 1 and self.learning_rate in (min(rates), max(rates)),
            "iterations": self.runs[0].iterations[-1],
            "evaluations": float(np.mean([run.work[-1] for run in self.runs])),
            "pictures": float(np.mean([_pictures(folder) for folder in self.folders])),
            "seconds": float(np.mean([run.seconds[-1] for run in self.runs])),
        }

    def scores(self, base: Path) -> Judged:
        """[S, N] by (steps, reward), as many as of the `base`."""
        tables = [_read_judged(folder) for folder in self.judged]
        _check_alike({base: _sizes(_read_judged(base)), **dict(zip(self.judged, map(_sizes, tables), strict=True))})
        return {key: np.stack([table[key] for table in tables]) for key in tables[0]}


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
        _check_alike({folder: run.iterations for folder, run in zip(cell.folders, cell.runs, strict=True)})
    lengths = {path: _lengths(run) for cell in cells.values() for path, run in zip(cell.folders, cell.runs, strict=True)}
    _check_alike(lengths)
    scores = {name: cell.scores(base) for name, cell in cells.items()}
    untrained = _read_judged(base)
    table = lines(untrained, scores)
    knobs = []
    if controls is not None:
        found = read_as(_WithControls, EvaluationDirectory(controls).results).controls
        knobs = best_knobs(found, {reward for _, reward in untrained})
    rewards = next(iter(cells.values())).runs[0].scores[0]
    curves = {reward: {name: curve(cell.runs, reward) for name, cell in cells.items()} for reward in rewards}
    spent = {name: cell.spent(study.rates) for name, cell in cells.items()}
    gains = {name: cell.gains for name, cell in cells.items() if cell.gains}
    prompts = next(iter(next(iter(scores.values())).values())).shape[1]
    results = {
        "study": study.model_dump(mode="json"),
        "prompts": prompts,
        "intervals": "95% over training seeds and held-out prompts: crossed bootstrap, 2000 resamples; of one seed Student's t",
        "evaluations_count": "rollout evaluations, and 3 for each latent of a training pass (4 with a KL term)",
        "seconds_per_evaluation": dict(prices),
        "pilots": gains,
        "spent": spent,
        "judged": table,
        **({"controls": knobs} if knobs else {}),
        "curves": curves,
    }
    text = markdown(study, table, spent, gains, prompts, trained, knobs)
    files = StudyDirectory(out)
    write_whole(files.results, as_json(results, 1).encode())
    write_whole(files.page, text.encode())
    save_curves(files.curves, curves, trained)
    return StudyResults(study, out, table, knobs, trained, prompts)


def markdown(
    study: Study,
    table: Sequence[Outcome],
    spent: Mapping[str, Mapping[str, Any]],
    gains: Mapping[str, Sequence[RateGain]],
    prompts: int,
    trained: Sequence[str],
    knobs: Sequence[Knob] = (),
) -> str:
    """The results as a page."""
    budget = ", ".join(
        [f"{study.budget:g} {study.unit}", *(f"{amount:g} for {cell}" for cell, amount in study.budgets.items())]
    )
    parts = [
        f"# {', '.join(study.cells)} on {study.recipe}",
        f"Budget of a run: {budget}. {study.seeds} seeds, {prompts} held-out prompts, one noise for all. Brackets: 95 % "
        "intervals over seeds and prompts.",
        "## Spent, per run",
        _rows(
            ["cell", "learning rate", "iterations", "network evaluations*", "pictures", "seconds of training"],
            [
                [
                    cell,
                    f"{cost['learning_rate']:g}" + (" (edge of the sweep)" if cost["at_edge"] else ""),
                    str(cost["iterations"]),
                    f"{cost['evaluations']:,.0f}",
                    f"{cost['pictures']:,.0f}",
                    f"{cost['seconds']:,.0f}",
                ]
                for cell, cost in spent.items()
            ],
        ),
        "\\* of rollouts, and three for each latent of a training pass, four with a KL term.",
    ]
    rewards = list(dict.fromkeys(line.reward for line in table))
    names = [f"{name} ({'trained' if name in trained else 'judged'})" for name in rewards]
    for steps in study.steps:
        at = {(line.cell, line.reward): line for line in table if line.steps == steps}
        parts.append(f"## {steps} steps: change against the base")
        changes = [[cell, *(f"{at[cell, name].change:+}" for name in rewards)] for cell in study.cells]
        if knobs and steps == study.steps[0]:
            changes += [[label, *cells] for label, cells in knob_rows(knobs, rewards)]
        parts.append(_rows(["cell", *names], changes))
        first, *others = study.cells
        if others:
            parts.append(f"## {steps} steps: lead over {first}")
            parts.append(
                _rows(["cell", *names], [[cell, *(f"{at[cell, name].lead:+}" for name in rewards)] for cell in others])
            )
    if gains:
        parts.append(
            "## Pilots: gain in the trained rewards, in standard deviations of the base, on training prompts\n\n"
            "In brackets a standard error below and above. Taken is the smallest rate that is within a standard error of the "
            "best and has no alarm that the model gets worse."
        )
        parts.append(
            _rows(
                ["cell", *(f"{rate:g}" for rate in study.rates)],
                [
                    [cell, *(_pilot(one, one.rate == spent[cell]["learning_rate"]) for one in tried)]
                    for cell, tried in gains.items()
                ],
            )
        )
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


def _lengths(run: History) -> dict[str, int]:
    """Held-out prompts by reward."""
    return {name: len(values) for name, values in run.scores[0].items()}


def _sizes(judged: Judged) -> dict[tuple[int, str], int]:
    return {key: len(values) for key, values in judged.items()}


def _check_alike(found: Mapping[Path, Any]) -> None:
    """UserError for a folder that has something else than the first, so that its scores cannot be set beside the first's."""
    first, *others = found
    for folder in others:
        if found[folder] != found[first]:
            raise UserError(
                f"{folder}: has other evaluations than {first}; delete the wrong one, and the same command makes it again"
            )


def _read_judged(folder: Path) -> Judged:
    return judged_scores(_read_rows(folder))


def _read_rows(folder: Path) -> list[Row]:
    """The rows of an evaluation, with each of its pictures once."""
    path = EvaluationDirectory(folder).pictures
    rows = read_rows(path, JudgedRow, AGAIN)
    indices: dict[tuple[Any, ...], list[int]] = {}
    for row in rows:
        indices.setdefault((row["steps"], row["side"], row.get("control")), []).append(row["index"])
    if any(sorted(own) != list(range(len(own))) for own in indices.values()):
        raise UserError(f"{path}: lacks pictures, or has one twice; {AGAIN}")
    return rows


def _pictures(run: Path) -> int:
    return sum(row["images"] for row in read_metrics(run) if row["kind"] == "train")
