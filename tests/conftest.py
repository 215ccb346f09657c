"""What holds for all tests: one torch thread in each process, and checked shapes.

Tests run in several processes; more threads than cores would wait for each other. Shapes in
signatures are checked at run time in the tests, and only there. The modules below work on arguments
that the public functions have checked already; those speak for themselves when something is wrong.
The compiler does not trace through the checks, so the modules that it traces go without.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded, here and in what tests start

import pytest
import torch
from jaxtyping import install_import_hook

torch.set_num_threads(1)
install_import_hook(["irpe.core.methods", "irpe.ops.impl.reference"], "beartype.beartype")


def pytest_collection_modifyitems(items):
    """Runs the type checker first, beside the rest; skips what needs a GPU where there is none."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/test_package.py"))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU: torch.cuda.is_available()"))
