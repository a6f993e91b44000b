"""The held-out prompt with which the demo opens, chosen from the run's evaluations, and the reason
as text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from g2rpo.lab.report.history import RunHistory, SeedGroup
from g2rpo.train.monitor.scores import ScoreRow, read_rows, right_of, scores_of

Opening = tuple[int, str]
"""The number of a held-out prompt, and why it was chosen."""
FIRST: Opening = 0, "This opens on the first held-out prompt."


def opening_of(run: RunHistory) -> Opening:
    """The opening for a run, from its tables of scores; UserError if they are missing or
    damaged."""
    after = SeedGroup((run,)).judged_after
    if not after:
        return FIRST
    base, tuned = (read_rows(run.files.scores(iteration)) for iteration in (0, *after))
    return opening(base, tuned, run.config.trained) if len(base) == len(tuned) else FIRST


def opening(base: Sequence[ScoreRow], tuned: Sequence[ScoreRow], names: Sequence[str]) -> Opening:
    """The first prompt on which training helped: one that was wrong and is right or, if no reward
    defines right pictures, one on which the scores of all these `names` rose."""
    before, after = right_of(base), right_of(tuned)
    if before is not None and after is not None:
        gained, lost = (before == 0) & (after == 1), (before == 1) & (after == 0)
        words, worse = "that the base model draws wrong and the tuned one right", "became wrong"
    else:
        first, last = scores_of(base), scores_of(tuned)
        rises = torch.stack([last[name] - first[name] for name in names])
        gained, lost = (rises > 0).all(0), (rises < 0).all(0)
        words, worse = f"on which training raised {' and '.join(names)}", "fell"
    count, others = int(gained.sum()), f"{int(lost.sum()) or 'none'} {worse}"
    if not count:
        return (
            0,
            f"This opens on the first of {len(base)} held-out prompts: there is none {words}, and {others}.",
        )
    rule = f"This opens on the first of the {count} held-out prompts (of {len(base)}) {words}; {others}."
    return int(gained.nonzero()[0]), rule
