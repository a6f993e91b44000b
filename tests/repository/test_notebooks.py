"""examples/*.ipynb run from top to bottom, are stored without outputs, and learn what they say."""

import json
from pathlib import Path

import matplotlib as mpl
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook, tmp_path, monkeypatch):
    """Its cells are plain Python, so they run without Jupyter."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": notebook.stem}
    with mpl.rc_context({"backend": "agg", "figure.max_open_warning": 0}):
        for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                exec(
                    compile("".join(cell["source"]), f"{notebook.name}:{cell['id']}", "exec"), names
                )
        assert names["plt"].get_fignums(), "it has no picture"
        names["plt"].close("all")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(notebook):
    read = json.loads(notebook.read_text(encoding="utf-8"))
    assert (read["nbformat"], read["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in read["cells"]}) == len(read["cells"])
    assert all(
        not cell["outputs"] and cell["execution_count"] is None
        for cell in read["cells"]
        if cell["cell_type"] == "code"
    )


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} == {"own_algorithm", "ten_minutes"}
