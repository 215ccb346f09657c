import itertools

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irpe import Clip, Piecewise
from irpe.core.methods import METHODS


@pytest.mark.parametrize("method", oracles.METHODS)
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-12, 12), min_size=1, max_size=3), st.sampled_from([1.9, 3.0, 20.0]))
def test_methods_are_equations_19_to_25(method, offset, ratio):
    index = Piecewise.from_ratio(ratio)
    ids = METHODS[method].ids(torch.tensor(offset), index)
    expected = oracles.buckets_of_offset(
        method, offset, lambda x: oracles.piecewise(x, ratio, 2 * ratio, 8 * ratio), index.max_index
    )
    assert tuple(i.item() for i in ids) == expected
    for i, rows in zip(ids, METHODS[method].num_buckets(index.max_index, len(offset)), strict=True):
        assert 0 <= i < rows


def test_methods_keep_the_leading_shape():
    offsets = torch.zeros(4, 3, 2, dtype=torch.long)
    for method in METHODS.values():
        assert all(ids.shape == (4, 3) for ids in method.ids(offsets, Clip(3)))


def test_euclidean_does_not_round_the_distance_first():
    index = Piecewise(1, 40, 50)
    (ids,) = METHODS["euclidean"].ids(torch.tensor([1, 2]), index)
    assert ids.item() == oracles.piecewise(5**0.5, 1, 40, 50) == 9
    assert oracles.piecewise(round(5**0.5), 1, 40, 50) == 8


def test_real_offsets_have_euclidean_cross_and_product_buckets():
    offsets = torch.tensor([0.4, -1.6])
    assert METHODS["euclidean"].ids(offsets, Clip(3))[0].item() == 2
    assert [i.item() for i in METHODS["cross"].ids(offsets, Clip(3))] == [3, 1]
    assert METHODS["product"].ids(offsets, Clip(3))[0].item() == 3 * 7 + 1


def test_quantization_refuses_real_offsets_and_names_euclidean():
    with pytest.raises(TypeError, match="euclidean"):
        METHODS["quantization"].ids(torch.tensor([0.5, 1.0]), Clip(3))


def test_quantization_ranks_all_sums_of_squares():
    offsets = torch.tensor([[0, 0], [0, 1], [1, 1], [0, 2], [1, 2], [2, 2], [0, 3], [1, 3]])
    (ids,) = METHODS["quantization"].ids(offsets, Clip(100))
    assert ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_quantization_of_one_and_three_axes():
    (one,) = METHODS["quantization"].ids(torch.tensor([[-4], [3], [10]]), Clip(100))
    assert one.tolist() == [4, 3, 10]
    offsets = torch.tensor(list(itertools.product(range(4), repeat=3)))
    (three,) = METHODS["quantization"].ids(offsets, Clip(100))
    expected = [oracles.rank(int(o.square().sum()), 3) for o in offsets]
    assert three.tolist() == expected


def test_quantization_of_far_offsets_takes_no_table_of_their_size():
    (ids,) = METHODS["quantization"].ids(torch.tensor([10**8, 0]), Piecewise.from_ratio(29))
    assert ids.item() == 58


def test_methods_take_no_offsets_at_all():
    for method in METHODS.values():
        assert all(ids.shape == (0,) for ids in method.ids(torch.zeros(0, 2).long(), Clip(3)))
