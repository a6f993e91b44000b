"""The report: runs in, one HTML page out that needs nothing but itself."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from g2rpo import __version__, recipes
from g2rpo.alarms import ADVICE
from g2rpo.config import differences, resolve
from g2rpo.metrics import Row
from g2rpo.pictures import Grid, read_grid
from g2rpo.report.charts import Line, compact, interval_plot, key_sample, line_chart, stacked_bar, thin
from g2rpo.report.history import Change, Run

Z = 1.96
"""Standard errors to either side of a 95 % interval of a normal distribution."""
FRAMES, PICTURES, PICTURE_BYTES = 9, 8, 3_000_000
"""At most so many evaluations and prompts of a run are shown, and about so many bytes of pictures on a page."""


@dataclass(frozen=True)
class Chart:
    title: str
    note: str
    svg: Markup
    tag: str = ""


HEALTH = (
    ("ratio_deviation", "Ratio deviation", "largest |ratio − 1| of an iteration"),
    ("clip_fraction", "Clip fraction", "share of ratios outside the clip range"),
    ("kl", "KL to the base", "of the step kernels, mean over entries"),
    ("grad_norm", "Gradient norm", "before clipping"),
    ("loss", "Loss", "the clipped surrogate, and the KL term if there is one"),
    ("learning_rate", "Learning rate", "as scheduled"),
    ("advantage_size", "Advantage size", "mean |advantage|"),
    ("advantage_clipped", "Clipped advantages", "share at the advantage clip"),
    ("silent_groups", "Silent groups", "share of groups that teach nothing: all advantages 0"),
    ("missing_scores", "Missing scores", "share of scores that are NaN"),
    ("masked_groups", "Masked groups", "share of groups without two scores to compare"),
    ("log_prob_drift", "Log-prob drift", "training pass against rollout; rounding, or something is wrong"),
    ("skipped_updates", "Skipped updates", "with a gradient that was not finite"),
)


ALARMED = {"log_prob_drift": "drift", "silent_groups": "silent", "masked_groups": "masked", "advantage_clipped": "saturated"}
"""The alarm that looks at a number of the update."""
ALARM_SAMPLE = Markup('<svg class="key" viewBox="0 0 36 14" aria-hidden="true"><path class="alarm" d="M18,0V14"/></svg>')
LOOKS = {
    "brightness": "mean luma",
    "contrast": "standard deviation of luma within a picture; blank: 0",
    "saturation": "largest minus smallest channel of a pixel",
    "clipped": "share of values that are 0 or 1",
    "detail": "luma of a pixel against its neighbours; noise is high",
}


def render(runs: Sequence[Run]) -> str:
    """The page about one run, or about several side by side."""
    environment = Environment(
        loader=PackageLoader("g2rpo.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"compact": compact, "span": span}
    charts, constants = health(runs)
    return environment.get_template("page.html").render(
        title=" · ".join(run.name for run in runs),
        runs=runs,
        several=len(runs) > 1,
        keys=[key_sample(style) for style in range(len(runs))],
        samples={look: key_sample(0, look) for look in ("marked", "faint", "pale")} | {"alarm": ALARM_SAMPLE},
        states=[state(run) for run in runs],
        facts=table_of(facts, runs),
        results=results(runs),
        alarms=alarms(runs),
        pictures=pictures(runs),
        looks=look_charts(runs),
        rewards=reward_charts(runs),
        steps=step_charts(runs),
        granularities=granularity_table(runs),
        health=charts,
        constants=constants,
        cost=cost_charts(runs),
        costs=table_of(costs, runs),
        phases=[phases(run) for run in runs],
        apart=between(runs),
        recipes=[from_recipe(run) for run in runs],
        version=__version__,
    )


def state(run: Run) -> str:
    """One sentence: finished, or how far it got."""
    total = run.config.trainer.iterations
    if run.finished:
        return f"Finished: {total} iterations."
    if not run.rows:
        return f"Unfinished: nothing is logged yet of {total} iterations."
    if run.results and run.rolled_back and run.iteration <= run.results["rolled_back_from"]:
        best = f"the weights are those after {run.results['iteration']}, the best evaluation"
        return f"Ended by an alarm after {run.iteration} of {total} iterations: {best}."
    once = run.results if not run.rolled_back else None
    again = f" It had finished after {once['iteration']}, and was extended." if once else ""
    return f"Unfinished: {run.iteration} of {total} iterations are logged; the run goes on, or it stopped early.{again}"


def table_of(of: Callable[[Run], dict[str, str]], runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Rows (name, value by run) from what `of` says about each run; a run that does not say gets a dash."""
    told = [of(run) for run in runs]
    names = dict.fromkeys(name for each in told for name in each)
    return [(name, [each.get(name, "–") for each in told]) for name in names]


def facts(run: Run) -> dict[str, str]:
    """What was trained on what, for how long, with what."""
    c = run.config
    tuned = f"LoRA of rank {c.policy.lora_rank}" if c.policy.tuning == "lora" else "all weights"
    weights = ", ".join(f"{name} × {entry.weight:g}" for name, entry in c.rewards.items())
    told = {
        "Model": f"{c.policy.path}, {tuned}",
        "Pictures": f"{c.policy.width} × {c.policy.height} pixels, {c.sampling.num_steps} steps",
        "Algorithm": c.algorithm.name,
        "Recipe": c.recipe or "–",
        "Trained on": weights,
        "Judged only": ", ".join(c.evaluation.rewards) or "–",
        "Prompts": f"{c.prompts.train}, {c.trainer.prompts_per_iteration} an iteration",
        "Held-out prompts": c.evaluation.prompts,
        "Iterations": f"{run.iteration} of {c.trainer.iterations}",
        "Time": span(run.seconds),
        "Seed": str(c.trainer.seed),
    }
    if run.starts:
        first, last = run.starts[0], run.starts[-1]
        resumed = (
            f", resumed {len(run.starts) - 1} times" if len(run.starts) > 2 else ", resumed once" if len(run.starts) > 1 else ""
        )
        told |= {
            "Started": first["time"].replace("T", " ").replace("+00:00", " UTC") + resumed,
            "Software": f"g2rpo {last['g2rpo']}, torch {last['torch']}, Python {last['python']}",
            "Device": last["device"],
        }
        if last["commit"]:
            told["Commit"] = last["commit"]
    return told


def results(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The headline table: base against tuned for every reward, and for every run that has both."""
    told = [(style, run, change) for style, run in enumerate(runs) for change in run.changes()]
    reach: dict[str, float] = {}
    for _, _, c in told:
        ends = abs(c.tuned - c.base) + (Z * c.error if math.isfinite(c.error) else 0)
        if math.isfinite(ends):
            reach[c.reward] = max(reach.get(c.reward, 0.0), ends)
    order = list(dict.fromkeys(c.reward for _, _, c in sorted(told, key=lambda one: not one[2].trained)))
    rows = []
    for style, run, c in sorted(told, key=lambda one: (order.index(one[2].reward), one[0])):
        change, digits = c.tuned - c.base, decimals(c.error)
        known = math.isfinite(change)
        rows.append(
            {
                "reward": c.reward,
                "use": "trained on" if c.trained else "judged only",
                "run": run.name,
                "style": style,
                "iteration": c.iteration,
                "base": fixed(c.base, digits),
                "tuned": fixed(c.tuned, digits),
                "change": signed(change, digits),
                "interval": f"± {Z * c.error:.{digits}f}" if math.isfinite(c.error) else "",
                "plot": interval_plot(change, c.error, reach[c.reward], style) if known else "",
                "verdict": verdict(c),
            }
        )
    return rows


def verdict(change: Change) -> str:
    """What the interval allows to say."""
    difference = change.tuned - change.base
    if not math.isfinite(difference) or not math.isfinite(change.error):
        return "unknown"
    if abs(difference) <= Z * change.error:
        return "no clear change"
    return "higher" if difference > 0 else "lower"


def alarms(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Every alarm of every run: when, what was seen, and what helps."""
    return [
        {
            "name": one.name,
            "style": style,
            "run": run.name,
            "when": str(one.first) if one.first == one.last else f"{one.first} to {one.last}",
            "said": one.said,
            "advice": ADVICE[one.name],
        }
        for style, run in enumerate(runs)
        for one in run.alarms()
    ]


def _marks(runs: Sequence[Run], *names: str) -> list[tuple[float, str]]:
    """Where alarms of these names were raised."""
    return [
        (one.first, f"{_label(runs, run, 'alarm')}: {one.name}, {one.said}")
        for run in runs
        for one in run.alarms()
        if one.name in names
    ]


def look_charts(runs: Sequence[Run]) -> list[Chart]:
    """A chart for each statistic of the held-out pictures, with the base's range (5 to 95 % of its pictures) behind it."""
    charts = []
    for name, note in LOOKS.items():
        lines = []
        for style, run in enumerate(runs):
            lines += [
                Line(_label(runs, run, f"base's {end}"), *run.series(f"image/{name}/{end}", "eval"), style, look="faint")
                for end in ("low", "high")
            ]
            lines.append(Line(_label(runs, run, "mean"), *run.series(f"image/{name}", "eval"), style, look="marked"))
        charts += _chart(name.capitalize(), note, lines, "iteration", marks=_marks(runs, "pictures"))
    return charts


def reward_charts(runs: Sequence[Run]) -> list[Chart]:
    """A chart per reward: held-out evaluations with the interval of their change, and training batches behind them."""
    charts = []
    trained = {name for run in runs for name in run.config.rewards}
    for name in sorted(_union(run.rewards() for run in runs), key=lambda name: name not in trained):
        lines = []
        for style, run in enumerate(runs):
            x, y = thin(*run.series(f"reward/{name}"))
            lines.append(Line(_label(runs, run, "training batches"), x, y, style, look="faint"))
            x, y = run.series(f"reward/{name}", "eval")
            errors = dict(zip(*run.series(f"stderr/{name}", "eval"), strict=True))
            error = [Z * (errors.get(i) or 0.0) for i in x]
            lines.append(Line(_label(runs, run, "held-out"), x, y, style, error, "marked"))
        tag = "trained on" if name in trained else "judged only"
        charts += _chart(name, "", lines, "iteration", tag=tag, marks=_marks(runs, "hacking", "decline"))
    return charts


def step_charts(runs: Sequence[Run]) -> list[Chart]:
    """What `diagnostics.diagnose` logged by branch step: means of the first and last fifth, and agreement over time."""
    logged = _split(runs, "step")
    charts = []
    for what in dict.fromkeys(what for _, what in logged):
        ticks = sorted(int(step) for step, each in logged if each == what)
        lines = []
        for style, run in enumerate(runs):
            early, late = ([_mean(row.get(f"step/{k}/{what}") for row in rows) for k in ticks] for rows in fifths(run))
            lines.append(Line(_label(runs, run, "first fifth"), ticks, early, style, look="pale"))
            lines.append(Line(_label(runs, run, "last fifth"), ticks, late, style, look="marked"))
        charts += _chart(*_step_words(what), lines, "branch step", ticks=ticks)
    steps = [f"step/{step}/agreement" for step, what in logged if what == "agreement"]
    over_time = []
    for style, run in enumerate(runs):
        means = [_mean(row.get(key) for key in steps) for row in run.iterations]
        over_time.append(Line(_label(runs, run), *thin([row["iteration"] for row in run.iterations], means), style))
    return charts + _chart("Agreement over time", "the same, mean over branch steps", over_time, "iteration")


def granularity_table(runs: Sequence[Run]) -> dict[str, Any]:
    """The same by granularity: heads, and rows of (style, run, granularity, "first fifth → last fifth" by head)."""
    logged = _split(runs, "granularity")
    kinds = list(dict.fromkeys(what for _, what in logged))
    rows = []
    for style, run in enumerate(runs):
        for granularity in sorted({int(m) for m, _ in _split([run], "granularity")}):
            cells = []
            for what in kinds:
                early, late = (_mean(row.get(f"granularity/{granularity}/{what}") for row in rows) for rows in fifths(run))
                cells.append("–" if early is None and late is None else f"{figures(early)} → {figures(late)}")
            rows.append((style, run.name, granularity, cells))
    heads = ["agreement with the finest" if what == "agreement" else what.replace("/", " of ") for what in kinds]
    return {"heads": heads, "rows": rows}


def fifths(run: Run) -> tuple[list[Row], list[Row]]:
    """The first and the last fifth of a run's iterations, at least one each."""
    count = max(1, len(run.iterations) // 5)
    return run.iterations[:count], run.iterations[-count:]


def _split(runs: Sequence[Run], axis: str) -> list[tuple[str, str]]:
    """(index, what) of every logged `axis/INDEX/WHAT`."""
    keys = _union((key for row in run.iterations for key in row if key.startswith(f"{axis}/")) for run in runs)
    return [(key.split("/", 2)[1], key.split("/", 2)[2]) for key in keys]


def _step_words(what: str) -> tuple[str, str]:
    kind, _, name = what.partition("/")
    return {
        "spread": (f"Spread of {name}", "standard deviation within a group"),
        "advantage": ("Advantage size", "mean |advantage|"),
        "agreement": ("Agreement of tails", "rank correlation of a group's rewards between granularities; 1: the same order"),
    }.get(kind, (what, ""))


def health(runs: Sequence[Run]) -> tuple[list[Chart], list[str]]:
    """A chart for every number of the update that varies, and words for those that never did."""
    charts, constants = [], []
    for key, title, note in HEALTH:
        lines = [Line(_label(runs, run), *thin(*run.series(key)), style) for style, run in enumerate(runs)]
        seen = list(dict.fromkeys(y for run in runs for y in run.series(key)[1]))
        if len(seen) == 1:
            constants.append(f"{title} {compact(seen[0])}")
        elif seen:
            charts += _chart(title, note, lines, "iteration", marks=_marks(runs, ALARMED.get(key, "")))
    return charts, constants


def costs(run: Run) -> dict[str, str]:
    """Totals and rates of what the log holds."""
    iterations = run.iterations
    if not iterations:
        return {}
    total = {key: sum(row[key] for row in iterations) for key in ("evaluations", "images", "seconds", "seconds/rollout")}
    return {
        "Network evaluations": f"{total['evaluations']:,}",
        "… a second of rollout": compact(total["evaluations"] / total["seconds/rollout"], 3),
        "Pictures scored": f"{total['images']:,}",
        "… a second": compact(total["images"] / total["seconds"], 3),
        "Training": span(total["seconds"]),
        "… an iteration": span(total["seconds"] / len(iterations)),
        "Evaluation": span(sum(row["seconds"] for row in run.evaluations)),
    }


def phases(run: Run) -> dict[str, Any]:
    """Where the time went: rows of (phase, time, share), and a bar."""
    spent: dict[str, float] = {}
    for row in run.iterations:
        for key in row:
            if key.startswith("seconds/"):
                spent[key.removeprefix("seconds/")] = spent.get(key.removeprefix("seconds/"), 0.0) + row[key]
    if run.evaluations:
        spent["evaluation"] = sum(row["seconds"] for row in run.evaluations)
    whole = sum(spent.values())
    rows = [(name, span(value), f"{100 * value / whole:.1f} %") for name, value in spent.items()]
    return {
        "rows": rows,
        "bar": stacked_bar(list(spent.items()), "; ".join(f"{name} {share}" for name, _, share in rows)) if rows else "",
    }


def cost_charts(runs: Sequence[Run]) -> list[Chart]:
    """Speed as the run went on."""
    rates, lengths = [], []
    for style, run in enumerate(runs):
        x = [row["iteration"] for row in run.iterations]
        speed = [row["evaluations"] / row["seconds/rollout"] for row in run.iterations]
        rates.append(Line(_label(runs, run), *thin(x, speed), style))
        lengths.append(Line(_label(runs, run), *thin(x, [row["seconds"] for row in run.iterations]), style))
    return [
        *_chart("Evaluations a second", "network evaluations of the rollout by its time", rates, "iteration"),
        *_chart("Seconds an iteration", "all phases, without held-out evaluations", lengths, "iteration"),
    ]


def between(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Config keys in which the runs differ, with the value of each."""
    first = runs[0].config
    apart = [differences(first, run.config) for run in runs]
    keys = _union(apart)
    own = {key: next(pair[0] for each in apart for k, pair in each.items() if k == key) for key in keys}
    return [(key, [_word(each[key][1] if key in each else own[key]) for each in apart]) for key in keys]


def from_recipe(run: Run) -> list[tuple[str, str, str]] | None:
    """(key, recipe's value, run's value) where they differ; None if the run comes from no recipe that is known here."""
    if run.config.recipe not in recipes.names():
        return None
    recipe = resolve(recipes.settings(run.config.recipe), source=f"recipe {run.config.recipe}")
    return [(key, _word(theirs), _word(own)) for key, (theirs, own) in differences(recipe, run.config).items()]


def pictures(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """By run: prompts with the base's picture and those after later iterations, from the same noise, as data URIs.

    `trouble` says why a run's pictures cannot be shown, if that is so.
    """
    found = [_read_frames(run) for run in runs]
    shown: list[dict[str, Any]] = []
    for size in (256, 192, 128, 96):
        shown = [{"iterations": list(grids), "cards": _cards(list(grids.values()), size), "trouble": t} for grids, t in found]
        if sum(len(uri) for run in shown for card in run["cards"] for uri in card["uris"]) <= PICTURE_BYTES:
            break
    return shown


def _read_frames(run: Run) -> tuple[dict[int, Grid], str]:
    """The pictures of the first and last evaluation and of evenly spaced ones between, by iteration; or why there are none."""
    paths = {row["iteration"]: run.directory / "samples" / f"iteration_{row['iteration']:06d}.png" for row in run.evaluations}
    every = [(iteration, path) for iteration, path in paths.items() if path.is_file()]
    count = min(FRAMES, len(every))
    chosen = [every[round(i * (len(every) - 1) / max(1, count - 1))] for i in range(count)]
    try:
        return {iteration: read_grid(path) for iteration, path in chosen}, ""
    except (OSError, ValueError) as error:  # damaged, or of an older version; the page says so
        return {}, str(error)


def _cards(grids: Sequence[Grid], size: int) -> list[dict[str, Any]]:
    prompts = grids[0].prompts[:PICTURES] if grids else []
    return [{"prompt": prompt, "uris": [data_uri(grid.rows[0][i], size) for grid in grids]} for i, prompt in enumerate(prompts)]


def data_uri(picture: Image.Image, size: int) -> str:
    """The picture within a page, reduced to at most `size` pixels a side."""
    reduced = picture.convert("RGB")
    reduced.thumbnail((size, size), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    reduced.save(out, "WEBP", quality=88, method=4)
    return "data:image/webp;base64," + base64.b64encode(out.getvalue()).decode()


def _chart(
    title: str,
    note: str,
    lines: Sequence[Line],
    x_label: str,
    *,
    ticks: Sequence[float] = (),
    tag: str = "",
    marks: Sequence[tuple[float, str]] = (),
) -> list[Chart]:
    """The chart, or nothing where no line has a point."""
    known = [line for line in lines if any(y is not None for y in line.y)]
    if not known:
        return []
    alt = f"{title}{f', {tag}' if tag else ''}. " + " ".join(_ends(line, x_label) for line in known)
    alt += "".join(f" Alarm at {x_label} {compact(x)}." for x, _ in marks)
    return [Chart(title, note, line_chart(known, x_label=x_label, alt=alt, x_ticks=ticks, marks=marks), tag)]


def _ends(line: Line, x_label: str) -> str:
    points = [(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None]
    (x0, y0), (x1, y1) = points[0], points[-1]
    return f"{line.label or 'From'}: {compact(y0)} at {x_label} {compact(x0)}, {compact(y1)} at {compact(x1)}."


def _label(runs: Sequence[Run], run: Run, what: str = "") -> str:
    return " ".join(part for part in (run.name + (":" if what else "") if len(runs) > 1 else "", what) if part)


def _union(many: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(item for each in many for item in each))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _word(value: Any) -> str:
    return "–" if value is None else str(value)


def decimals(error: float) -> int:
    """How many decimals a number with this standard error deserves: two figures of the error."""
    return 3 if not math.isfinite(error) or error <= 0 else min(6, max(0, 1 - math.floor(math.log10(error))))


def fixed(value: float, digits: int) -> str:
    """A number with so many decimals; a dash for NaN."""
    return f"{value:,.{digits}f}".replace("-", "−") if math.isfinite(value) else "–"


def signed(value: float, digits: int) -> str:
    """The same with its sign."""
    return f"{value:+,.{digits}f}".replace("-", "−") if math.isfinite(value) else "–"


def figures(value: float | None) -> str:
    """Three significant figures, zeros at the end included; a dash for none."""
    return "–" if value is None else f"{value:#.3g}".rstrip(".").replace("-", "−")


def span(seconds: float) -> str:
    """A time for people: 0.8 s, 42 s, 5 min 1 s, 3 h 20 min."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
