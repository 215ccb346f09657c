import pytest
import torch

from irpe.ops.gather import add_bucket_sum_, bias_sum, bucket_sum, gather, gather_bias

IDS = torch.tensor([[0, 2, 1, 0, 0], [1, 1, 2, 0, 2], [2, 2, 2, 2, 2]], dtype=torch.uint8)
OWNERS = {"query": 3, "key": 5, "nobody": 1}
BATCHES = [(), (4,), (2, 3)]


def owner_of(owner, i, j):
    return {"query": i, "key": j, "nobody": 0}[owner]


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("batch", BATCHES)
def test_gather_takes_the_bucket_of_the_owner(owner, batch):
    values = torch.randn(*batch, OWNERS[owner], 3)
    pairs = gather(values, IDS, owner)
    assert pairs.shape == (*batch, 3, 5)
    for i in range(3):
        for j in range(5):
            expected = values[..., owner_of(owner, i, j), int(IDS[i, j])]
            assert torch.equal(pairs[..., i, j], expected)


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("batch", BATCHES)
def test_bucket_sum_adds_the_pairs_of_a_bucket(owner, batch):
    pairs = torch.randn(*batch, 3, 5, dtype=torch.float64)
    expected = torch.zeros(*batch, OWNERS[owner], 3, dtype=torch.float64)
    for i in range(3):
        for j in range(5):
            expected[..., owner_of(owner, i, j), int(IDS[i, j])] += pairs[..., i, j]
    torch.testing.assert_close(bucket_sum(pairs, IDS, 3, owner), expected)


@pytest.mark.parametrize("owner", OWNERS)
def test_they_are_adjoint(owner):
    values = torch.randn(2, OWNERS[owner], 3, dtype=torch.float64)
    pairs = torch.randn(2, 3, 5, dtype=torch.float64)
    left = (gather(values, IDS, owner) * pairs).sum()
    right = (values * bucket_sum(pairs, IDS, 3, owner)).sum()
    torch.testing.assert_close(left, right)


def test_bfloat16_is_summed_in_float32():
    ones = torch.ones(1, 1, 2000, dtype=torch.bfloat16)
    ids = torch.zeros(1, 2000, dtype=torch.int16)
    assert bucket_sum(ones, ids, 1, "query").item() == 2000  # a bfloat16 sum sticks at 256


def test_many_keys_with_many_buckets_do_not_overflow_their_ids():
    ids = torch.full((1, 3000), 19, dtype=torch.uint8)
    values = torch.arange(60000.0).view(3000, 20)
    assert torch.equal(gather(values, ids, "key")[0], values[:, 19])


@pytest.mark.parametrize("owner", OWNERS)
def test_their_gradients_are_each_other(owner):
    values = torch.randn(2, OWNERS[owner], 3, dtype=torch.float64, requires_grad=True)
    pairs = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(gather(values, IDS, owner), values, pairs.detach())
    torch.testing.assert_close(found, bucket_sum(pairs.detach(), IDS, 3, owner))
    (found,) = torch.autograd.grad(bucket_sum(pairs, IDS, 3, owner), pairs, values.detach())
    torch.testing.assert_close(found, gather(values.detach(), IDS, owner))


@pytest.mark.parametrize("owner", ["query", "key"])
def test_sums_are_added_in_place(owner):
    pairs, sums = torch.randn(2, 3, 5), torch.ones(2, OWNERS[owner], 3)
    add_bucket_sum_(sums, pairs, IDS, owner)
    torch.testing.assert_close(sums, 1 + bucket_sum(pairs, IDS, 3, owner))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("of_each_image", [False, True])
def test_scalars_of_a_table_and_their_sums(heads, of_each_image):
    ids = torch.stack([IDS, IDS.flip(0)])[:, None] if of_each_image else IDS
    table = torch.randn(heads, 3, dtype=torch.float64)
    pairs = torch.randn(2, 2, 3, 5, dtype=torch.float64)  # images, heads, query, key
    scores, sums = gather_bias(table, ids), torch.zeros_like(table)
    for image in range(2):
        for head in range(2):
            for i in range(3):
                for j in range(5):
                    bucket = int(ids.expand(2, 1, 3, 5)[image, 0, i, j])
                    row = table[head if heads == 2 else 0]
                    found = scores.expand(2, 2, 3, 5)[image, head, i, j]
                    assert found == row[bucket]
                    sums[head if heads == 2 else 0, bucket] += pairs[image, head, i, j]
    torch.testing.assert_close(bias_sum(pairs, ids, table), sums)
