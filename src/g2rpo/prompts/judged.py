"""Pictures that people judged, from files: pairs of a chosen and a rejected one, or single marks."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from g2rpo.core.data import Prompt, spelling_apart
from g2rpo.core.errors import UserError, counted, placed, refuse
from g2rpo.core.files import FileDigests, cache_root, local, write_whole
from g2rpo.core.input_pictures import faults_of_pictures
from g2rpo.core.plain import checked_as, is_text, read_text
from g2rpo.core.seeding import seed_for
from g2rpo.prompts.lines import COLUMNS, refuse_other_files
from g2rpo.prompts.sources import (
    begin_of,
    json_entries,
    json_lines,
    open_parquet,
    picture_beside,
    prompt_of,
    refuse_address,
)
from g2rpo.prompts.tables import column_of, read_table

Kind = Literal["pairs", "marks"]
"""What an algorithm learns from."""

PICTURE_SUFFIXES = {
    f".{kind}"
    for kind in ["png", "jpg", "jpeg", "jfif", "webp", "avif", "heic", "gif", "bmp", "tif", "tiff"]
}
"""Of pictures in a folder; those that cannot be read are named."""
NAMED = 5
"""The most pictures that a message names."""
LONGEST_NAME = 1024
"""The largest number of characters of a file's name; file systems take 255 for each part."""
ROWS_AT_ONCE = 64
"""Rows of a parquet file in memory: they hold pictures."""
READ = ".jsonl, .json, .csv, .tsv and .parquet, or from a folder with good/ and bad/"
BASE64 = ("iVBORw0KGgo", "/9j/", "UklGR")
"""What a PNG, a JPEG and a WebP file begin with in base64."""
LAYOUTS = (
    "prompt, chosen, rejected; Pick-a-Pic's caption, jpg_0, jpg_1, label_0, label_1; HPDv2's prompt, image_path, and "
    "human_preference or rank; and for single marks prompt, image, label"
)
WORDS = {
    **dict.fromkeys(("1", "1.0", "true", "yes", "good", "liked", "chosen"), True),
    **dict.fromkeys(("0", "0.0", "-1", "false", "no", "bad", "disliked", "rejected"), False),
}
"""What a mark may be, in lower case."""


def _shown(value: Any) -> Any:
    """A picture's file name or bytes. Tables of `datasets` hold both in a mapping."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        value = re.sub(r"^data:image/\w+;base64,", "", value)
    if isinstance(value, str) and value.startswith(BASE64):
        with placed(
            "is no file name, and no picture in base64 (",
            binascii.Error,
            kind=ValueError,
            after=")",
        ):
            value = base64.b64decode(value, validate=True)
    if isinstance(value, str):
        refuse_address(value)
    refuse(_faults_of_shown(value), ValueError)
    return value


def _faults_of_shown(value: Any) -> Iterator[str]:
    if not isinstance(value, str | bytes) or not value:
        yield f"should be a picture's file name, is {value!r:.60}"
    elif isinstance(value, str) and (len(value) > LONGEST_NAME or not is_text(value)):
        yield f"is no file name: {value!r:.60}"


def _number(value: Any) -> Any:
    """A CSV file's numbers are text."""
    return float(value) if isinstance(value, str | int) else value


def _mark(value: Any) -> bool:
    known = WORDS.get(str(value).strip().casefold())
    if known is None:
        raise ValueError(f"should be good or bad, true or false, 1 or 0, is {value!r:.60}")
    return known


Shown = Annotated[str | bytes, BeforeValidator(_shown)]
Number = Annotated[float, BeforeValidator(_number)]
Group = tuple[tuple[str | bytes, ...], tuple[bool, ...]]


class _Pair(BaseModel):
    """Columns of this package, and of most trainers."""

    columns: ClassVar[Sequence[set[str]]] = ({"chosen", "rejected"},)
    chosen: Shown
    rejected: Shown

    def groups(self) -> Iterator[Group]:
        yield (self.chosen, self.rejected), (True, False)


class _PickAPic(BaseModel):
    """Kirstain et al. 2023, arXiv 2305.01569: a tie has the label .5 twice."""

    columns: ClassVar[Sequence[set[str]]] = ({"jpg_0", "jpg_1", "label_0", "label_1"},)
    jpg_0: Shown
    jpg_1: Shown
    label_0: Number
    label_1: Number

    def groups(self) -> Iterator[Group]:
        if self.label_0 > self.label_1:
            yield (self.jpg_0, self.jpg_1), (True, False)
        if self.label_1 > self.label_0:
            yield (self.jpg_1, self.jpg_0), (True, False)


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

    def groups(self) -> Iterator[Group]:
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
                yield (one, other), (True, False)


class _Mark(BaseModel):
    columns: ClassVar[Sequence[set[str]]] = ({"image", "label"}, {"file_name", "label"})
    image: Annotated[Shown, Field(validation_alias=AliasChoices("image", "file_name"))]
    label: Annotated[bool, BeforeValidator(_mark)]

    def groups(self) -> Iterator[Group]:
        yield (self.image,), (self.label,)


KINDS: Sequence[type[_Pair | _PickAPic | _Ranked | _Mark]] = (_Pair, _PickAPic, _Ranked, _Mark)


class Judged(Prompt):
    """A prompt with files of pictures of it, and of each whether people found it good: a pair of a
    chosen and a rejected picture, or one picture with its mark."""

    pictures: tuple[str, ...]
    good: tuple[bool, ...]

    @classmethod
    def of(cls, prompt: Prompt, pictures: Sequence[str], good: Sequence[bool]) -> Judged:
        judged = cls(prompt, prompt.images, prompt.metadata)
        judged.pictures, judged.good = tuple(pictures), tuple(good)
        return judged


class JudgedList(list[Judged]):
    """What a file holds; `ties` were left out."""

    ties: int = 0

    def __str__(self) -> str:
        what = "mark" if all(len(one.pictures) == 1 for one in self) else "pair"
        prompts = counted(len(set(map(str, self))), "prompt")
        left = f" ({counted(self.ties, 'tie')} left out)" if self.ties else ""
        return f"{counted(len(self), what)} of {prompts}{left}"


def _file_of(shown: str | bytes, table: Path) -> str:
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


def read_judged(source: str | Path, kind: Kind) -> JudgedList:
    """The pairs, or the marks, of a source; UserError for one that cannot be used.

    - `FILE.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet`, or a folder of parquet files (those of the
      split "train", if it has one): a table with columns of `LAYOUTS`. Pictures are named relative
      to the file's folder, or are bytes;
    - a folder with `good/` and `bad/`: single marks; beside each picture a .txt with its prompt.

    Marks of pairs are those of both pictures, each once for a prompt. Ties are left out.
    """
    path = local(source)
    with placed(f"{path}: ", ValueError, OSError):
        groups = list(_read(path))
    return as_kind(groups, kind, str(path))


def as_kind(groups: Sequence[tuple[str, Judged | None]], kind: Kind, name: str) -> JudgedList:
    """Groups, each with its place in the source `name`, as pairs or marks; None for a tie.
    UserError unless there are any, of pictures that can be read and that differ."""
    found = JudgedList(one for _, one in groups if one is not None)
    found.ties = len(groups) - len(found)
    if not found:
        why = f"has nothing but ties ({found.ties})" if found.ties else "is empty"
        raise UserError(f"{name}: {why}; nothing can be learnt from it")
    _check_pictures([(place, one) for place, one in groups if one is not None], name)
    single = any(len(one.pictures) == 1 for one in found)
    if kind == "pairs" and single:
        raise UserError(f"{name}: has single marks, no pairs")
    return found if kind == "pairs" else _marks_of(found)


def _check_pictures(groups: Sequence[tuple[str, Judged]], name: str) -> None:
    places: dict[str, str] = {}
    for place, one in groups:
        places |= {path: place for path in one.pictures if path not in places}
    _refuse_some(name, faults_of_pictures(places), counted(len(places), "picture"))
    digests, alike = FileDigests(None), []
    for place, one in groups:
        if len({digests.of(Path(path)) for path in one.pictures}) < len(one.pictures):
            alike.append(f"{place}: {' and '.join(one.pictures)} are the same picture")
    _refuse_some(name, alike, counted(len(groups), "pair"))


def _marks_of(judged: JudgedList) -> JudgedList:
    """Of each picture of a prompt's pairs its mark, once; single marks as they are."""
    marks = JudgedList()
    marks.ties, known = judged.ties, set()
    for one in judged:
        for mark in zip(one.pictures, one.good, strict=True):
            key = (str(one), *mark)
            if len(one.pictures) == 1 or key not in known:
                marks.append(Judged.of(one, mark[:1], mark[1:]))
            known.add(key)
    return marks


def _refuse_some(name: str, faults: Sequence[str], of: str) -> None:
    """UserError that names the first of these faults."""
    if faults:
        more = f"; and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
        listed = "; ".join(faults[:NAMED])
        raise UserError(f"{name}: {len(faults)} of {of} cannot be used: {listed}{more}")


def _read(path: Path) -> Iterator[tuple[str, Judged | None]]:
    """The groups of a source with their places, None for a tie."""
    folders = {mark: path / mark for mark in ("good", "bad")}
    tables = sorted([*path.glob("*.parquet"), *path.glob("data/*.parquet")])
    if any(folder.is_dir() for folder in folders.values()):
        for mark, folder in folders.items():
            yield from _marked(folder, mark == "good")
    elif tables:
        train = [table for table in tables if table.name.startswith("train")]
        for table in train or tables:
            yield from _read(table)
    elif path.is_dir():
        raise ValueError("is a folder without votes.jsonl, good/ and bad/, and .parquet files")
    elif not path.exists():
        raise ValueError("there is no such file or folder")
    else:
        for number, record in _records(path):
            place = f"row {number}"
            with placed(f"{place}: ", kind=ValueError):
                groups = list(_groups(record, path))
            if not groups:
                yield place, None
            for one in groups:
                yield place, one


def _records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        with open_parquet(path) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches(ROWS_AT_ONCE))
            yield from enumerate((row for batch in batches for row in batch), 1)
        return
    if suffix not in (".csv", ".tsv", ".json", ".jsonl", ".ndjson"):
        raise ValueError(f"{path.suffix or 'this'} is not read; pairs are read from {READ}")
    refuse_other_files(begin_of(path))
    text = read_text(path)
    if suffix in (".csv", ".tsv"):
        yield from read_table(text, "\t" if suffix == ".tsv" else ",;\t|")
    else:
        yield from json_entries(text) if suffix == ".json" else json_lines(text)


def _groups(record: Any, table: Path) -> Iterator[Judged]:
    """The groups of a row."""
    if not isinstance(record, Mapping):
        raise ValueError(f"should be an object with these columns: {LAYOUTS}; is {record!r:.60}")
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
    for pictures, good in layout.groups():
        yield Judged.of(prompt, [_file_of(shown, table) for shown in pictures], good)


def _has_bytes(value: Any) -> bool:
    """Whether a value is another picture of a table, or holds some."""
    if isinstance(value, Mapping):
        return any(map(_has_bytes, value.values()))
    return isinstance(value, bytes) or (isinstance(value, list) and any(map(_has_bytes, value)))


def _marked(folder: Path, good: bool) -> Iterator[tuple[str, Judged]]:
    """The pictures of a folder, with the prompts beside them."""
    pictures = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in PICTURE_SUFFIXES and not path.name.startswith(".")
    ]
    bare = [path for path in pictures if not path.with_suffix(".txt").is_file()]
    said = [f"{path.name} has no prompt beside it ({path.stem}.txt)" for path in bare]
    _refuse_some(str(folder), said, counted(len(pictures), "picture"))
    for path in pictures:
        caption = " ".join(read_text(path.with_suffix(".txt")).split())
        with placed(f"{path.with_suffix('.txt')}: ", kind=ValueError):
            prompt = prompt_of({"prompt": caption}, "prompt", folder)
        yield str(path.parent), Judged.of(prompt, [str(path)], [good])


def sharing(pairs: Sequence[Judged]) -> list[int]:
    """A number for each pair; those with a picture in common, or linked by others, have one."""
    known: dict[str, int] = {}
    ends = [[known.setdefault(path, len(known)) for path in one.pictures] for one in pairs]
    links = coo_array(([True] * len(ends), tuple(zip(*ends, strict=True))), shape=[len(known)] * 2)
    numbers = connected_components(links, directed=False)[1]
    return [int(numbers[end]) for end, _ in ends]


def held_out(
    judged: Sequence[Judged], share: float, seed: int
) -> tuple[list[Judged], list[Judged]]:
    """(to learn from, held out): about a share of the prompts, at least one, is held out with all
    that was judged of them. Each prompt is drawn by its own words, so that those that are added to
    a file change nothing for the others. Prompts that differ in case and spaces are one. Of a
    held-out prompt what shows a picture that is learnt from is left out; if that is all, nothing is
    held out."""
    texts = [spelling_apart(one) for one in judged]
    drawn = {text: seed_for(seed, "held-out pairs", text) / 2**63 for text in dict.fromkeys(texts)}
    below = sum(place < share for place in drawn.values())
    count = min(max(1, below), len(drawn) - 1) if share else 0
    chosen, digests = set(sorted(drawn, key=drawn.__getitem__)[:count]), FileDigests(None)
    sides: dict[bool, list[Judged]] = {False: [], True: []}
    for one, text in zip(judged, texts, strict=True):
        sides[text in chosen].append(one)

    def shown(one: Judged) -> set[str]:
        return {digests.of(Path(path)) for path in one.pictures}

    known = set[str]().union(*map(shown, sides[False])) if count else set()
    apart = [one for one in sides[True] if known.isdisjoint(shown(one))]
    return (sides[False], apart) if apart else ([*judged], [])
