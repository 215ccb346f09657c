"""Labelled images as tensors: broken ones are replaced, deep ones keep their shades."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor
from train.little import CONFIG, Damaged

from irpe.tasks.classify.transforms import (
    LabelledImages,
    eval_images,
    shift_image,
    train_images,
)
from irpe.train.images import BrokenImageError, convert_mode
from irpe.train.processes import Sample


def test_a_broken_image_is_replaced_by_the_next_and_marked():
    images = eval_images(Damaged({3, 0}), CONFIG)
    _, label, index, broken = images[Sample(0, 0, 3)]
    assert (label, index, broken) == (1, 3, True)
    _, label, index, broken = images[Sample(0, 0, 2)]
    assert (label, index, broken) == (2, 2, False)


def test_grey_images_of_16_bits_keep_their_shades():
    pixels = np.array([[0, 256, 40000, 65535]], dtype=np.uint16)
    image = convert_mode(Image.fromarray(pixels), "L")
    assert np.asarray(image).tolist() == [[0, 1, 156, 255]]


GREY = [[0, 1, 3], [100, 200, 255]]
DEEP = {
    "16 bits": (np.array(GREY, dtype=np.uint16) * 256, "I;16"),
    "16 bits, a dark image": (np.array(GREY, dtype=np.uint16), "I;16"),
    "32 bits, elements of 8": (np.array(GREY, dtype=np.int32), "I"),
    "32 bits, elements of 16": (np.array(GREY, dtype=np.int32) * 256, "I"),
    "fractions": (np.array(GREY, dtype=np.float32) / 255, "F"),
    "floats, elements of 8": (np.array(GREY, dtype=np.float32), "F"),
    "floats, elements of 16": (np.array(GREY, dtype=np.float32) * 256, "F"),
    "8 bits": (np.array(GREY, dtype=np.uint8), "L"),
}


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("name", DEEP)
def test_grey_images_of_any_depth_keep_their_shades(tmp_path, name, mode):
    pixels, depth = DEEP[name]
    Image.fromarray(pixels).save(tmp_path / "image.tiff")
    with Image.open(tmp_path / "image.tiff") as image:
        assert image.mode == depth
        found = np.asarray(convert_mode(image, mode))
    expected = np.zeros_like(GREY) if "dark" in name else np.array(GREY)
    assert np.array_equal(found[..., 0] if mode == "RGB" else found, expected)


@pytest.mark.parametrize("wrong", [-1, 65536, -0.5, np.nan, np.inf])
def test_images_whose_elements_have_no_meaning_are_refused(wrong):
    pixels = np.array([[3, wrong]], dtype=np.int32 if isinstance(wrong, int) else np.float32)
    with pytest.raises(BrokenImageError, match=f"mode {'I' if isinstance(wrong, int) else 'F'} "):
        convert_mode(Image.fromarray(pixels), "L")


@pytest.mark.parametrize("text", ["rand-mfoo", "rand-m", "rand-m9-x", "augmix-m5-wx", "v0-mstd"])
def test_a_policy_with_a_section_that_does_nothing(text):
    with pytest.raises(ValueError, match=f"auto_augment '{text}'"):
        train_images(Damaged(set()), CONFIG.replace(auto_augment=text))


@pytest.mark.parametrize("text", ["rand-m9-mstd0.5-inc1", "rand-m9-tweights", "augmix-m5", "v0"])
def test_policies_of_timm(text):
    train_images(Damaged(set()), CONFIG.replace(auto_augment=text))


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_images_in_the_mode_lab_are_converted(mode):
    assert convert_mode(Image.new("LAB", (8, 6)), mode).mode == mode


def test_an_image_in_an_odd_mode_counts_as_broken():
    images = eval_images(Damaged(set()), CONFIG)
    read = images.source.read
    odd = Image.new("La", (8, 8))
    images.source.read = lambda index: (odd, 0) if index == 1 else read(index)
    assert images[Sample(0, 0, 1)][2:] == (1, True)
    with pytest.raises(BrokenImageError, match="Pillow's mode La cannot be converted to L"):
        convert_mode(odd, "L")


def test_nothing_but_broken_images():
    images = eval_images(Damaged({0, 1, 2, 3}), CONFIG)
    with pytest.raises(ValueError, match="none of the 4 images can be read"):
        images[Sample(0, 0, 0)]


@pytest.mark.parametrize("distance", [0, 1, 4])
def test_without_black_the_border_reflects(distance):
    images = torch.randn(4, 3, 8, 6)
    padded = np.pad(images.numpy(), [(0, 0), (0, 0), (distance, distance), (distance, distance)],
                    mode="reflect")  # fmt: skip
    for number, (down, right) in enumerate([(0, 1), (1, 0), (0, -1), (-1, 0)]):
        row, column = distance * (1 - down), distance * (1 - right)
        expected = padded[number, :, row : row + 8, column : column + 6]
        assert np.array_equal(shift_image(images[number], distance, number).numpy(), expected)


def test_a_shift_beyond_the_image_reflects_again():
    image = torch.arange(3.0).expand(1, 2, 3)
    assert shift_image(image, 5, 0)[0, 0].tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_grey_images_leave_black_and_photographs_their_reflection(mode):
    white = LabelledImages(Damaged(set()), pil_to_tensor, CONFIG.replace(
        channels=3 if mode == "RGB" else 1), None)  # fmt: skip
    white.source.read = lambda index: (Image.new(mode, (8, 8), "white"), 0)
    images = [white.shifted(2)[Sample(0, position, 0)][0] for position in range(4)]
    assert [int(image.min()) for image in images] == [255 if mode == "RGB" else 0] * 4
