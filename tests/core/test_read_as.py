"""Files from outside: what fits, or one message."""

import json

import pytest
from pydantic import Field

from g2rpo.core.errors import UserError
from g2rpo.core.plain import Section, read_as, read_lines_as
from tests.support.tables import rows


class Row(Section):
    name: str
    steps: tuple[int, ...] = Field(default=(), max_length=3)
    score: float | None = None


def written(folder, content):
    path = folder / "row.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_file_that_fits(tmp_path):
    path = written(tmp_path, '\ufeff{"name": "a", "steps": [1, 2], "score": 3}')
    assert read_as(Row, path) == Row(name="a", steps=(1, 2), score=3.0)


WRONG = r"""
{"name": "a" -> no JSON
[] -> row.json
{} -> name
{"name": 1} -> name: Input should be a valid string, got 1
{"name": "a", "steps": ["x"]} -> steps.0
{"name": "a", "steps": [true]} -> steps.0
{"name": "a", "steps": [1, 2, 3, 4]} -> steps
{"name": "a", "score": Infinity} -> score
{"name": "a", "score": NaN} -> score
{"name": "a", "score": 1e999} -> score
{"name": "a", "other": 1} -> other
{"name": "\ud800"} -> no JSON
"""
ODD = [
    ("", "no JSON"),
    (b'{"name": "\xff"}', "UTF-8"),
    ("[" * 100_000, "no JSON"),
    (json.dumps({"name": "a", "score": 10**400}), "score"),
]


@pytest.mark.parametrize(("content", "named"), [*rows(WRONG), *ODD])
def test_other_files_are_one_message(tmp_path, content, named):
    path = written(tmp_path, content)
    with pytest.raises(UserError) as caught:
        read_as(Row, path)
    said = str(caught.value)
    assert named in said and str(path) in said and len(said) < len(str(path)) + 300


def test_lines(tmp_path):
    path = written(tmp_path, '{"name": "a"}\n{"name": "b"}\n{"na')
    assert [row.name for row in read_lines_as(Row, path)] == ["a", "b"]
    with pytest.raises(UserError, match="line 2: name"):
        read_lines_as(Row, written(tmp_path, '{"name": "a"}\n{"name": []}\n'))
    with pytest.raises(UserError, match="cannot be read"):
        read_lines_as(Row, tmp_path / "absent.json")
    with pytest.raises(UserError, match="should be a valid number, got 'x'; delete it$"):
        read_as(Row, written(tmp_path, '{"name": "a", "score": "x"}'), "delete it")
