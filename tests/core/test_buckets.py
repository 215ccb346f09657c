import oracles
import pytest
import torch

from irpe import BucketMap, Clip, Grid, Piecewise, RPESpec, bucket_maps


@pytest.mark.parametrize("grid", oracles.GRIDS)
@pytest.mark.parametrize("prefix", oracles.PREFIXES)
@pytest.mark.parametrize("method", oracles.METHODS)
def test_maps_equal_the_oracle(method, grid, prefix):
    ratio = oracles.RATIOS[method]
    index = Piecewise.from_ratio(ratio)
    expected, rows = oracles.bucket_ids(
        method,
        grid,
        prefix,
        lambda x: oracles.piecewise(x, ratio, 2 * ratio, 8 * ratio),
        index.max_index,
    )
    maps = bucket_maps(RPESpec(method), grid, prefix)
    assert [m.num_buckets for m in maps] == rows
    for bucket_map, ids in zip(maps, expected, strict=True):
        assert torch.equal(bucket_map.ids.long(), torch.tensor(ids))


def test_clip_maps_equal_the_oracle():
    expected, _ = oracles.bucket_ids("product", (3, 5), 1, lambda x: oracles.clip(x, 2), 2)
    (bucket_map,) = bucket_maps("product-contextual-k@clip2", (3, 5), 1)
    assert bucket_map.ids.tolist() == expected[0]


@pytest.mark.parametrize(
    ("method", "used", "rows"),
    [
        ("euclidean", 20, 42),
        ("quantization", 51, 60),
        ("cross", 56, 164),
        ("product", 50, 50),
    ],
)
def test_used_buckets_are_the_papers(method, used, rows):
    maps = bucket_maps(RPESpec(method), (14, 14), 1)
    assert sum(m.num_used_buckets for m in maps) == used
    assert sum(m.num_buckets for m in maps) == rows


@pytest.mark.parametrize("method", oracles.METHODS)
def test_compact_ids_count_the_used_rows(method):
    for bucket_map in bucket_maps(RPESpec(method), (7, 28), 1):
        assert torch.equal(bucket_map.used_rows, bucket_map.ids.long().unique())
        renumbered = bucket_map.used_rows[bucket_map.compact_ids.long()]
        assert torch.equal(renumbered, bucket_map.ids.long())


@pytest.mark.parametrize("method", oracles.METHODS)
def test_transposing_the_grid_swaps_the_axes(method):
    spec = RPESpec(method, index=Clip(3))
    tall, wide = bucket_maps(spec, (5, 3)), bucket_maps(spec, (3, 5))
    order = torch.arange(15).view(5, 3).T.flatten()  # the tokens of 3x5 as tokens of 5x3
    moved = [m.ids[order][:, order].long() for m in tall]
    if method == "cross":
        moved.reverse()
    if method == "product":
        row, column = moved[0] // 7, moved[0] % 7
        moved = [column * 7 + row]
    for left, right in zip(moved, wide, strict=True):
        assert torch.equal(left, right.ids.long())


@pytest.mark.parametrize("method", oracles.METHODS)
def test_moving_within_the_grid_changes_nothing(method):
    grid = Grid((7, 28))
    for bucket_map in bucket_maps(RPESpec(method), grid):
        ids = bucket_map.ids.view(7, 28, 7, 28)
        assert torch.equal(ids[1:, 2:, 1:, 2:], ids[:-1, :-2, :-1, :-2])


def test_a_larger_grid_agrees_on_the_pairs_that_both_have():
    for method in oracles.METHODS:
        small, large = bucket_maps(RPESpec(method), (3, 5)), bucket_maps(RPESpec(method), (7, 28))
        for left, right in zip(small, large, strict=True):
            corner = right.ids.view(7, 28, 7, 28)[:3, :5, :3, :5].reshape(15, 15)
            assert torch.equal(left.ids, corner)


def test_equal_arguments_share_one_map_and_unequal_ones_do_not():
    maps = bucket_maps("product-contextual-k", (3, 5), 1)
    assert bucket_maps(RPESpec(targets="qkv", shared_heads=False), [3, 5], 1) is maps
    others = [
        bucket_maps("product-contextual-k@2", (3, 5), 1),
        bucket_maps("product-contextual-k@clip3", (3, 5), 1),
        bucket_maps("cross-contextual-k@1.9", (3, 5), 1),
        bucket_maps("product-contextual-k", (5, 3), 1),
        bucket_maps("product-contextual-k", (3, 5), 0),
        bucket_maps("product-contextual-k", (3, 5), 1, device="meta"),
    ]
    assert all(other is not maps for other in others)
    assert torch.equal(maps[0].ids, bucket_maps("product-contextual-k", (3, 5), 1)[0].ids)


def test_a_map_of_64_by_64_takes_a_byte_a_pair():
    for method in oracles.METHODS:
        for m in bucket_maps(RPESpec(method), (64, 64)):
            tensors = [x for x in vars(m).values() if isinstance(x, torch.Tensor)]
            held = {x.data_ptr(): x.nbytes for x in tensors}
            assert sum(held.values()) <= 1.001 * 64**4


def test_tables_of_many_rows_get_wide_ids():
    (bucket_map,) = bucket_maps("product-contextual-k@clip100", (150, 1), 1)
    assert bucket_map.num_buckets == 201**2 + 1
    assert bucket_map.ids.max() == 201**2


def test_maps_made_under_other_modes_are_plain_tensors():
    with torch.inference_mode(), torch.device("meta"):
        (bucket_map,) = bucket_maps("product-contextual-k", (4, 31))  # made by no other test
    assert not bucket_map.compact_ids.is_inference()
    assert bucket_map.compact_ids.device.type == "cpu"


@pytest.mark.parametrize("count", [-1, 1.0, True, None])
def test_prefix_count_must_be_a_count(count):
    with pytest.raises(ValueError, match=r"num_prefix_tokens = .* from 0"):
        bucket_maps("product-contextual-k", (3, 5), count)


def test_bad_grids_and_specs_are_refused():
    with pytest.raises(ValueError, match="one positive integer per axis"):
        bucket_maps("product-contextual-k", (3, 0))
    with pytest.raises(ValueError, match=r"\(2.5, 3\)"):
        bucket_maps("product-contextual-k", (2.5, 3))
    with pytest.raises(TypeError, match="axis lengths"):
        bucket_maps("product-contextual-k", 15)
    with pytest.raises(ValueError, match="METHOD-MODE-TARGETS"):
        bucket_maps("product", (3, 5))


def test_a_map_of_ones_own_is_checked():
    own = BucketMap(torch.tensor([[0, 2], [2, 0]]), num_buckets=4)
    assert own.used_rows.tolist() == [0, 2]
    assert own.compact_ids.tolist() == [[0, 1], [1, 0]]
    with pytest.raises(ValueError, match="0 to 1"):
        BucketMap(torch.tensor([[0, 2], [2, 0]]), num_buckets=2)
    with pytest.raises(ValueError, match="0 to 1"):
        BucketMap(torch.tensor([[0, -1], [1, 0]]), num_buckets=2)
    for wrong in (torch.zeros(3), torch.zeros(3).long(), torch.zeros(3, 3).bool()):
        with pytest.raises(ValueError, match=r"\(query, key\) or \(batch, query, key\)"):
            BucketMap(wrong, num_buckets=2)


def test_a_map_of_each_image():
    own = BucketMap(torch.tensor([[[0, 2]], [[2, 5]]]), num_buckets=300)
    assert own.used_rows.tolist() == [0, 2, 5]
    assert own.compact_ids.tolist() == [[[0, 1]], [[1, 2]]]
    assert own.ids.tolist() == [[[0, 2]], [[2, 5]]]
    assert repr(own) == "BucketMap(2x1x2 pairs, 3 of 300 rows used)"


@pytest.mark.parametrize(
    ("rows", "dtype"), [(256, torch.uint8), (257, torch.int16), (40000, torch.int32)]
)
def test_ids_take_the_smallest_type_that_counts_the_rows_in_use(rows, dtype):
    ids = torch.arange(rows).view(1, rows)
    own = BucketMap(ids, num_buckets=rows)
    assert own.compact_ids.dtype == dtype
    assert torch.equal(own.ids.long(), ids)


def test_grids_that_no_machine_holds_are_refused_with_their_size():
    with pytest.raises(ValueError, match=r"1000000x1000000 .*any machine"):
        bucket_maps("product-contextual-k", (1_000_000, 1_000_000))


@pytest.mark.parametrize("ratio", ["1e9", "1e18", "1e300"])
@pytest.mark.parametrize("method", ["euclidean", "quantization", "cross", "product"])
def test_tables_that_no_machine_holds_are_refused_with_their_size(method, ratio):
    if (method, ratio) in [("euclidean", "1e9"), ("quantization", "1e9"), ("cross", "1e9")]:
        assert bucket_maps(f"{method}-bias-k@{ratio}", (3, 5))  # 15 GiB
        return
    with pytest.raises(ValueError, match=r"tables of .* any machine.* smaller index"):
        bucket_maps(f"{method}-bias-k@{ratio}", (3, 5))


@pytest.mark.parametrize("grid", [None, "34", 12, {3, 5}])
def test_what_is_not_a_grid_says_so(grid):
    with pytest.raises(TypeError, match="is not a sequence of axis lengths"):
        bucket_maps("product-contextual-k", grid)
