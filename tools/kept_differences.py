"""How large the differences from published code are that docs/algorithm.md keeps, on the tiny FLUX
and SD3.

python -m tools.kept_differences        # a few minutes; "apart" is a share of the way that the weights, or latents, have come
"""

import argparse
import math
import random
import tempfile
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo.algorithms.flow_grpo import GRPOGuard, MixGRPOFlash
from g2rpo.core.flow import sigma_grid
from g2rpo.core.noise import generator_for
from g2rpo.core.plans import Plan
from g2rpo.rollout.engine import Engine
from tests.published import neighbours, side_by_side, test_dancegrpo, test_flow_grpo, windows
from tests.support import policies
from tests.support.runs import trainer
from tests.support.tiny import save_flux, save_sd3

Groups = Sequence[Sequence[Any]]
"""A restatement's members, by group."""
Updates = Callable[..., None]


def between(ways: Sequence[Tensor]) -> list[float]:
    return [side_by_side.distance(a, b) for a, b in combinations(ways, 2)]


def line(what: str, values: Sequence[float]) -> None:
    print(f"{what:<75} {min(values):.3f} to {max(values):.3f}")


def guard(directory: Path) -> None:
    """Six updates with each correction, at two rates."""
    for rate in (1e-4, 1e-3):
        ways = []
        for correction in ("member", "batch"):
            policy = policies.load(
                directory, height=32, width=32, max_sequence_length=12, lora_rank=4
            )
            options = (
                "algorithm.name=grpo_guard",
                "algorithm.group_size=8",
                "algorithm.update_every=4",
            )
            more = (
                "sampling.num_steps=5",
                "sampling.shift=scheduler",
                f"optim.learning_rate={rate}",
                "rewards={tilt: 1.0}",
            )
            own = ("trainer.prompts_per_iteration=4", "evaluation.rewards={}")
            GRPOGuard.correction = correction
            rewards = {"tilt": windows.tilt}
            t = trainer(
                None, *options, *more, *own, policy=policy, rewards=rewards, prompts=windows.PROMPTS
            )
            before = [p.detach().clone() for p in t.learner.parameters]
            for _ in range(3):
                t.iterate()
            ways.append(side_by_side.moved(t.learner.parameters, before))
        line(f"GRPO-Guard: correction=member and batch, rate {rate}", between(ways))


def shuffled(seed: int) -> Updates:
    """Flow-GRPO's update with the members of all groups shuffled, as its code does."""

    def updates(
        network: Any, reference: Any, learner: Any, groups: Groups, *rest: Any, **options: Any
    ) -> None:
        members = [member for group in groups for member in group]
        random.Random(seed).shuffle(members)
        size = len(groups[0])
        mixed = [members[start : start + size] for start in range(0, len(members), size)]
        neighbours.flow_grpo_updates(network, reference, learner, mixed, *rest, **options)

    return updates


def halves(directory: Path) -> None:
    """Four updates, from halves of every group and from halves of all members."""
    walks = test_flow_grpo.Walks(directory, (), beta=0.04, per_time=True)
    ours = walks.restate().moved
    theirs = [walks.restate(updates=shuffled(seed)).moved for seed in range(3)]
    line(
        "Flow-GRPO: half of each group, and half of all members",
        [side_by_side.distance(ours, way) for way in theirs],
    )
    line("           two shuffles of all members", between(theirs))


def own_steps(seed: int) -> Updates:
    """DanceGRPO's update with other trained steps for every member, as its code does."""

    def updates(
        network: Any,
        learner: Any,
        groups: Groups,
        trained: Sequence[int],
        sigmas: Tensor,
        step: Any,
        *,
        accumulate: int,
        clip: float,
    ) -> None:
        draw = random.Random(seed)
        drawn = {
            id(member): draw.sample(range(len(sigmas) - 2), len(trained))
            for group in groups
            for member in group
        }
        share = accumulate * len(trained) * len(groups)
        for start in range(0, len(groups[0]), accumulate):
            losses = [
                lambda member=member, i=i: (
                    neighbours.surrogate(network, member, i, sigmas, step, clip)[0] / share
                )
                for group in groups
                for member in group[start : start + accumulate]
                for i in drawn[id(member)]
            ]
            learner.update(losses)

    return updates


def trained_steps(directory: Path) -> None:
    """Four updates, with one set of trained steps an iteration and with one for every member."""
    setting, step = test_dancegrpo.SETTING, neighbours.dance_sde(0.3)
    run = windows.Windows(directory, setting, None, step, accumulate=4, mix=test_dancegrpo.summed)
    ours = run.restate().moved
    theirs = [run.restate(updates=own_steps(seed)).moved for seed in range(3)]
    line(
        "DanceGRPO: trained steps of an iteration, and of each member",
        [side_by_side.distance(ours, way) for way in theirs],
    )
    line("           two draws for each member", between(theirs))


def flash_points(num_steps: int, last: int, ratio: float, shift: float) -> Tensor:
    """MixGRPO-Flash's sigmas behind the last stochastic step: int(max((T - l) ratio, 1)) points,
    even before the shift."""
    u = torch.linspace(1 - (last + 1) / num_steps, 0, int(max((num_steps - last) * ratio, 1)))
    return shift * u / (1 + (shift - 1) * u)


@torch.no_grad()
def flash_tail(
    network: Callable[[Tensor, Tensor, int], Tensor],
    prompt: int,
    x: Tensor,
    points: Tensor,
    before: tuple[float, Tensor],
) -> Tensor:
    """DPM-Solver++(2M) on predicted images along `points`. The first step extrapolates from
    `before`, the last stochastic step's (sigma, predicted image), across the noise that entered
    there. The last step is of first order."""

    def half_log_snr(sigma: float) -> float:
        return math.log((1 - sigma) / sigma)

    for k in range(len(points) - 1):
        sigma, to = float(points[k]), float(points[k + 1])
        image = x - sigma * network(x, points[k], prompt)
        target = image
        if to > 0:
            h, h_before = (
                half_log_snr(to) - half_log_snr(sigma),
                half_log_snr(sigma) - half_log_snr(before[0]),
            )
            target = image + 0.5 * h / h_before * (image - before[1])
        x = to / sigma * x + (1 - to - to / sigma * (1 - sigma)) * target
        before = (sigma, image)
    return x


def flash(directory: Path) -> None:
    """Final latents of six members at all windows of 300 iterations: ours, published, and with
    Euler at every step."""
    policy = policies.load(directory, height=32, width=32, max_sequence_length=12, tuning="frozen")
    sigmas, cond = sigma_grid(25, 3.0), policy.encode(["a red circle"])
    for compression in (0.4, 0.2):
        algorithm = MixGRPOFlash(compression=compression)
        found: dict[str, list[float]] = {
            name: [] for name in ("ours, published", "published, every step", "ours, every step")
        }
        for iteration in range(0, 300, 20):
            (plan,) = algorithm.plans(25, iteration)
            points = flash_points(25, plan.merge - 1, compression, 3.0)
            if len(points) < 2:  # published, these never reach the image
                continue
            whole = Plan(
                plan.branch,
                plan.merge,
                (tuple(range(plan.merge, 26)),),
                shared_noise=plan.shared_noise,
            )
            kernel = algorithm.kernel(sigmas)
            (ours,), (every,) = (
                Engine(policy=policy, cond=cond, sigmas=sigmas).rollout(
                    [p], 6, kernel, generator_for
                )
                for p in (plan, whole)
            )
            last = ours.transitions[-1]

            def network(x: Tensor, sigma: Tensor, prompt: int) -> Tensor:
                return policy.velocity(x, sigma.expand(len(x)), cond.rows([prompt] * len(x)))

            with torch.no_grad():
                image = last.x - sigmas[last.step] * network(last.x, sigmas[last.step], 0)
            published = flash_tail(
                network, 0, last.x_next, points, (float(sigmas[last.step]), image)
            )
            found["ours, published"].append(side_by_side.distance(ours.finals[0], published))
            found["published, every step"].append(side_by_side.distance(published, every.finals[0]))
            found["ours, every step"].append(side_by_side.distance(ours.finals[0], every.finals[0]))
        for what, values in found.items():
            line(f"MixGRPO-Flash {compression}: final latents, {what}", values)


MEASURES = {
    "guard": (guard, save_sd3),
    "halves": (halves, save_sd3),
    "steps": (trained_steps, save_flux),
    "flash": (flash, save_flux),
}


def main() -> None:
    for name in arguments().only or MEASURES:
        measure, save = MEASURES[name]
        with tempfile.TemporaryDirectory() as folder:
            measure(save(Path(folder) / "model"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=MEASURES, help="some of them; default all")
    return parser.parse_args()


if __name__ == "__main__":
    main()
