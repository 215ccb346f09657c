"""The notebooks run, and what they store is small."""

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_has_its_outputs(path):
    nbformat = pytest.importorskip("nbformat", reason="needs the extra 'dev'")
    notebook = nbformat.read(path, as_version=4)
    assert path.stat().st_size < 500_000
    assert any(cell.get("outputs") for cell in notebook.cells)
    kinds = [out.output_type for cell in notebook.cells for out in cell.get("outputs", [])]
    assert "error" not in kinds


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="needs the extra 'dev'")
    nbclient = pytest.importorskip("nbclient", reason="needs the extra 'dev'")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # raises what a cell raises
