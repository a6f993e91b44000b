"""Pairs from the base by a hidden taste: what Flow-DPO learns from a file of them, beside G²RPO on a
head that is fitted to the same file, the guards alone, and the base.

Two pictures of a training prompt from two noises; the one that the taste rates higher is chosen,
one pair in ten at random. In `words` the taste is the reader of the recipe, and pairs that it
rates alike are drawn anew.

    python -m studies.pairs make --taste large --pairs 40 --out pairs    # a folder with pairs.jsonl
    python -m studies.pairs run --taste large    # goes on where it was
    python -m studies.pairs run --world words --taste spelt
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo import api
from g2rpo.app.build import Request, build
from g2rpo.assembly.config import load_config
from g2rpo.assembly.prompts import build_prompts
from g2rpo.assembly.rewards import build_rewards
from g2rpo.core.images import to_pil
from g2rpo.core.seeding import generator_for
from g2rpo.core.statistics import paired
from g2rpo.evaluation.work import iterations_within
from g2rpo.lab.teach.commands import UNGUARDED
from g2rpo.run.rates import Sweep
from g2rpo.training.trainer import Trainer
from studies.teach import HELDOUT, NOISES
from studies.teach_people import SPELT, TASTES, WRONG, Known, values_of

SIZES = (50, 200, 800)
SEEDS = (42, 43)
JUDGES = {"scenes": "scene_correct", "words": "ocr_exact"}
BUDGET = 20_000
"""Network evaluations of a run, a backward pass for two."""
GUARDED = 0.5
"""The weight of the head, as a share of that of the guards together."""
FACTORS = (0.0625, 0.125, 0.25, 0.5, 1)
"""The rates of Flow-DPO's pilots, as multiples of the recipe's."""
AT_ONCE = 64
"""Pairs that are drawn at a time."""
RESULTS = Path(__file__).parent / "results"


@cache
def painter(world: str) -> Trainer:
    """A trainer of the world's recipe that only draws."""
    return api.trainer(world, ["evaluation.controls=false"], run_dir=None)


def make(world: str, taste: str, count: int, seed: int, out: Path) -> Path:
    """Writes `count` pairs below `out`; returns the path of pairs.jsonl. The first pairs of more
    are the same."""
    prompts = build_prompts(load_config(world, []).prompts.train, "prompts.train")
    order = torch.randperm(len(prompts), generator=generator_for(seed, "pairs")).tolist()
    out.mkdir(parents=True)
    rows: list[dict[str, str]] = []
    for start in range(0, len(order), AT_ONCE):
        asked = [prompts[place] for place in order[start : start + AT_ONCE]]
        images = painter(world).sample([p for p in asked for _ in range(2)], seed, 2 * start)
        values = values_of(taste, images, [p for p in asked for _ in range(2)]).view(-1, 2)
        for place, (prompt, pair, own) in enumerate(
            zip(asked, images.unflatten(0, (-1, 2)), values, strict=True)
        ):
            if own[0] == own[1] or len(rows) == count:
                continue
            draw = torch.rand(2, generator=generator_for(seed, "person", start + place))
            best = int(draw[1] < 0.5) if draw[0] < WRONG else int(own.argmax())
            names = [f"{len(rows):05d}_{letter}.png" for letter in "ab"]
            for name, picture in zip(names, to_pil(pair), strict=True):
                picture.save(out / name)
            rows.append({"prompt": str(prompt), "chosen": names[best], "rejected": names[1 - best]})
        if len(rows) == count:
            break
    path = out / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def arms(world: str, pairs: Path, rate: float) -> dict[str, list[str]]:
    """Overrides by arm. The guards are the recipe's rewards without the one that says what is
    right; beside the head they weigh as in a session of teach."""
    guarded = [*UNGUARDED[world], "evaluation.controls=false"]
    weights = [one.weight for one in load_config(world, guarded).rewards.values()]
    head = [f"rewards.clicks={GUARDED * sum(weights):g}", f"rewards.clicks.options.run={pairs}"]
    return {
        "flow_dpo": [
            "algorithm.name=flow_dpo",
            f"prompts.train={pairs}",
            "trainer.prompts_per_iteration=16",
            f"optim.learning_rate={rate:g}",
            "evaluation.controls=false",
        ],
        "head": [*guarded, *head],
        "guards": guarded,
    }


def within(world: str, overrides: list[str], budget: int) -> list[str]:
    """The overrides, with as many iterations as the budget allows, and no evaluation before the
    end."""
    count = iterations_within(load_config(world, overrides), budget)
    lengths = [f"trainer.iterations={count}", f"evaluation.every={count}"]
    return [*overrides, *lengths, f"evaluation.num_prompts={HELDOUT}"]


def found_rate(world: str, taste: str, pairs: Path, budget: int, out: Path) -> float:
    """The rate that pilots of Flow-DPO choose by the taste itself on training prompts, among those
    without an alarm of the world's judges: its best case, since a file of pairs has no such
    judge."""
    recipe = load_config(world, [])
    start = recipe.optim.learning_rate
    overrides = within(world, arms(world, pairs, start)["flow_dpo"], budget)
    only_watched = [f"evaluation.rewards.{name}.weight=0" for name in recipe.evaluation.rewards]
    judged = ["rewards=", "rewards.clicks=1", *only_watched, "trackers=[]"]
    config = load_config(world, [*overrides, *judged])
    judges = dict(config.evaluation.rewards)
    del judges["clicks"]
    sweep = Sweep(FACTORS[-1] * start, [factor * start for factor in FACTORS])
    out.mkdir()
    given = {"judges": {**build_rewards(judges), "clicks": Known(taste)}}
    build(Request(config=config, given=given, run_dir=out, sweep=sweep))
    for pilot in sweep.pilots:
        print(f"pilot {pilot}", flush=True)
    assert sweep.rate is not None
    return sweep.rate


def look(trainer: Trainer, taste: str) -> Tensor:
    """The taste's values [HELDOUT, NOISES] of held-out pictures."""
    asked = [prompt for prompt in trainer.heldout[:HELDOUT] for _ in range(NOISES)]
    return values_of(taste, trainer.sample(asked, seed=1), asked).double().view(-1, NOISES)


def ran(world: str, taste: str, overrides: list[str], seed: int) -> dict[str, Any]:
    """A run: dz with its standard error over prompts, in the base's deviations within a prompt; and
    the last row of the judge and of held-out pairs."""
    trainer = api.trainer(world, [*overrides, f"trainer.seed={seed}"], run_dir=None, trackers=[])
    before = look(trainer, taste)
    rows = list(trainer.train())
    after, unit = look(trainer, taste), float(before.var(1).mean().sqrt())
    change = paired(before.mean(1), after.mean(1))
    first, last = (next(row for row in way if row["kind"] == "eval") for way in (rows, rows[::-1]))
    judge = f"reward/{JUDGES[world]}"
    return {
        "dz": change.change / unit,
        "error": change.error / unit,
        "judge": [first[judge], last[judge]],
        "pairs": last.get("pairs/accuracy"),
        "iterations": trainer.iteration,
    }


def study(world: str, taste: str, sizes: list[int], seeds: list[int], budget: int) -> None:
    """Runs the arms that are missing; each row is printed, and stored at once."""
    path = RESULTS / f"pairs_{world}_{taste}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else []
    done = {(row["arm"], row["seed"], row["pairs_given"]) for row in rows}
    with tempfile.TemporaryDirectory() as name:
        folder, rate = Path(name), rows[0]["rate"] if rows else 0.0
        for seed in seeds:
            most = make(world, taste, max(sizes), seed, folder / f"{seed}")
            lines = most.read_text(encoding="utf-8").splitlines(keepends=True)
            for size in sizes:
                pairs = most.with_name(f"first_{size}.jsonl")
                pairs.write_text("".join(lines[:size]), encoding="utf-8")
                rate = rate or found_rate(world, taste, pairs, budget, folder / "rates")
                for arm, overrides in arms(world, pairs, rate).items():
                    if (arm == "guards" and size != sizes[0]) or (arm, seed, size) in done:
                        continue
                    found = ran(world, taste, within(world, overrides, budget), seed)
                    told = {"arm": arm, "seed": seed, "pairs_given": size, "rate": rate}
                    rows.append({**told, **found})
                    print(json.dumps(rows[-1]), flush=True)
                    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["make", "run"])
    parser.add_argument("--world", choices=JUDGES, default="scenes")
    parser.add_argument("--taste", choices=[*TASTES, SPELT], default="large")
    parser.add_argument("--pairs", type=int, default=40, help="of make")
    parser.add_argument("--out", type=Path, default=Path("pairs"), help="of make: a new folder")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--budget", type=int, default=BUDGET, help="network evaluations of a run")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.what == "make":
        print(make(given.world, given.taste, given.pairs, given.seeds[0], given.out))
    else:
        study(given.world, given.taste, list(given.sizes), list(given.seeds), given.budget)


if __name__ == "__main__":
    main()
