"""Prompts from every kind of source, and their order."""

import sys

import pytest

from g2rpo.errors import UserError
from g2rpo.prompt_sources import read_prompts
from g2rpo.prompts import PromptOrder

TEXTS = [" a red circle", "two blue squares ", "Zürich"]


@pytest.fixture
def parquet(tmp_path):
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"caption": TEXTS, "score": [1, 2, 3], "holes": ["a", None, "b"]})
    parquet.write_table(table, tmp_path / "train.parquet")
    return tmp_path / "train.parquet"


def test_prompts_from_text_and_jsonl(tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffa red circle\n\n  two  \n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "other": 1}\n')
    assert read_prompts(tmp_path / "a.txt") == ["a red circle", "two"]
    assert read_prompts(tmp_path / "b.jsonl") == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\n \n", "is empty"),
        ("a.txt", "Zürich".encode("latin-1"), "is not UTF-8"),
        ("a.jsonl", b'{"prompt": "x"}\n{"text": "y"}', "line 2"),
        ("a.jsonl", b"[]", "line 1"),
        ("missing.txt", None, "cannot be read"),
    ],
)
def test_unusable_prompt_files_are_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_prompts(tmp_path / name)


def test_a_column_of_jsonl_can_be_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"caption": " a "}\n')
    assert read_prompts(f"{tmp_path}/a.jsonl:caption") == ["a"]
    with pytest.raises(UserError, match=r'line 1: should be an object like {"text": "a red circle"}'):
        read_prompts(f"{tmp_path}/a.jsonl:text")


def test_prompts_from_parquet(parquet):
    assert read_prompts(f"{parquet}:caption") == [text.strip() for text in TEXTS]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("", "no column 'prompt'; name one after a colon: caption, score, holes"),
        (":score", "row 1: should be a prompt, is 1"),
        (":holes", "row 2: should be a prompt, is None"),
    ],
)
def test_unusable_parquet_columns_are_refused(parquet, column, message):
    with pytest.raises(UserError, match=message):
        read_prompts(f"{parquet}{column}")


@pytest.mark.parametrize("content", [b"no parquet at all", None])
def test_unusable_parquet_files_are_refused(tmp_path, content):
    if content:
        (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(UserError, match="cannot be read as parquet"):
        read_prompts(tmp_path / "a.parquet")


def test_prompts_from_a_dataset(parquet, monkeypatch, tmp_path_factory):
    """A folder of parquet files is a dataset too, read by the library that reads the hub's."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    assert read_prompts(f"hf:{parquet.parent}:train:caption") == [text.strip() for text in TEXTS]
    with pytest.raises(UserError, match="no column 'prompt'; name one after a colon: caption"):
        read_prompts(f"hf:{parquet.parent}")
    with pytest.raises(UserError, match="cannot be loaded: Unknown split"):
        read_prompts(f"hf:{parquet.parent}:test:caption")


def test_a_dataset_that_is_not_there_is_named():
    with pytest.raises(UserError, match="hf:nobody/nothing: cannot be loaded"):
        read_prompts("hf:nobody/nothing")


@pytest.mark.parametrize(("source", "library"), [("a.parquet", "pyarrow"), ("hf:owner/name", "datasets")])
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
