"""The quickstart notebook runs from its first cell to its last, in a kernel of its own as Jupyter would start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.processes
def test_quickstart_notebook_trains_and_shows_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("LIGHTNING_OSDP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("accuracy > 0.8, elsewhere.cluster.ranks"))
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    *_, page, explanation, elsewhere, facts = (outputs(cell) for cell in notebook.cells if cell.cell_type == "code")
    assert "<iframe" in page
    assert "batch size" in explanation
    assert "on 8 ranks" in elsewhere
    assert facts == "(True, 8)"


def outputs(cell: Any) -> str:
    """The text that a cell shows; its page of HTML where it has one."""
    parts = [each.get("text") or each["data"] for each in cell.outputs]
    return "".join(part if isinstance(part, str) else part.get("text/html", part["text/plain"]) for part in parts)
