"""How many functions of the library a call runs: every one costs time, most of all on a GPU."""

import sys
from pathlib import Path

import torch

import irpe

ROOT = str(Path(irpe.__file__).parent)


def walk(run):
    """Returns the functions of the library that are called, as (file, name)."""
    calls = []

    def record(frame, event, _):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and file.startswith(ROOT) and not name.startswith("<"):
            calls.append((file, name))

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls


def test_an_attention_runs_few_functions():
    attention, x = irpe.RPEAttention(48, 2, "product-contextual-k", 1), torch.randn(2, 197, 48)
    attention.rpe.impl = "fast"  # on every machine the same
    attention(x, (14, 14))  # imports and caches
    calls = walk(lambda: attention(x, (14, 14)))
    assert 20 < len(calls) <= 50, calls
    assert len({file for file, _ in calls}) <= 14, calls
