"""Formats of prompt files: a prompt on each line, or a table with a column of prompts; and what is
neither, such as pages and what other tools write into such files."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Literal

from g2rpo.core.errors import counted, refuse
from g2rpo.core.plain import LARGEST_FILE, Repeated, parse_json

COLUMNS = ("prompt", "prompts", "caption", "text")
"""Names of a column that holds prompts, in any case."""

EMPTY_GLYPHS = "\u115f\u1160\u2800\u3164\uffa0"
"""Letters that show nothing: Hangul fillers and the empty Braille cell."""

_FILES = (
    (
        r"version https://git-lfs",
        "is a pointer of git-lfs, not the file; `git lfs pull` fetches the file",
    ),
    (
        r"\s*<(!doctype|html|head|body|\?xml|error)\b",
        "is a page (HTML or XML), perhaps an error page saved as a file",
    ),
    (r"\{\\rtf", "is a document (RTF), not plain text"),
    (
        r"\s*((\d{3}: )?(entry |file )?not found|access to \w+ \S+ is restricted|invalid username or password|error code: \d)",
        "is a server's answer that there is no file, saved as a file",
    ),
)
_MARKS = (r"[-*•+]\s", r"\(?\d+[.):,;]\s*\S", r"\"[^\"]*\",?$", r"'[^']*',?$", r"\|.*\|$")
"""What every line of a list begins with in other formats, or is enclosed in."""
_YAML = re.compile(r"[\w-]+:(\s|$)|-\s")
_PYTHON = re.compile(r"\[\s*(['\"]).*\1\s*,?\s*\]", re.DOTALL)
_LINES = (
    (r"#|//|;|%|<!--|```", "begins with {}, a comment in some tools"),
    (r"(.*\s)?(?P<mark>--[a-z]\w*|[–—](ar|v|q|s)\s+\d)", "has {}, an option of another tool"),
    (r".*(?P<mark><(lora|lyco|hypernet):)", "has {}, an option of another tool"),
    (r"(negative prompt|steps)\s*:", "begins with {}, an option of another tool"),
    (r".*(?P<mark>[\x00-\x08\x0b-\x1f\x7f-\x9f])", "has the control character {}"),
)


def read_lines(text: str) -> list[tuple[int, str]]:
    """The numbered lines of `text` that are not blank; ValueError says what is no prompt."""
    lines = [
        (number, visible_part(line))
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
    refuse(_faults(lines), ValueError)
    return lines


def _faults(lines: list[tuple[int, str]]) -> Iterator[str]:
    if (other := _other_format([line for _, line in lines])) is not None:
        yield other
    for number, line in lines:
        if not line:
            yield f"line {number}: has nothing visible; take it out"
        if (fault := _fault_of_line(line)) is not None:
            yield (
                f"line {number}: {fault}, which would be read as part of the prompt: {line[:60]!r}; take it out, "
                "or write the prompts to a .jsonl file, where all is taken as it is"
            )


def refuse_other_files(text: str) -> None:
    """ValueError for the begin of a file that is none of prompts, whatever its name."""
    found = (what for pattern, what in _FILES if re.match(pattern, text, re.IGNORECASE))
    refuse(found, ValueError)


def visible_part(text: str) -> str:
    """`text` without what shows nothing at both ends; "" if nothing shows."""
    # from both ends: a list may have a hundred thousand lines
    begin = next((place for place, letter in enumerate(text) if _is_visible(letter)), len(text))
    backwards = range(len(text), begin, -1)
    end = next((place for place in backwards if _is_visible(text[place - 1])), begin)
    return text[begin:end]


def _is_visible(letter: str) -> bool:
    """Categories Z and C are spaces, controls, formats and the unassigned; control characters
    count, to be refused."""
    category = unicodedata.category(letter)
    if category == "Cc":
        return not letter.isspace()
    return category[0] != "Z" and category != "Cf" and letter not in EMPTY_GLYPHS


def _fault_of_line(line: str) -> str | None:
    for pattern, what in _LINES:
        if found := re.match(pattern, line, re.IGNORECASE):
            mark = found.groupdict().get("mark", found[0])
            return what.format(mark if mark.isprintable() else repr(mark))
    return None


def _other_format(lines: list[str]) -> str | None:
    """What the lines are, if they are clearly no plain prompts."""
    if not lines:
        return None
    whole = "\n".join(lines)
    if _is_json(whole) or all(_is_json(line) for line in lines) or _PYTHON.fullmatch(whole):
        return "holds a list or objects; as JSON it can be read from a .json file, or from .jsonl with a value on each line"
    cells = [cell.strip("\"'").casefold() for cell in re.split("[,;\t|]", lines[0])]
    tabs = {line.count("\t") for line in lines}
    if any(cell in COLUMNS for cell in cells) or (
        len(lines) > 1 and len(tabs) == 1 and tabs != {0}
    ):
        return "is a table; name it .csv, or .tsv with tabs between columns"
    key = lines[0].partition(":")[0].casefold()
    named = key in COLUMNS or any(line.endswith(":") for line in lines)
    if lines[0] == "---" or (named and all(map(_YAML.match, lines))):
        return "is YAML; write one prompt a line"
    if len(lines) > 1 and any(all(re.match(mark, line) for line in lines) for mark in _MARKS):
        return "has a mark, a number or quotes around every line; keep only the prompts"
    return None


def _is_json(text: str) -> bool:
    """Whether `text` is an array or an object."""
    try:
        return isinstance(parse_json(text), list | dict)
    except Repeated:
        return True
    except ValueError:
        return False


MOST_LISTED = 20
"""The most columns that a message names."""


def column_of(names: Sequence[str], wanted: str = "") -> str:
    """The name of the column that holds prompts: `wanted`, else the only one in `COLUMNS`. Beside a
    column "prompt", a column "text" is metadata: what the reward `ocr` looks for. ValueError lists
    the columns."""
    if wanted:
        found = [name for name in names if name == wanted]
    else:
        found = [name for name in names if name.strip().casefold() in COLUMNS]
        if len(found) > 1 and any(name.strip().casefold() == "prompt" for name in found):
            found = [name for name in found if name.strip().casefold() != "text"]
    listed = ", ".join(names[:MOST_LISTED]) + (", ..." if len(names) > MOST_LISTED else "")
    if len(found) > 1:
        several = " and ".join(repr(name) for name in found)
        raise ValueError(
            f"has the columns {several}; name the one with the prompts after a colon: {listed}"
        )
    if not found:
        looked = f"'{wanted}'" if wanted else "'prompt', 'prompts', 'caption' or 'text'"
        raise ValueError(f"has no column {looked}; name one after a colon: {listed}")
    return found[0]


def read_table(text: str, delimiters: str, wanted: str = "") -> list[tuple[int, dict[str, str]]]:
    """The numbered records of a CSV text with a header. The delimiter is the first with which the
    header has a column of prompts (`column_of`). ValueError says what is wrong."""
    csv.field_size_limit(LARGEST_FILE)  # of the whole process; pictures in base64 are cells too
    text = re.sub(r"^sep=.\n", "\n", text)  # Excel's own first line
    first = text.lstrip().split("\n", 1)[:1]
    for delimiter in delimiters:
        header = next(csv.reader(first, delimiter=delimiter), [])
        names = [name.strip() for name in header]
        if wanted in names if wanted else any(name.casefold() in COLUMNS for name in names):
            break
    else:
        delimiter = delimiters[0]
    try:
        rows = _rows(text, delimiter, csv.QUOTE_MINIMAL)
    except csv.Error as error:
        if delimiter != "\t":
            raise ValueError(f"cannot be read as a table ({error})") from None
        rows = _rows(text, delimiter, csv.QUOTE_NONE)  # some write tables with tabs without quoting
    if not rows:
        return []
    names = [name.strip() for name in rows[0][1]]
    twice = [repr(name) for name in dict.fromkeys(names) if name and names.count(name) > 1]
    if twice:
        raise ValueError(f"has more than one column {twice[0]}; give each its own name")
    column_of(names, wanted)
    ragged = [(number, cells) for number, cells in rows[1:] if len(cells) != len(names)]
    refuse(
        (
            f"line {number}: has {counted(len(cells), 'cell')} where the header has {len(names)} "
            f"({', '.join(names)}); a prompt with a comma needs quotes around it"
            for number, cells in ragged
        ),
        ValueError,
    )
    return [(number, dict(zip(names, cells, strict=True))) for number, cells in rows[1:]]


def _rows(text: str, delimiter: str, quoting: Literal[0, 3]) -> list[tuple[int, list[str]]]:
    """Rows that are not blank, with the number of their last line."""
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting, strict=True
    )
    return [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
