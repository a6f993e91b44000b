"""Tables and a figure of what studies/at_length.py stored.

python -m studies.at_length_tables
python -m studies.at_length_tables --results studies/results/at_length.jsonl    # the first protocol
"""

import argparse
import json
from pathlib import Path

import numpy as np

from g2rpo.core.statistics import interval
from g2rpo.train.monitor.curves import CurveLine, Panel, save_figure, small_multiples
from studies.at_length import CELLS, RESULTS, SWEEP, TASKS, Row, swept

PARTS = {"known": slice(48), "unseen": slice(48, None)}
"""Which of the held-out prompts."""


def marks(rows: list[Row], part: slice) -> np.ndarray:
    """Who is right [rows, prompts]."""
    return np.array([[*map(int, row["right"][part])] for row in rows])


def table(rows: list[Row]) -> None:
    """What rates were chosen by. Leads of the first cell at the last iteration, and at the last
    number of evaluations, that two cells both have; known and unseen prompts apart."""
    runs: dict[tuple, list[Row]] = {}
    for row in rows:
        runs.setdefault((row["task"], row["cell"], row["seed"]), []).append(row)
    for task in TASKS:
        for cell in CELLS:
            if shares := swept(rows, task, cell):
                print(f"| {task} | {cell} |", *(f"{r:g}: {s:.3f} |" for r, s in shares.items()))
    for unit in ("iteration", "evaluations"):
        for task in TASKS:
            for cell in CELLS:
                pairs = []
                for (of, name, seed), other in runs.items():
                    first = runs.get((task, "g2rpo", seed))
                    if (of, name) == (task, cell) and first and seed != SWEEP:
                        last = min(first[-1][unit], other[-1][unit])
                        at = [[r for r in own if r[unit] <= last][-1] for own in (first, other)]
                        pairs.append((*at, other[0]))
                for kind, part in PARTS.items():
                    if pairs:
                        a, b, base = (marks([*own], part) for own in zip(*pairs, strict=True))
                        spent = np.mean([pair[1]["evaluations"] for pair in pairs])
                        print(
                            f"| {task} | {unit} | {cell} | {kind} | {len(pairs)} | {spent:,.0f} |"
                            f" {interval(b - base):+} | {interval(a - b):+} |"
                        )


def draw(rows: list[Row], task: str, path: Path) -> None:
    """Shares of right pictures over iterations and evaluations, with intervals of the change."""
    panels = []
    for kind, part in PARTS.items():
        lines: dict[str, list[CurveLine]] = {"iteration": [], "evaluations": []}
        for style, cell in enumerate(CELLS):
            own = [r for r in rows if (r["task"], r["cell"]) == (task, cell) and r["seed"] != SWEEP]
            at = [[r for r in own if r["iteration"] == i] for i in {r["iteration"]: 0 for r in own}]
            values = [marks(same, part) for same in at]
            base = float(values[0].mean()) if own else 0.0
            changes = [interval(right - values[0]).within(-base, 1 - base) for right in values]
            ends = [(base + change.low, base + change.high) for change in changes]
            for unit, each in lines.items():
                x = [float(np.mean([r[unit] for r in same])) for same in at]
                y = [float(right.mean()) for right in values]
                if own:
                    each.append(CurveLine(cell, x, y, style, ends, "marked"))
        panels.append([Panel(f"right, {kind}", own, unit) for unit, own in lines.items()])
    note = "Means over seeds; bands: 95 % interval of the change from the base."
    save_figure(path, small_multiples(panels, note, legend=True))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    results = arguments().results
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    table(rows)
    for task in dict.fromkeys(row["task"] for row in rows):
        draw(rows, task, results.with_name(f"{results.stem}_{task}.png"))


if __name__ == "__main__":
    main()
