"""Decomposed encodings of hosts as tables of ours, against loops over their definition."""

import pytest
import torch
from torch import nn

import irpe
from irpe.adapters.offset_vectors import check_convertible, convert_decomposed

GRID, DIM = (3, 5), 8


class Attention(nn.Module):
    """What SAM and ViTDet learn: a vector for each offset of each axis."""

    def __init__(self, spec):
        super().__init__()
        torch.manual_seed(0)
        self.rel_pos_h = nn.Parameter(torch.randn(2 * GRID[0] - 1, DIM))
        self.rel_pos_w = nn.Parameter(torch.randn(2 * GRID[1] - 1, DIM))
        self.rpe = irpe.RelativePositionEncoding(spec, 2, DIM)


NAMES = ("rel_pos_h", "rel_pos_w")


def own_scores(attention, q):
    """What such a host adds to its scaled scores: batch, heads, queries, keys."""
    places = [(row, column) for row in range(GRID[0]) for column in range(GRID[1])]
    out = torch.zeros(*q.shape[:3], len(places))
    for i, (row, column) in enumerate(places):
        for j, (key_row, key_column) in enumerate(places):
            r = attention.rel_pos_h[row - key_row + GRID[0] - 1]
            r = r + attention.rel_pos_w[column - key_column + GRID[1] - 1]
            out[..., i, j] = q[..., i, :] @ r
    return out


SPECS = ["k@clip4", "k", "k@clip9", "qkv@clip4+unshared"]


@pytest.mark.parametrize("text", SPECS)
def test_tables_give_what_the_vectors_gave(text):
    attention = Attention(f"cross-contextual-{text}")
    q, k = torch.randn(2, 2, 2, 15, DIM).unbind(0)
    expected = own_scores(attention, q).detach()
    convert_decomposed(attention, NAMES, attention.rpe)
    scores = attention.rpe.scores(q, k, grid=GRID) * DIM**-0.5
    torch.testing.assert_close(scores, expected)


def test_offsets_beyond_the_hosts_repeat_its_outermost():
    attention = Attention("cross-contextual-k@clip9")
    outermost = attention.rel_pos_w[[0, -1]].detach() * DIM**0.5
    convert_decomposed(attention, NAMES, attention.rpe)
    table = attention.rpe.key_tables[1][0]
    torch.testing.assert_close(table[:6], outermost[:1].expand(6, DIM))
    torch.testing.assert_close(table[-6:], outermost[1:].expand(6, DIM))


REFUSED = [
    "product-contextual-k@clip4", "cross-bias-k@clip4", "cross-contextual-v@clip4",
    "cross-contextual-k@clip3", "cross-contextual-qk@clip4+tied", "sasa",
]  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_encodings_that_cannot_hold_the_vectors_are_refused(text):
    attention = Attention(text)
    with pytest.raises(ValueError, match=r"up to 4 rows or columns: .*cross-contextual-k@clip4'"):
        convert_decomposed(attention, NAMES, attention.rpe)
    check_convertible(irpe.RPESpec.parse("cross-contextual-k@clip4"), GRID)
