"""The results of a run on held-out prompts, in sentences; numbers and times as the report writes
them."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass

from g2rpo.config.schema import PolicyConfig
from g2rpo.core.errors import counted
from g2rpo.core.intervals import FEWEST_VALUES, Z, decimals_of, fixed, rise, signed
from g2rpo.evaluation.untrained import RIGHT, in_figures, in_words, told
from g2rpo.lab.report.history import Change, RunHistory, SeedGroup

SMALL_EFFECT = 0.2
"""A smaller change is slight, in standard deviations of the base's scores (Cohen 1988: a small
effect)."""
AS_VARIED = 0.8
"""Pictures that differ by less than this share of what the base's do are a loss of diversity."""


def verdict(change: Change) -> str:
    """ "higher", "lower" or no clear change, by the interval; "slightly" if it is clear and
    small."""
    low, high = change.change.low, change.change.high
    if not change.prompts:
        return "no scores"
    if change.prompts < FEWEST_VALUES:
        return "too few prompts"
    if not (math.isfinite(low) and math.isfinite(high)):
        return "unknown"
    if low <= 0 <= high:
        return "no clear change"
    way = "higher" if low > 0 else "lower"
    return f"slightly {way}" if abs(change.effect.mean) < SMALL_EFFECT else way


@dataclass(frozen=True)
class Summary:
    """What a reader needs first, and the figures behind it."""

    sentences: list[str]
    figures: list[str]


def summary_of(of: RunHistory | SeedGroup) -> Summary:
    """A sentence each on what was trained and whether it helped, on what the untrained model does
    without it, and on what got worse. The first is on right pictures, or on the trained rewards if no
    reward defines right pictures; the second on these, or on the reward with the largest weight."""
    group = of if isinstance(of, SeedGroup) else SeedGroup((of,))
    if not group.changes:
        return Summary([_in_training(group)], [])
    found = group.results("controls")
    rewards = group.config.rewards
    by_weight = sorted(rewards, key=lambda name: -rewards[name].weight)
    names = told(found[0], by_weight) if found else []
    without, *others = in_words(found, names) or _untried(group) or [""]
    figures = [*others, *in_figures(found, names)]
    for which, (base, tuned) in group.spreads().items():
        figures.append(
            f"{which.capitalize()} of one prompt differ by {tuned:.3f}, the base's by {base:.3f}."
        )
    sentences = [_outcome(group), without, _worse(group)]
    return Summary([sentence for sentence in sentences if sentence], figures)


def effect(change: Change, unit: str = "s.d.") -> str:
    """The change in standard deviations of the base's scores over prompts, with its interval; ""
    where it is not known."""
    size, ends = change.effect, ""
    if math.isnan(size.mean):
        return ""
    if change.prompts >= FEWEST_VALUES:
        ends = f" ({signed(size.low, 2)} to {signed(size.high, 2)})"
    return f"{signed(size.mean, 2)} {unit}{ends}"


def _outcome(group: SeedGroup) -> str:
    trained = [change for change in group.changes.values() if change.trained]
    names = _listed([change.name for change in trained])
    length = counted(max(group.judged_after), "iteration")
    heldout = group.runs[0].heldout
    right = group.changes.get(RIGHT)
    if right is None:
        said = f"on {counted(heldout, 'held-out prompt')} {'; '.join(map(_changed, trained))}"
    else:
        words = next((of.in_words for of in group.results("right")), "Right on {} prompts")
        done = words.replace("{}", f"{_percent(right.tuned)} of {heldout} held-out")
        said = (
            f"{done[0].lower()}{done[1:]}, before training {_percent(right.base)}{_points(right)}"
        )
    return f"Trained on {names} for {length}: {said}."


def _in_training(group: SeedGroup) -> str:
    """How the trained rewards move from iteration to iteration, where no two evaluations with their
    scores are kept."""
    told = []
    for name in group.config.trained:
        values = group.series(f"reward/{name}")[1]
        change, margin = rise(values)
        if math.isnan(margin):
            told.append(f"{name}: too early to say after {counted(len(values), 'iteration')}")
            continue
        digits = decimals_of(margin / 2)
        way = (
            "no clear change yet"
            if abs(change) <= margin
            else "rising"
            if change > 0
            else "falling"
        )
        told.append(f"{name}: {way}, {signed(change, digits)} ± {fixed(margin, digits)}")
    return f"In training {'; '.join(told)}; held-out prompts are not evaluated yet."


def _points(change: Change) -> str:
    """The change of a share with its interval."""
    if change.prompts < FEWEST_VALUES:
        return _few(change)
    low, high = (signed(100 * end, 0) for end in (change.change.low, change.change.high))
    seeds = f" over {change.seeds} seeds" if change.seeds > 1 else ""
    doubt = ", no clear change" if verdict(change) == "no clear change" else ""
    return f" ({signed(100 * change.change.mean, 0)} points, {low} to {high}{seeds}){doubt}"


def _changed(change: Change) -> str:
    """Whether a reward changed, and how much in standard deviations, which say more than its own
    units."""
    moved = {
        "higher": "rose",
        "lower": "fell",
        "slightly higher": "rose slightly",
        "slightly lower": "fell slightly",
    }
    if not change.prompts:
        return f"{change.name} gave no scores"
    size = effect(change, "standard deviations")
    digits = decimals(change)
    values = f"from {fixed(change.base, digits)} to {fixed(change.tuned, digits)}"
    return f"{change.name} {moved.get(verdict(change), 'did not clearly change')}, {size or values}{_few(change)}"


def _few(change: Change) -> str:
    """A caution on too few prompts with a score."""
    if verdict(change) != "too few prompts":
        return ""
    scored = counted(change.prompts, "prompt")
    return f", only {scored} with scores; {FEWEST_VALUES} are needed to say more"


def _untried(group: SeedGroup) -> list[str]:
    """The command that samples controls, where a finished run has not."""
    if not all(run.finished for run in group.runs):
        return []
    folder = str(group.runs[0].files.path)
    command = shlex.join(["g2rpo", "evaluate", folder, "--controls", "--out", f"{folder}-controls"])
    return [
        f"Other sampler settings of the untrained model were not tried; `{command}` tries them."
    ]


def _worse(group: SeedGroup) -> str:
    """Scores that fell, lost diversity, and alarms. Of diversity that of right pictures counts
    where every run knows it, since training that works leaves fewer wrong ones."""
    fallen = [
        change
        for change in group.changes.values()
        if change.name != RIGHT and verdict(change) == "lower"
    ]
    worse = [f"{change.name} ({signed(change.effect.mean, 2)} s.d.)" for change in fallen]
    shares = [tuned / base for base, tuned in group.spreads().values() if base]
    right = f", right ones {shares[1]:.2f} times" if len(shares) > 1 else ""
    varied = (
        [f"pictures of one prompt differ {shares[0]:.2f} times as much as the base's{right}"]
        if shares
        else []
    )
    if shares and shares[-1] < AS_VARIED:
        worse.append(f"diversity ({varied.pop()})")
    judged = any(not change.trained and change.name != RIGHT for change in group.changes.values())
    nothing = "Nothing that was judged clearly fell" if judged else "No other score was judged"
    raised = group.alarms()
    names = ", ".join(dict.fromkeys(one.name for one in raised))
    alarms = f"{counted(len(raised), 'alarm')}: {names}" if raised else "no alarm"
    return "; ".join([f"Worse: {', '.join(worse)}" if worse else nothing, *varied, alarms]) + "."


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}\N{NO-BREAK SPACE}%" if math.isfinite(share) else "–"


def model_name(policy: PolicyConfig) -> str:
    """A description of the model."""
    return (
        "the tiny FLUX that comes with g2rpo"
        if policy.path in ("testbed", "words")
        else policy.path
    )


def decimals(change: Change) -> int:
    """Decimals of a score with two significant figures of its change's standard error."""
    return decimals_of((change.change.high - change.change.low) / (2 * Z))
