"""Colours of buckets: one scale for all methods, the prefix outside of it."""

import pytest

import irpe
from irpe import viz
from irpe.core.methods import METHODS
from irpe.viz.offset_colours import DIRECTIONS, PREFIX, bucket_colours, directed_colour, grey

GRID = irpe.Grid((5, 9))


def colour_of(spec, row, column, table=0):
    """The colour that the patch at an offset from the star has."""
    spec = irpe.RPESpec.parse(spec)
    ids = irpe.bucket_maps(spec, GRID)[table].ids
    centre = 2 * 9 + 4
    return bucket_colours(spec, GRID)[table][int(ids[centre, centre + 9 * row + column])]


def is_close(one, other):
    return all(abs(a - b) < 1e-9 for a, b in zip(one, other, strict=True))


def test_methods_that_see_a_direction_agree_on_its_colour():
    for row, column in DIRECTIONS.values():
        at = (int(row), int(column))
        expected = colour_of("product-bias-k", *at)
        assert is_close(expected, colour_of("cross-bias-k", *at, table=int(row == 0)))
        far = (4**2 + 8**2) ** 0.5
        assert is_close(expected, directed_colour(row / far, column / far))


def test_methods_without_a_direction_are_grey_and_agree_on_distances():
    means = {"euclidean": (1 + 2**0.5) / 2, "quantization": 1}  # one bucket for 1 and 1.41, or not
    for method, mean in means.items():
        for at in ((0, 1), (1, 0), (-1, 0)):
            assert is_close(colour_of(f"{method}-bias-k", *at), grey(mean / (4**2 + 8**2) ** 0.5))
    red, green, blue = grey(0.5)
    assert max(red, green, blue) - min(red, green, blue) < 1e-3


def test_farther_is_darker_and_directions_differ():
    for step in range(10):
        near, far = step / 10, (step + 1) / 10
        assert sum(grey(far)) < sum(grey(near))
        assert sum(directed_colour(0, far)) < sum(directed_colour(0, near))
    colours = [directed_colour(row / 2, column / 2) for row, column in DIRECTIONS.values()]
    apart = [max(abs(a - b) for a, b in zip(x, y, strict=True)) for x in colours for y in colours]
    assert sorted(apart)[len(colours)] > 0.2  # the first are each colour with itself


@pytest.mark.parametrize("method", METHODS)
def test_no_bucket_of_patches_has_the_colour_of_the_prefix(method):
    colors = pytest.importorskip("matplotlib.colors", reason="needs the extra 'viz'")
    for tables in (
        bucket_colours(irpe.RPESpec(method), grid) for grid in (GRID, irpe.Grid((1, 1)))
    ):
        assert all(max(colour) > 0.2 for table in tables for colour in table.values())
    figure = viz.plot_buckets([irpe.RPESpec(method)], (3, 5), 2, [(0, 0)])
    image = figure.axes[0].images[0]
    shown = image.cmap(image.norm(image.get_array()))
    assert [colors.to_hex(c).upper() for c in shown[0, :2]] == [PREFIX] * 2
