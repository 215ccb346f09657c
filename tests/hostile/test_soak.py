"""A minute of the soak, and what it compares."""

import math

import pytest
import torch
from hostile.runs import is_same
from train.processes import ROOT, start


@pytest.mark.slow
def test_a_minute_of_the_soak():
    assert start("-m", "tests.hostile.soak", "--minutes", "1", "--seed", "1", cwd=ROOT).wait() == 0


def test_results_are_the_same_bit_for_bit_or_not_at_all():
    def result(value, dtype=torch.float32):
        return {"weights": [torch.tensor([1.0, value], dtype=dtype)], "top1": 50.0}

    assert is_same(result(2.0), result(2.0))
    assert not is_same(result(2.0), result(2.0 + 2**-22))
    assert not is_same(result(2.0), result(2.0, torch.float64))
    assert not is_same(result(2.0), {**result(2.0), "top1": 50.1})
    assert not is_same(result(2.0), {"weights": []})
    assert is_same({"APl": math.nan}, {"APl": math.nan})  # there are no large objects
    assert not is_same({"APl": math.nan}, {"APl": 1.0})
