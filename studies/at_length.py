"""The paper's comparison at the length of the paper, or a third of it: protocol, figures and what
is cut in studies/at_length.md. A command goes on where an earlier one was stopped.

    python -m studies.at_length --gpu                        # or for 20 minutes at a time
    OMP_NUM_THREADS=1 python -m studies.at_length            # two cores
    python -m studies.at_length --table                      # of what has run
"""

import argparse
import json
import re
from pathlib import Path

import numpy as np

from g2rpo.cli.main import main as g2rpo
from g2rpo.config.work import work
from g2rpo.core.statistics import interval
from g2rpo.data.prompts import build_prompts
from g2rpo.lab.report.history import read_runs

PUBLISHED = "algorithm.branch_schedule=all algorithm.tail=reference algorithm.update_every=branch"
CELLS = {  # the rates are those that pilots chose for studies/eight_seeds.md
    "g2rpo": f"optim.learning_rate=4e-4 {PUBLISHED} algorithm.granularities=[1,2,3]",
    "one-granularity": f"optim.learning_rate=4e-4 {PUBLISHED} algorithm.granularities=[1]",
    "mixgrpo": "optim.learning_rate=2e-4 algorithm.name=mixgrpo",
    "dancegrpo": "optim.learning_rate=2e-4 algorithm.name=dancegrpo",
    "in-turns": "optim.learning_rate=4e-4 trainer.prompts_per_iteration={turns}",
    "flow_grpo": "optim.learning_rate=1e-4 algorithm.name=flow_grpo",
    "diffusion_nft": "optim.learning_rate=1e-4 algorithm.name=diffusion_nft",
}
UNSEEN = {"words": r"[kw]\w*'|'\w{6}'|purple", "testbed": r"\bthree\b|purple"}
"""What no training prompt has: letters, a length, a colour; a count, a colour."""
JUDGED = ("word_drawing", "word_colour")
TASKS = {  # recipe, prompts, the share of right pictures, trained rewards
    "words": ("words", "ocr_exact", [f"rewards.{name}=" for name in JUDGED]),
    "words-two": ("words", "ocr_exact", ["rewards.word_colour="]),
    "scenes": ("testbed", "scene_correct", []),
    "scenes-two": ("testbed", "scene_correct", ["rewards.scene_clip.weight=1"]),
}


def train(task: str, seed: int, gpu: bool, out: Path) -> None:
    """All cells of a task with a seed."""
    world, _, rewards = TASKS[task]
    sizes = {}
    for split, many in (("train", None), ("heldout", 48)):
        prompts = build_prompts(f"{world}:{split}", "prompts")
        kinds = [[p for p in prompts if bool(re.search(UNSEEN[world], p)) == new] for new in (0, 1)]
        asked = kinds[0] if many is None else kinds[0][:many] + kinds[1][:many]
        sizes[split] = out / f"{world}_{split}.txt"
        sizes[split].parent.mkdir(parents=True, exist_ok=True)
        sizes[split].write_text("\n".join(asked) + "\n")
    steps = 16 if gpu else 10
    words = [
        *rewards,
        *(f"evaluation.rewards.{name}={{}}" for name in JUDGED if f"rewards.{name}=" in rewards),
        f"trainer.seed={seed}",
        f"trainer.prompts_per_iteration={2 if gpu else 1}",
        f"prompts.train={sizes['train']}",
        f"evaluation.prompts={sizes['heldout']}",
        "evaluation.num_prompts=96",
        f"trainer.iterations={300 if gpu else 100}",  # else the next is rescaled
        "evaluation.every=25",
        "optim.decay=constant",
        "policy.lora_above=0",
        f"sampling.num_steps={steps}",
        "sampling.tails.forecast=false",
    ]
    branches = f" algorithm.branch_steps={[*range(steps // 2)]}".replace(", ", ",")
    for name, cell in CELLS.items():
        own = branches if "algorithm.name" not in cell else ""
        words += ["--cell", f"{name}: {cell}{own}".format(turns=22 if gpu else 6)]
    words += ["--budget", f"iterations={300 if gpu else 100}", "--seeds", "1"]
    words += ["--jobs", "16" if gpu else "1", "--out", str(out / f"{task}_{seed}")]
    g2rpo(["compare", task.removesuffix("-two"), *words])


def rows_of(out: Path) -> list[dict]:
    """Of every evaluation of every run: what was spent, and who is right."""
    rows = []
    for config in sorted(out.glob("*/runs/*/seed_*/config.yaml")):  # beside them lie logs
        folder = config.parent
        run = read_runs([folder])[0]
        task = folder.parents[2].name.rsplit("_", 1)[0]
        spent = [0]
        for row in run.iterations:
            spent.append(spent[-1] + work(run.config, row["iteration"] - 1, row["evaluations"]))
        for iteration in run.kept:
            scores = run.scores(iteration)
            means = {name: round(float(own.nanmean()), 4) for name, own in scores.items()}
            right = "".join(str(int(value)) for value in scores[TASKS[task][1]])
            at = {"task": task, "cell": folder.parent.name, "seed": run.config.trainer.seed}
            at |= {"iteration": iteration, "evaluations": spent[iteration]}
            rows.append(at | {"right": right, "means": means})
    return rows


def table(rows: list[dict]) -> None:
    """Leads of the first cell at the last iteration, and at the last number of evaluations, that
    two cells both have; known and unseen prompts apart."""
    runs: dict[tuple, list[dict]] = {}
    for row in rows:
        runs.setdefault((row["task"], row["cell"], row["seed"]), []).append(row)
    for unit in ("iteration", "evaluations"):
        for task in TASKS:
            for cell in CELLS:
                pairs = []
                for (of, name, seed), other in runs.items():
                    first = runs.get((task, "g2rpo", seed))
                    if (of, name) == (task, cell) and first:
                        last = min(first[-1][unit], other[-1][unit])
                        at = [[r for r in own if r[unit] <= last][-1] for own in (first, other)]
                        pairs.append((*at, other[0]))
                for kind, part in (("known", slice(48)), ("unseen", slice(48, None))):
                    if pairs:
                        values = np.array(
                            [[[*map(int, r["right"][part])] for r in p] for p in pairs]
                        )
                        first, other, base = values.swapaxes(0, 1)
                        spent = np.mean([pair[1]["evaluations"] for pair in pairs])
                        print(
                            f"| {task} | {unit} | {cell} | {kind} | {len(pairs)} | {spent:,.0f} |"
                            f" {interval(other - base):+} | {interval(first - other):+} |"
                        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/at_length"))
    return parser.parse_args()


def main() -> None:
    given = arguments()
    results = Path("studies/results/at_length.jsonl")
    if not given.table:
        for seed in range(70, 78 if given.gpu else 73):
            for task in TASKS if given.gpu else ("words",):
                train(task, seed, given.gpu, given.out.resolve())
    if rows := rows_of(given.out):
        results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table([json.loads(line) for line in results.read_text().splitlines()])


if __name__ == "__main__":
    main()
