"""Average precision: that of pycocotools on files."""

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
