"""Few steps per epoch are told, with a batch size that gives more."""

import pytest

from irpe.train.sampling import note_few_steps, suggest_batch_size


@pytest.mark.parametrize(
    ("count", "processes", "expected"),
    [(192, 1, 16), (64, 1, 4), (6000, 1, 512), (9, 1, 2), (1, 1, 1), (192, 2, 16), (192, 3, 12)],
)
def test_a_batch_size_that_fits(count, processes, expected):
    found = suggest_batch_size(count, processes)
    assert found == expected
    assert found % processes == 0
    assert count // found >= min(10, max(1, count // (2 * processes)))


@pytest.mark.parametrize(
    ("steps", "count", "batch_size", "expected"),
    [
        (1, 192, 128, "1 step per epoch, 64 of 192 images left out of each: --batch-size 16"),
        (3, 192, 64, "3 steps per epoch: --batch-size 16 gives 12"),
        (4, 9, 2, "4 steps per epoch, 1 of 9 images left out of each: more --epochs help"),
    ],
)
def test_few_steps_are_told(steps, count, batch_size, expected):
    found = note_few_steps(steps, count, batch_size)
    assert found is not None
    assert found.startswith(expected)
    assert len(found) < 80


def test_enough_steps_are_not_and_repeated_images_are_not_counted():
    assert note_few_steps(10, 1290, 128) is None
    note = note_few_steps(1, 192, 128, aug_repeats=3)
    assert note == "1 step per epoch: --batch-size 16 gives 12"
