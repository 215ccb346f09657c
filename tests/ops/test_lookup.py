import pytest
import torch

from irpe.ops.lookup import bucket_sum, lookup, place_by_key, place_by_query

IDS = torch.tensor([[0, 2, 1, 0, 0], [1, 1, 2, 0, 2], [2, 2, 2, 2, 2]], dtype=torch.int16)


@pytest.mark.parametrize("batch", [(), (4,), (2, 3)])
def test_lookup_by_query_and_by_key(batch):
    by_query, by_key = torch.randn(*batch, 3, 3), torch.randn(*batch, 5, 3)
    left = lookup(by_query.flatten(-2), place_by_query(IDS, 3))
    right = lookup(by_key.flatten(-2), place_by_key(IDS, 3))
    for i in range(3):
        for j in range(5):
            assert torch.equal(left[..., i, j], by_query[..., i, IDS[i, j]])
            assert torch.equal(right[..., i, j], by_key[..., j, IDS[i, j]])


@pytest.mark.parametrize("batch", [(), (4,), (2, 3)])
def test_bucket_sum_adds_the_pairs_of_a_bucket(batch):
    pairs = torch.randn(*batch, 3, 5, dtype=torch.float64)
    sums = bucket_sum(pairs, place_by_query(IDS, 3), 9).unflatten(-1, (3, 3))
    for i in range(3):
        for bucket in range(3):
            expected = pairs[..., i, IDS[i] == bucket].sum(-1)
            torch.testing.assert_close(sums[..., i, bucket], expected)


def test_they_are_adjoint():
    places = place_by_query(IDS, 3)
    values, pairs = torch.randn(2, 9).double(), torch.randn(2, 3, 5).double()
    left = (lookup(values, places) * pairs).sum()
    right = (values * bucket_sum(pairs, places, 9)).sum()
    torch.testing.assert_close(left, right)


def test_bfloat16_is_summed_in_float32():
    ones = torch.ones(1, 1, 2000, dtype=torch.bfloat16)
    ids = torch.zeros(1, 2000, dtype=torch.int16)
    assert bucket_sum(ones, ids, 1).item() == 2000  # a bfloat16 sum sticks at 256


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_operators_pass_torchs_own_check():
    places = place_by_query(IDS, 3)
    values = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    pairs = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(lookup, (values, places))
    torch.library.opcheck(bucket_sum, (pairs, places, 9))
    assert torch.autograd.gradcheck(lambda x: lookup(x, places), values)
    assert torch.autograd.gradcheck(lambda x: bucket_sum(x, places, 9), pairs)
