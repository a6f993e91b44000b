"""Plain text with a prompt on each line, and what is not that: tables, pages, and what other tools
write into such files."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from g2rpo.core.errors import refuse
from g2rpo.core.plain import Repeated, parse_json

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
        if (fault := _fault(line)) is not None:
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


def _fault(line: str) -> str | None:
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
