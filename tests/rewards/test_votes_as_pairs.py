"""One format for what people prefer: votes are written as pairs, and pairs are read as votes."""

import json

import pytest
import torch
from PIL import Image

from g2rpo.assembly.prompts import build_prompts
from g2rpo.core.data import Prompt
from g2rpo.core.errors import UserError
from g2rpo.core.images import to_tensor
from g2rpo.lab.teach.commands import agree
from g2rpo.prompts.judged import Judged, read_judged, sharing
from g2rpo.rewards import taste, votes
from g2rpo.rewards.taste import Choice, Clicks
from g2rpo.rewards.votes import judged_in
from tests.support.runs import picture

LEVELS = (50, 200, 120, 90)


@pytest.fixture
def session(tmp_path):
    """Four groups, whose second picture, the brightest, is liked; of a fifth one the answer was
    taken back."""
    for round in range(5):
        folder = tmp_path / "votes" / f"{round:06d}"
        folder.mkdir(parents=True)
        files = [folder / f"{place:06d}.png" for place in range(len(LEVELS))]
        for file, level in zip(files, LEVELS, strict=True):
            picture(file, (level + round,) * 3, (12, 8))
        shown = to_tensor([Image.open(file) for file in files])
        digest = votes.digest_of_answer(f"a cat {round}", shown)
        vote = {"round": round, "prompt": f"a cat {round}", "liked": (1,), "digest": digest}
        votes.append(tmp_path / "votes.jsonl", votes.Vote(**vote, iteration=0))
    votes.append(tmp_path / "votes.jsonl", votes.Vote(kind="undo", round=5, iteration=0))
    return tmp_path


def seen(judged):
    return [
        (str(one), [Image.open(path).getpixel((0, 0))[0] for path in one.pictures], one.good)
        for one in judged
    ]


def test_votes_are_pairs_of_a_liked_picture_and_each_other_one(session):
    votes.write_pairs(session)
    written = read_judged(session / "pairs.jsonl", "pairs")
    expected = [
        (f"a cat {round}", [200 + round, LEVELS[other] + round], (True, False))
        for round in range(4)
        for other in (0, 2, 3)
    ]
    assert seen(written) == expected
    for source in (session, session / "votes.jsonl"):
        assert seen(judged_in(str(source), "pairs")) == expected
        assert seen(build_prompts(str(source), "prompts.train", "pairs")) == expected
    assert len(judged_in(str(session), "marks")) == 4 * 4


def test_no_pairs_are_left_of_answers_that_were_all_taken_back(session):
    votes.write_pairs(session)
    for _ in range(4):
        votes.append(session / "votes.jsonl", votes.Vote(kind="undo", round=0, iteration=0))
    votes.write_pairs(session)
    assert not (session / "pairs.jsonl").exists()


def test_pairs_judge_rewards_and_fit_a_head(session):
    votes.write_pairs(session)
    found = agree(session / "pairs.jsonl", {"brightness": {}, "saturation": {}})
    assert found["brightness"].mean == 1 and found["brightness"].count == 4
    assert found["saturation"].mean == 0.5  # all are grey
    head = Clicks(run=str(session / "pairs.jsonl"))
    dark, bright = head(torch.tensor([0.3, 0.7]).view(2, 1, 1, 1).expand(2, 3, 8, 12), ["x", "x"])
    assert bright > dark + 1
    assert len(head.known(8, 12)) == 12  # to which a session adds its own
    assert head.head.agreement.count == 4  # rounds, as of the session itself
    one = session / "one.jsonl"
    one.write_text((session / "pairs.jsonl").read_text().splitlines()[0] + "\n")
    with pytest.raises(UserError, match="fewer than two answers"):
        Clicks(run=str(one))
    with pytest.raises(UserError, match=r"none: there is no such file or folder"):
        agree(session / "none", {"brightness": {}})


def test_a_head_and_agree_read_every_source_of_pairs(session):
    """A folder of parquet files as a file of pairs; and what a head cannot read is named before
    anything is loaded."""
    votes.write_pairs(session)
    rows = [json.loads(line) for line in (session / "pairs.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {side: (session / row[side]).read_bytes() for side in ("chosen", "rejected")}
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = session / "set"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    assert agree(folder, {"brightness": {}})["brightness"].mean == 1
    assert len(Clicks(run=str(folder)).known(8, 12)) == 12
    for source in (session, session / "votes.jsonl", folder, session / "pairs.jsonl"):
        Clicks.check_options({"run": str(source)})
    with pytest.raises(UserError, match=r"^run: .*votes: is a folder without votes.jsonl"):
        Clicks.check_options({"run": str(session / "votes")})


def test_pairs_that_share_pictures_are_left_out_together():
    """0 and 2 by way of 4. Of pairs that all share some, each counts."""
    names = ["ab", "cd", "ef", "gc", "eb"]
    pairs = [Judged.of(Prompt("a cat"), tuple(two), (True, False)) for two in names]
    shared = sharing(pairs)
    assert shared[0] == shared[2] == shared[4] != shared[1] == shared[3]
    choices = [Choice({"x": torch.zeros(2, 1)}, (0,), shown) for shown in shared]
    folds = taste._folds(range(5), taste._shown(choices))
    assert sorted(folds) == [([0, 2, 4], [1, 3]), ([1, 3], [0, 2, 4])]
    assert taste._shown(choices[::2]) == [0, 1, 2]


def test_votes_of_which_none_stands_or_pictures_are_gone_are_refused(session):
    (session / "votes/000001/000001.png").unlink()
    with pytest.raises(UserError, match="round 2 was answered for another prompt or other"):
        judged_in(str(session), "pairs")
    (session / "votes.jsonl").write_text("")
    votes.write_pairs(session)  # nothing to write
    with pytest.raises(UserError, match="names no picture that was liked"):
        judged_in(str(session), "pairs")
