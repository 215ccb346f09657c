"""Pictures of segmentations: the colours of truth and prediction, and what the legend names."""

import pytest
import torch
from PIL import Image

from irpe.viz import SegmentedImage, plot_segmentation, plot_segmentation_sheet, plot_sizes
from irpe.viz.segmentations import class_colours

CLASSES = ["sky", "road", "car", "tree"]
IMAGE = Image.new("RGB", (4, 2), (9, 9, 9))
TRUTH = torch.tensor([[0, 0, 1, 255], [1, 1, 1, 1]], dtype=torch.uint8)
PREDICTED = torch.tensor([[0, 1, 1, 2], [1, 1, 1, 1]], dtype=torch.uint8)
ITEM = SegmentedImage(IMAGE, TRUTH, PREDICTED, "one.png")


def shown(axes):
    return torch.as_tensor(axes.images[0].get_array().copy())


def test_truth_and_prediction_have_the_colours_of_their_classes():
    figure = plot_segmentation(ITEM, CLASSES)
    image, truth, predicted, wrong = (shown(axes) for axes in figure.axes)
    colours = torch.tensor(class_colours(4), dtype=torch.uint8)
    assert (image == 9).all()
    for map_, labels in ((truth, TRUTH), (predicted, PREDICTED)):
        has_class = TRUTH != 255
        assert torch.equal(map_[has_class], colours[labels[has_class].long()])
        assert len({int(channel) for channel in map_[0, 3]}) == 1  # grey: not scored
    assert torch.equal(wrong[0, 1], colours[1])  # a mistake is strong
    assert (wrong[0, 0] > colours[0]).all()  # what is right is pale


def test_the_legend_names_what_is_in_the_pictures():
    (legend,) = plot_segmentation_sheet([ITEM, ITEM], CLASSES).legends
    assert [text.get_text() for text in legend.get_texts()] == ["sky", "road", "not scored"]


def test_a_sheet_has_a_row_for_each_picture():
    figure = plot_segmentation_sheet([ITEM] * 3, CLASSES)
    assert len(figure.axes) == 12
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_segmentation_sheet([], CLASSES)


@pytest.mark.parametrize("count", [2, 11, 21, 150])
def test_every_class_has_a_colour_of_its_own(count):
    colours = class_colours(count)
    assert len(colours) == count
    assert len(set(colours)) == count
    assert all(0 <= level <= 255 for colour in colours for level in colour)


def test_sizes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"truth has \(2, 4\) pixels, the picture \(3, 4\)"):
        SegmentedImage(Image.new("RGB", (4, 3)), TRUTH, PREDICTED)


def test_curves_by_size():
    whole = {"K": {1.0: [20.0, 24.0], 2.0: [10.0, 12.0]}, "none": {1.0: [5.0], 2.0: [4.0]}}
    figure = plot_sizes(whole, whole)
    line, seeds = figure.axes[0].lines[:2]
    assert line.get_ydata().tolist() == [22.0, 11.0]
    assert sorted(seeds.get_ydata().tolist()) == [10.0, 12.0, 20.0, 24.0]
    with pytest.raises(ValueError, match="labels of whole images K, none; of sliding windows K"):
        plot_sizes(whole, {"K": whole["K"]})
