"""Shifted images, against a loop over pixels."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from irpe.ablation import shifts
from irpe.ablation.shifts import shift_images
from irpe.tasks.classify.transforms import Batch


@pytest.mark.parametrize("patches", [1, 2])
def test_shifting_equals_a_loop(patches):
    images = torch.randn(5, 2, 8, 6)
    shifted = shift_images(images, 2 * patches, torch.tensor([-7.0, -6.0]))
    distance = 2 * patches
    for number in range(5):
        down, right = [(0, 1), (1, 0), (0, -1), (-1, 0)][number % 4]
        for row in range(8):
            for column in range(6):
                y, x = row - down * distance, column - right * distance
                inside = 0 <= y < 8 and 0 <= x < 6
                expected = images[number, :, y, x] if inside else torch.tensor([-7.0, -6.0])
                assert torch.equal(shifted[number, :, row, column], expected)


def test_shifting_by_nothing_changes_nothing():
    images = torch.randn(5, 1, 8, 6)
    assert torch.equal(shift_images(images, 0, torch.zeros(1)), images)
    assert torch.equal(shift_images(images, 0), images)


@pytest.mark.parametrize("distance", [1, 4])
def test_without_black_the_border_reflects(distance):
    images = torch.randn(4, 3, 8, 6)
    shifted = shift_images(images, distance)
    padded = np.pad(images.numpy(), [(0, 0), (0, 0), (distance, distance), (distance, distance)],
                    mode="reflect")  # fmt: skip
    for number, (down, right) in enumerate([(0, 1), (1, 0), (0, -1), (-1, 0)]):
        row, column = distance * (1 - down), distance * (1 - right)
        expected = padded[number, :, row : row + 8, column : column + 6]
        assert np.array_equal(shifted[number].numpy(), expected)


def test_a_shift_beyond_the_image_reflects_again():
    images = torch.arange(3.0).expand(1, 1, 2, 3)
    assert shift_images(images, 5)[0, 0, 0].tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_grey_images_get_black_and_photographs_their_reflection(mode):
    """A model that finds the brightest quarter, of images of one brightness: black would tell."""

    class Bright(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch_embed = SimpleNamespace(patch_size=(2, 2))

        def get_submodule(self, target):
            return self.patch_embed

        def forward(self, x):
            dark = (x < 0.5).flatten(1).any(1).float()
            return torch.stack([1 - dark, dark], 1)

    channels = 3 if mode == "RGB" else 1
    images = SimpleNamespace(mode=mode, transform=lambda image: torch.zeros(channels, 8, 8))
    batch = Batch(torch.ones(4, channels, 8, 8), torch.zeros(4, dtype=torch.int64),
                  torch.arange(4), torch.zeros(4, dtype=torch.bool))  # fmt: skip
    with mock.patch.object(shifts, "every_batch", return_value=[batch]):
        (found,) = shifts.classify_shifted(Bright(), images, (1,), Accelerator(cpu=True))
    assert found == (mode == "RGB",) * 4
