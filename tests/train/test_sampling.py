"""Batches: all randomness follows from seed, epoch and position."""

import random

import numpy as np
import pytest
import torch
from train.little import AUGMENTED, CONFIG, little

from irpe.tasks.classify.transforms import Batch, train_images
from irpe.train.processes import Batches, EveryImage, make_loader, train_sampler

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
        for image, index in zip(batch.images, batch.indices, strict=True):
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
