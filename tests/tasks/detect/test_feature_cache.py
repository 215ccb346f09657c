"""Cached feature maps: those of the images, drawn by seed, never those of something else."""

import shutil

import pytest
import torch
from train.scenes import frozen, make_scenes, task

from irpe.tasks.detect.backbone import load_backbone
from irpe.tasks.detect.boxes import Target
from irpe.tasks.detect.feature_cache import FeatureMaps, cache_path, cached_features
from irpe.tasks.detect.views import BoxImages, Views
from irpe.train.processes import Sample

VIEWS = Views((64,), 160, 0.5, False, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_scenes(tmp_path_factory.mktemp("data") / "scenes")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("IRPE_FEATURE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def source(data):
    return task(data).open("train", None).source


@pytest.fixture
def backbone(data):
    return load_backbone(frozen(data), None)


def test_cached_features_are_those_of_the_images(source, backbone, cache):
    maps = cached_features(backbone, BoxImages(source, VIEWS, 0), 2, 3)
    pixels, target, *_ = BoxImages(source, VIEWS, 0)[Sample(1, 5, 5)]
    features, feature_target, index, _ = maps.versions[5][1]
    with torch.no_grad():
        torch.testing.assert_close(features, backbone.feature_map(pixels[None])[0])
    assert index == 5
    assert torch.equal(feature_target.labels, target.labels)
    ratio = torch.tensor([features.shape[a] / pixels.shape[a] for a in (2, 1, 2, 1)])
    torch.testing.assert_close(feature_target.boxes, target.boxes * ratio)
    files = [(path, path.stat().st_mtime_ns) for path in cache.iterdir()]
    again = cached_features(backbone, BoxImages(source, VIEWS, 0), 2, 3)
    assert torch.equal(again.versions[5][1][0], features)
    assert [(path, path.stat().st_mtime_ns) for path in cache.iterdir()] == files


def test_samples_take_versions_by_seed_epoch_and_position(data):
    images = task(data, frozen(data)).open("train", None)
    samples = [Sample(epoch, position, 5) for epoch in range(4) for position in range(4)]
    first = [images[sample] is images.versions[5][0] for sample in samples]
    assert set(first) == {False, True}
    assert [images[sample] is images.versions[5][0] for sample in samples] == first
    other = task(data, frozen(data).replace(seed=1)).open("train", None)
    assert [other[sample] is other.versions[5][0] for sample in samples] != first


def test_crops_of_feature_maps_keep_what_their_boxes_enclose(source):
    features = torch.zeros(2, 7, 9)
    features[0, 2:5, 3:8] = 1
    features[1, 6, 0] = 1
    boxes = torch.tensor([[3.0, 2, 8, 5], [0, 6, 1, 7]])
    whole = features, Target(boxes, torch.tensor([0, 1])), 0, False
    maps = FeatureMaps(BoxImages(source, VIEWS, 0), [[whole]], 3, crops=True)
    shapes = set()
    for position in range(60):
        crop, target, *_ = maps[Sample(0, position, 0)]
        shapes.add(tuple(crop.shape[1:]))
        expected = {label: crop[label].sum().item() for label in (0, 1) if crop[label].any()}
        found = {
            int(label): ((x2 - x1) * (y2 - y1)).item()
            for (x1, y1, x2, y2), label in zip(target.boxes, target.labels, strict=True)
        }
        assert found == expected
        for (x1, y1, x2, y2), label in zip(target.boxes.int(), target.labels, strict=True):
            assert crop[label, y1:y2, x1:x2].all()
        assert torch.equal(maps[Sample(0, position, 0)][0], crop)
    assert {height for height, _ in shapes} == {4, 5, 6, 7}
    assert {width for _, width in shapes} == {5, 6, 7, 8, 9}


def test_damaged_features_are_named(source, backbone):
    path = cache_path(backbone, source, VIEWS, 1)
    path.parent.mkdir()
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"safetensors is damaged or .*; remove it"):
        cached_features(backbone, BoxImages(source, VIEWS, 0), 1, 0)


def test_the_file_follows_from_the_data_and_the_weights(source, backbone):
    paths = [cache_path(backbone, source, VIEWS, 2)]
    assert cache_path(backbone, source, VIEWS, 2) == paths[0]
    paths.append(cache_path(backbone, source.subset(range(7)), VIEWS, 2))
    paths.append(cache_path(backbone, source, VIEWS, 3))
    with torch.no_grad():
        next(backbone.parameters()).add_(1)
    paths.append(cache_path(backbone, source, VIEWS, 2))
    assert len(set(paths)) == 4


def test_an_image_that_cannot_be_read_is_marked(data, backbone, tmp_path):
    damaged = shutil.copytree(data, tmp_path / "damaged")
    (damaged / "train/3.png").write_bytes(b"nothing")
    source = task(damaged).open("train", None).source
    maps = cached_features(backbone, BoxImages(source, VIEWS, 0), 2, 3)
    assert [maps.versions[index][1][3] for index in range(8)] == [n == 3 for n in range(8)]
    assert torch.equal(maps.versions[3][0][1].labels, maps.versions[4][0][1].labels)
