"""The results of a study: what its runs' folders hold, side by side, as results.json, a page of
tables, and curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g2rpo.config.work import work
from g2rpo.core.errors import UserError, counted
from g2rpo.core.files import whole_file, write_whole
from g2rpo.core.plain import as_json, read_as
from g2rpo.core.statistics import Interval, interval
from g2rpo.lab.compare.study import Study, StudyDirectory
from g2rpo.train.evaluation.sweep import EvaluationDirectory, JudgedSteps
from g2rpo.train.evaluation.untrained import Controls, Way
from g2rpo.train.monitor.curves import CurveLine, Panel, save_figure, small_multiples
from g2rpo.train.monitor.scores import read_rows, scores_of
from g2rpo.train.run.folder import Run

Values = NDArray[np.float64]
MADE_AGAIN = "delete this folder, and the same command makes it again"
Judged = Mapping[tuple[int, str], Values]
"""Scores by (steps, reward): [N] prompts, or [S, N] training seeds by prompts."""


@dataclass(frozen=True)
class Look:
    """An evaluation of a run: after which iteration, what the run had cost until then, and its
    scores [N] by reward."""

    iteration: int
    work: int
    """In network evaluations (`config.work`)."""
    seconds: float
    """Of training, without evaluations."""
    scores: dict[str, Values]


@dataclass(frozen=True)
class History:
    """A finished run."""

    looks: list[Look]
    pictures: int
    """Drawn in training."""
    steps: int
    """Sampling steps of the evaluations."""
    learning_rate: float


def read_run(run: Run) -> History:
    """UserError if its log lacks something."""
    config, rows = run.read_config(), run.read_log()
    names = [*config.rewards, *config.evaluation.rewards]
    spent, clock, pictures, count = 0, 0.0, 0, None
    looks: list[Look] = []
    for row in rows:
        iteration = row["iteration"]
        if row["kind"] == "train":
            spent += work(config, iteration - 1, row["evaluations"])
            clock += row["seconds"]
            pictures += row["images"]
        else:
            read = run.read_scores(iteration, names, count)
            count = len(next(iter(read.values())))
            scores = {name: values.double().numpy() for name, values in read.items()}
            looks.append(Look(iteration, spent, clock, scores))
    iterations, last = [look.iteration for look in looks], config.trainer.iterations
    ends = iterations[:1], iterations[-1:]
    if run.gaps(rows, last) or ends != ([0], [last]) or iterations != sorted({*iterations}):
        raise UserError(
            f"{run.path}: its log lacks iterations or evaluations of the run; {MADE_AGAIN}"
        )
    steps = config.evaluation.num_steps or config.sampling.num_steps
    return History(looks, pictures, steps, config.optim.learning_rate)


def spent(runs: Sequence[History]) -> dict[str, Any]:
    """The mean cost of a cell's run."""
    last = [run.looks[-1] for run in runs]
    return {
        "learning_rate": runs[0].learning_rate,
        "iterations": last[0].iteration,
        "evaluations": float(np.mean([look.work for look in last])),
        "pictures": float(np.mean([run.pictures for run in runs])),
        "seconds": float(np.mean([look.seconds for look in last])),
    }


@dataclass(frozen=True)
class Point:
    """A cell after an evaluation: its cost, averaged over seeds, and the change of a reward against
    the base."""

    iteration: int
    work: float
    seconds: float
    change: Interval


def curve(runs: Sequence[History], reward: str) -> list[Point]:
    """The change of a reward during training, over the runs of all seeds and their common held-out
    prompts."""
    points = []
    base = np.stack([run.looks[0].scores[reward] for run in runs])
    for looks in zip(*(run.looks for run in runs), strict=True):
        change = np.stack([look.scores[reward] for look in looks]) - base
        evaluations = float(np.mean([look.work for look in looks]))
        seconds = float(np.mean([look.seconds for look in looks]))
        points.append(Point(looks[0].iteration, evaluations, seconds, interval(change)))
    return points


def read_judged(folder: EvaluationDirectory) -> Judged:
    """The scores of an evaluation of one side, with each of its pictures once."""
    rows = sorted(read_rows(folder.pictures, JudgedSteps, MADE_AGAIN), key=lambda row: row["index"])
    found: dict[tuple[int, str], Values] = {}
    for steps in sorted({row["steps"] for row in rows}):
        own = [row for row in rows if row["steps"] == steps]
        if [row["index"] for row in own] != list(range(len(own))):
            raise UserError(f"{folder.pictures}: lacks pictures, or has one twice; {MADE_AGAIN}")
        found |= {(steps, name): values.double().numpy() for name, values in scores_of(own).items()}
    return found


def of_runs(runs: Sequence[History], place: int) -> Judged:
    """The scores [S, N] of the evaluation at a `place` in the logs of a cell's runs."""
    return {
        (runs[0].steps, name): np.stack([run.looks[place].scores[name] for run in runs])
        for name in runs[0].looks[0].scores
    }


@dataclass(frozen=True)
class Outcome:
    """The result of a cell for one reward at one step count, over all seeds and prompts."""

    cell: str
    steps: int
    reward: str
    tuned: Interval
    change: Interval
    """Change against the base, on the same prompts and noise."""
    lead: Interval
    """Lead over the first cell, paired by seed and prompt."""


def lines(bases: Mapping[str, Judged], cells: Mapping[str, Judged]) -> list[Outcome]:
    """The table of a study, by step count, reward and cell. Changes are from the cell's own base,
    which differs where a cell has another `policy.quantize` or `policy.adapter`; leads are over the
    first cell."""
    first = next(iter(cells.values()))
    return [
        Outcome(
            name,
            *key,
            tuned=interval(judged[key]),
            change=interval(judged[key] - bases[name][key]),
            lead=interval(judged[key] - first[key]),
        )
        for key in first
        for name, judged in cells.items()
    ]


@dataclass(frozen=True)
class _WithControls:
    """Of an evaluation's results.json."""

    controls: Controls


def write_results(
    study: Study,
    folder: StudyDirectory,
    cells: Sequence[str],
    seeds: Sequence[int],
    trained: Sequence[str],
) -> None:
    """Writes results.json, results.md and curves.png of these `cells`, whose runs and evaluations
    are finished. `trained` are the rewards that are trained on."""
    parts = [(cell, seed) for cell in cells for seed in seeds]
    histories = {part: read_run(folder.run(*part)) for part in parts}
    _check_alike({folder.run(*part).path: run.looks[0].scores for part, run in histories.items()})
    runs = {cell: [histories[cell, seed] for seed in seeds] for cell in cells}
    first = cells[0]
    bases: dict[str, Judged]
    scores: dict[str, Judged]
    if study.steps:
        base = read_judged(folder.judged("base"))
        judged = {part: read_judged(folder.judged(*part)) for part in parts}
        paths = {folder.judged(*part).path: own for part, own in judged.items()}
        _check_alike({folder.judged("base").path: base, **paths})
        scores = {
            cell: {key: np.stack([judged[cell, seed][key] for seed in seeds]) for key in base}
            for cell in cells
        }
        bases = dict.fromkeys(cells, base)
    else:
        bases = {cell: of_runs(own, 0) for cell, own in runs.items()}
        scores = {cell: of_runs(own, -1) for cell, own in runs.items()}
    rewards = runs[first][0].looks[0].scores
    controls = folder.judged("controls").results
    free = read_as(_WithControls, controls).controls if controls.is_file() else None
    curves = {
        reward: {cell: curve(own, reward) for cell, own in runs.items()} for reward in rewards
    }
    found = {
        "study": study.model_dump(mode="json"),
        "trained": trained,
        "prompts": len(next(iter(rewards.values()))),
        "intervals": "95% over training seeds and held-out prompts: crossed bootstrap, 2000 resamples; of one seed Student's t",
        "evaluations_count": "rollout evaluations, and 3 for each latent of a training pass (4 with a KL term)",
        "spent": {cell: spent(own) for cell, own in runs.items()},
        "judged": lines(bases, scores),
        "controls": free and free.model_dump(mode="json"),
        "curves": curves,
    }
    write_whole(folder.results, as_json(found, 1).encode())
    write_whole(folder.page, page(study, found, free).encode())
    save_study_curves(folder.curves, curves, trained)


def _check_alike(found: Mapping[Path, Mapping[Any, Values]]) -> None:
    """UserError for a folder whose scores are not of as many prompts as the first one's."""
    counts = {
        path: {key: len(values) for key, values in scores.items()} for path, scores in found.items()
    }
    first = next(iter(counts))
    for path, own in counts.items():
        if own != counts[first]:
            raise UserError(f"{path}: has other evaluations than {first}; {MADE_AGAIN}")


def page(study: Study, found: Mapping[str, Any], free: Controls | None) -> str:
    """The results as tables in Markdown, with what the base reaches with other sampler settings (`free`)."""
    cells, table = list(found["spent"]), found["judged"]
    rewards = list(dict.fromkeys(line.reward for line in table))
    head = [
        "cell",
        *(f"{name} ({'trained' if name in found['trained'] else 'judged'})" for name in rewards),
    ]
    own = {cell: study.budget_of(cell) for cell in cells}
    budget = [
        f"{study.budget:g} {study.unit}",
        *(f"{own[cell]:g} for {cell}" for cell in cells if own[cell] != study.budget),
    ]
    over = "seeds and prompts" if study.seeds > 1 else "prompts; other seeds may differ"
    parts = [
        f"# {', '.join(cells)} on {study.recipe}",
        f"Budget of a run: {', '.join(budget)}. "
        f"{counted(study.seeds, 'seed')}, {counted(found['prompts'], 'held-out prompt')}. "
        f"Brackets: 95 % intervals over {over}.",
    ]
    for steps in dict.fromkeys(line.steps for line in table):
        at = {(line.cell, line.reward): line for line in table if line.steps == steps}
        changes = [[cell, *(f"{at[cell, name].change:+}" for name in rewards)] for cell in cells]
        if free is not None and steps == table[0].steps:
            changes += [
                ["best sampler settings of the base", *_free(free.best, rewards)],
                ["best of several", *_free(free.best_of, rewards)],
            ]
        parts += [f"## {counted(steps, 'step')}: change against the base", _table(head, changes)]
        if len(cells) > 1:
            leads = [
                [cell, *(f"{at[cell, name].lead:+}" for name in rewards)] for cell in cells[1:]
            ]
            parts += [f"## {counted(steps, 'step')}: lead over {cells[0]}", _table(head, leads)]
    costs = []
    for cell, cost in found["spent"].items():
        numbers = [f"{cost[key]:,.0f}" for key in ("evaluations", "pictures", "seconds")]
        costs.append([cell, f"{cost['learning_rate']:g}", str(cost["iterations"]), *numbers])
    parts += [
        "## Spent, per run",
        _table(
            [
                "cell",
                "learning rate",
                "iterations",
                "network evaluations*",
                "pictures",
                "seconds of training",
            ],
            costs,
        ),
        "\\* of rollouts, and three for each latent of a training pass, four with a KL term.",
    ]
    return "\n\n".join(parts) + "\n"


def _free(best: Mapping[str, Way], rewards: Sequence[str]) -> list[str]:
    """A cell for every reward: the change that a way of sampling gives, and its price."""
    return [
        f"{way.changes[name]:+}, {way.name}: {way.price}" if (way := best.get(name)) else "–"
        for name in rewards
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def save_study_curves(
    path: Path, curves: Mapping[str, Mapping[str, Sequence[Point]]], trained: Sequence[str]
) -> None:
    """Draws curves[reward][cell]: a row of panels per reward, against iterations, network
    evaluations and seconds."""
    spent_in: dict[str, Callable[[Point], float]] = {
        "iterations": lambda point: point.iteration,
        "network evaluations, training included": lambda point: point.work,
        "seconds of training": lambda point: point.seconds,
    }
    rows = []
    for reward, cells in curves.items():
        title = f"{reward} ({'trained on' if reward in trained else 'judged only'}): change"
        panels = [Panel("", change_lines(cells, spent), label) for label, spent in spent_in.items()]
        rows.append([replace(panels[0], title=title), *panels[1:]])
    with whole_file(path) as unfinished:
        save_figure(unfinished, small_multiples(rows, legend=True, zero=True))


def change_lines(
    cells: Mapping[str, Sequence[Point]], spent: Callable[[Point], float]
) -> list[CurveLine]:
    """By cell the changes from the base with their intervals, against what was spent."""
    lines = []
    for style, (cell, points) in enumerate(cells.items()):
        changes = [point.change for point in points]
        ends = [(change.low, change.high) for change in changes]
        means, x = [change.mean for change in changes], [spent(point) for point in points]
        lines.append(CurveLine(cell, x, means, style, ends, "marked"))
    return lines
