"""Pairs and marks from the files that people have, and what is refused."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from g2rpo.core import input_pictures
from g2rpo.core.data import Prompt
from g2rpo.core.errors import UserError
from g2rpo.prompts.judged import Judged, held_out, read_judged
from tests.support.runs import picture

COLOURS = {"p.png": (200, 0, 0), "q.png": (0, 200, 0), "r.png": (0, 0, 200)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three pictures, and one cut off; the cache is empty."""
    monkeypatch.setenv("G2RPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name, colour in COLOURS.items():
        picture(name, colour)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (9, 9, 3), np.uint8)).save("cut.png")
    Path("cut.png").write_bytes(Path("cut.png").read_bytes()[:150])
    return tmp_path


def content(name):
    return base64.b64encode(Path(name).read_bytes()).decode()


def written(rows, name="pairs.jsonl"):
    rows = rows if isinstance(rows, list) else [rows]
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def seen(judged):
    """(prompt, colours, marks) of each."""
    return [
        (str(one), [Image.open(path).getpixel((0, 0)) for path in one.pictures], one.good)
        for one in judged
    ]


PAIR = [("a cat", [COLOURS["p.png"], COLOURS["q.png"]], (True, False))]


def parquet(rows, name):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist(rows), name)
    return name


def pick_a_pic(first, labels, value):
    names = ("p.png", "q.png") if first else ("q.png", "p.png")
    row = {"caption": "a cat", **{f"jpg_{i}": value(name) for i, name in enumerate(names)}}
    return {**row, "label_0": labels[0], "label_1": labels[1], "are_different": True}


def with_large_cells(name, between):
    """A table with pictures as base64 of more characters than csv takes in a cell by default."""
    rest = bytes(100_000)  # after a PNG's end nothing is read
    cells = [base64.b64encode(Path(one).read_bytes() + rest).decode() for one in ("p.png", "q.png")]
    Path(name).write_text(
        f"prompt{between}chosen{between}rejected\na cat{between}{between.join(cells)}\n"
    )
    return name


READ = {
    "own": lambda: written({"prompt": "a cat", "chosen": "p.png", "rejected": "q.png"}),
    "json": lambda: written({"Prompt": "a cat", "Chosen": "p.png", "Rejected": "q.png"}, "a.json"),
    "csv": lambda: (
        Path("a.csv").write_text("prompt;chosen;rejected\na cat;p.png;q.png\n") and "a.csv"
    ),
    "pictures in csv": lambda: with_large_cells("a.csv", ","),
    "pictures in tsv": lambda: with_large_cells("a.tsv", "\t"),
    "pick-a-pic": lambda: written(
        [pick_a_pic(True, (1, 0), content), pick_a_pic(True, (0.5, 0.5), content)]
    ),
    "pick-a-pic, parquet": lambda: parquet(
        [pick_a_pic(False, (0.0, 1.0), lambda name: Path(name).read_bytes())], "a.parquet"
    ),
    "datasets": lambda: parquet(
        [
            {"prompt": "a cat"}
            | {
                key: {"bytes": Path(name).read_bytes(), "path": None}
                for key, name in (("chosen", "p.png"), ("rejected", "q.png"))
            }
        ],
        "a.parquet",
    ),
    "hpdv2": lambda: written(
        {"prompt": "a cat", "image_path": ["q.png", "p.png"], "human_preference": [0, 1]}
    ),
    "ranks": lambda: written({"prompt": "a cat", "image_path": ["q.png", "p.png"], "rank": [1, 0]}),
}


@pytest.mark.parametrize("layout", READ)
def test_a_pair_is_read_from_what_people_have(folder, layout):
    found = read_judged(READ[layout](), "pairs")
    assert seen(found) == PAIR
    assert found.ties == (layout == "pick-a-pic")


def test_names_by_windows_and_pictures_as_addresses_of_data(folder):
    Path("a b").mkdir()
    Path("p.png").rename("a b/p.png")
    data = f"data:image/png;base64,{content('q.png')}"
    assert seen(read_judged(written(pair("a b\\p.png", data)), "pairs")) == PAIR


def test_hpdv2s_folder_beside_its_file_and_three_ranks(folder):
    Path("test").mkdir()
    for name in COLOURS:
        Path(name).rename(f"test/{name}")
    row = {"prompt": "a cat", "image_path": list(COLOURS), "rank": [2, 0, 1]}
    found = read_judged(written(row, "test.json"), "pairs")
    best, middle, last = (COLOURS[name] for name in ("q.png", "r.png", "p.png"))
    assert sorted(colours for _, colours, _ in seen(found)) == sorted(
        [[best, middle], [best, last], [middle, last]]
    )


def test_marks_of_a_table_a_folder_and_pairs(folder):
    expected = [("a cat", [COLOURS["p.png"]], (True,)), ("a cat", [COLOURS["q.png"]], (False,))]
    Path("m.csv").write_text("text,file_name,label\na cat,p.png,1\na cat,q.png,bad\n")
    assert seen(read_judged("m.csv", "marks")) == expected
    for mark, name in (("good", "p.png"), ("bad", "q.png")):
        Path(mark).mkdir()
        Path(name).rename(f"{mark}/{name}")
        Path(f"{mark}/{name}").with_suffix(".txt").write_text("a\ncat\n")
    assert seen(read_judged(folder, "marks")) == expected
    texts = [{"prompt": b"a cat", "chosen": "good/p.png", "rejected": "bad/q.png"}]
    assert seen(read_judged(parquet(texts, "bytes.parquet"), "marks")) == expected
    rows = [{"prompt": "a cat", "chosen": "good/p.png", "rejected": "bad/q.png", "seed": 3}] * 2
    found = read_judged(written(rows), "marks")
    assert seen(found) == expected and found[0].metadata == {"seed": 3}


def pair(chosen="p.png", rejected="q.png", **more):
    return {"prompt": "a cat", "chosen": chosen, "rejected": rejected, **more}


REFUSED = [
    ([pair(f"no{i}.png") for i in range(7)], "7 of 8 pictures cannot be used: row 1: picture"),
    ([pair(f"no{i}.png") for i in range(7)], "; and 2 more"),
    (pair("cut.png"), "row 1: picture"),
    (pair("cut.png"), "truncated"),
    ([pair(), pair("pairs.jsonl")], "row 2: picture"),
    (pair(rejected="p.png"), "are the same picture"),
    (pair("/etc/hostname"), "is outside"),
    ([pair(), pair("https://x.org/a.png")], "row 2: chosen: https://x.org/a.png is an address, which is not"),
    ([pair(), pair("iVBOR" * 999)], "row 2: chosen: is no file name"),
    ([pair(), pair("a\0.png")], "row 2: chosen: is no file name"),
    (pair(prompt=" "), "row 1: should be a prompt"),
    (pair(prompt="NaN"), "row 1: should be a prompt, is 'NaN'"),
    ({"chosen": "p.png", "rejected": "q.png"}, "has no column with prompts"),
    ({"prompt": "a cat", "win": "p.png", "lose": "q.png"}, "known are prompt, chosen, rejected;"),
    (pair(chosen=None), "chosen: should be a picture's file name"),
    ({"prompt": "a", "image_path": ["p.png"], "rank": [0, 1]}, "1 picture and 2 preferences"),
    ({"caption": "a", "jpg_0": "p.png", "jpg_1": "q.png", "label_0": 0.5, "label_1": 0.5}, "nothing but ties (1)"),
    ({"prompt": "a", "image": "p.png", "label": "good"}, "has single marks, no pairs"),
    ({"prompt": "a", "image": "p.png", "label": "so-so"}, "should be good or bad"),
    ([], "is empty"),
    ("a cat", "should be an object"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "words"), REFUSED)
def test_what_cannot_be_learnt_from_is_refused(folder, rows, words):
    with pytest.raises(UserError) as refusal:
        read_judged(written(rows), "pairs")
    assert words in str(refusal.value) and "pairs.jsonl" in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none.jsonl", "there is no such file or folder"),
        ("p.png", ".png is not read"),
        (".", "is a folder without votes.jsonl, good/ and bad/"),
    ],
)
def test_sources_of_no_known_kind_are_refused(folder, name, words):
    with pytest.raises(UserError, match=words.replace("/", ".")):
        read_judged(name, "pairs")


def test_held_out_prompts_are_in_no_pair_that_is_learnt_from(folder):
    """Nor in another spelling. All have four pairs, of which one shows a copy of a picture that
    is learnt from."""
    rows = []
    for number in range(10):
        for name in (f"good{number}.png", f"bad{number}.png"):
            picture(name, (number, len(name), 0))
        Path(f"copy{number}.png").write_bytes(Path("q.png").read_bytes())
        prompts, good = (f"prompt {number}", f" PROMPT  {number}"), f"good{number}.png"
        worse = (f"bad{number}.png", f"bad{number}.png", f"bad{number}.png", f"copy{number}.png")
        rows += [pair(good, bad, prompt=prompts[bad < "c"]) for bad in worse]
    judged = read_judged(written(rows), "pairs")
    learnt, apart = held_out(judged, 0.4, seed=1)
    learnt_of, apart_of = ({one.casefold().split()[1] for one in side} for side in (learnt, apart))
    assert len(learnt_of | apart_of) == 10 and not learnt_of & apart_of and len(apart_of) > 1
    assert (len(learnt), len(apart)) == (4 * len(learnt_of), 3 * len(apart_of))
    assert held_out(judged, 0.4, seed=1)[1] == apart != held_out(judged, 0.4, seed=2)[1]


def test_what_is_held_out_stays_so_when_a_file_grows(tmp_path):
    """In any order; and about as asked: of 400 prompts a tenth, within four standard deviations of
    6."""
    files = [[str(tmp_path / f"{n}_{level}.png") for level in (7, 3)] for n in range(400)]
    every = [Judged.of(Prompt(str(n)), own, (True, False)) for n, own in enumerate(files)]
    for one in every:
        for path in one.pictures:
            Path(path).write_text(path)
    learnt, apart = held_out(every, 0.1, seed=1)
    assert abs(len(apart) - 40) < 24 and len(learnt) + len(apart) == 400
    before, after = held_out(every[::-1][:60], 0.1, seed=1)
    assert {*before} <= {*learnt} and {*after} <= {*apart}
    assert [len(side) for side in held_out(every[:2], 0.99, seed=1)] == [1, 1]
    assert [len(side) for side in held_out(every[:2], 0.0001, seed=1)] == [1, 1]


def test_of_a_folder_of_splits_that_of_training_is_read_without_other_pictures(folder):
    """The picture of another column, which `datasets` stores as a mapping, is no metadata."""
    bytes_of = {name: Path(name).read_bytes() for name in COLOURS}
    own = {"prompt": "a cat", "chosen": bytes_of["p.png"], "rejected": bytes_of["q.png"]}
    more = {"mask": {"bytes": bytes_of["r.png"], "path": "r.png"}, "seeds": [1, 2]}
    Path("set/data").mkdir(parents=True)
    parquet([own | more], "set/data/train-00000-of-00001.parquet")
    parquet([own | {"prompt": "a dog"}], "set/data/test-00000-of-00001.parquet")
    found = read_judged("set", "pairs")
    assert seen(found) == PAIR and found[0].metadata == {"seeds": [1, 2]}


@pytest.mark.parametrize("name", ["p.BMP", "p.Gif", "p.tif", "p.avif"])
def test_a_picture_in_a_folder_that_is_of_no_known_kind_is_named(folder, name):
    Path("good").mkdir()
    Image.new("RGB", (4, 4)).save(f"good/{name}", "BMP")
    Path(f"good/{name}").with_suffix(".txt").write_text("a cat")
    Path("p.png").rename("good/q.png")
    Path("good/q.txt").write_text("a cat")
    with pytest.raises(UserError, match=f"{name}: cannot be read as PNG"):
        read_judged(folder, "marks")


def test_nothing_is_held_out_of_one_prompt_or_one_picture(folder):
    for rows in ([pair()], [pair(prompt=f"prompt {number}") for number in range(4)]):
        judged = read_judged(written(rows), "pairs")
        assert held_out(judged, 0.5, seed=1) == (judged, [])


def test_marks_of_a_source_of_pairs_and_single_marks_are_single(folder):
    rows = [pair(), {"prompt": "a cat", "image": "r.png", "label": 1}] * 2
    assert seen(read_judged(written(rows), "marks")) == [
        ("a cat", [COLOURS[name]], (good,))
        for name, good in (("p.png", True), ("q.png", False), ("r.png", True), ("r.png", True))
    ]


def test_a_picture_is_decoded_again_only_where_its_file_changed(folder, monkeypatch):
    source, decoded, own = written(pair()), [], input_pictures._opened

    def opened(path, *rest):
        decoded.append(Path(path).name)
        return own(path, *rest)

    monkeypatch.setattr(input_pictures, "_opened", opened)
    for expected in (["p.png", "q.png"], []):
        decoded.clear()
        read_judged(source, "pairs")
        assert sorted(decoded) == expected
    Path("q.png").write_bytes(Path("cut.png").read_bytes())
    for _ in range(2):
        with pytest.raises(UserError, match=r"1 of 2 pictures cannot be used: .*q\.png"):
            read_judged(source, "pairs")
    Path("q.png").unlink()
    with pytest.raises(UserError, match="there is no such file"):
        read_judged(source, "pairs")
    picture("q.png", COLOURS["r.png"])
    (folder / "cache/pictures").rename(folder / "aside")
    (folder / "cache/pictures").write_text("no folder")
    assert len(read_judged(source, "pairs")) == 1
