"""The results of a run on held-out prompts, in sentences; numbers and times as the report writes them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from g2rpo.config.schema import PolicyConfig
from g2rpo.core.errors import counted
from g2rpo.core.statistics import FEWEST_VALUES
from g2rpo.evaluation.untrained import in_figures, in_words, told
from g2rpo.lab.report.history import RewardChange, RunHistory, SeedGroup


def verdict(change: RewardChange) -> str:
    """ "higher", "lower" or no clear change, by the interval."""
    if change.count < FEWEST_VALUES:
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


def summary_of(of: RunHistory | SeedGroup) -> Summary:
    """What training did, what the untrained model does without it, and what was lost, in a sentence each. The first is on right
    pictures, or on the trained rewards if no reward defines right pictures."""
    group = of if isinstance(of, SeedGroup) else SeedGroup((of,))
    changes, right, found = group.changes(), group.right(), group.results("controls")
    if not changes:
        return Summary(["Nothing can be said yet: there is no second evaluation to compare the base model's with."], [])
    heldout = f"{group.judged_prompts} held-out" if group.judged_prompts else "held-out"
    trained = [change for change in changes if change.trained]
    if right is not None:
        outcome, figures = _right(right, group.right_results.in_words, heldout), [_right_in_figures(right)]
    else:
        outcome, figures = f"On {heldout} prompts {'; '.join(map(_changed, trained))}.", []
    names = told(found[0], list(group.config.rewards)) if found else []
    figures += [*map(_in_figures, trained), *in_figures(found, names)]
    for which, (base, tuned) in group.spreads().items():
        figures.append(f"{which.capitalize()} of one prompt differ by {tuned:.3f}, the base's by {base:.3f}.")
    return Summary([outcome, *(in_words(found, names) or _untried(group)), _lost(group, changes)], figures)


def effect(change: RewardChange, unit: str = "s.d.") -> str:
    """The change in standard deviations of the base's scores over prompts, with its interval; "" where it is not known."""
    if change.effect is None:
        return ""
    size, low, high = (signed(value, 2) for value in change.effect)
    return f"{size} {unit}" if change.count < FEWEST_VALUES else f"{size} {unit} ({low} to {high})"


def _untried(group: SeedGroup) -> list[str]:
    """The command that samples controls, where a finished run has not."""
    if not all(run.finished for run in group.runs):
        return []
    folder = str(group.runs[0].files.path)
    command = shlex.join(["g2rpo", "evaluate", folder, "--controls", "--out", f"{folder}-controls"])
    return [f"No free knob of the untrained model was tried; `{command}` does."]


def _right(change: RewardChange, words: str, heldout: str) -> str:
    said = words.replace("{}", f"{_percent(change.tuned)} of {heldout}")
    return f"{said}; before training {_percent(change.base)}{_doubt(change)}."


def _right_in_figures(change: RewardChange) -> str:
    points, margin, (low, high) = 100 * change.change, 100 * change.margin, change.interval
    if change.seeds > 1:
        said = f"{signed(points, 0)} points, {signed(100 * low, 0)} to {signed(100 * high, 0)} over {change.seeds} seeds"
    else:
        said = f"{signed(points, 0)}{f' ± {margin:.0f}' if math.isfinite(margin) else ''} points"
    return f"Right pictures: {_percent(change.base)} to {_percent(change.tuned)} ({said})."


def _changed(change: RewardChange) -> str:
    """Whether a reward changed, and how much in standard deviations, which say more than its own units."""
    moved = {"higher": "rose", "lower": "fell"}.get(verdict(change), "did not clearly change")
    size = effect(change, "standard deviations")
    values = f"from {fixed(change.base, decimals(change.error))} to {fixed(change.tuned, decimals(change.error))}"
    return f"{change.reward} {moved}: {size or values}{_few(change)}"


def _in_figures(change: RewardChange) -> str:
    digits = decimals(change.error)
    values = f"{change.reward}: {fixed(change.base, digits)} to {fixed(change.tuned, digits)}"
    low, high = (signed(end, digits) for end in change.interval)
    inside = f" (change {low} to {high})" if all(map(math.isfinite, change.interval)) else ""
    size = effect(change)
    return f"{values}{inside}{f'; {size}' if size else ''}."


def _doubt(change: RewardChange) -> str:
    return _few(change) or (", no clear change" if verdict(change) == "no clear change" else "")


def _few(change: RewardChange) -> str:
    """A caution on too few prompts."""
    few = verdict(change) == "too few prompts"
    return f", too few prompts to say more; take evaluation.num_prompts={FEWEST_VALUES} or more" if few else ""


def _lost(group: SeedGroup, changes: Sequence[RewardChange]) -> str:
    """Scores that fell, diversity, and alarms."""
    raised = group.alarms()
    names = ", ".join(dict.fromkeys(one.name for one in raised))
    alarms = f"{counted(len(raised), 'alarm')}: {names}" if raised else "no alarm"
    said = "; ".join([_fallen(changes), *_diversity(group), alarms])
    return f"{said[0].upper()}{said[1:]}."


def _fallen(changes: Sequence[RewardChange]) -> str:
    fallen = [change.reward for change in changes if verdict(change) == "lower"]
    if fallen:
        return f"fallen: {', '.join(fallen)}"
    return "no other score clearly fell" if any(not change.trained for change in changes) else "no other score was judged"


AS_VARIED = 0.8
"""Pictures that differ by less than this share of what the base's do are a loss of diversity."""


def _diversity(group: SeedGroup) -> list[str]:
    """Whether pictures of one prompt became alike: right ones if that is known of every run, since training that works leaves
    fewer wrong ones."""
    shares = [tuned / base for base, tuned in group.spreads().values() if base]
    if not shares:
        return []
    right = f", right ones {shares[1]:.2f} times" if len(shares) > 1 else ""
    said = f"pictures of one prompt differ {shares[0]:.2f} times as much as the base's{right}"
    return [f"diversity was lost: {said}" if shares[-1] < AS_VARIED else said]


def _percent(share: float) -> str:
    return f"{100 * share:.0f}\N{NO-BREAK SPACE}%" if math.isfinite(share) else "–"


def model_name(policy: PolicyConfig) -> str:
    """A description of the model."""
    return "the tiny FLUX that comes with g2rpo" if policy.path in ("testbed", "words") else policy.path


def decimals(error: float) -> int:
    """The decimals of a number with this standard error: two significant figures of the error."""
    return 3 if not math.isfinite(error) or error <= 0 else min(6, max(0, 1 - math.floor(math.log10(error))))


def fixed(value: float, digits: int) -> str:
    """A number with `digits` decimals; a dash for NaN."""
    return f"{value:,.{digits}f}".replace("-", "−") if math.isfinite(value) else "–"


def signed(value: float, digits: int) -> str:
    """The same with its sign."""
    return f"{value:+,.{digits}f}".replace("-", "−") if math.isfinite(value) else "–"


def figures(value: float | None) -> str:
    """Three significant figures, zeros at the end included; a dash for none."""
    return "–" if value is None else f"{value:#.3g}".rstrip(".").replace("-", "−")


def in_time(seconds: float) -> str:
    """A formatted time: 0.8 s, 42 s, 5 min 1 s, 3 h 20 min."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
