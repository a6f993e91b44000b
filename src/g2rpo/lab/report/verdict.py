"""The results of a run on held-out prompts, in sentences; numbers and times as the report writes
them."""

from __future__ import annotations

import math
import shlex

from g2rpo.core.errors import counted
from g2rpo.core.statistics import FEWEST_VALUES, Z, decimals_of, fixed, rise, signed
from g2rpo.lab.report.history import Change, RunHistory, SeedGroup
from g2rpo.models.options import PolicyConfig
from g2rpo.train.evaluation.untrained import RIGHT
from g2rpo.train.monitor.alarms import HELPS

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


def summary_of(of: RunHistory | SeedGroup) -> list[str]:
    """At most three sentences: what was learnt, what got worse if anything did, and what to do
    next. What was learnt is of right pictures, or of the trained rewards if no reward defines right
    pictures."""
    group = of if isinstance(of, SeedGroup) else SeedGroup((of,))
    if not group.changes:
        return [_in_training(group)]
    return [each for each in (_outcome(group), _worse(group), _next(group)) if each]


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


def _fallen(group: SeedGroup) -> list[str]:
    """Scores that fell, and lost diversity: of right pictures where every run knows it, since
    training that works leaves fewer wrong ones."""
    scores = [change for change in group.changes.values() if change.name != RIGHT]
    fallen = [change for change in scores if verdict(change) == "lower"]
    worse = [f"{change.name} ({signed(change.effect.mean, 2)} s.d.)" for change in fallen]
    spreads = group.spreads()
    for which, (base, tuned) in [*spreads.items()][-1:]:
        if tuned < AS_VARIED * base:
            worse.append(f"{which} of one prompt differ {tuned / base:.2f} times as much as before")
    return worse


def _worse(group: SeedGroup) -> str:
    """What fell and the alarms; "" for neither."""
    raised = list(dict.fromkeys(one.name for one in group.alarms()))
    alarms = [f"alarm{'s' * (len(raised) > 1)} {_listed(raised)}"] if raised else []
    worse = [*_fallen(group), *alarms]
    return f"Worse: {'; '.join(worse)}." if worse else ""


def _next(group: SeedGroup) -> str:
    """What a finished run suggests."""
    if not all(run.finished for run in group.runs):
        return ""
    folder, raised = str(group.runs[0].files.path), group.alarms()
    if raised:
        return f"Next: {HELPS.get(raised[-1].name, 'look at the report')}."
    if _fallen(group):
        return "Next: train on what fell too, or lower the learning rate."
    aims = [group.changes[RIGHT]] if RIGHT in group.changes else list(group.changes.values())
    if any(verdict(change).endswith("higher") for change in aims):
        asked = ["g2rpo", "evaluate", folder, "--controls", "--out", f"{folder}-controls"]
        return f"Next: `{shlex.join(asked)}` tries whether other sampler settings do as well."
    more = f"trainer.iterations={2 * group.config.trainer.iterations}"
    return f"Next: `{shlex.join(['g2rpo', 'resume', folder, more])}` trains on."


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
