"""How many operations the library's own operators take, for `torch.utils.flop_counter`.

As there, a multiplication and an addition count as two, and only matrix products count.
"""

import math
from collections.abc import Sequence
from typing import Any

from torch.utils.flop_counter import register_flop_formula

from irpe.ops.impl.fused import fused_attention, fused_attention_backward
from irpe.ops.lookup import bucket_sum, lookup

Shape = Sequence[int]


def register_flop_formulas() -> None:
    """Tells the counter what the library's own operators cost."""
    formulas: list[tuple[Any, Any]] = [
        (lookup, _no_products),
        (bucket_sum, _no_products),
        (fused_attention, attention_flops),
        (fused_attention_backward, attention_backward_flops),
    ]
    for operator, formula in formulas:
        register_flop_formula(operator._opoverload.overloadpacket)(formula)


def _no_products(*shapes: Any, **_: Any) -> int:
    return 0


def attention_flops(
    q: Shape,
    k: Shape,
    v: Shape,
    query_tables: Sequence[Shape],
    key_tables: Sequence[Shape],
    value_tables: Sequence[Shape],
    *_: Any,
    **__: Any,
) -> int:
    """Returns the operations of the forward pass: two products of attention, one per table."""
    tables = (*query_tables, *key_tables, *value_tables)
    return _pair_product(q, k) + _pair_product(v, k) + _table_products(k, tables)


def attention_backward_flops(
    grad: Shape,
    weights: Shape,
    q: Shape,
    k: Shape,
    v: Shape,
    query_tables: Sequence[Shape],
    key_tables: Sequence[Shape],
    value_tables: Sequence[Shape],
    *_: Any,
    **__: Any,
) -> int:
    """Returns the operations of the backward pass, which repeats the scores if it must."""
    flops = 2 * _pair_product(q, k) + 2 * _pair_product(v, k)
    flops += 2 * _table_products(k, (*query_tables, *key_tables, *value_tables))
    if not math.prod(weights):
        flops += _pair_product(q, k) + _table_products(k, (*query_tables, *key_tables))
    return flops


def _pair_product(x: Shape, k: Shape) -> int:
    return 2 * math.prod(x) * k[2]


def _table_products(x: Shape, tables: Sequence[Shape]) -> int:
    """Returns the operations with the rows in use, or with the row of each pair if that is less."""
    return sum(2 * math.prod(x[:3]) * table[2] * min(table[1], x[2]) for table in tables)
