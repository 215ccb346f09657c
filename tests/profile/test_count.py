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


class Latent(nn.Module):
    """Gives a module a parameter, as models that pool by attention do."""

    def __init__(self):
        super().__init__()
        self.latent = nn.Parameter(torch.zeros(1, 1, 4))
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(self.latent.expand(len(x), -1, -1))


def test_a_parameter_may_be_an_input():
    model = Latent()
    assert count_macs(model, torch.zeros(2, 5)) == 2 * 4 * 3
    assert all(p.requires_grad for p in model.parameters())
