"""Encodings with random parameters, and these as the oracles take them."""

import torch

from irpe import RelativePositionEncoding

HEADS, DIM = 2, 12


def make(name, grid, prefix, dtype=torch.float64, dim=DIM, spread=0.5):
    """An encoding with random parameters, and random queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    encoding = RelativePositionEncoding(name, HEADS, dim, prefix, len(grid), dtype=dtype)
    for parameter in encoding.parameters():
        numbers = torch.randn(parameter.shape, generator=generator, dtype=dtype)
        parameter.data = numbers * spread
    shape = (3, 2, HEADS, prefix + torch.Size(grid).numel(), dim)
    qkv = torch.randn(shape, generator=generator, dtype=dtype)
    return encoding, [x.clone().requires_grad_() for x in qkv]


def nested(encoding):
    """The parameters as lists, those of a table without its one head."""
    learned = {}
    for name, parameter in encoding.named_parameters():
        name, is_table, _ = name.partition(".")
        if is_table:
            learned.setdefault(name, []).append(parameter[0].tolist())
        else:
            learned[name] = parameter.tolist()
    return learned
