"""The two claims inside G2RPO, measured at the base model: does noise at one step at a time tie the
reward to that noise, and do several granularities give a better direction? Page: studies/credit.md.

    python -m studies.directions --recipe words --prompts 20
    python -m studies.directions --recipe scenes --prompts 20

Members i = 1 .. n of one prompt have scores s_i, the gradients of their log-probs at a step by all
trained parameters, and normalised rewards A_i. All that follows needs only the inner products K_ij =
<s_i, s_j>:

    true gradient   G = E[A s], |G|^2 = mean over i != j of A_i A_j K_ij                 (unbiased)
    correlation     of A_i with <s_i, G>, the derivative of the expected reward along a member's
                    score, G from the other members; the error of that G makes it too small
    cosine          of a group's update g = sum of a_i s_i with G, G from the other members

Sums over prompts are taken before ratios and roots, so that prompts count as in one batch of
training. Writes studies/results/directions_RECIPE.json.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from g2rpo.algorithms.flow_grpo import window
from g2rpo.config.read import load_config
from g2rpo.core.flow import tail
from g2rpo.core.noise import generator_for, seed_for
from g2rpo.core.objectives import group_normalize
from g2rpo.core.plans import Plan, Rollout
from g2rpo.core.statistics import Interval
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.planning import count_evaluations
from g2rpo.rollout.scoring import score_rollouts
from g2rpo.train.build import Request, build
from g2rpo.train.trainer import Trainer
from studies.credit import SIZES, instrument_parser, save

REWARDS = {
    "words": ["policy.lora_above=0", "rewards.word_colour=", "rewards.word_drawing="],
    "scenes": [
        "rewards.scene_accuracy=",
        "rewards.partial.kind=scene_accuracy",
        "rewards.partial.options.partial=1.0",
        "rewards.preference.kind=scene_preference",
    ],
}
SPARSE = {"ocr": "exact", "partial": "strict"}
"""Rewards that are 1 where another is 1, and 0 elsewhere."""
GROUP, DRAWS = 12, 200
Array = NDArray[np.float64]


def gram(trainer: Trainer, rollout: Rollout, prompt: str) -> dict[int, Array]:
    """By trained step the inner products [n, n] of the members' gradients of their log-probs."""
    policy, sigmas = trainer.policy, trainer.sigmas
    kernel, parameters = trainer.algorithm.kernel(sigmas), policy.trainable_parameters()
    cond, found = policy.encode([prompt]), {}
    for t in rollout.transitions:
        sigma, after = (sigmas[t.step + ahead].expand(1).to(t.x.device) for ahead in (0, 1))
        rows = []
        for x, x_next in zip(t.x.expand_as(t.x_next).split(1), t.x_next.split(1), strict=True):
            log_prob = kernel(x, policy.velocity(x, sigma, cond), sigma, after).log_prob(x_next)
            parts = torch.autograd.grad(log_prob.sum(), parameters, allow_unused=True)
            rows.append(torch.cat([part.flatten() for part in parts if part is not None]).cpu())
        scores = torch.stack(rows)
        found[t.step] = (scores @ scores.T).double().numpy()
    return found


def correlation_parts(k: Array, rewards: Tensor) -> Array:
    """Of rewards [n]: the covariance of A with <s, G>, the variances of both, and 1 if all rewards
    are equal."""
    a = group_normalize(rewards).double().numpy()
    along = (k - np.diag(np.diag(k))) @ a / (len(a) - 1)
    return np.array([(a * along).mean(), (along**2).mean(), (a**2).mean(), not a.any()])


def cosine_parts(k: Array, fine: Tensor, tails: Tensor, size: int) -> Array:
    """<g, G>, |g|^2, |G|^2 and the share of g = 0, over groups of `size` members that are drawn from
    all n; the advantage of rewards `tails` [M, n] is summed over tails, and G is that of `fine`
    [n]."""
    n, random = len(fine), np.random.default_rng(0)
    target = group_normalize(fine).double().numpy()
    length = target @ (k - np.diag(np.diag(k))) @ target / (n * (n - 1))
    parts: list[list[float]] = []
    for _ in range(DRAWS):
        order = random.permutation(n)
        own, rest = order[:size], order[size:]
        a = group_normalize(tails[:, own]).sum(0).clamp(-5, 5).double().numpy() / size
        along = a @ k[np.ix_(own, rest)] @ target[rest] / len(rest)
        parts.append([float(along), float(a @ k[np.ix_(own, own)] @ a), not a.any()])
    *first, silent = np.mean(parts, 0)
    return np.array([*first, length, silent])


def ratio(sums: Array) -> Array:
    """x / sqrt(y z) of sums [..., 4] of the parts above; NaN where y or z is not positive."""
    x, y, z, _ = np.moveaxis(sums, -1, 0)
    return x / np.sqrt(np.where((y > 0) & (z > 0), y * z, np.nan))


def over_prompts(*parts: Array) -> Interval:
    """The ratio of sums over prompts of parts [P, 4], or of the first less the second, with a
    bootstrap interval over prompts."""
    prompts = len(parts[0])
    weights = np.random.default_rng(0).multinomial(prompts, np.full(prompts, 1 / prompts), 2000)
    values = [(ratio(own.sum(0)), ratio(np.einsum("rp,pv->rv", weights, own))) for own in parts]
    mean, draws = (values[0][i] - values[1][i] if len(parts) > 1 else values[0][i] for i in (0, 1))
    low, high = np.nanquantile(draws, [0.025, 0.975])
    return Interval(float(mean), float(low), float(high), prompts)


def equal_cost(step: int, steps: int, tails: tuple[int, ...]) -> int:
    """Members with granularity 1 that cost as much as a group with `tails`."""
    plan = partial(Plan, step, step + 1)
    several = plan(tuple(tail(step + 1, steps, size) for size in tails))
    cost = count_evaluations([several], GROUP)
    one = [plan((tail(step + 1, steps, 1),))]
    return min(range(GROUP, 99), key=lambda many: abs(count_evaluations(one, many) - cost))


def measure_prompt(
    trainer: Trainer, number: int, members: int, at: list[int]
) -> dict[tuple[Any, ...], Array]:
    """The parts of one prompt, by (what, step, reward)."""
    (prompt,) = trainer.order.batch(number, 1)
    policy, sigmas, steps = trainer.policy, trainer.sigmas, len(trainer.sigmas) - 1
    kernel = trainer.algorithm.kernel(sigmas)
    engine = Engine(policy=policy, cond=policy.encode([prompt]), sigmas=sigmas, batch_size=96)

    def noise(place: int, *purpose: Any) -> torch.Generator:
        return generator_for(trainer.config.trainer.seed, "directions", number, *purpose)

    tails = {step: tuple(tail(step + 1, steps, size) for size in (1, 2, 3)) for step in at}
    plans = [Plan(step, step + 1, tails[step]) for step in at]
    plans.append(window(0, steps - 1, steps, shared_noise=True, trained=tuple(at)))
    found = {}
    for plan in plans:
        (rollout,) = engine.rollout([plan], members, kernel, noise)
        scored = score_rollouts(policy, [rollout], trainer.rewards, [prompt], SIZES)[0]
        rewards = dict(zip(trainer.rewards, scored, strict=True))  # each [M, n]
        rewards |= {
            new: (rewards[old] > 1 - 1e-6).float() for old, new in SPARSE.items() if old in rewards
        }
        for step, k in gram(trainer, rollout, prompt).items():
            single = len(plan.stochastic) == 1
            for name, own in rewards.items():
                kind = "one step" if single else "all steps"
                found[kind, step, name] = correlation_parts(k, own[0])
                if single:
                    more = equal_cost(step, steps, (1, 2, 3))
                    found["{1, 2, 3}", step, name] = cosine_parts(k, own[0], own, GROUP)
                    found["{1}", step, name] = cosine_parts(k, own[0], own[:1], GROUP)
                    found["{1}, equal cost", step, name] = cosine_parts(k, own[0], own[:1], more)
    return found


def rows_of(parts: dict[tuple[Any, ...], Array], steps: int) -> list[dict[str, Any]]:
    """A row of each value and difference of `parts` [P, 4], by step and of all steps together."""
    rows = []
    pairs = [("one step", "all steps"), ("{1, 2, 3}", "{1}"), ("{1, 2, 3}", "{1}, equal cost")]
    kinds = [(kind,) for kind in dict.fromkeys(kind for kind, *_ in parts)] + pairs
    for reward in dict.fromkeys(name for *_, name in parts):
        every = list(dict.fromkeys(step for _, step, _ in parts))
        for at in [*([step] for step in every), every]:
            for kind in kinds:
                own = [sum((parts[k, step, reward] for step in at), np.zeros(4)) for k in kind]
                row = {"what": " - ".join(kind), "reward": reward, "steps": at}
                row |= {"equal members": [equal_cost(step, steps, (1, 2, 3)) for step in at]}
                row |= {"silent": float(own[0][:, 3].mean()) / len(at)}
                rows.append(row | asdict(over_prompts(*own)))
    return rows


def arguments() -> argparse.Namespace:
    parser = instrument_parser(__doc__, prompts=20)
    parser.add_argument("--members", type=int, default=72)
    parser.add_argument("--steps", type=int, nargs="*", default=[0, 2, 4])
    return parser.parse_args()


def main() -> None:
    args = arguments()
    began = time.perf_counter()
    seed = f"trainer.seed={seed_for('directions', args.seed) % 2**31}"
    overrides = [*REWARDS[args.recipe], "evaluation.rewards={}", seed, *args.overrides]
    trainer = build(Request(config=load_config(args.recipe, overrides)))
    found: dict[tuple[Any, ...], list[Array]] = {}
    for number in range(args.prompts):
        for key, parts in measure_prompt(trainer, number, args.members, args.steps).items():
            found.setdefault(key, []).append(parts)
        print(f"{number + 1} prompts, {time.perf_counter() - began:.0f} s", flush=True)
    rows = rows_of({key: np.stack(own) for key, own in found.items()}, len(trainer.sigmas) - 1)
    for row in rows:
        interval = Interval(*(row[name] for name in ("mean", "low", "high", "count")))
        print(f"{row['reward']:11} {row['steps']!s:10} {row['what']:30} {interval:+}")
    print(save(f"directions_{args.recipe}", args, began, rows))


if __name__ == "__main__":
    main()
