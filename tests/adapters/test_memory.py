"""A process that runs for long does not grow: caches are bounded, models that are left are freed.

What is done comes in periods that repeat, so after each of them the same tensors are alive.
"""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from adapters.small_models import images, make_swin, make_vit

import irpe

pytestmark = pytest.mark.slow
SPECS = ["product-contextual-qkv", "cross-bias-k", "euclidean-contextual-v", "shaw", "cpvt"]
RESIDENT_BYTES = 32 << 20  # what the allocators of Python and torch may keep


def live_tensors():
    """Returns the number of tensors that are alive, and the bytes of their storages."""
    gc.collect()
    storages, count = {}, 0
    for value in gc.get_objects():
        if type(value) in (torch.Tensor, torch.nn.Parameter):  # not what a compiler left behind
            count += 1
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return count, sum(storages.values())


def resident_bytes():
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


def check_periods(work, periods):
    """Does the work of a period again and again, and compares what is alive after each."""
    alive, resident = [], []
    for _ in range(periods):
        work()
        alive.append(live_tensors())
        resident.append(resident_bytes())
    assert len(set(alive[1:])) == 1, alive
    assert resident[-1] - resident[periods // 4] < RESIDENT_BYTES, resident


@pytest.mark.parametrize("spec", ["product-contextual-qkv", "euclidean-bias-k", "shaw"])
def test_1000_forwards_with_changing_grids(spec):
    model = irpe.equip(make_vit(dynamic_img_size=True), spec, absolute="none")
    shapes = [(8 * rows, 8 * columns) for rows in range(1, 9) for columns in range(1, 6)]

    def forwards():
        for height, width in shapes:  # 40, more than any cache holds
            model(images(height, width, 1)).sum().backward()
        model.zero_grad()

    check_periods(forwards, 1000 // len(shapes))


@pytest.mark.parametrize("make", [make_vit, make_swin])
def test_200_models_that_are_equipped_and_left(make):
    left = []

    def equip_and_forget():
        for spec in SPECS if make is make_vit else SPECS[:4]:
            model = irpe.equip(make(), spec)
            model(images())
            left.append(weakref.ref(model))

    check_periods(equip_and_forget, 200 // len(SPECS))
    assert not any(model() for model in left)
