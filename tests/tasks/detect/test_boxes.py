"""Where boxes come from, and what is wrong with them."""

import json
import math
import os
import pickle

import numpy as np
import pytest
import torch
from data import test_data
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from train.boxed import (
    HEIGHT,
    WIDTH,
    annotation,
    coco_content,
    make_coco,
    make_voc,
    picture,
    voc_object,
    voc_text,
)

from irpe.errors import UserError
from irpe.tasks.detect.boxes import clip_box, open_boxes
from irpe.train.images import BrokenImageError

TEXTS = {
    "a": voc_text(voc_object("zebra", (3, 4, 10, 20)), voc_object("cat", (1, 1, 40, 24))),
    "b": voc_text(voc_object("dog", (-5, 2.5, 90, 9), 1), voc_object("cat", (7, 7, 7, 9))),
}


def opened(root, content=None, **options):
    make_coco(root, content)
    return open_boxes(str(root), "train", **options)


def scores(source, detections):
    """Returns what pycocotools measures."""
    truth = COCO()
    truth.dataset = source.content
    truth.createIndex()
    evaluation = COCOeval(truth, truth.loadRes(detections), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation.stats


def detections(source):
    """Returns every target as it would be found."""
    for index in range(len(source)):
        target = source.read(index)[1]
        for (x1, y1, x2, y2), label in zip(target.boxes.tolist(), target.labels, strict=True):
            yield {
                "image_id": source.image_id(index),
                "category_id": source.categories[label],
                "bbox": [x1, y1, x2 - x1, y2 - y1],
                "score": 0.9,
            }


def test_coco_boxes_labels_and_images(tmp_path):
    source = opened(tmp_path)
    assert (len(source), source.num_dropped) == (3, 0)
    assert (source.classes, source.categories) == (["zebra", "cat", "dog"], [3, 5, 7])
    assert [source.image_id(index) for index in range(3)] == [20, 10, 30]
    assert source.filename(1) == str(tmp_path / "train2017" / "10.png")
    (image, first), (_, second), (_, none) = (source.read(index) for index in range(3))
    assert (image.size, image.mode) == ((WIDTH, HEIGHT), "RGB")
    assert first.boxes.tolist() == [[1, 2, 4, 6.5], [10, 11, 22, 24]]
    assert first.labels.tolist() == [0, 2]
    assert second.boxes.tolist() == [[30.5, 10, 40, 24]]
    assert second.labels.tolist() == [1]
    assert (none.boxes.shape, none.labels.shape) == ((0, 4), (0,))
    for target in (first, none):
        assert (target.boxes.dtype, target.labels.dtype) == (torch.float32, torch.int64)


def test_the_content_keeps_what_scoring_needs_and_nothing_else(tmp_path):
    content = opened(tmp_path).content
    by_id = {entry["id"]: entry for entry in content["annotations"]}
    assert by_id[1] == annotation(1, 10, 5, [30.5, 10, 20, 30], area=150.0, iscrowd=0)
    assert by_id[3] == annotation(3, 20, 7, [0, 0, 40, 24], area=900, iscrowd=1)
    assert by_id[4] == annotation(4, 20, 7, [10, 11, 12, 13], area=156, iscrowd=0)
    assert "segmentation" not in by_id[2]
    assert [(entry["id"], entry["name"]) for entry in content["categories"]] == [
        (3, "zebra"),
        (5, "cat"),
        (7, "dog"),
    ]


@pytest.mark.parametrize("folder", ["train2017", "images/train2017", "images"])
def test_places_of_coco_images(tmp_path, folder):
    make_coco(tmp_path, folder=folder)
    assert open_boxes(str(tmp_path), "train").filename(0) == str(tmp_path / folder / "20.png")


def test_coco_files_in_folders_of_their_own(tmp_path):
    content = coco_content()
    content["images"][0]["file_name"] = "deep/er/x.png"
    (tmp_path / "train2017" / "deep" / "er").mkdir(parents=True)
    picture().save(tmp_path / "train2017" / "deep" / "er" / "x.png")
    assert opened(tmp_path, content).read(0)[0].size == (WIDTH, HEIGHT)


def test_a_split_may_be_named_in_full(tmp_path):
    make_coco(tmp_path)
    make_coco(tmp_path, name="train2014", folder="train2014")
    assert open_boxes(str(tmp_path), "train2014").filename(0).endswith("train2014/20.png")
    check_refused(UserError, "instances_train2014.json, instances_train2017.json", tmp_path)


INVALID = [
    [1, 2, 0, 5],
    [1, 2, 5, 0],
    [5, 5, -2, 3],
    [5, 5, 3, -2],
    [WIDTH, 0, 5, 5],
    [0, HEIGHT, 5, 5],
    [-9, 0, 9, 5],
    [math.nan, 0, 5, 5],
    [0, 0, math.inf, 5],
    ["1", 2, 3, 4],
    [None, 2, 3, 4],
    [True, 2, 3, 4],
    [10**400, 2, 3, 4],
    [1, 2, 3],
    [1, 2, 3, 4, 5],
    "1234",
    {"x": 1},
    None,
    [30, 2, 1e-9, 4],
]


@pytest.mark.parametrize("box", INVALID, ids=lambda box: repr(box)[:20])
def test_invalid_boxes_are_left_out_and_counted(tmp_path, box):
    content = coco_content()
    content["annotations"] += [annotation(8, 10, 5, box), annotation(9, 30, 5, box)]
    source = opened(tmp_path, content)
    assert source.num_dropped == 2
    assert [entry["id"] for entry in source.content["annotations"]] == [1, 2, 3, 4]
    assert [len(source.read(index)[1].boxes) for index in range(3)] == [2, 1, 0]
    parts = [source.subset(range(count)) for count in (1, 2, 3)]
    assert [part.num_dropped for part in parts] == [0, 1, 2]


@given(box=st.lists(st.floats() | st.integers(), min_size=4, max_size=4))
def test_a_box_is_inside_with_an_area_or_invalid(box):
    found = clip_box(box, WIDTH, HEIGHT)
    if found is not None:
        x1, y1, x2, y2 = found
        assert 0 <= x1 < x2 <= WIDTH
        assert 0 <= y1 < y2 <= HEIGHT
        assert np.array(found, np.float32).tolist() == found


@given(
    first=st.tuples(st.integers(0, WIDTH - 1), st.integers(0, HEIGHT - 1)),
    size=st.tuples(st.integers(1, WIDTH), st.integers(1, HEIGHT)),
)
def test_a_box_covers_its_pixels_inside(first, size):
    covered = np.zeros((3 * HEIGHT, 3 * WIDTH), bool)
    covered[first[1] : first[1] + size[1], first[0] : first[0] + size[0]] = True
    y, x = np.nonzero(covered[:HEIGHT, :WIDTH])
    assert clip_box([*first, *size], WIDTH, HEIGHT) == [x.min(), y.min(), x.max() + 1, y.max() + 1]


def test_the_first_images(tmp_path):
    source = opened(tmp_path)
    first = source.subset([0])
    assert len(first) == 1
    assert [entry["id"] for entry in first.content["images"]] == [20]
    assert [entry["id"] for entry in first.content["annotations"]] == [2, 3, 4]
    assert (first.classes, first.categories) == (source.classes, source.categories)
    assert torch.equal(first.read(0)[1].boxes, source.read(0)[1].boxes)
    assert len(source.content["annotations"]) == 4


def test_classes_of_another_split(tmp_path):
    source = opened(tmp_path, classes=["dog", "ape", "cat", "zebra"])
    assert source.classes == ["dog", "ape", "cat", "zebra"]
    assert source.categories == [7, 8, 5, 3]
    assert source.read(0)[1].labels.tolist() == [3, 0]
    assert {entry["category_id"] for entry in source.content["annotations"]} == {3, 5, 7}
    with pytest.raises(ValueError, match=r"train2017\.json: category 5 is 'cat', none of the 2"):
        opened(tmp_path, classes=["dog", "zebra"])


def test_pycocotools_takes_the_content(tmp_path):
    content = coco_content()
    content["annotations"][0]["id"] = 0  # which pycocotools takes for no match
    content["annotations"][0]["bbox"] = [30, 10, 10, 14]
    content["annotations"][3]["bbox"] = [10, 11, 12, 13]
    source = opened(tmp_path, content)
    assert sorted(entry["id"] for entry in source.content["annotations"]) == [2, 3, 4, 5]
    found = list(detections(source))
    assert scores(source, found)[0] == pytest.approx(1.0)
    in_crowd = {"image_id": 20, "category_id": 7, "bbox": [25, 2, 9, 9], "score": 0.99}
    assert scores(source, [*found, in_crowd])[0] == pytest.approx(1.0)
    wrong = {**in_crowd, "image_id": 30, "bbox": [1, 1, 9, 9]}
    assert scores(source, [*found, wrong])[0] < 0.9


def change(*keys, **values):
    """Returns a function that changes an entry of a content; `...` stands for taking it away."""

    def apply(content):
        for key in keys:
            content = content[key]
        for name, value in values.items():
            if value is ...:
                del content[name]
            else:
                content[name] = value

    return apply


WRONG = [
    ((), {"images": ...}, "images"),
    ((), {"images": {}}, "{}"),
    ((), {"images": []}, "0 images"),
    ((), {"categories": []}, "0 categories"),
    (("categories", 1), {"id": 7}, "category id 7"),
    (("categories", 1), {"name": "dog"}, "'dog'"),
    (("categories", 1), {"name": ...}, "category 3"),
    (("images", 1), {"id": 20}, "image id 20"),
    (("images", 1), {"id": ...}, "entry 1 of the images"),
    (("images", 1), {"id": "10"}, "'10'"),
    (("images", 1), {"id": True}, "True"),
    (("images", 1), {"width": ...}, "image 10"),
    (("images", 1), {"height": 0}, "image 10: 'height' is 0"),
    (("images", 0), {"width": 10**40}, "'width' is 1000"),
    (("images", 1), {"file_name": ...}, "image 10"),
    (("annotations", 1), {"id": 1}, "annotation id 1"),
    (("annotations", 1), {"id": ...}, "entry 1 of the annotations"),
    (("annotations", 1), {"bbox": ...}, "annotation 2"),
    (("annotations", 1), {"image_id": ...}, "annotation 2"),
    (("annotations", 1), {"image_id": 99}, "image_id 99"),
    (("annotations", 1), {"category_id": ...}, "annotation 2"),
    (("annotations", 1), {"category_id": 99}, "category_id 99"),
    (("annotations", 1), {"iscrowd": 2}, "'iscrowd' is 2"),
    (("annotations", 1), {"area": "big"}, "'big'"),
    (("annotations", 1), {"area": -1}, "-1"),
    *((("images", 0), {"file_name": name}, repr(name)) for name in (
        "../20.png", "/etc/passwd", "a/../../20.png", "..\\20.png", "C:\\20.png", "", "."
    )),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "values", "said"), WRONG)
def test_wrong_coco_files(tmp_path, keys, values, said):
    picture().save(tmp_path / "20.png")  # outside
    content = entry = json.loads(json.dumps(coco_content()))
    for key in keys:
        entry = entry[key]
    for name, value in values.items():
        if value is ...:
            del entry[name]
        else:
            entry[name] = value
    with pytest.raises(UserError) as error:
        opened(tmp_path, content)
    assert "instances_train2017.json" in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize("text", [b"{", b"", b"[" * 100_000, b"\xff\xfe{}\x00\x81", b"[]", b"3"])
def test_files_that_are_no_json(tmp_path, text):
    make_coco(tmp_path).write_bytes(text)
    with pytest.raises(UserError, match=r"instances_train2017\.json"):
        open_boxes(str(tmp_path), "train")


@pytest.mark.parametrize("name", ["40.png", "nowhere/10.png", "10.png\0", "10.PNG"])
def test_missing_images_are_found_when_the_source_is_opened(tmp_path, name):
    content = coco_content()
    content["images"][1]["file_name"] = name
    with pytest.raises(FileNotFoundError, match=r"1 of the 3 images of .*json.* \(image id 10\)"):
        opened(tmp_path, content)


def test_images_that_cannot_be_read(tmp_path):
    source = opened(tmp_path)
    whole = (tmp_path / "train2017" / "20.png").read_bytes()
    for wrong in (whole[:60], b"text", b""):
        (tmp_path / "train2017" / "20.png").write_bytes(wrong)
        with pytest.raises(BrokenImageError, match=r"20\.png \(image id 20\) cannot be read"):
            source.read(0)
    picture((HEIGHT, WIDTH)).save(tmp_path / "train2017" / "10.png")
    message = r"10\.png \(image id 10\) has 24 x 40 pixels, but .*train2017\.json says 40 x 24"
    with pytest.raises(ValueError, match=message):
        source.read(1)


def test_a_fifo_among_the_images_is_not_waited_for(tmp_path):
    source = opened(tmp_path)
    (tmp_path / "train2017" / "20.png").unlink()
    os.mkfifo(tmp_path / "train2017" / "20.png")
    with pytest.raises(BrokenImageError, match=r"20\.png .*is not a regular file"):
        source.read(0)


def test_grey_and_deep_images_become_rgb(tmp_path):
    source = opened(tmp_path)
    deep = np.full((HEIGHT, WIDTH), 200 * 256, np.uint16)
    Image.fromarray(deep).save(tmp_path / "train2017" / "20.png")
    Image.new("L", (WIDTH, HEIGHT), 70).save(tmp_path / "train2017" / "10.png")
    assert source.read(0)[0].getpixel((0, 0)) == (200, 200, 200)
    assert source.read(1)[0].getpixel((0, 0)) == (70, 70, 70)


def test_a_source_goes_to_other_processes(tmp_path):
    source = opened(tmp_path)
    copy = pickle.loads(pickle.dumps(source))
    assert torch.equal(copy.read(0)[1].boxes, source.read(0)[1].boxes)


def test_voc_boxes_labels_and_images(tmp_path):
    source = open_boxes(str(make_voc(tmp_path, TEXTS)), "train")
    assert (len(source), source.num_dropped) == (2, 1)
    assert (source.classes, source.categories) == (["cat", "dog", "zebra"], [1, 2, 3])
    assert source.filename(1) == str(tmp_path / "JPEGImages" / "b.png")
    assert [source.image_id(index) for index in range(2)] == [1, 2]
    target = source.read(0)[1]
    assert target.boxes.tolist() == [[3, 4, 10, 20], [1, 1, 40, 24]]
    assert target.labels.tolist() == [2, 0]
    assert len(source.read(1)[1].boxes) == 0
    assert source.content["annotations"][-1] == {
        "id": 3,
        "image_id": 2,
        "category_id": 2,
        "bbox": [-5, 2.5, 95, 6.5],
        "area": 95 * 6.5,
        "iscrowd": 1,
    }


def test_finding_what_is_difficult_changes_no_score(tmp_path):
    source = open_boxes(str(make_voc(tmp_path, TEXTS)), "train")
    found = list(detections(source))
    difficult = {"image_id": 2, "category_id": 2, "bbox": [0, 2.5, 40, 6.5], "score": 0.99}
    assert scores(source, found)[0] == pytest.approx(1.0)
    assert scores(source, [*found, difficult])[0] == pytest.approx(1.0)


def test_voc_classes_of_another_split(tmp_path):
    make_voc(tmp_path, TEXTS)
    source = open_boxes(str(tmp_path), "train", ["zebra", "ape", "dog", "cat"])
    assert (source.classes[0], source.categories) == ("zebra", [1, 2, 3, 4])
    assert source.read(0)[1].labels.tolist() == [0, 3]
    assert source.content["annotations"][0]["category_id"] == 1
    with pytest.raises(ValueError, match=r"a\.xml: object 2 is 'cat', none of the 2 classes"):
        open_boxes(str(tmp_path), "train", ["zebra", "dog"])


@pytest.mark.parametrize("box", [(1, 1, "x", 9), (1, 1, "nan", 9), (1, 1, "", 9), (9, 1, 5, 9)])
def test_invalid_voc_boxes_are_left_out_and_counted(tmp_path, box):
    text = voc_text(voc_object("dog", box), voc_object("cat", (1, 2, 3, 4)))
    source = open_boxes(str(make_voc(tmp_path, {"a": text})), "train")
    assert source.num_dropped == 1
    assert source.read(0)[1].boxes.tolist() == [[1, 2, 3, 4]]
    assert source.classes == ["cat", "dog"]


BOMB = '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]>'
CAT = voc_object("cat", (1, 2, 3, 4))
WRONG_XML = {
    "document type": (BOMB + voc_text(CAT), "document type"),
    "16 bits": ((BOMB + voc_text(CAT)).encode("utf-16"), "16-bit"),
    "half": (voc_text(CAT)[:-5], "a.xml"),
    "no size": ("<annotation/>", "size/width"),
    "odd size": (voc_text(CAT, size=(40, "-24")), "'-24'"),
    "huge size": (voc_text(CAT, size=("9" * 5000, 24)), "'999"),
    "zero size": (voc_text(CAT, size=(0, 24)), "'0'"),
    "no name": (voc_text("<object/>"), "object 1 has no name"),
    "empty name": (voc_text(CAT.replace("cat", "")), "object 1: it has no name"),
    "no box": (voc_text("<object><name>a</name></object>"), "bndbox/xmin"),
    "difficult": (
        voc_text(CAT, voc_object("cat", (1, 2, 3, 4), "x")),
        "object 2: difficult is 'x'",
    ),
    "file outside": (voc_text(CAT, filename="../a.png"), "'../a.png'"),
    "no objects": (voc_text(), "1 images"),
    "encoding": ('<?xml version="1.0" encoding="none"?>' + voc_text(CAT), "a.xml"),
}


@pytest.mark.parametrize(("text", "said"), WRONG_XML.values(), ids=WRONG_XML)
def test_wrong_voc_files(tmp_path, text, said):
    make_voc(tmp_path, {"a": ""})
    data = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "Annotations" / "a.xml").write_bytes(data)
    with pytest.raises(UserError) as error:
        open_boxes(str(tmp_path), "train")
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("names", "said"),
    [(b"a\na\n", "a occurs 2"), (b"a 1\n", "'a 1'"), (b"../a\n", "'../a'"), (b"\n \n", "no images"),
     (b"\xff\n", "not text")],
)  # fmt: skip
def test_wrong_lists_of_voc_images(tmp_path, names, said):
    make_voc(tmp_path, TEXTS)
    (tmp_path / "ImageSets" / "Main" / "train.txt").write_bytes(names)
    with pytest.raises(UserError, match=r"train\.txt") as error:
        open_boxes(str(tmp_path), "train")
    assert said in str(error.value)


def test_a_byte_order_mark_before_a_list_of_voc_images(tmp_path):
    make_voc(tmp_path, TEXTS)
    (tmp_path / "ImageSets" / "Main" / "train.txt").write_bytes(b"\xef\xbb\xbfa\nb\n")
    assert len(open_boxes(str(tmp_path), "train")) == 2


def check_refused(error, said, root, split="train"):
    with pytest.raises(error) as found:
        open_boxes(str(root), split)
    assert said in str(found.value)


def test_missing_voc_files(tmp_path):
    make_voc(tmp_path, TEXTS)
    picture().save(tmp_path / "JPEGImages" / "a.jpg")
    check_refused(UserError, "both a.jpg and a.png", tmp_path)
    (tmp_path / "JPEGImages" / "a.jpg").unlink()
    (tmp_path / "JPEGImages" / "b.png").rename(tmp_path / "JPEGImages" / "b.txt")
    check_refused(FileNotFoundError, "b.jpg (image id 2)", tmp_path)
    (tmp_path / "Annotations" / "a.xml").unlink()
    check_refused(FileNotFoundError, "a.xml", tmp_path)
    (tmp_path / "JPEGImages").rename(tmp_path / "Images")
    check_refused(FileNotFoundError, "JPEGImages", tmp_path)


def test_folders_of_no_known_layout(tmp_path):
    check_refused(FileNotFoundError, "/none'", tmp_path / "none")
    check_refused(FileNotFoundError, "neither", tmp_path)
    make_coco(tmp_path)
    for split in ("val", ""):
        check_refused(
            FileNotFoundError, f"split {split!r}, and one is needed; it has", tmp_path, split
        )
    (tmp_path / "train2017").rename(tmp_path / "other")
    check_refused(FileNotFoundError, "train2017", tmp_path)
    make_voc(tmp_path, TEXTS)
    check_refused(UserError, "both", tmp_path)


def test_splits_of_voc_are_listed_and_match_in_full(tmp_path):
    make_voc(make_voc(tmp_path, TEXTS), TEXTS, "trainval")
    check_refused(FileNotFoundError, "it has train.txt, trainval.txt", tmp_path, "tra")


def test_real_coco():
    source = open_boxes(str(test_data("coco128")), "train")
    assert (len(source), len(source.classes), source.num_dropped) == (128, 80, 0)
    annotations = source.content["annotations"]
    assert (len(annotations), sum(each["iscrowd"] for each in annotations)) == (939, 10)
    assert len({each["category_id"] for each in annotations}) == 71
    assert sum(len(source.read(index)[1].boxes) for index in range(128)) == 929


def test_real_voc():
    train = open_boxes(str(test_data("bccd")), "train")
    parts = [
        train,
        *(open_boxes(str(test_data("bccd")), s, train.classes) for s in ("val", "test")),
    ]
    assert train.classes == ["Platelets", "RBC", "WBC"]
    assert [len(part) for part in parts] == [205, 87, 72]
    assert sum(len(part.content["annotations"]) + part.num_dropped for part in parts) == 4888
    assert sum(part.num_dropped for part in parts) == 2
    assert train.read(3)[0].size == (640, 480)
