"""The results of a run on held-out prompts, in sentences."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from g2rpo.core.errors import counted
from g2rpo.core.statistics import FEWEST
from g2rpo.evaluation.controls import in_words, told
from g2rpo.lab.report.history import Change, Run
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


def summary(run: Run | SeedGroup) -> str:
    """Some sentences: the share of right pictures, or the trained rewards if no reward defines right pictures; scores that
    fell; alarms."""
    changes = run.changes()
    if not changes:
        return "Nothing can be said yet: there is no second evaluation to compare the base model's with."
    right = run.right()
    heldout = f"{run.judged_prompts} held-out" if run.judged_prompts else "held-out"
    if right is not None:
        outcome = _right(right, run.right_in_words, heldout)
    else:
        outcome = "; ".join(_changed(c, heldout) for c in changes if c.trained)
    parts = [f"{outcome}.", _controls(run), _fallen(changes), _spread(run), _alarms(run), _untried(run)]
    return " ".join(part for part in parts if part)


def _controls(run: Run | SeedGroup) -> str:
    """How the best free knob of the untrained model compares."""
    found = run.controls()
    return in_words(found, told(found[0], list(run.config.rewards))) if found else ""


def _untried(run: Run | SeedGroup) -> str:
    """The command that samples free knobs, where a finished run has not."""
    runs = run.runs if isinstance(run, SeedGroup) else (run,)
    if run.controls() or not all(one.finished for one in runs):
        return ""
    folder = str(runs[0].directory)
    command = shlex.join(["g2rpo", "evaluate", folder, "--controls", "--out", f"{folder}-controls"])
    return f"No free knob of the untrained model was tried; `{command}` does."


def _spread(run: Run | SeedGroup) -> str:
    """How much pictures of one prompt differ, and right ones if that is known of every run."""
    said = []
    for which, key in reversed(DIVERSITIES.items()):
        if spreads := run.spreads(key):
            base, tuned = (sum(side) / len(spreads) for side in zip(*spreads, strict=True))
            said.append(f"{which} of one prompt differ by {tuned:.3f}, the base's by {base:.3f}")
    return f"{'; '.join(said).capitalize()}." if said else ""


def _right(change: Change, words: str, heldout: str) -> str:
    points, margin, (low, high) = 100 * (change.tuned - change.base), 100 * change.margin, change.interval
    if change.seeds > 1:
        said = f"{signed(points, 0)} points, {_over_seeds(100 * low, 100 * high, 0, change)}"
    else:
        said = f"{signed(points, 0)}{f' ± {margin:.0f}' if math.isfinite(margin) else ''} points"
    interval = f" ({said}{_doubt(change)})"
    return f"{words.replace('{}', f'{_percent(change.tuned)} of {heldout}')}, was {_percent(change.base)}{interval}"


def _changed(change: Change, heldout: str) -> str:
    digits, said, doubt = decimals(change.error), verdict(change), _doubt(change)
    word = {"higher": "rose", "lower": "fell"}.get(said, "went")
    if change.seeds > 1:
        margin = f" ({signed(change.tuned - change.base, digits)}, {_over_seeds(*change.interval, digits, change)}{doubt})"
    else:
        margin = f" (± {fixed(change.margin, digits)}{doubt})" if math.isfinite(change.margin) else doubt
    values = f"from {fixed(change.base, digits)} to {fixed(change.tuned, digits)}"
    return f"{change.reward} {word} {values} on {heldout} prompts{margin}"


def _doubt(change: Change) -> str:
    said = verdict(change)
    if said == "too few prompts":
        return f", too few prompts to say more; take evaluation.num_prompts={FEWEST} or more"
    return ", no clear change" if said == "no clear change" else ""


def _over_seeds(low: float, high: float, digits: int, change: Change) -> str:
    return f"{signed(low, digits)} to {signed(high, digits)} over {change.seeds} seeds"


def _fallen(changes: Sequence[Change]) -> str:
    fallen = [change.reward for change in changes if verdict(change) == "lower"]
    if fallen:
        return f"Fallen: {', '.join(fallen)}."
    return "No other score clearly fell." if any(not change.trained for change in changes) else "No other score was judged."


def _alarms(run: Run | SeedGroup) -> str:
    raised = run.alarms()
    names = ", ".join(dict.fromkeys(one.name for one in raised))
    return f"{counted(len(raised), 'alarm')}: {names}." if raised else "No alarm."


def _percent(share: float) -> str:
    return f"{100 * share:.0f}\N{NO-BREAK SPACE}%" if math.isfinite(share) else "–"
