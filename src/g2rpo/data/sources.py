"""Where prompts come from: text files, tables, and Hugging Face datasets."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field

from g2rpo.core.data import Prompt
from g2rpo.core.errors import UserError, loading, placed, shown
from g2rpo.core.files import local, refuse_other
from g2rpo.core.images import check_pictures
from g2rpo.core.plain import Repeated, checked_as, decoded, is_text, parse_json, read_text
from g2rpo.data.formats import (
    COLUMNS,
    column_of,
    read_lines,
    read_table,
    refuse_other_files,
    visible_part,
)

LIST_SUFFIXES = (".txt", ".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet")
READ_FORMS = (
    ".txt (a prompt on each line), .csv, .tsv, .json, .jsonl and .parquet (a column or key prompt, prompts, caption "
    "or text)"
)
INSTALL_DATASETS = "pip install datasets"
STARTER = {
    f"starter:{name}": Path(__file__).parent / "starter" / f"{name}.txt"
    for name in ("train", "heldout")
}
"""Prompts in the package: 200 of many kinds for training, and 64 others for evaluation."""

LONGEST_PROMPT, MOST_ROWS = 2**15, 5_000_000
"""The largest number of characters of a prompt (encoders read at most a few thousand), and of rows
of a table."""

EMPTY_CELLS = ("nan", "none", "null", "<na>", "n/a", "#n/a", "nil")
"""What programs write for a cell without a value, in any case."""
EXAMPLE = '{"prompt": "a red circle"}'


def read_prompts(source: str | Path) -> list[Prompt]:
    """The prompts of a source, in its order; `UserError` names an unusable source and the reason.

    A table has its prompts in the column "prompt", or in the only one called "prompts", "caption"
    or "text", in any case; other names are given after a colon. A column "images" (or "image")
    holds paths of input pictures in the folder of the file or below it, which must be there; all
    other columns of plain data are the prompt's metadata, those of a column "metadata" as they are.

    - `FILE.txt`, or a name without a suffix: UTF-8 text, one prompt a line, blank lines skipped.
      What would be trained on by mistake is refused: comments, options of other tools, another
      format under this name (`lines.read_lines`);
    - `FILE.csv` or `FILE.tsv`: a table with a header;
    - `FILE.json`: a list of strings or of objects, or an object of objects, or one that holds a
      list under a prompt's column;
    - `FILE.jsonl`: a string or an object on each line;
    - `FILE.parquet`: a table (needs the extra `data`);
    - `FILE.SUFFIX:COLUMN`: the same with this column;
    - `starter:train` or `starter:heldout`: `STARTER`;
    - `hf:OWNER/NAME[/SUBSET][:SPLIT[:COLUMN]]`: a dataset of the Hugging Face hub, or a folder of
      one, by default its split "train" (needs the extra `data`).
    """
    name = str(source)
    if not name.removeprefix("hf:").partition(":")[0].strip():
        raise UserError(f"{name!r}: names no prompts; write a file, hf:OWNER/NAME or starter:train")
    if name.startswith("hf:"):
        return _from_hub(name)
    with placed(""):
        refuse_address(name)
    name = str(STARTER.get(name, name))
    table = re.fullmatch(
        r"(?P<file>.+\.(csv|tsv|jsonl?|ndjson|parquet)):(?P<column>.+)", name, re.IGNORECASE
    )
    path, column = (local(table["file"]), table["column"]) if table else (local(name), "")
    with placed(f"prompt file {path}: ", ValueError, OSError):
        return _from_file(path, column)


def refuse_address(name: str) -> None:
    """ValueError for an address in the place of a file; nothing is downloaded."""
    if re.match(r"\w+://", name):
        raise ValueError(f"{name:.80} is an address, which is not downloaded; name a file")


def _from_file(path: Path, column: str) -> list[Prompt]:
    """The prompts of a file, read as its suffix says. ValueError for what a file cannot hold,
    UserError for a wrong record."""
    suffix = path.suffix.lower() or ".txt"
    if not path.exists():
        raise ValueError(
            "there is no such file; name one with a prompt on each line, or starter:train or starter:heldout"
        )
    if path.is_dir():
        raise ValueError("is a folder; hf:FOLDER reads a dataset's")
    if suffix not in LIST_SUFFIXES:
        raise ValueError(f"{path.suffix} is not read; prompts are read from {READ_FORMS}")
    refuse_other_files(begin_of(path))
    if suffix == ".parquet":
        return _from_parquet(path, column)
    text = read_text(path)
    if suffix == ".txt":
        numbered: list[tuple[int, Any]] = list(read_lines(text))
    elif suffix in (".csv", ".tsv"):
        numbered = read_table(text, "\t" if suffix == ".tsv" else ",;\t|", column)
    elif suffix == ".json":
        numbered = json_entries(text)
    else:
        numbered = json_lines(text)
    unit = "entry" if suffix == ".json" else "line"
    return _usable(f"prompt file {path}", numbered, column, unit, path.parent)


def _visible(text: str) -> str:
    if not isinstance(text, str) or not (visible := visible_part(text)):
        raise ValueError(f"should be a prompt, is {shown(text)}")
    if len(visible) > LONGEST_PROMPT:
        raise ValueError(f"has {len(visible)} characters; a prompt may have {LONGEST_PROMPT}")
    if not is_text(text):
        raise ValueError("has a character that no text may have (NUL or a lone surrogate)")
    return visible


def _as_paths(images: Any) -> Any:
    """Allows one path for a list of one, and null or "" for none."""
    return [images] if isinstance(images, str) and images else images or []


Text = Annotated[str, BeforeValidator(_visible)]


class _Beside(BaseModel):
    """What belongs to a prompt in its record, beside its text."""

    images: Annotated[
        list[str],
        BeforeValidator(_as_paths),
        Field(validation_alias=AliasChoices("images", "image")),
    ] = []
    metadata: Annotated[dict[str, Any], BeforeValidator(lambda value: value or {})] = {}


def begin_of(path: Path) -> str:
    """The first characters of a file; "" if there is none, which reading it will report."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(200).decode("utf-8-sig", errors="replace")


def json_lines(text: str) -> list[tuple[int, Any]]:
    # splitlines would also cut at what Unicode calls line ends, which JSON allows
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    values = []
    for number, line in lines:
        with placed(f"line {number}: is no JSON (", kind=ValueError, after=f"): {line[:80]}"):
            values.append((number, parse_json(line)))
    return values


def json_entries(text: str) -> list[tuple[int, Any]]:
    """The entries of a list or an object. Files of JSON lines are often called .json."""
    try:
        value = parse_json(text)
    except Repeated:
        raise
    except ValueError as error:
        if text.lstrip()[:1] == "{" and len(text.strip().split("\n")) > 1:
            return json_lines(text)
        raise ValueError(f"is no JSON ({error})") from None
    if isinstance(value, dict):
        held = [
            inner
            for name, inner in value.items()
            if name.casefold() in COLUMNS and isinstance(inner, list | dict)
        ]
        inside = held[0] if held else value
        if isinstance(inside, list):
            value = inside
        elif held or all(isinstance(inner, dict) for inner in inside.values()):
            value = list(inside.values())
        else:
            value = [value]
    if not isinstance(value, list):
        raise ValueError(f"should hold a list of prompts, holds {shown(value)}")
    return list(enumerate(value, 1))


def _from_parquet(path: Path, column: str) -> list[Prompt]:
    with open_parquet(path) as file:
        column = column_of(file.schema_arrow.names, column)
        kept = _plain_columns(file.schema_arrow, column)
        _check_length(file.metadata.num_rows)
        records = file.read(columns=kept).to_pylist()
    return _usable(f"prompt file {path}", list(enumerate(records, 1)), column, "row", path.parent)


def _check_length(rows: int) -> None:
    if rows > MOST_ROWS:
        raise ValueError(f"has {rows} rows; at most {MOST_ROWS} are read")


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """A parquet file; ValueError if it cannot be read."""
    with placed(
        "reading parquet needs pyarrow: ",
        ImportError,
        kind=ValueError,
        after="; pip install pyarrow",
    ):
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    with (
        placed("cannot be read as parquet: ", OSError, ArrowException, kind=ValueError),
        ParquetFile(refuse_other(path)) as file,
    ):
        yield file


def _plain_columns(schema: Any, column: str) -> list[str]:
    """The columns of an arrow schema without those of pictures or other bytes, which are not prompt
    metadata. Some programs write texts as bytes: the prompts are always among them."""
    return [
        field.name
        for field in schema
        if field.name == column or not re.search("binary|extension", str(field.type))
    ]


def _from_hub(source: str) -> list[Prompt]:
    """Downloads the dataset once; later reads come from the cache of `datasets`, offline too."""
    with placed(
        f"{source}: reading datasets needs a library: ", ImportError, after=f"; {INSTALL_DATASETS}"
    ):
        import datasets
    # a split may be "train[:100]+test"
    named = re.match(r"hf:([^:]*):?((?:\[[^]]*\]|[^:[])*):?(.*)", source, re.DOTALL)
    assert named is not None  # every part may be empty
    name, split, column = os.path.expanduser(named[1]), named[2] or "train", named[3]
    subset = None
    if not Path(name).is_dir() and name.count("/") == 2:
        name, subset = name.rsplit("/", 1)
    with loading(f"{source}: cannot be loaded"):
        data = datasets.load_dataset(name, subset, split=split)
    with placed(f"{source}: "):
        column = column_of(data.column_names, column)
        _check_length(data.num_rows)
    plain = _plain_columns(data.features.arrow_schema, column)
    return _usable(source, list(enumerate(data.select_columns(plain).to_list(), 1)), column, "row")


def _usable(
    source: str,
    numbered: Sequence[tuple[int, Any]],
    column: str,
    unit: str,
    beside: Path | None = None,
) -> list[Prompt]:
    """Numbered strings or records as prompts; UserError if one has no text, or names a picture
    outside the folder `beside`."""
    if not numbered:
        raise UserError(f"{source}: is empty; it should hold a prompt for each {unit}")
    prompts: list[Prompt] = []
    pictures: list[tuple[str, str]] = []
    for number, value in numbered:
        place = f"{source}, {unit} {number}"
        record = {COLUMNS[0]: value} if isinstance(value, str) else value
        with placed(f"{place}: "):
            column = _column_in(record, column)  # the first record's is that of all
            prompts.append(prompt_of(record, column, beside))
        pictures += [(path, place) for path in prompts[-1].images]
    check_pictures(pictures)
    return prompts


def _cell(value: Any) -> str:
    """The prompt in a cell of a table; ValueError for none, also as programs write an empty cell."""
    text = _visible(decoded(value) if isinstance(value, bytes) else value)
    if text.casefold() in EMPTY_CELLS:
        raise ValueError(f"should be a prompt, is {shown(text)}")
    return text


def _column_in(record: Any, column: str) -> str:
    if not isinstance(record, Mapping):
        raise ValueError(f"should be a prompt, or an object like {EXAMPLE}, is {shown(record)}")
    return column_of(list(record), column)


def prompt_of(record: Mapping[str, Any], column: str, beside: Path | None) -> Prompt:
    text = _cell(record[column])
    named = checked_as(_Beside, dict(record))
    others = record.keys() - {column, "images", "image", "metadata"}
    metadata = {**{key: record[key] for key in record if key in others}, **named.metadata}
    stored = json.dumps(metadata, ensure_ascii=False, default=str)  # dates and the like as text
    if not all(map(is_text, (stored, *named.images))):
        raise ValueError("its metadata or pictures have a character that no text may have")
    return Prompt(
        text,
        [picture_beside(image, beside) for image in named.images],
        json.loads(stored, parse_constant=lambda name: None),  # NaN, which JSON lacks
    )


def picture_beside(image: str, beside: Path | None) -> str:
    """The path of an input picture. Runs show and publish them, so a prompt file from elsewhere
    must not name arbitrary pictures of this machine."""
    if beside is None:
        raise ValueError(
            f"names the file {image}; a dataset has none, take a .jsonl file beside its pictures"
        )
    refuse_address(image)
    path = os.path.normpath(beside / local(image))
    if not Path(os.path.abspath(path)).is_relative_to(os.path.abspath(beside)):
        raise ValueError(
            f"input picture {image} is outside {beside}, the folder of the file that names it; "
            "move that file above its pictures, or link them there"
        )
    return path
