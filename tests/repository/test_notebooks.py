"""examples/*.ipynb run from top to bottom, are stored without outputs, and learn what they say."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib as mpl
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


def cells(notebook):
    return json.loads(notebook.read_text("utf-8"))["cells"]


@pytest.mark.slow
@notebook
def test_a_notebook_runs(notebook, tmp_path, monkeypatch, capsys):
    """Its cells are plain Python, so they run without Jupyter. It draws what the model knows, and
    what its text names of a run is there."""
    monkeypatch.chdir(tmp_path)
    shown = SimpleNamespace(IFrame=lambda *where: where, display=lambda *what: None)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    names = {"__name__": notebook.stem}
    with mpl.rc_context({"backend": "agg", "figure.max_open_warning": 0}):
        for cell in cells(notebook):
            if cell["cell_type"] == "code":
                place = f"{notebook.name}:{cell['id']}"
                exec(compile("".join(cell["source"]), place, "exec"), names)
        assert names["plt"].get_fignums(), "it has no picture"
        names["plt"].close("all")
    assert "that the model" not in capsys.readouterr().out, "it draws what the model does not know"
    told = "".join(line for cell in cells(notebook) for line in cell["source"])
    assert all((tmp_path / path).exists() for path in re.findall(r"`(taught/[\w/]+)`", told))


@notebook
def test_a_notebook_is_stored_without_outputs(notebook):
    code = [cell for cell in cells(notebook) if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
