"""The results of a study: what its runs' folders hold, side by side, as results.json, a page of
tables, and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo.config.work import work
from g2rpo.core.data import Row
from g2rpo.core.errors import UserError, counted
from g2rpo.core.files import whole_file, write_whole
from g2rpo.core.plain import as_json, read_as
from g2rpo.core.statistics import Interval, interval_of_scores, paired
from g2rpo.lab.compare.study import Study, StudyDirectory
from g2rpo.lab.judging import EvaluationDirectory, JudgedSteps
from g2rpo.lab.report.history import RunHistory, SeedGroup, mean, read_runs
from g2rpo.lab.untrained import Controls, Way
from g2rpo.train.evaluation.heldout import read_rows, scores_of
from g2rpo.train.monitor.curves import CurveLine, Panel, save_figure, small_multiples

MADE_AGAIN = "delete this folder, and the same command makes it again"
Judged = Mapping[tuple[int, str], Tensor]
"""Scores by (steps, reward): [N] prompts, or [S, N] training seeds by prompts."""


@dataclass(frozen=True)
class Cell(SeedGroup):
    """The finished runs of a cell, by training seed."""

    @cached_property
    def spent(self) -> dict[int, dict[str, float]]:
        """By iteration, after which it was evaluated, what a run had cost until then, a mean over
        seeds: network evaluations (`config.work`), pictures, and seconds without evaluations."""
        told = [_spent(run) for run in self.runs]
        return {
            iteration: {kind: mean(own[iteration][kind] for own in told) for kind in cost}
            for iteration, cost in told[0].items()
        }

    @property
    def cost(self) -> dict[str, Any]:
        """The mean cost of a run."""
        rate, iterations = self.config.optim.learning_rate, max(self.spent)
        return {"learning_rate": rate, "iterations": iterations, **self.spent[iterations]}

    def judged(self, iteration: int) -> Judged:
        """The scores of the runs' own evaluations after an iteration."""
        table = self.tables[iteration]
        return {(self.config.judged_steps, name): table[name] for name in self.config.all_rewards}

    def course(self, reward: str) -> list[Row]:
        """By evaluation what was spent, and the change of a reward from the base, over all seeds
        and their common held-out prompts."""
        base = self.tables[0][reward]
        return [
            {
                "iteration": iteration,
                "work": self.spent[iteration]["evaluations"],
                "seconds": self.spent[iteration]["seconds"],
                "change": paired(base, table[reward]).change,
            }
            for iteration, table in self.tables.items()
        ]


def _spent(run: RunHistory) -> dict[int, dict[str, float]]:
    total, found = {"evaluations": 0.0, "pictures": 0.0, "seconds": 0.0}, {}
    for row in run.rows:
        if row["kind"] == "eval":
            found[row["iteration"]] = dict(total)
        else:
            total["evaluations"] += work(run.config, row["iteration"] - 1, row["evaluations"])
            total["pictures"] += row["images"]
            total["seconds"] += row["seconds"]
    return found


def read_cell(folders: Sequence[Path]) -> Cell:
    """The runs of a cell; UserError if the log of one lacks something."""
    runs = read_runs(folders)
    for run in runs:
        looks, last = [row["iteration"] for row in run.evaluations], run.config.trainer.iterations
        ends = looks[:1], looks[-1:]
        if run.files.gaps(run.rows, last) or ends != ([0], [last]) or looks != sorted({*looks}):
            raise UserError(
                f"{run.files.path}: its log lacks iterations or evaluations of the run; {MADE_AGAIN}"
            )
        for iteration in looks:
            run.scores(iteration)
    return Cell(tuple(runs))


def read_judged(folder: Path) -> Judged:
    """The scores of an evaluation of one side, with each of its pictures once."""
    path = EvaluationDirectory(folder).pictures
    rows = sorted(read_rows(path, JudgedSteps, MADE_AGAIN), key=lambda row: row["index"])
    found: dict[tuple[int, str], Tensor] = {}
    for steps in sorted({row["steps"] for row in rows}):
        own = [row for row in rows if row["steps"] == steps]
        if [row["index"] for row in own] != list(range(len(own))):
            raise UserError(f"{path}: lacks pictures, or has one twice; {MADE_AGAIN}")
        found |= {(steps, name): values for name, values in scores_of(own).items()}
    return found


def lines(bases: Mapping[str, Judged], cells: Mapping[str, Judged]) -> list[Row]:
    """The table of a study, by step count, reward and cell, over all seeds and prompts. Changes are
    from the cell's own base, which differs where a cell has another `policy.quantize` or
    `policy.adapter`; leads are over the first cell, paired by seed and prompt."""
    first = next(iter(cells.values()))
    return [
        {
            "cell": name,
            "steps": steps,
            "reward": reward,
            "tuned": interval_of_scores(judged[steps, reward]),
            "change": paired(bases[name][steps, reward], judged[steps, reward]).change,
            "lead": paired(first[steps, reward], judged[steps, reward]).change,
        }
        for steps, reward in first
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
    runs = {cell: read_cell([folder.run(cell, seed).path for seed in seeds]) for cell in cells}
    every = [run for cell in runs.values() for run in cell.runs]
    _check_alike({run.files.path: run.heldout for run in every})
    if study.steps:
        base_path = folder.judged("base").path
        paths = {cell: [folder.judged(cell, seed).path for seed in seeds] for cell in cells}
        read = {path: read_judged(path) for path in (base_path, *chain(*paths.values()))}
        counts = {
            path: {key: len(values) for key, values in own.items()} for path, own in read.items()
        }
        _check_alike(counts)
        bases = dict.fromkeys(cells, read[base_path])
        scores: dict[str, Judged] = {
            cell: {key: torch.stack([read[path][key] for path in own]) for key in read[base_path]}
            for cell, own in paths.items()
        }
    else:
        bases = {cell: own.judged(0) for cell, own in runs.items()}
        scores = {cell: own.judged(max(own.spent)) for cell, own in runs.items()}
    controls = folder.judged("controls").results
    free = read_as(_WithControls, controls).controls if controls.is_file() else None
    curves = {
        reward: {cell: own.course(reward) for cell, own in runs.items()}
        for reward in every[0].config.all_rewards
    }
    found = {
        "study": study.model_dump(mode="json"),
        "trained": trained,
        "prompts": every[0].heldout,
        "intervals": "95% over training seeds and held-out prompts: crossed bootstrap, 2000 resamples; of one seed Student's t",
        "evaluations_count": "rollout evaluations, and 3 for each latent of a training pass (4 with a KL term)",
        "spent": {cell: own.cost for cell, own in runs.items()},
        "judged": lines(bases, scores),
        "controls": free and free.model_dump(mode="json"),
        "curves": curves,
    }
    write_whole(folder.results, as_json(found, 1).encode())
    write_whole(folder.page, page(study, found, free).encode())
    save_study_curves(folder.curves, curves, trained)


def _check_alike(counts: Mapping[Path, Any]) -> None:
    """UserError for a folder whose scores are not of as many prompts as the first one's."""
    (first, expected), *others = counts.items()
    for path, count in others:
        if count != expected:
            raise UserError(f"{path}: has other evaluations than {first}; {MADE_AGAIN}")


def page(study: Study, found: Mapping[str, Any], free: Controls | None) -> str:
    """The results as tables in Markdown, with what the base reaches with other sampler settings (`free`)."""
    cells, table = list(found["spent"]), found["judged"]
    rewards = list(dict.fromkeys(line["reward"] for line in table))
    head = [
        "cell",
        *(f"{name} ({'trained' if name in found['trained'] else 'judged'})" for name in rewards),
    ]
    own = {cell: study.budget_of(cell) for cell in cells}
    budget = [
        f"{study.budget:,.0f} {study.unit}",
        *(f"{own[cell]:,.0f} for {cell}" for cell in cells if own[cell] != study.budget),
    ]
    over = "seeds and prompts" if study.seeds > 1 else "prompts; other seeds may differ"
    parts = [
        f"# {', '.join(cells)} on {study.recipe}",
        f"Budget of a run: {', '.join(budget)}. "
        f"{counted(study.seeds, 'seed')}, {counted(found['prompts'], 'held-out prompt')}. "
        f"With 95 % intervals over {over}.",
    ]
    for steps in dict.fromkeys(line["steps"] for line in table):
        at = {(line["cell"], line["reward"]): line for line in table if line["steps"] == steps}
        changes = [[cell, *(f"{at[cell, name]['change']:+}" for name in rewards)] for cell in cells]
        if free is not None and steps == table[0]["steps"]:
            changes += [
                ["best sampler settings of the base", *_free(free.best, rewards)],
                ["best of several", *_free(free.best_of, rewards)],
            ]
        parts += [f"## {counted(steps, 'step')}: change against the base", _table(head, changes)]
        if len(cells) > 1:
            leads = [
                [cell, *(f"{at[cell, name]['lead']:+}" for name in rewards)] for cell in cells[1:]
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
    path: Path, curves: Mapping[str, Mapping[str, Sequence[Row]]], trained: Sequence[str]
) -> None:
    """Draws curves[reward][cell]: a row of panels per reward, against iterations, network
    evaluations and seconds."""
    spent = {
        "iteration": "iterations",
        "work": "network evaluations, training included",
        "seconds": "seconds of training",
    }
    rows = []
    for reward, cells in curves.items():
        title = f"{reward} ({'trained on' if reward in trained else 'judged only'}): change"
        panels = [Panel("", change_lines(cells, kind), label) for kind, label in spent.items()]
        rows.append([replace(panels[0], title=title), *panels[1:]])
    with whole_file(path) as unfinished:
        save_figure(unfinished, small_multiples(rows, legend=True, zero=True))


def change_lines(cells: Mapping[str, Sequence[Row]], kind: str) -> list[CurveLine]:
    """By cell the changes from the base with their intervals, against a kind of cost."""
    lines = []
    for style, (cell, points) in enumerate(cells.items()):
        changes: list[Interval] = [point["change"] for point in points]
        ends = [(change.low, change.high) for change in changes]
        means, x = [change.mean for change in changes], [point[kind] for point in points]
        lines.append(CurveLine(cell, x, means, style, ends, "marked"))
    return lines
