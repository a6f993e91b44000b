"""Prompts from every kind of source, and their order."""

import csv
import json
import pickle
import sys
from datetime import date

import pyarrow
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from g2rpo.core.data import Prompt
from g2rpo.core.errors import UserError
from g2rpo.core.images import digest_of_prompts
from g2rpo.core.plain import LARGEST_FILE
from g2rpo.data import formats
from g2rpo.data.prompts import PromptOrder
from g2rpo.data.sources import LONGEST_PROMPT, read_prompts
from tests.support.runs import trainer
from tests.support.tables import rows


def texts(source):
    """The texts alone: other columns are metadata, and a prompt with metadata is not its text."""
    return [str(prompt) for prompt in read_prompts(source)]


READ = r'''
drawbench.csv -> \ufeffPrompts,Category\r\n"a, ""b""",Colors\r\n\r\nc,x\r\n
excel.CSV -> sep=;\nkind; Caption\nx;a, "b"\ny;c\n
blank.csv -> \n \nkind; Caption\nx;a, "b"\ny;c\n
a.csv:Kind -> prompt,Kind\nx,"a, ""b"""\nx,c\n
quoted.tsv -> Text\tn\n"a, ""b"""\t1\nc\t2\n
plain.TSV -> n\tprompt\n1\ta, "b"\n2\tc\n
a.json -> ["a, \\"b\\"", "c"]
a.JSON -> {"prompts": ["a, \\"b\\"", "c"]}
mjhq.json -> {"i": {"prompt": "a, \\"b\\"", "category": "x"}, "j": {"prompt": "c"}}
pandas.json -> {"caption": {"0": "a, \\"b\\"", "1": "c"}}
formats.json -> {"prompt": "a, \\"b\\""}\n{"prompt": "c"}\n
a.JSONL -> {"Caption": "a, \\"b\\""}\n{"Caption": " c "}\n
b.jsonl:title -> {"prompt": "x", "title": "a, \\"b\\""}\n{"title": "c"}\n
ocr.jsonl -> {"prompt": "a, \\"b\\"", "text": "b"}\n{"prompt": "c", "text": "c"}\n
strings.jsonl -> "a, \\"b\\""\n"c"\n
a.txt -> \ufeffa, "b"\n\n  c  \n
no_suffix -> a, "b"\n\u00a0\n\u3000\nc\u200b\n
'''
"""A name, and the content as Python writes it."""


@pytest.mark.parametrize("row", READ.strip().splitlines())
def test_tables_and_lists_are_read_by_suffix_and_column(tmp_path, row):
    name, content = row.split(" -> ")
    content = content.encode().decode("unicode_escape").encode()
    (tmp_path / name.split(":")[0]).write_bytes(content)
    assert texts(f"{tmp_path}/{name}") == ['a, "b"', "c"]


@pytest.mark.parametrize("source", ["", " ", "hf:", "hf::train"])
def test_a_source_without_a_name_is_refused(source):
    with pytest.raises(UserError, match="'.*': names no prompts; write a file, hf:OWNER/NAME or"):
        read_prompts(source)


def test_the_first_table_of_a_process_may_have_a_long_header(tmp_path):
    csv.field_size_limit(2**17)  # Python's own
    (tmp_path / "a.csv").write_text("x" * 2**18)
    with pytest.raises(UserError, match="has no column 'prompt'"):
        read_prompts(tmp_path / "a.csv")


def test_only_the_ends_of_a_line_are_looked_at(monkeypatch):
    """All letters of a list of 100,000 prompts, each several times, took a minute at every start."""
    seen, visible = [], formats._is_visible
    monkeypatch.setattr(
        formats, "_is_visible", lambda letter: seen.append(letter) or visible(letter)
    )
    assert formats.visible_part(f" \u200b{'a b' * 999} \u2800") == "a b" * 999
    assert formats.visible_part(" \u200b") == ""
    assert len(seen) == 8


def test_plain_prompts_keep_what_only_looks_like_another_format(tmp_path):
    """Quotes, commas, dashes, brackets, numbers, colons, joined emoji and scripts with joiners are
    usual in prompts."""
    lines = [
        "a sign, text, more", "3 dogs", "portrait: a man", '"tiger" in red', "- a dash -- and more", "[x] a", "up-to-date",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u0646\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
    ]  # fmt: skip
    (tmp_path / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    assert texts(tmp_path / "a.txt") == lines
    (tmp_path / "a.tsv").write_text('prompt\tn\n"a", "b"\t1\n')
    assert texts(tmp_path / "a.tsv") == ['"a", "b"']


NOT_UTF_8 = """
latin-1 -> Z\u00fcrich
gbk -> \u7ea2\u8272\u7684\u72d7
shift_jis -> \u732b\u304c
euc_kr -> \uace0\uc591\uc774
cp1251 -> \u043a\u043e\u0442
"""
CODING = "is not UTF-8 .byte .*, line 2.*iconv -f ITS-CODING -t"
ODD = [
    ("a.txt", b"\n \n", "is empty"),
    *(("a.txt", f"a\n{text}".encode(code), CODING) for code, text in rows(NOT_UTF_8)),
    ("a.txt", "a".encode("utf-32"), "is not UTF-8 .*iconv -f UTF-32 -t UTF-8"),
    ("a.csv", "prompt\nZ\u00fcrich\n".encode("utf-16"), "is not UTF-8 .*iconv -f UTF-16 -t UTF-8"),
    ("a.txt", "a\n" + "x" * (LONGEST_PROMPT + 1), f"line 2: .* may have {LONGEST_PROMPT}"),
    ("a.txt", b"a\x1b[31mb", "line 1: has the control character"),
    ("a.txt", "a\n\u200b", "line 2: has nothing visible"),
    ("a.txt", "a\tx\nb\ty\n", "is a table"),
    ("absent.txt", None, "there is no such file; name one"),
    *(
        ("a.csv", f"prompt,n\na,1\n{cell},2\n", f"line 3: should be a prompt, is '{cell}'")
        for cell in ("", "nan", "NaN", "None", "null", "NULL", "<NA>", "#N/A")
    ),
]
REFUSED = r"""
a.jsonl -> {"prompt": "a", "images": ["https://x.org/a.png"]} -> line 1: https.* is an address
a.jsonl -> {"prompt": "x"}\n{"text": "y"} -> line 2: has no column 'prompt'
a.jsonl -> {"prompt": "x"}\ny -> line 2: is no JSON
a.jsonl -> {"prompt": "x", "prompt": "y"} -> line 1: .*has the key 'prompt' twice
a.json -> {\n"prompt": "x",\n"prompt": "y"} -> a.json: has the key 'prompt' twice
a.jsonl:x -> {"text": "a"} -> line 1: .* 'x'; name one after a colon: text
a.jsonl -> {"prompt": "a", "images": [3]} -> line 1: images.*should be a valid
a.jsonl -> {"prompt": "a", "metadata": [1]} -> line 1: metadata.*should be a valid
a.parquet -> no parquet at all -> cannot be read as parquet
a.csv -> name,kind\na,b\n -> has no column .*: name, kind
a.csv -> prompt,caption\na,b\n -> has the columns 'prompt' and 'caption'
a.csv -> prompt,n, n\na,1,2\n -> more than one column 'n'
a.csv -> prompt\na red car, parked\n -> line 2: has 2 cells where the header has 1
a.csv -> sep=;\nprompt;n\na;b;c\n -> line 3: has 3 cells where the header has 2
a.csv -> prompt\n"open\n -> cannot be read as a table
a.csv -> prompt,n\n  ,1\n -> line 2: should be a prompt
a.jsonl -> {"prompt": "a"}\n{"prompt": NaN} -> line 2: should be a prompt, is nan
a.json -> [] -> is empty
a.json -> ["a", 3] -> entry 2: should be a prompt
a.json -> 3 -> should hold a list
a.yaml -> a -> yaml is not read; prompts are read from .txt
a.GZ -> a -> GZ is not read; prompts are read from .txt
a.parquet -> version https://git-lfs.github.com/spec/v1\n -> git lfs pull
a.json -> \n<!DOCTYPE html>\n<html> -> is a page
a.txt -> a\na cat --w 1024 --n bad -> line 2: has --
a.txt -> a <lora:x:0.8> cat -> line 1: has <lora:
a.txt -> a\n# comment -> line 2: begins with #
a.txt -> Prompts,Category\n"A red car, parked.",Colors\n -> is a table
a.txt -> ["a", "b"] -> holds a list or objects
a.txt -> {"prompt": "a"}\n{"prompt": "b"}\n -> holds a list or objects
a.txt -> {"prompt": "x", "prompt": "y"} -> holds a list or objects
a.txt -> 404: Not Found -> a server's answer
a.txt -> | prompt | n |\n|---|---|\n| a | 1 | -> a mark, a number or quotes
a.txt -> prompts:\n  - a\n  - b\n -> is YAML
a.txt -> "a",\n"b",\n -> a mark, a number or quotes
"""


@pytest.mark.parametrize(("name", "content", "message"), [*ODD, *rows(REFUSED)])
def test_unusable_prompt_files_are_refused(tmp_path, name, content, message):
    if content is not None:
        content = content.encode() if isinstance(content, str) else content
        (tmp_path / name.split(":")[0]).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_prompts(f"{tmp_path}/{name}")


def test_an_address_is_named_as_it_was_given():
    with pytest.raises(UserError, match="^https://x.org/p.csv:a is an address"):
        read_prompts("https://x.org/p.csv:a")


def test_a_file_has_a_largest_size(tmp_path):
    with (path := tmp_path / "prompts.txt").open("wb") as file:
        file.truncate(LARGEST_FILE + 1)  # takes no room
    with pytest.raises(UserError, match=f"at most {LARGEST_FILE} are read"):
        read_prompts(path)


@pytest.fixture
def parquet(tmp_path, tmp_path_factory, monkeypatch):
    """A table in a folder that is a dataset too, read by the library that reads the hub's."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    columns = {"caption": [" a", "Zürich "], "score": [1, 2], "holes": ["x", None]}
    columns |= {"day": [date(2026, 1, 2)] * 2, "raw": [b"x", b"\xff"]}
    columns["include"] = [[{"class": "dog", "count": 2}], []]
    pq.write_table(pyarrow.table(columns), tmp_path / "train.parquet")
    return tmp_path / "train.parquet"


WRONG_COLUMNS = """
FILE:other -> caption, score, holes
FILE:score -> row 1
FILE:holes -> row 2: should be a prompt, is None
FILE:raw -> row 2: is not UTF-8
FOLDER:train:raw -> row 2: is not UTF-8
FOLDER:train:text -> no column 'text'; name one after a colon: caption
FOLDER:test:caption -> cannot be loaded: Unknown split
hf:nobody/nothing -> hf:nobody/nothing: cannot be loaded
"""


def test_parquet_and_datasets_are_read_with_plain_metadata(parquet, monkeypatch):
    """Dates as text; lists and objects stay, and bytes go."""
    metadata = {"score": 1, "holes": "x", "day": "2026-01-02"}
    metadata["include"] = [{"class": "dog", "count": 2}]
    folder = f"hf:{parquet.parent}"
    cut = f"{folder}:train[:1]+train[1:]:caption"
    monkeypatch.setenv("HOME", str(parquet.parent.parent))
    home = f"hf:~/{parquet.parent.name}"
    for source in (parquet, f"{parquet}:caption", folder, home, f"{folder}:train:caption", cut):
        prompts = read_prompts(source)
        assert list(map(str, prompts)) == ["a", "Zürich"] and prompts[0].metadata == metadata
        digest_of_prompts(prompts)
    for source, fact in rows(WRONG_COLUMNS):
        with pytest.raises(UserError, match=fact):
            read_prompts(source.replace("FILE", str(parquet)).replace("FOLDER", folder))
    assert texts(f"{folder}:train[:1]:raw") == ["x"]
    monkeypatch.setattr("g2rpo.data.sources.MOST_ROWS", 1)
    for source in (parquet, folder):
        with pytest.raises(UserError, match="has 2 rows; at most 1 are read"):
            read_prompts(source)


@pytest.mark.parametrize(
    ("source", "library"), [("a.parquet", "pyarrow"), ("hf:owner/name", "datasets")]
)
def test_a_missing_extra_is_named(tmp_path, monkeypatch, source, library):
    (tmp_path / "a.parquet").touch()
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)  # import then fails as if it were not installed
    with pytest.raises(UserError, match=f"pip install {library}"):
        read_prompts(source)


def test_prompt_order_covers_every_epoch_and_depends_on_nothing_but_the_iteration():
    prompts = [str(i) for i in range(10)]
    order = PromptOrder(prompts, seed=1)
    drawn = [p for i in range(5) for p in order.batch(i, 4)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == sorted(prompts) and drawn[:10] != drawn[10:]
    assert PromptOrder(prompts, seed=1).batch(3, 4) == drawn[12:16]
    assert PromptOrder(prompts, seed=2).batch(0, 10) != drawn[:10]


def test_a_prompt_is_its_text_and_what_belongs_to_it():
    bare, target = Prompt("a sign"), Prompt("a sign", metadata={"target": "STOP"})
    assert bare == "a sign" and isinstance(bare, str) and json.dumps(bare) == '"a sign"'
    assert target not in (bare, "a sign") and len({bare, target, "a sign"}) == 2
    assert Prompt("a sign", images=["x.png"]) != bare
    again = pickle.loads(pickle.dumps(target))  # noqa: S301 (our own; processes pass prompts on)
    assert again == target and again.metadata == {"target": "STOP"}
    assert (bare.plain(), target.plain()["metadata"]) == ("a sign", {"target": "STOP"})


def test_metadata_and_pictures_come_with_a_prompt(tmp_path):
    for name in ("in.png", "abs.png"):
        Image.new("RGB", (2, 2)).save(tmp_path / name)
    both = {"images": ["in.png", f"{tmp_path}/abs.png"], "metadata": {"count": 2}, "target": "STOP"}
    rows = [{"prompt": "a sign", **both}, {"prompt": "a dog", "image": "in.png"}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first, second = read_prompts(tmp_path / "prompts.jsonl")
    assert first.metadata == {"target": "STOP", "count": 2}
    assert first.images == (f"{tmp_path}/in.png", f"{tmp_path}/abs.png")
    assert second == Prompt("a dog", (f"{tmp_path}/in.png",)) and second.metadata == {}


def test_numbers_that_json_lacks_are_unknown(tmp_path):
    """Requests to reward servers hold metadata, and other languages read no NaN."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "n": NaN, "of": [-Infinity, 1.5]}')
    (prompt,) = read_prompts(tmp_path / "a.jsonl")
    assert prompt.metadata == {"n": None, "of": [None, 1.5]}


def test_rewards_see_metadata():
    def reward(images, prompts):
        return torch.tensor([prompt.metadata["target"] for prompt in prompts])

    prompts = [Prompt(text, metadata={"target": 0.5}) for text in ("0", "1")]
    row = trainer(None, prompts=prompts, rewards={"bright": reward}).iterate()
    assert row["reward/bright"] == 0.5
