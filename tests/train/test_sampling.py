"""Batches: all randomness follows from seed, epoch and position."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from train.little import AUGMENTED, CONFIG, little

from irpe.train.classification.sources import BrokenImageError
from irpe.train.sampling import (
    Batch,
    Batches,
    Draw,
    EveryImage,
    Images,
    eval_images,
    in_colours,
    make_loader,
    train_images,
    train_sampler,
)

NO_MIXING = AUGMENTED.replace(mixup=0.0, cutmix=0.0)


def batches(config, ranks=1, rank=0, epoch=0, first=0, workers=0, count=48):
    source, _ = little(count)
    sampler = train_sampler(len(source), config, ranks, rank, epoch)
    order = Batches(sampler, epoch, config.batch_size // ranks, first)
    return [Batch._make(b) for b in make_loader(train_images(source, config), order, workers)]


@pytest.mark.parametrize("config", [CONFIG, NO_MIXING], ids=["plain", "augmented"])
def test_two_processes_see_what_one_sees(config):
    one = batches(config)
    shares = [batches(config, 2, rank) for rank in range(2)]
    assert len(one) == 6
    for whole, *parts in zip(one, *shares, strict=True):
        joined = torch.stack([part.images for part in parts], 1).flatten(0, 1)
        assert torch.equal(whole.images, joined)


@pytest.mark.parametrize("config", [CONFIG, NO_MIXING], ids=["plain", "augmented"])
def test_an_epoch_goes_on_where_it_stopped_and_workers_change_nothing(config):
    whole = batches(config)
    for other in (batches(config, first=2), batches(config, workers=1)[2:]):
        assert len(other) == 4
        assert all(torch.equal(a.images, b.images) for a, b in zip(whole[2:], other, strict=True))


def test_epochs_and_seeds_differ():
    first = batches(NO_MIXING)[0].images
    assert not torch.equal(first, batches(NO_MIXING, epoch=1)[0].images)
    assert not torch.equal(first, batches(NO_MIXING.replace(seed=1))[0].images)


def test_copies_of_an_image_are_augmented_differently():
    found: dict[int, list[torch.Tensor]] = {}
    for batch in batches(NO_MIXING):
        for image, index in zip(batch.images, batch.indices.tolist(), strict=True):
            found.setdefault(index, []).append(image)
    copies = [images for images in found.values() if len(images) == 3]
    assert len(copies) == 16
    assert any(not torch.equal(images[0], images[1]) for images in copies)


def test_loading_takes_nothing_from_the_random_numbers_outside():
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    batches(NO_MIXING)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert states == after


def test_evaluation_takes_each_image_once():
    taken = [number for rank in range(3) for number in EveryImage(20, 3, rank)]
    assert sorted(taken) == list(range(20))


class Damaged:
    classes = ("a", "b")

    def __init__(self, broken, count=4):
        self.broken, self.count = broken, count
        self.source, _ = little()

    def __len__(self):
        return self.count

    def read(self, index):
        if index in self.broken:
            raise BrokenImageError(str(index))
        return self.source.read(index)[0], index

    def filename(self, index):
        return str(index)


def test_a_broken_image_is_replaced_by_the_next_and_marked():
    images = eval_images(Damaged({3, 0}), CONFIG)
    _, label, index, broken = images[Draw(0, 0, 3)]
    assert (label, index, broken) == (1, 3, True)
    _, label, index, broken = images[Draw(0, 0, 2)]
    assert (label, index, broken) == (2, 2, False)


def test_grey_images_of_16_bits_keep_their_shades():
    pixels = np.array([[0, 256, 40000, 65535]], dtype=np.uint16)
    image = in_colours(Image.fromarray(pixels), "L")
    assert np.asarray(image).tolist() == [[0, 1, 156, 255]]


def test_nothing_but_broken_images():
    images: Images = eval_images(Damaged({0, 1, 2, 3}), CONFIG)
    with pytest.raises(ValueError, match="none of the 4 images can be read"):
        images[Draw(0, 0, 0)]
