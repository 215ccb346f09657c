"""Shifted images, against a loop over pixels."""

import pytest
import torch

from irpe.ablation.shifts import shift_images


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
