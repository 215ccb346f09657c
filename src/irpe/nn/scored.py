"""What scores are computed from, once an encoding and its host have prepared queries and keys."""

from collections.abc import Callable
from typing import NamedTuple, TypedDict

from jaxtyping import Float
from torch import Tensor

from irpe.core.buckets import BucketMap
from irpe.core.encodings.encoding import RoleTables
from irpe.errors import UserError

Rotate = Callable[[Tensor], Tensor]  # of queries or keys: batch, heads, tokens, dim
Temperature = Float[Tensor, "heads 1 1"]


class Scored(NamedTuple):
    """The arguments of `rpe_attention` that scores depend on; see there."""

    maps: tuple[BucketMap, ...]
    tables: RoleTables
    q: Tensor
    k: Tensor
    table_q: Tensor
    table_k: Tensor
    scale: float | None = None

    def with_temperature(self, temperature: Temperature | None) -> "Scored":
        """Returns the same with a learned factor of all scores in the place of the scale."""
        if temperature is None:
            return self
        if self.scale is not None:
            raise UserError(
                f"scale {self.scale}: a temperature stands in its place; pass one of them"
            )
        factor = temperature.to(self.q.dtype)
        is_rotated, tables = self.q is not self.table_q, self.tables.copy()
        warm_q = self.table_q * factor
        if "bias_tables" in tables:
            biases = tables["bias_tables"]
            tables["bias_tables"] = [table * factor[..., 0].to(table.dtype) for table in biases]
        return self._replace(
            tables=tables,
            q=self.q * factor if is_rotated else warm_q,
            table_q=warm_q,
            table_k=self.table_k * factor if tables.get("query_tables") else self.table_k,
            scale=1.0,
        )

    def score_tables(self) -> "ScoreTables":
        """Returns the tables that scores depend on."""
        return {
            "query_tables": self.tables.get("query_tables", []),
            "key_tables": self.tables.get("key_tables", []),
            "bias_tables": self.tables.get("bias_tables", []),
        }


class ScoreTables(TypedDict):
    """Tables by the names of `rpe_scores`' arguments."""

    query_tables: list[Tensor]
    key_tables: list[Tensor]
    bias_tables: list[Tensor]
