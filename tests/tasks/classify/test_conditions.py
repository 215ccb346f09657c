"""Trained classifiers on images of other sizes and on shifted ones: the same weights and images."""

import pytest
import torch
from train.little import CONFIG, little, write_run

from irpe.tasks.classify.task import ClassificationTask, build_model
from irpe.tasks.classify.transforms import eval_images
from irpe.train.evaluation import evaluate
from irpe.train.run import Run, load_run
from irpe.train.task import Condition

ABSOLUTE = CONFIG.replace(encoding="none", absolute="keep")
VAL = little()[1]


def opened(path):
    """The task of a run with a few images, and its model."""
    task, model = Run(path).open()
    task.sources = {"val": VAL}
    return task, model


def score(pair, **condition):
    (found,) = evaluate(pair, [Condition(**condition)])
    return found.score


@pytest.mark.parametrize("config", [CONFIG, ABSOLUTE])
def test_the_own_size_and_shift_0_are_the_evaluation_of_the_run(tmp_path, config):
    pair = opened(write_run(tmp_path / "run", config))
    assert score(pair, size=(28, 28)) == score(pair, shift=0) == score(pair)


@pytest.mark.parametrize("absolute", ["none", "sinusoid"])
@pytest.mark.parametrize("size", [(14, 42), (42, 42)])
def test_without_a_learned_absolute_encoding_nothing_but_the_grid_changes(tmp_path, absolute, size):
    config = CONFIG.replace(absolute=absolute)
    pair = opened(write_run(tmp_path / "run", config))
    expected = build_model(config, 10, size)
    expected.load_state_dict(pair[1].state_dict())
    images = eval_images(VAL, config, size=size)
    tensors = torch.stack([images.transform(VAL.read(n)[0]) for n in range(len(VAL))])
    assert tensors.shape[-2:] == size
    with torch.no_grad():
        found = expected.eval()(tensors).argmax(1)
    labels = torch.tensor([VAL.read(n)[1] for n in range(len(VAL))])
    assert score(pair, size=size).values == tuple(100.0 * float(x) for x in found == labels)


def test_a_learned_absolute_encoding_is_resampled_as_timm_does(tmp_path):
    path = write_run(tmp_path / "run", ABSOLUTE)
    expected = load_run(path)
    expected.set_input_size((35, 35))
    other = ClassificationTask(ABSOLUTE.replace(image_size=35), expected.state_dict())
    other.sources = {"val": VAL}
    assert score(opened(path), size=(35, 35)) == score((other, expected))


def test_shifted_images_equal_a_loop(tmp_path):
    pair = opened(write_run(tmp_path / "run"))
    images = eval_images(VAL, CONFIG)
    tensors = torch.stack([images.transform(VAL.read(n)[0]) for n in range(len(VAL))])
    labels = torch.tensor([VAL.read(n)[1] for n in range(len(VAL))])
    for shift in (1, 3):
        moved = torch.full_like(tensors, -1.0)  # black
        for number in range(len(VAL)):
            down, right = [(0, 1), (1, 0), (0, -1), (-1, 0)][number % 4]
            for row in range(28):
                for column in range(28):
                    y, x = row - 7 * shift * down, column - 7 * shift * right
                    if 0 <= y < 28 and 0 <= x < 28:
                        moved[number, :, row, column] = tensors[number, :, y, x]
        with torch.no_grad():
            hits = int((pair[1](moved).argmax(1) == labels).sum())
        assert score(pair, shift=shift).value == 100 * hits / len(VAL)


@pytest.mark.parametrize(
    "condition",
    [{"size": (28, 30)}, {"size": (0, 7)}, {"shift": 4}, {"shift": -1}, {"scale": 2.0},
     {"windows": True}],
)  # fmt: skip
def test_conditions_that_a_run_cannot_meet_are_errors(tmp_path, condition):
    pair = opened(write_run(tmp_path / "run"))
    with pytest.raises(ValueError, match=next(iter(condition))):
        score(pair, **condition)


def test_a_grid_larger_than_the_tables_is_an_error(tmp_path):
    pair = opened(write_run(tmp_path / "run", CONFIG.replace(encoding="sasa@4")))
    with pytest.raises(ValueError, match="grid 5x5 is larger than the tables"):
        score(pair, size=(35, 35))
