"""Random encodings on random grids, and how the explorer page writes them."""

import random

import irpe
from irpe.core.encodings.spec import TARGETS
from irpe.core.methods import METHODS


def as_page_spec(spec):
    kind = "clip" if isinstance(spec.index, irpe.Clip) else "piecewise"
    return {
        "method": spec.method, "mode": spec.mode, "targets": spec.targets,
        "shared": spec.shared_heads, "index": {"kind": kind, **vars(spec.index)},
    }  # fmt: skip


def random_index(chance):
    kind = chance.choice(["ratio", "piecewise", "clip"])
    if kind == "ratio":
        return irpe.Piecewise.from_ratio(
            round(chance.uniform(0.3, 12), chance.choice([0, 1, 2, 6])) or 1
        )
    if kind == "clip":
        return irpe.Clip(chance.choice([0.5, 1, 2.5, 3, round(chance.uniform(0.2, 9), 2)]))
    alpha, first, second = (chance.uniform(0.2, 6) for _ in range(3))
    return irpe.Piecewise(alpha, alpha + first, alpha + first + 3 * second)


def random_settings(count, seed=0):
    chance = random.Random(seed)
    for _ in range(count):
        mode = chance.choice(["bias", "contextual"])
        targets = "k" if mode == "bias" else chance.choice(TARGETS)
        spec = irpe.RPESpec(
            chance.choice(list(METHODS)), mode, targets, random_index(chance), chance.random() < 0.5
        )
        grid = (chance.randint(1, 9), chance.randint(1, 9))
        yield spec, grid, chance.choice([0, 0, 1, 2, 5])
