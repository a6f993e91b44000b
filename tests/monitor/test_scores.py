"""Pictures of an evaluation as files, and the table of their scores."""

import json
import math

import pytest
import torch

from g2rpo.core.data import Prompt
from g2rpo.core.errors import UserError
from g2rpo.monitor import scores

NAN = math.nan
SCORES = {"one": torch.tensor([0.1, NAN, -3e30]), "two": torch.tensor([1.0, 2.0, math.inf])}


def same(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(a[name].nan_to_num(7), b[name].nan_to_num(7)) for name in a
    )


def test_a_table_has_exactly_the_scores_that_were_written(tmp_path):
    prompts, right = ["é\n", Prompt("b", ["in.png"]), "c"], torch.tensor([1.0, NAN, 0.0])
    scores.save_rows(tmp_path / "a" / "t.jsonl", scores.score_rows(prompts, SCORES, right, first=4))
    rows = scores.read_rows(tmp_path / "a" / "t.jsonl")
    assert [(row["index"], row["prompt"], row.get("images")) for row in rows] == [
        (4, "é\n", None), (5, "b", ["in.png"]), (6, "c", None),
    ]  # fmt: skip
    expected = {**SCORES, "two": torch.tensor([1.0, 2.0, NAN])}  # JSON has no infinity
    assert same(scores.scores_of(rows), expected) and [row["right"] for row in rows] == [
        True,
        None,
        False,
    ]
    assert scores.right_of(rows).nan_to_num(7).tolist() == [1, 7, 0]
    assert (
        scores.right_of(scores.score_rows(prompts, SCORES)) is None and scores.scores_of([]) == {}
    )
    lines = (tmp_path / "a" / "t.jsonl").read_text().splitlines()
    assert json.loads(lines[1])["scores"] == {"one": None, "two": 2.0}


ROW = '{"index": 0, "prompt": "a", "scores": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "line 1: index: Field required"),
        (ROW.replace("1}", '"b"}'), "line 1: scores.a: Input should be a valid number, got 'b'"),
        (ROW.replace("1}", "true}"), "line 1: scores.a: Input should be a valid number, got True"),
        (ROW.replace("1}", "1e39}"), "line 1: scores.a: Input should be less than"),
        (ROW.replace(": 0", ": -1"), "line 1: index: Input should be greater than"),
        (
            ROW + "\n" + ROW.replace('"a": 1', '"b": 1'),
            "line 2: has other scores than the first row",
        ),
        (ROW + "\n" + ROW[:-1] + ', "right": true}', "line 2: has other scores than the first row"),
        ("{", "line 1: is no JSON"),
        ("", "line 1: is no JSON"),
        (None, "cannot be read"),
    ],
)
def test_a_damaged_table_is_refused(tmp_path, text, said):
    if text is not None:
        (tmp_path / "t.jsonl").write_text(text + "\n")
    with pytest.raises(UserError, match=rf"t\.jsonl(,|:) {said}.*; put the file back"):
        scores.read_rows(tmp_path / "t.jsonl")


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (2, 4, 3, 6, 8)])
def test_pictures_are_kept_without_loss_and_clips_move(tmp_path, shape):
    images = torch.randint(
        256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    if len(shape) == 5:
        images = images[..., :1, :1].expand(shape).contiguous()  # WebP is lossy
    scores.save_pictures(tmp_path / "a", images, [3, 9], seconds=1)
    for index, image in zip((3, 9), images, strict=True):
        path = tmp_path / "a" / f"{index:06d}.png"
        again = scores.read_picture(path)
        if len(shape) == 4:
            assert torch.equal(again, image)
        else:
            assert again.shape[1:] == image.shape[1:] and scores.clip_of(path).is_file()
            scores.clip_of(path).unlink()
            assert torch.equal(scores.read_picture(path), image[2])  # the middle frame


def test_what_is_no_picture_is_refused(tmp_path):
    (tmp_path / "a.png").write_bytes(b"no")
    with pytest.raises((OSError, ValueError)):
        scores.read_picture(tmp_path / "a.png")
