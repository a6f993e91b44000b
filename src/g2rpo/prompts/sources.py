"""Where prompts come from: text files, tables, and Hugging Face datasets."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from g2rpo.core.errors import UserError, loading
from g2rpo.core.files import local
from g2rpo.core.input_pictures import check_files
from g2rpo.core.plain import is_text, parse_json, read_text
from g2rpo.core.types import Prompt

COLUMN = "prompt"
EXTRA = "pip install datasets"
STARTER = {f"starter:{name}": Path(__file__).parent / "starter" / f"{name}.txt" for name in ("train", "heldout")}
"""Prompts in the package: 200 of many kinds for training, and 64 others for evaluation."""


LONGEST, MOST_PROMPTS = 2**15, 5_000_000
"""The largest number of characters of a prompt (encoders read at most a few thousand), and of rows of a table."""


def read_prompts(source: str | Path) -> list[Prompt]:
    """The prompts of a source, in its order; `UserError` names an unusable source and the reason.

    In tables a column "images" (or "image") holds paths of input pictures in the folder of the file or below it, which must be
    there; all other columns of plain data are the prompt's metadata, those of a column "metadata" as they are.

    - `FILE`: UTF-8 text, one prompt a line, blank lines skipped;
    - `FILE.jsonl` or `FILE.jsonl:COLUMN`: an object a line that holds the prompt under "prompt", or under COLUMN;
    - `FILE.parquet` or `FILE.parquet:COLUMN`: the same of a table (needs the extra `data`);
    - `starter:train` or `starter:heldout`: `STARTER`;
    - `hf:OWNER/NAME[/SUBSET][:SPLIT[:COLUMN]]`: a dataset of the Hugging Face hub, or a folder of one, by default its split
      "train" and column "prompt" (needs the extra `data`).
    """
    name = str(source)
    if name.startswith("hf:"):
        return _from_hub(name)
    name = str(STARTER.get(name, name))
    table = re.fullmatch(r"(?P<file>.+\.(jsonl|parquet))(:(?P<column>.+))?", name)
    if table is None:
        return _usable(name, [{COLUMN: line} for _, line in _lines(local(name))], COLUMN, "line")
    path, column = local(table["file"]), table["column"] or COLUMN
    if path.suffix == ".jsonl":
        records = [_from_json(path, number, line, column) for number, line in _lines(path)]
        return _usable(name, records, column, "line", path.parent)
    return _from_parquet(path, column)


def _lines(path: Path) -> list[tuple[int, str]]:
    """Numbered lines that are not blank."""
    try:
        lines = read_text(path).split("\n")  # splitlines would also cut at what Unicode calls line ends, which JSON allows
    except ValueError as error:
        raise UserError(f"prompt file {path}: {error}") from None
    return [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]


def _from_json(path: Path, number: int, line: str, column: str) -> dict[str, Any]:
    try:
        record = parse_json(line)
        prompt = record[column]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str) or not prompt.strip():
        wanted = json.dumps({column: "a red circle"})
        raise UserError(f"prompt file {path}, line {number}: should be an object like {wanted}, is {line[:80]}")
    return dict(record)


def _from_parquet(path: Path, column: str) -> list[Prompt]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(f"prompt file {path}: reading parquet needs pyarrow; install it with pip install pyarrow") from None
    try:
        with ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                raise UserError(_no_column(f"prompt file {path}", column, file.schema_arrow.names))
            kept = [field.name for field in file.schema_arrow if not _is_binary(str(field.type))]
            if file.metadata.num_rows > MOST_PROMPTS:
                raise UserError(f"prompt file {path}: has {file.metadata.num_rows} rows; at most {MOST_PROMPTS} are read")
            records = file.read(columns=kept).to_pylist()
    except (OSError, ValueError, ArrowException) as error:
        raise UserError(f"prompt file {path}: cannot be read as parquet ({error})") from None
    return _usable(str(path), records, column, "row", path.parent)


def _is_binary(kind: str) -> bool:
    """Whether a column's arrow type holds pictures or other bytes, which are not prompt metadata."""
    return "binary" in kind or "extension" in kind


def _from_hub(source: str) -> list[Prompt]:
    """Downloads the dataset once; later reads come from the cache of `datasets`, offline too."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"{source}: reading datasets needs a library; install it with {EXTRA}") from None
    name, split, column = [*source.removeprefix("hf:").split(":"), "", ""][:3]
    split, column = split or "train", column or COLUMN
    subset = None
    if not Path(name).is_dir() and name.count("/") == 2:
        name, subset = name.rsplit("/", 1)
    with loading(f"{source}: cannot be loaded"):
        data = datasets.load_dataset(name, subset, split=split)
    if column not in data.column_names:
        raise UserError(_no_column(source, column, data.column_names))
    plain = [field.name for field in data.features.arrow_schema if not _is_binary(str(field.type))]
    return _usable(source, data.select_columns(plain).to_list(), column, "row")


def _no_column(source: str, column: str, known: Sequence[str]) -> str:
    return f"{source}: has no column '{column}'; name one after a colon: {', '.join(known)}"


def _usable(
    source: str, records: Sequence[Mapping[str, Any]], column: str, unit: str, beside: Path | None = None
) -> list[Prompt]:
    """The records as prompts; UserError if one has no text, or names a picture outside the folder `beside`."""
    for number, record in enumerate(records, 1):
        value = record.get(column)
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{source}, {unit} {number}: should be a prompt, is {value!r:.80}")
        if len(value) > LONGEST:
            raise UserError(f"{source}, {unit} {number}: has {len(value)} characters; a prompt may have {LONGEST}")
        if not is_text(value):
            raise UserError(f"{source}, {unit} {number}: has a character that no text may have (NUL or a lone surrogate)")
    if not records:
        raise UserError(f"prompt source {source}: is empty; it should hold a prompt a {unit}")
    return [_prompt(record, column, f"{source}, {unit} {number}", beside) for number, record in enumerate(records, 1)]


def _prompt(record: Mapping[str, Any], column: str, place: str, beside: Path | None) -> Prompt:
    images = record.get("images", record.get("image")) or []
    images = [images] if isinstance(images, str) else images
    if not isinstance(images, list) or not all(isinstance(image, str) and is_text(image) for image in images):
        raise UserError(f"{place}: images should be paths of pictures, are {images!r:.80}")
    named = record.get("metadata") or {}
    if not isinstance(named, Mapping):
        raise UserError(f"{place}: metadata should be an object, is {named!r:.80}")
    rest = {key: value for key, value in record.items() if key not in (column, "images", "image", "metadata")}
    stored = json.dumps({**rest, **named}, ensure_ascii=False, default=str)  # dates and the like as text
    if not is_text(stored):
        raise UserError(f"{place}: its metadata has a lone surrogate, which no text may have")
    paths = [_picture(image, place, beside) for image in images]
    check_files(paths, place)
    return Prompt(record[column].strip(), paths, json.loads(stored))


def _picture(image: str, place: str, beside: Path | None) -> str:
    """The path of an input picture. Runs show and publish them, so a prompt file from elsewhere must not name arbitrary
    pictures of this machine."""
    if beside is None:
        raise UserError(f"{place}: names the file {image}; a dataset has none, take a .jsonl file beside its pictures")
    path = os.path.normpath(beside / local(image))
    if not Path(os.path.abspath(path)).is_relative_to(os.path.abspath(beside)):
        raise UserError(
            f"{place}: input picture {image} is outside {beside}, the folder of the file that names it; "
            "move that file above its pictures, or link them there"
        )
    return path
