"""Prompts from every kind of source, and their order."""

import json
import pickle
import sys
from datetime import date

import pyarrow
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from g2rpo.core.errors import UserError
from g2rpo.core.input_pictures import digest_of_prompts
from g2rpo.core.plain import LARGEST_FILE
from g2rpo.core.types import Prompt
from g2rpo.prompts.order import PromptOrder
from g2rpo.prompts.sources import LONGEST, read_prompts
from g2rpo.rewards.remote import RemoteReward
from g2rpo.rewards.server import RewardServer
from tests.support.runs import trainer
from tests.support.servers import serving

TEXTS = [" a red circle", "two blue squares ", "Zürich"]


def texts(prompts):
    """The texts alone: other columns are metadata, and a prompt with metadata is not its text."""
    return [str(prompt) for prompt in prompts]


@pytest.fixture
def parquet(tmp_path):
    table = pyarrow.table({"caption": TEXTS, "score": [1, 2, 3], "holes": ["a", None, "b"]})
    pq.write_table(table, tmp_path / "train.parquet")
    return tmp_path / "train.parquet"


def test_prompts_from_text_and_jsonl(tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffa red circle\n\n  two  \n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "other": 1}\n')
    assert texts(read_prompts(tmp_path / "a.txt")) == ["a red circle", "two"]
    assert texts(read_prompts(tmp_path / "b.jsonl")) == ["a", "b"]
    (tmp_path / "c.jsonl").write_text('{"caption": " a "}\n')
    assert texts(read_prompts(f"{tmp_path}/c.jsonl:caption")) == ["a"]
    with pytest.raises(
        UserError, match="line 1: has no column 'text'; name one after a colon: caption"
    ):
        read_prompts(f"{tmp_path}/c.jsonl:text")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("drawbench.csv", '\ufeffPrompts,Category\r\n"a, ""b""",Colors\r\n\r\nc,x\r\n'),
        ("excel.CSV", 'sep=;\nkind; Caption\nx;a, "b"\ny;c\n'),
        ("a.csv:Kind", 'prompt,Kind\nx,"a, ""b"""\nx,c\n'),
        ("quoted.tsv", 'Text\tn\n"a, ""b"""\t1\nc\t2\n'),
        ("plain.TSV", 'n\tprompt\n1\ta, "b"\n2\tc\n'),
        ("unquoted.tsv", 'prompt\tn\n"a", "b"\t1\n'),
        ("a.json", '["a, \\"b\\"", "c"]'),
        ("a.JSON", '{"prompts": ["a, \\"b\\"", "c"]}'),
        ("mjhq.json", '{"i": {"prompt": "a, \\"b\\"", "category": "x"}, "j": {"prompt": "c"}}'),
        ("pandas.json", '{"caption": {"0": "a, \\"b\\"", "1": "c"}}'),
        ("lines.json", '{"prompt": "a, \\"b\\""}\n{"prompt": "c"}\n'),
        ("a.JSONL", '{"Caption": "a, \\"b\\""}\n{"Caption": "c"}\n'),
        ("ocr.jsonl", '{"prompt": "a, \\"b\\"", "text": "b"}\n{"prompt": "c", "text": "c"}\n'),
        ("strings.jsonl", '"a, \\"b\\""\n"c"\n'),
        ("no_suffix", 'a, "b"\n\u00a0\n\u3000\nc\u200b\n'),
    ],
)
def test_tables_and_lists_are_read_by_suffix_and_column(tmp_path, name, content):
    (tmp_path / name.split(":")[0]).write_bytes(content.encode())
    wanted = ['"a", "b"'] if name == "unquoted.tsv" else ['a, "b"', "c"]
    assert texts(read_prompts(f"{tmp_path}/{name}")) == wanted


def test_plain_prompts_keep_what_only_looks_like_another_format(tmp_path):
    """Quotes, commas, dashes, brackets, numbers, colons, joined emoji and scripts with joiners are
    usual in prompts."""
    lines = [
        "a sign, text, more", "3 dogs", "portrait: a man", '"tiger" in red', "- a dash -- and more", "[x] a", "up-to-date",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u0646\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
    ]  # fmt: skip
    (tmp_path / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    assert texts(read_prompts(tmp_path / "a.txt")) == lines


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\n \n", "is empty"),
        ("a.txt", "Z\u00fcrich".encode("latin-1"), "is not UTF-8"),
        ("a.jsonl", b'{"prompt": "x"}\n{"text": "y"}', "line 2: has no column 'prompt'"),
        ("a.jsonl", b'{"prompt": "x"}\ny', "line 2: is no JSON"),
        ("a.parquet", b"no parquet at all", "cannot be read as parquet"),
        ("a.csv", b"name,kind\na,b\n", "has no column .*: name, kind"),
        (
            "a.csv",
            b"prompt,caption\na,b\n",
            "has the columns 'prompt' and 'caption'; .*: prompt, caption",
        ),
        ("a.csv", b"prompt\na red car, parked\n", "line 2: has 2 cells where the header has 1"),
        ("a.csv", b'prompt\n"open\n', "cannot be read as a table"),
        ("a.csv", b"prompt,n\n  ,1\n", "line 2: should be a prompt"),
        ("a.csv", b"prompt\n", "is empty"),
        ("a.json", b"[]", "is empty"),
        ("a.json", b'["a", 3]', "entry 2: should be a prompt"),
        ("a.json", b"3", "should hold a list"),
        *[
            (name, b"a", f"{name[1:]} is not read; prompts are read from .txt")
            for name in ("a.yaml", "a.xlsx", "a.GZ")
        ],
        *[
            (name, b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull")
            for name in ("a.txt", "a.parquet", "a.csv")
        ],
        *[(name, b"\n<!DOCTYPE html>\n<html>", "is a page") for name in ("a.txt", "a.json")],
        ("a.txt", b"a\x1b[31mb", "line 1: has the control character"),
        ("a.txt", b"a\na cat --w 1024 --n bad", "line 2: has --"),
        ("a.txt", b"a <lora:x:0.8> cat", "line 1: has <lora:"),
        ("a.txt", b"a\n# comment", "line 2: begins with #"),
        ("a.txt", "a\n\u200b".encode(), "line 2: has nothing visible"),
        ("a.txt", b'Prompts,Category\n"A red car, parked.",Colors\n', "is a table"),
        ("a.txt", b"a\tx\nb\ty\n", "is a table"),
        ("a.txt", b'["a", "b"]', "holds a list or objects"),
        ("a.txt", b'{"prompt": "a"}\n{"prompt": "b"}\n', "holds a list or objects"),
        ("a.txt", b"404: Not Found", "a server's answer"),
        ("a.txt", b"| prompt | n |\n|---|---|\n| a | 1 |", "a mark, a number or quotes"),
        ("a.txt", b"prompts:\n  - a\n  - b\n", "is YAML"),
        ("a.txt", b"1. a\n2. b\n", "a mark, a number or quotes"),
        ("a.txt", b'"a",\n"b",\n', "a mark, a number or quotes"),
    ],
)
def test_unusable_prompt_files_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_prompts(tmp_path / name)


def test_prompts_from_parquet(parquet):
    assert (
        texts(read_prompts(parquet))
        == texts(read_prompts(f"{parquet}:caption"))
        == [text.strip() for text in TEXTS]
    )
    for column, fact in (
        (":other", "caption, score, holes"),
        (":score", "row 1"),
        (":holes", "row 2"),
    ):
        with pytest.raises(UserError, match=fact):
            read_prompts(f"{parquet}{column}")


def test_prompts_from_a_dataset(parquet, monkeypatch, tmp_path_factory):
    """A folder of parquet files is a dataset too, read by the library that reads the hub's."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    assert texts(read_prompts(f"hf:{parquet.parent}:train:caption")) == [
        text.strip() for text in TEXTS
    ]
    with pytest.raises(UserError, match="no column 'text'; name one after a colon: caption"):
        read_prompts(f"hf:{parquet.parent}:train:text")
    with pytest.raises(UserError, match="cannot be loaded: Unknown split"):
        read_prompts(f"hf:{parquet.parent}:test:caption")


def test_a_dataset_that_is_not_there_is_named():
    with pytest.raises(UserError, match="hf:nobody/nothing: cannot be loaded"):
        read_prompts("hf:nobody/nothing")


@pytest.mark.parametrize(
    ("source", "library"), [("a.parquet", "pyarrow"), ("hf:owner/name", "datasets")]
)
def test_a_missing_extra_is_named(monkeypatch, source, library):
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
    assert (
        target != bare
        and target != "a sign"
        and target == Prompt("a sign", metadata={"target": "STOP"})
    )
    assert Prompt("a sign", images=["x.png"]) != bare and len({bare, target, "a sign"}) == 2
    again = pickle.loads(pickle.dumps(target))  # noqa: S301 (our own; processes pass prompts on)
    assert again == target and again.metadata == {"target": "STOP"}
    assert (bare.plain(), target.plain()["metadata"]) == ("a sign", {"target": "STOP"})


def test_metadata_and_pictures_come_with_a_prompt(tmp_path):
    rows = [
        {
            "prompt": "a sign",
            "target": "STOP",
            "metadata": {"count": 2},
            "images": ["in.png", str(tmp_path / "abs.png")],
        },
        {"prompt": "a dog", "image": "dog.png"},
    ]
    for name in ("in.png", "abs.png", "dog.png"):
        Image.new("RGB", (2, 2)).save(tmp_path / name)
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = read_prompts(file)
    assert first.metadata == {"target": "STOP", "count": 2}
    assert first.images == (str(tmp_path / "in.png"), str(tmp_path / "abs.png"))
    assert (second, second.images, second.metadata) == (
        Prompt("a dog", second.images),
        (str(tmp_path / "dog.png"),),
        {},
    )
    table = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"prompt": ["a sign"], "target": ["STOP"], "picture": [b"\x89PNG"]}
    parquet.write_table(table.table(columns), tmp_path / "prompts.parquet")
    (row,) = read_prompts(tmp_path / "prompts.parquet")
    assert (str(row), row.metadata) == ("a sign", {"target": "STOP"})  # bytes stay behind


@pytest.mark.parametrize(
    ("key", "value"), [("images", [3]), ("images", {"a": 1}), ("metadata", [1])]
)
def test_what_belongs_to_a_prompt_is_checked(tmp_path, key, value):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "a sign", key: value}) + "\n")
    with pytest.raises(UserError, match=rf"line 1: {key}.*should be a valid"):
        read_prompts(file)


def test_rewards_see_metadata_and_a_run_is_held_to_it():
    seen = []

    def reward(images, prompts):
        seen.extend(prompt.metadata["target"] for prompt in prompts)
        return images.flatten(1).mean(1)

    prompts = [Prompt(text, metadata={"target": float(text) * 2}) for text in ("0", "0.1", "0.2")]
    t = trainer(None, "trainer.iterations=1", prompts=prompts, rewards={"bright": reward})
    list(t.train())
    assert set(seen) <= {0.0, 0.2, 0.4} and len(set(seen)) == 3


def test_metadata_goes_over_the_wire():
    def reward(images, prompts):
        return torch.tensor([float(prompt.metadata["target"]) for prompt in prompts])

    prompts = [Prompt("a", metadata={"target": 1}), Prompt("b", metadata={"target": 2})]
    with serving(RewardServer(reward, port=0)) as server:
        assert RemoteReward(server.address)(torch.rand(2, 3, 8, 8), prompts).tolist() == [1.0, 2.0]


def test_a_prompt_and_a_file_have_a_largest_size(tmp_path):
    (path := tmp_path / "prompts.txt").write_text("a red circle\n" + "x" * (LONGEST + 1))
    with pytest.raises(
        UserError, match=rf"line 2: has {LONGEST + 1} characters; a prompt may have {LONGEST}"
    ):
        read_prompts(path)
    with path.open("wb") as file:
        file.truncate(LARGEST_FILE + 1)  # takes no room
    with pytest.raises(UserError, match=f"at most {LARGEST_FILE} are read"):
        read_prompts(path)


def test_metadata_of_tables_are_plain_data(tmp_path, monkeypatch):
    """Dates as text; lists and objects stay, also of a dataset, and bytes go."""
    table = {"prompt": ["a", "b"], "day": [date(2026, 1, 2)] * 2, "raw": [b"x"] * 2}
    table |= {"include": [[{"class": "dog", "count": 2}], []]}
    pq.write_table(pyarrow.table(table), tmp_path / "train.parquet")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for source in (tmp_path / "train.parquet", f"hf:{tmp_path}"):
        first = read_prompts(source)[0]
        assert first.metadata == {"day": "2026-01-02", "include": [{"class": "dog", "count": 2}]}
        digest_of_prompts([first])
