"""Whether a run works, in words: held-out scores beside the base's, training rewards beside their
noise, alarms, and how long it still takes. Loads no torch."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from pydantic import BaseModel

from g2rpo.core.errors import counted
from g2rpo.core.intervals import decimals_of, fixed, half_width, in_time, signed
from g2rpo.core.plain import read_lines_as
from g2rpo.lab.watch.folder import Watched
from g2rpo.monitor.advice import ALIKE, DIVERSITIES, HELPS, occurrences

if TYPE_CHECKING:
    from g2rpo.core.data import Row

QUIET = 60.0
"""Seconds without a line that are never remarkable."""
LONG = 5
"""Times the longest row after which silence is remarkable."""
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 16
"""Bars of a training reward."""


class Scored(BaseModel):
    """A held-out prompt and the scores of its picture by reward."""

    prompt: str
    scores: dict[str, float | None]


@dataclass(frozen=True)
class Rise:
    """A change and half of its 95 % interval; NaN where there are too few values."""

    change: float
    margin: float
    points: bool = False
    """Whether it is of a share, told in percentage points."""

    @property
    def word(self) -> str:
        if math.isnan(self.margin):
            return "too few values to say"
        if abs(self.change) <= self.margin:
            return "no difference yet"
        return "better" if self.change > 0 else "worse"

    @property
    def size(self) -> str:
        """ "+0.10 ± 0.04"; "" where there are too few values."""
        if math.isnan(self.margin):
            return ""
        scale, unit = (100, " points") if self.points else (1, "")
        digits = 0 if self.points else decimals_of(self.margin / 2)
        return f"{signed(scale * self.change, digits)} ± {fixed(scale * self.margin, digits)}{unit}"

    def figure(self, value: float) -> str:
        """A value whose change this is."""
        return f"{value:.0%}" if self.points else fixed(value, decimals_of(self.margin / 2))


@dataclass(frozen=True)
class Judged:
    """A held-out score of the newest evaluation beside the base's; of rewards that only evaluate
    the name ends with ", judge"."""

    name: str
    base: str
    now: str
    rise: Rise


@dataclass(frozen=True)
class Trained:
    """A reward in training: its newest mean, the standard deviation of an iteration around the
    line, and the rise of the line over the run."""

    name: str
    bars: str
    now: str
    noise: str
    rise: Rise


@dataclass
class Told:
    """A run in words."""

    name: str
    answer: str
    """Whether it works."""
    state: str
    pace: str
    judged: list[Judged] = field(default_factory=list)
    looked: int = 0
    """After which iteration."""
    heldout: int = 0
    trained: list[Trained] = field(default_factory=list)
    missing: str = ""
    """Of which pictures there are no scores."""
    alarms: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def tell(run: Watched) -> Told:
    """The run in words."""
    told = Told(run.name, "", state_of(run), pace_of(run))
    looks = run.looks
    if looks and run.settings is not None:
        told.looked, told.heldout = looks[-1]["iteration"], _heldout(run)
        told.judged = _judged(run, looks, told.heldout)
        told.trained = _trained(run)
        told.missing = _missing(run, looks[-1]["iteration"])
    standing = [one for one in occurrences(run.rows) if one.stands]
    told.alarms = [
        f"{one.name} since iteration {one.first}: {one.said}. What helps: {HELPS.get(one.name, 'docs/alarms.md')}"
        for one in standing
    ]
    told.answer = _answer(run, told, [one.name for one in standing])
    over = [one.name for one in occurrences(run.rows) if not one.stands]
    if over:
        told.notes.append(f"alarms that are over: {', '.join(dict.fromkeys(over))}")
    told.notes += [*_diversity(looks), *_prompts(run, told.looked), *_pictures(run, told.looked)]
    return told


def state_of(run: Watched) -> str:
    """What the run does, or how it ended."""
    resume = f"`{shlex.join(['g2rpo', 'resume', run.name])}`"
    if run.rolled_back and run.ending:
        return f"ended by an alarm; the weights are those after iteration {run.ending.iteration}"
    if run.finished:
        return f"finished: {counted(run.iterations, 'iteration')}"
    if run.ended:
        return f"ended early: {run.ended}"
    if run.lost:
        gone = f"no new line for {in_time(run.silence)}; {run.owner} no longer holds the folder"
        if run.iteration >= run.iterations > 0:
            return f"all iterations are done, but base and tuned are not compared: {gone}; {resume} does it"
        return f"stopped without an end: {gone}; {resume} goes on"
    return _doing(run) + _caution(run)


def _doing(run: Watched) -> str:
    status = run.status
    if run.loading or status is None:
        pilots = run.files.rates.is_file() and not run.rows
        what = "tries learning rates" if pilots else "loads models and prompts"
        return f"{run.owner or 'another process'} {what}, for {in_time(run.silence)}"
    if status.phase == "training":
        return f"iteration {run.iteration + 1} began {in_time(run.silence)} ago"
    since = f"for {in_time(max(0.0, run.now - status.since))}"
    if not status.of:
        return f"{status.phase}, {since}"
    return f"{status.phase}: {min(1.0, status.done / status.of):.0%} drawn and scored, {since}"


def _caution(run: Watched) -> str:
    """That a run says nothing for unusually long."""
    longest = max((row["seconds"] for row in run.rows), default=math.inf)
    if run.silence <= max(QUIET, LONG * longest):
        return ""
    unseen = ", which this machine cannot see" if run.alive is None else ", which still runs"
    usual = f"no new line for {in_time(run.silence)}, where the longest took {in_time(longest)}"
    return f"; {usual}: look at {run.owner or 'its process'}{unseen}"


def pace_of(run: Watched) -> str:
    """How far the run is, how fast, and how long it still takes."""
    if run.settings is None:
        return "nothing is known of its length yet"
    told = [f"iteration {run.iteration} of {run.iterations}"]
    if run.seconds is not None:
        told.append(f"{in_time(run.seconds)} an iteration")
    if run.left is not None and not run.over:
        told.append(f"about {in_time(run.left)} left")
    return ", ".join(told)


def rise_of(values: Sequence[float]) -> tuple[Rise, float]:
    """The rise of the least squares line through `values`, with its t interval, and the standard
    deviation of the values around it; NaN for fewer than nine. Exact for independent normal noise
    around a line."""
    count = len(values)
    if count < 3:
        return Rise(math.nan, math.nan), math.nan
    middle, mean = (count - 1) / 2, sum(values) / count
    spread = sum((x - middle) ** 2 for x in range(count))
    slope = sum((x - middle) * (y - mean) for x, y in enumerate(values)) / spread
    rest = sum((y - mean - slope * (x - middle)) ** 2 for x, y in enumerate(values))
    noise = math.sqrt(rest / (count - 2))
    error = noise / math.sqrt(spread) * (count - 1)
    return Rise(slope * (count - 1), half_width(error, count - 1)), noise


def bars_of(values: Sequence[float]) -> str:
    """`values` as at most `WIDTH` bars, each the mean of a part of them."""
    count = min(WIDTH, len(values))
    cuts = [len(values) * place // count for place in range(count + 1)] if count else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    steps = [(mean - low) / (high - low or 1) for mean in means]
    return "".join(BARS[min(len(BARS) - 1, int(step * len(BARS)))] for step in steps)


def _judged(run: Watched, looks: Sequence[Row], heldout: int) -> list[Judged]:
    base, now = looks[0], looks[-1]
    assert run.settings is not None
    if base["iteration"]:  # the base's row was lost
        return []
    rewards = {name: name for name in run.settings.rewards}
    rewards |= {name: f"{name}, judge" for name in run.settings.evaluation.rewards}
    asked = [
        ("right", "right pictures", _margin(now.get("right_stderr"), heldout)),
        *(
            (
                f"reward/{name}",
                shown,
                _margin(now.get(f"stderr/{name}"), now.get(f"scored/{name}", heldout)),
            )
            for name, shown in rewards.items()
        ),
        # of pairs or marks from a file
        ("pairs/accuracy", "as people judged", now.get("pairs/margin")),
    ]
    judged = []
    for key, shown, margin in asked:
        before, after = base.get(key), now.get(key)
        name = key.removeprefix("reward/")
        if f"scored/{name}" in now:  # its error is of prompts that both have a score for
            before, after = _means_of_both(run, now["iteration"], name) or (before, after)
        if before is None or after is None:
            continue
        points = not key.startswith("reward/")
        rise = Rise(after - before, math.nan if margin is None else margin, points)
        judged.append(Judged(shown, rise.figure(before), rise.figure(after), rise))
    return judged


def _means_of_both(run: Watched, looked: int, name: str) -> tuple[float, float] | None:
    """The means of a reward over the held-out prompts that it scored before and after; None where
    these scores are not kept."""
    both = []
    for before, after in zip(_table(run, 0), _table(run, looked), strict=False):
        was, now = before.scores.get(name), after.scores.get(name)
        if was is not None and now is not None:
            both.append((was, now))
    if not both:
        return None
    return sum(was for was, _ in both) / len(both), sum(now for _, now in both) / len(both)


def _margin(error: float | None, count: int) -> float | None:
    return None if error is None else half_width(error, count)


def _trained(run: Watched) -> list[Trained]:
    assert run.settings is not None
    rows, shown = run.of_kind("train"), []
    for name in run.settings.rewards:
        values = [row[key] for row in rows if row.get(key := f"reward/{name}") is not None]
        if not values:
            continue
        rise, noise = rise_of(values)
        digits = decimals_of(noise)
        shown.append(
            Trained(name, bars_of(values), fixed(values[-1], digits), fixed(noise, digits), rise)
        )
    return shown


def _missing(run: Watched, looked: int) -> str:
    """How many scores are missing: of the newest iteration, and by reward of held-out pictures."""
    said, rows = [], run.of_kind("train")
    if rows and (share := rows[-1].get("missing_scores")):
        said.append(f"{100 * share:.2g} % of iteration {rows[-1]['iteration']}")
    absent = Counter(
        name for one in _table(run, looked) for name, score in one.scores.items() if score is None
    )
    for name, count in absent.items():
        said.append(f"{name} of {counted(count, 'held-out picture')} after iteration {looked}")
    return f"without a score: {'; '.join(said)}" if said else ""


def _answer(run: Watched, told: Told, alarms: Sequence[str]) -> str:
    """Whether it works, in a sentence."""
    raised = f" Alarm: {', '.join(alarms)}." if alarms else ""
    if told.looked and not told.judged:
        return f"Nothing can be said: no reward has scored held-out pictures of both.{raised}"
    if not told.looked:
        if run.rolled_back:
            return f"It did not work: the weights are the base's again.{raised}"
        if run.over:
            return f"Nothing can be said: it was evaluated only before training.{raised}"
        wait = run.until_look
        soon = f"; the first look is in about {in_time(wait)}" if wait is not None else ""
        return f"Too early to say whether it works{soon}.{raised}"
    better, worse = (
        [one.name.removesuffix(", judge") for one in told.judged if one.rise.word == word]
        for word in ("better", "worse")
    )
    if better and worse:
        said = f"Mixed: {', '.join(better)} better, {', '.join(worse)} worse"
    elif better:
        said = f"It {'worked' if run.finished else 'works so far'}: {', '.join(better)} better"
    elif worse:
        said = f"It {'got' if run.finished else 'gets'} worse: {', '.join(worse)}"
    else:
        said = f"No difference{'' if run.finished else ' yet'} on held-out prompts"
    return f"{said}.{raised}"


def _heldout(run: Watched) -> int:
    """The number of held-out prompts: of those asked for, if the base's scores are not kept."""
    assert run.settings is not None
    return len(_table(run, 0)) or run.settings.evaluation.num_prompts


def _table(run: Watched, iteration: int) -> list[Scored]:
    path = run.files.scores(iteration)
    return read_lines_as(Scored, path) if path.is_file() else []


def _diversity(looks: Sequence[Row]) -> list[str]:
    for of, key in DIVERSITIES.items():
        first, last = (looks[0].get(key), looks[-1].get(key)) if looks else (None, None)
        if len(looks) > 1 and first and last is not None:
            share = last / first
            return [
                f"{of} of one prompt differ {share:.2f} times as much as the base's (alarm below {ALIKE})"
            ]
    return []


def _prompts(run: Watched, looked: int) -> list[str]:
    """The held-out prompts that gained and lost most of the first trained reward."""
    if not looked or run.settings is None or not run.settings.rewards:
        return []
    name = next(iter(run.settings.rewards))
    changes = []
    for before, after in zip(_table(run, 0), _table(run, looked), strict=False):
        was, now = before.scores.get(name), after.scores.get(name)
        if was is not None and now is not None:
            said = f"{name} most: {before.prompt:.48} {was:.3g} → {now:.3g}"
            changes.append((now - was, said))
    changes.sort()
    gained = [f"gained {said}" for change, said in changes[-1:] if change > 0]
    return gained + [f"lost {said}" for change, said in changes[:1] if change < 0]


def _pictures(run: Watched, looked: int) -> list[str]:
    newest = run.files.grid(looked)
    if not newest.is_file():
        return []
    beside = f", the base's in {run.files.grid(0).name}" if looked else " (the base's)"
    return [f"pictures: {newest}{beside}"]
