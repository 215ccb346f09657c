"""The learned tables of one attention, as a module that computes attention with them."""

from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from irpe.core.buckets import (
    BucketMap,
    bucket_maps,
    check_num_prefix_tokens,
)
from irpe.core.encodings import Encoding, attention_encoding
from irpe.core.encodings.encoding import (
    ROLES,
    HeadSize,
    check_table_size,
)
from irpe.core.grid import Grid, grid_shape
from irpe.core.positions import Positions, check_tokens
from irpe.core.rotation import Rotation, rotate
from irpe.errors import UserError
from irpe.nn.scored import Rotate, Scored, Temperature
from irpe.nn.where import Where, mask_padding
from irpe.ops.attention import explain, rpe_attention, rpe_attention_weights, rpe_scores
from irpe.ops.choose import Explanation, check_impl
from irpe.ops.shapes import Mask, Scores, Tokens

_LISTS = (*ROLES.values(), "bias_tables")


class RelativePositionEncoding(nn.Module):
    """The tables of an encoding for one attention, all zero at the start.

    What is learned, its shapes and initial values are the encoding's own
    (`irpe.core.encodings`): lists of tables, or for Transformer-XL `projection`, `content_shift`,
    `position_shift` and `prefix_rows`.

    Called with queries, keys and values that are split into heads, it stands where a model calls
    `scaled_dot_product_attention`.

    Args:
        spec: The encoding, or its text.
        num_heads: The heads of the attention.
        head_dim: The dimension of one head.
        num_prefix_tokens: How many tokens stand before the patches.
        ndim: The number of axes of the grid.
        device: Where the tables are made.
        dtype: The tables' dtype.
        impl: As in `irpe.rpe_attention`.

    Examples:
        >>> import irpe, torch
        >>> encoding = irpe.RelativePositionEncoding("shaw", num_heads=2, head_dim=32)
        >>> q, k, v = torch.randn(3, 8, 2, 98, 32)
        >>> encoding(q, k, v, grid=(7, 14)).shape
        torch.Size([8, 2, 98, 32])
    """

    query_tables: nn.ParameterList
    key_tables: nn.ParameterList
    value_tables: nn.ParameterList
    bias_tables: nn.ParameterList

    def __init__(
        self,
        spec: Encoding | str,
        num_heads: int,
        head_dim: int,
        num_prefix_tokens: int = 0,
        ndim: int = 2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        check_num_prefix_tokens(num_prefix_tokens)
        check_impl(impl)
        self.spec = attention_encoding(spec)
        self.size = HeadSize(num_heads, head_dim, num_prefix_tokens, ndim)
        self.impl = impl
        for role in _LISTS:
            setattr(self, role, nn.ParameterList())
        shapes = self.spec.parameter_shapes(self.size)
        check_table_size(self.spec, shapes)
        self._others = tuple(name for name in shapes if "." not in name)
        for name, shape in shapes.items():
            parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            role, in_list, _ = name.partition(".")
            if in_list:
                getattr(self, role).append(parameter)
            else:
                self.register_parameter(name, parameter)
        self.reset_parameters()

    @property
    def num_prefix_tokens(self) -> int:
        """How many tokens stand before the patches."""
        return self.size.num_prefix_tokens

    @property
    def ndim(self) -> int:
        """The number of axes of the grid."""
        return self.size.ndim

    def reset_parameters(self) -> None:
        """Sets what is learned to its initial values: attention is then as without an encoding."""
        self.spec.initialize(dict(self.named_parameters()))

    def forward(
        self,
        q: Tokens,
        k: Tokens,
        v: Tokens,
        *,
        grid: Where,
        attn_mask: Mask | None = None,
        dropout_p: float = 0.0,
        scale: float | None = None,
        rotate: Rotate | None = None,
        temperature: Temperature | None = None,
        impl: str | None = None,
    ) -> Tokens:
        """Returns attention with the encoding.

        Arguments as in `irpe.rpe_attention`; `impl` is the module's own if not given. `grid` is the
        shape of the grid of patches, or `irpe.Positions` where tokens are elsewhere. Where an
        attention rotates queries and keys for their product, `q` and `k` are those before it, which
        the tables meet, and `rotate` is the rotation. A learned `temperature` stands in the place
        of the scale: it is a factor of all scores, those of the encoding included.
        """
        scored = self._on(grid, q, k, rotate, scale).with_temperature(temperature)
        attn_mask = mask_padding(attn_mask, grid)
        if not scored.maps:  # a rotation alone
            return F.scaled_dot_product_attention(
                scored.q, scored.k, v, attn_mask, dropout_p, scale=scored.scale
            )
        return rpe_attention(
            scored.q,
            scored.k,
            v,
            scored.maps,
            **scored.tables,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            scale=scored.scale,
            table_q=scored.table_q,
            table_k=scored.table_k,
            impl=self.impl if impl is None else impl,
        )

    def weights(
        self,
        q: Tokens,
        k: Tokens,
        *,
        grid: Where,
        attn_mask: Mask | None = None,
        scale: float | None = None,
        rotate: Rotate | None = None,
        temperature: Temperature | None = None,
    ) -> Scores:
        """Returns the attention weights a_ij; arguments as in `forward`."""
        scored = self._on(grid, q, k, rotate, scale).with_temperature(temperature)
        return rpe_attention_weights(
            scored.q,
            scored.k,
            scored.maps,
            **scored.score_tables(),
            attn_mask=mask_padding(attn_mask, grid),
            scale=scored.scale,
            table_q=scored.table_q,
            table_k=scored.table_k,
        )

    def scores(self, q: Tokens, k: Tokens, *, grid: Where) -> Scores:
        """Returns b_ij, what the encoding adds to the scores before they are scaled.

        For a rotation that is the product of the turned queries and keys less that of the others.
        """
        scored = self._on(grid, q, k)
        tables = scored.score_tables()
        scores = rpe_scores(scored.table_q, scored.table_k, scored.maps, **tables)
        if scored.q is q:
            return scores
        return scores + scored.q @ scored.k.mT - q @ k.mT

    def explain(self, q: Tokens, k: Tokens, v: Tokens, *, grid: Where) -> Explanation:
        """Returns which implementation a call takes, and why no other; see `irpe.explain`."""
        scored = self._on(grid, q, k)
        if not scored.maps:
            raise UserError(
                f"{self.spec} has no tables, so there is no choice: turned queries and keys go to "
                "torch.nn.functional.scaled_dot_product_attention"
            )
        return explain(
            scored.q, scored.k, v, scored.maps, **scored.tables,
            table_q=scored.table_q, table_k=scored.table_k,
        )  # fmt: skip

    def maps(self, grid: Where, device: torch.device | str = "cpu") -> tuple[BucketMap, ...]:
        """Returns the bucket maps on a grid, or at positions; equal encodings share them."""
        ndim = grid.ndim if isinstance(grid, Positions) else len(grid_shape(grid))
        if ndim != self.ndim:
            raise UserError(
                f"grid {grid} has {ndim} axes but the tables were made for {self.ndim} axes: pass "
                f"another grid, or make the encoding with ndim={ndim}"
            )
        if not isinstance(grid, Positions):
            return bucket_maps(self.spec, grid, self.num_prefix_tokens, device)
        if max(grid.prefixes) != self.num_prefix_tokens:
            raise UserError(
                f"positions with {grid.prefixes} prefix tokens for queries and keys, but the "
                f"encoding was made with num_prefix_tokens={self.num_prefix_tokens}: the larger of "
                "the two must be that number"
            )
        return bucket_maps(self.spec, grid, device=device)

    def _on(
        self,
        grid: Where,
        q: Tokens,
        k: Tokens,
        rotate_by_host: Rotate | None = None,
        scale: float | None = None,
    ) -> Scored:
        """Returns the maps, tables, and queries and keys as they enter the products, on a grid."""
        maps = self.maps(grid, q.device)
        if isinstance(grid, Positions):
            check_tokens(grid, q, k)
        # By attribute: in the replicas of DataParallel these are tensors, not parameters.
        parameters = {name: getattr(self, name) for name in self._others}
        for role in _LISTS:
            for number, table in enumerate(getattr(self, role)):
                parameters[f"{role}.{number}"] = table
        if isinstance(grid, Positions):
            arguments = self.spec.arguments_on(*_whole_grid(grid, parameters, self.size), q)
        else:
            arguments = self.spec.arguments_on(grid, parameters, self.size, q)
        tables, shift, rotation = arguments
        q = q if shift is None else q + shift.to(q.dtype)
        if rotation is not None:
            turns = [partial(rotate, rotation=part) for part in _rotations(rotation, grid)]
        elif rotate_by_host is not None:
            turns = [rotate_by_host] * 2
        else:
            return Scored(maps, tables, q, k, q, k, scale)
        return Scored(maps, tables, turns[0](q), turns[1](k), q, k, scale)

    def extra_repr(self) -> str:
        """Returns what `print(module)` shows."""
        impl = "" if self.impl == "auto" else f", impl={self.impl!r}"
        return f"{self.spec}, num_prefix_tokens={self.num_prefix_tokens}{impl}"


def _whole_grid(
    positions: Positions, parameters: dict[str, Tensor], size: HeadSize
) -> tuple[Grid, dict[str, Tensor], HeadSize]:
    """Returns the grid that tables are made for, and the sizes with one prefix token at most.

    Tables that may be anywhere are the same for every grid.
    """
    one = size._replace(num_prefix_tokens=int(any(positions.prefixes)))
    return positions.grid or Grid((1,) * positions.ndim), parameters, one


def _rotations(rotation: Rotation, grid: Where) -> tuple[Rotation, Rotation]:
    """Returns the rotation of the queries and that of the keys, of the rotation of a whole grid."""
    if not isinstance(grid, Positions):
        return rotation, rotation
    queries, keys = (rotation.at(index.to(rotation.cos.device)) for index in grid.index_on_grid())
    return queries, keys
