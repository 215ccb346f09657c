"""How many cells run at a time on this machine."""

import math

import pytest
import torch

from irpe.ablation import executors
from irpe.ablation.cells import describe_machine
from irpe.ablation.executors import choose_jobs
from irpe.recipes import RECIPES

GIGABYTE = 10**9


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.setattr(executors, "available_cores", lambda: 4)
    monkeypatch.setattr(executors, "available_memory", lambda: 3 * GIGABYTE)


@pytest.mark.parametrize(
    ("requested", "cells", "devices", "expected"),
    [
        (None, 12, 0, 3),  # memory
        (None, 2, 0, 2),  # cells
        (None, 12, 2, 2),  # GPUs
        (1, 12, 0, 1),
        (6, 12, 0, 6),  # as asked for
        (5, 2, 0, 2),
    ],
)
def test_as_many_as_there_is_room_for(requested, cells, devices, expected):
    assert choose_jobs(requested, cells, devices) == expected


@pytest.mark.parametrize(("requested", "devices"), [(0, 0), (3, 2)])
def test_what_cannot_be_is_refused(requested, devices):
    with pytest.raises(ValueError, match=f"jobs = {requested} must be"):
        choose_jobs(requested, 12, devices)


def test_without_a_known_limit_cores_decide(monkeypatch):
    monkeypatch.setattr(executors, "available_memory", lambda: math.inf)
    assert choose_jobs(None, 12, 0) == 4


def test_a_machine_is_named():
    found = describe_machine(torch.device("cpu"))
    assert found["torch"] == torch.__version__
    assert found["processor"]
    assert found["implementation"] in {"native", "fast"}


def test_the_augmentation_is_named():
    pytest.importorskip("accelerate", reason="needs the extra 'train'")
    from irpe.train.overview import describe_augmentation

    own = RECIPES["laptop_64"]()
    expected = "mirrored with probability 0.5, crops of 50% to 100%"
    assert describe_augmentation(own) == expected
    plain = own.replace(flip=0.0, min_scale=1.0)
    assert describe_augmentation(plain) == "none"
    assert describe_augmentation(plain.replace(flip=1.0, mixup=1.0)) == (
        "mirrored with probability 1, mixup 1"
    )
    assert "resized by" in describe_augmentation(RECIPES["seg_small"]())
