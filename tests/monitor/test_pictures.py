"""Grids of pictures: what they show can be read from the file, and in the picture."""

import json
import math

import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from g2rpo.monitor.grids import read_grid
from g2rpo.monitor.pictures import NOTE, RIGHT, WRONG, PictureRow, figure, save_grid

NAN = math.nan


@pytest.mark.parametrize(("width", "cell"), [(4, 128), (200, 200), (512, 256)])
def test_a_grid_comes_apart_again(tmp_path, width, cell):
    """Flat pictures stay flat when resized, so the cut pictures must be their colours exactly, with no edge of a neighbour."""
    values = torch.tensor([0.0, 0.2, 0.4, 0.6, 0.8, 1.0]).reshape(2, 3, 1, 1, 1)
    rows = list(values.expand(2, 3, 3, width // 2, width))
    scores = {"one": torch.tensor([0.5, NAN, -1.0]), "two": torch.tensor([70.0, 80.0, 90.0])}
    strips = [PictureRow(rows[0], "base", scores, torch.tensor([1.0, 0.0, NAN])), PictureRow(rows[1], "tuned")]
    save_grid(tmp_path / "grid.png", strips, ["é", "b" * 300, "c"], "what stands under them")
    grid = read_grid(tmp_path / "grid.png")
    assert grid.prompts == ["é", "b" * 300, "c"]
    for row, expected in zip(grid.rows, rows, strict=True):
        for picture, image in zip(row, expected, strict=True):
            value = round(float(image.flatten()[0]) * 255)
            assert picture.size == (cell, cell // 2) and picture.getextrema() == ((value, value),) * 3
    assert grid.scores == [[{"one": 0.5, "two": 70.0}, {"one": None, "two": 80.0}, {"one": -1.0, "two": 90.0}], [{}, {}, {}]]
    assert grid.right == [[True, False, None], [None, None, None]]


def test_right_and_wrong_are_marked_below_their_pictures(tmp_path):
    """Ticks and crosses have their colours where they belong, and nowhere else."""
    white = torch.ones(3, 3, 64, 64)
    path = tmp_path / "grid.png"
    scores = torch.tensor([1.0, 0.0, NAN])
    save_grid(path, [PictureRow(white, "", {"score": scores}, scores)], ["a", "b", "c"])
    with Image.open(path) as canvas:
        layout = json.loads(canvas.info[NOTE])
        ((x, y), *_), (width, height) = layout["boxes"][0], layout["size"]
        for column, colour in enumerate((RIGHT, WRONG, None)):
            left = x + column * (width + 8)
            below = canvas.crop((left, y + height, left + width, canvas.height))
            colours = {colour for _, colour in below.getcolors(10**6)}
            assert {RIGHT, WRONG} & colours == ({colour} if colour else set())
        assert canvas.crop((x, y, x + width, y + height)).getextrema() == ((255, 255),) * 3


def test_a_note_makes_a_grid_higher_and_is_never_cut(tmp_path):
    def size(note):
        save_grid(tmp_path / "grid.png", [PictureRow(torch.ones(2, 3, 64, 64))], ["a", "b"], note)
        with Image.open(tmp_path / "grid.png") as canvas:
            assert json.loads(canvas.info[NOTE])["note"] == note
            return canvas.size

    (width, bare), (wide, noted), (_, long) = size(""), size("a note"), size("a note of many words " * 20)
    assert width == wide and bare < noted < long


def rewritten(path, change):
    """A grid of two scored pictures whose layout is what `change` makes of it."""
    save_grid(path, [PictureRow(torch.rand(2, 3, 8, 8), "", {"a": torch.zeros(2)}, torch.zeros(2))], ["a", "b"])
    with Image.open(path) as canvas:
        info = PngInfo()
        info.add_itxt(NOTE, json.dumps(change(json.loads(canvas.info[NOTE]))))
        canvas.save(path, pnginfo=info)


@pytest.mark.parametrize(
    "change",
    [
        {"scores": [[{}]]},
        {"scores": [[1, 2]]},
        {"scores": [[{"a": "b"}, {}]]},
        {"right": [[True]]},
        {"right": 3},
        {"scores": []},
    ],
)
def test_scores_that_do_not_fit_their_pictures_are_refused(tmp_path, change):
    rewritten(tmp_path / "grid.png", lambda layout: layout | change)
    with pytest.raises(ValueError, match=r"grid\.png"):
        read_grid(tmp_path / "grid.png")


def test_a_picture_that_is_no_grid_is_refused(tmp_path):
    Image.new("RGB", (9, 9)).save(tmp_path / "x.png")
    with pytest.raises(ValueError, match="does not say what it shows"):
        read_grid(tmp_path / "x.png")


def test_a_grid_of_before_there_were_scores_is_read(tmp_path):
    rewritten(tmp_path / "grid.png", lambda layout: {key: layout[key] for key in ("prompts", "size", "boxes")})
    grid = read_grid(tmp_path / "grid.png")
    assert (grid.scores, grid.right) == ([[{}, {}]], [[None, None]])


@pytest.mark.parametrize(("value", "text"), [(0.66666, "0.667"), (-0.1, "-0.100"), (73.6512, "73.65"), (NAN, "no score")])
def test_scores_for_people(value, text):
    assert figure(value) == text
