"""Pictures of an evaluation as files, and the table of their scores."""

import math

import pytest
import torch

from g2rpo.core.data import Prompt
from g2rpo.core.errors import UserError
from g2rpo.train.evaluation import heldout as scores
from tests.support.tables import rows
from tests.support.tolerances import EXACT

NAN = math.nan
SCORES = {"one": torch.tensor([0.1, NAN, -3e30]), "two": torch.tensor([1.0, 2.0, math.inf])}


def test_a_table_has_exactly_the_scores_that_were_written(tmp_path):
    """But for infinity, which JSON does not have."""
    prompts, right = ["é\n", Prompt("b", ["in.png"]), "c"], torch.tensor([1.0, NAN, 0.0])
    path = tmp_path / "a" / "t.jsonl"
    scores.save_rows(path, scores.score_rows(prompts, SCORES, right, first=4))
    rows = scores.read_rows(path)
    read = [(row["index"], row["prompt"], row.get("images"), row["right"]) for row in rows]
    assert read == [(4, "é\n", None, True), (5, "b", ["in.png"], None), (6, "c", None, False)]
    for name, values in scores.scores_of(rows).items():
        expected = SCORES[name].where(SCORES[name] < math.inf, NAN)
        torch.testing.assert_close(values, expected, **EXACT, equal_nan=True)
    torch.testing.assert_close(scores.right_of(rows), right, **EXACT, equal_nan=True)
    assert scores.right_of(scores.score_rows(prompts, SCORES)) is None


DAMAGED = r"""
{} -> line 1: index: Field required
{"index": 0, "prompt": "a", "scores": {"a": "b"}} -> line 1: scores.a: Input should be a valid number, got 'b'
{"index": 0, "prompt": "a", "scores": {"a": 1e39}} -> line 1: scores.a: Input should be less than
{"index": -1, "prompt": "a", "scores": {"a": 1}} -> line 1: index: Input should be greater than
ROW\n{"index": 0, "prompt": "a", "scores": {"b": 1}} -> line 2: has other scores than the first
ROW\n{"index": 0, "prompt": "a", "scores": {"a": 1}, "right": true} -> line 2: has other scores than the first
{ -> line 1: is no JSON
ABSENT -> cannot be read
"""


@pytest.mark.parametrize(("text", "said"), rows(DAMAGED))
def test_a_damaged_table_is_refused(tmp_path, text, said):
    text = text.replace("ROW", '{"index": 0, "prompt": "a", "scores": {"a": 1}}')
    if text != "ABSENT":
        (tmp_path / "t.jsonl").write_text(text + "\n")
    with pytest.raises(UserError, match=rf"t\.jsonl(,|:) {said}.*; put the file back"):
        scores.read_rows(tmp_path / "t.jsonl")


def test_clips_move_and_their_middle_frame_is_kept_without_loss(tmp_path):
    clip = torch.arange(12, dtype=torch.uint8).view(4, 3, 1, 1).expand(4, 3, 6, 8)
    scores.save_pictures(tmp_path, clip[None], [3], seconds=1)
    path = tmp_path / "000003.png"
    assert scores.read_picture(path).shape[1:] == (3, 6, 8)
    scores.clip_of(path).unlink()
    assert torch.equal(scores.read_picture(path), clip[2])
