"""Where images come from, and what is wrong with them."""

import gzip
import io
import os
import sys
import tarfile

import numpy as np
import pytest
from data import test_data
from PIL import Image

from irpe.tasks.classify.sources import EMBEDDED, open_images, open_split
from irpe.train.images import BrokenImageError


def picture(colour, size=(8, 6)):
    return Image.new("RGB", size, colour)


def make_folder(root, splits=("train", "val"), classes=("cat", "dog"), count=3):
    for split in splits:
        for number, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                picture((number * 40, index, 0)).save(folder / f"{index}.png")
    return root


def as_tar(folder, path):
    with tarfile.open(path, "w") as archive:
        archive.add(folder, arcname=".")


def test_embedded_images_are_balanced_and_of_the_promised_number():
    train, val = open_images("embedded")
    assert (len(train), len(val)) == (6000, 2000)
    for source, count in ((train, 600), (val, 200)):
        labels = [source.read(index)[1] for index in range(len(source))]
        assert np.bincount(labels).tolist() == [count] * 10
    assert train.read(0)[0].size == (28, 28)
    assert (train.classes, len(train.classes)) == (val.classes, 10)
    assert train.classes[9] == "boot"
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) < 4e6
    assert "MIT" in (EMBEDDED / "LICENSE").read_text()


def test_folders(tmp_path):
    train, val = open_images(str(make_folder(tmp_path)))
    assert list(train.classes) == ["cat", "dog"]
    assert [train.read(index)[1] for index in range(6)] == [0, 0, 0, 1, 1, 1]
    assert val.read(4)[0].getpixel((0, 0)) == (40, 1, 0)
    assert val.filename(4) == f"{tmp_path}/val/dog/1.png"


def test_tar_files_hold_what_the_folders_hold(tmp_path):
    make_folder(tmp_path / "folders")
    (tmp_path / "tars").mkdir()
    for split in ("train", "val"):
        as_tar(tmp_path / "folders" / split, tmp_path / "tars" / f"{split}.tar")
    folders, tars = (open_images(str(tmp_path / kind)) for kind in ("folders", "tars"))
    for folder, tar in zip(folders, tars, strict=True):
        assert list(folder.classes) == list(tar.classes)
        for index in range(len(folder)):
            (a, label_a), (b, label_b) = folder.read(index), tar.read(index)
            assert (label_a, a.tobytes()) == (label_b, b.tobytes())
        tar.reader.tar_state.tf.close()  # timm keeps it open


def make_deep(root):
    """Two classes with folders in them, one image in no class, and files that are no images."""
    for name in ("cat/2019/1.png", "cat/2020/a/2.tiff", "cat/3.png", "dog/2019/1.PNG", "0.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        picture((60 * name.startswith("dog"), 0, 0)).save(root / name)
    (root / "cat/notes.txt").write_text("mine")
    (root / "empty").mkdir()
    return root


def test_classes_are_the_first_level_of_folders(tmp_path):
    make_deep(tmp_path)
    with pytest.warns(UserWarning, match=r"1 images are in no class folder .* \(0\.png\)"):
        train, val = open_images(str(tmp_path), holdout=0.3)
    assert list(train.classes) == ["cat", "dog"]
    found = {each.filename(i): each.read(i)[1] for each in (train, val) for i in range(len(each))}
    names = ["cat/2019/1.png", "cat/2020/a/2.tiff", "cat/3.png", "dog/2019/1.PNG"]
    assert found == {f"{tmp_path}/{name}": int(name.startswith("dog")) for name in names}


@pytest.mark.parametrize("top", [".", "train", "./train"])
def test_classes_are_the_first_level_of_a_tar_file(tmp_path, top):
    make_deep(tmp_path / "deep")
    with tarfile.open(tmp_path / "train.tar", "w") as archive:
        archive.add(tmp_path / "deep", arcname=top)
    with pytest.warns(UserWarning, match=r"train.tar: 1 images are in no class .* \(0\.png\)"):
        source = open_split(str(tmp_path), "train")
    assert list(source.classes) == ["cat", "dog"]
    found = {source.filename(i): source.read(i) for i in range(len(source))}
    names = ["cat/3.png", "cat/2019/1.png", "dog/2019/1.PNG"]
    assert [*found] == [f"{tmp_path}/train.tar/{name}" for name in names]
    for name, (image, label) in found.items():
        assert (image.getpixel((0, 0))[0], label) == ((60, 1) if "dog" in name else (0, 0))
    source.reader.tar_state.tf.close()  # timm keeps it open


def test_a_tar_file_of_tar_files_has_a_class_for_each(tmp_path):
    make_folder(tmp_path / "folders", splits=("train",))
    with tarfile.open(tmp_path / "train.tar", "w") as archive:
        for name in ("cat", "dog"):
            as_tar(tmp_path / "folders/train" / name, tmp_path / f"{name}.tar")
            archive.add(tmp_path / f"{name}.tar", arcname=f"{name}.tar")
    source = open_split(str(tmp_path), "train")
    assert list(source.classes) == ["cat", "dog"]
    labels = [(source.read(i)[0].getpixel((0, 0))[0], source.read(i)[1]) for i in range(6)]
    assert sorted(labels) == [(0, 0)] * 3 + [(40, 1)] * 3
    for state in (source.reader.tar_state, *source.reader.tar_state.children.values()):
        state.tf.close()


def test_images_in_no_folder_are_no_class(tmp_path):
    picture((0, 0, 0)).save(tmp_path / "1.png")
    with (
        pytest.warns(UserWarning, match="in no class folder"),
        pytest.raises(ValueError, match="holds no images in class folders"),
    ):
        open_images(str(tmp_path), holdout=0.5)


def test_idx_files_that_are_compressed_or_not(tmp_path):
    images = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    header = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in images.shape)
    labels = bytes([0, 0, 8, 1]) + (2).to_bytes(4, "big") + bytes([1, 0])
    (tmp_path / "train-images-idx3-ubyte").write_bytes(header + images.tobytes())
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    source = open_split(str(tmp_path), "train")
    image, label = source.read(1)
    assert (np.asarray(image).tolist(), label) == (images[1].tolist(), 0)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(header + images.tobytes()[:-1])
    with pytest.raises(ValueError, match="is damaged, or not an idx file"):
        open_split(str(tmp_path), "train")


def idx(*sizes, content=b""):
    header = bytes([0, 0, 8, len(sizes)]) + b"".join(size.to_bytes(4, "big") for size in sizes)
    return header + content


@pytest.mark.parametrize(
    ("images", "labels"), [(idx(0, 3, 4), idx(0)), (idx(2, 0, 0), idx(2, content=b"ab"))]
)
def test_idx_files_without_a_pixel(tmp_path, images, labels):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(images)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(labels)
    with pytest.raises(ValueError, match=r"train-images.* (0 x 3 x 4|2 x 0 x 0) pixels"):
        open_split(str(tmp_path), "train")


def test_idx_files_that_would_decompress_to_more_than_memory(tmp_path):
    bomb = gzip.compress(idx(60_000, 10_000, 10_000, content=bytes(10**6)))
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(bomb)
    with pytest.raises(ValueError, match="are 6,000,000,000,000 bytes, more than"):
        open_split(str(tmp_path), "train")


def test_an_idx_file_with_a_damaged_compression(tmp_path):
    whole = bytearray(gzip.compress(bytes(range(256)) * 40))
    whole[30] ^= 255
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(whole)
    with pytest.raises(ValueError, match="is damaged, or not an idx file"):
        open_split(str(tmp_path), "train")


def damage_tar(data, damage):
    half = len(data) // 2 // 512 * 512
    damages = {
        "empty": lambda: b"",
        "gzipped": lambda: gzip.compress(data),
        "cut in a member": lambda: data[: half + 100],
        "cut between members": lambda: data[:half],
        "cut before the end": lambda: data.rstrip(b"\0"),
        "text": lambda: b"no archive" * 100,
        "zeroed header": lambda: data.replace(b"./dog/1.png", b"./\x00og/1.png"),
    }
    return damages[damage]()


@pytest.mark.parametrize(
    "damage",
    ["empty", "gzipped", "cut in a member", "cut between members", "cut before the end", "text",
     "zeroed header"],
)  # fmt: skip
def test_a_damaged_tar_file_is_not_taken_for_a_smaller_one(tmp_path, damage):
    make_folder(tmp_path / "folders", splits=("train",))
    as_tar(tmp_path / "folders" / "train", tmp_path / "train.tar")
    whole = (tmp_path / "train.tar").read_bytes()
    open_split(str(tmp_path), "train")
    (tmp_path / "train.tar").write_bytes(damage_tar(whole, damage))
    with pytest.raises(ValueError, match=r"train\.tar is damaged, or not an uncompressed tar"):
        open_split(str(tmp_path), "train")


def test_a_fifo_among_the_images_is_not_waited_for(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "train/cat/1.png").unlink()
    os.mkfifo(tmp_path / "train/cat/1.png")
    train, _ = open_images(str(tmp_path))
    with pytest.raises(BrokenImageError, match=r"1\.png is not a regular file"):
        train.read(1)


def test_a_holdout_is_a_fixed_part_of_one_folder(tmp_path):
    folder = make_folder(tmp_path, splits=("all",), count=10) / "all"
    parts = [open_images(str(folder), holdout=0.25) for _ in range(2)]
    names = [[[s.filename(i) for i in range(len(s))] for s in part] for part in parts]
    assert names[0] == names[1]
    train, val = names[0]
    assert (len(train), len(val)) == (15, 5)
    assert not set(train) & set(val)


@pytest.mark.parametrize("data", ["embedded", "."])
def test_a_holdout_beside_a_split_is_refused(tmp_path, monkeypatch, data):
    monkeypatch.chdir(make_folder(tmp_path))
    with pytest.raises(ValueError, match="has splits, leave it out"):
        open_images(data, holdout=0.2)


def test_real_images_from_tar_files():
    train, val = open_images(str(test_data("tiny-imagenet-29")))
    assert (len(train), len(val), len(train.classes)) == (14500, 1450, 29)
    images = [val.read(index) for index in range(0, len(val), 50)]
    assert {image.size for image, _ in images} == {(64, 64)}
    assert {label for _, label in images} == set(range(29))
    for source in (train, val):
        if source.reader.tar_state.tf is not None:
            source.reader.tar_state.tf.close()


def test_labels_of_val_count_the_classes_of_train(tmp_path):
    make_folder(tmp_path, classes=("ant", "bee", "cat"), count=1)
    for file in (tmp_path / "val/ant").iterdir():
        file.unlink()
    (tmp_path / "val/ant").rmdir()
    train, val = open_images(str(tmp_path))
    assert [val.read(index)[1] for index in range(2)] == [1, 2]
    assert list(val.classes) == list(train.classes)


def test_classes_that_are_not_trained(tmp_path):
    make_folder(tmp_path, splits=("train",), classes=("ant", "cat"), count=1)
    make_folder(tmp_path, splits=("val",), classes=("ant", "bee"), count=1)
    with pytest.raises(ValueError, match="classes that train lacks: bee"):
        open_images(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"no image", "half"])
def test_broken_images(tmp_path, content):
    if content == "half":
        file = io.BytesIO()
        picture((1, 2, 3), (64, 64)).save(file, "JPEG")
        content = file.getvalue()[:-300]
    make_folder(tmp_path)
    (tmp_path / "train/cat/1.png").write_bytes(content)
    train, _ = open_images(str(tmp_path))
    with pytest.raises(BrokenImageError, match=r"train/cat/1\.png"):
        train.read(1)


def test_an_image_that_would_decompress_to_gigabytes(tmp_path):
    make_folder(tmp_path)
    path = tmp_path / "train/cat/1.png"
    Image.new("1", (20_000, 20_000)).save(path)
    assert path.stat().st_size < 10**5
    train, _ = open_images(str(tmp_path))
    with pytest.raises(BrokenImageError, match=r"1\.png .*Image size .* exceeds limit"):
        train.read(1)


def test_paths_in_a_tar_file_are_never_written_to(tmp_path):
    make_folder(tmp_path / "folders", splits=("train",))
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "train.tar", "w") as archive:
        for name in ("cat", "dog"):
            path = tmp_path / "folders/train" / name / "0.png"
            archive.add(path, arcname=f"../../{name}/0.png")
    before = sorted(tmp_path.rglob("*"))
    train = open_split(str(tmp_path / "data"), "train")
    assert [train.read(index)[1] for index in range(2)] == [0, 1]
    train.reader.tar_state.tf.close()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ("nowhere", "is not a folder"),
        ("torch/no_such_set", "cannot be opened"),
        ("empty", r"has no train images: looked for train/, train\.tar"),
    ],
)
def test_data_that_is_not_there(tmp_path, monkeypatch, data, match):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises((ValueError, OSError), match=match):
        open_images(data, root=str(tmp_path / "root") if "/" in data else None)


@pytest.mark.parametrize("data", ["embedded", "."])
@pytest.mark.parametrize("holdout", [0.0, 0.2])
def test_a_root_that_does_nothing_is_refused(data, holdout):
    with pytest.raises(ValueError, match="root 'here' is for datasets with a name"):
        open_images(data, root="here", holdout=holdout)


def test_a_folder_without_images(tmp_path):
    (tmp_path / "train/cat").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds no images in class folders"):
        open_images(str(tmp_path))


def test_a_dataset_of_hugging_face_that_is_stored_here(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="needs the extra 'hfds'")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    folder = make_folder(tmp_path / "pets", splits=("train", "validation"))
    train, val = open_images(f"hfds/{folder}", str(tmp_path / "cache"))
    assert list(train.classes) == ["cat", "dog"]
    assert (len(train), len(val)) == (6, 6)
    found = sorted((label, image.getpixel((0, 0))) for image, label in map(val.read, range(6)))
    assert found == [(n, (n * 40, index, 0)) for n in range(2) for index in range(3)]
    assert "validation" in val.filename(0)
    with pytest.raises(ValueError, match=r"data 'hfds/.*nowhere' cannot be opened \(root "):
        open_split(f"hfds/{tmp_path}/nowhere", "train", str(tmp_path / "cache"))


def test_a_dataset_of_hugging_face_needs_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"datasets is not .*: pip install 'irpe\[hfds\]'"
    ):
        open_split("hfds/cifar10", "train")
