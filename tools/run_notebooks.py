"""Runs the notebooks and stores their outputs: python tools/run_notebooks.py [NAME]."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"


def main() -> None:
    """Runs all notebooks, or those whose names are given."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        if len(sys.argv) == 1 or path.stem in sys.argv[1:]:
            notebook = nbformat.read(path, as_version=4)
            NotebookClient(notebook, resources={"metadata": {"path": str(FOLDER)}}).execute()
            for cell in notebook.cells:
                cell.metadata.pop("execution", None)  # the times of one run
                kept = [each for each in cell.get("outputs", []) if each.get("name") != "stderr"]
                if cell.cell_type == "code":
                    cell.outputs = kept
            nbformat.write(notebook, path)
            print(path.name, path.stat().st_size // 1024, "KB")


main()
