"""Places of labels."""

import random

import pytest

from irpe.viz.labels import overlap, place_labels

BOUNDS = (300, 100)


def test_overlap_is_the_shared_area():
    assert overlap((0, 0, 10, 20), (5, 15, 10, 20)) == 5 * 5
    assert overlap((0, 0, 10, 20), (2, 3, 4, 5)) == 20
    assert overlap((0, 0, 10, 20), (10, 0, 10, 20)) == 0
    assert overlap((0, 0, 1, 1), (5, 5, 1, 1)) == 0


def test_a_label_stands_above_its_box_if_it_can():
    assert place_labels([(50, 40, 80, 30)], [(40, 10)], BOUNDS) == [(50, 30)]


@pytest.mark.parametrize(
    "box", [(0, 0, 300, 100), (0, 0, 5, 5), (295, 95, 5, 5), (290, 0, 30, 100), (-20, -20, 30, 30)]
)
def test_labels_stay_in_the_picture(box):
    ((left, top),) = place_labels([box], [(40, 10)], BOUNDS)
    assert 0 <= left <= 260
    assert 0 <= top <= 90


def test_a_small_box_is_not_hidden_by_its_label():
    box = (100, 0, 20, 12)  # no room above
    ((left, top),) = place_labels([box], [(20, 10)], BOUNDS)
    assert overlap((left, top, 20, 10), box) == 0


def test_labels_keep_off_one_another_and_near_their_boxes():
    draw = random.Random(0)
    boxes = [(draw.uniform(0, 900), draw.uniform(0, 400), 60, 50) for _ in range(30)]
    sizes = [(draw.uniform(30, 70), 12) for _ in boxes]
    corners = place_labels(boxes, sizes, (1000, 500))
    labels = [(*corner, *size) for corner, size in zip(corners, sizes, strict=True) if corner]
    assert len(labels) == 30
    for number, (label, box) in enumerate(zip(labels, boxes, strict=True)):
        for other in labels[:number]:
            assert overlap(label, other) <= 0.1 * label[2] * label[3]
        near = (box[0] - label[2] - 1, box[1] - 13, box[2] + 2 * label[2] + 2, box[3] + 26)
        assert overlap(label, near) == pytest.approx(label[2] * label[3])


def test_where_there_is_no_room_the_last_boxes_go_without():
    corners = place_labels([(0, 0, 40, 10)] * 5, [(40, 10)] * 5, (40, 30))
    assert [corner is None for corner in corners] == [False, False, True, True, True]
