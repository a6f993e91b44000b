"""Pairs from the files that people have, and what is refused."""

import base64
import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest
from PIL import Image

from g2rpo.core import images
from g2rpo.core.errors import UserError
from g2rpo.data.pairs import read_pairs
from tests.support.runs import picture
from tests.support.tables import rows

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


def written(given, name="pairs.jsonl"):
    given = given if isinstance(given, list) else [given]
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in given))
    return name


def seen(compared):
    """(prompt, colours, how many of the first are liked) of each."""
    return [
        (str(one.prompt), [Image.open(path).getpixel((0, 0)) for path in one.pictures], one.liked)
        for one in compared
    ]


PAIR = [("a cat", [COLOURS["p.png"], COLOURS["q.png"]], 1)]


def parquet(given, name="a.parquet"):
    pq.write_table(pyarrow.Table.from_pylist(given), name)
    return name


def pair(chosen="p.png", rejected="q.png", prompt="a cat", **more):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def described(name, colour=(0, 0, 0), prompt="a cat", **how):
    """A picture in a folder of a side, with its prompt beside it."""
    Path(name).parent.mkdir(exist_ok=True)
    picture(name, colour, **how)
    Path(name).with_suffix(".txt").write_text(prompt)


def pick_a_pic(first, labels, value):
    names = ("p.png", "q.png") if first else ("q.png", "p.png")
    row = {"caption": "a cat", **{f"jpg_{i}": value(name) for i, name in enumerate(names)}}
    return {**row, "label_0": labels[0], "label_1": labels[1], "are_different": True}


def with_large_cells(name, between):
    """A table with pictures as base64 of more characters than csv takes in a cell by default."""
    for one in ("p.png", "q.png"):
        Path(one).write_bytes(Path(one).read_bytes() + bytes(100_000))  # after its end: not read
    cells = pair(content("p.png"), content("q.png"))
    Path(name).write_text(f"{between.join(cells)}\n{between.join(cells.values())}\n")
    return name


READ = {
    "own": lambda: written(pair()),
    "json": lambda: written({key.title(): value for key, value in pair().items()}, "a.json"),
    "csv": lambda: (
        Path("a.csv").write_text("prompt;chosen;rejected\na cat;p.png;q.png\n") and "a.csv"
    ),
    "pictures in csv": lambda: with_large_cells("a.csv", ","),
    "pictures in tsv": lambda: with_large_cells("a.tsv", "\t"),
    "pick-a-pic": lambda: written(
        [pick_a_pic(True, (1, 0), content), pick_a_pic(True, (0.5, 0.5), content)]
    ),
    "pick-a-pic, parquet": lambda: parquet(
        [pick_a_pic(False, (0.0, 1.0), lambda name: Path(name).read_bytes())]
    ),
    "datasets": lambda: parquet(
        [pair(*({"bytes": Path(name).read_bytes(), "path": None} for name in ("p.png", "q.png")))]
    ),
    "hpdv2": lambda: written(
        {"prompt": "a cat", "image_path": ["q.png", "p.png"], "human_preference": [0, 1]}
    ),
    "ranks": lambda: written({"prompt": "a cat", "image_path": ["q.png", "p.png"], "rank": [1, 0]}),
}


@pytest.mark.parametrize("layout", READ)
def test_a_pair_is_read_from_what_people_have(folder, layout):
    assert seen(read_pairs(READ[layout]())) == PAIR


def test_names_by_windows_and_pictures_as_addresses_of_data(folder):
    Path("a b").mkdir()
    Path("p.png").rename("a b/p.png")
    data = f"data:image/png;base64,{content('q.png')}"
    assert seen(read_pairs(written(pair("a b\\p.png", data)))) == PAIR


def test_hpdv2s_folder_beside_its_file_and_three_ranks(folder):
    Path("test").mkdir()
    for name in COLOURS:
        Path(name).rename(f"test/{name}")
    row = {"prompt": "a cat", "image_path": list(COLOURS), "rank": [2, 0, 1]}
    found = read_pairs(written(row, "test.json"))
    from_best = [COLOURS[name] for name in ("q.png", "r.png", "p.png")]
    expected = sorted(map(list, itertools.combinations(from_best, 2)))
    assert sorted(colours for _, colours, _ in seen(found)) == expected


REFUSED = r"""
{"chosen": "cut.png"} -> row 1: picture
{"chosen": "cut.png"} -> truncated
{"chosen": "pairs.jsonl"} -> row 1: picture
{"rejected": "p.png"} -> are the same picture
{"chosen": "/etc/hostname"} -> is outside
{"chosen": "https://x.org/a.png"} -> row 1: chosen: https://x.org/a.png is an address, which is not
{"chosen": "a\u0000.png"} -> row 1: chosen: is no file name
{"prompt": " "} -> row 1: should be a prompt
{"prompt": "NaN"} -> row 1: should be a prompt, is 'NaN'
{"chosen": null} -> chosen: should be a picture's file name
"""
WITHOUT = """
{"chosen": "p.png", "rejected": "q.png"} -> has no column with prompts
{"prompt": "a cat", "win": "p.png", "lose": "q.png"} -> known are prompt, chosen, rejected;
{"prompt": "a", "image_path": ["p.png"], "rank": [0, 1]} -> 1 picture and 2 preferences
{"caption": "a", "jpg_0": "p.png", "jpg_1": "q.png", "label_0": 0.5, "label_1": 0.5} -> nothing but ties (1)
[] -> is empty
["a cat"] -> should be an object
"""
LONG = [
    ([pair(f"no{i}.png") for i in range(7)], "7 of 8 pictures cannot be used: row 1: picture"),
    ([pair(f"no{i}.png") for i in range(7)], "; and 2 more"),
    ([pair(), pair("iVBOR" * 999)], "row 2: chosen: is no file name"),
    ({"prompt": "a", "image_path": [*"pq"], "rank": [10**400, 1]}, "row 1: rank.0: int too large"),
]
CASES = [(pair(**json.loads(more)), words) for more, words in rows(REFUSED)]
CASES += [(json.loads(given), words) for given, words in rows(WITHOUT)]


@pytest.mark.parametrize(("given", "words"), [*CASES, *LONG])
def test_what_cannot_be_learnt_from_is_refused(folder, given, words):
    with pytest.raises(UserError) as refusal:
        read_pairs(written(given))
    assert words in str(refusal.value) and "pairs.jsonl" in str(refusal.value)


SOURCES = """
none.jsonl -> there is no such file or folder
p.png -> .png is not read
. -> is a folder without good/ and bad/
"""


@pytest.mark.parametrize(("name", "words"), rows(SOURCES))
def test_sources_of_no_known_kind_are_refused(folder, name, words):
    with pytest.raises(UserError, match=words):
        read_pairs(name)


def test_of_a_folder_of_splits_that_of_training_is_read_without_other_pictures(folder):
    """The picture of another column, which `datasets` stores as a mapping, is no metadata."""
    chosen, rejected, other = (Path(name).read_bytes() for name in COLOURS)
    own = pair(chosen, rejected)
    more = {"mask": {"bytes": other, "path": "r.png"}, "seeds": [1, 2]}
    Path("set/data").mkdir(parents=True)
    parquet([own | more], "set/data/train-00000-of-00001.parquet")
    parquet([own | {"prompt": "a dog"}], "set/data/test-00000-of-00001.parquet")
    found = read_pairs("set")
    assert seen(found) == PAIR and found[0].prompt.metadata == {"seeds": [1, 2]}
    parquet([own, own | {"rejected": chosen}], "set/data/train-00001-of-00002.parquet")
    with pytest.raises(UserError, match=r"train-00001-of-00002\.parquet, row 2: .* same picture"):
        read_pairs("set")
    Path("set/data/train-00001-of-00002.parquet").write_bytes(b"cut short")
    with pytest.raises(UserError, match=r"train-00001-of-00002\.parquet: cannot be read"):
        read_pairs("set")


@pytest.mark.parametrize("name", ["p.BMP", "p.Gif", "p.tif", "p.avif"])
def test_a_picture_in_a_folder_that_is_of_no_known_kind_is_named(folder, name):
    described(f"good/{name}", format="BMP")
    for other in ("good/q.png", "bad/r.png"):
        described(other, COLOURS[other[-5:]])
    with pytest.raises(UserError, match=f"{name}: cannot be read as PNG"):
        read_pairs(folder)


def test_good_pictures_are_compared_with_the_bad_ones_of_their_prompt_and_the_rest_together(folder):
    """Two prompts have both; of a third there is a good one alone, and a bad one has no prompt."""
    at = {"good": "a b c", "bad": "a b"}
    for side, prompts in at.items():
        for number, prompt in enumerate(prompts.split()):
            described(f"{side}/{prompt}.png", (number, len(side), 0), prompt)
    picture("bad/none.png", (9, 9, 9))
    found = {one.prompt: [Path(path).stem for path in one.pictures] for one in read_pairs(folder)}
    assert found == {"a": ["a", "a"], "b": ["b", "b"], "": ["c", "none"]}


def test_a_picture_is_decoded_again_only_where_its_file_changed(folder, monkeypatch):
    source, decoded, own = written(pair()), [], images._opened

    def opened(path, *rest):
        decoded.append(Path(path).name)
        return own(path, *rest)

    monkeypatch.setattr(images, "_opened", opened)
    for expected in (["p.png", "q.png"], []):
        decoded.clear()
        read_pairs(source)
        assert sorted(decoded) == expected
    Path("q.png").write_bytes(Path("cut.png").read_bytes())
    for _ in range(2):
        with pytest.raises(UserError, match=r"1 of 2 pictures cannot be used: .*q\.png"):
            read_pairs(source)
    Path("q.png").unlink()
    with pytest.raises(UserError, match="there is no such file"):
        read_pairs(source)
    picture("q.png", COLOURS["r.png"])
    (folder / "cache/pictures").rename(folder / "aside")
    (folder / "cache/pictures").write_text("no folder")
    assert len(read_pairs(source)) == 1
