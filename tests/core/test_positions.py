import gc
import itertools
import math
import weakref

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irpe import Clip, Grid, Piecewise, Points, PooledGrid, Positions, RPESpec, Subset, bucket_maps
from irpe.core import buckets

REAL_METHODS = ["euclidean", "cross", "product"]
PREFIXES = st.tuples(st.integers(0, 2), st.integers(0, 2))
SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3)
FRACTIONS = st.integers(-80, 80).map(lambda n: n / 8)  # sums and differences of these are exact


def loops(method, queries, keys, prefixes):
    """The oracle with the method's default index."""
    ratio = oracles.RATIOS[method]

    def index(x):
        return oracles.piecewise(x, ratio, 2 * ratio, 8 * ratio)

    return oracles.pair_ids(method, queries, keys, prefixes, index, math.floor(2 * ratio))


def assert_equals_loops(method, positions, queries, keys):
    maps = bucket_maps(RPESpec(method), positions)
    expected, rows = loops(method, queries, keys, positions.prefixes)
    assert [m.num_buckets for m in maps] == rows
    for bucket_map, ids in zip(maps, expected, strict=True):
        assert bucket_map.ids.tolist() == ids


def row_major(shape):
    return list(itertools.product(*map(range, shape)))


@pytest.mark.parametrize("method", oracles.METHODS)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_the_map_of_a_subset_is_the_subset_of_the_map(method, data):
    shape = data.draw(SHAPES)
    tokens = data.draw(st.permutations(range(math.prod(shape))))
    queries = tokens[: data.draw(st.integers(1, len(tokens)))]
    before = data.draw(PREFIXES)
    positions = Positions(Subset(Grid.of(shape), queries), shape, before)
    rows = [0] * before[0] + [1 + token for token in queries]
    columns = [0] * before[1] + [1 + token for token in range(math.prod(shape))]
    whole = bucket_maps(RPESpec(method), shape, 1)
    for part, full in zip(bucket_maps(RPESpec(method), positions), whole, strict=True):
        if not any(before):
            assert part.num_buckets == full.num_buckets - 1
        assert torch.equal(part.ids, full.ids[rows][:, columns])


@pytest.mark.parametrize("method", oracles.METHODS)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_unequal_grids_equal_the_loops(method, data):
    ndim = data.draw(st.integers(1, 3))
    sizes = st.lists(st.integers(1, 4), min_size=ndim, max_size=ndim)
    queries, keys, before = data.draw(sizes), data.draw(sizes), data.draw(PREFIXES)
    positions = Positions(queries, keys, before)
    assert_equals_loops(method, positions, row_major(queries), row_major(keys))


@pytest.mark.parametrize("method", REAL_METHODS)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_real_coordinates_equal_the_loops(method, data):
    points = st.lists(st.tuples(FRACTIONS, FRACTIONS), min_size=1, max_size=6)
    queries, keys, before = data.draw(points), data.draw(points), data.draw(PREFIXES)
    sides = (Points(torch.tensor(points)) for points in (queries, keys))
    assert_equals_loops(method, Positions(*sides, before), queries, keys)


@pytest.mark.parametrize("method", REAL_METHODS)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_moving_all_points_changes_nothing(method, data):
    points = torch.tensor(data.draw(st.lists(st.tuples(FRACTIONS, FRACTIONS), min_size=2)))
    shift = torch.tensor(data.draw(st.tuples(FRACTIONS, FRACTIONS)))
    before, after = (
        bucket_maps(RPESpec(method), Positions(Points(x))) for x in (points, points + shift)
    )
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.ids, new.ids)


@pytest.mark.parametrize("method", REAL_METHODS)
def test_pooled_keys_are_at_the_centres_of_their_cells(method):
    positions = Positions((4, 6), PooledGrid((2, 2), (2, 3)), (0, 1))
    keys = [(0.5 + 2 * row, 1 + 3 * column) for row, column in row_major((2, 2))]
    assert_equals_loops(method, positions, row_major((4, 6)), keys)


def test_an_odd_stride_leaves_integers_for_quantization():
    positions = Positions((6, 3), PooledGrid((2, 1), 3))
    keys = [(1 + 3 * row, 1) for row in range(2)]
    assert_equals_loops("quantization", positions, row_major((6, 3)), keys)


def test_a_convolution_with_padding_begins_where_it_says():
    assert PooledGrid((2, 2), 2, 0).places().tolist() == [[0, 0], [0, 2], [2, 0], [2, 2]]
    assert PooledGrid((2,), 2).places().tolist() == [[0.5], [2.5]]
    padded = torch.nn.Conv2d(1, 1, (3, 5), stride=(2, 3), padding=(1, 2))
    assert PooledGrid.after(padded, (5, 8)) == PooledGrid((3, 3), (2, 3), 0)
    pool = torch.nn.MaxPool1d(4, stride=3, padding=1)
    assert PooledGrid.after(pool, (8,)).places().tolist() == [[0.5], [3.5], [6.5]]


@pytest.mark.parametrize("method", oracles.METHODS)
def test_each_image_has_the_map_of_its_own_subset(method):
    tokens = torch.stack([torch.randperm(15)[:7] for _ in range(3)])
    together = bucket_maps(RPESpec(method), Positions(Subset(Grid((3, 5)), tokens), None, 1))
    for image, kept in enumerate(tokens.tolist()):
        alone = bucket_maps(RPESpec(method), Positions(Subset(Grid((3, 5)), kept), None, 1))
        for all_images, one in zip(together, alone, strict=True):
            assert all_images.num_buckets == one.num_buckets
            assert torch.equal(all_images.ids[image], one.ids)


@pytest.mark.parametrize("method", oracles.METHODS)
def test_images_of_several_sizes_have_the_maps_of_their_grids(method):
    shapes = [(3, 5), (1, 4), (2, 2)]
    points = Points.of_grids(torch.tensor(shapes), 16)
    maps = bucket_maps(RPESpec(method), Positions(points, num_prefix_tokens=2))
    for image, shape in enumerate(shapes):
        count = 2 + math.prod(shape)
        for found, own in zip(maps, bucket_maps(RPESpec(method), shape, 2), strict=True):
            assert torch.equal(found.ids[image, :count, :count], own.ids)
    mask = Positions(points, num_prefix_tokens=2).mask_padding(None)
    assert mask.sum(-1).flatten().tolist() == [2 + math.prod(shape) for shape in shapes]


def test_a_video_has_three_axes():
    positions = Positions(Subset(Grid((2, 3, 4)), [23, 0, 7]))
    keys = [row_major((2, 3, 4))[token] for token in (23, 0, 7)]
    assert_equals_loops("product", positions, keys, keys)


def test_scale_says_how_many_patches_a_unit_is():
    grid = Grid((4, 4))
    points = Points(grid.coordinates() / 4, scale=4)
    for left, right in zip(
        bucket_maps("product-contextual-k", Positions(points)),
        bucket_maps("product-contextual-k", grid),
        strict=True,
    ):
        assert torch.equal(left.ids, right.ids)


def test_maps_are_made_in_pieces(monkeypatch):
    """Offsets of all pairs at once would take 8 bytes for each axis and pair."""
    from irpe.core import buckets

    sizes = []
    euclidean = buckets.METHODS["euclidean"]

    def measured(offsets, index):
        sizes.append(offsets[..., 0].numel())
        return euclidean.ids(offsets, index)

    monkeypatch.setattr(buckets, "_PAIRS_AT_ONCE", 64)
    monkeypatch.setitem(
        buckets.METHODS,
        "euclidean",
        buckets.METHODS["euclidean"].__class__(measured, euclidean.num_buckets, euclidean.ratio),
    )
    coordinates = torch.rand(2, 20, 2) * 9
    in_pieces = bucket_maps("euclidean-bias-k", Positions(Points(coordinates)))
    assert max(sizes) <= 64
    assert sum(sizes) == 2 * 20 * 20
    monkeypatch.undo()
    at_once = bucket_maps("euclidean-bias-k", Positions(Points(coordinates)))
    assert torch.equal(in_pieces[0].ids, at_once[0].ids)


def test_equal_positions_share_their_maps():
    first = bucket_maps("cross-contextual-k", Positions((4, 4), PooledGrid((2, 2), 2)))
    second = bucket_maps("cross-contextual-k", Positions(Grid((4, 4)), PooledGrid((2, 2), (2, 2))))
    assert first[0] is second[0]
    assert Positions(Subset((2, 2), [0, 3])) == Positions(Subset(Grid((2, 2)), (0, 3)))


def test_maps_of_tensors_live_as_long_as_their_positions():
    points = Points(torch.rand(2, 5, 2))
    positions = Positions(points)
    (bucket_map,) = bucket_maps("euclidean-bias-k", positions)
    assert bucket_maps("euclidean-bias-k", positions)[0] is bucket_map
    assert bucket_maps("euclidean-bias-k@5", positions)[0] is not bucket_map
    is_alive = weakref.ref(bucket_map)
    before = len(buckets._maps_of_tensors)
    del bucket_map, positions
    gc.collect()
    assert is_alive() is None
    assert len(buckets._maps_of_tensors) == before - 1


def test_maps_made_in_inference_mode_can_be_trained_with():
    positions = Positions(Points(torch.rand(2, 5, 2)))
    with torch.inference_mode():
        (bucket_map,) = bucket_maps("euclidean-bias-k", positions)
    assert not bucket_map.compact_ids.is_inference()


@pytest.mark.parametrize(
    ("make", "kind", "parts"),
    [
        (lambda: Points(torch.tensor([[0.0, math.nan]])), ValueError, ["nan", "[0]", "is_token"]),
        (lambda: Points(torch.zeros(3)), ValueError, ["(3,)", "(tokens, axes)"]),
        (lambda: Points(torch.zeros(3, 2).bool()), TypeError, ["bool", "integers or reals"]),
        (lambda: Points(torch.zeros(2, 2), scale=0), ValueError, ["scale = 0", "greater than 0"]),
        (
            lambda: Points(torch.zeros(2, 5, 2), torch.ones(2, 4).bool()),
            ValueError,
            ["(2, 4)", "(2, 5, 2)", "(batch, tokens)"],
        ),
        (
            lambda: Points(torch.zeros(2, 1, 2), torch.tensor([[True], [False]])),
            ValueError,
            ["image 1", "leave it out"],
        ),
        (lambda: Points.of_grids(torch.tensor([[3, 3]]), 8), ValueError, ["[[3, 3]]", "8 tokens"]),
        (lambda: Subset((2, 3), [0, 4, 4]), ValueError, ["token 4", "2x3", "twice"]),
        (lambda: Subset((2, 3), [0, 6]), ValueError, ["token 6", "2x3", "0 to 5"]),
        (lambda: Subset((2, 3), torch.tensor([[0, -1]])), ValueError, ["token -1", "0 to 5"]),
        (lambda: Subset((2, 3), []), ValueError, ["empty", "0 to 5"]),
        (lambda: Subset((2, 3), torch.zeros(2)), TypeError, ["float32", "integers"]),
        (lambda: Subset((2, 3), [0.5]), TypeError, ["0.5", "integers"]),
        (lambda: Subset((2, 3), 4), TypeError, ["4", "sequence", "2x3"]),
        (lambda: PooledGrid((2, 2), 0), ValueError, ["stride = 0", "greater than 0"]),
        (lambda: PooledGrid((2, 2), (1, 2, 3)), ValueError, ["(1, 2, 3)", "2 axes"]),
        (lambda: Positions((2, 3), (2,)), ValueError, ["2 axes", "1"]),
        (lambda: Positions((2, 3), None, -1), ValueError, ["-1", "0 or more"]),
        (lambda: Positions((2, 3), None, (1, 2, 3)), ValueError, ["(1, 2, 3)", "two"]),
        (lambda: Positions(torch.zeros(2, 2)), TypeError, ["irpe.Points", "irpe.Subset"]),
        (
            lambda: Positions(Points(torch.zeros(2, 5, 2)), Points(torch.zeros(3, 5, 2))),
            ValueError,
            ["2 images", "3", "one batch"],
        ),
        (
            lambda: bucket_maps("quantization-bias-k", Positions((4, 4), PooledGrid((2, 2), 2))),
            ValueError,
            ["quantization-bias-k", "no rank", "euclidean"],
        ),
        (
            lambda: bucket_maps("transformer-xl", Positions((4, 4), (2, 2))),
            ValueError,
            ["transformer-xl", "4x4 / 2x2", "product-contextual-k"],
        ),
        (
            lambda: bucket_maps("euclidean-bias-k", Positions((2, 2)), 1),
            ValueError,
            ["num_prefix_tokens = 1", "(0, 0)", "leave it out"],
        ),
        (
            lambda: bucket_maps("euclidean-bias-k", Positions((2**10, 2**10), (2**10, 2**10))),
            ValueError,
            ["1024x1024", "any machine"],
        ),
    ],
)  # fmt: skip
def test_bad_positions_are_refused_where_they_are_made(make, kind, parts):
    with pytest.raises(kind) as error:
        make()
    for part in parts:
        assert part in str(error.value)


def test_positions_print_as_what_they_are():
    positions = Positions((4, 6), PooledGrid((2, 2), (2, 3)), (0, 1))
    assert str(positions) == "4x6 / 2x2 at stride 2x3+1"
    assert str(Positions(Subset((2, 3), [5, 0]))) == "2 tokens of 2x3"
    assert str(Positions(Points(torch.zeros(3, 2)), (2, 2))) == "3 points / 2x2"


@pytest.mark.parametrize("index", [Clip(3), Piecewise.from_ratio(2.5)])
def test_all_sides_of_one_grid_agree_with_the_grid(index):
    """A grid, all of its tokens as a subset, and their coordinates have one map."""
    grid, spec = Grid((3, 5)), RPESpec("product", index=index)
    (expected,) = bucket_maps(spec, grid, 1)
    for places in (
        grid,
        Subset(grid, range(15)),
        Points(grid.coordinates()),
        PooledGrid((3, 5), 1),
    ):
        (found,) = bucket_maps(spec, Positions(places, None, 1))
        assert torch.equal(found.ids, expected.ids)
