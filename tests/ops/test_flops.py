"""Operations as `torch.utils.flop_counter` counts them, against the closed formulas."""

import pytest
import torch
from cases import Case
from torch.utils.flop_counter import FlopCounterMode

from irpe import Clip, RPESpec


def count(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("method", "targets", "rows"),
    [("product", "k", 50), ("product", "qk", 100), ("product", "qkv", 150), ("cross", "k", 30)],
)
def test_forward_counts_attention_and_one_product_per_used_row(method, targets, rows):
    case = Case(RPESpec(method, targets=targets), (7, 8), 1, batch=2, heads=3, dim=8)
    tokens = 2 * 3 * 57 * 8
    used = sum(m.num_used_buckets for m in case.maps) * len(targets)
    assert used == rows
    with torch.no_grad():
        expected = 2 * tokens * (2 * 57 + used)
        assert count(lambda: case.attention("blockwise")) == expected
        assert count(lambda: case.attention("plain")) == expected
        assert count(lambda: case.attention("whole")) == expected


def test_direct_form_counts_the_pairs():
    case = Case(RPESpec(index=Clip(20)), (3, 5), 1, batch=1, heads=2, dim=8)
    assert case.maps[0].num_used_buckets == 46
    with torch.no_grad():
        assert count(lambda: case.attention("blockwise")) == 2 * (2 * 16 * 8) * (2 * 16 + 16)


def test_bias_adds_nothing():
    case = Case(RPESpec(mode="bias"), (7, 8), 1, batch=2, heads=3, dim=8)
    with torch.no_grad():
        assert count(lambda: case.attention("blockwise")) == 2 * (2 * 3 * 57 * 8) * (2 * 57)


@pytest.mark.parametrize("way", ["whole", "blockwise", "blockwise, small blocks"])
def test_backward_counts_two_products_per_table_and_what_it_repeats(way, use_way):
    case = Case(RPESpec(targets="qkv"), (7, 8), 1, batch=2, heads=3, dim=2)
    out = case.attention(use_way(way))
    tokens, used = 2 * 3 * 57 * 2, case.maps[0].num_used_buckets
    repeated = 57 + 2 * used if way.endswith("blocks") else 0  # where no weights were kept
    flops = count(lambda: torch.autograd.grad(out, case.leaves(), case.grad_out))
    assert flops == 2 * tokens * (4 * 57 + 6 * used + repeated)
