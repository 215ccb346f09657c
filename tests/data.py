"""Real data for tests, from the folder that the environment variable IRPE_TEST_DATA names."""

import os
from pathlib import Path

import pytest


def test_data(name):
    """Returns the path of a dataset; skips the test where there is none."""
    folder = os.environ.get("IRPE_TEST_DATA")
    if not folder:
        pytest.skip("needs real data: name its folder with IRPE_TEST_DATA")
    path = Path(folder, name)
    if not path.exists():
        pytest.skip(f"needs {path}")
    return path


test_data.__test__ = False
