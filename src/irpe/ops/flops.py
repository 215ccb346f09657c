"""How many operations the library's own operators take, for `torch.utils.flop_counter`.

As there, a multiplication and an addition count as two, and only matrix products count.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

Shape = Sequence[int]


def register_flop_formulas() -> None:
    """Tells the counter what the library's own operators cost."""
    register_flop_formula(torch.ops.irpe.fast)(attention_flops)
    register_flop_formula(torch.ops.irpe.fast_backward)(attention_backward_flops)
    register_flop_formula(torch.ops.irpe.native)(native_flops)
    register_flop_formula(torch.ops.irpe.native_backward)(native_backward_flops)
    register_flop_formula(torch.ops.irpe.triton)(triton_flops)
    register_flop_formula(torch.ops.irpe.triton_backward)(triton_backward_flops)
    fused = "_scaled_dot_product_flash_attention"
    for suffix in ("", "_backward"):  # torch 2.12 counts no fused attention on the CPU
        formula = flop_registry[getattr(torch.ops.aten, f"{fused}{suffix}")]
        flop_registry.setdefault(getattr(torch.ops.aten, f"{fused}_for_cpu{suffix}"), formula)


def attention_flops(q: Shape, k: Shape, v: Shape, *others: Any, **_: Any) -> int:
    """Returns the operations of the forward pass: two products of attention, one per table."""
    query, key, value = others[3:6]
    tables = _table_products(k, q, query) + _table_products(q, k, (*key, *value))
    return _pair_product(q, k) + _pair_product(q, v) + tables


def attention_backward_flops(
    grad: Shape, kept: Sequence[Shape], mask_needs_grad: bool, *call: Any, **_: Any
) -> int:
    """Returns the operations of the backward pass, which repeats the scores if it must."""
    q, k, v = call[:3]
    query, key, value = call[6:9]
    scores = _table_products(k, q, query) + _table_products(q, k, key)
    flops = 2 * _pair_product(q, k) + 2 * _pair_product(q, v)
    flops += 2 * (scores + _table_products(q, k, value))
    if not kept:
        flops += _pair_product(q, k) + scores
    return flops


def native_flops(q: Shape, k: Shape, v: Shape, *others: Any, **_: Any) -> int:
    """Returns the operations of the compiled forward pass."""
    query, key, value = others[3:6]
    tables = _row_products(k, query) + _row_products(q, (*key, *value))
    return _pair_product(q, k) + _pair_product(q, v) + tables


def native_backward_flops(
    grad: Shape, kept: Sequence[Shape], mask_needs_grad: bool, *call: Any, **_: Any
) -> int:
    """Returns the operations of the compiled backward pass, which makes the scores again."""
    q, k = call[:2]
    query, key, value = call[6:9]
    tables = 3 * (_row_products(k, query) + _row_products(q, key)) + 2 * _row_products(q, value)
    return 5 * _pair_product(q, k) + tables


def triton_flops(q: Shape, k: Shape, v: Shape, *others: Any, **_: Any) -> int:
    """Returns the operations of the kernels' forward pass: values need the scores once more."""
    query, key, value = others[3:6]
    tables = _row_products(k, query) + _row_products(q, (*key, *value))
    return (2 if value else 1) * _pair_product(q, k) + _pair_product(q, v) + tables


def triton_backward_flops(
    grad: Shape, kept: Sequence[Shape], mask_needs_grad: bool, *call: Any, **_: Any
) -> int:
    """Returns the operations of the kernels' backward pass.

    Each kernel computes scores and their gradients again: that over queries takes three products,
    that over keys four, that of a mask two. A table takes its scores, their combination and its
    gradient; a value table has no combination here.
    """
    q, k = call[:2]
    query, key, value = call[6:9]
    products = 7 + 2 * mask_needs_grad
    tables = 3 * (_row_products(k, query) + _row_products(q, key)) + 2 * _row_products(q, value)
    return products * _pair_product(q, k) + tables


def _row_products(owners: Shape, tables: Sequence[Shape]) -> int:
    """Returns the operations with the rows in use."""
    return sum(2 * math.prod(owners[:3]) * owners[3] * table[1] for table in tables)


def _pair_product(x: Shape, y: Shape) -> int:
    return 2 * math.prod(x[:3]) * y[2] * y[3]


def _table_products(owners: Shape, others: Shape, tables: Sequence[Shape]) -> int:
    """Returns the operations with the rows in use, or with the row of each pair if that is less."""
    tokens = math.prod(owners[:3])
    return sum(2 * tokens * table[2] * min(table[1], others[2]) for table in tables)
