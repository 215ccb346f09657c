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
        assert count(lambda: case.attention("fast")) == expected
        assert count(lambda: case.attention("plain")) == expected


def test_direct_form_counts_the_pairs():
    case = Case(RPESpec(index=Clip(20)), (3, 5), 1, batch=1, heads=2, dim=8)
    assert case.maps[0].num_used_buckets == 46
    with torch.no_grad():
        assert count(lambda: case.attention("fast")) == 2 * (2 * 16 * 8) * (2 * 16 + 16)


def test_bias_adds_nothing():
    case = Case(RPESpec(mode="bias"), (7, 8), 1, batch=2, heads=3, dim=8)
    with torch.no_grad():
        assert count(lambda: case.attention("fast")) == 2 * (2 * 3 * 57 * 8) * (2 * 57)


def test_kernels_count_what_they_compute_again():
    def fake(*shape):
        return torch.empty(shape, device="meta")

    q, k = fake(2, 3, 57, 8), fake(2, 3, 40, 8)
    table, ids = fake(1, 10, 8), torch.empty(57, 40, device="meta", dtype=torch.uint8)
    rest = (None, None, None, [table], [table], [table], [], [ids], [0], 0.5, 0.0, None)
    pairs, of_keys, of_queries = (2 * 2 * 3 * 8 * n for n in (57 * 40, 40 * 10, 57 * 10))
    forward = torch.ops.irpe.triton.default
    assert count(lambda: forward(q, k, k, *rest, True)) == 3 * pairs + of_keys + 2 * of_queries
    backward = torch.ops.irpe.triton_backward.default
    kept = [q, fake(2, 2, 3, 57), fake(2, 3, 10, 57)]
    flops = count(lambda: backward(q, kept, False, q, k, k, *rest))
    assert flops == 7 * pairs + 3 * of_keys + 5 * of_queries


@pytest.mark.parametrize("way", ["fast", "fast, small slices"])
def test_backward_counts_two_products_per_table_and_what_it_repeats(way, use_way):
    case = Case(RPESpec(targets="qkv"), (7, 8), 1, batch=2, heads=3, dim=2)
    out = case.attention(use_way(way))
    tokens, used = 2 * 3 * 57 * 2, case.maps[0].num_used_buckets
    repeated = 57 + 2 * used if way.endswith("slices") else 0  # where no weights were kept
    flops = count(lambda: torch.autograd.grad(out, case.leaves(), case.grad_out))
    assert flops == 2 * tokens * (4 * 57 + 6 * used + repeated)
