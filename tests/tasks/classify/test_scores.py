"""Top-1 and top-5, counted by hand."""

import pytest
import torch
from train.little import Damaged, little, task

from irpe.train.evaluation import evaluate
from irpe.train.processes import Sample


def test_evaluation_equals_counting_by_hand():
    job = task()
    images = job.open("val")
    model = job.build().eval()
    (found,) = evaluate((job, model), batch_size=7)
    correct, among_five, losses = [], 0, []
    for index in range(20):
        image, label, _, _ = images[Sample(0, 0, index)]
        logits = model(image[None])[0]
        order = logits.argsort(descending=True).tolist()
        correct.append(100.0 * (order[0] == label))
        among_five += label in order[:5]
        losses.append((logits.logsumexp(0) - logits[label]).item())
    score = found.score
    assert score.values == tuple(correct)
    details = {"top1": sum(correct) / 20, "top5": among_five * 5}
    assert {name: score.details[name] for name in details} == details
    assert (score.value, score.num_images) == (details["top1"], 20)
    assert score.details["val_loss"] == pytest.approx(sum(losses) / 20, rel=1e-5)
    assert score.row()["top1"] == score.value
    labels = [images.source.read(index)[1] for index in range(20)]
    assert score.chance == 5 * max(map(labels.count, labels))


def test_broken_images_do_not_count_up_to_a_fraction():
    torch.manual_seed(0)
    sources = little()[0], Damaged({1}, count=10)
    job = task(sources=sources)
    job.open("train", None)
    pair = job, job.build()
    with pytest.raises(ValueError, match=r"1 of 10 images cannot be read.*\b1\b"):
        list(evaluate(pair))
    job.config = job.config.replace(max_broken=0.1)
    (found,) = evaluate(pair)
    assert (found.score.num_images, found.score.num_broken, len(found.score.values)) == (9, 1, 9)
    assert set(found.predictions) == {*range(10)} - {1}
