"""Counting, against arithmetic by hand."""

import torch
from torch import nn

from irpe.profile.count import count_macs, count_parameters


def test_a_linear_layer():
    model = nn.Linear(5, 7)
    assert count_parameters(model) == 5 * 7 + 7
    assert count_macs(model, torch.zeros(3, 5)) == 3 * 5 * 7


def test_counting_leaves_the_mode_and_no_gradients():
    model = nn.Linear(5, 7).train()
    count_macs(model, torch.zeros(3, 5))
    assert model.training
    assert model.weight.grad is None


def test_frozen_parameters_are_not_learned():
    model = nn.Linear(5, 7)
    model.bias.requires_grad_(False)
    assert count_parameters(model) == 5 * 7
