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
from triton.runtime import driver

from irpe.ops.call import AttentionCall
from irpe.ops.differentiable import Gradients
from irpe.ops.impl.triton.buckets import pack_ids
from irpe.ops.impl.triton.configuration import ROWS_AT_ONCE, Tile, block_dim_of, tile_of
from irpe.ops.impl.triton.joined_tables import (
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

    def __init__(self, call: AttentionCall) -> None:
        self.call, dim = call, call.q.shape[-1]
        self.is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        self.out_dtype = torch.float32 if self.is_interpreted else call.q.dtype
        self.packed = pack_ids(
            [bucket_map.compact_ids for bucket_map in call.maps],
            [bucket_map.num_used_buckets for bucket_map in call.maps],
        )
        self.query_table, self.key_table, self.value_table = (
            join_role(tables, dim)
            for tables in (call.query_tables, call.key_tables, call.value_tables)
        )
        self.bias_table = join_tables(call.bias_tables)
        self.table_q = call.q if call.table_q is None else call.table_q
        self.table_k = call.k if call.table_k is None else call.table_k
        self.block_dim = block_dim_of(dim)

    def forward(self, keeps: bool) -> tuple[Tokens, list[Tensor]]:
        """Returns the output; if asked to, what the weights need again and their sums."""
        call, pairs, has_values = self.call, self._pairs(), self.value_table is not None
        out, rest = self._empty(call.q, self.out_dtype), None
        if keeps and call.q.dtype != torch.float32:
            rest = torch.empty_like(out)
        attended = self._empty(call.q, torch.float32) if has_values else out
        softmax = call.q.new_empty(2, *call.q.shape[:3], dtype=torch.float32)
        q, k, v = map(_tokens, (call.q, call.k, call.v))
        self._run(
            "forward", forward.forward_kernel, q, k, v, pairs, _tokens(attended),
            None if has_values else _tokens(rest), tiles.Softmax(*softmax),
        )  # fmt: skip
        sums = self._sums(self.value_table, call.q)
        if sums is not None:
            self._run(
                "value", forward.value_kernel, q, k, pairs, tiles.Softmax(*softmax),
                self._present("value", sums), _sums(sums), _table(self.value_table),
                _tokens(attended), _tokens(out), _tokens(rest), BLOCK_R=ROWS_AT_ONCE,
            )  # fmt: skip
        if not keeps:
            return out.to(call.q.dtype), []
        kept = [softmax, *([] if sums is None else [sums])]
        kept += [] if rest is None else [rest.to(call.q.dtype)]
        return out.to(call.q.dtype), kept

    def backward(self, grad: Tokens, kept: list[Tensor], mask_needs_grad: bool) -> Gradients:
        """Returns the gradients, given that of the output and what was kept."""
        call, (out, saved, *others) = self.call, kept
        rest = others.pop() if call.q.dtype != torch.float32 else None
        of_values = None
        if self.value_table is not None:
            of_values = _by_token(row_products(grad, self.value_table))
        q, k, v, g = map(_tokens, (call.q, call.k, call.v, grad))
        softmax, delta = tiles.Softmax(*saved), torch.empty_like(saved[0])
        inputs = (q, k, v, self._pairs(), g)

        met = self.bias_table if self.key_table is None else self.key_table
        query_sums, key_sums = self._sums(met, call.q), self._sums(self.query_table, call.k)
        dq = self._empty(call.q, self.out_dtype)
        table_dq = self._gradient_at(call.table_q, self.key_table)
        self._run(
            "query", backward.query_kernel, *inputs, _tokens(out), _tokens(rest), softmax, delta,
            of_values, self._present("query", query_sums), _sums(query_sums),
            _table(self.key_table), _tokens(dq), _tokens(table_dq), BLOCK_R=ROWS_AT_ONCE,
        )  # fmt: skip
        dk, dv = (self._empty(x, self.out_dtype) for x in (call.k, call.v))
        table_dk = self._gradient_at(call.table_k, self.query_table)
        self._run(
            "key", backward.key_kernel, *inputs, softmax, delta, of_values,
            self._present("key", key_sums), _sums(key_sums), _table(self.query_table),
            _tokens(dk), _tokens(dv), _tokens(table_dk), BLOCK_R=ROWS_AT_ONCE,
        )  # fmt: skip
        dmask = None
        if mask_needs_grad and call.mask is not None:
            dmask = call.mask.new_zeros(call.mask.shape, dtype=self.out_dtype)
            batch, heads = call.q.shape[:2]
            shared_by = (batch // max(1, dmask.shape[0]), heads // max(1, dmask.shape[1]))
            self._run(
                "mask", backward.mask_kernel, *inputs, softmax, delta, of_values,
                tiles.Mask(dmask, *dmask.stride()), *shared_by,
            )  # fmt: skip
        of_tables = self._table_gradients(grad, query_sums, key_sums, others)
        found = Gradients(dq, dk, dv, table_dq, table_dk, dmask, of_tables)
        return found.to(call.q.dtype)

    def _table_gradients(
        self, grad: Tokens, query_sums: Any, key_sums: Any, value_sums: list[Tensor]
    ) -> list[Tensor]:
        """Returns the gradients of all tables in order, from the sums of their pairs."""
        call, found = self.call, []
        if key_sums is not None:
            found += split_gradient(key_sums, self.table_k, call.query_tables, call.scale)
        if query_sums is not None:
            found += split_gradient(query_sums, self.table_q, call.key_tables, call.scale)
        for sums in value_sums:
            found += split_gradient(sums, grad, call.value_tables, 1.0)
        if query_sums is not None:
            found += split_bias_gradient(query_sums, call.bias_tables, call.scale)
        return [x.to(call.q.dtype) for x in found]

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
            tiles.Ids(ids, ids.stride(0) if ids.shape[0] > 1 else 0, ids.stride(1)),
            by_query, by_key, _mask(call.mask), dropout, call.scale,
            call.q.shape[1], call.q.shape[2], call.k.shape[2],
        )  # fmt: skip

    def _present(self, kernel: str, sums: Tensor | None) -> tiles.Present | None:
        if sums is None:
            return None
        tile = self._tile(kernel)
        rows, ends = self.packed.rows_of_tiles(tile.queries, tile.keys)
        return tiles.Present(rows, ends, rows.shape[2], rows.shape[1] if len(rows) > 1 else 0)

    def _run(self, name: str, kernel: Any, *arguments: Any, **constants: Any) -> None:
        tile, mask, dim = self._tile(name), self.call.mask, self.call.q.shape[3]
        programs = self._num_programs(name, tile)
        if not programs:
            return
        constants |= {
            "DIM": dim, "BLOCK_D": self.block_dim, "BLOCK_M": tile.queries, "BLOCK_N": tile.keys,
            "NUM_MAPS": len(self.packed.rows), "BITS": self.packed.bits,
            "IS_ADDITIVE": mask is not None and mask.dtype != torch.bool,
            "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
            "WIDE": self.is_interpreted, "num_warps": tile.warps, "num_stages": tile.stages,
        }  # fmt: skip
        if not self.is_interpreted:
            target: Any = driver.active.get_current_target()
            if target.backend == "cuda":  # without it, ptxas may settle for 32 and spill the rest
                constants["maxnreg"] = 255
        with _on_device(self.call.q.device):
            launch(kernel, (programs,), arguments, constants)

    def _num_programs(self, name: str, tile: Tile) -> int:
        batch, heads, queries, _ = self.call.q.shape
        rows = math.ceil(queries / tile.queries)
        columns = math.ceil(self.call.k.shape[2] / tile.keys)
        if name == "mask":
            assert self.call.mask is not None
            return math.prod(self.call.mask.shape[:2]) * rows * columns if batch else 0
        return batch * heads * (columns if name == "key" else rows)

    def _tile(self, kernel: str) -> Tile:
        return tile_of(kernel, self.call.q.dtype, self.block_dim, self._num_terms())

    def _num_terms(self) -> int:
        """Returns how much a tile holds in registers beside its scores, counted in tiles."""
        call = self.call
        looked_up = sum(map(bool, (call.query_tables, call.key_tables, call.value_tables)))
        looked_up = max(looked_up, 1) * len(call.maps)
        return looked_up + 2 * (call.seed is not None) + (call.mask is not None)

    def _sums(self, table: Tensor | None, tokens: Tokens) -> Tensor | None:
        if table is None:
            return None
        batch, heads, count, _ = tokens.shape
        shape = (batch, heads, table.shape[1], count)
        return tokens.new_zeros(shape, dtype=torch.float32)

    def _gradient_at(self, x: Tensor | None, table: Tensor | None) -> Tensor | None:
        """Returns where the gradient of tokens goes that meet a table alone: zeros without it."""
        if x is None:
            return None
        make = torch.zeros if table is None else torch.empty
        return make(x.shape, dtype=self.out_dtype, device=x.device)

    def _empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return like.new_empty(like.shape, dtype=dtype)


def launch(
    kernel: Any, grid: tuple[int], arguments: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """Starts the programs of a kernel."""
    kernel[grid](*arguments, **constants)


def _tokens(x: Tensor | None) -> tiles.Tokens | None:
    return None if x is None else tiles.Tokens(x, *x.stride())


def _sums(x: Tensor | None) -> tiles.Rows | None:
    return None if x is None else tiles.Rows(x, *x.stride())


def _by_token(z: Tensor) -> tiles.Rows:
    """Returns z (batch, heads, tokens, rows) as the kernels take it."""
    batch, head, token, row = z.stride()
    return tiles.Rows(z, batch, head, row, token)


def _table(table: VectorTable | None) -> tiles.Table | None:
    if table is None:
        return None
    return tiles.Table(table, _stride_of_heads(table), table.shape[1])


def _stride_of_heads(table: Tensor) -> int:
    return table.stride(0) if table.shape[0] > 1 else 0


def _mask(mask: Tensor | None) -> tiles.Mask | None:
    if mask is None:
        return None
    sizes = zip(mask.shape, mask.stride(), strict=True)
    batch, head, query, key = (0 if size == 1 else stride for size, stride in sizes)
    data = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return tiles.Mask(data, batch, head, None if mask.shape[2] == 1 else query, key)


def _on_device(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which kernels start on a device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
