"""Label maps in four layouts: the same classes whatever the layout, and errors that help."""

import os

import numpy as np
import pytest
from data import test_data
from PIL import Image
from train.streets import CLASSES, VOID, draw_scene, make_streets

from irpe.errors import UserError
from irpe.tasks.segment.labels import IGNORED, _pascal_colour, open_pixels
from irpe.train.images import BrokenImageError


def own(root, split="train", **options):
    return open_pixels(str(root), split, **{"ignore_label": VOID, **options})


def save(path, values, palette=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(values, np.uint8))
    if palette:
        image = image.convert("P")
        image.putdata(np.asarray(values).ravel().tolist())
        image.putpalette(palette)
    image.save(path)


def picture(path, size=(4, 3)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (1, 2, 3)).save(path)


def test_the_own_layout(tmp_path):
    source = own(make_streets(tmp_path, count=3))
    assert list(source.classes) == ["0", "1", "2"]
    assert len(source) == 3
    image, labels = source.read(1)
    expected, values = draw_scene(1)
    assert image.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))
    np.testing.assert_array_equal(labels, np.where(values == VOID, IGNORED, values))
    assert source.filename(1) == str(tmp_path / "images/train/1.png")
    assert len(source.first(2)) == 2


def test_names_of_classes(tmp_path):
    make_streets(tmp_path, count=1)
    names = tmp_path / "names.txt"
    names.write_text("\n".join(CLASSES) + "\n\n")
    assert own(tmp_path, class_names=str(names)).classes == list(CLASSES)
    again = own(tmp_path, "val", classes=CLASSES)
    assert again.classes == list(CLASSES)


def test_an_ignored_label_among_the_classes(tmp_path):
    make_streets(tmp_path, count=1)
    names = tmp_path / "names.txt"
    names.write_text("\n".join((*CLASSES, "void")))
    source = own(tmp_path, ignore_label=0, class_names=str(names))
    assert list(source.classes) == ["road", "car", "void"]
    _, labels = source.read(0)
    values = draw_scene(0)[1]
    np.testing.assert_array_equal(labels, np.where(values == 0, IGNORED, values - 1))
    again = own(tmp_path, "val", ignore_label=0, classes=source.classes)
    np.testing.assert_array_equal(again.lookup, source.lookup)
    unnamed = own(tmp_path, ignore_label=0)
    assert unnamed.classes == ["1", "2", "3"]
    np.testing.assert_array_equal(unnamed.lookup, source.lookup)


def test_label_maps_with_16_bits(tmp_path):
    make_streets(tmp_path, count=1)
    values = draw_scene(0)[1].astype(np.uint16)
    Image.fromarray(values).save(tmp_path / "labels/train/0.png")
    np.testing.assert_array_equal(own(tmp_path, ignore_label=VOID).read(0)[1] == 1, values == 1)
    values[0, 0] = 256
    Image.fromarray(values).save(tmp_path / "labels/train/0.png")
    with pytest.raises(ValueError, match=r"0.png has the label value 256: label values are from 0"):
        own(tmp_path)


def test_cityscapes(tmp_path):
    values = [[0, 7, 33, 34 - 1], [11, 1, 26, 24], [255, 8, 23, 21]]
    name = "aachen/aachen_000000_000019"
    picture(tmp_path / f"leftImg8bit/train/{name}_leftImg8bit.png")
    save(tmp_path / f"gtFine/train/{name}_gtFine_labelIds.png", values)
    save(tmp_path / f"gtFine/train/{name}_gtFine_color.png", values)
    source = open_pixels(str(tmp_path), "train")
    assert list(source.classes)[:3] == ["road", "sidewalk", "building"]
    assert len(source.classes) == 19
    labels = source.read(0)[1]
    assert labels.tolist() == [[255, 0, 18, 18], [2, 255, 13, 11], [255, 1, 10, 8]]


def test_ade20k(tmp_path):
    picture(tmp_path / "images/training/a.jpg")
    save(tmp_path / "annotations/training/a.png", [[0, 1, 150, 2]] * 3)
    source = open_pixels(str(tmp_path), "train")
    assert source.read(0)[1].tolist() == [[255, 0, 149, 1]] * 3
    assert source.classes[0] == "1"
    lines = ["Idx\tRatio\tTrain\tVal\tStuff\tName"]
    lines += [f"{n}\t0.1\t1\t1\t1\tthing {n}, other" for n in range(1, 151)]
    (tmp_path / "objectInfo150.txt").write_text("\n".join(lines))
    assert open_pixels(str(tmp_path), "training").classes[149] == "thing 150"
    (tmp_path / "objectInfo150.txt").write_text("\n".join(lines[:9]))
    with pytest.raises(ValueError, match=r"objectInfo150.txt has 8 lines after its heading"):
        open_pixels(str(tmp_path), "train")


def test_pascal_voc_by_its_palette_and_by_its_colours(tmp_path):
    values = np.array([[0, 1, 20, 255], [15, 7, 2, 0], [3, 3, 3, 4]])
    palette = [level for value in range(256) for level in _pascal_colour(value).to_bytes(3)]
    for name in ("a", "b", "c"):
        picture(tmp_path / f"JPEGImages/{name}.jpg")
    save(tmp_path / "SegmentationClass/a.png", values, palette)
    colours = np.array(palette, np.uint8).reshape(256, 3)[values]
    save(tmp_path / "SegmentationClass/b.png", colours)
    save(tmp_path / "SegmentationClass/c.png", np.full((3, 4, 3), 77))
    listed = tmp_path / "ImageSets/Segmentation/train.txt"
    listed.parent.mkdir(parents=True)
    listed.write_text("a\nb\nc\n")
    source = open_pixels(str(tmp_path), "train")
    assert source.classes[15] == "person"
    for index in range(2):
        np.testing.assert_array_equal(source.read(index)[1], values)
    with pytest.raises(ValueError, match=r"c.png has the colour #4d4d4d, which is not in Pascal"):
        source.read(2)
    listed.write_text("a\nd\n")
    with pytest.raises(FileNotFoundError, match=r"has no file for d, which .*train.txt lists"):
        open_pixels(str(tmp_path), "train")


def test_the_palette_is_the_published_one():
    colours = {1: 0x800000, 2: 0x008000, 8: 0x400000, 15: 0xC08080, 255: 0xE0E0C0}
    assert {value: _pascal_colour(value) for value in colours} == colours


DAMAGES = {
    "an image without labels": (lambda root: (root / "labels/train/1.png").unlink(), "1.png"),
    "labels without an image": (lambda root: (root / "images/train/1.png").unlink(), "1.png"),
    "no labels at all": (
        lambda root: os.rename(root / "labels/train", root / "labels/other"), "labels/train",
    ),
    "an unknown label value": (
        lambda root: save(root / "labels/train/1.png", np.full((24, 40), 9)), "value 9",
    ),
    "another size": (lambda root: save(root / "labels/train/1.png", np.zeros((23, 40))), "40 x 23"),
    "a label map in colour": (
        lambda root: save(root / "labels/train/1.png", np.zeros((24, 40, 3))), "mode RGB",
    ),
    "no image": (
        lambda root: [path.unlink() for path in (root / "images/train").iterdir()], "images/train",
    ),
    "two images of one name": (lambda root: picture(root / "images/train/1.jpg"), "and 1.png"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_what_is_wrong_is_named_before_training(tmp_path, damage, said):
    make_streets(tmp_path, count=2)
    damage(tmp_path)
    with pytest.raises(UserError) as error:
        own(tmp_path, classes=CLASSES)
    assert said in str(error.value)


@pytest.mark.parametrize("kind", ["images", "labels"])
def test_what_cannot_be_read_is_left_to_the_reading(tmp_path, kind):
    make_streets(tmp_path, count=2)
    (tmp_path / kind / "train/1.png").write_bytes(b"nothing")
    source = own(tmp_path)
    source.read(0)
    with pytest.raises(BrokenImageError, match=rf"{kind}/train/1\.png"):
        source.read(1)


def check_refused(error, said, *arguments, **options):
    with pytest.raises(error) as found:
        open_pixels(*map(str, arguments), **options)
    assert said in str(found.value)


def test_folders_and_splits_that_do_not_exist(tmp_path):
    check_refused(FileNotFoundError, "'nowhere'", "nowhere", "train")
    check_refused(FileNotFoundError, "none of the layouts", tmp_path, "train")
    make_streets(tmp_path, count=1)
    check_refused(FileNotFoundError, "split 'test'; it has train, val", tmp_path, "test")
    check_refused(FileNotFoundError, "nothing.txt", tmp_path, "train", class_names="nothing.txt")
    (tmp_path / "names.txt").write_text("one\none\n")
    names = {"class_names": str(tmp_path / "names.txt")}
    check_refused(UserError, "'one' twice", tmp_path, "train", **names)


def test_layouts_that_say_themselves_what_is_ignored(tmp_path):
    picture(tmp_path / "images/training/a.jpg")
    save(tmp_path / "annotations/training/a.png", [[0, 1, 151, 2]] * 3)
    check_refused(UserError, "ignore_label = 0", tmp_path, "train", ignore_label=0)
    with pytest.raises(UserError, match="value 151"):
        open_pixels(str(tmp_path), "train").read(0)
    names = tmp_path / "names.txt"
    names.write_text("one\ntwo\n")
    check_refused(UserError, "2 names", tmp_path, "train", class_names=str(names))


@pytest.mark.slow
def test_camvid():
    path = test_data("camvid")
    sizes = {}
    for split in ("train", "val", "test"):
        source = open_pixels(str(path), split, ignore_label=11)
        assert len(source.classes) == 11
        sizes[split] = len(source)
    assert sizes == {"train": 367, "val": 101, "test": 233}
