"""Draws how one group learns, from a finished run of the recipe words, as the README's animation.

    python -m benchmarks.lesson runs/quickstart        # writes docs/images/lesson.gif

The pictures, scores and advantages are those of the demo's "How it learns"
(`g2rpo.lab.demo.drawing.trace_group`) with the run's seed, on the held-out word with which the demo
opens: the first one that the base draws wrong and the tuned model right.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from benchmarks.drawing import TINT, font
from g2rpo.data.prompts import build_prompts
from g2rpo.lab.demo.command import opening_of
from g2rpo.lab.demo.drawing import GroupTrace, trace_group
from g2rpo.lab.demo.model import open_model
from g2rpo.lab.report.history import RunHistory, read_runs
from g2rpo.train.monitor.pictures import (
    PAGE_COLOUR,
    RIGHT_COLOUR,
    SOFT_COLOUR,
    TEXT_COLOUR,
    WRONG_COLOUR,
    pil_of,
)

SIZE, LARGE, SMALL = (1640, 690), (336, 112), (240, 80)  # of the whole, of the anchor, of a member
ANCHOR, GROUP, COLUMNS, APART = (24, 320), (540, 118), 4, (276, 188)
"""Places of the anchor and of the first member, and the distance from one member to the next."""
RULE = (228, 228, 222)


@dataclass(frozen=True)
class Scene:
    """A frame: its number of five, a sentence, the anchor's picture, the members' pictures, and
    what is known of them."""

    number: int
    words: str
    seconds: float
    anchor: Image.Image
    members: Sequence[Image.Image] = ()
    scores: Sequence[float] = ()
    advantages: Sequence[float] = ()
    below: str = ""


def main() -> None:
    args = arguments()
    run = read_runs([args.run])[0]
    before, after = lessons(run)
    scenes = list(story(before, after, run))
    frames = [drawn(scene).quantize(128, dither=Image.Dither.NONE) for scene in scenes]
    times = [round(1000 * scene.seconds) for scene in scenes]
    frames[0].save(
        args.out, save_all=True, append_images=frames[1:], duration=times, loop=0, optimize=True
    )
    print(
        f"{args.out}: {before.prompt}, {len(frames)} frames, {sum(times) / 1000:.0f} s, {args.out.stat().st_size / 1000:.0f} kB"
    )


def lessons(run: RunHistory) -> tuple[GroupTrace, GroupTrace]:
    """One group of the base model and, from the same noise, of the tuned one."""
    evaluation = run.config.evaluation
    heldout = build_prompts(evaluation.prompts, "evaluation.prompts")[: evaluation.num_prompts]
    model = open_model(run.config, run.files.weights, print, heldout)
    number, _ = opening_of(run)
    before, after = (
        trace_group(model, str(heldout[number]), tuned=tuned) for tuned in (False, True)
    )
    if before.advantages.max() == before.advantages.min():
        raise SystemExit(f"{before.prompt}: all members score alike, so this group teaches nothing")
    return before, after


def story(before: GroupTrace, after: GroupTrace, run: RunHistory) -> Iterator[Scene]:
    """The scenes, in order."""
    asked = f"Asked for: {before.prompt}"
    steps = [pil_of(picture) for picture in anchor_of(before)]
    for step, picture in enumerate(steps):
        last = step == len(steps) - 1
        yield Scene(
            1,
            "One noise is denoised without chance: the anchor.",
            1.2 if last else 0.18,
            picture,
            below=asked,
        )
    enters, noised, finals = (
        steps[before.plan.branch],
        pictures(before.noised),
        pictures(before.finals[0]),
    )
    scores, advantages = before.rewards[0, 0].tolist(), before.advantages.tolist()
    count = len(finals)
    where = f"Noise enters at one step, here step {before.plan.branch}, different for each of {count} members."
    yield Scene(2, where, 2.2, enters, noised, below=asked)
    yield Scene(
        2,
        "Each is finished without further chance: they differ by that noise alone.",
        2.6,
        enters,
        finals,
    )
    yield Scene(
        3,
        "The reward scores each: here OCR reads it, 1 is every letter right.",
        2.4,
        enters,
        finals,
        scores,
    )
    said = "Noise that scores above the group's mean becomes more likely, below it less."
    yield Scene(4, said, 3.4, enters, finals, scores, advantages)
    later = f"After {run.iteration} iterations on other words: the same word, from the same noise."
    shown, scored = pictures(after.finals[0]), after.rewards[0, 0].tolist()
    change = f"{exact(scored)} of {count} right, was {exact(scores)}"
    yield Scene(5, later, 4.4, pil_of(anchor_of(after)[-1]), shown, scored, below=change)


def anchor_of(group: GroupTrace) -> Any:
    if group.predictions is None:
        raise SystemExit("this algorithm has no anchor to show")
    return group.predictions


def pictures(images: Any) -> list[Image.Image]:
    return [pil_of(image) for image in images]


def exact(scores: Sequence[float]) -> int:
    return sum(score == 1 for score in scores)


def drawn(scene: Scene) -> Image.Image:
    """A scene as a picture."""
    canvas = Image.new("RGB", SIZE, PAGE_COLOUR)
    draw = ImageDraw.Draw(canvas)
    for number in range(1, 6):
        here, centre = number == scene.number, (44 + 50 * (number - 1), 46)
        draw.circle(centre, 20, fill=TEXT_COLOUR if here else RULE)
        draw.text(
            centre,
            str(number),
            fill=PAGE_COLOUR if here else SOFT_COLOUR,
            font=font(24, bold=True),
            anchor="mm",
        )
    draw.text((296, 46), scene.words, fill=TEXT_COLOUR, font=font(29, bold=True), anchor="lm")
    (x, y), (width, height) = ANCHOR, LARGE
    for index in range(len(scene.members)):
        left, top = place(index)
        draw.line((x + width, y + height // 2, left, top + SMALL[1] // 2), fill=RULE, width=3)
    canvas.paste(scene.anchor.resize(LARGE, Image.Resampling.BICUBIC), ANCHOR)
    draw.rounded_rectangle(
        (x - 3, y - 3, x + width + 2, y + height + 2), 6, outline=TEXT_COLOUR, width=3
    )
    draw.text((x + width // 2, y - 32), "the anchor", fill=SOFT_COLOUR, font=font(27), anchor="mm")
    draw.text(
        (x + width // 2, y + height + 36), scene.below, fill=TEXT_COLOUR, font=font(27), anchor="mm"
    )
    for index, picture in enumerate(scene.members):
        draw_member(canvas, scene, index, picture)
    return canvas


def place(index: int) -> tuple[int, int]:
    return GROUP[0] + index % COLUMNS * APART[0], GROUP[1] + index // COLUMNS * APART[1]


def draw_member(canvas: Image.Image, scene: Scene, index: int, picture: Image.Image) -> None:
    """A member's picture with, as far as they are known, its score and its advantage as a bar from
    the middle."""
    draw, (x, y), (width, height) = ImageDraw.Draw(canvas), place(index), SMALL
    right = bool(scene.scores) and scene.scores[index] == 1
    below, fill = (78, TINT[right]) if scene.scores else (6, RULE)
    draw.rounded_rectangle((x - 6, y - 6, x + width + 6, y + height + below), 8, fill=fill)
    canvas.paste(picture.resize(SMALL, Image.Resampling.BICUBIC), (x, y))
    middle = x + width // 2
    if scene.scores:
        text = f"{'✓' if right else '✗'} {scene.scores[index]:.2f}"
        draw.text(
            (middle, y + height + 22),
            text,
            fill=RIGHT_COLOUR if right else WRONG_COLOUR,
            font=font(27, bold=True),
            anchor="mm",
        )
    if scene.advantages:
        own, largest = scene.advantages[index], max(abs(each) for each in scene.advantages)
        end = middle + own / largest * (width // 2 - 4)
        draw.rectangle(
            (min(middle, end), y + height + 46, max(middle, end), y + height + 62),
            fill=RIGHT_COLOUR if own > 0 else WRONG_COLOUR,
        )
        draw.line((middle, y + height + 42, middle, y + height + 66), fill=SOFT_COLOUR, width=2)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images/lesson.gif"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
