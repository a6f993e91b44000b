"""The demo's pictures and numbers as HTML: pure functions, user text is escaped by the templates."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from torch import Tensor

from g2rpo.core.input_pictures import read_inputs
from g2rpo.evaluation.heldout import Evaluation
from g2rpo.lab.demo.session import DrawnPair, GroupTrace, plan_labels
from g2rpo.lab.report.history import RunHistory
from g2rpo.lab.report.page import render, templates_of
from g2rpo.lab.report.pictures import data_uri, picture_uri
from g2rpo.lab.report.verdict import fixed, signed
from g2rpo.monitor.diagnostics import group_std

LARGE_SIDE, SMALL_SIDE = 1024, 256  # pixels a side, at most, of the pictures within a page

FRAME = """
const page = this.contentDocument;
new ResizeObserver(() => { this.style.height = page.documentElement.offsetHeight + "px" }).observe(page.documentElement);
page.addEventListener("click", event => {
  const link = event.target.closest("a[href^='#']");
  if (link) { event.preventDefault(); page.querySelector(link.getAttribute("href")).scrollIntoView(); }
});
"""
"""The frame is as high as its page, and a link within the page stays there: its address would be the demo's."""

environment = templates_of("g2rpo.lab.demo")


def drawing_html(drawing: DrawnPair, note: str = "") -> str:
    """Base and tuned side by side, under each whether it is right and its scores, and their difference; `note` under all."""
    sides = [("base", drawing.base), *([("tuned", drawing.tuned)] if drawing.tuned is not None else [])]
    return environment.get_template("drawing.html").render(
        prompt=drawing.prompt,
        inputs=[data_uri(picture, SMALL_SIDE) for picture in read_inputs(drawing.prompt)],
        pictures=[
            (name, picture_uri(evaluation.images[0], LARGE_SIDE, drawing.seconds), _scores(drawing, name), _right(evaluation))
            for name, evaluation in sides
        ],
        shape=tuple(reversed(drawing.base.images.shape[-2:])),
        note=note,
        missing=[name for name, values in drawing.base.scores.items() if values.isnan().any()],
        why=drawing.why,
        meanings=drawing.meanings,
        settings=drawing.settings,
    )


def _right(evaluation: Evaluation) -> bool | None:
    """Whether its one picture is right, if a reward defines it."""
    return None if evaluation.right is None or evaluation.right.isnan().any() else bool(evaluation.right)


def _scores(drawing: DrawnPair, side: str) -> list[dict[str, Any]]:
    """Rows for one picture: the score of every reward and, for the tuned one, the change."""
    rows = []
    for name, values in drawing.base.scores.items():
        before = float(values)
        value = before if side == "base" or drawing.tuned is None else float(drawing.tuned.scores[name])
        places, change = digits(before, value), value - before
        rows.append(
            {
                "reward": name,
                "use": "trained on" if name in drawing.trained else "judged only",
                "score": fixed(value, places) if math.isfinite(value) else "no score",
                "change": signed(change, places) if side == "tuned" and math.isfinite(change) else "",
                "way": "up" if change > 0 else "down" if change < 0 else "same",
            }
        )
    return rows


def trace_html(group: GroupTrace) -> str:
    """The anchor, the members with their scores and advantages from best to worst, and the group's own numbers."""
    sigmas = group.sigmas.tolist()
    order = group.advantages.argsort(descending=True, stable=True).tolist()
    best, worst = float(group.advantages.max()), float(group.advantages.min())
    largest, silent = max(best, -worst, 1e-9), best == worst
    members = [
        {
            "number": member + 1,
            "mark": "" if silent else {best: "best", worst: "worst"}.get(float(group.advantages[member]), ""),
            "noised": picture_uri(group.noised[member], SMALL_SIDE, group.seconds),
            "finals": [
                (g, picture_uri(finals[member], SMALL_SIDE, group.seconds))
                for g, finals in zip(group.granularities, group.finals, strict=True)
            ],
            "scores": [(name, [_score(value) for value in group.rewards[r, :, member]]) for r, name in enumerate(group.names)],
            "advantage": signed(float(group.advantages[member]), 2) if group.advantages[member] else "0",
            "width": round(50 * float(group.advantages[member].abs()) / largest, 1),
            "way": "up" if group.advantages[member] > 0 else "down" if group.advantages[member] < 0 else "same",
        }
        for member in order
    ]
    return environment.get_template("group.html").render(
        prompt=group.prompt,
        inputs=[data_uri(picture, SMALL_SIDE) for picture in read_inputs(group.prompt)],
        where=plan_labels([group.plan])[0],
        noised_at=group.noised_at,
        walk=[
            {
                "step": step,
                "sigma": f"{sigmas[step]:.2f}",
                "uri": picture_uri(picture, SMALL_SIDE, group.seconds),
                "noise": step in group.plan.stochastic,
            }
            for step, picture in enumerate(group.predictions)
        ]
        if group.predictions is not None
        else [],
        steps=len(sigmas) - 1,
        members=members,
        tails=[(g, len(steps) - 1) for g, steps in zip(group.granularities, group.plan.tails, strict=True)],
        table=_spreads(group),
        silent=silent,
        unscored=[name for r, name in enumerate(group.names) if group.rewards[r].isnan().all()],
        names=group.names,
        why=group.why,
        settings=group.settings,
    )


def _spreads(group: GroupTrace) -> list[tuple[str, ...]]:
    """(reward, weight, granularity, mean, standard deviation over the group)."""
    means, spreads = group.rewards.nanmean(-1), group_std(group.rewards)
    return [
        (name, f"{float(group.weights[r]):g}", str(g), _score(means[r, m]), _score(spreads[r, m]))
        for r, name in enumerate(group.names)
        for m, g in enumerate(group.granularities)
    ]


def run_html(run: RunHistory) -> str:
    """The current page of `g2rpo report` of the run, in a frame."""
    title, page = escape(f"Report of {run.name}"), escape(render([run]))
    return f'<iframe class="g2-report" title="{title}" onload="{escape(FRAME)}" srcdoc="{page}"></iframe>'


def digits(*values: float) -> int:
    """Decimals that leave about three figures to the larger of some scores."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    return 3 if largest < 10 else 2 if largest < 1000 else 0


def _score(value: Tensor) -> str:
    return fixed(float(value), digits(float(value))) if value.isfinite() else "no score"
