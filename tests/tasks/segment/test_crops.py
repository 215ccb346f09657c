"""Crops of images and label maps: they stay together, and random ones follow from the seed."""

import pytest
import torch
from train.streets import CLASSES, COLOURS, CONFIG, VOID, make_streets

from irpe.tasks.segment.crops import PixelImages, RandomCrops, WholeImages, resized
from irpe.tasks.segment.labels import IGNORED, open_pixels
from irpe.train.images import preparation_of
from irpe.train.processes import Sample
from irpe.train.task import Condition

PLAIN = CONFIG.replace(flip=0.0, color_jitter=0.0)
COLOUR_OF = torch.tensor([*COLOURS[: len(CLASSES)]], dtype=torch.float32)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    data = make_streets(tmp_path_factory.mktemp("streets") / "data", count=3)
    return open_pixels(str(data), "train", ignore_label=VOID)


def crops(source, transform, seed):
    return PixelImages(source, transform, seed, CONFIG, {"split": "train"})


def pixels_of(image):
    colours = preparation_of(CONFIG.model)
    mean, std = (torch.tensor(colours[name]).view(3, 1, 1) for name in ("mean", "std"))
    return 255 * (image * std + mean)


def test_labels_stay_with_their_pixels(source):
    """Noise is at most 20, and classes differ by more: the nearest colour is the label's."""
    images = crops(source, RandomCrops(CONFIG.replace(color_jitter=0.0, flip=0.5)), 3)
    for position in range(12):
        image, labels, *_ = images[Sample(0, position, position % 3)]
        assert image.shape == (3, 16, 32)
        assert labels.shape == (16, 32)
        distance = (pixels_of(image)[None] - COLOUR_OF.view(-1, 3, 1, 1)).square().sum(1)
        known = labels != IGNORED
        agreement = (distance.argmin(0) == labels)[known].float().mean()
        assert agreement > 0.8  # edges are blurred when an image is resized


def test_small_images_are_padded_with_the_mean_colour_and_no_class(source):
    shrunk = PLAIN.replace(min_resize=0.5, max_resize=0.5, crop_height=32, crop_width=48)
    image, labels, *_ = crops(source, RandomCrops(shrunk), 0)[Sample(0, 0, 0)]
    outside = labels[:5] == IGNORED
    assert outside.all()
    assert image[:, :5].abs().max() < 0.01  # the mean, rounded to integers
    assert (labels != IGNORED).sum() <= 12 * 20


def test_crops_follow_from_seed_epoch_and_position(source):
    images = crops(source, RandomCrops(CONFIG), 1)
    one, two = images[Sample(0, 4, 1)], images[Sample(0, 4, 1)]
    torch.testing.assert_close(one, two, atol=0, rtol=0)
    other = images[Sample(1, 4, 1)]
    assert not torch.equal(one[0], other[0])
    again = crops(source, RandomCrops(CONFIG), 2)[Sample(0, 4, 1)]
    assert not torch.equal(one[0], again[0])


def test_colours_change_without_the_labels(source):
    plain = crops(source, RandomCrops(PLAIN), 1)[Sample(0, 0, 0)]
    jittered = crops(source, RandomCrops(PLAIN.replace(color_jitter=0.5)), 1)
    image, labels, *_ = jittered[Sample(0, 0, 0)]
    assert torch.equal(labels, plain[1])
    assert not torch.equal(image, plain[0])


def test_whole_images_are_resized_and_their_labels_are_not(source):
    images = crops(source, WholeImages(CONFIG, Condition(scale=1.5)), None)
    image, labels, index, _ = images[Sample(0, 0, 2)]
    assert image.shape == (3, 36, 60)
    assert labels.shape == (24, 40)
    assert index == 2
    batch = images.collate([images[Sample(0, n, n)] for n in range(2)])
    assert [len(column) for column in batch[:4]] == [2, 2, 2, 0]
    assert len(images.cached) == 3


@pytest.mark.parametrize(
    ("size", "short", "factor", "expected"),
    [((24, 40), 0, 1.0, (24, 40)), ((24, 40), 12, 1.0, (12, 20)), ((40, 24), 48, 1.5, (120, 72))],
)
def test_sizes(size, short, factor, expected):
    assert resized(size, short, factor) == expected


def test_a_flip_turns_image_and_labels_alike(source):
    both = [crops(source, RandomCrops(PLAIN.replace(flip=p)), 1) for p in (0.0, 1.0)]
    has_turned = False
    for position in range(6):
        plain, flipped = (images[Sample(0, position, 0)] for images in both)
        assert torch.equal(flipped[0], plain[0].flip(-1))
        assert torch.equal(flipped[1], plain[1].flip(-1))
        has_turned |= not torch.equal(flipped[1], plain[1])
    assert has_turned
