"""Run directories as `g2rpo train` leaves them, and what a page shows of them."""

import json
import re
from html import unescape

import torch

from g2rpo.train.run.folder import Run
from tests.support.runs import config, trainer


def make_run(directory, *overrides, **options):
    """A finished run of the Gaussian policy in `directory`."""
    Run(directory).claim(config(*overrides))
    t = trainer(directory, *overrides, **options)
    Run(directory).record_start(0, torch.device("cpu"))
    list(t.train())
    t.finish()
    return directory


def write_log(directory, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "metrics.jsonl").write_text(text)


def words(html):
    """The text of a page, without tags."""
    text = re.sub(r"<(style|script)>.*?</\1>", "", html, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", text)).split())


def attributes(html, name):
    return [unescape(value) for value in re.findall(rf'\b{name}="([^"]*)"', html)]


def charts(html):
    """The lines that every chart shows, by its title."""
    titles = [label.split(".")[0] for label in chart_labels(html)]
    drawn = [json.loads(chart)["lines"] for chart in attributes(html, "data-chart")]
    return dict(zip(titles, drawn, strict=True))


def chart_labels(html):
    """What each chart tells in words."""
    return [unescape(label) for label in re.findall('aria-label="([^"]*)" data-chart', html)]
