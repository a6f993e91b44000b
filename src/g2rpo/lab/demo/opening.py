"""The held-out prompt with which the demo opens, chosen from the run's evaluations, and the reason as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from g2rpo.core.types import Reward
from g2rpo.evaluation.heldout import verdicts
from g2rpo.lab.report.history import RunHistory, SeedGroup
from g2rpo.monitor.scores import read_scores

DemoScores = Mapping[str, Tensor]
Opening = tuple[int, str]
"""The number of a held-out prompt, and why it was chosen."""
FIRST: Opening = 0, "This opens on the first held-out prompt."


def opening_of(run: RunHistory, rewards: Mapping[str, Reward], trained: Sequence[str]) -> Opening:
    """The opening for a run whose rewards have been built; the first held-out prompt if the run kept no scores. UserError for
    damaged ones."""
    after = SeedGroup((run,)).judged_after
    if not after:
        return FIRST
    paths = [run.files.scores(iteration) for iteration in (0, *after)]
    base = read_scores(paths[0], trained)
    tuned = read_scores(paths[1], trained, len(next(iter(base.values()))))
    scored = {name: reward for name, reward in rewards.items() if name in base.keys() & tuned.keys()}
    return opening(base, tuned, scored, [name for name in trained if name in scored])


def opening(base: DemoScores, tuned: DemoScores, rewards: Mapping[str, Reward], trained: Sequence[str]) -> Opening:
    """The first prompt on which training helped, from scores [N] by reward before and after it: one that was wrong and is right
    or, if no reward defines right pictures, one on which every trained score rose."""
    before, after = verdicts(rewards, base), verdicts(rewards, tuned)
    if before is not None and after is not None:
        gained, lost = (before == 0) & (after == 1), (before == 1) & (after == 0)
        words, worse = "that the base model draws wrong and the tuned one right", "became wrong"
    elif trained:
        rises = torch.stack([tuned[name] - base[name] for name in trained])
        gained, lost = (rises > 0).all(0), (rises < 0).all(0)
        words, worse = f"on which training raised {' and '.join(trained)}", "fell"
    else:
        return FIRST
    count, others = int(gained.sum()), f"{int(lost.sum()) or 'none'} {worse}"
    if not count:
        return 0, f"This opens on the first of {len(gained)} held-out prompts: there is none {words}, and {others}."
    rule = f"This opens on the first of the {count} held-out prompts (of {len(gained)}) {words}; {others}."
    return int(gained.nonzero()[0]), rule
