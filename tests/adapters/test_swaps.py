"""A change is a list of exchanges: done twice, everything is as it was."""

import copy
import pickle

import pytest
import torch
from torch import nn

from irpe.adapters.swaps import (
    Absent,
    Swap,
    add_hook,
    apply_change,
    put_buffer,
    put_module,
    put_zeros,
    set_attribute,
    set_class,
    undo_change,
)


class Note:
    """A hook that can be pickled."""

    def __call__(self, *_):
        return None


class Other(nn.Sequential):
    pass


def make_module():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    for name in ("first", "second", "third"):
        module.register_parameter(name, nn.Parameter(torch.ones(2)))
    module.register_forward_pre_hook(Note())
    return module


def slots_of(module):
    """All slots in their order, and what is in them, by identity."""
    kinds = {k: v for k, v in vars(module).items() if isinstance(v, dict | set)}
    inside = {k: [(n, id(x)) for n, x in v.items()] if isinstance(v, dict) else sorted(v)
              for k, v in kinds.items()}  # fmt: skip
    return type(module), {k: id(v) for k, v in vars(module).items()}, inside


CHANGES = {
    "an attribute": lambda m: set_attribute(m, "mark", 1),
    "an attribute twice": lambda m: [*set_attribute(m, "mark", 1), *set_attribute(m, "mark", 2)],
    "a class": lambda m: set_class(m, Other),
    "a module": lambda m: put_module(m, "0", None),
    "a parameter between others": lambda m: put_buffer(m, "second", torch.zeros(2)),
    "zeros": lambda m: put_zeros(m, ["first", "third"]),
    "a hook": lambda m: add_hook(m, Note(), always_call=True),
    "a hook before all others": lambda m: add_hook(m, Note(), before=True, with_kwargs=True),
    "a slot that is emptied": lambda m: [Swap(m, "_parameters", "first", Absent)],
    "several": lambda m: [*put_zeros(m, ["second"]), *put_module(m, "1", None),
                          *put_buffer(m, "second", torch.ones(2))],
}  # fmt: skip


@pytest.mark.parametrize("make", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("twin", [None, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_what_is_changed_is_changed_back(make, twin):
    module = make_module()
    before = slots_of(module)
    change = make(module)
    assert slots_of(module) == before  # planning changes nothing
    apply_change(change)
    after = slots_of(module)
    assert after != before
    if twin is None:
        for _ in range(2):
            undo_change(change)
            assert slots_of(module) == before
            apply_change(change)
            assert slots_of(module)[2].keys() == after[2].keys()
        return
    other, of_other = twin((module, change))  # a change is copied with its module
    assert [type(other), list(other.state_dict())] == [type(module), list(module.state_dict())]
    undo_change(of_other)
    plain = make_module()
    assert type(other) is type(plain)
    assert list(other.state_dict()) == list(plain.state_dict())
    assert slots_of(module) == after


def test_a_hook_before_all_others_is_called_first():
    module, calls = make_module(), []
    module.register_forward_pre_hook(lambda *_: calls.append("second"))
    apply_change(add_hook(module, lambda *_: calls.append("first"), before=True))
    module(torch.ones(2))
    assert calls == ["first", "second"]


def test_fixed_values_are_not_saved():
    module = make_module()
    apply_change(put_zeros(module, ["first"]))
    assert "first" not in module.state_dict()
    assert not module.first.any()
