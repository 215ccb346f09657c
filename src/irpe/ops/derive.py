"""From what an encoding of the paper's comparison learns to the tables of attention.

Each function is one equation, brought into the form of `irpe.ops.attention.rpe_attention`, which
then computes it as it computes any encoding.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor

from irpe.ops.shapes import VectorTable

Vector = Float[Tensor, " dim"]


def axial_deeplab_tables(learned: Sequence[VectorTable], has_prefix: bool) -> list[VectorTable]:
    """Returns the learned rows of each axis with rows of zeros for the offsets beyond.

    With r^q, r^k, r^v the terms of Axial-DeepLab (section 3.1), for the row and for the column
    offset: e_ij = (q_i k_j + q_i r^q_ij + k_j r^k_ij) / sqrt(d), z_i = sum_j a_ij (v_j + r^v_ij).
    They are the tables of keys, queries and values in this order.
    """

    def with_zeros(table: VectorTable) -> VectorTable:
        patches, prefix = table.split([table.shape[1] - has_prefix, int(has_prefix)], dim=1)
        return torch.cat([F.pad(patches, (0, 0, 1, 1)), prefix], dim=1)

    return [with_zeros(table) for table in learned]


def transformer_xl_arguments(
    sinusoids: Float[Tensor, "offsets dim"],
    projection: Float[Tensor, "dim dim"],
    prefix_rows: Float[Tensor, "1 dim"] | None,
    content_shift: Vector,
    position_shift: Vector,
) -> tuple[Vector, dict[str, list[Tensor]]]:
    """Returns what to add to the queries, and the tables for the queries after that.

    Eq. 10 is e_ij = ((q_i + u) k_j + (q_i + v) r_ij) / sqrt(d) with r_ij = s_{i-j} W^R. With
    q' = q + u in the place of q, q_i + v = q'_i + (v - u): a key table r and a bias (v - u) r.

    Args:
        sinusoids: s, one row for each offset.
        projection: W^R.
        prefix_rows: The row of pairs with a prefix token in it, if there are any.
        content_shift: u.
        position_shift: v.
    """
    rows = sinusoids @ projection
    if prefix_rows is not None:
        rows = torch.cat([rows, prefix_rows])
    bias = (rows * (position_shift - content_shift)).sum(-1)
    return content_shift, {"key_tables": [rows.unsqueeze(0)], "bias_tables": [bias.unsqueeze(0)]}
