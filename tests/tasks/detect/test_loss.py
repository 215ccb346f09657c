import pytest
import torch
from transformers import DetrConfig
from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss

from irpe.tasks.detect.loss import (
    Normalizer,
    count_targets,
    detection_loss,
    make_normalizer,
)

CONFIG = DetrConfig(num_labels=3, decoder_layers=3, num_queries=5, auxiliary_loss=True)
SIZES = [2, 0, 7, 1, 3, 1]  # boxes of the images: one has none, one more than there are queries


def outputs(count=6, dtype=torch.float32):
    torch.manual_seed(0)
    logits = torch.randn(3, count, 5, 4, dtype=dtype, requires_grad=True)
    boxes = torch.rand(3, count, 5, 4, dtype=dtype, requires_grad=True)
    return logits, boxes


def targets():
    torch.manual_seed(1)
    return [
        {"class_labels": torch.randint(3, (size,)), "boxes": 0.1 + 0.5 * torch.rand(size, 4)}
        for size in SIZES
    ]


def loss_of(logits, boxes, labels, normalizer):
    return detection_loss(logits, boxes, labels, normalizer, CONFIG)


def normalizer(labels, micro_batches=1):
    counts = count_targets([label["class_labels"] for label in labels], CONFIG.num_queries)
    return make_normalizer(counts, micro_batches, CONFIG.eos_coefficient)


def test_a_step_of_one_micro_batch_has_the_loss_of_transformers():
    logits, boxes = outputs()
    labels = targets()
    ours = loss_of(logits, boxes, labels, normalizer(labels))
    theirs = ForObjectDetectionLoss(logits[-1], labels, "cpu", boxes[-1], CONFIG, logits, boxes)[0]
    torch.testing.assert_close(ours, theirs)
    for own, other in zip(
        torch.autograd.grad(ours, (logits, boxes), retain_graph=True),
        torch.autograd.grad(theirs, (logits, boxes)),
        strict=True,
    ):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("count", [2, 3, 6])
def test_the_mean_over_micro_batches_is_the_loss_of_the_whole(count):
    logits, boxes = outputs()
    labels = targets()
    whole = loss_of(logits, boxes, labels, normalizer(labels))
    size = len(labels) // count
    pieces = [slice(n * size, (n + 1) * size) for n in range(count)]
    losses = [
        loss_of(logits[:, piece], boxes[:, piece], labels[piece], normalizer(labels, count))
        for piece in pieces
    ]
    torch.testing.assert_close(torch.stack(losses).mean(), whole)


def test_normalizers_by_hand():
    counts = count_targets([torch.zeros(size) for size in SIZES], num_queries=5)
    assert counts.tolist() == [14, 12, 30]
    assert make_normalizer(counts, 2, 0.1) == Normalizer(7.0, pytest.approx((12 + 0.1 * 18) / 2))


def test_no_box_at_all():
    logits, boxes = outputs(2)
    labels = [{"class_labels": torch.zeros(0).long(), "boxes": torch.zeros(0, 4)}] * 2
    loss = loss_of(logits, boxes, labels, normalizer(labels))
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.abs().sum() > 0
    assert not boxes.grad.any()


def test_half_precision_is_widened():
    logits, boxes = outputs(dtype=torch.bfloat16)
    labels = targets()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(logits, boxes, labels, normalizer(labels))
    assert loss.dtype == torch.float32
    expected = loss_of(logits.float(), boxes.float(), labels, normalizer(labels))
    torch.testing.assert_close(loss, expected)
