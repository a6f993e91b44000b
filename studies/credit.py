"""Precise credit: how much of a group's policy gradient is signal, with noise at one step and with
noise at many.

    python -m studies.credit --sets 0-3 5-8 0-8 --windows 0-1 7-8 0-8   # one stochastic step at a time, or several at once
    python -m studies.credit --prompts 6 --explained                    # how much of the reward the scored noise explains

At the base model a group of one prompt gives one gradient of the surrogate (ratio 1, so that of
mean A log p). Groups of different prompts are independent estimates of the gradient that training
follows; what they agree on is signal:

    signal S = mean over i != j of <g_i, g_j>      share = S / mean |g_i|^2      (unbiased; 1 for equal gradients, 0 for noise)

("0-3 one at a time" is G2RPO's: the mean over groups that branch off one anchor at these steps, one
gradient a prompt; "evened out": times std / |dsigma|.) A mean of n groups has squared cosine n rho
/ (1 + n rho) with the true gradient, where rho = share / (1 - share); so 1 / rho groups, times what
a group costs, are the network evaluations at which signal and noise are equal. Each variant follows
a gradient of its own (of the expected reward through its noise): the number says how well
determined that is, not how far it leads.

Better determined is how all of them agree with one direction, the sum over prompts and single steps
of the gradients of one reward, each step's in units of its own size:

    alignment = mean over i of <g_i, C_-i> / (|g| |C|)         C_-i: without prompt i         efficiency = alignment^2 / cost

C is itself mostly noise, which shortens all alignments alike; so alignments and efficiencies
compare variants, and an optimizer that takes steps of one size gets along C in proportion to the
root of efficiency times evaluations. Inner products are those of count sketches (Charikar et al.
2002), all by one hash: with b buckets they err by |g| |h| sqrt(2 / b) at most in standard
deviation, 0.8 % of squared norms at the default.

Writes studies/results/NAME.json and NAME.png.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.machine import describe
from g2rpo.algorithms.flow_grpo import window
from g2rpo.config.read import load_config
from g2rpo.config.work import TRAINED_LATENT
from g2rpo.core.flow import ode_step
from g2rpo.core.noise import generator_for, seed_for
from g2rpo.core.objectives import group_normalize
from g2rpo.core.plans import Plan, Rollout
from g2rpo.core.statistics import Interval
from g2rpo.core.types import Kernel, Policy
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.memory import BatchSizes
from g2rpo.rollout.planning import count_evaluations, count_trained
from g2rpo.rollout.scoring import decode, score, score_rollouts
from g2rpo.train.build import Request, build
from g2rpo.train.monitor.curves import LINE_COLOURS, CurveLine, Panel, save_figure, small_multiples
from g2rpo.train.trainer import Trainer

REWARDS = {
    "scenes": [
        "rewards.scene_accuracy=",
        "evaluation.rewards={}",
        "rewards.partial.kind=scene_accuracy",
        "rewards.partial.options.partial=1.0",
        "rewards.strict.kind=scene_accuracy",
        "rewards.clip.kind=scene_clip",
        "rewards.preference.kind=scene_preference",
    ],
    "words": [
        "policy.lora_above=0",
        "rewards.word_colour=",
        "evaluation.rewards={}",
        "rewards.exact.kind=ocr",
        "rewards.exact.options={detect: false, width: 144, exact: true}",
    ],
}
"""By recipe the rewards that are looked at, each alone."""
Z = 1.96

SIZES = BatchSizes(rollout=8, decode=8, micro=8)


class Sketch:
    """A fixed random map of vectors [size] to [buckets] that keeps inner products on average:
    signed entries, added up."""

    def __init__(self, size: int, buckets: int, seed: int = 0) -> None:
        generator = generator_for("sketch", seed)
        self.buckets = buckets
        self.bucket = torch.randint(buckets, (size,), generator=generator)
        self.sign = torch.randint(2, (size,), generator=generator).float() * 2 - 1

    def __call__(self, vector: Tensor) -> Tensor:
        return torch.zeros(self.buckets).index_add_(
            0, self.bucket, vector.cpu().float() * self.sign
        )


@dataclass(frozen=True)
class Signal:
    """What n gradients agree on."""

    share: float
    """Unbiased estimate of |E g|^2 / E |g|^2; may be negative."""
    error: float
    """Its standard error, over prompts."""
    cosine: float
    """Mean cosine of one gradient with the sum of all others."""
    cosine_error: float
    silent: float
    """The share of groups whose gradient is 0, because their rewards are all equal. They count as
    noise-free zeros above."""
    count: int

    def groups(self, share: float | None = None) -> float:
        """How many groups make signal and noise equal; infinite where there is no signal."""
        share = self.share if share is None else share
        return (1 - share) / share if share > 0 else math.inf


def signal_of(gram: NDArray[np.float64]) -> Signal:
    """The signal in n >= 4 independent gradients with inner products `gram` [n, n].

    The mean of the off-diagonal entries is a U-statistic; its variance is Hoeffding's (1948), 4 (n
    - 2) / (n (n - 1)) zeta_1 + 2 / (n (n - 1)) zeta_2, with unbiased estimates of zeta_1, the
    covariance of two inner products with one gradient in common, and zeta_2, the variance of one;
    zeta_1's is cut at 0, which makes the error somewhat too large where there is no signal.
    """
    n = len(gram)
    squares = np.diag(gram)
    size = squares.mean()
    if size == 0:
        return Signal(0.0, 0.0, math.nan, math.nan, 1.0, n)
    rows = gram.sum(1) - squares
    pairs = n * (n - 1)
    mean = rows.sum() / pairs
    products = ((gram**2).sum(1) - squares**2).sum()
    squared_mean = (rows.sum() ** 2 - 4 * (rows**2).sum() + 2 * products) / (
        pairs * (n - 2) * (n - 3)
    )
    zeta_1 = max(0.0, ((rows**2).sum() - products) / (pairs * (n - 2)) - squared_mean)
    zeta_2 = max(0.0, products / pairs - squared_mean)
    error = math.sqrt((4 * (n - 2) * zeta_1 + 2 * zeta_2) / pairs)
    others = np.maximum(gram.sum() - 2 * gram.sum(1) + squares, 0)  # |sum of the others|^2
    lengths = np.sqrt(squares * others)
    cosines = rows[lengths > 0] / lengths[lengths > 0]
    return Signal(
        float(mean / size),
        float(error / size),
        float(cosines.mean()),
        float(cosines.std(ddof=1) / math.sqrt(len(cosines))),
        float((squares == 0).mean()),
        n,
    )


def alignment_of(vectors: Tensor, common: Tensor) -> tuple[float, float]:
    """How gradients [P, B] agree with the direction of the others' `common` [P, B], and the
    standard error over prompts."""
    size, total = vectors.square().sum(1).mean().sqrt(), common.sum(0)
    if size == 0:
        return 0.0, 0.0
    along = (vectors * (total - common)).sum(1) / (size * total.norm())
    return float(along.mean()), float(along.std() / math.sqrt(len(along)))


@dataclass(frozen=True)
class Variant:
    """The gradient of one prompt's groups: the mean over plans of weight times gradient."""

    plans: tuple[Plan, ...]
    weights: tuple[float, ...]


def gradients(
    policy: Policy,
    kernel: Kernel,
    sigmas: Tensor,
    rollout: Rollout,
    advantages: Tensor,
    prompt: str,
) -> list[Tensor]:
    """The gradient [parameters] of mean A log p over members and trained steps, for each row of
    advantages [V, G]."""
    parameters = policy.trainable_parameters()
    totals = [torch.zeros(sum(p.numel() for p in parameters)) for _ in advantages]
    for t in rollout.transitions:
        cond = policy.encode([prompt]).rows([0] * len(t.x))
        sigma, sigma_next = (
            sigmas[t.step + ahead].expand(len(t.x)).to(t.x.device) for ahead in (0, 1)
        )
        log_prob = kernel(t.x, policy.velocity(t.x, sigma, cond), sigma, sigma_next).log_prob(
            t.x_next
        )
        for total, weights in zip(totals, advantages, strict=True):
            if not weights.any():
                continue
            loss = (weights.to(log_prob) * log_prob).mean() / len(rollout.transitions)
            parts = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
            total += torch.cat(
                [
                    (torch.zeros_like(p) if part is None else part).flatten()
                    for part, p in zip(parts, parameters, strict=True)
                ]
            ).cpu()
    return totals


def sketch_prompt(
    trainer: Trainer, variants: Mapping[str, Variant], sketch: Sketch, number: int
) -> dict[str, Tensor]:
    """Sketches [R, buckets] of one prompt's gradients by variant, for each reward alone. Variants
    share what noise they can."""
    (prompt,) = trainer.order.batch(number, 1)
    plans = list(dict.fromkeys(plan for own in variants.values() for plan in own.plans))
    engine = Engine(
        policy=trainer.policy,
        cond=trainer.policy.encode([prompt]),
        sigmas=trainer.sigmas,
        batch_size=96,
    )

    def noise(place: int, *purpose: Any) -> torch.Generator:
        return generator_for(trainer.config.trainer.seed, "credit", number, *purpose)

    rollouts = engine.rollout(
        plans, trainer.algorithm.group_size, trainer.algorithm.kernel(trainer.sigmas), noise
    )
    rewards = score_rollouts(
        trainer.policy,
        rollouts,
        trainer.rewards,
        [prompt],
        BatchSizes(rollout=8, decode=8, micro=8),
    )  # [plans, R, 1, G]
    found = {}
    for plan, rollout, advantages in zip(
        plans, rollouts, group_normalize(rewards).sum(2), strict=True
    ):
        own = gradients(
            trainer.policy,
            trainer.algorithm.kernel(trainer.sigmas),
            trainer.sigmas,
            rollout,
            advantages,
            prompt,
        )
        found[plan] = torch.stack([sketch(gradient) for gradient in own])
    return {
        name: torch.stack(
            [weight * found[plan] for plan, weight in zip(own.plans, own.weights, strict=True)]
        ).mean(0)
        for name, own in variants.items()
    }


def explained(values: NDArray[np.float64], resamples: int = 2000) -> Interval:
    """The share of the variance of values [P, A, B] within a prompt that their row explains.

    Rows are A draws of one noise, columns B draws of all the rest: one-way ANOVA's unbiased
    variance components, each summed over prompts, with a bootstrap interval over prompts. NaN if
    nothing varies; a share near 0 may come out negative.
    """
    prompts, a, b = values.shape
    means = values.mean(2)
    within = ((values - means[:, :, None]) ** 2).sum((1, 2)) / (a * (b - 1))
    rows = means.var(1, ddof=1) - within / b
    total = (rows + within).sum()
    if total == 0:
        return Interval(math.nan, math.nan, math.nan, prompts)
    weights = np.random.default_rng(0).multinomial(
        prompts, np.full(prompts, 1 / prompts), resamples
    )
    # a resample may hold nothing but prompts of which all pictures score alike
    varied = weights @ (rows + within) > 0
    low, high = np.quantile(
        (weights @ rows)[varied] / (weights @ (rows + within))[varied], [0.025, 0.975]
    )
    return Interval(float(rows.sum() / total), float(low), float(high), prompts)


def repeat_the_rest(
    trainer: Trainer, number: int, step: int, noisy: int, draws: int, repeats: int
) -> Tensor:
    """Rewards [R, draws, repeats] of one prompt whose steps 0 .. noisy - 1 are stochastic, from one
    initial noise: the noise of `step` is drawn `draws` times, and that of all other steps anew in
    each of `repeats`."""
    (prompt,) = trainer.order.batch(number, 1)
    policy, sigmas, count = trainer.policy, trainer.sigmas, draws * repeats
    engine = Engine(policy=policy, cond=policy.encode([prompt]), sigmas=sigmas, batch_size=96)
    x = (
        policy.noise([generator_for("explained", number)])
        .expand(count, -1, *[-1] * (policy_dims(trainer) - 1))
        .clone()
    )
    with torch.no_grad():
        for at in range(len(sigmas) - 1):
            v = engine.velocity(x, [at] * count, [0] * count)
            if at >= noisy:
                x = ode_step(x, v, sigmas[at], sigmas[at + 1])
                continue
            generator = generator_for("explained", number, step, at)
            noise = torch.randn(draws if at == step else count, *x.shape[1:], generator=generator)
            noise = noise.repeat_interleave(repeats, 0) if at == step else noise
            x = trainer.algorithm.kernel(trainer.sigmas)(x, v, sigmas[at], sigmas[at + 1]).sample(
                noise
            )
        images = decode(policy, x, 8)
    return score(trainer.rewards, images, [prompt] * count).unflatten(1, (draws, repeats))


def policy_dims(trainer: Trainer) -> int:
    """How many dimensions a latent has."""
    return trainer.policy.noise([generator_for("shape")]).ndim - 1


def variants_of(args: argparse.Namespace, trainer: Trainer) -> dict[str, Variant]:
    """Single steps; sets of them, plain and evened out; windows of steps that are all
    stochastic."""
    num_steps = trainer.config.sampling.num_steps
    steps = list(range(num_steps - 1)) if args.steps is None else args.steps
    plans = {
        step: window(step, step + 1, num_steps, shared_noise=True) for step in range(num_steps - 1)
    }
    found = {f"step {step}": Variant((plans[step],), (1.0,)) for step in steps}
    for name in args.sets:
        own = tuple(plans[step] for step in steps_of(name))
        found[f"{name} one at a time"] = Variant(own, (1.0,) * len(own))
        found[f"{name} evened out"] = Variant(
            own, tuple(evening(trainer, step) for step in steps_of(name))
        )
    for kind, names, shared in (("", args.windows, True), (", own noise", args.own, False)):
        for name in names:
            first, *_, last = steps_of(name)
            found[f"steps {name} at once{kind}"] = Variant(
                (window(first, last + 1, num_steps, shared),), (1.0,)
            )
    return found


def steps_of(name: str) -> list[int]:
    """[0, 1, 2] of "0-2"."""
    first, last = map(int, name.split("-"))
    return list(range(first, last + 1))


def evening(trainer: Trainer, step: int) -> float:
    """std / |dsigma| of a branch step, with which every step's velocity counts equally."""
    sigma, after = trainer.sigmas[step], trainer.sigmas[step + 1]
    return float(
        trainer.algorithm.kernel(trainer.sigmas)(
            torch.zeros(1, 1), torch.zeros(1, 1), sigma, after
        ).std
        / (sigma - after)
    )


def measure_signal(trainer: Trainer, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per variant and reward."""
    variants, size = variants_of(args, trainer), trainer.algorithm.group_size
    sketch = Sketch(sum(p.numel() for p in trainer.learner.parameters), args.buckets)
    sketches: dict[str, list[Tensor]] = {name: [] for name in variants}
    began = time.perf_counter()
    for number in range(args.prompts):
        for name, found in sketch_prompt(trainer, variants, sketch, number).items():
            sketches[name].append(found)
        if number % 8 == 7:
            print(f"{number + 1} prompts, {time.perf_counter() - began:.0f} s", flush=True)
    stacked = {name: torch.stack(own).double() for name, own in sketches.items()}  # [P, R, buckets]
    rows = []
    for place, reward in enumerate(trainer.rewards):
        singles = [own[:, place] for name, own in stacked.items() if name.startswith("step ")]
        common = sum(
            (own / own.square().sum(1).mean().sqrt() for own in singles if own.any()),
            torch.zeros(()),
        )
        for name, variant in variants.items():
            trained, _ = count_trained(
                trainer.algorithm, variant.plans, trainer.config.sampling.num_steps
            )
            cost = count_evaluations(variant.plans, size) + TRAINED_LATENT * trained
            vectors = stacked[name][:, place]
            signal = signal_of((vectors @ vectors.T).numpy())
            low, high = (
                cost * signal.groups(signal.share + side * Z * signal.error) for side in (1, -1)
            )
            alignment, error = alignment_of(vectors, common) if singles else (math.nan, math.nan)
            rows.append(
                {
                    "variant": name,
                    "reward": reward,
                    **asdict(signal),
                    "evaluations_per_prompt": cost,
                    "evaluations_to_equal": cost * signal.groups(),
                    "evaluations_low": low,
                    "evaluations_high": high,
                    "alignment": alignment,
                    "alignment_error": error,
                    "efficiency": max(0.0, alignment) ** 2 / cost * 1e6,
                    "efficiency_error": 2 * max(0.0, alignment) * error / cost * 1e6,
                }
            )
    return rows


def measure_explained(trainer: Trainer, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per step and reward: the share of the reward's variance that the step's noise
    explains among many."""
    noisy = trainer.config.sampling.num_steps - 1
    rows = []
    for step in range(noisy) if args.steps is None else args.steps:
        prompts = range(args.prompts)
        values = torch.stack(
            [
                repeat_the_rest(trainer, number, step, noisy, args.draws, args.repeats)
                for number in prompts
            ]
        )
        found = {
            name: explained(values[:, place].double().numpy())
            for place, name in enumerate(trainer.rewards)
        }
        print(
            f"step {step}: {', '.join(f'{name} {own.mean:.3f} [{own.low:.3f}, {own.high:.3f}]' for name, own in found.items())}"
        )
        rows += [{"step": step, "reward": name, **asdict(own)} for name, own in found.items()]
    return rows


def draw_signal(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Share, alignment and efficiency by variant, a colour per reward."""
    from matplotlib.figure import Figure

    variants, rewards = (
        list(dict.fromkeys(row[key] for row in rows)) for key in ("variant", "reward")
    )
    figure = Figure((1.5 + 0.5 * len(variants), 8), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    panels = (
        ("share", "error", 100, "signal share of\none gradient, %"),
        ("alignment", "alignment_error", 100, "alignment with the\ncommon direction, %"),
        ("efficiency", "efficiency_error", 1, "efficiency\n(alignment² per evaluation)"),
    )
    for axis, (key, error, scale, label) in zip(axes, panels, strict=True):
        for place, (reward, colour) in enumerate(zip(rewards, LINE_COLOURS, strict=False)):
            own = [row for row in rows if row["reward"] == reward]
            x = np.arange(len(own)) + 0.15 * (place - (len(rewards) - 1) / 2)
            values, errors = (scale * np.array([row[name] for row in own]) for name in (key, error))
            axis.errorbar(x, values, Z * errors, fmt="o", color=colour, markersize=4, label=reward)
        axis.axhline(0, color="#888", linewidth=0.8)
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8, ncols=len(rewards))
    axes[-1].set_xticks(range(len(variants)), variants, rotation=45, ha="right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(path, figure)


def draw_explained(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    lines = lines_by("reward", rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    panel = Panel("explained share of the reward's variance", lines, "step whose noise is kept")
    save_figure(path, small_multiples([[panel]], legend=True, zero=True))


def lines_by(key: str, rows: Sequence[Mapping[str, Any]]) -> list[CurveLine]:
    """A line of means with intervals by step for each value of `key`."""
    lines = []
    for style, name in enumerate(dict.fromkeys(row[key] for row in rows)):
        own = [row for row in rows if row[key] == name]
        ends = [(row["low"], row["high"]) for row in own]
        lines.append(
            CurveLine(
                name,
                [row["step"] for row in own],
                [row["mean"] for row in own],
                style,
                ends,
                "marked",
            )
        )
    return lines


def save(
    name: str, args: argparse.Namespace, began: float, rows: Sequence[Mapping[str, Any]]
) -> Path:
    """studies/results/NAME.json; infinite numbers are null."""
    clean = [
        {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }
        for row in rows
    ]
    path = Path("studies/results") / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "arguments": vars(args),
        "machine": describe(torch.device("cpu")),
        "seconds": time.perf_counter() - began,
        "rows": clean,
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


def main() -> None:
    args = arguments()
    began = time.perf_counter()
    seed = f"trainer.seed={seed_for('credit', args.seed) % 2**31}"
    trainer = build(
        Request(config=load_config(args.recipe, [*REWARDS[args.recipe], seed, *args.overrides]))
    )
    name = args.name or ("credit_explained" if args.explained else "credit")
    rows = (measure_explained if args.explained else measure_signal)(trainer, args)
    path = save(name, args, began, rows)
    (draw_explained if args.explained else draw_signal)(path.with_suffix(".png"), rows)
    if not args.explained:
        print(
            f"{'variant':26} {'reward':11} {'share':>18} {'silent':>6} {'cost':>6} {'alignment':>15} {'efficiency':>15}"
        )
        for row in rows:
            print(
                f"{row['variant']:26} {row['reward']:11} {row['share']:+9.4f} ± {row['error']:.4f} {row['silent']:6.2f} "
                f"{row['evaluations_per_prompt']:6} {row['alignment']:+7.3f} ± {row['alignment_error']:.3f} "
                f"{row['efficiency']:7.2f} ± {row['efficiency_error']:.2f}"
            )
    print(path)


def instrument_parser(description: str | None, prompts: int) -> argparse.ArgumentParser:
    """What every instrument at the base model takes: a recipe and overrides, how many prompts, a
    seed."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--recipe", choices=list(REWARDS), default="scenes")
    parser.add_argument("--prompts", type=int, default=prompts)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def arguments() -> argparse.Namespace:
    parser = instrument_parser(__doc__, prompts=48)
    parser.add_argument("--name", help="of the results; default credit or credit_explained")
    parser.add_argument(
        "--steps", type=int, nargs="*", help="single stochastic steps; default all but the last"
    )
    parser.add_argument(
        "--sets", nargs="*", default=[], metavar="A-B", help="steps one at a time, off one anchor"
    )
    parser.add_argument(
        "--windows", nargs="*", default=[], metavar="A-B", help="steps all stochastic at once"
    )
    parser.add_argument(
        "--own",
        nargs="*",
        default=[],
        metavar="A-B",
        help="the same, from initial noise of each member's own",
    )
    parser.add_argument(
        "--explained",
        action="store_true",
        help="measure what one step's noise explains among that of all",
    )
    parser.add_argument(
        "--draws", type=int, default=12, help="(--explained) draws of the step's noise"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="(--explained) draws of the rest for each"
    )
    parser.add_argument("--buckets", type=int, default=32768)
    return parser.parse_args()


if __name__ == "__main__":
    main()
