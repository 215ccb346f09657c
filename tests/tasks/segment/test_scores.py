"""Scores against torchmetrics, and predictions of whole images and of windows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

from irpe.tasks.segment.config import SegmenterConfig
from irpe.tasks.segment.crops import PixelBatch
from irpe.tasks.segment.labels import IGNORED
from irpe.tasks.segment.scores import count_classes, score_pixels
from irpe.tasks.segment.task import SegmentationTask
from irpe.tasks.segment.windows import Windows, class_scores


def score(pairs, count):
    counts = [count_classes(labels, predicted, count) for labels, predicted in pairs]
    return score_pixels(counts, list(map(str, range(count))))


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(0, 2**31), st.booleans())
def test_scores_are_those_of_torchmetrics(count, seed, rare):
    """Over all images at once, with ignored pixels, and classes that do not occur."""
    dice = torch.Generator().manual_seed(seed)
    highest = max(count // 2, 1) if rare else count
    pairs = []
    for _ in range(3):
        labels = torch.randint(highest, (5, 7), generator=dice, dtype=torch.uint8)
        labels[torch.rand(5, 7, generator=dice) < 0.2] = IGNORED
        guesses = torch.randint(highest, (5, 7), generator=dice, dtype=torch.uint8)
        is_right = torch.rand(5, 7, generator=dice) < 0.5
        pairs.append((labels, torch.where(is_right & (labels != IGNORED), labels, guesses)))
    found = score(pairs, count)
    truth, predicted = (torch.stack(each).long() for each in zip(*pairs, strict=True))
    metric = MulticlassJaccardIndex(count, ignore_index=IGNORED)
    assert found.value == pytest.approx(100 * float(metric(predicted, truth)), rel=1e-5)
    each = MulticlassJaccardIndex(count, ignore_index=IGNORED, average=None)(predicted, truth)
    for ours, theirs in zip(found.classes.values(), each.tolist(), strict=True):
        assert math.isnan(ours) or ours == pytest.approx(100 * theirs, rel=1e-5, abs=1e-5)
    micro = MulticlassAccuracy(count, average="micro", ignore_index=IGNORED)(predicted, truth)
    assert found.details["pixel_accuracy"] == pytest.approx(100 * float(micro), rel=1e-5)


def test_scores_by_hand():
    labels = torch.tensor([[0, 0, 1, IGNORED], [1, 1, 1, 2]], dtype=torch.uint8)
    predicted = torch.tensor([[0, 1, 1, 2], [1, 1, 0, 0]], dtype=torch.uint8)
    found = score([(labels, predicted)], 4)
    iou = list(found.classes.values())
    assert iou[:3] == pytest.approx([25.0, 60.0, 0.0])
    assert math.isnan(iou[3])  # neither true nor predicted
    assert found.value == pytest.approx(85 / 3)
    assert found.details["class_accuracy"] == pytest.approx(125 / 3)
    assert found.details["pixel_accuracy"] == pytest.approx(100 * 4 / 7)
    assert found.chance == pytest.approx(100 * 4 / 7 / 3)  # class 1 everywhere, of three


def test_the_values_of_images_have_the_score_as_their_mean_without_bias():
    dice = torch.Generator().manual_seed(0)
    pairs = [torch.randint(3, (2, 5, 7), generator=dice, dtype=torch.uint8) for _ in range(4)]
    whole, count = score(pairs, 3).value, len(pairs)
    without = [score(pairs[:n] + pairs[n + 1 :], 3).value for n in range(count)]
    mean = sum(without) / count
    expected = [whole + (count - 1) * (mean - each) for each in without]
    assert score(pairs, 3).values == pytest.approx(expected)


def test_nothing_to_score():
    labels = torch.full((2, 2), IGNORED, dtype=torch.uint8)
    with pytest.raises(ValueError, match="no pixel has a class"):
        score([(labels, labels)], 2)


class ByColour(torch.nn.Module):
    """Scores of a pixel are its colours, so that predictions are known."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def forward(self, images):
        self.sizes.append(tuple(images.shape[-2:]))
        return images


def test_windows_cover_an_image_and_average_where_they_overlap():
    windows, model = Windows((4, 6), (3, 4)), ByColour()
    images = torch.randn(2, 3, 9, 15)
    torch.testing.assert_close(class_scores(model, images, windows), images)
    assert windows.starts(9, 0) == [0, 3, 5]
    assert windows.starts(15, 1) == [0, 4, 8, 9]
    assert model.sizes == [(4, 6)] * 12
    torch.testing.assert_close(class_scores(model, images, None), images)


def test_the_mean_of_windows_by_hand():
    class Ones(torch.nn.Module):
        calls = 0

        def forward(self, images):
            self.calls += 1
            return torch.full_like(images, float(self.calls))

    found = class_scores(Ones(), torch.zeros(1, 1, 1, 5), Windows((1, 3), (1, 2)))
    assert found.flatten().tolist() == [1, 1, 1.5, 2, 2]


def test_an_image_smaller_than_a_window_is_one_window():
    model = ByColour()
    class_scores(model, torch.zeros(1, 3, 3, 5), Windows((4, 6), (2, 2)))
    assert model.sizes == [(3, 5)]


def test_predictions_have_the_size_of_the_label_maps():
    labels = torch.zeros(6, 8, dtype=torch.uint8)
    small = torch.randn(3, 3, 4)
    large = functional.interpolate(torch.randn(1, 3, 6, 8), scale_factor=2, mode="bilinear")[0]
    task = SegmentationTask(SegmenterConfig(model="vit_tiny_patch16_224", classes=tuple("abc")))
    batch = PixelBatch([small, large], [labels, labels], [0, 1], [], None)
    found = task.predict(ByColour(), batch, torch.device("cpu"))
    for image, predicted in zip((small, large), found, strict=True):
        resized = functional.interpolate(image[None], size=(6, 8), mode="bilinear")[0]
        assert predicted.labels.tolist() == resized.argmax(0).tolist()
        assert predicted.counts == count_classes(labels, torch.tensor(predicted.labels), 3)
