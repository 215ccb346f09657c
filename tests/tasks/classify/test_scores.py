"""Top-1 and top-5, counted by hand."""

import pytest
import torch
from train.little import CONFIG, Damaged, little, task

from irpe.tasks.classify.scores import evaluate
from irpe.tasks.classify.task import ClassificationTask
from irpe.train.processes import make_accelerator
from irpe.train.sampling import Sample


def test_evaluation_equals_counting_by_hand():
    job = task()
    model = job.build().eval()
    score = evaluate(model, job.val_images, make_accelerator(), batch_size=7)
    correct, among_five, losses = [], 0, []
    for index in range(20):
        image, label, _, _ = job.val_images[Sample(0, 0, index)]
        logits = model(image[None])[0]
        order = logits.argsort(descending=True).tolist()
        correct.append(order[0] == label)
        among_five += label in order[:5]
        losses.append((logits.logsumexp(0) - logits[label]).item())
    assert score.correct == tuple(correct)
    assert (score.top1, score.top5, score.num_images) == (sum(correct) * 5, among_five * 5, 20)
    assert score.loss == pytest.approx(sum(losses) / 20, rel=1e-5)
    assert score.row()["top1"] == score.top1


@pytest.fixture
def damaged():
    """A task whose validation images are ten, of which one cannot be read."""
    return ClassificationTask(CONFIG, little()[0], Damaged({1}, count=10))


def test_broken_images_do_not_count(damaged):
    torch.manual_seed(0)
    score = evaluate(damaged.build(), damaged.val_images, make_accelerator())
    assert (score.num_images, score.num_broken, len(score.correct)) == (9, 1, 9)


def test_too_many_broken_images_are_an_error(damaged):
    with pytest.raises(ValueError, match=r"1 of 10 images cannot be read.*\b1\b"):
        damaged.evaluate(damaged.build(), make_accelerator())
