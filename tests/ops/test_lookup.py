import pytest
import torch

from irpe.ops.lookup import bucket_sum, lookup

IDS = torch.tensor([[0, 2, 1, 0, 0], [1, 1, 2, 0, 2], [2, 2, 2, 2, 2]], dtype=torch.int16)
OWNERS = {"query": 3, "key": 5, "nobody": 1}
BATCHES = [(), (4,), (2, 3)]


def owner_of(owner, i, j):
    return {"query": i, "key": j, "nobody": 0}[owner]


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("batch", BATCHES)
def test_lookup_takes_the_bucket_of_the_owner(owner, batch):
    values = torch.randn(*batch, OWNERS[owner], 3)
    pairs = lookup(values, IDS, owner)
    assert pairs.shape == (*batch, 3, 5)
    for i in range(3):
        for j in range(5):
            expected = values[..., owner_of(owner, i, j), IDS[i, j]]
            assert torch.equal(pairs[..., i, j], expected)


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("batch", BATCHES)
def test_bucket_sum_adds_the_pairs_of_a_bucket(owner, batch):
    pairs = torch.randn(*batch, 3, 5, dtype=torch.float64)
    expected = torch.zeros(*batch, OWNERS[owner], 3, dtype=torch.float64)
    for i in range(3):
        for j in range(5):
            expected[..., owner_of(owner, i, j), IDS[i, j]] += pairs[..., i, j]
    torch.testing.assert_close(bucket_sum(pairs, IDS, 3, owner), expected)


@pytest.mark.parametrize("owner", OWNERS)
def test_they_are_adjoint(owner):
    values = torch.randn(2, OWNERS[owner], 3, dtype=torch.float64)
    pairs = torch.randn(2, 3, 5, dtype=torch.float64)
    left = (lookup(values, IDS, owner) * pairs).sum()
    right = (values * bucket_sum(pairs, IDS, 3, owner)).sum()
    torch.testing.assert_close(left, right)


def test_bfloat16_is_summed_in_float32():
    ones = torch.ones(1, 1, 2000, dtype=torch.bfloat16)
    ids = torch.zeros(1, 2000, dtype=torch.int16)
    assert bucket_sum(ones, ids, 1, "query").item() == 2000  # a bfloat16 sum sticks at 256


def test_many_keys_with_many_buckets_do_not_overflow_their_ids():
    ids = torch.full((1, 3000), 19, dtype=torch.int16)
    values = torch.arange(60000.0).view(3000, 20)
    assert torch.equal(lookup(values, ids, "key")[0], values[:, 19])


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_operators_pass_torchs_own_check(owner):
    values = torch.randn(2, OWNERS[owner], 3, dtype=torch.float64, requires_grad=True)
    pairs = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(lookup, (values, IDS, owner))
    torch.library.opcheck(bucket_sum, (pairs, IDS, 3, owner))
    assert torch.autograd.gradcheck(lambda x: lookup(x, IDS, owner), values)
    assert torch.autograd.gradcheck(lambda x: bucket_sum(x, IDS, 3, owner), pairs)
