"""Which groups a person should be asked about, and by which features a head should learn: without
training a generator.

Groups of the base are drawn once, into a bank: rounds of six prompts with twelve pictures each, as
a session draws them, and groups of held-out prompts. Simulated people then answer 20 groups of each
arm, which has the same rounds as the others. Measured is how the head that is fitted to the answers
orders pictures within held-out groups: Spearman's correlation with the taste.

    python -m studies.teach_choice draw --world scenes     # pictures to features, once
    python -m studies.teach_choice run --world scenes      # sessions, and the table
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import entr, softmax, stdtrit
from scipy.stats import spearmanr

from g2rpo import api
from g2rpo.core.files import write_whole
from g2rpo.core.seeding import generator_for
from g2rpo.lab.teach.commands import teach_config
from g2rpo.lab.teach.groups import CANDIDATES, PREVIEWED, SHOWN_STEPS, Asker
from g2rpo.rewards.picture_features import Features, features_of
from g2rpo.rewards.taste import SLIPS, VARIANCES, Choice, _Block, _folds
from g2rpo.rollout.scoring import decode, decode_rollout
from g2rpo.training.trainer import Trainer
from studies.teach import WORLDS
from studies.teach_people import SPELT, TASTES, chosen, values_of

ROUNDS, HELD_OUT, SIZE = 80, 40, 12
"""Rounds and held-out groups of a bank, and pictures of a group."""
CLICKS = (5, 10, 20)
"""Groups that were asked, when a head is measured."""
TASTED = {"scenes": list(TASTES), "words": [SPELT, "dark", "large", "warm", "compact", "sparse"]}
DRAWS, POOL = 64, 3
"""Heads that are drawn from a posterior, and groups that lie ready."""
LEVEL = 0.99

Floats = NDArray[np.float64]
Group = dict[str, Any]
"""`features` of its pictures, their `values` by taste, and the `spread` of the first ones."""


def groups_of(t: Trainer, world: str, round: int, step: int, prompts: Sequence[str]) -> list[Group]:
    """Groups of a round, as `Asker` samples them. The block `change` has features of how pictures
    differ from the ODE's own; a difference of features would be the same head, which only sees
    differences within a group."""
    algorithm: Any = replace(t.algorithm, branch_steps=(step,), branch_schedule="all")  # type: ignore[type-var]

    def noise(place: int, *purpose: Any) -> torch.Generator:
        return generator_for(t.config.trainer.seed, "teach", round, place, *purpose)

    spec = t.collector.spec(algorithm, 0, noise, {})
    spec = replace(spec, plans=[replace(plan, baseline=True) for plan in spec.plans])
    sampled, found = t.loop.sample_others(prompts, algorithm, spec).collected.rollouts, []
    encoder = next((one for one in t.judges.values() if hasattr(one, "features")), None)
    for prompt, rollout in zip(prompts, sampled, strict=True):
        asked = [prompt] * SIZE
        (images,) = decode_rollout(t.policy, rollout, t.loop.sizes)
        assert rollout.ode is not None
        away = images - decode(t.policy, rollout.ode[None], 1)
        features: dict[str, Any] = features_of(images, asked, encoder)
        size, signed = features_of(away.abs(), asked), features_of(0.5 + away / 2, asked)
        features["change"] = torch.cat([size["colour"], size["layout"], signed["layout"]], 1)
        values = {name: values_of(name, images, asked) for name in TASTED[world]}
        spread = float(images[:PREVIEWED].var(0).mean())
        found.append({"features": features, "values": values, "spread": spread})
    return found


def draw(world: str, seed: int, bank: Path) -> None:
    """Draws a bank by the base, and stores it."""
    config = teach_config(world, [*WORLDS[world][0], f"trainer.seed={seed}"], lambda _: None)
    t = api.trainer(config, run_dir=None, trackers=[])
    order, began, rounds, held_out = Asker(t).order, time.process_time(), [], []
    for round in range(ROUNDS):
        step = SHOWN_STEPS[round % len(SHOWN_STEPS)]
        rounds.append(groups_of(t, world, round, step, order.batch(round, CANDIDATES)))
    for place, prompt in enumerate(t.heldout[:HELD_OUT]):
        step = place % 3  # those that a session trains on
        held_out += groups_of(t, world, ROUNDS + place, step, [prompt])
    torch.save({"rounds": rounds, "held_out": held_out}, bank)
    print(f"{world}: {time.process_time() - began:.0f} processor seconds", flush=True)


class Belief:
    """The posterior of each block after some choices, as `rewards.taste.fit` has it: its mode and
    the root of its precision; and how likely each block makes left-out groups."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self.every, self.known = range(len(choices)), dict[str, tuple[Floats, Floats]]()
        self.blocks = {name: _Block.of(name, choices) for name in choices[0].features}
        scores = {
            (name, variance): sum(
                block.likelihood(block.fit(fitted, variance), left)
                for fitted, left in _folds(self.every, self.every)
            )
            for (name, block), variance in product(self.blocks.items(), VARIANCES)
        }
        self.variance = dict[str, float]()
        for name in self.blocks:
            _, self.variance[name] = max((scores[name, one], one) for one in VARIANCES)
        likelihoods = [scores[name, self.variance[name]] for name in self.blocks]
        self.best = list(self.blocks)[int(np.argmax(likelihoods))]
        self.weights = softmax(likelihoods)

    def seen(self, features: Features, name: str) -> tuple[Floats, Floats, Floats]:
        """The coordinates [G, K] of a group, and the posterior of the block."""
        block = self.blocks[name]
        if name not in self.known:
            theta = block.fit(self.every, self.variance[name])
            curvature = block.curvature(theta, self.every, self.variance[name])
            self.known[name] = theta, np.asarray(np.linalg.cholesky(curvature), np.float64)
        values = features[name].double().numpy()
        return (values - values.mean(0)) @ block.axes, *self.known[name]

    def utilities(self, features: Features) -> Floats:
        """Of a group [G]."""
        z, theta, _ = self.seen(features, self.best)
        return z @ theta

    def draws(self, features: Features, rng: np.random.Generator, name: str = "") -> Floats:
        """Utilities [DRAWS, G] by heads that are drawn from the posterior of a block."""
        z, theta, lower = self.seen(features, name or self.best)
        noise = np.linalg.solve(lower.T, rng.standard_normal((len(theta), DRAWS)))
        return (z @ (theta[:, None] + noise)).T

    def uncertainty(self, features: Features) -> float:
        """The posterior variance of utilities less their mean, summed over a group."""
        z, _, lower = self.seen(features, self.best)
        return float((np.linalg.solve(lower, z.T) ** 2).sum())

    def of_blocks(self, features: Features, rng: np.random.Generator) -> float:
        """`information` on which block is right, and which head."""
        every = [self.draws(features, rng, name) for name in self.blocks]
        return information(np.concatenate(every), np.repeat(self.weights / DRAWS, DRAWS))


def information(utilities: Floats, weights: Floats | None = None) -> float:
    """The nats that a click is expected to tell of which of the heads is right, by the utilities
    [D, G] that they give to a group."""
    heads, size = utilities.shape
    p = (1 - SLIPS) * softmax(utilities, axis=1) + SLIPS / size
    weights = np.full(heads, 1 / heads) if weights is None else weights
    return float(entr(weights @ p).sum() - weights @ entr(p).sum(1))


def previews(group: Group) -> Features:
    """Of a group's first pictures."""
    return {name: values[:PREVIEWED] for name, values in group["features"].items()}


Score = Callable[[Belief, Group, np.random.Generator], float]
SCORES: dict[str, Score] = {
    "previews": lambda b, g, rng: information(b.draws(previews(g), rng)),
    "pool": lambda b, g, rng: information(b.draws(g["features"], rng)),
    "variance": lambda b, g, rng: b.uncertainty(g["features"]),
    "information": lambda b, g, rng: information(b.draws(g["features"], rng)),
    "blocks": lambda b, g, rng: b.of_blocks(g["features"], rng),
    "thompson": lambda b, g, rng: float(b.draws(g["features"], rng)[0].var()),
}
PICTURES = {"today": 30, "first": 12, "change": 30, "previews": 30, "pool": 30}
PICTURES |= dict.fromkeys(("variance", "information", "blocks", "thompson"), 72)
"""By arm, the pictures that are drawn for a click (studies/teach_choice.md)."""


def by_spread(candidates: Sequence[Group]) -> Group:
    """What a session shows today."""
    return max(candidates, key=lambda group: float(group["spread"]))


def session(bank: dict[str, Any], taste: str, arm: str, seed: int) -> list[float]:
    """The correlation with the taste in held-out groups after `CLICKS` groups."""
    order = torch.randperm(ROUNDS, generator=generator_for(seed, "rounds")).tolist()
    every = [bank["rounds"][place] for place in order]
    person = "several" if taste == SPELT else "clicks"
    pool, belief, found = [by_spread(one) for one in every[: POOL - 1]], None, list[float]()
    choices: list[Choice] = []
    for number in range(CLICKS[-1]):
        rng, candidates = np.random.default_rng([seed, number]), every[number]
        if arm == "pool":
            pool.append(by_spread(every[POOL - 1 + number]))
            candidates = pool
        if arm == "first":
            group = candidates[0]
        elif belief is None or arm not in SCORES:
            group = by_spread(candidates)
        else:
            scores = [SCORES[arm](belief, one, rng) for one in candidates]
            group = candidates[int(np.argmax(scores))]
        pool = [one for one in pool if one is not group]
        liked = chosen(group["values"][taste], number, taste, person, seed)
        if 0 < len(liked) < SIZE:
            own = group["features"].items()
            features = {name: one for name, one in own if name != "change" or arm == "change"}
            choices.append(Choice(features, liked))
        measured = number + 1 in CLICKS
        if len(choices) > 1 and (measured or (arm in SCORES and liked)):
            belief = Belief(choices)
        if measured:
            found.append(ordered(belief, bank["held_out"], taste) if belief else 0.0)
    return found


def ordered(belief: Belief, groups: Sequence[Group], taste: str) -> float:
    """The mean over groups whose pictures differ in the taste of Spearman's correlation with it."""
    found = []
    for group in groups:
        values, own = group["values"][taste].numpy(), belief.utilities(group["features"])
        if np.ptp(values) and np.ptp(own):
            found.append(spearmanr(values, own).statistic)
    return float(np.mean(found)) if found else 0.0


def interval(values: Floats) -> str:
    """Of the mean over people [S], by Student's t; the value alone of one person."""
    if len(values) == 1:
        return f"{values.mean():+.3f}"
    half = stdtrit(len(values) - 1, (1 + LEVEL) / 2) * values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():+.3f} [{values.mean() - half:+.3f}, {values.mean() + half:+.3f}]"


def table(found: dict[str, list[float]], world: str) -> str:
    """By arm that has run for all people: the correlation after each of `CLICKS`, and by how much
    its mean is above today's, if that has run; of tastes the worst and the best."""
    seeds = sorted({int(name.rpartition("/")[2]) for name in found})
    cells: dict[str, Floats] = {}
    for arm in PICTURES:
        names = [[f"{taste}/{arm}/{seed}" for seed in seeds] for taste in TASTED[world]]
        if all(name in found for row in names for name in row):
            cells[arm] = np.array([[found[name] for name in row] for row in names])
    lines = [f"| arm | pictures | {' | '.join(map(str, CLICKS))} | above today | tastes |"]
    lines.append("|---" * (len(CLICKS) + 4) + "|")
    for arm, own in cells.items():
        said = ("", "")
        if arm != "today" and "today" in cells:
            above = (own - cells["today"]).mean(2)
            each = dict(zip(TASTED[world], above, strict=True))
            ends = sorted(each, key=lambda taste: float(each[taste].mean()))
            tastes = "; ".join(f"{taste} {interval(each[taste])}" for taste in (ends[0], ends[-1]))
            said = (interval(above.mean(0)), tastes)
        columns = [arm, str(PICTURES[arm]), *(f"{one:.3f}" for one in own.mean((0, 1))), *said]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["draw", "run"])
    parser.add_argument("--world", choices=WORLDS, default="scenes")
    parser.add_argument("--seed", type=int, default=42, help="of the pictures")
    parser.add_argument("--people", type=int, nargs=2, default=(0, 20), help="from, to")
    parser.add_argument("--arms", nargs="+", choices=PICTURES, default=list(PICTURES))
    parser.add_argument("--bank", type=Path, default=Path("runs"), help="folder of the pictures")
    parser.add_argument("--out", type=Path, help="a JSON file, to which sessions are added")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    path = given.bank / f"choice_{given.world}_{given.seed}.pt"
    if given.what == "draw":
        given.bank.mkdir(exist_ok=True)
        draw(given.world, given.seed, path)
        return
    default = Path(__file__).parent / "results" / f"teach_choice_{given.world}.json"
    bank, out = torch.load(path, weights_only=True), given.out or default
    found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    for seed, taste, arm in product(range(*given.people), TASTED[given.world], given.arms):
        if (name := f"{taste}/{arm}/{seed}") not in found:
            found[name] = [round(one, 4) for one in session(bank, taste, arm, seed)]
            write_whole(out, json.dumps(found, indent=1).encode())
    print(table(found, given.world))


if __name__ == "__main__":
    main()
