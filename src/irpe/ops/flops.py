"""How many operations the library's own operators take, for `torch.utils.flop_counter`.

As there, a multiplication and an addition count as two, and only matrix products count.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

Shape = Sequence[int]
Products = Callable[[Shape, Shape, Sequence[Shape]], int]


def register_flop_formulas() -> None:
    """Tells the counter what the library's own operators cost."""
    operators = torch.ops.irpe
    for operator, formula in (
        (operators.fast, fast_flops),
        (operators.fast_backward, fast_backward_flops),
        (operators.native, native_flops),
        (operators.native_backward, native_backward_flops),
        (operators.triton, triton_flops),
        (operators.triton_backward, triton_backward_flops),
    ):
        register_flop_formula(operator)(formula)
    fused = "_scaled_dot_product_flash_attention"
    for suffix in ("", "_backward"):  # torch 2.12 counts no fused attention on the CPU
        formula = flop_registry[getattr(torch.ops.aten, f"{fused}{suffix}")]
        flop_registry.setdefault(getattr(torch.ops.aten, f"{fused}_for_cpu{suffix}"), formula)


def fast_flops(*call: Any, **_: Any) -> int:
    """Returns the operations of the forward pass: two products of attention, one per table."""
    pairs, scores, values = _products(call, _fewest_products)
    return 2 * pairs + scores + values


def fast_backward_flops(
    grad: Shape, kept: Sequence[Shape], mask_needs_grad: bool, *call: Any, **_: Any
) -> int:
    """Returns the operations of the backward pass, which repeats the scores if it must."""
    pairs, scores, values = _products(call, _fewest_products)
    return 4 * pairs + 2 * (scores + values) + (0 if kept else pairs + scores)


def native_flops(*call: Any, **_: Any) -> int:
    """Returns the operations of the compiled forward pass."""
    pairs, scores, values = _products(call, _row_products)
    return 2 * pairs + scores + values


def native_backward_flops(
    grad: Shape, kept: Sequence[Shape], mask_needs_grad: bool, *call: Any, **_: Any
) -> int:
    """Returns the operations of the compiled backward pass, which makes the scores again."""
    pairs, scores, values = _products(call, _row_products)
    return 5 * pairs + 3 * scores + 2 * values


def triton_flops(*call: Any, **_: Any) -> int:
    """Returns the operations of the kernels' forward pass: values need the scores once more."""
    pairs, scores, values = _products(call, _row_products)
    return (3 if values else 2) * pairs + scores + values


def triton_backward_flops(
    grad: Shape, kept: Sequence[Shape], mask_needs_grad: bool, *call: Any, **_: Any
) -> int:
    """Returns the operations of the kernels' backward pass.

    Each kernel computes scores and their gradients again: that over queries takes three products,
    that over keys four, that of a mask two. A table takes its scores, their combination and its
    gradient; a value table has no combination here.
    """
    pairs, scores, values = _products(call, _row_products)
    return (7 + 2 * mask_needs_grad) * pairs + 3 * scores + 2 * values


def _products(call: Sequence[Any], of_tables: Products) -> tuple[int, int, int]:
    """Returns the operations of q k^T, of the tables that add to scores, and of value tables."""
    q, k = call[:2]
    query, key, value = call[6:9]
    pairs = 2 * math.prod(q[:3]) * k[2] * k[3]
    return pairs, of_tables(k, q, query) + of_tables(q, k, key), of_tables(q, k, value)


def _row_products(owners: Shape, others: Shape, tables: Sequence[Shape]) -> int:
    """Returns the operations with the rows in use."""
    return sum(2 * math.prod(owners) * table[1] for table in tables)


def _fewest_products(owners: Shape, others: Shape, tables: Sequence[Shape]) -> int:
    """Returns the operations with the rows in use, or with the row of each pair if that is less."""
    tokens = math.prod(owners[:3])
    return sum(2 * tokens * table[2] * min(table[1], others[2]) for table in tables)
