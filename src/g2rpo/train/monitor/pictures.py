"""Pictures and clips for display: reduced copies, animated files, and grids of samples, before and
after, with their scores."""

from __future__ import annotations

import io
import math
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps, ImageSequence
from torch import Tensor

from g2rpo.core.files import refuse_other, whole_file, write_whole
from g2rpo.core.images import read_inputs, to_pil, to_tensor, to_uint8
from g2rpo.core.types import Policy
from g2rpo.rollout.scoring import decode

CLIP_FRAMES, CLIP_SIDE = 24, 256
"""The largest number of frames, and of pixels a side, of a reduced clip."""
FPS = 16
"""Frames a second of clips whose policy has no `seconds`."""


def reduced(images: Tensor) -> Tensor:
    """Pictures [B, 3, H, W] in 8 bit; of clips [B, T, 3, H, W] evenly spaced frames, reduced, [B,
    t, 3, h, w]."""
    if images.ndim == 4:
        return to_uint8(images)
    few = images[:, :: math.ceil(images.shape[1] / CLIP_FRAMES)]
    share = CLIP_SIDE / max(few.shape[-2:])
    if share < 1:
        size = [max(1, round(side * share)) for side in few.shape[-2:]]
        frames = torch.nn.functional.interpolate(few.flatten(0, 1), size, mode="area")
        few = frames.unflatten(0, few.shape[:2])
    return to_uint8(few)


def decode_reduced(policy: Policy, latents: Tensor, size: int) -> Tensor:
    """The `reduced` pictures of latents, decoded `size` at a time: clips are large."""
    parts = [reduced(decode(policy, part, size)) for part in latents.split(size)]
    return torch.cat(parts)


def stills(images: Tensor) -> Tensor:
    """Pictures [B, 3, H, W]; of clips [B, T, 3, H, W] their middle frames."""
    return images if images.ndim == 4 else images[:, images.shape[1] // 2]


def seconds_of(policy: Policy, frames: int) -> float:
    """How long a clip of `policy` is, of which `frames` are shown."""
    return getattr(policy, "seconds", None) or frames / FPS


def webp(frames: Sequence[Image.Image], duration: int | list[int], quality: int = 80) -> bytes:
    """An animated WebP that repeats; browsers and Pillow open it. `duration` is the milliseconds of
    all frames, or of each."""
    out, more = io.BytesIO(), {"append_images": frames[1:], "duration": duration}
    frames[0].save(out, "WEBP", save_all=True, loop=0, quality=quality, **more)
    return out.getvalue()


def save_clip(path: Path, clip: Tensor, seconds: float) -> None:
    """Writes a clip [T, 3, H, W] as an animated WebP that lasts so many seconds."""
    path.write_bytes(webp(to_pil(clip), round(1000 * seconds / len(clip)), quality=90))


@contextmanager
def kept_picture(path: Path, kind: str) -> Iterator[Image.Image]:
    """An opened picture of a run, of this kind; ValueError, OSError or UserError for anything
    else."""
    try:
        with Image.open(refuse_other(path), formats=[kind]) as picture:
            yield picture
    except (SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} {error}") from None


def read_png(path: Path) -> Image.Image:
    """A picture of a run, in RGB; as `kept_picture` for none."""
    with kept_picture(path, "PNG") as picture:
        return picture.convert("RGB")


def read_webp(path: Path) -> tuple[list[Image.Image], list[int]]:
    """The frames of a WebP, and the milliseconds of each; as `kept_picture` for another file.

    WebP keeps equal frames in a row as one that lasts longer; a clip that stands still is one
    frame.
    """
    with kept_picture(path, "WEBP") as moving:
        frames, durations = list[Image.Image](), list[int]()
        for frame in ImageSequence.Iterator(moving):
            frames.append(frame.convert("RGB"))
            durations.append(int(frame.info.get("duration", 0)))
    return frames, durations


def read_clip(path: Path) -> tuple[Tensor, float]:
    """`CLIP_FRAMES` frames [T, 3, H, W], 8 bit, evenly spaced in time, of what `save_clip` wrote,
    and its seconds."""
    pictures, durations = read_webp(path)
    ends = torch.tensor(durations).cumsum(0)
    times = (torch.arange(CLIP_FRAMES) + 0.5) / CLIP_FRAMES * ends[-1]
    places = torch.searchsorted(ends, times, right=True).clamp(max=len(pictures) - 1)
    return to_tensor([pictures[place] for place in places.tolist()]), float(ends[-1]) / 1000


def clip_of(picture: Path) -> Path:
    """The clip beside its middle frame."""
    return picture.with_suffix(".webp")


TEXT_COLOUR, SOFT_COLOUR, PAGE_COLOUR = (40, 40, 46), (93, 96, 105), (255, 255, 255)
RIGHT_COLOUR, WRONG_COLOUR = (0, 97, 158), (182, 70, 0)
LINE_PIXELS = 15  # pixels from one line of text to the next
HEAD_PIXELS = 46  # pixels above the first row, for the prompts
WIDE_FONTS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei",
    "Droid Sans Fallback", "PingFang SC", "Hiragino Sans GB", "Apple SD Gothic Neo", "Arial Unicode MS",
    "Microsoft YaHei", "Yu Gothic", "Malgun Gothic",
)  # fmt: skip
"""Families with Chinese, Japanese or Korean letters, of Linux, macOS and Windows."""
CELL_PIXELS = 128  # pixels of a small picture in a grid; larger ones keep up to twice as many


def pil_of(image: Tensor) -> Image.Image:
    """A PIL picture of [3, H, W], 8 bit or in [0, 1]."""
    return to_pil(image[None])[0]


@dataclass(frozen=True)
class PictureRow:
    """A row of a grid: pictures [N, 3, H, W] or clips [N, T, 3, H, W], their scores [N] by reward
    and, if a reward defines it, whether they are right [N] (1, 0, or NaN for unknown)."""

    images: Tensor
    label: str = ""
    scores: Mapping[str, Tensor] = field(default_factory=dict)
    right: Tensor | None = None


def figure(value: float) -> str:
    """A score for display: three decimals, fewer if it is large."""
    if math.isnan(value):
        return "no score"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.4g}"


def save_grid(
    path: Path,
    rows: Sequence[PictureRow],
    prompts: Sequence[str],
    note: str = "",
    seconds: float = 1.0,
) -> None:
    """Writes rows of pictures (of clips their middle frames) as a PNG, one column per prompt: the
    prompt, its input picture if it has one, and each picture with its verdict and scores below;
    below all the `note`. Beside it, a grid of clips is also an animated WebP that lasts so many
    `seconds`."""
    canvas, corners, size = _canvas(rows, prompts, note)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as unfinished:
        # files are a seventh larger than by default, written in half the time
        canvas.save(unfinished, compress_level=1)
    if rows[0].images.ndim == 4:
        return
    frames = []
    for number in range(rows[0].images.shape[1]):
        frames.append(canvas.copy())
        for row, places in zip(rows, corners, strict=True):
            for clip, corner in zip(row.images, places, strict=True):
                frames[-1].paste(_small(clip[number], size), corner)
    write_whole(clip_of(path), webp(frames, round(1000 * seconds / len(frames))))


def _canvas(
    rows: Sequence[PictureRow], prompts: Sequence[str], note: str
) -> tuple[Image.Image, list[list[tuple[int, int]]], tuple[int, int]]:
    """A grid, the corners of its pictures by row, and their size."""
    width, height = _cell_size(rows[0].images)
    inputs = [beside(prompt, width, height) for prompt in prompts]
    labelled = any(inputs) or any(row.label for row in rows)
    left, gap = (64 if labelled else 8), 8
    top = HEAD_PIXELS + (height + gap if any(inputs) else 0)
    under = LINE_PIXELS * max(len(row.scores) + (row.right is not None) for row in rows)
    right, step = left + len(prompts) * (width + gap), height + under + gap
    bottom = top + len(rows) * step
    words = [
        line
        for part in note.split("\n")
        for line in textwrap.wrap(part, max(20, (right - 16) // 6))
    ]
    columns = [left + c * (width + gap) for c in range(len(prompts))]
    corners = [[(x, top + r * step) for x in columns] for r in range(len(rows))]

    canvas = Image.new("RGB", (right, bottom + LINE_PIXELS * len(words)), PAGE_COLOUR)
    draw = ImageDraw.Draw(canvas)
    draw.font = ImageFont.load_default(size=12)
    for prompt, x in zip(prompts, columns, strict=True):
        text, font = _three_lines(prompt, width // _advance(prompt)), _font(prompt)
        draw.multiline_text((x, 3), text, fill=TEXT_COLOUR, font=font, spacing=1)
    if any(inputs):
        _label(draw, "input", HEAD_PIXELS, height)
    for picture, x in zip(inputs, columns, strict=True):
        if picture is not None:
            canvas.paste(picture, (x, HEAD_PIXELS))
    for row, places in zip(rows, corners, strict=True):
        _label(draw, row.label, places[0][1], height)
        for index, (x, y) in enumerate(places):
            canvas.paste(_small(stills(row.images)[index], (width, height)), (x, y))
            _draw_scores(draw, row, index, x, y + height + 1)
    for number, line in enumerate(words):
        plain = line.replace("\N{NO-BREAK SPACE}", " ")  # PIL's own font has none
        draw.text((8, bottom + LINE_PIXELS * number - 2), plain, fill=TEXT_COLOUR)
    return canvas, corners, (width, height)


def _three_lines(prompt: str, width: int) -> str:
    """The first three lines of a prompt wrapped at so many characters."""
    lines = textwrap.wrap(prompt, width)
    return "\n".join([*lines[:2], lines[2] + " ..."] if len(lines) > 3 else lines)


def _advance(text: str) -> int:
    """Pixels from one letter of `_font` to the next, about; Chinese, Japanese and Korean ones are
    square."""
    if text.isascii():
        return 6
    return 12 if any(unicodedata.east_asian_width(letter) in "WF" for letter in text) else 7


@cache
def _font(text: str) -> Any:
    """PIL's own font for ASCII, which is all that it has; else matplotlib's, or the first of the
    system's that has more of the letters."""
    if text.isascii():
        return ImageFont.load_default(size=12)
    from matplotlib.font_manager import findfont, fontManager
    from matplotlib.ft2font import FT2Font

    known = {font.name for font in fontManager.ttflist}
    files = [findfont(name) for name in ("DejaVu Sans", *WIDE_FONTS) if name in known]
    letters = [ord(letter) for letter in text if not letter.isspace()]
    most = max(files, key=lambda file: sum(map(bool, map(FT2Font(file).get_char_index, letters))))
    return ImageFont.truetype(most, 12)


def _label(draw: ImageDraw.ImageDraw, label: str, top: int, height: int) -> None:
    """The label of a row of pictures, left of its middle."""
    draw.text((8, top + height // 2 - 8), label, fill=TEXT_COLOUR)


def _draw_scores(draw: ImageDraw.ImageDraw, row: PictureRow, index: int, x: int, y: int) -> None:
    """The verdict on a picture, as a tick or a cross and as a word, so that no reader depends on
    colour; and its scores, a line each."""
    if row.right is not None:
        if row.right[index].isnan():
            draw.text((x, y), "no verdict", fill=SOFT_COLOUR)
        else:
            colour, word = (RIGHT_COLOUR, "right") if row.right[index] else (WRONG_COLOUR, "wrong")
            tick, cross = [((1, 7), (4, 10), (10, 3))], [((1, 3), (9, 11)), ((1, 11), (9, 3))]
            for stroke in tick if row.right[index] else cross:
                draw.line([(x + across, y + down) for across, down in stroke], fill=colour, width=2)
            draw.text((x + 15, y), word, fill=colour)
        y += LINE_PIXELS
    for name, values in row.scores.items():
        draw.text((x, y), f"{name} {figure(float(values[index]))}", fill=SOFT_COLOUR)
        y += LINE_PIXELS


def _cell_size(images: Tensor) -> tuple[int, int]:
    """Width and height of the pictures in a grid."""
    width = min(max(CELL_PIXELS, images.shape[-1]), 2 * CELL_PIXELS)
    return width, round(width * images.shape[-2] / images.shape[-1])


def _small(image: Tensor, size: tuple[int, int]) -> Image.Image:
    return pil_of(image).resize(size, Image.Resampling.LANCZOS)


def beside(prompt: str, width: int, height: int) -> Image.Image | None:
    """The input pictures of a prompt side by side, at most so large; None where it has none."""
    pictures = read_inputs(prompt)
    if not pictures:
        return None
    fitted = [ImageOps.contain(picture, (width // len(pictures), height)) for picture in pictures]
    *starts, end = accumulate((each.width for each in fitted), initial=0)
    row = Image.new("RGB", (end, max(each.height for each in fitted)), PAGE_COLOUR)
    for each, start in zip(fitted, starts, strict=True):
        row.paste(each, (start, 0))
    return row
