"""Threads, forks and transforms of torch.func: the result is that of plain calls, one by one."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from adapters.small_models import make_vit, perturb
from hostile.cases import Case
from torch.utils.data import DataLoader, Dataset

import irpe

SPECS = ["product-contextual-qkv", "cross-contextual-k@3", "euclidean-bias-k", "shaw"]
SHAPES = [(16, 32), (32, 16), (24, 24), (8, 64), (64, 8)]  # the first two, the last two: as many


def check_threads(spec, seed):
    """One model, several threads, images of several shapes, some with as many tokens."""
    model = make_vit(dynamic_img_size=True)
    perturb(irpe.equip(model, spec, absolute="none"), seed)
    random = np.random.default_rng(seed)
    inputs = [torch.randn(1, 3, *SHAPES[k]) for k in random.integers(len(SHAPES), size=24)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]

        def predict(x):
            with torch.no_grad():
                return model(x)

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(predict, inputs))
    wrong = sum(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return f"{wrong} of {len(inputs)} forwards differ" if wrong else "equal"


def check_fork(spec, seed):
    """A process that is forked after a forward pass, and workers of a data loader."""
    model = make_vit(dynamic_img_size=True)
    perturb(irpe.equip(model, spec, absolute="none"), seed)
    inputs = [torch.randn(3, *shape) for shape in SHAPES]
    with torch.no_grad():
        expected = [model(x[None]) for x in inputs]
    loader = DataLoader(
        _Predicted(model, inputs),
        num_workers=2,
        collate_fn=lambda x: x[0],
        multiprocessing_context="fork",
    )
    found = list(loader)
    wrong = sum(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return f"{wrong} of {len(inputs)} forwards differ" if wrong else "equal"


class _Predicted(Dataset):
    """What a model predicts, in the process that asks."""

    def __init__(self, model, inputs):
        self.model, self.inputs = model, inputs

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        with torch.no_grad():
            return self.model(self.inputs[index][None])


def _function(spec, seed):
    """A call as a function of its queries, its point, and a direction."""
    generator = torch.Generator().manual_seed(seed)
    attention = irpe.RPEAttention(16, num_heads=2, spec=spec, num_prefix_tokens=1).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    x, direction = torch.randn(2, 2, 7, 16, generator=generator, dtype=torch.float64)
    return (lambda x: attention(x, grid=(2, 3)).sin().sum()), x, direction


def _numeric(function, x, direction, step=1e-5):
    with torch.no_grad():
        return (function(x + step * direction) - function(x - step * direction)) / (2 * step)


def _close(found, expected, bound=1e-6):
    error = (found - expected).abs().max().item()
    size = max(1.0, expected.abs().max().item())
    return "equal" if error <= bound * size else f"error {error:.2e}"


def check_jvp(spec, seed):
    """Forward mode."""
    function, x, direction = _function(spec, seed)
    found = torch.func.jvp(function, (x,), (direction,))[1]
    return _close(found, _numeric(function, x, direction))


def check_grad(spec, seed):
    """torch.func.grad."""
    function, x, direction = _function(spec, seed)
    found = (torch.func.grad(function)(x) * direction).sum()
    return _close(found, _numeric(function, x, direction))


def check_vmap(spec, seed):
    """vmap over a further axis."""
    function, x, direction = _function(spec, seed)
    inputs = torch.stack([x, direction, x + direction])
    with torch.no_grad():
        expected = torch.stack([function(each) for each in inputs])
    return _close(torch.func.vmap(function)(inputs), expected, 1e-12)


def check_jacrev(spec, seed):
    """Reverse mode of a function with several results."""
    function, x, direction = _function(spec, seed)
    found = torch.func.jacrev(lambda x: torch.stack([function(x), 2 * function(x)]))(x)
    return _close((found * direction).sum((-1, -2, -3)), _numeric(
        lambda x: torch.stack([function(x), 2 * function(x)]), x, direction))  # fmt: skip


def check_hessian(spec, seed):
    """The second derivative in a direction, by forward over reverse mode."""
    function, x, direction = _function(spec, seed)
    gradient = torch.func.grad(function)
    found = torch.func.jvp(gradient, (x,), (direction,))[1]
    return _close(found, _numeric(gradient, x, direction), 1e-5)


CHECKS = [check_threads, check_fork, check_jvp, check_grad, check_vmap, check_jacrev, check_hessian]


def cases(seed, count):
    """Yields every check with every encoding, `count` times."""
    for number in range(count):
        for spec in SPECS:
            for check in CHECKS:
                key = seed + number
                yield Case(f"{check.__name__} {spec} {key}", partial(check, spec, key))
