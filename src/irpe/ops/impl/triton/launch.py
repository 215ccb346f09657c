# pyright: basic
"""One call, made ready for the kernels: what they read and write, and their launches.

What surrounds the kernels are plain products: z of each token and row (Eq. 27) before them, the
gradients of tables from the bucket sums after them.
"""

import math
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from irpe.ops.differentiable import CompactCall, Gradients
from irpe.ops.impl.triton.buckets import pack_ids
from irpe.ops.impl.triton.configuration import ROWS_AT_ONCE, Tile, block_dim_of, tile_of
from irpe.ops.impl.triton.joined import (
    join_role,
    join_tables,
    row_products,
    split_bias_gradient,
    split_gradient,
)
from irpe.ops.impl.triton.kernels import backward, forward, tiles
from irpe.ops.shapes import Tokens, VectorTable


class Launch:
    """The kernels of one call.

    Args:
        call: The call.
    """

    def __init__(self, call: CompactCall) -> None:
        self.call, dim = call, call.q.shape[-1]
        self.is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        self.out_dtype = torch.float32 if self.is_interpreted else call.q.dtype
        roles = call.tables.roles()
        rows = [table.shape[1] for table in next(role for role in roles if role)]
        self.packed = pack_ids(call.ids, rows)
        self.query_table, self.key_table, self.value_table = (
            join_role(role, dim) for role in roles[:3]
        )
        self.bias_table = join_tables(call.bias_tables)
        self.table_q = call.q if call.table_q is None else call.table_q
        self.table_k = call.k if call.table_k is None else call.table_k
        self.block_dim = block_dim_of(dim)

    def forward(self, keeps: bool) -> tuple[Tokens, list[Tensor]]:
        """Returns the output; if asked to, the log-sum-exp and the sums of the weights."""
        call, pairs, has_values = self.call, self._pairs(), self.value_table is not None
        attended = self._empty(call.q, torch.float32 if has_values else self.out_dtype)
        lse = call.q.new_empty(call.q.shape[:3], dtype=torch.float32)
        q, k, v = map(_tokens, (call.q, call.k, call.v))
        self._run("forward", forward.forward_kernel, q, k, v, pairs, _tokens(attended), lse)
        kept = [lse]
        out = attended
        if self.value_table is not None:
            out, sums = self._empty(call.q, self.out_dtype), self._sums(self.value_table, call.q)
            kept.append(sums)
            self._run(
                "value", forward.value_kernel, q, k, pairs, lse, self._present("value"),
                _sums(sums), _table(self.value_table), _tokens(attended), _tokens(out),
                BLOCK_R=ROWS_AT_ONCE,
            )  # fmt: skip
        return out.to(call.q.dtype), kept if keeps else []

    def backward(self, grad: Tokens, kept: list[Tensor]) -> Gradients:
        """Returns the gradients, given that of the output and what was kept."""
        call, pairs = self.call, self._pairs()
        out, lse, *value_sums = kept
        of_values = None
        if self.value_table is not None:
            of_values = _by_token(row_products(grad, self.value_table))
        delta = torch.empty_like(lse)
        shared = map(_tokens, (call.q, call.k, call.v))
        q, k, v = shared
        g = _tokens(grad)

        rows = self.bias_table if self.key_table is None else self.key_table
        query_sums = None if rows is None else self._sums(rows, call.q)
        dq, table_dq = self._gradient(call.q), self._gradient(call.table_q)
        self._run(
            "query", backward.query_kernel, q, k, v, pairs, g, _tokens(out), lse, delta, of_values,
            None if query_sums is None else self._present("query"),
            None if query_sums is None else _sums(query_sums),
            None if self.key_table is None else _table(self.key_table),
            _tokens(dq), None if table_dq is None else _tokens(table_dq), BLOCK_R=ROWS_AT_ONCE,
        )  # fmt: skip
        key_sums = None if self.query_table is None else self._sums(self.query_table, call.k)
        dk, dv, table_dk = (self._gradient(x) for x in (call.k, call.v, call.table_k))
        self._run(
            "key", backward.key_kernel, q, k, v, pairs, g, lse, delta, of_values,
            None if key_sums is None else self._present("key"),
            None if key_sums is None else _sums(key_sums),
            None if self.query_table is None else _table(self.query_table),
            _tokens(dk), _tokens(dv), None if table_dk is None else _tokens(table_dk),
            BLOCK_R=ROWS_AT_ONCE,
        )  # fmt: skip
        of_tables: list[Tensor] = []
        if key_sums is not None:
            of_tables += split_gradient(key_sums, self.table_k, call.query_tables, call.scale)
        if query_sums is not None:
            of_tables += split_gradient(query_sums, self.table_q, call.key_tables, call.scale)
        for sums in value_sums:
            of_tables += split_gradient(sums, grad, call.value_tables, 1.0)
        if query_sums is not None:
            of_tables += split_bias_gradient(query_sums, call.bias_tables, call.scale)
        of_tables = [x.to(call.q.dtype) for x in of_tables]
        of_tokens = (x if x is None else x.to(call.q.dtype) for x in (dq, dk, dv, table_dq, table_dk))
        return Gradients(*of_tokens, None, of_tables)

    def _pairs(self) -> tiles.Pairs:
        call = self.call
        by_query, by_key = None, None
        if self.key_table is not None:
            z = row_products(self.table_q, self.key_table)
            if self.bias_table is not None:
                z += self.bias_table.float().unsqueeze(1)
            by_query = _by_token(z)
        elif self.bias_table is not None:
            bias = self.bias_table.float()
            by_query = tiles.Rows(bias, 0, _stride_of_heads(bias), 1, 0)
        if self.query_table is not None:  # by row: neighbouring keys often share one
            z = row_products(self.table_k, self.query_table).mT.contiguous()
            by_key = tiles.Rows(z, *z.stride())
        ids = self.packed.ids
        dropout = None
        if call.seed is not None:
            dropout = tiles.Dropout(int(call.seed), call.dropout_p)
        return tiles.Pairs(
            tiles.Ids(ids, ids.stride(0) if ids.shape[0] > 1 else 0), by_query, by_key,
            _mask(call.mask), dropout, call.scale, call.q.shape[1], call.q.shape[2],
            call.k.shape[2],
        )  # fmt: skip

    def _present(self, kernel: str) -> tiles.Present:
        tile = self._tile(kernel)
        rows, ends = self.packed.rows_of_tiles(tile.queries, tile.keys)
        return tiles.Present(rows, ends, rows.shape[2], rows.shape[1] if len(rows) > 1 else 0)

    def _run(self, name: str, kernel: Any, *arguments: Any, **constants: Any) -> None:
        batch, heads, queries, dim = self.call.q.shape
        tile = self._tile(name)
        blocks = (
            math.ceil(self.call.k.shape[2] / tile.keys)
            if name == "key"
            else math.ceil(queries / tile.queries)
        )
        if not batch * heads * blocks:
            return
        mask = self.call.mask
        constants |= {
            "DIM": dim, "BLOCK_D": self.block_dim, "BLOCK_M": tile.queries, "BLOCK_N": tile.keys,
            "NUM_MAPS": len(self.packed.rows), "BITS": self.packed.bits,
            "IS_ADDITIVE": mask is not None and mask.dtype != torch.bool,
            "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
            "WIDE": self.is_interpreted, "num_warps": tile.warps, "num_stages": tile.stages,
        }  # fmt: skip
        with _on_device(self.call.q.device):
            launch(kernel, (batch * heads * blocks,), arguments, constants)

    def _tile(self, kernel: str) -> Tile:
        return tile_of(kernel, self.call.q.dtype, self.block_dim)

    def _sums(self, table: VectorTable, tokens: Tokens) -> Tensor:
        batch, heads, count, _ = tokens.shape
        shape = (batch, heads, table.shape[1], count)
        return tokens.new_zeros(shape, dtype=torch.float32)

    def _gradient(self, x: Tensor | None) -> Any:
        return None if x is None else self._empty(x, self.out_dtype)

    def _empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return like.new_empty(like.shape, dtype=dtype)


def launch(
    kernel: Any, grid: tuple[int], arguments: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """Starts the programs of a kernel."""
    kernel[grid](*arguments, **constants)


def _tokens(x: Tensor) -> tiles.Tokens:
    return tiles.Tokens(x, *x.stride())


def _sums(x: Tensor) -> tiles.Rows:
    return tiles.Rows(x, *x.stride())


def _by_token(z: Tensor) -> tiles.Rows:
    """Returns z (batch, heads, tokens, rows) as the kernels take it."""
    batch, head, token, row = z.stride()
    return tiles.Rows(z, batch, head, row, token)


def _table(table: VectorTable) -> tiles.Table:
    return tiles.Table(table, _stride_of_heads(table), table.shape[1])


def _stride_of_heads(table: Tensor) -> int:
    return table.stride(0) if table.shape[0] > 1 else 0


def _mask(mask: Tensor | None) -> tiles.Mask | None:
    if mask is None:
        return None
    strides = [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride())]
    data = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    batch, head, query, key = strides
    return tiles.Mask(data, batch, head, None if mask.shape[2] == 1 else query, key)


def _on_device(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which kernels start on a device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
