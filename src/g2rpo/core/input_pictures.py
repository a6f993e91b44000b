"""The input pictures of prompts: read within limits, and compared by content."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from PIL import Image, ImageOps

from g2rpo.core.data import Prompt, plain_prompt
from g2rpo.core.errors import UserError
from g2rpo.core.files import FileDigests, digest_of, local

T = TypeVar("T")
FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 2**26
"""Largest number of pixels of one picture: 8192 x 8192."""
INPUT = "an input picture"
"""What rewards of edits want of a prompt, in messages."""


def images_of(prompt: str) -> tuple[str, ...]:
    """Paths of the prompt's input pictures; a string that is no `Prompt` has none."""
    return prompt.images if isinstance(prompt, Prompt) else ()


def read_inputs(prompt: str) -> list[Image.Image]:
    """The prompt's input pictures, RGB and upright as EXIF says; UserError names the prompt and the file."""
    return [read_file(path, _place(prompt)) for path in images_of(prompt)]


def read_file(path: str, place: str) -> Image.Image:
    """A picture, RGB and upright; UserError begins with `place`."""
    return _opened(path, place, _decoded)


def check_inputs(prompts: Iterable[str]) -> None:
    """Refuses prompts whose pictures are absent, no pictures, or too large, by their headers; UserError names both."""
    for prompt in prompts:
        check_files(images_of(prompt), _place(prompt))


def check_counts(prompts: Iterable[str], takes: tuple[int, int]) -> None:
    """Refuses prompts with fewer or more input pictures than a model `takes`, the least and the most; UserError."""
    least, most = takes
    wanted = f"{least}" if least == most else f"{least} to {most}"
    for prompt in prompts:
        if not least <= (count := len(images_of(prompt))) <= most:
            raise UserError(f"{_place(prompt)}: has {count} input pictures, but this model takes {wanted}")


def check_files(paths: Sequence[str], place: str) -> None:
    """The same for pictures at `paths`; messages begin with `place`."""
    for path in paths:
        _opened(path, place, lambda picture: None)


def content_of(prompt: str, digests: FileDigests) -> list[str]:
    """A digest of each of the prompt's input pictures."""
    check_inputs([prompt])
    return [digests.of(local(path)) for path in images_of(prompt)]


def digest_of_prompts(prompts: Iterable[str]) -> str:
    """A digest of prompts with metadata and pictures; pictures count by content, not by path."""
    digests = FileDigests(None)
    plain = [(plain_prompt(prompt), content_of(prompt, digests)) for prompt in prompts]
    return digest_of([{**each, "images": images} if isinstance(each, dict) else each for each, images in plain])


def _place(prompt: str) -> str:
    return f"prompt {str(prompt)[:60]!r}"


def _opened(path: str, place: str, read: Callable[[Image.Image], T]) -> T:
    """`read` of an opened picture, after a check of its size."""
    said = f"{place}: input picture {path}"
    if not local(path).is_file():  # nor a pipe or a device
        raise UserError(f"{said}: there is no such file")
    try:
        with Image.open(Path(local(path)), formats=FORMATS) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise Image.DecompressionBombError(f"{picture.width} x {picture.height}")
            return read(picture)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(f"{said}: has more than {MAX_PIXELS} pixels ({error}); reduce it") from None
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{said}: cannot be read as {', '.join(FORMATS)} ({type(error).__name__}: {error})") from None


def _decoded(picture: Image.Image) -> Image.Image:
    upright = ImageOps.exif_transpose(picture)
    return upright.convert("RGB")
