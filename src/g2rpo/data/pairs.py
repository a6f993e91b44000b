"""Pictures that people compared, from files: pairs of a chosen and a rejected one, or a folder of good
and bad ones."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator

from g2rpo.core.data import Prompt
from g2rpo.core.errors import UserError, counted, placed, shown
from g2rpo.core.files import FileDigests, cache_root, local, write_whole
from g2rpo.core.images import faults_of_pictures
from g2rpo.core.plain import checked_as, is_text, read_text
from g2rpo.data.formats import COLUMNS, column_of, read_table, refuse_other_files
from g2rpo.data.sources import (
    begin_of,
    json_entries,
    json_lines,
    open_parquet,
    picture_beside,
    prompt_of,
    refuse_address,
)

PICTURE_SUFFIXES = {
    f".{kind}"
    for kind in ["png", "jpg", "jpeg", "jfif", "webp", "avif", "heic", "gif", "bmp", "tif", "tiff"]
}
"""Of pictures in a folder; those that cannot be read are named."""
MOST_NAMED = 5
"""The most pictures that a message names."""
LONGEST_NAME = 1024
"""The largest number of characters of a file's name; file systems take 255 for each part."""
ROWS_AT_ONCE = 64
"""Rows of a parquet file in memory: they hold pictures."""
READ_FORMS = ".jsonl, .json, .csv, .tsv and .parquet, or from a folder with good/ and bad/"
BASE64_BEGINNINGS = ("iVBORw0KGgo", "/9j/", "UklGR")
"""What a PNG, a JPEG and a WebP file begin with in base64."""
LAYOUTS = (
    "prompt, chosen, rejected; Pick-a-Pic's caption, jpg_0, jpg_1, label_0, label_1; HPDv2's prompt, image_path, and "
    "human_preference or rank"
)


def _picture_in(value: Any) -> Any:
    """A picture's file name or bytes. Tables of `datasets` hold both in a mapping."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        value = re.sub(r"^data:image/\w+;base64,", "", value)
    if isinstance(value, str) and value.startswith(BASE64_BEGINNINGS):
        with placed(
            "is no file name, and no picture in base64 (",
            binascii.Error,
            kind=ValueError,
            after=")",
        ):
            value = base64.b64decode(value, validate=True)
    if isinstance(value, str):
        refuse_address(value)
    if not isinstance(value, str | bytes) or not value:
        raise ValueError(f"should be a picture's file name, is {shown(value)}")
    if isinstance(value, str) and (len(value) > LONGEST_NAME or not is_text(value)):
        raise ValueError(f"is no file name: {shown(value)}")
    return value


def _as_number(value: Any) -> Any:
    """A CSV file's numbers are text."""
    with placed("", OverflowError, kind=ValueError):
        return float(value) if isinstance(value, str | int) else value


Shown = Annotated[str | bytes, BeforeValidator(_picture_in)]
Number = Annotated[float, BeforeValidator(_as_number)]
Two = tuple[str | bytes, str | bytes]
"""A chosen and a rejected picture."""


class _Pair(BaseModel):
    """Columns of this package, and of most trainers."""

    columns: ClassVar[Sequence[set[str]]] = ({"chosen", "rejected"},)
    chosen: Shown
    rejected: Shown

    def pairs(self) -> Iterator[Two]:
        yield self.chosen, self.rejected


class _PickAPic(BaseModel):
    """Kirstain et al. 2023, arXiv 2305.01569: a tie has the label .5 twice."""

    columns: ClassVar[Sequence[set[str]]] = ({"jpg_0", "jpg_1", "label_0", "label_1"},)
    jpg_0: Shown
    jpg_1: Shown
    label_0: Number
    label_1: Number

    def pairs(self) -> Iterator[Two]:
        if self.label_0 > self.label_1:
            yield self.jpg_0, self.jpg_1
        if self.label_1 > self.label_0:
            yield self.jpg_1, self.jpg_0


class _Ranked(BaseModel):
    """HPDv2, Wu et al. 2023, arXiv 2306.09341: the preferred picture has 1, ranks begin at the
    best. Two or more pictures make a pair of each two that differ."""

    columns: ClassVar[Sequence[set[str]]] = (
        {"image_path", "human_preference"},
        {"image_path", "rank"},
    )
    image_path: list[Shown]
    human_preference: list[Number] | None = None
    rank: list[Number] | None = None

    def pairs(self) -> Iterator[Two]:
        # the column of preferences counts: those of HPDv2's test set have ranks alone
        better = self.human_preference or [-place for place in self.rank or ()]
        if len(better) != len(self.image_path) or len(better) < 2:
            raise ValueError(
                f"has {counted(len(self.image_path), 'picture')} and {counted(len(better), 'preference')}"
            )
        for (one, value), (other, less) in permutations(
            zip(self.image_path, better, strict=True), 2
        ):
            if value > less:
                yield one, other


KINDS: Sequence[type[_Pair | _PickAPic | _Ranked]] = (_Pair, _PickAPic, _Ranked)


@dataclass(frozen=True)
class ComparedPictures:
    """Files of pictures, of a prompt or of none, of which people `liked` the first so many better
    than the others. `place`: where they stand in the source."""

    prompt: str
    pictures: tuple[str, ...]
    liked: int = 1
    place: str = ""


def _path_of(shown: str | bytes, table: Path) -> str:
    """The path of a picture: beside its table, or in a folder there of the table's name. Bytes are
    stored in the cache."""
    if isinstance(shown, bytes):
        return stored(shown)
    folder = table.parent.absolute()
    path = picture_beside(shown, folder)
    if "\\" in shown and not Path(path).exists():  # as Windows writes it
        path = picture_beside(shown.replace("\\", "/"), folder)
    inside = Path(path).parent / table.stem / Path(path).name
    return str(inside) if not Path(path).exists() and inside.exists() else path


def stored(content: bytes) -> str:
    """The path at which the cache has a picture of a table."""
    name = hashlib.sha256(content).hexdigest()
    path = cache_root() / "pictures" / name[:2] / name
    with placed(f"{path}: a picture of a table cannot be written (", OSError, after=")"):
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)
    return str(path)


def read_pairs(source: str | Path) -> list[ComparedPictures]:
    """What people compared in a source; ties are left out. UserError for one that cannot be used.

    - `FILE.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet`, or a folder of parquet files (those of the
      split "train", if it has one): a table with columns of `LAYOUTS`. Pictures are named relative
      to the file's folder, or are bytes;
    - a folder with `good/` and `bad/`: pictures, with a prompt in a .txt beside each or without.
      Good ones are compared with the bad ones of their prompt, and those of prompts that have only
      one kind with each other.
    """
    path = local(source)
    with placed(f"{path}: ", ValueError, OSError):
        rows = list(_compared_in(path))
    found = [one for one in rows if one is not None]
    if not found:
        why = f"has nothing but ties ({len(rows)})" if rows else "is empty"
        raise UserError(f"{path}: {why}; nothing can be learnt from it")
    _check_pictures(found, str(path))
    return found


def _check_pictures(compared: Sequence[ComparedPictures], name: str) -> None:
    places: dict[str, str] = {}
    for one in compared:
        places |= {path: one.place for path in one.pictures if path not in places}
    _refuse_some(name, faults_of_pictures(places), counted(len(places), "picture"))
    digests = FileDigests(None)
    alike = [
        f"{one.place}: {' and '.join(one.pictures)} are the same picture"
        for one in compared
        if len(one.pictures) == 2 and len({digests.of(Path(path)) for path in one.pictures}) == 1
    ]
    _refuse_some(name, alike, counted(len(compared), "pair"))


def _refuse_some(name: str, faults: Sequence[str], of: str) -> None:
    """UserError that names the first of these faults."""
    if faults:
        more = f"; and {len(faults) - MOST_NAMED} more" if len(faults) > MOST_NAMED else ""
        listed = "; ".join(faults[:MOST_NAMED])
        raise UserError(f"{name}: {len(faults)} of {of} cannot be used: {listed}{more}")


def _compared_in(path: Path) -> Iterator[ComparedPictures | None]:
    """What is compared in a source, None for a tie."""
    tables = sorted([*path.glob("*.parquet"), *path.glob("data/*.parquet")])
    if (path / "good").is_dir() or (path / "bad").is_dir():
        yield from _of_folders(path)
    elif tables:
        train = [table for table in tables if table.name.startswith("train")]
        for table in train or tables:
            with placed(f"{table.name}: ", kind=ValueError):
                for one in _compared_in(table):
                    yield one and replace(one, place=f"{table.name}, {one.place}")
    elif path.is_dir():
        raise ValueError("is a folder without good/ and bad/, and without .parquet files")
    elif not path.exists():
        raise ValueError("there is no such file or folder")
    else:
        for number, record in _records(path):
            place = f"row {number}"
            with placed(f"{place}: ", kind=ValueError):
                pairs = list(_pairs_of(record, path))
            if not pairs:
                yield None
            for prompt, pictures in pairs:
                yield ComparedPictures(prompt, pictures, place=place)


def _records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        with open_parquet(path) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches(ROWS_AT_ONCE))
            yield from enumerate((row for batch in batches for row in batch), 1)
        return
    if suffix not in (".csv", ".tsv", ".json", ".jsonl", ".ndjson"):
        raise ValueError(f"{path.suffix or 'this'} is not read; pairs are read from {READ_FORMS}")
    refuse_other_files(begin_of(path))
    text = read_text(path)
    if suffix in (".csv", ".tsv"):
        yield from read_table(text, "\t" if suffix == ".tsv" else ",;\t|")
    else:
        yield from json_entries(text) if suffix == ".json" else json_lines(text)


def _pairs_of(record: Any, table: Path) -> Iterator[tuple[Prompt, tuple[str, str]]]:
    """The pairs of a row, each with its prompt."""
    if not isinstance(record, Mapping):
        raise ValueError(f"should be an object with these columns: {LAYOUTS}; is {shown(record)}")
    names = {name.strip().casefold(): name for name in record}
    if not names.keys() & {*COLUMNS}:
        raise ValueError(f"has no column with prompts ({', '.join(COLUMNS)}): {', '.join(record)}")
    column = column_of(list(record))
    fitting = [kind for kind in KINDS for columns in kind.columns if columns <= names.keys()]
    if not fitting:
        raise ValueError(f"has the columns {', '.join(record)}; known are {LAYOUTS}")
    own = {low for columns in fitting[0].columns for low in columns if low in names}
    layout = checked_as(fitting[0], {low: record[names[low]] for low in own})
    rest = {name: record[name] for low, name in names.items() if low not in own}
    plain = {name: value for name, value in rest.items() if name == column or not _has_bytes(value)}
    prompt = prompt_of(plain, column, table.parent.absolute())
    for chosen, rejected in layout.pairs():
        yield prompt, (_path_of(chosen, table), _path_of(rejected, table))


def _has_bytes(value: Any) -> bool:
    """Whether a value is another picture of a table, or holds some."""
    if isinstance(value, Mapping):
        return any(map(_has_bytes, value.values()))
    return isinstance(value, bytes) or (isinstance(value, list) and any(map(_has_bytes, value)))


def _of_folders(path: Path) -> Iterator[ComparedPictures]:
    """The good and bad pictures of a folder, by prompt."""
    sides: dict[str, tuple[list[str], list[str]]] = {}
    for side, name in enumerate(("good", "bad")):
        for picture in sorted((path / name).rglob("*")):
            if picture.suffix.lower() in PICTURE_SUFFIXES and not picture.name.startswith("."):
                said = picture.with_suffix(".txt")
                prompt = " ".join(read_text(said).split()) if said.is_file() else ""
                sides.setdefault(prompt, ([], []))[side].append(str(picture))
    rest: tuple[list[str], list[str]] = ([], [])
    for prompt, (good, bad) in sides.items():
        if good and bad:
            yield ComparedPictures(prompt, (*good, *bad), len(good), str(path))
        else:
            rest[0].extend(good)
            rest[1].extend(bad)
    if rest[0] and rest[1]:
        yield ComparedPictures("", (*rest[0], *rest[1]), len(rest[0]), str(path))
