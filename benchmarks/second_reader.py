"""Tesseract as a second reader of written words: `apt-get install tesseract-ocr`. It shares nothing
with RapidOCR."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageOps

SCALE = 3
BORDER = 12  # pixels around the word: Tesseract expects a page
COMMAND = (
    "tesseract",
    "{list}",
    "stdout",
    "--psm",
    "8",
    "-c",
    "tessedit_char_whitelist=abcdefghijklmnopqrstuvwxyz",
)


def available() -> bool:
    return shutil.which("tesseract") is not None


def read_words(pictures: Sequence[Path]) -> list[str]:
    """What Tesseract reads in each picture of one word, without spaces and in lower case; one
    process, one thread."""
    with tempfile.TemporaryDirectory() as folder:
        pages = [Path(folder) / f"{i:06d}.png" for i in range(len(pictures))]
        for source, page in zip(pictures, pages, strict=True):
            enlarged(Image.open(source)).save(page)
        (Path(folder) / "list.txt").write_text("".join(f"{page}\n" for page in pages))
        command = [word.format(list=f"{folder}/list.txt") for word in COMMAND]
        environment = {**os.environ, "OMP_THREAD_LIMIT": "1"}
        text = subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment
        ).stdout
    words = ["".join(page.split()).lower() for page in text.split("\f")[: len(pictures)]]
    if len(words) != len(pictures):
        raise RuntimeError(f"tesseract answered {len(words)} pages for {len(pictures)} pictures")
    return words


def enlarged(picture: Image.Image) -> Image.Image:
    """In greys from black to white, three times as large, with a border of the corner's colour: it
    reads all clean words."""
    grey = picture.convert("L")
    size = grey.width + 2 * BORDER, grey.height + 2 * BORDER
    page = Image.new("L", size, grey.getpixel((0, 0)))
    page.paste(grey, (BORDER, BORDER))
    return ImageOps.autocontrast(
        page.resize((size[0] * SCALE, size[1] * SCALE), Image.Resampling.BICUBIC)
    )
