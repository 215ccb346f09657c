"""Images with boxes as a detector sees them: a box still encloses what it enclosed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.tv_tensors import BoundingBoxes
from train.boxed import HEIGHT, coco_content, make_coco, picture

from irpe.tasks.detect.boxes import Target, open_boxes
from irpe.tasks.detect.views import (
    BoxBatch,
    BoxImages,
    Views,
    random_crop,
    relative_boxes,
    view_size,
)
from irpe.train.processes import Sample, seeded

PLAIN = Views((48,), 1000, 0.0, False, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
RANDOM = replace(PLAIN, short_sides=(20, 24, 30), longest=48, flip=0.5)


def target(boxes, labels=None):
    labels = range(len(boxes)) if labels is None else labels
    return Target(torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), torch.tensor([*labels]))


def painted(boxes, size):
    """Returns an image with a rectangle for each box, in a colour channel of its own."""
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    for channel, (x1, y1, x2, y2) in enumerate(boxes):
        pixels[y1:y2, x1:x2, channel] = 255
    return Image.fromarray(pixels)


def enclosed(channel):
    """Returns the box around the pixels that are more coloured than not, if there are any."""
    rows, columns = np.nonzero(channel.numpy() > 0.5)
    if not len(rows):
        return None
    return [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]


@pytest.fixture
def source(tmp_path):
    """Images of three sizes, with something to see."""
    content = coco_content()
    for number, image in enumerate(content["images"]):
        image["width"] += 8 * number
    make_coco(tmp_path, content)
    for image in content["images"]:
        noise = np.random.default_rng(image["id"]).integers(0, 256, (HEIGHT, image["width"], 3))
        path = tmp_path / "train2017" / image["file_name"]
        Image.fromarray(noise.astype(np.uint8)).save(path)
    return open_boxes(str(tmp_path), "train")


def test_nothing_changes_at_the_same_size():
    boxes = [[3, 4, 10, 20], [0, 0, 40, 24]]
    image = picture()
    image.paste((255, 51, 0), (3, 4, 10, 20))
    pixels, seen = replace(PLAIN, short_sides=(24,))(image, target(boxes))
    expected = torch.zeros(3, 24, 40)
    expected[0, 4:20, 3:10], expected[1, 4:20, 3:10] = 1, 0.2
    torch.testing.assert_close(pixels, expected)
    assert seen.boxes.tolist() == boxes
    assert (pixels.dtype, seen.boxes.dtype) == (torch.float32, torch.float32)
    assert type(seen.boxes) is torch.Tensor


def test_colours_are_normalised():
    views = replace(PLAIN, mean=(0.5, 0.25, 0.0), std=(0.5, 2.0, 4.0))
    pixels, _ = views(Image.new("RGB", (30, 20), (255, 51, 102)), target([]))
    torch.testing.assert_close(pixels[:, 5, 7], torch.tensor([1.0, -0.025, 0.1]))


@pytest.mark.parametrize("flip", [0.0, 1.0])
@pytest.mark.parametrize("size", [(40, 24), (24, 40), (30, 30)])
@pytest.mark.parametrize(("numerator", "denominator"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_boxes_follow_the_picture(size, numerator, denominator, flip):
    boxes = [[2, 4, 12, 20], [12, 0, size[0], 8], [4, 10, 20, 24]]
    views = replace(PLAIN, short_sides=(min(size) * numerator // denominator,), flip=flip)
    pixels, seen = views(painted(boxes, size), target(boxes))
    assert pixels.shape == (3, *(side * numerator // denominator for side in size[::-1]))
    assert [enclosed(channel) for channel in pixels] == seen.boxes.tolist()
    plain = [[side * numerator / denominator for side in box] for box in boxes]
    width = pixels.shape[2]
    mirrored = [[width - x2, y1, width - x1, y2] for x1, y1, x2, y2 in plain]
    assert seen.boxes.tolist() == (mirrored if flip else plain)
    assert seen.labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize("seed", range(12))
def test_a_crop_cuts_boxes_where_it_cuts_the_picture(seed):
    size = [(700, 450), (410, 620), (400, 400)][seed % 3]
    boxes = [[5, 7, 90, 60], [150, 200, 390, 390], [size[0] - 30, size[1] - 50, *size]]
    image = torch.from_numpy(np.array(painted(boxes, size)) / 255).permute(2, 0, 1)
    tracked = BoundingBoxes(torch.tensor(boxes), format="XYXY", canvas_size=size[::-1])
    with seeded(seed):
        pixels, seen = random_crop(image, tracked)
    assert all(384 <= side <= 600 for side in pixels.shape[1:])
    for channel, box in zip(pixels, seen.tolist(), strict=True):
        has_area = box[0] < box[2] and box[1] < box[3]
        assert enclosed(channel) == (box if has_area else None)


@pytest.mark.parametrize("seed", range(12))
def test_boxes_follow_the_picture_through_everything(seed):
    boxes = [[5, 7, 130, 160], [150, 100, 390, 290], [560, 380, 640, 480]]
    views = Views((320, 400), 500, 0.5, True, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    with seeded(seed):
        pixels, seen = views(painted(boxes, (640, 480)), target(boxes))
    assert min(pixels.shape[1:]) <= 400
    assert max(pixels.shape[1:]) <= 500
    for label in range(3):
        around = enclosed(pixels[label])
        found = seen.boxes[seen.labels == label].tolist()
        if around is None:  # nothing is left, or less than half a pixel
            assert all(min(x2 - x1, y2 - y1) < 1 for x1, y1, x2, y2 in found)
        else:
            np.testing.assert_allclose(found, [around], atol=1.0)


def test_half_of_the_images_are_cropped_and_boxes_outside_are_gone():
    boxes = [[0, 0, 60, 45], [580, 435, 640, 480]]
    views = replace(PLAIN, short_sides=(96,), crop=True)
    image, wanted = painted(boxes, (640, 480)), target(boxes, [4, 9])
    labels = []
    for seed in range(60):
        with seeded(seed):
            pixels, seen = views(image, wanted)
        labels.append(seen.labels.tolist())
        assert (seen.boxes[:, :2] < seen.boxes[:, 2:]).all()
        assert (seen.boxes >= 0).all()
        assert (seen.boxes[:, 2] <= pixels.shape[2]).all()
        assert (seen.boxes[:, 3] <= pixels.shape[1]).all()
        assert len(seen.boxes) == len(seen.labels)
    assert 25 <= labels.count([4, 9]) <= 50  # a crop may leave a part of both
    assert {(4,), (9,)} <= {tuple(each) for each in labels}


def test_an_image_without_boxes():
    with seeded(3):
        _, seen = replace(RANDOM, crop=True, flip=1.0)(picture(), target([], []))
    assert (seen.boxes.shape, seen.labels.shape) == ((0, 4), (0,))


@pytest.mark.parametrize(
    ("size", "short", "longest", "expected"),
    [
        ((480, 640), 800, 1333, (800, 1066)),
        ((640, 480), 800, 1333, (1066, 800)),
        ((427, 640), 800, 1333, (800, 1199)),
        ((500, 1000), 800, 1333, (666, 1332)),
        ((1000, 480), 800, 1333, (1333, 640)),
        ((2, 4), 1000, 1335, (668, 1335)),
        ((1, 5000), 800, 1333, (1, 1333)),
        ((300, 300), 800, 800, (800, 800)),
        ((300, 200), 800, 600, (600, 400)),
        ((480, 640), 600, None, (600, 800)),
        ((100, 1000), 600, None, (600, 6000)),
    ],
)
def test_sizes_by_hand(size, short, longest, expected):
    assert view_size(size, short, longest) == expected


sides = st.integers(1, 5000)


@given(size=st.tuples(sides, sides), short=sides, longest=sides)
def test_sizes_keep_the_shape_as_well_as_pixels_can(size, short, longest):
    height, width = view_size(size, short, longest)
    assert 1 <= min(height, width) <= short
    assert max(height, width) <= longest
    assert (width, height) == view_size(size[::-1], short, longest)
    ratio = max(size) / min(size)
    if longest >= ratio:  # the short side need not be lengthened to a pixel
        assert abs(max(height, width) - ratio * min(height, width)) < 1 + ratio / 2
    if ratio * short <= longest:
        assert min(height, width) == short


def test_every_short_side_is_chosen_and_flips_are_half():
    image, wanted = painted([[0, 0, 10, 24]], (40, 24)), target([[0, 0, 10, 24]])
    heights, flips = [], 0
    for seed in range(90):
        with seeded(seed):
            pixels, seen = RANDOM(image, wanted)
        heights.append(pixels.shape[1])
        flips += bool(seen.boxes[0, 0] > 0)
    assert {height: heights.count(height) > 15 for height in heights} == {
        20: True,
        24: True,
        29: True,  # 30 would make the long side 50
    }
    assert 30 < flips < 60


def test_views_follow_from_seed_epoch_and_position(source):
    images = BoxImages(source, RANDOM, 7)

    def heights(epoch, seed=7):
        several = BoxImages(source, RANDOM, seed)
        return [several[Sample(epoch, position, 0)][0].shape for position in range(12)]

    first, second = (images[Sample(3, 5, 1)] for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1].boxes, second[1].boxes)
    assert first[2] == 1
    assert len(set(heights(0))) > 1
    assert heights(0) == heights(0) != heights(1)
    assert heights(0) != heights(0, seed=8)


def test_batches_are_padded_to_the_right_and_below(source):
    images = BoxImages(source, replace(PLAIN, short_sides=(24,), mean=(0.5, 0.5, 0.5)), None)
    items = [images[Sample(0, position, position)] for position in range(3)]
    items[2] = items[2][0][:, :20], *items[2][1:]
    batch = BoxImages.collate(items)
    assert isinstance(batch, BoxBatch)
    assert (batch.inputs.shape, batch.mask.shape) == ((3, 3, 24, 56), (3, 24, 56))
    assert batch.mask.dtype == torch.bool
    for number, (height, width) in enumerate([(24, 40), (24, 48), (20, 56)]):
        assert torch.equal(batch.inputs[number, :, :height, :width], items[number][0])
        expected = torch.zeros(24, 56, dtype=torch.bool)
        expected[:height, :width] = True
        assert torch.equal(batch.mask[number], expected)
        assert (batch.inputs[number][:, ~expected] == 0).all()
    assert batch.indices == [0, 1, 2]


def test_boxes_of_a_batch_are_relative_to_their_own_image(source):
    images = BoxImages(source, PLAIN, None)  # twice the size
    batch = BoxImages.collate([images[Sample(0, number, number)] for number in (2, 0, 1)])
    assert [boxes.shape for boxes in batch.boxes] == [(0, 4), (2, 4), (1, 4)]
    torch.testing.assert_close(
        batch.boxes[1],
        torch.tensor(
            [
                [2.5 / 40, 4.25 / 24, 3 / 40, 4.5 / 24],
                [16 / 40, 17.5 / 24, 12 / 40, 13 / 24],
            ]
        ),
    )
    torch.testing.assert_close(  # cut at the right and the lower edge of 48 x 24
        batch.boxes[2], torch.tensor([[39.25 / 48, 17 / 24, 17.5 / 48, 14 / 24]])
    )
    assert [labels.tolist() for labels in batch.labels] == [[], [0, 2], [1]]
    assert batch.indices == [2, 0, 1]


@given(
    size=st.tuples(st.integers(1, 900), st.integers(1, 900)),
    shares=st.lists(st.floats(0, 1, width=32), min_size=4, max_size=4),
)
def test_relative_boxes_turn_back_into_corners(size, shares):
    height, width = size
    (x1, x2), (y1, y2) = sorted(shares[:2]), sorted(shares[2:])
    boxes = torch.tensor([[x1 * width, y1 * height, x2 * width, y2 * height]])
    ((x, y, w, h),) = relative_boxes(boxes, size).tolist()
    found = torch.tensor([x - w / 2, y - h / 2, x + w / 2, y + h / 2])
    torch.testing.assert_close(found, torch.tensor([x1, y1, x2, y2]), atol=1e-6, rtol=0)
