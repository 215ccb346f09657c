"""The ways to compute attention: every implementation, and the blocks of the blockwise one."""

import pytest

from irpe.ops.impl.blockwise.schedule import SCHEDULES, Schedule

SMALL_BLOCKS = Schedule(weights=300, mask=300, kept=0)  # some queries of one head of a small case


@pytest.fixture
def use_way(monkeypatch):
    """A function from a way to the name of its implementation; sets the blocks that it needs."""

    def use(way):
        if way.endswith("small blocks"):
            monkeypatch.setitem(SCHEDULES, "cpu", SMALL_BLOCKS)
        return way.partition(",")[0]

    return use
