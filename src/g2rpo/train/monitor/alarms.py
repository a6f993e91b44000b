"""Alarms: signs in the log that a run goes wrong. docs/alarms.md has the table.

`ALARMS` has a row for each. What it says is a function of the log (rows, and the held-out scores of
every evaluation), so a resumed run raises the same ones, and so do all ranks. A row's alarms are
`{name: observation and limit}`. An alarm is *new* in a row unless the row of the same kind before
it had it too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from torch import Tensor

from g2rpo.config.schema import Config
from g2rpo.config.work import plans_in
from g2rpo.core.data import Row
from g2rpo.core.errors import counted
from g2rpo.core.noise import generator_for
from g2rpo.core.statistics import Z, or_nan, paired, percent
from g2rpo.core.types import Policy
from g2rpo.train.monitor.image_statistics import TAIL

HELPS = {
    "drift": "rollout and training disagree about the model: find what differs, or use float32 or a larger clip range",
    "masked": "a reward gives no scores: look at its code, or at the log of its server",
    "silent": "zero-variance groups have no gradient: a finer reward, harder or easier prompts, more noise (eta)",
    "saturated": "advantages are mostly signs: raise algorithm.advantage_clip, or lower the weights of the rewards",
    "hacking": "the reward is being gamed: train on the fallen reward too, lower the learning rate, add algorithm.kl_weight",
    "decline": "the model is getting worse: lower the learning rate, or stop earlier",
    "pictures": "look at samples/ for blank, noisy or oversaturated ones; lower the learning rate, add algorithm.kl_weight",
    "diversity": "pictures of one prompt become alike: stop earlier, lower the learning rate, add algorithm.kl_weight",
}
"""By alarm."""
LEAST_DIVERSITY = 0.5
"""The alarm `diversity`: the least spread of a prompt's pictures, as a share of the base's."""
DIVERSITIES = {"right pictures": "diversity_right", "pictures": "diversity"}
"""Which pictures it is of, and its name in the log."""


@dataclass
class Occurrence:
    """An alarm, from its first row to the last consecutive row of its kind; `said` is the first
    row's text."""

    name: str
    first: int
    last: int
    said: str


def occurrences(rows: Sequence[Row]) -> list[Occurrence]:
    """Every alarm of a log, in the order in which they were raised."""
    found: list[Occurrence] = []
    for kind in ("train", "eval"):
        standing: dict[str, Occurrence] = {}
        for row in rows:
            if row["kind"] != kind:
                continue
            said, at = row.get("alarms", {}), row["iteration"]
            for name in standing.keys() - said.keys():
                standing.pop(name)
            for name in said:
                if name not in standing:
                    standing[name] = Occurrence(name, at, at, said[name])
                    found.append(standing[name])
                standing[name].last = at
    return sorted(found, key=lambda one: one.first)


Scores = Mapping[str, Tensor]
"""The held-out scores [N] of one evaluation by reward; NaN means "no score"."""
Look = Callable[["Alarms"], str | None]
"""What an alarm says of a log with its newest row: observation and limit, or None."""

WINDOW_ITERATIONS = 10
"""Iterations over which shares of groups are averaged."""
SILENT, MASKED = 0.5, 0.1
SATURATED = math.erfc(math.sqrt(0.5))
"""The share of a normal distribution beyond one standard deviation, .317."""
FALSE_ALARM_LEVEL = 0.05
"""The probability of a false alarm by falling rewards in a whole run without any change, for any
number of evaluations."""
LEAST_FALL = 0.125
"""The least fall of a held-out reward that counts, in standard deviations of the base's scores over
prompts: 6 points of a share of one half. With many prompts ones are significant that nobody sees."""
CROWD, CROWD_LEVEL = 0.25, 1e-4


@dataclass
class Alarms:
    """The alarms of one run; its log is `rows`, and `history` has the scores of every evaluation by
    iteration."""

    trained: Sequence[str]
    drift_limit: float
    off: frozenset[str] = frozenset()
    rows: list[Row] = field(default_factory=list)
    history: dict[int, Scores] = field(default_factory=dict)

    def see(self, row: Row, scores: Scores | None = None) -> list[str]:
        """Adds a row to the log, with an evaluation's `scores`; sets its `alarms` if there are any;
        returns the new ones."""
        self.rows.append(row)
        if scores is not None:
            self.history[row["iteration"]] = scores
        raised = {
            name: said
            for name, alarm in ALARMS.items()
            if name not in self.off and (said := alarm.look(self, row["kind"])) is not None
        }
        if raised:
            row["alarms"] = raised
        return self.new(len(self.rows) - 1)

    def new(self, place: int) -> list[str]:
        """The alarms that are new in the row at this place of the log."""
        row = self.rows[place]
        earlier = reversed(self.rows[:place])
        before = next((other for other in earlier if other["kind"] == row["kind"]), {})
        return [name for name in row.get("alarms", {}) if name not in before.get("alarms", {})]

    @property
    def best_so_far(self) -> bool:
        """Whether the newest evaluation raised no alarm and its `judged_gain` is above that of all
        others that raised none."""
        gains = [
            or_nan(row.get("judged_gain"))
            for row in self.rows
            if row["kind"] == "eval" and "alarms" not in row
        ]
        newest = self.rows[-1]
        if "alarms" in newest or math.isnan(gains[-1]):
            return False
        return not any(gain >= gains[-1] for gain in gains[:-1])


def judged_gain(base: Scores, tuned: Scores, names: Sequence[str]) -> float:
    """The gain of held-out scores over the base's: the change of each reward in `names`, averaged
    over prompts, in units of the base's std over prompts (unscaled if that is 0), averaged over
    rewards. NaN if a reward has no scores."""
    gains = []
    for name in names:
        change = float((tuned[name].double() - base[name].double()).nanmean())
        spread = _spread(base[name])
        gains.append(change / spread if spread > 0 else change)
    return sum(gains) / len(gains)


def _spread(scores: Tensor) -> float:
    """The standard deviation of scores over prompts; 0 without any."""
    scored = scores[~scores.isnan()].double()
    return float(scored.std(correction=0)) if len(scored) else 0.0


def is_large_fall(change: float, base: Tensor) -> bool:
    """Whether `change` is a fall of at least `LEAST_FALL` standard deviations of the `base`'s scores
    [N]."""
    return -change >= LEAST_FALL * _spread(base)


def drift(log: Alarms) -> str | None:
    """Says if log-probs before the first update differ from the rollout's by more than the
    limit."""
    row, limit = log.rows[-1], log.drift_limit
    value = or_nan(row.get("log_prob_drift"))
    if "log_prob_drift" not in row or value <= limit:
        return None
    return f"log-probs differ by up to {value:.2g} from the rollout's before the first update, limit {limit:.2g}"


def share(key: str, limit: float, what: str) -> Look:
    """Says if the mean of a logged share over the last `WINDOW_ITERATIONS` iterations is above a limit."""

    def look(log: Alarms) -> str | None:
        rows = [row for row in log.rows if row["kind"] == "train"][-WINDOW_ITERATIONS:]
        mean = sum(or_nan(row.get(key)) for row in rows) / len(rows)
        if len(rows) < WINDOW_ITERATIONS or not mean > limit:
            return None
        return f"{percent(mean)} {what} in the last {len(rows)} iterations, limit {percent(limit)}"

    return look


def unscored(log: Alarms) -> str | None:
    """Says if a reward has no score for any held-out picture."""
    scores = log.history[log.rows[-1]["iteration"]]
    said = [
        f"{name} gave no score for any of {counted(len(values), 'picture')}"
        for name, values in scores.items()
        if values.isnan().all()
    ]
    return "; ".join(said) or None


def fallen_rewards(history: Mapping[int, Scores], trained: Sequence[str]) -> dict[str, str]:
    """Whether a held-out reward is below what it was at an earlier evaluation: "hacking" if a
    trained reward has risen since then, "decline" if none has.

    One-sided t-tests of paired differences, prompt by prompt on the same noise. Evaluation t (the
    base's is 0) tests each of R rewards against t earlier evaluations, each at level a / (R t . t
    (t + 1)): by the union bound, and 1/2 + 1/6 + 1/12 + ... = 1, a run whose rewards do not change
    raises a false alarm with probability a (`FALSE_ALARM_LEVEL`) at most, however long it is. A fall must also be
    at least `LEAST_FALL`. A rise needs the plain level a: it counts only together with a fall.
    """
    *earlier, (_, now) = history.items()
    looks = len(earlier)
    if looks == 0:
        return {}
    level = FALSE_ALARM_LEVEL / (len(now) * looks * looks * (looks + 1))
    spreads = {name: _spread(scores) for name, scores in earlier[0][1].items()}
    said: dict[str, list[str]] = {}
    for name in now:
        falls = {iteration: paired(before[name], now[name]) for iteration, before in earlier}
        chances = [
            (fall.chance_of_fall, iteration)
            for iteration, fall in falls.items()
            if is_large_fall(fall.change.mean, earlier[0][1][name])
        ]
        chance, iteration = min(chances, default=(1.0, 0))
        if chance < level:
            since, fall = history[iteration], falls[iteration]
            rises = {other: paired(now[other], since[other]) for other in trained}
            risen = [
                f"{other} rose{_in_spreads(-rise.change.mean, spreads[other])}"
                for other, rise in rises.items()
                if rise.chance_of_fall < FALSE_ALARM_LEVEL
            ]
            rose = f" while {' and '.join(risen)}" if risen else ""
            said.setdefault("hacking" if risen else "decline", []).append(
                f"{name} {fall.change.mean:+.3g} ± {Z * fall.error:.2g}{_in_spreads(fall.change.mean, spreads[name])} "
                f"since iteration {iteration}{rose} (p {chance:.1g}, limit {level:.1g})"
            )
    return {alarm: "; ".join(parts) for alarm, parts in said.items()}


def _in_spreads(change: float, spread: float) -> str:
    """ " (-0.3 s.d.)" of the base's scores; "" if they have none."""
    return f" ({change / spread:+.2g} s.d.)" if spread else ""


def outside(log: Alarms) -> str | None:
    """Says if held-out pictures have left the base's range in a statistic: more than `crowd` of
    them on one side."""
    row = log.rows[-1]
    said, count = [], len(next(iter(log.history[row["iteration"]].values())))
    for key in row:
        part = re.fullmatch("image/(.+)/(below|above)", key)
        if part is not None and row[key] * count >= crowd(count) - 0.5:
            low, high, mean = (row[f"image/{part[1]}{end}"] for end in ("/low", "/high", ""))
            share = f"{percent(row[key])} of the pictures {part[2]}"
            said.append(f"{part[1]} {mean:.3g}, {share} the base's {low:.3g} to {high:.3g}")
    return "; ".join(said) or None


def alike(log: Alarms) -> str | None:
    """Says if pictures of one prompt differ less than half as much in the last evaluation as in the
    base's: its right pictures if both know it, because wrong ones differ from them as well, and all
    of them else."""
    rows = [row for row in log.rows if "diversity" in row]
    if len(rows) < 2 or rows[0]["iteration"] > 0:  # else the first row is not the base's
        return None
    if rows[-1] is not log.rows[-1]:  # not compared in this evaluation
        return None
    pairs = {
        which: [or_nan(row.get(key)) for row in (rows[0], rows[-1])]
        for which, key in DIVERSITIES.items()
    }
    which, (base, now) = next(
        item for item in pairs.items() if item[0] == "pictures" or not math.isnan(sum(item[1]))
    )
    if not now < LEAST_DIVERSITY * base:
        return None
    return f"{which} of one prompt differ by {now:.3g}, the base's by {base:.3g}; limit {percent(LEAST_DIVERSITY)} of that"


def crowd(count: int) -> float:
    """The number of `count` pictures beyond one end of the base's range that raises an alarm: a
    quarter, and a number that other noise would give with probability below 1e-4; infinite if
    `count` is too small for that.

    b pictures of the base lie beyond its end. If base and tuned pictures were drawn from one
    distribution, then which of the outermost b + x of both are the base's would be a draw without
    replacement: P(at most b) is hypergeometric.
    """
    from scipy.stats import hypergeom

    beyond = math.ceil(TAIL * count)
    fitting = range(math.ceil(CROWD * count), count + 1)
    return next(
        (x for x in fitting if hypergeom.cdf(beyond, 2 * count, count, x + beyond) < CROWD_LEVEL),
        math.inf,
    )


def fallen(name: str) -> Look:
    """The alarm of this name of `fallen_rewards`."""
    return lambda log: fallen_rewards(log.history, log.trained).get(name)


@dataclass(frozen=True)
class Watch:
    """What an alarm says of the newest row of training, or of an evaluation."""

    train: Look = lambda log: None
    eval: Look = lambda log: None

    def look(self, log: Alarms, kind: str) -> str | None:
        return self.train(log) if kind == "train" else self.eval(log)


ALARMS = {
    "drift": Watch(drift),
    "masked": Watch(
        share("masked_groups", MASKED, "of the groups have no two scores to compare"), unscored
    ),
    "silent": Watch(
        share("silent_groups", SILENT, "of the groups have no variance (all advantages 0)"),
    ),
    "saturated": Watch(share("advantage_clipped", SATURATED, "of the advantages are at the clip")),
    "hacking": Watch(eval=fallen("hacking")),
    "decline": Watch(eval=fallen("decline")),
    "pictures": Watch(eval=outside),
    "diversity": Watch(eval=alike),
}
"""By name, of which `config.schema.Alarm` has all; docs/alarms.md has the limits and their
reasons."""


def alarms_of(config: Config, sigmas: Tensor, policy: Policy) -> Alarms:
    """The alarms of a run of `config`."""
    off = frozenset(name for name in ALARMS if config.action_of(name) == "off")
    plans = chain.from_iterable(plans_in(config, i) for i in range(config.trainer.iterations))
    steps = {step for plan in plans for step in plan.stochastic if plan.trains(step)}
    entries = policy.noise([generator_for("alarms")]).numel()
    limit = config.algorithm.drift_limit(sigmas, sorted(steps), entries, rounding_of(config))
    return Alarms(config.trained, limit, off)


def rounding_of(config: Config) -> float:
    """How far apart two velocities of one latent may lie, relative to their size, in the batches of
    rollout and training pass: two eps of the coarsest dtype of network, latents and velocities."""
    return 2 * config.precision.eps
