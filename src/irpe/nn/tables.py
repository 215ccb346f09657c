"""The learned tables of one attention, as a module that computes attention with them."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor, nn

from irpe.core.augmentation import NONE
from irpe.core.buckets import BucketMap, bucket_maps, check_num_prefix_tokens, maps_on
from irpe.core.encodings import Encoding, attention_encoding
from irpe.core.encodings.protocol import TABLE_LISTS, HeadSize, OnGrid, check_table_size
from irpe.core.encodings.rope import is_trained_as
from irpe.core.grid import Grid, grid_shape
from irpe.core.positions import AugmentedGrid, Positions, Sample, Where, check_tokens
from irpe.core.rotation import Rotation, rotate
from irpe.errors import UserError
from irpe.ops.attention import (
    ScoreArguments,
    explain,
    rpe_attention,
    rpe_attention_weights,
    rpe_scores,
)
from irpe.ops.choose import Explanation, check_impl
from irpe.ops.shapes import Mask, Scores, Tokens

Temperature = Float[Tensor, "heads 1 1"]


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
        # With and without prefix tokens, whole: a compiler loses the fields of `_replace`.
        self._size_of_positions = tuple(self.size._replace(num_prefix_tokens=n) for n in (0, 1))
        self.impl = impl
        self._augments = self.spec.augmentation != NONE
        for role in TABLE_LISTS:
            setattr(self, role, nn.ParameterList())
        shapes = self.spec.parameter_shapes(self.size)
        check_table_size(self.spec, shapes)
        self._lists = tuple(dict.fromkeys(n.partition(".")[0] for n in shapes if "." in n))
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
        table_q: Tokens | None = None,
        table_k: Tokens | None = None,
        temperature: Temperature | None = None,
        impl: str | None = None,
    ) -> Tokens:
        """Returns attention with the encoding.

        Arguments as in `irpe.rpe_attention`; `impl` is the module's own if not given. `grid` is the
        shape of the grid of patches, or `irpe.Positions` where tokens are elsewhere; an encoding
        that augments positions in training is given an `irpe.AugmentedGrid` there. For an attention
        that rotates queries and keys, `q` and `k` are the rotated pair, which the dot product uses,
        and `table_q` and `table_k` the unrotated one, which the tables meet. A learned
        `temperature` replaces the scale: it is a factor of all scores, those of the encoding
        included.
        """
        q, k, maps, scoring, value_tables = self._on(
            grid, q, k, attn_mask, scale, table_q, table_k, temperature
        )
        if not maps:  # a rotation alone
            mask, scale = scoring.get("attn_mask"), scoring.get("scale")
            return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=scale)
        impl = self.impl if impl is None else impl
        return rpe_attention(
            q, k, v, maps, value_tables=value_tables, dropout_p=dropout_p, impl=impl, **scoring
        )

    def weights(
        self,
        q: Tokens,
        k: Tokens,
        *,
        grid: Where,
        attn_mask: Mask | None = None,
        scale: float | None = None,
        table_q: Tokens | None = None,
        table_k: Tokens | None = None,
        temperature: Temperature | None = None,
    ) -> Scores:
        """Returns the attention weights a_ij; arguments as in `forward`."""
        q, k, maps, scoring, _ = self._on(
            grid, q, k, attn_mask, scale, table_q, table_k, temperature
        )
        return rpe_attention_weights(q, k, maps, **scoring)

    def scores(self, q: Tokens, k: Tokens, *, grid: Where) -> Scores:
        """Returns b_ij, what the encoding adds to the scores before they are scaled.

        For a rotation that is the product of the rotated pair less that of the unrotated one.
        """
        rotated_q, rotated_k, maps, scoring, _ = self._on(grid, q, k)
        table_q, table_k = scoring.pop("table_q", None), scoring.pop("table_k", None)
        scores = rpe_scores(
            rotated_q if table_q is None else table_q,
            rotated_k if table_k is None else table_k,
            maps,
            query_tables=scoring.get("query_tables"),
            key_tables=scoring.get("key_tables"),
            bias_tables=scoring.get("bias_tables"),
        )
        return scores + rotated_q @ rotated_k.mT - q @ k.mT

    def explain(self, q: Tokens, k: Tokens, v: Tokens, *, grid: Where) -> Explanation:
        """Returns which implementation a call takes, and why no other; see `irpe.explain`."""
        q, k, maps, scoring, value_tables = self._on(grid, q, k)
        if not maps:
            raise UserError(
                f"{self.spec} has no tables, so there is no choice: rotated queries and keys go to "
                "torch.nn.functional.scaled_dot_product_attention"
            )
        return explain(q, k, v, maps, value_tables=value_tables, **scoring)

    def maps(self, grid: Where, device: torch.device | str = "cpu") -> tuple[BucketMap, ...]:
        """Returns the bucket maps on a grid, or at positions; equal encodings share them."""
        grid = grid.where if isinstance(grid, AugmentedGrid) else grid
        if not isinstance(grid, Positions):
            return self._maps_on(grid_shape(grid), device)
        self._check_ndim(grid, grid.ndim)
        if max(grid.prefixes) != self.num_prefix_tokens:
            raise UserError(
                f"positions with {grid.prefixes} prefix tokens for queries and keys, but the "
                f"encoding was made with num_prefix_tokens={self.num_prefix_tokens}: the larger of "
                "the two must be that number"
            )
        return bucket_maps(self.spec, grid, device=device)

    def _maps_on(self, shape: tuple[int, ...], device: torch.device | str) -> tuple[BucketMap, ...]:
        if len(shape) != self.size.ndim:
            self._check_ndim(shape, len(shape))
        return maps_on(self.spec, shape, self.size.num_prefix_tokens, device)

    def _check_ndim(self, grid: object, ndim: int) -> None:
        if ndim != self.size.ndim:
            raise UserError(
                f"grid {grid} has {ndim} axes but the tables were made for {self.size.ndim} axes: "
                f"pass another grid, or make the encoding with ndim={ndim}"
            )

    def _on(
        self,
        grid: Where,
        q: Tokens,
        k: Tokens,
        attn_mask: Mask | None = None,
        scale: float | None = None,
        table_q: Tokens | None = None,
        table_k: Tokens | None = None,
        temperature: Temperature | None = None,
    ) -> tuple[Tokens, Tokens, tuple[BucketMap, ...], ScoreArguments, Sequence[Tensor]]:
        """Returns q and k of the dot product, maps, what decides scores, and value tables."""
        sample, device = None, q.device
        if self._augments or isinstance(grid, AugmentedGrid):
            grid, sample = self._split_augmented(grid)
        # By attribute: in the replicas of DataParallel these are tensors, not parameters.
        parameters: dict[str, Any] = {name: getattr(self, name) for name in self._others}
        for name in self._lists:
            tables = getattr(self, name)
            own = tables._parameters  # quicker than the list, which asks for each by its number
            parameters[name] = [*(own.values() if len(own) == len(tables) else tables)]
        if isinstance(grid, Positions):
            maps = self.maps(grid, device)
            attn_mask = grid.mask_padding(attn_mask)
            check_tokens(grid, q, k)
            # Encodings for any positions take no notice of the grid.
            shape = (1,) * grid.ndim if grid.grid is None else grid.grid.shape
            size = self._size_of_positions[any(grid.prefixes)]
        else:
            shape, size = grid_shape(grid), self.size
            maps = self._maps_on(shape, device)
        found = self.spec.arguments_on(OnGrid(shape, size, device, q.dtype, sample), parameters)
        shift, rotation = found.query_shift, found.rotation
        if table_q is not None and (shift is not None or rotation is not None):
            raise UserError(
                f"table_q: encoding '{self.spec}' changes queries itself, so the attention cannot "
                "rotate them as well; choose an encoding with tables"
            )
        q = q if shift is None else q + shift.to(q.dtype)
        if rotation is not None:
            table_q, table_k = q, k
            of_queries, of_keys = _rotations(rotation, grid)
            for x, angles in ((q, of_queries), (k, of_keys)):
                if x.shape[-2] != angles.cos.shape[-2]:
                    raise UserError(
                        f"{x.shape[-2]} tokens, but grid {grid} and its prefix tokens have "
                        f"{angles.cos.shape[-2]}: pass the grid of this input"
                    )
            q, k = rotate(q, of_queries), rotate(k, of_keys)
        if temperature is not None:
            if scale is not None:
                raise UserError(
                    f"scale {scale}: a temperature stands in its place; pass one of them"
                )
            factor, scale = temperature.to(q.dtype), 1.0
            q, table_q = q * factor, None if table_q is None else table_q * factor
            if found.query_tables:  # the dot product has the factor from its queries
                table_k = (k if table_k is None else table_k) * factor
            biases = [x * factor[..., 0].to(x.dtype) for x in found.bias_tables]
            found = found._replace(bias_tables=biases)
        scoring: ScoreArguments = {
            "query_tables": found.query_tables,
            "key_tables": found.key_tables,
            "bias_tables": found.bias_tables,
            "attn_mask": attn_mask,
            "scale": scale,
            "table_q": table_q if found.key_tables else None,
            "table_k": table_k if found.query_tables else None,
        }
        return q, k, maps, scoring, found.value_tables

    def _split_augmented(
        self, grid: Where
    ) -> tuple[Grid | Sequence[int] | Positions, Sample | None]:
        """Returns where tokens are, and the random numbers that change this in training, if any."""
        if isinstance(grid, AugmentedGrid):
            return grid.where, grid.sample if self._augments and self.training else None
        if not self.training:
            return grid, None
        raise UserError(
            f"'{self.spec}' in training needs random numbers, the same in all layers of a pass: "
            f"pass irpe.AugmentedGrid.of({grid}) as the grid of all of them, or call the whole "
            "model that irpe.equip was given"
        )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Adds the encoding's text to what the state says of its modules, beside their versions."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["encoding"] = str(self.spec)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Refuses the state of another encoding, whose tables may have the same shapes."""
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        text = local_metadata.get("encoding", str(self.spec))
        if text != str(self.spec) and not is_trained_as(self.spec, attention_encoding(text)):
            error_msgs.append(
                f"{prefix[:-1]}: this is the state of encoding '{text}', not of '{self.spec}': "
                f"make the module or equip the model with '{text}'"
            )

    def extra_repr(self) -> str:
        """Returns what `print(module)` shows."""
        impl = "" if self.impl == "auto" else f", impl={self.impl!r}"
        return f"{self.spec}, num_prefix_tokens={self.num_prefix_tokens}{impl}"


def _rotations(rotation: Rotation, grid: Where) -> tuple[Rotation, Rotation]:
    """Returns the rotation of the queries and that of the keys, of the rotation of a whole grid."""
    if not isinstance(grid, Positions):
        return rotation, rotation
    queries, keys = (rotation.at(index.to(rotation.cos.device)) for index in grid.index_on_grid())
    return queries, keys
