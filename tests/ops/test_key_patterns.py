"""How the keys' buckets repeat: what is found, and that expand and collect are adjoint."""

import gc

import oracles
import pytest
import torch

from irpe import BucketMap, Clip, RPESpec, bucket_maps
from irpe.ops import key_patterns
from irpe.ops.key_patterns import ByAxis, Dense, RepeatedRows, key_pattern, query_axis

FOUND = [
    ("product-contextual-k@clip1", (12, 16), 0, RepeatedRows),
    ("product-contextual-k@clip1", (24, 17), 2, RepeatedRows),
    ("product-contextual-k@clip2", (20, 16), 0, RepeatedRows),
    ("cross-contextual-k", (3, 5), 1, ByAxis),
    ("cross-contextual-k", (7, 28), 0, ByAxis),
    ("cross-contextual-k@2", (2, 3, 4), 5, ByAxis),
    ("product-contextual-k", (3, 5), 1, Dense),
    ("euclidean-contextual-k", (64, 64), 0, Dense),
]


def patterns(spec, grid, prefix):
    return [(m, key_pattern(m.compact_ids, m.grid)) for m in bucket_maps(spec, grid, prefix)]


@pytest.mark.parametrize(("spec", "grid", "prefix", "kind"), FOUND)
def test_a_pattern_says_what_the_ids_say(spec, grid, prefix, kind):
    for bucket_map, pattern in patterns(spec, grid, prefix):
        assert isinstance(pattern, kind)
        ids, expanded = bucket_map.compact_ids, torch.empty(bucket_map.compact_ids.shape)
        pattern.expand(pattern.ids.float(), expanded)
        assert torch.equal(expanded, ids.float())
        some = slice(1, 7)
        expanded = torch.zeros(6, ids.shape[1])
        pattern.at(some).add(pattern.at(some).ids.float(), expanded)
        assert torch.equal(expanded, ids[some].float())


@pytest.mark.parametrize(("spec", "grid", "prefix", "kind"), FOUND[:-1])
def test_collect_is_the_adjoint_of_expand(spec, grid, prefix, kind):
    for bucket_map, pattern in patterns(spec, grid, prefix):
        tokens = bucket_map.compact_ids.shape[0]
        narrow = torch.randn(2, 3, *pattern.ids.shape, dtype=torch.float64)
        scores = torch.randn(2, 3, tokens, tokens, dtype=torch.float64)
        expanded = torch.empty_like(scores)
        pattern.expand(narrow, expanded)
        left, right = (expanded * scores).sum(), (narrow * pattern.collect(scores)).sum()
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize(("grid", "prefix"), [((3, 5), 1), ((7, 28), 0), ((2, 3, 4), 5)])
def test_the_queries_of_cross_depend_on_one_coordinate(grid, prefix):
    for bucket_map in bucket_maps("cross-contextual-q", grid, prefix):
        pattern = query_axis(bucket_map.compact_ids, bucket_map.grid)
        by_query = pattern.ids[:, pattern.coordinates()].mT  # the ids of each query's coordinate
        assert torch.equal(by_query, bucket_map.compact_ids)


def test_joined_axes_are_the_sum_of_both():
    (row, column) = (pattern for _, pattern in patterns("cross-contextual-k@2", (3, 5), 1))
    both = key_patterns.join_axes([row, column], [9, 9])
    narrow, out = torch.randn(1, 1, *both.ids.shape), torch.empty(1, 1, 16, 16)
    both.expand(narrow, out)
    first, second = narrow.split([row.ids.shape[1], column.ids.shape[1]], dim=-1)
    expected = torch.zeros_like(out)
    row.add(first, expected)
    column.add(second, expected)
    torch.testing.assert_close(out, expected)
    assert torch.equal(both.ids[:, : row.ids.shape[1]], row.ids.int())
    assert torch.equal(both.ids[:, row.ids.shape[1] :], column.ids.int() + 9)


def test_where_distinct_rows_are_worth_a_pattern():
    def has_rows(spec, grid, prefix=0):
        return [isinstance(pattern, RepeatedRows) for _, pattern in patterns(spec, grid, prefix)]

    assert has_rows("product-contextual-k", (28, 16)) == [True]
    assert has_rows("product-contextual-k", (27, 16)) == [False]
    assert has_rows("product-contextual-k", (28, 15)) == [False]
    assert has_rows("product-contextual-k", (55, 16), 1) == [False]
    assert has_rows("product-contextual-k", (56, 16), 1) == [True]


def test_a_pattern_is_found_in_the_ids_not_in_the_method():
    ids = bucket_maps(RPESpec("cross", index=Clip(2)), (4, 5))[1].ids
    own = BucketMap(ids, 5, grid=(4, 5))
    assert isinstance(key_pattern(own.compact_ids, own.grid), ByAxis)
    assert isinstance(key_pattern(own.compact_ids, None), Dense)
    assert isinstance(key_pattern(own.compact_ids, (5, 4)), Dense)  # for another grid it is none
    ids[3, 7] = (ids[3, 7] + 1) % 5
    changed = BucketMap(ids, 5, grid=(4, 5))
    assert isinstance(key_pattern(changed.compact_ids, changed.grid), Dense)


def test_patterns_are_found_once_and_live_as_long_as_their_ids():
    own = BucketMap(bucket_maps("cross-contextual-k", (3, 5))[0].ids, 81, grid=(3, 5))
    first = key_pattern(own.compact_ids, own.grid)
    assert key_pattern(own.compact_ids, own.grid) is first
    count = len(key_patterns._found)
    del own, first
    gc.collect()
    assert len(key_patterns._found) < count


def test_every_small_grid_has_a_pattern_that_is_right():
    for grid in oracles.SMALL_GRIDS:
        for prefix in oracles.PREFIXES:
            for method in oracles.METHODS:
                for bucket_map, pattern in patterns(RPESpec(method), grid, prefix):
                    out = torch.empty(bucket_map.compact_ids.shape)
                    pattern.expand(pattern.ids.float(), out)
                    assert torch.equal(out, bucket_map.compact_ids.float())
