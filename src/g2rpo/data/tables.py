"""Tables of prompts: which column holds them, and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Literal

from g2rpo.core.errors import counted, refuse
from g2rpo.core.plain import LARGEST_FILE
from g2rpo.data.lines import COLUMNS

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
    csv.field_size_limit(LARGEST_FILE)  # of the whole process; pictures in base64 are cells too
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting, strict=True
    )
    return [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
