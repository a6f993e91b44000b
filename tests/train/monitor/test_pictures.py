"""Grids of pictures for people."""

import math
from itertools import chain

import pytest
import torch

from g2rpo.train.monitor import pictures
from g2rpo.train.monitor.pictures import RIGHT_COLOUR, WRONG_COLOUR, PictureRow, _canvas

NAN = math.nan


@pytest.mark.parametrize(("width", "cell"), [(4, 128), (512, 256)])
def test_every_picture_is_in_its_place(width, cell):
    """Flat pictures stay flat when resized, so a place must have their colour exactly, with no edge
    of a neighbour."""
    values = torch.arange(6).reshape(2, 3) / 5
    images = values.reshape(2, 3, 1, 1, 1).expand(2, 3, 3, width // 2, width)
    scores = {"one": torch.tensor([0.5, NAN, -1.0])}
    strips = [PictureRow(images[0], "base", scores), PictureRow(images[1], "tuned")]
    canvas, corners, size = _canvas(strips, ["é", "b" * 300, "c"], "what stands under them")
    assert size == (cell, cell // 2)
    for (x, y), value in zip(chain(*corners), values.flatten(), strict=True):
        place = canvas.crop((x, y, x + cell, y + cell // 2))
        assert place.getextrema() == ((round(float(value) * 255),) * 2,) * 3


@pytest.mark.parametrize(("one", "other"), [("é", "ü"), ("ж", "я"), ("\u231a", "\u2312")])
def test_letters_beyond_ascii_are_drawn_where_a_font_has_them(monkeypatch, one, other):
    """And not as a box, which all that a font lacks have in common."""
    monkeypatch.setattr(pictures, "WIDE_FONTS", ("of no system", "STIXGeneral"))
    row = PictureRow(torch.ones(1, 3, 64, 64))
    drawn = [_canvas([row], [prompt], "")[0].tobytes() for prompt in (one, other)]
    assert drawn[0] != drawn[1]


def test_right_and_wrong_are_marked_below_their_pictures():
    scores = torch.tensor([1.0, 0.0, NAN])
    row = PictureRow(torch.ones(3, 3, 64, 64), "", {"score": scores}, scores)
    canvas, corners, (width, height) = _canvas([row], ["a", "b", "c"], "")
    for (x, y), own in zip(corners[0], ({RIGHT_COLOUR}, {WRONG_COLOUR}, set()), strict=True):
        below = canvas.crop((x, y + height, x + width, canvas.height))
        colours = {colour for _, colour in below.getcolors(10**6)}
        assert {RIGHT_COLOUR, WRONG_COLOUR} & colours == own
