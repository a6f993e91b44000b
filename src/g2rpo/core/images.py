"""Pictures as tensors and as Pillow's; and the input pictures of prompts, read within limits and
compared by content."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import PIL
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from g2rpo.core.data import Prompt, plain_prompt
from g2rpo.core.errors import UserError, counted, placed, refuse
from g2rpo.core.files import FileDigests, cache_root, digest_of, local, real


def to_uint8(images: Tensor) -> Tensor:
    """The 8-bit pictures [B, 3, H, W] of `images` in [0, 1], rounded as pipelines do when they
    save; NaN becomes black."""
    return (images.float() * 255).round_().clamp_(0, 255).nan_to_num_(0).to(torch.uint8)


def to_pil(images: Tensor) -> list[Image.Image]:
    """Pillow pictures of `images` [B, 3, H, W], 8 bit or in [0, 1]."""
    levels = images if images.dtype == torch.uint8 else to_uint8(images)
    return [Image.fromarray(array) for array in levels.permute(0, 2, 3, 1).cpu().numpy()]


def to_tensor(pictures: Sequence[Image.Image]) -> Tensor:
    """uint8 pictures [B, 3, H, W] of Pillow pictures of one size."""
    return torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures])).permute(
        0, 3, 1, 2
    )


T = TypeVar("T")
PICTURE_FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 2**26
"""Largest number of pixels of one picture: 8192 x 8192."""
DECODED_AT_ONCE = 8
"""Pictures that are decoded at once to check them."""
INPUT_PICTURE = "an input picture"
"""What rewards of edits want of a prompt, in messages."""


def images_of(prompt: str) -> tuple[str, ...]:
    """Paths of the prompt's input pictures; a string that is no `Prompt` has none."""
    return prompt.images if isinstance(prompt, Prompt) else ()


def read_inputs(prompt: str) -> list[Image.Image]:
    """The prompt's input pictures as `as_rgb`; UserError names the prompt and the file."""
    return [_opened(path, _prompt_in_short(prompt), as_rgb) for path in images_of(prompt)]


def cut_picture(path: str, width: int, height: int) -> Tensor:
    """A judged picture, [1, 3, H, W] in [0, 1]: its middle with these proportions, resized by
    Lanczos' filter."""
    whole = _opened(path, "pairs", as_rgb, "picture")
    return to_tensor([ImageOps.fit(whole, (width, height), Image.Resampling.LANCZOS)]).float() / 255


def check_inputs(prompts: Sequence[str]) -> None:
    """Refuses prompts whose text or metadata is no plain data, and whose pictures are absent,
    damaged or too large; UserError names both."""
    for prompt in prompts:
        with placed(
            f"{_prompt_in_short(prompt)}: is no plain data (", TypeError, ValueError, after=")"
        ):
            digest_of(plain_prompt(prompt))
    check_pictures(
        (path, _prompt_in_short(prompt)) for prompt in prompts for path in images_of(prompt)
    )


def check_counts(prompts: Iterable[str], takes: tuple[int, int]) -> None:
    """Refuses prompts with fewer or more input pictures than a model `takes`, the least and the
    most; UserError."""
    least, most = takes
    wanted = f"{least}" if least == most else f"{least} to {most}"
    for prompt in prompts:
        if not least <= (count := len(images_of(prompt))) <= most:
            raise UserError(
                f"{_prompt_in_short(prompt)}: has {counted(count, 'input picture')}, but this model takes {wanted}"
            )


def check_pictures(named: Iterable[tuple[str, str]]) -> None:
    """Refuses input pictures, given as path and place, that are absent, damaged or too large;
    UserError begins with the place."""
    places: dict[str, str] = {}
    for path, place in named:
        places.setdefault(path, place)
    refuse(faults_of_pictures(places, "input picture"))


def faults_of_pictures(named: Mapping[str, str], what: str = "picture") -> list[str]:
    """What is wrong with pictures, given as path and place: absent, damaged, too large. All are
    decoded, for a header does not tell whether a picture is whole; but for those that were and
    whose size, times and inode are unchanged."""
    memo = cache_root() / "pictures" / f"whole-{PIL.__version__}.txt"
    whole: set[str] = set()
    with suppress(OSError):  # only a cache: pictures are decoded again
        whole |= (
            set(memo.read_text(encoding="utf-8", errors="replace").split())
            if memo.is_file()
            else set()
        )
    states = {path: _state_of(path) for path in named}

    def fault(path: str) -> str | None:
        try:
            _opened(path, named[path], lambda picture: picture.load(), what)
        except UserError as error:
            return str(error)
        return None

    unknown = [path for path in named if states[path] not in whole]
    with ThreadPoolExecutor(DECODED_AT_ONCE) as pool:
        faults = list(pool.map(fault, unknown))
    new = [states[path] for path, said in zip(unknown, faults, strict=True) if said is None]
    with suppress(OSError):
        memo.parent.mkdir(parents=True, exist_ok=True)
        with memo.open("a", encoding="utf-8") as file:
            file.writelines(f"{state}\n" for state in new)
    return [said for said in faults if said is not None]


def _state_of(path: str) -> str:
    """What changes when a file is written, and the limits of pictures; "" for no file."""
    try:
        file = real(local(path))
        stat = file.stat()
    except OSError:
        return ""
    state = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    return digest_of([str(file), *state, PICTURE_FORMATS, MAX_PIXELS])[:32]


def content_of(prompt: str, digests: FileDigests) -> list[str]:
    """A digest of each of the prompt's input pictures."""
    for path in images_of(prompt):
        _opened(path, _prompt_in_short(prompt), lambda picture: None)
    return [digests.of(local(path)) for path in images_of(prompt)]


def digest_of_prompts(prompts: Iterable[str]) -> str:
    """A digest of prompts with metadata and pictures; pictures count by content, not by path."""
    digests = FileDigests(None)

    def content(prompt: str) -> Any:
        plain, images = plain_prompt(prompt), content_of(prompt, digests)
        return {**plain, "images": images} if isinstance(plain, dict) else plain

    return digest_of([content(prompt) for prompt in prompts])


def _prompt_in_short(prompt: str) -> str:
    return f"prompt {str(prompt)[:60]!r}"


def _opened(
    path: str, place: str, read: Callable[[Image.Image], T], what: str = "input picture"
) -> T:
    """`read` of an opened picture, after a check of its size."""
    said = f"{place}: {what} {path}"
    if not local(path).is_file():  # nor a pipe or a device
        raise UserError(f"{said}: there is no such file")
    try:
        with Image.open(Path(local(path)), formats=PICTURE_FORMATS) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise Image.DecompressionBombError(f"{picture.width} x {picture.height}")
            return read(picture)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(f"{said}: has more than {MAX_PIXELS} pixels ({error}); reduce it") from None
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(
            f"{said}: cannot be read as {', '.join(PICTURE_FORMATS)} ({type(error).__name__}: {error})"
        ) from None


def as_rgb(picture: Image.Image) -> Image.Image:
    """A picture that was just opened as RGB with 8 bits, upright, on white where it is
    transparent."""
    _scale_transparent_level(picture)
    upright = _upright(picture)
    if upright.mode.startswith("I"):
        upright = _from_16_bits(upright)
    if not upright.has_transparency_data:
        return upright.convert("RGB")
    seen = upright.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")


TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By the orientation in EXIF."""


def _upright(picture: Image.Image) -> Image.Image:
    """A picture turned as its EXIF says. EXIF may be damaged where the picture is whole:
    `ImageOps.exif_transpose` fails then, also where only another entry is."""
    picture.load()
    try:
        turn = TURNS.get(picture.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # Pillow does not document which
        return picture
    return picture if turn is None else picture.transpose(turn)


def _scale_transparent_level(picture: Image.Image) -> None:
    """Pillow scales levels of 2, 4 and 16 bits to 8, but not the one that a PNG declares
    transparent."""
    tiles: list[Any] = getattr(picture, "tile", [])
    level, scale = (
        picture.info.get("transparency"),
        SCALE_TO_8_BIT.get(str(tiles[0][3]) if tiles else ""),
    )
    if level is not None and scale is not None:
        picture.info["transparency"] = (
            tuple(map(scale, level)) if isinstance(level, tuple) else scale(level)
        )


SCALE_TO_8_BIT: dict[str, Callable[[int], int]] = {
    "L;2": lambda level: level * 85,
    "L;4": lambda level: level * 17,
    "RGB;16B": lambda level: level >> 8,
}
"""By Pillow's name for the stored levels: how it makes 8 bits of them."""


def _from_16_bits(grey: Image.Image) -> Image.Image:
    """8 bits of 16-bit grey, which Pillow would cut off at 255; with alpha if a level is
    transparent."""
    levels = np.asarray(grey).astype(np.uint32)
    eight = Image.fromarray(((levels * 255 + 32767) // 65535).astype(np.uint8))
    level = grey.info.get("transparency")
    if level is not None:
        eight.putalpha(Image.fromarray(np.where(levels == level, 0, 255).astype(np.uint8)))
    return eight
