"""The demo's pictures and numbers as HTML: what the templates in this folder show, which escape
users' text."""

from __future__ import annotations

import math
from functools import partial
from html import escape

from g2rpo.core.statistics import fixed, signed
from g2rpo.lab.demo.drawing import DrawnPrompt, GroupTrace
from g2rpo.lab.report.history import RunHistory
from g2rpo.lab.report.page import render, templates_of
from g2rpo.lab.report.pictures import input_uris, picture_uri

LARGE_SIDE, SMALL_SIDE = 1024, 256  # pixels a side, at most, of the pictures within a page

FRAME = """
const page = this.contentDocument;
new ResizeObserver(() => { this.style.height = page.documentElement.offsetHeight + "px" }).observe(page.documentElement);
page.addEventListener("click", event => {
  const link = event.target.closest("a[href^='#']");
  if (link) { event.preventDefault(); page.querySelector(link.getAttribute("href")).scrollIntoView(); }
});
"""
"""The frame is as high as its page, and a link within the page stays there: its address would be
the demo's."""


def written_score(value: float, *others: float) -> str:
    """A score, with about three figures of the largest of it and `others`."""
    return fixed(float(value), digits(value, *others)) if math.isfinite(value) else "no score"


def change(value: float, before: float) -> str:
    """The change of a score from `before`, as exact as the scores; "" if one is missing."""
    return (
        signed(float(value - before), digits(value, before))
        if math.isfinite(value - before)
        else ""
    )


def digits(*values: float) -> int:
    """Decimals that leave about three figures to the largest of some scores."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    return 3 if largest < 10 else 2 if largest < 1000 else 0


def way(change: float) -> str:
    """The class of the style sheet for a change."""
    return "up" if change > 0 else "down" if change < 0 else "same"


environment = templates_of("g2rpo.lab.demo")
environment.filters |= {
    "change": change,
    "input_uris": partial(input_uris, size=SMALL_SIDE),
    "large": lambda picture, model: picture_uri(picture, LARGE_SIDE, model.policy),
    "score": written_score,
    "signed": signed,
    "small": lambda picture, model: picture_uri(picture, SMALL_SIDE, model.policy),
    "way": way,
}


def drawing_html(drawing: DrawnPrompt, note: str = "") -> str:
    """Base and tuned side by side, under each its price, whether it is right and its scores, with
    their difference from the base's; then the base with other sampler settings; `note` under all."""
    return environment.get_template("drawing.html").render(drawing=drawing, note=note)


def trace_html(group: GroupTrace) -> str:
    """The anchor, the members with their scores and advantages from best to worst, and the group's
    own numbers."""
    return environment.get_template("group.html").render(group=group)


def run_html(run: RunHistory) -> str:
    """The current page of `g2rpo report` of the run, in a frame."""
    title, page = escape(f"Report of {run.name}"), escape(render([run]))
    return f'<iframe class="g2-report" title="{title}" onload="{escape(FRAME)}" srcdoc="{page}"></iframe>'
