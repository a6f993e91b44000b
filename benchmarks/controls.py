"""What the untrained model spells without training, beside the tuned one: guidance by hand, away
from an empty prompt and from the misspelling of each word, and the best of 16 pictures.

    python -m benchmarks.controls runs/quickstart-42 runs/quickstart-43 runs/quickstart-44

Of finished runs of `words`, on the first 96 held-out words from the noise of each run's own
evaluations, as `g2rpo evaluate RUN --controls` judges them; the other sampler settings are in
`benchmarks.quickstart`. Tesseract, which nothing was chosen by, reads the pictures too, where it is
installed. The base draws a and e as r and n (assets/words/README.md); the negative prompt of a word
that is misspelt so knows the fault. Finished parts are not repeated. Writes
benchmarks/results/controls.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.second_reader import available, read_words
from g2rpo.cli.output import Output
from g2rpo.core.files import write_whole
from g2rpo.core.plain import as_json
from g2rpo.core.statistics import RIGHT
from g2rpo.data.prompts import build_prompts
from g2rpo.data.testbed import words
from g2rpo.lab.evaluate import evaluate, run_settings
from g2rpo.lab.untrained import Controls, against_controls, in_figures, in_words
from g2rpo.models.load import build_policy
from g2rpo.rewards.catalogue import build_rewards
from g2rpo.train.evaluation.controls import DRAWS, Control
from g2rpo.train.evaluation.heldout import values_of
from g2rpo.train.evaluation.sampler import sampler_of
from g2rpo.train.run.folder import Run

CONTROLS = [
    *(Control(cfg=3, guided_steps=first) for first in (3, 5, None)),
    *(Control(draw=draw) for draw in range(1, DRAWS)),
]
AWAY = [Control(cfg=scale, guided_steps=first) for scale, first in ((3.0, 5), (8.0, 5), (5.0, 8))]
FAULT = str.maketrans("ae", "rn")


def judged(run: Path, count: int) -> Controls:
    """The controls of a run, with the words that Tesseract reads as a score."""
    folder, config = run / "controls", Run(run).read_config()
    if not (folder / "pictures.jsonl").is_file():
        settings = {**run_settings(run), "controls": [control.model_dump() for control in CONTROLS]}
        evaluate(settings, [f"num_prompts={count}"], folder, emit=Output())
    rows = [json.loads(line) for line in (folder / "pictures.jsonl").read_text().splitlines()]
    if available():
        for row, letters in zip(
            rows, read_words([folder / row["picture"] for row in rows]), strict=True
        ):
            row["scores"]["tesseract_exact"] = float(letters == word_of(row["prompt"]).letters)

    def of(side: str, control: str | None = None) -> dict[str, Tensor]:
        own = [
            row
            for row in rows
            if (row["side"], control or row.get("control")) == (side, row.get("control"))
        ]
        return values_of(own)

    return against_controls(
        {control: of("control", str(control)) for control in CONTROLS},
        of("base"),
        config.sampling.num_steps,
        {name: entry.weight for name, entry in config.rewards.items()},
        of("tuned"),
        of("tuned control"),
    )


def away_from_the_fault(run: Path, count: int) -> dict[str, Any]:
    """By control the price of a picture, and the means over held-out words of the base guided away
    from each misspelling."""
    stored = run / "away_from_the_fault.json"
    if not stored.is_file():
        config = Run(run).read_config()
        sampler = sampler_of(config, build_policy(config.judged, tuning="frozen"))
        rewards = build_rewards({**config.rewards, **config.evaluation.rewards}, "cpu")
        found = {}
        for control in AWAY:
            scores = []
            for number, prompt in enumerate(
                build_prompts(config.evaluation.prompts, "evaluation.prompts")[:count]
            ):
                own = control.model_copy(update={"negative_prompt": misspelt(prompt)})
                scores.append(
                    sampler.evaluate([prompt], rewards, first=number, control=own).means()
                )
            means = {name: statistics.mean(row[name] for row in scores) for name in rewards}
            found[str(control)] = {
                "evaluations": control.evaluations(sampler.num_steps),
                "means": means,
            }
        write_whole(stored, as_json(found).encode())
    return dict(json.loads(stored.read_text()))


def word_of(prompt: str) -> words.Word:
    word = words.parse_word(prompt)
    assert word is not None
    return word


def misspelt(prompt: str) -> str:
    """The prompt of the word that the base draws for this one."""
    word = word_of(prompt)
    return str(words.Word(word.letters.translate(FAULT), word.colour))


def main() -> None:
    args = arguments()
    found = {run.name: judged(run, args.prompts) for run in args.runs}
    away = {run.name: away_from_the_fault(run, args.prompts) for run in args.runs}
    print("means over", ", ".join(found))
    summary = {}
    for way in next(iter(found.values())).ways:
        same = [own for one in found.values() for own in one.ways if own.name == way.name]
        summary[way.name] = over_runs(way.evaluations, way.readings, [own.means for own in same])
    for name, one in next(iter(away.values())).items():
        means = [own[name]["means"] for own in away.values()]
        summary[f"{name}, away from the fault"] = over_runs(one["evaluations"], 0, means)
    for name, of in summary.items():
        print(name, *(f"    {key:18} {value}" for key, value in of.items()), sep="\n")
    names = [RIGHT, "ocr_exact"]
    said = [
        f"{run}: {line}"
        for run, one in found.items()
        for line in (*in_words(one, names), *in_figures(one, names))
    ]
    print(*said, sep="\n")
    runs = {
        run: {"controls": one.model_dump(), "away_from_the_fault": away[run]}
        for run, one in found.items()
    }
    results = {"prompts": args.prompts, "over_runs": summary, "said": said, "runs": runs}
    write_whole(args.out, (as_json(results, 1) + "\n").encode())


def over_runs(evaluations: int, readings: int, means: list[dict[str, Any]]) -> dict[str, Any]:
    """The price of one way, and by score the mean over runs, the lowest and the highest."""
    scores = {name: [own[name] for own in means] for name in means[0]}
    ends = {
        name: [round(end, 4) for end in (statistics.mean(of), min(of), max(of))]
        for name, of in scores.items()
    }
    return {"evaluations": evaluations, "readings": readings, **ends}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/controls.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
