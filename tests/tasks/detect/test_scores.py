"""Average precision: cases computed on paper, and pycocotools on files."""

import copy
import json
import math

import pytest
import torch

pytest.importorskip("accelerate", reason="needs the extra 'train'")
pytest.importorskip("pycocotools", reason="needs the extra 'train'")

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from tasks.detect.detections import dataset, found, scene, truth

from irpe.tasks.detect.scores import score_boxes, to_detections

LARGE = [10, 20, 100, 200]


def numbers(score):
    return list(score.details.values())


def same(ours, theirs):
    return all(a == b or (math.isnan(a) and b == -1) for a, b in zip(ours, theirs, strict=True))


def pycocotools(content, detections, folder):
    """The numbers of a direct call, from files, as its own documentation has it."""
    (folder / "truth.json").write_text(json.dumps(content))
    (folder / "found.json").write_text(json.dumps(detections))
    coco = COCO(str(folder / "truth.json"))
    evaluation = COCOeval(coco, coco.loadRes(str(folder / "found.json")), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation


def test_perfect_boxes_score_one():
    content = dataset([truth(1, 3, LARGE), truth(2, 7, [0, 0, 50, 40])])
    detections = [found(1, 3, LARGE), found(2, 7, [0, 0, 50, 40], 0.1)]
    score = score_boxes(content, detections)
    assert numbers(score)[:3] == pytest.approx([1, 1, 1], abs=1e-12)
    assert score.num_images == 2


def test_one_of_two_found_scores_the_recall_levels_up_to_a_half():
    content = dataset([truth(1, 3, LARGE), truth(2, 3, LARGE)], categories=(3,))
    score = score_boxes(content, [found(1, 3, LARGE)])
    assert (
        score.details["AP"] == score.details["AP50"] == pytest.approx(51 / 101)
    )  # 0, 0.01, ..., 0.5


def test_a_false_box_counts_where_its_score_puts_it():
    content = dataset([truth(1, 3, LARGE), truth(2, 3, LARGE)], categories=(3,))
    right = [found(1, 3, LARGE, 0.9), found(2, 3, LARGE, 0.5)]
    wrong = [300, 300, 100, 100]
    last = score_boxes(content, [*right, found(1, 3, wrong, 0.1)])
    between = score_boxes(content, [*right, found(1, 3, wrong, 0.7)])
    first = score_boxes(content, [*right, found(1, 3, wrong, 0.95)])
    assert last.details["AP"] == pytest.approx(1)
    assert between.details["AP"] == pytest.approx((51 + 50 * 2 / 3) / 101)  # precision 1, 1/2, 2/3
    assert first.details["AP"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("shift", "thresholds"), [(0, 10), (10, 7), (20, 4), (24, 3), (33, 1), (34, 0)]
)
def test_a_shifted_box_is_found_up_to_its_iou(shift, thresholds):
    iou = (100 - shift) / (100 + shift)
    assert thresholds == sum(iou >= (50 + 5 * n) / 100 for n in range(10))
    score = score_boxes(dataset([truth(1, 3, [0, 0, 100, 50])]), [found(1, 3, [shift, 0, 100, 50])])
    assert score.details["AP"] == pytest.approx(thresholds / 10)
    assert (score.details["AP50"], score.details["AP75"]) == pytest.approx(
        (float(iou >= 0.5), float(iou >= 0.75))
    )


def test_boxes_in_a_crowd_are_neither_right_nor_wrong():
    boxes = [truth(1, 3, LARGE), truth(1, 3, [300, 0, 300, 300], crowd=1)]
    inside = [found(1, 3, [320 + 10 * n, 20, 40, 40], 0.95) for n in range(5)]
    detections = [found(1, 3, LARGE), *inside]
    assert score_boxes(dataset(boxes), detections).details["AP"] == pytest.approx(1)
    boxes[1]["iscrowd"] = 0
    assert score_boxes(dataset(boxes), detections).details["AP"] == pytest.approx(1 / 6 * 51 / 101)


def test_sizes_are_scored_apart():
    small, medium, large = [0, 0, 31, 31], [100, 0, 50, 50], [200, 0, 100, 100]
    content = dataset([truth(1, 3, box) for box in (small, medium, large)])
    score = score_boxes(content, [found(1, 3, small), found(1, 3, large)])
    assert (score.details["APs"], score.details["APm"], score.details["APl"]) == pytest.approx(
        (1, 0, 1)
    )
    score = score_boxes(dataset([truth(1, 3, small)]), [found(1, 3, small)])
    assert score.details["APs"] == pytest.approx(1)
    assert math.isnan(score.details["APm"])
    assert math.isnan(score.details["APl"])


def test_nothing_found_is_zero_and_nothing_to_find_is_nan():
    score = score_boxes(dataset([truth(1, 3, LARGE)]), [])
    assert (
        score.details["AP"],
        score.details["AP50"],
        score.details["AP75"],
        score.details["APl"],
        score.num_images,
    ) == (0, 0, 0, 0, 2)
    for detections in ([], [found(1, 3, LARGE)]):
        assert all(map(math.isnan, numbers(score_boxes(dataset([]), detections))))
    assert score_boxes(dataset([], images=()), []).num_images == 0


@pytest.mark.parametrize("seed", range(4))
def test_numbers_are_those_of_pycocotools(tmp_path, seed, capsys):
    content, detections = scene(seed)
    theirs = pycocotools(content, detections, tmp_path)
    capsys.readouterr()
    ours = score_boxes(content, detections)
    assert capsys.readouterr() == ("", "")
    assert 0.1 < ours.details["AP"] < 0.9
    assert same(numbers(ours), theirs.stats[:6].tolist())
    precision = theirs.eval["precision"]
    means = [float(precision[:, :, place, 0, 2].mean()) for place in range(3)]
    of_classes = ours.classes
    assert list(of_classes) == ["class 3", "class 7", "class 40"]
    assert same(of_classes.values(), means)
    assert math.isnan(of_classes["class 40"])


def test_arguments_stay_as_they_are_and_scores_repeat():
    content, detections = scene(9)
    before = copy.deepcopy((content, detections))
    first, again = (score_boxes(content, detections) for _ in range(2))
    assert first == again
    assert (content, detections) == before


def test_classes_are_named_by_id_in_any_order():
    content = dataset([truth(1, 7, LARGE), truth(2, 3, LARGE)], categories=(7, 3))
    scores = score_boxes(content, [found(1, 7, LARGE)]).classes
    assert scores == pytest.approx({"class 7": 1, "class 3": 0})


def test_queries_become_the_box_in_the_image():
    scores, classes = torch.tensor([0.3, 0.5]), torch.tensor([1, 0])
    boxes = torch.tensor([[0.5, 0.5, 0.5, 0.25], [0.0, 0.5, 0.5, 2.0]])
    detections = to_detections(scores, classes, boxes, 11, (40, 80), [7, 3])
    assert [(one["image_id"], one["category_id"]) for one in detections] == [(11, 3), (11, 7)]
    assert [one["score"] for one in detections] == pytest.approx([0.3, 0.5])
    for one, box in zip(detections, [[20, 15, 40, 10], [0, 0, 20, 40]], strict=True):
        assert one["bbox"] == pytest.approx(box, abs=1e-4)
    assert json.loads(json.dumps(detections)) == detections
