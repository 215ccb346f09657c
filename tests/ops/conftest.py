"""The ways to compute attention: every implementation, and the fast one in small slices."""

import pytest

from irpe.ops.impl.fast.slices import BOUNDS, Bounds

SMALL_SLICES = Bounds(weights=300, mask=300, kept=0)  # some queries of one head of a small case


@pytest.fixture
def use_way(monkeypatch):
    """A function from a way to the name of its implementation; sets the slices that it needs."""

    def use(way):
        if way.endswith("small slices"):
            monkeypatch.setitem(BOUNDS, "cpu", SMALL_SLICES)
        return way.partition(",")[0]

    return use
