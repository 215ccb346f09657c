"""Distillation: it comes closer to the original, trains what it says, and continues."""

import copy

import pytest
import torch
from adapters.small_models import make_vit, state_of
from relative.built import make_positional_vit, some_images

import irpe
from irpe.adapters.equipped import table_names

IMAGES = some_images(24, 32, 32)


def converted(make=make_vit, images=IMAGES, spec="product-contextual-k"):
    """A relative model whose tables are too small, and the original."""
    model = make()
    original = copy.deepcopy(model)
    irpe.make_relative(model, images, spec)
    with torch.no_grad():
        for name in table_names(model):
            model.get_parameter(name).mul_(0.8)
    return model, original


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def check_trained(model, original, images, trained, **arguments):
    """Distils, and returns the names of what moved."""
    before, of_original = values(model), values(original)
    result = irpe.recalibrate(model, original, images, trained=trained, **arguments)
    assert result.after.r2 > result.before.r2
    assert all(torch.equal(value, of_original[name]) for name, value in values(original).items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    return {name for name, value in values(model).items() if not torch.equal(value, before[name])}


def test_tables_alone_come_closer():
    images = some_images(24)
    model, original = converted(make_positional_vit, images, "product-bias-k@clip4+unshared")
    tables = set(table_names(model))

    def size():
        return sum(float(model.get_parameter(name).detach().norm()) for name in tables)

    before = size()
    assert check_trained(model, original, images, "tables", steps=30) == tables
    assert size() > 1.05 * before


@pytest.mark.parametrize("trained", ["norms", "all"])
def test_training_comes_closer_and_moves_what_it_says(trained):
    model, original = converted()
    moved = check_trained(model, original, IMAGES, trained, steps=20, lr=1e-3)
    tables, norms = set(table_names(model)), {name for name in values(model) if "norm" in name}
    assert moved & tables
    assert moved & norms
    assert bool(moved - tables - norms) == (trained == "all")


def interrupts_at(step):
    """A listener that ends the work after a step, as Ctrl-C does."""

    def listen(event):
        if event.done == step:
            raise KeyboardInterrupt

    return listen


def test_an_interrupted_run_leaves_the_model_and_continues(tmp_path):
    model, original = converted()
    whole = copy.deepcopy(model)
    irpe.recalibrate(whole, original, IMAGES, steps=14)
    before, state = values(model), state_of(model)
    arguments = {"steps": 14, "checkpoint": tmp_path / "new" / "steps.pt"}
    with pytest.raises(KeyboardInterrupt):
        irpe.recalibrate(model, original, IMAGES, listen=interrupts_at(12), **arguments)
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())
    assert state_of(model) == state
    for other in ({"steps": 20}, {"seed": 1}, {"trained": "tables"}):
        with pytest.raises(irpe.UserError):
            irpe.recalibrate(model, original, IMAGES, **{**arguments, **other})
    irpe.recalibrate(model, original, IMAGES, **arguments)
    assert not list(arguments["checkpoint"].parent.iterdir())
    for name, value in values(model).items():
        torch.testing.assert_close(value, values(whole)[name])


@pytest.mark.parametrize("changed", [{"trained": "heads"}, {"steps": 0}, {"lr": -1.0}])
def test_wrong_arguments_are_refused(changed):
    model, original = converted()
    with pytest.raises(irpe.UserError):
        irpe.recalibrate(model, original, IMAGES, **changed)
    with pytest.raises(irpe.UserError):
        irpe.recalibrate(original, original, IMAGES)
