import pytest
import torch
from matplotlib.colors import to_rgb

import irpe
from irpe import viz
from irpe.viz.offset_colours import colours_of_offsets


def drawn_colours(axes):
    return [to_rgb(colour) for colour in axes.collections[0].get_facecolor()]


def test_keys_have_the_colours_of_their_buckets():
    keys = torch.tensor([[0.5, 0.5], [3.2, 0.1], [0.0, 6.0]])
    positions = irpe.Positions((2, 2), irpe.Points(keys), (1, 0))
    spec = irpe.RPESpec.parse("product-bias-k")
    figure = viz.plot_positions(positions, [spec], [(1.2, 0.9)])
    (bucket_map,) = irpe.bucket_maps(spec, positions)
    offsets = (irpe.Grid((2, 2)).coordinates()[:, None] - keys).flatten(0, 1)
    (colours,) = colours_of_offsets(spec, offsets)
    expected = [colours[bucket] for bucket in bucket_map.ids[1 + 3].tolist()]
    for drawn, wanted in zip(drawn_colours(figure.axes[0]), expected, strict=True):
        assert drawn == pytest.approx(wanted)
    star = figure.axes[0].lines[-1]
    assert (star.get_ydata()[0], star.get_xdata()[0]) == (1, 1)


def test_cells_are_as_large_as_their_stride():
    positions = irpe.Positions((4, 9), irpe.PooledGrid((2, 3), (2, 3)))
    figure = viz.plot_positions(positions, ["euclidean-bias-k", "cross-bias-k"])
    assert [axes.get_title() for axes in figure.axes[:3]] == [
        "euclidean", "cross, rows", "cross, columns",
    ]  # fmt: skip
    box = figure.axes[0].collections[0].get_paths()[0].get_extents()
    assert (box.x0, box.y0, box.width, box.height) == (-0.5, -0.5, 3, 2)
    assert len(figure.axes) == 2 * 3


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (irpe.Positions((4,)), "of 1 axes cannot be drawn"),
        (irpe.Positions(irpe.Points(torch.zeros(2, 3, 2))), "for each image cannot be drawn"),
    ],
)
def test_what_cannot_be_drawn_is_refused(positions, message):
    with pytest.raises(ValueError, match=message):
        viz.plot_positions(positions)


def test_no_encoding_is_nothing_to_draw():
    with pytest.raises(ValueError, match="at least one encoding"):
        viz.plot_positions(irpe.Positions((2, 2)), [])
