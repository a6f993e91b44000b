"""The quickstart over several seeds: base against tuned on held-out prompts, for the README's table
and picture.

    python -m benchmarks.quickstart                                   # the recipe words
    python -m benchmarks.quickstart --recipe scenes --name scenes 'algorithm.granularities=[1,2]'   # another, with overrides

A seed changes everything random: prompts' order, exploration, adapters, and the noise of the
evaluation. Runs that are finished already are read, not repeated. For the first seed the untrained
model is also judged with other sampler settings: all scales of the initial noise (or, where the model
takes guidance, of the guidance scale) at once, two and five times the steps, and every solver;
`benchmarks.controls` has guidance by hand and the best of several. Of words, the letters that are
right are counted, a and e apart from all others, and Tesseract reads the pictures too, where it is
installed. Writes benchmarks/results/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.drawing import Word, before_and_after
from benchmarks.second_reader import available, read_words
from g2rpo.cli.output import Output
from g2rpo.core.images import to_tensor
from g2rpo.core.statistics import RIGHT, in_proportion, interval
from g2rpo.data.testbed.rewards import letters_of
from g2rpo.data.testbed.words import parse_word
from g2rpo.lab.evaluate import evaluate, run_settings
from g2rpo.lab.untrained import Controls
from g2rpo.train.command import train
from g2rpo.train.evaluation.controls import Control, default_controls
from g2rpo.train.run.folder import Run

SHOWN, COLUMNS = 24, 4  # words in the picture


def main() -> None:
    args = arguments()
    runs = [one_run(args, seed) for seed in args.seeds]
    print(f"{'':20} {'base':>9} {'tuned':>9}   change, mean over {len(runs)} seeds (their range)")
    for name in runs[0]["rewards"]:
        print_row(name, [run["rewards"][name] for run in runs])
    for kind in runs[0].get("letters", {}):
        print_row(f"letters {kind}", [run["letters"][kind] for run in runs])
    print_controls(runs[0])
    print(
        "seconds:",
        ", ".join(f"{run['seconds']:.0f}" for run in runs),
        " of a processor:",
        [run["cpu_seconds"] for run in runs],
        " by part:",
        [run["parts"] for run in runs],
    )
    out = Path("benchmarks/results") / f"{args.name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        json.dumps({"recipe": args.recipe, "overrides": args.overrides, "runs": runs}, indent=1)
        + "\n"
    )


def one_run(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Trains and judges with one seed; what its row of the results holds."""
    folder = args.runs / f"{args.name}-{seed}"
    clock = folder / "cpu_seconds.json"
    if not (folder / "results.json").is_file():
        before = os.times()
        overrides = ["evaluation.num_prompts=192", *args.overrides, f"trainer.seed={seed}"]
        train(
            args.recipe, overrides, folder, resume=(folder / "config.yaml").is_file(), emit=Output()
        )
        now = os.times()
        clock.write_text(json.dumps(round(now.user + now.system - before.user - before.system)))
    rows = Run(folder).read_log()
    run = {
        "seed": seed,
        "seconds": sum(row["seconds"] for row in rows),
        "iterations": rows[-1]["iteration"],
        "parts": seconds_by_part(rows),
    }
    run |= {
        "cpu_seconds": json.loads(clock.read_text()),
        **json.loads((folder / "results.json").read_text()),
    }
    first = seed == args.seeds[0]
    if first or args.recipe == "words":
        judged = judge(folder, controls=first)
        read = (
            read_by_tesseract(judged, folder / "judged")
            if args.recipe == "words" and available()
            else None
        )
        if read is not None:
            run["rewards"]["tesseract_exact"] = {
                side: statistics.mean(read[side]) for side in ("base", "tuned")
            }
        if args.recipe == "words":
            run["letters"] = letters_right(judged, folder / "judged")
        if first:
            run["controls"] = controls_of(folder / "judged", read)
            if args.recipe == "words":
                save_picture(judged, folder / "judged", Path(f"docs/images/{args.name}.png"))
    return run


def seconds_by_part(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of the evaluations during training, and of each part of the iterations."""
    parts = {"evaluations": sum(row["seconds"] for row in rows if row["kind"] == "eval")}
    for row in rows:
        for name, seconds in row.items():
            if name.startswith("seconds/"):
                part = name.removeprefix("seconds/")
                parts[part] = parts.get(part, 0) + seconds
    return {part: round(seconds, 1) for part, seconds in parts.items()}


def grid(num_steps: int, guidance: float | None) -> list[Control]:
    """Every sampler setting of the untrained model, noise or guidance at every number of steps."""
    alone = [
        control
        for control in default_controls(num_steps, guidance, by_hand=False)
        if not control.guided_steps
    ]
    noises, scales = (
        (1.0, *(c.noise for c in alone if c.noise != 1)),
        (None, *(c.guidance for c in alone if c.guidance)),
    )
    steps = (None, *(c.steps for c in alone if c.steps))
    pairs: list[dict[str, Any]] = [{"noise": noise} for noise in noises]
    pairs += [{"guidance": scale} for scale in scales if scale]
    crossed = [Control(**pair, steps=many) for pair in pairs for many in steps]
    return [*(c for c in crossed if c.knobs), *(c for c in alone if c.solver != "euler")]


def judge(folder: Path, *, controls: bool) -> list[dict[str, Any]]:
    """Every picture of base and tuned, and with `controls` of the base's sampler settings, with scores:
    `g2rpo evaluate`."""
    settings = run_settings(folder)
    out = folder / "judged"
    if not (out / "pictures.jsonl").is_file():
        if controls:
            (steps,) = settings["steps"]
            scale = settings["policy"]["guidance_scale"]
            settings["controls"] = [
                c.model_dump() for c in grid(steps, scale if scale and scale > 1 else None)
            ]
        evaluate(settings, [], out, emit=Output())
    return [json.loads(line) for line in (out / "pictures.jsonl").read_text().splitlines()]


def read_by_tesseract(judged: list[dict[str, Any]], folder: Path) -> dict[str, list[bool]]:
    """Whether Tesseract reads each word without an error, for base, tuned and every control."""
    right: dict[str, list[bool]] = {}
    text = read_words([folder / row["picture"] for row in judged])
    for row, letters in zip(judged, text, strict=True):
        word = parse_word(row["prompt"])
        assert word is not None
        right.setdefault(row["side"] if row["side"] != "control" else row["control"], []).append(
            letters == word.letters
        )
    return right


def letters_right(judged: list[dict[str, Any]], folder: Path) -> dict[str, dict[str, float]]:
    """By kind, "a e" (which the base misspells) and "others", the share of asked letters whose place
    shows that letter, for base and tuned; each place is read as the clean letter nearest to it."""
    right: dict[str, dict[str, list[bool]]] = {"a e": {}, "others": {}}
    for row in judged:
        word, side = parse_word(row["prompt"]), row["side"]
        if side == "control":
            continue
        assert word is not None
        picture = to_tensor([Image.open(folder / row["picture"])])[0] / 255
        for asked, shown in zip(word.letters, letters_of(picture, word), strict=True):
            kind = "a e" if asked in "ae" else "others"
            right[kind].setdefault(side, []).append(asked == shown)
    return {
        kind: {side: statistics.mean(values) for side, values in sides.items()}
        for kind, sides in right.items()
    }


def controls_of(folder: Path, read: dict[str, list[bool]] | None) -> dict[str, Any]:
    """By reward the mean of every control, and the best one against the tuned model."""
    results = Controls.model_validate(json.loads((folder / "results.json").read_text())["controls"])
    others = results.of("knob", "several")
    found: dict[str, Any] = {}
    for name, best in ((name, best) for name, best in results.best.items() if name != RIGHT):
        means = {way.name: way.means[name] for way in others}
        found[name] = {
            "means": means,
            "control": best.name,
            "mean": best.means[name],
            "lead": asdict(best.leads[name]),
        }
    if read is not None:
        means = {way.name: statistics.mean(read[way.name]) for way in others}
        best_read = max(means, key=means.__getitem__)
        lead = interval(
            [
                int(one) - int(other)
                for one, other in zip(read["tuned"], read[best_read], strict=True)
            ]
        )
        found["tesseract_exact"] = {
            "means": means,
            "control": best_read,
            "mean": means[best_read],
            "lead": asdict(lead),
        }
    return found


def print_controls(run: dict[str, Any]) -> None:
    """The best sampler settings of the untrained model by reward, and the tuned model minus it, of one
    seed."""
    print(
        f"\n{'':20} {'base':>9} {'tuned':>9} {'control':>9}   tuned minus best control of {run['prompts']} prompts, which"
    )
    for name, best in run["controls"].items():
        own, lead = run["rewards"][name], best["lead"]
        said = f"{lead['mean']:+.4g} [{lead['low']:+.4g}, {lead['high']:+.4g}]  {best['control']}"
        print(f"{name:20} {own['base']:9.4g} {own['tuned']:9.4g} {best['mean']:9.4g}   {said}")
    for name, best in run["controls"].items():
        print(
            f"\n{name}, untrained:",
            ", ".join(f"{control} {mean:.4g}" for control, mean in best["means"].items()),
        )


def save_picture(judged: list[dict[str, Any]], folder: Path, path: Path) -> None:
    """Some held-out words before and after, from the same noise, and the share of right ones among
    all."""
    sides = [[row for row in judged if row["side"] == side] for side in ("base", "tuned")]
    right = [[row["scores"]["ocr_exact"] == 1 for row in rows] for rows in sides]
    chosen = in_proportion(list(zip(*right, strict=True)), SHOWN)
    panels = []
    for heading, rows, marks in zip(("Before", "After training"), sides, right, strict=True):
        words = [
            Word(Image.open(folder / rows[i]["picture"]), word.letters, marks[i])
            for i in chosen
            if (word := parse_word(rows[i]["prompt"]))
        ]
        panels.append(
            (
                f"{heading}: {100 * statistics.mean(marks):.0f} % right",
                f"of {len(rows)} unseen words",
                words,
            )
        )
    before_and_after(panels, COLUMNS).quantize(192).save(path, optimize=True)


def print_row(name: str, values: list[dict[str, float]]) -> None:
    changes = [each["tuned"] - each["base"] for each in values]
    base, tuned = (statistics.mean(each[side] for each in values) for side in ("base", "tuned"))
    print(
        f"{name:20} {base:9.4g} {tuned:9.4g}   {statistics.mean(changes):+.4g} ({min(changes):+.4g} to {max(changes):+.4g})"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--recipe", default="words")
    parser.add_argument("--name", default="quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
