"""The quickstart over several seeds: base against tuned on held-out prompts, for the README's table and picture.

    python -m benchmarks.quickstart                                   # the recipe words
    python -m benchmarks.quickstart --recipe scenes --name scenes 'algorithm.granularities=[1,2]'   # another, with overrides

A seed changes everything random: prompts' order, exploration, adapters, and the noise of the evaluation. Runs that are
finished already are read, not repeated. Of words, base and tuned are judged at the recipe's steps and, as a control for the
first seed, at two and five times as many; Tesseract reads the pictures too, where it is installed. Writes
benchmarks/results/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console

from benchmarks.drawing import Word, before_and_after
from benchmarks.second_reader import available, read_words
from g2rpo.commands.evaluate import evaluate, run_settings
from g2rpo.commands.train import train
from g2rpo.monitor.metrics import read_metrics
from g2rpo.statistics import in_proportion
from g2rpo.testbed.words.language import parse

SHOWN, COLUMNS = 24, 4  # words in the picture


def main() -> None:
    args = arguments()
    runs = [one_run(args, seed) for seed in args.seeds]
    print(f"{'':20} {'base':>9} {'tuned':>9}   change, mean over {len(runs)} seeds (their range)")
    for name in runs[0]["rewards"]:
        print_row(name, [run["rewards"][name] for run in runs])
    if "control" in runs[0]:
        for steps, row in runs[0]["control"].items():
            print(f"base, untrained, at {steps} steps: " + ", ".join(f"{name} {value:.4g}" for name, value in row.items()))
    print(
        "seconds:", ", ".join(f"{run['seconds']:.0f}" for run in runs), " of a processor:", [run["cpu_seconds"] for run in runs]
    )
    out = Path("benchmarks/results") / f"{args.name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"recipe": args.recipe, "overrides": args.overrides, "runs": runs}, indent=1) + "\n")


def one_run(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Trains and judges with one seed; what its row of the results holds."""
    folder = args.runs / f"{args.name}-{seed}"
    clock = folder / "cpu_seconds.json"
    if not (folder / "results.json").is_file():
        before = os.times()
        overrides = [*args.overrides, f"trainer.seed={seed}"]
        train(args.recipe, overrides, folder, resume=(folder / "config.yaml").is_file(), console=Console())
        now = os.times()
        clock.write_text(json.dumps(round(now.user + now.system - before.user - before.system)))
    rows = read_metrics(folder)
    run = {"seed": seed, "seconds": sum(row["seconds"] for row in rows), "iterations": rows[-1]["iteration"]}
    run |= {"cpu_seconds": json.loads(clock.read_text()), **json.loads((folder / "results.json").read_text())}
    if args.recipe != "words":
        return run
    first = seed == args.seeds[0]
    judged = judge(folder, controls=first)
    steps = min(int(row["steps"]) for row in judged)
    if available():
        run["rewards"]["tesseract_exact"] = second_reading(judged, folder / "judged", steps)
    if first:
        run["control"] = {str(n): base_means(judged, n) for n in sorted({int(row["steps"]) for row in judged}) if n > steps}
        save_picture(judged, folder / "judged", steps, Path(f"docs/images/{args.name}.png"))
    return run


def judge(folder: Path, *, controls: bool) -> list[dict[str, Any]]:
    """Every picture of base and tuned, and its scores: `g2rpo evaluate` at the recipe's steps and, as controls, more."""
    settings = run_settings(folder)
    (steps,) = settings["steps"]
    out = folder / "judged"
    if not (out / "pictures.jsonl").is_file():
        given = {**settings, "steps": [steps, 2 * steps, 5 * steps] if controls else [steps]}
        evaluate(given, [], out, Console())
    return [json.loads(line) for line in (out / "pictures.jsonl").read_text().splitlines()]


def second_reading(judged: list[dict[str, Any]], folder: Path, steps: int) -> dict[str, float]:
    """The share of words that Tesseract reads without an error, base and tuned."""
    shares = {}
    for side in ("base", "tuned"):
        rows = [row for row in judged if row["side"] == side and int(row["steps"]) == steps]
        read = read_words([folder / row["picture"] for row in rows])
        right = [text == word.letters for text, row in zip(read, rows, strict=True) if (word := parse(row["prompt"]))]
        shares[side] = sum(right) / len(right)
    return shares


def base_means(judged: list[dict[str, Any]], steps: int) -> dict[str, float]:
    """The base's mean scores at so many steps."""
    rows = [row["scores"] for row in judged if row["side"] == "base" and int(row["steps"]) == steps]
    return {name: statistics.mean(row[name] for row in rows) for name in rows[0]}


def save_picture(judged: list[dict[str, Any]], folder: Path, steps: int, path: Path) -> None:
    """Some held-out words before and after, from the same noise, and the share of right ones among all."""
    sides = [[row for row in judged if row["side"] == side and int(row["steps"]) == steps] for side in ("base", "tuned")]
    right = [[row["scores"]["ocr_exact"] == 1 for row in rows] for rows in sides]
    chosen = in_proportion(list(zip(*right, strict=True)), SHOWN)
    panels = []
    for heading, rows, marks in zip(("Before", "After two minutes"), sides, right, strict=True):
        words = [
            Word(Image.open(folder / rows[i]["picture"]), word.letters, marks[i])
            for i in chosen
            if (word := parse(rows[i]["prompt"]))
        ]
        panels.append((f"{heading}: {100 * statistics.mean(marks):.0f} % right", f"of {len(rows)} unseen words", words))
    before_and_after(panels, COLUMNS).quantize(192).save(path, optimize=True)


def print_row(name: str, values: list[dict[str, float]]) -> None:
    changes = [each["tuned"] - each["base"] for each in values]
    base, tuned = (statistics.mean(each[side] for each in values) for side in ("base", "tuned"))
    print(f"{name:20} {base:9.4g} {tuned:9.4g}   {statistics.mean(changes):+.4g} ({min(changes):+.4g} to {max(changes):+.4g})")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--recipe", default="words")
    parser.add_argument("--name", default="quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
