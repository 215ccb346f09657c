"""The twelve models of the paper's Table 4: absolute encoding and targets of the relative one."""

import difflib
from dataclasses import dataclass
from typing import Any

from torch import nn

from irpe.adapters.equip import equip
from irpe.extras import require

DEIT_S = "deit_small_patch16_224"


@dataclass(frozen=True)
class Row:
    """A row of Table 4: DeiT-S with a choice of encodings, and what the paper reports for it.

    Args:
        number: Its number in the paper.
        name: Absolute encoding and targets, for example "none-qk".
        encoding: The text of the relative encoding.
        absolute: What becomes of DeiT's learned absolute encoding, as in `irpe.equip`.
        top1: The paper's top-1 accuracy on ImageNet, in percent.
        top5: Its top-5 accuracy.
    """

    number: int
    name: str
    encoding: str
    absolute: str
    top1: float
    top5: float


def _row(number: int, absolute: str, targets: str, top1: float, top5: float) -> Row:
    name = f"{absolute}-{targets}" if targets else absolute
    encoding = f"product-contextual-{targets}" if targets else "none"
    return Row(number, name, encoding, "keep" if absolute == "learnable" else "none", top1, top5)


TABLE_4 = (
    _row(1, "learnable", "", 79.9, 95.0),
    _row(2, "none", "", 77.6, 93.8),
    _row(3, "none", "q", 80.9, 95.4),
    _row(4, "none", "k", 80.9, 95.3),
    _row(5, "none", "v", 80.2, 95.0),
    _row(6, "none", "qk", 81.0, 95.5),
    _row(7, "none", "qkv", 81.3, 95.7),
    _row(8, "learnable", "q", 80.9, 95.5),
    _row(9, "learnable", "k", 80.9, 95.5),
    _row(10, "learnable", "v", 80.2, 95.1),
    _row(11, "learnable", "qk", 81.1, 95.4),
    _row(12, "learnable", "qkv", 81.4, 95.6),
)


def find_row(name: str) -> Row:
    """Returns the row with a name, "learnable-qkv" for example."""
    rows = {row.name: row for row in TABLE_4}
    if name not in rows:
        near = difflib.get_close_matches(name, rows, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"row {name!r} of Table 4 is not one of {', '.join(rows)}{hint}")
    return rows[name]


def build_table4(name: str, model: str = DEIT_S, **arguments: Any) -> nn.Module:
    """Returns the untrained model of a row.

    Args:
        name: The name of the row.
        model: The plain model, a VisionTransformer of timm.
        arguments: More arguments of `timm.create_model`.
    """
    row = find_row(name)
    plain = require("timm", "timm").create_model(model, **arguments)
    return equip(plain, row.encoding, absolute=row.absolute)
