"""Grids of pictures for people."""

import math

import pytest
import torch
from PIL import Image

from g2rpo.monitor.pictures import RIGHT_COLOUR, WRONG_COLOUR, PictureRow, _canvas, save_grid

NAN = math.nan


@pytest.mark.parametrize(("width", "cell"), [(4, 128), (200, 200), (512, 256)])
def test_every_picture_is_in_its_place(width, cell):
    """Flat pictures stay flat when resized, so a place must have their colour exactly, with no edge
    of a neighbour."""
    values = torch.tensor([0.0, 0.2, 0.4, 0.6, 0.8, 1.0]).reshape(2, 3, 1, 1, 1)
    rows = list(values.expand(2, 3, 3, width // 2, width))
    scores = {"one": torch.tensor([0.5, NAN, -1.0])}
    strips = [
        PictureRow(rows[0], "base", scores, torch.tensor([1.0, 0.0, NAN])),
        PictureRow(rows[1], "tuned"),
    ]
    canvas, corners, size = _canvas(strips, ["é", "b" * 300, "c"], "what stands under them")
    assert size == (cell, cell // 2)
    for places, row in zip(corners, values.flatten(1), strict=True):
        for (x, y), value in zip(places, row, strict=True):
            place = canvas.crop((x, y, x + cell, y + cell // 2))
            assert place.getextrema() == ((round(float(value) * 255),) * 2,) * 3


def test_right_and_wrong_are_marked_below_their_pictures():
    """Ticks and crosses have their colours where they belong, and nowhere else."""
    white, scores = torch.ones(3, 3, 64, 64), torch.tensor([1.0, 0.0, NAN])
    canvas, corners, (width, height) = _canvas(
        [PictureRow(white, "", {"score": scores}, scores)], ["a", "b", "c"], ""
    )
    for (x, y), colour in zip(corners[0], (RIGHT_COLOUR, WRONG_COLOUR, None), strict=True):
        below = canvas.crop((x, y + height, x + width, canvas.height))
        colours = {colour for _, colour in below.getcolors(10**6)}
        assert {RIGHT_COLOUR, WRONG_COLOUR} & colours == ({colour} if colour else set())


def test_a_note_makes_a_grid_higher_and_is_never_cut(tmp_path):
    def size(note):
        save_grid(tmp_path / "grid.png", [PictureRow(torch.ones(2, 3, 64, 64))], ["a", "b"], note)
        with Image.open(tmp_path / "grid.png") as canvas:
            return canvas.size

    (width, bare), (wide, noted), (_, long) = (
        size(""),
        size("a note"),
        size("a note of many words " * 20),
    )
    assert width == wide and bare < noted < long
