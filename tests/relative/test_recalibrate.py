"""Distillation: it comes closer to the original, trains what it says, and continues."""

import copy

import pytest
import torch
from adapters.small_models import make_vit, state_of
from relative.built import some_images

import irpe
from irpe.adapters.equipped import table_names
from irpe.progress import NoProgress

IMAGES = some_images(24, 32, 32)


def converted():
    """A relative model whose tables are too small, and the original."""
    model = make_vit()
    original = copy.deepcopy(model)
    irpe.make_relative(model, IMAGES, "product-contextual-k")
    with torch.no_grad():
        for name in table_names(model):
            model.get_parameter(name).mul_(0.6)
    return model, original


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("trained", ["tables", "norms", "all"])
def test_training_comes_closer_and_moves_what_it_says(trained):
    model, original = converted()
    before, of_original = values(model), values(original)
    result = irpe.recalibrate(model, original, IMAGES, steps=20, trained=trained, lr=1e-3)
    assert result.after.r2 > result.before.r2
    after, tables = values(model), set(table_names(model))
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    norms = {name for name in after if "norm" in name}
    assert moved & tables
    if trained == "tables":
        assert moved <= tables
    if trained == "norms":
        assert moved - tables
        assert moved <= tables | norms
    if trained == "all":
        assert moved - tables - norms
    assert all(torch.equal(value, of_original[name]) for name, value in values(original).items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


class _InterruptsAt(NoProgress):
    def __init__(self, step):
        self.at = step

    def step(self, done, values):
        if done == self.at:
            raise KeyboardInterrupt


def test_an_interrupted_run_leaves_the_model_and_continues(tmp_path):
    model, original = converted()
    whole = copy.deepcopy(model)
    irpe.recalibrate(whole, original, IMAGES, steps=14)
    before, state = values(model), state_of(model)
    arguments = {"steps": 14, "checkpoint": tmp_path / "steps.pt"}
    with pytest.raises(KeyboardInterrupt):
        irpe.recalibrate(model, original, IMAGES, progress=_InterruptsAt(12), **arguments)
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())
    assert state_of(model) == state
    with pytest.raises(irpe.UserError):
        irpe.recalibrate(model, original, IMAGES, **{**arguments, "steps": 20})
    irpe.recalibrate(model, original, IMAGES, **arguments)
    assert not list(tmp_path.iterdir())
    for name, value in values(model).items():
        torch.testing.assert_close(value, values(whole)[name])


@pytest.mark.parametrize("changed", [{"trained": "heads"}, {"steps": 0}, {"lr": -1.0}])
def test_wrong_arguments_are_refused(changed):
    model, original = converted()
    with pytest.raises(irpe.UserError):
        irpe.recalibrate(model, original, IMAGES, **changed)
    with pytest.raises(irpe.UserError):
        irpe.recalibrate(original, original, IMAGES)
