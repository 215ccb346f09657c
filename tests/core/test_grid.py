import pytest
import torch

from irpe import Grid


def test_coordinates_are_row_major():
    expected = [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert Grid((2, 3)).coordinates().tolist() == expected


def test_distinct_offsets_run_over_both_signs():
    offsets = Grid((2, 3)).distinct_offsets()
    assert offsets.shape == (3, 5, 2)
    assert offsets[0, 0].tolist() == [-1, -2]
    assert offsets[-1, -1].tolist() == [1, 2]


def test_grid_tells_its_size():
    grid = Grid.of([7, 28])
    assert (grid.ndim, grid.num_positions, str(grid)) == (2, 196, "7x28")
    assert Grid.of(grid) is grid
    assert Grid.of(torch.Size((7, 28))) == grid


@pytest.mark.parametrize("shape", [(), (0, 3), (-1, 3), (2.5, 3), (True, 3), ("3", 3)])
def test_grid_refuses_what_is_no_grid(shape):
    with pytest.raises(ValueError, match="one positive integer per axis"):
        Grid.of(shape)


@pytest.mark.parametrize("value", [14, None, "14x14"])
def test_grid_refuses_what_is_no_sequence(value):
    with pytest.raises(TypeError, match="axis lengths"):
        Grid.of(value)
