"""The quickstart over several seeds: base against tuned on held-out prompts, for the README's table and picture.

    python -m benchmarks.quickstart                                   # the recipe words
    python -m benchmarks.quickstart --recipe scenes --name scenes 'algorithm.granularities=[1,2]'   # another, with overrides

A seed changes everything random: prompts' order, exploration, adapters, and the noise of the evaluation. Runs that are
finished already are read, not repeated. With every seed the untrained model is also judged with the default controls, the best
of 16 among them; with the first with a grid of free knobs: all scales of the initial noise (or, where the model takes guidance,
of the guidance scale) at two and five times the steps too, and guidance by hand in several first steps. Of words, a control may
know the fault: guidance by hand away from the letters that the base draws instead of a and e. Tesseract reads the words of the
first seed too, where it is installed. Writes benchmarks/results/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.drawing import Word, before_and_after
from benchmarks.second_reader import available, read_words
from g2rpo.app.evaluate import evaluate, run_settings
from g2rpo.app.train import train
from g2rpo.assembly.components import build_policy
from g2rpo.assembly.prompts import build_prompts
from g2rpo.assembly.rewards import build_rewards
from g2rpo.cli.output import Output
from g2rpo.core.statistics import in_proportion
from g2rpo.evaluation.controls import RIGHT, Control, Controls, default_controls, in_figures
from g2rpo.evaluation.sampler import sampler_of
from g2rpo.monitor.metrics import read_metrics
from g2rpo.runs.lifecycle import read_config
from g2rpo.testbed.words import language
from g2rpo.testbed.words.language import parse

SHOWN, COLUMNS = 24, 4  # words in the picture


def main() -> None:
    args = arguments()
    runs = [one_run(args, seed) for seed in args.seeds]
    print(f"{'':20} {'base':>9} {'tuned':>9}   change, mean over {len(runs)} seeds (their range)")
    for name in runs[0]["rewards"]:
        print_row(name, [run["rewards"][name] for run in runs])
    print_controls(runs)
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
        overrides = ["evaluation.num_prompts=192", *args.overrides, f"trainer.seed={seed}"]
        train(args.recipe, overrides, folder, resume=(folder / "config.yaml").is_file(), emit=Output())
        now = os.times()
        clock.write_text(json.dumps(round(now.user + now.system - before.user - before.system)))
    rows = read_metrics(folder)
    run = {"seed": seed, "seconds": sum(row["seconds"] for row in rows), "iterations": rows[-1]["iteration"]}
    run |= {"cpu_seconds": json.loads(clock.read_text()), **json.loads((folder / "results.json").read_text())}
    first = seed == args.seeds[0]
    judged = judge(folder, every=first)
    run["controls"] = json.loads((folder / "judged" / "results.json").read_text())["controls"]
    if args.recipe == "words":
        if available():
            read = read_by_tesseract(judged, folder / "judged")
            run["rewards"]["tesseract_exact"] = {side: statistics.mean(read[side]) for side in ("base", "tuned")}
            run["controls_read_by_tesseract"] = {name: statistics.mean(right) for name, right in read.items()}
        run["away_from_the_fault"] = away_from_the_fault(folder)
        if first:
            save_picture(judged, folder / "judged", Path(f"docs/images/{args.name}.png"))
    return run


def grid(num_steps: int, guidance: float | None) -> list[Control]:
    """Every free knob of the untrained model, noise or guidance at every number of steps, and the draws."""
    alone = default_controls(num_steps, guidance, by_hand=True)  # of an embedded model: FLUX has no other
    noises, scales = (1.0, *(c.noise for c in alone if c.noise != 1)), (None, *(c.guidance for c in alone if c.guidance))
    steps = (None, *(c.steps for c in alone if c.steps))
    pairs = [{"noise": noise} for noise in noises] + [{"guidance": scale} for scale in scales if scale]
    crossed = [Control(**pair, steps=many) for pair in pairs for many in steps]
    by_hand = [Control(cfg=3, guided_steps=3), Control(cfg=3, guided_steps=5), Control(cfg=5, guided_steps=3), Control(cfg=3)]
    return [*(c for c in crossed if c.knobs), *by_hand, *(c for c in alone if c.solver != "euler" or c.draw)]


def judge(folder: Path, *, every: bool) -> list[dict[str, Any]]:
    """Every picture of base, controls and tuned, with scores: `g2rpo evaluate --controls`; with `every` those of `grid`."""
    settings = run_settings(folder)
    out = folder / "judged"
    if not (out / "pictures.jsonl").is_file():
        if every:
            (steps,) = settings["steps"]
            scale = settings["policy"]["guidance_scale"]
            settings["controls"] = [c.model_dump() for c in grid(steps, scale if scale and scale > 1 else None)]
        evaluate(settings, [], out, controls=not every, emit=Output())
    return [json.loads(line) for line in (out / "pictures.jsonl").read_text().splitlines()]


def read_by_tesseract(judged: list[dict[str, Any]], folder: Path) -> dict[str, list[bool]]:
    """Whether Tesseract reads each word without an error, for base, tuned and every control."""
    right: dict[str, list[bool]] = {}
    text = read_words([folder / row["picture"] for row in judged])
    for row, letters in zip(judged, text, strict=True):
        word = parse(row["prompt"])
        assert word is not None
        control = row.get("control", row["side"])
        right.setdefault(f"tuned, {control}" if row["side"] == "tuned control" else control, []).append(letters == word.letters)
    return right


FAULT = str.maketrans("ae", "rn")
"""What the base draws instead (assets/words/README.md)."""
AWAY = [Control(cfg=scale, guided_steps=first) for scale, first in ((3.0, 5), (8.0, 5), (5.0, 8))]


def away_from_the_fault(folder: Path) -> dict[str, Any]:
    """By control the means over held-out words of the base guided away from each word's misspelling, by reward, and what a
    picture costs."""
    stored = folder / "away_from_the_fault.json"
    if not stored.is_file():
        config = read_config(folder)
        policy = build_policy(config.judged, tuning="frozen")
        rewards = build_rewards({**config.rewards, **config.evaluation.rewards}, "cpu")
        sampler, found = sampler_of(config, policy), {}
        heldout = build_prompts(config.evaluation.prompts, "evaluation.prompts")[: config.evaluation.num_prompts]
        for control in AWAY:
            scores: list[dict[str, float]] = []
            for number, prompt in enumerate(heldout):
                own = control.model_copy(update={"negative_prompt": misspelt(prompt)})
                scores.append(sampler.evaluate([prompt], rewards, first=number, control=own).means())
            means = {name: statistics.mean(row[name] for row in scores) for name in rewards}
            found[str(control)] = {"evaluations": control.evaluations(sampler.num_steps), "means": means}
        stored.write_text(json.dumps(found))
    return dict(json.loads(stored.read_text()))


def misspelt(prompt: str) -> str:
    """The prompt of the word that the base draws for this one."""
    word = parse(prompt)
    assert word is not None
    return str(language.Word(word.letters.translate(FAULT), word.colour))


def print_controls(runs: Sequence[dict[str, Any]]) -> None:
    """What the untrained model reaches without training in every run, and what a picture costs."""
    names = list(runs[0]["controls"]["best"])
    print("\nwithout training: means over the seeds that have the control, of", ", ".join(names))
    for way in runs[0]["controls"]["ways"]:
        same = [own for run in runs for own in run["controls"]["ways"] if own["name"] == way["name"]]
        means = " ".join(f"{statistics.mean(own['means'][name] for own in same):9.4g}" for name in names)
        print(f"{way['name']:45} {way['evaluations']:4} {way['readings']:3} {means}  ({len(same)} seeds)")
    for control in runs[0].get("away_from_the_fault", {}):
        same = [run["away_from_the_fault"][control] for run in runs]
        means = " ".join(f"{statistics.mean(own['means'][name] for own in same):9.4g}" for name in same[0]["means"])
        print(f"{control + ', against the fault':45} {same[0]['evaluations']:4}     {means}  ({len(same)} seeds)")
    for line in in_figures([Controls.model_validate(run["controls"]) for run in runs], [RIGHT, "ocr"]):
        print(line)


def save_picture(judged: list[dict[str, Any]], folder: Path, path: Path) -> None:
    """Some held-out words before and after, from the same noise, and the share of right ones among all."""
    sides = [[row for row in judged if row["side"] == side] for side in ("base", "tuned")]
    right = [[row["scores"]["ocr_exact"] == 1 for row in rows] for rows in sides]
    chosen = in_proportion(list(zip(*right, strict=True)), SHOWN)
    panels = []
    for heading, rows, marks in zip(("Before", "After training"), sides, right, strict=True):
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
