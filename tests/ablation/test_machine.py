"""How many cells fit on a machine."""

from types import SimpleNamespace

import pytest

from irpe.ablation import machine
from irpe.ablation.machine import choose_jobs

MEGABYTE = 10**6


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.setattr(machine, "available_cores", lambda: 4)
    monkeypatch.setattr(machine, "available_memory", lambda: 3000 * MEGABYTE)


@pytest.mark.parametrize(
    ("requested", "cells", "need", "devices", "expected"),
    [
        (None, 12, 500, 0, 4),  # cores
        (None, 12, 900, 0, 3),  # memory
        (None, 2, 500, 0, 2),  # cells
        (None, 12, 500, 2, 2),  # GPUs
        (1, 12, 500, 0, 1),
        (6, 12, 500, 0, 6),
        (5, 2, 500, 0, 2),
    ],
)
def test_as_many_as_there_is_room_for(requested, cells, need, devices, expected):
    assert choose_jobs(requested, cells, need * MEGABYTE, devices) == expected


@pytest.mark.parametrize(
    ("requested", "need", "devices", "message"),
    [
        (0, 500, 0, "--jobs 0 must be at least 1"),
        (7, 500, 0, r"--jobs 7: a cell needs about 500 MB and 3,000 MB are free: choose 1 to 6"),
        (3, 500, 2, r"3,000 MB are free, and there are 2 GPUs: choose 1 to 2"),
        (None, 4000, 0, r"--jobs 1: a cell needs about 4,000 MB .* choose smaller batches"),
    ],
)
def test_more_than_fit_are_refused(requested, need, devices, message):
    with pytest.raises(ValueError, match=message):
        choose_jobs(requested, 12, need * MEGABYTE, devices)


def test_without_a_known_limit_cores_decide(monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda: None)
    assert choose_jobs(None, 12, 10**15, 0) == 4
    assert choose_jobs(9, 3, 10**15, 0) == 3


def test_what_this_process_did_before_is_not_what_a_cell_needs(monkeypatch):
    """An ablation after other work in one process was refused on a machine with little memory."""
    resource = pytest.importorskip("resource")
    for taken, expected in ((200 * 1024, 200 * 1024**2), (8 * 1024**2, 1000 * MEGABYTE)):
        usage = SimpleNamespace(ru_maxrss=taken)
        monkeypatch.setattr(resource, "getrusage", lambda _, usage=usage: usage)
        monkeypatch.setattr(machine.sys, "platform", "linux")
        assert machine.program_memory() == expected
    assert choose_jobs(None, 4, machine.program_memory() + 50 * MEGABYTE, 0) == 2
