"""The results of a run on held-out prompts, in sentences."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from g2rpo.core.errors import counted
from g2rpo.core.statistics import FEWEST
from g2rpo.evaluation.untrained import in_figures, in_words, told
from g2rpo.lab.report.history import Change, RunHistory
from g2rpo.lab.report.seeds import SeedGroup
from g2rpo.lab.report.words import decimals, fixed, signed
from g2rpo.monitor.alarms import DIVERSITIES


def verdict(change: Change) -> str:
    """ "higher", "lower" or no clear change, by the interval."""
    if change.count < FEWEST:
        return "too few prompts"
    low, high = change.interval
    if not math.isfinite(low) or not math.isfinite(high):
        return "unknown"
    if low <= 0 <= high:
        return "no clear change"
    return "higher" if low > 0 else "lower"


@dataclass(frozen=True)
class Summary:
    """What a reader needs first, and the figures behind it."""

    sentences: list[str]
    figures: list[str]


def summary(run: RunHistory | SeedGroup) -> Summary:
    """What training did, what the untrained model does without it, and what was lost, in a sentence each. The first is on right
    pictures, or on the trained rewards if no reward defines right pictures."""
    changes = run.changes()
    if not changes:
        return Summary(["Nothing can be said yet: there is no second evaluation to compare the base model's with."], [])
    right = run.right()
    heldout = f"{run.judged_prompts} held-out" if run.judged_prompts else "held-out"
    trained = [change for change in changes if change.trained]
    if right is not None:
        outcome = _right(right, run.right_in_words, heldout)
    else:
        outcome = f"On {heldout} prompts {'; '.join(map(_changed, trained))}."
    found = run.controls()
    names = told(found[0], list(run.config.rewards)) if found else []
    figures = [*([_right_in_figures(right)] if right is not None else []), *map(_in_figures, trained)]
    return Summary(
        [outcome, *(in_words(found, names) or _untried(run)), _lost(run, changes)],
        [*figures, *in_figures(found, names), *_spread(run)],
    )


def effect(change: Change, unit: str = "s.d.") -> str:
    """The change in standard deviations of the base's scores over prompts, with its interval; "" where it is not known."""
    if change.effect is None:
        return ""
    size, low, high = (signed(value, 2) for value in change.effect)
    return f"{size} {unit}" if change.count < FEWEST else f"{size} {unit} ({low} to {high})"


def _untried(run: RunHistory | SeedGroup) -> list[str]:
    """The command that samples controls, where a finished run has not."""
    runs = run.runs if isinstance(run, SeedGroup) else (run,)
    if not all(one.finished for one in runs):
        return []
    folder = str(runs[0].files.path)
    command = shlex.join(["g2rpo", "evaluate", folder, "--controls", "--out", f"{folder}-controls"])
    return [f"No free knob of the untrained model was tried; `{command}` does."]


def _right(change: Change, words: str, heldout: str) -> str:
    said = words.replace("{}", f"{_percent(change.tuned)} of {heldout}")
    return f"{said}; before training {_percent(change.base)}{_doubt(change)}."


def _right_in_figures(change: Change) -> str:
    points, margin, (low, high) = 100 * (change.change), 100 * change.margin, change.interval
    if change.seeds > 1:
        said = f"{signed(points, 0)} points, {signed(100 * low, 0)} to {signed(100 * high, 0)} over {change.seeds} seeds"
    else:
        said = f"{signed(points, 0)}{f' ± {margin:.0f}' if math.isfinite(margin) else ''} points"
    return f"Right pictures: {_percent(change.base)} to {_percent(change.tuned)} ({said})."


def _changed(change: Change) -> str:
    """Whether a reward changed, and how much in standard deviations, which say more than its own units."""
    moved = {"higher": "rose", "lower": "fell"}.get(verdict(change), "did not clearly change")
    size = effect(change, "standard deviations")
    values = f"from {fixed(change.base, decimals(change.error))} to {fixed(change.tuned, decimals(change.error))}"
    return f"{change.reward} {moved}: {size or values}{_few(change)}"


def _in_figures(change: Change) -> str:
    digits = decimals(change.error)
    values = f"{change.reward}: {fixed(change.base, digits)} to {fixed(change.tuned, digits)}"
    low, high = (signed(end, digits) for end in change.interval)
    inside = f" (change {low} to {high})" if all(map(math.isfinite, change.interval)) else ""
    size = effect(change)
    return f"{values}{inside}{f'; {size}' if size else ''}."


def _doubt(change: Change) -> str:
    return _few(change) or (", no clear change" if verdict(change) == "no clear change" else "")


def _few(change: Change) -> str:
    """A caution on too few prompts."""
    few = verdict(change) == "too few prompts"
    return f", too few prompts to say more; take evaluation.num_prompts={FEWEST} or more" if few else ""


def _lost(run: RunHistory | SeedGroup, changes: Sequence[Change]) -> str:
    """Scores that fell, diversity, and alarms."""
    raised = run.alarms()
    names = ", ".join(dict.fromkeys(one.name for one in raised))
    alarms = f"{counted(len(raised), 'alarm')}: {names}" if raised else "no alarm"
    said = "; ".join([_fallen(changes), *_diversity(run), alarms])
    return f"{said[0].upper()}{said[1:]}."


def _fallen(changes: Sequence[Change]) -> str:
    fallen = [change.reward for change in changes if verdict(change) == "lower"]
    if fallen:
        return f"fallen: {', '.join(fallen)}"
    return "no other score clearly fell" if any(not change.trained for change in changes) else "no other score was judged"


AS_VARIED = 0.8
"""Pictures that differ by less than this share of what the base's do are a loss of diversity."""


def _diversity(run: RunHistory | SeedGroup) -> list[str]:
    """Whether pictures of one prompt became alike: right ones if that is known of every run, since training that works leaves
    fewer wrong ones."""
    shares = [tuned / base for base, tuned in _spreads(run).values() if base]
    if not shares:
        return []
    right = f", right ones {shares[1]:.2f} times" if len(shares) > 1 else ""
    said = f"pictures of one prompt differ {shares[0]:.2f} times as much as the base's{right}"
    return [f"diversity was lost: {said}" if shares[-1] < AS_VARIED else said]


def _spread(run: RunHistory | SeedGroup) -> list[str]:
    return [
        f"{which.capitalize()} of one prompt differ by {tuned:.3f}, the base's by {base:.3f}."
        for which, (base, tuned) in _spreads(run).items()
    ]


def _spreads(run: RunHistory | SeedGroup) -> dict[str, tuple[float, float]]:
    """How much pictures of one prompt differ, base and tuned, of all and of right ones; means over runs."""
    found = {}
    for which, key in reversed(DIVERSITIES.items()):
        if spreads := run.spreads(key):
            base, tuned = (sum(side) / len(spreads) for side in zip(*spreads, strict=True))
            found[which] = base, tuned
    return found


def _percent(share: float) -> str:
    return f"{100 * share:.0f}\N{NO-BREAK SPACE}%" if math.isfinite(share) else "–"
