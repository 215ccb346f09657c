"""What each equipped attention of a model did with an input: its queries, keys and tables."""

import copy
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor, nn

from irpe.adapters.equipped import active_encoding, equipped_attentions
from irpe.core.grid import Grid
from irpe.core.positions import Positions
from irpe.core.token_sets import Points, Subset
from irpe.errors import UserError
from irpe.nn.modes import eval_mode
from irpe.nn.tables import RelativePositionEncoding
from irpe.ops.attention import rpe_attention_weights

HeadPairs = Float[Tensor, "heads query key"]


@dataclass(frozen=True, eq=False)
class CapturedAttention:
    """One call of one equipped attention.

    Args:
        name: The attention's path in the model.
        encoding: Its tables.
        q: The queries that the tables meet: batch, heads, tokens, head dimension.
        k: The keys.
        where: The grid of the patches, or positions where tokens are not one whole grid.
        attn_mask: The mask of the call, or `None`.
        scale: The scale of the call; `None` stands for 1 / sqrt(head dimension).
        rotated: Queries and keys as they enter the product, if the model rotates them.
        temperature: The learned factor of all scores that some models have in place of the scale.

    Examples:
        >>> import irpe, irpe.viz, timm, torch
        >>> plain = timm.create_model("vit_tiny_patch16_224", depth=1)
        >>> model = irpe.equip(plain, "product-contextual-k")
        >>> calls = irpe.viz.capture(model, torch.randn(1, 3, 224, 224))
        >>> calls[0].attention().shape
        torch.Size([3, 197, 197])
    """

    name: str
    encoding: RelativePositionEncoding
    q: Tensor
    k: Tensor
    where: Grid | Positions
    attn_mask: Tensor | None
    scale: float | None
    rotated: tuple[Tensor, Tensor] | None = None
    temperature: Tensor | None = None

    @property
    def grid(self) -> Grid:
        """The one grid of the patches; an error where there is none."""
        queries, keys = self.grids
        return queries if queries == keys else self._refuse()

    @property
    def grids(self) -> tuple[Grid, Grid]:
        """The grid of the queries and that of the keys, which may be coarser: both whole."""
        queries, keys = self.positions.sides
        if isinstance(queries, Subset | Points) or isinstance(keys, Subset | Points):
            self._refuse()
        return Grid.of(queries.shape), Grid.of(keys.shape)

    def check_whole(self) -> None:
        """Raises an error unless queries and keys are on whole grids."""
        _ = self.grids

    @property
    def positions(self) -> Positions:
        """Where the patches are, queries and keys."""
        return Positions(self.where) if isinstance(self.where, Grid) else self.where

    def _refuse(self) -> NoReturn:
        raise UserError(
            f"{self.name} has its tokens on {self.where}: this picture is of one grid; choose "
            "other attentions, or irpe.viz.plot_positions for their buckets"
        )

    @property
    def num_prefix_tokens(self) -> int:
        """The number of tokens before the patches."""
        return self.encoding.num_prefix_tokens

    @property
    def num_heads(self) -> int:
        """The number of heads."""
        return self.q.shape[1]

    @property
    def sees_whole_image(self) -> bool:
        """Whether the call was about one image, not several or the windows of one."""
        return self.q.shape[0] == 1

    def extra_weights(self) -> HeadPairs:
        """Returns b_ij of Eq. 13, averaged over the batch (and a Swin transformer's windows)."""
        self._check_scores()
        with torch.no_grad():
            return self.encoding.scores(self.q, self.k, grid=self.where).mean(0)

    def score_unit(self) -> float:
        """Returns the size of the attention scores: what q_i . k_j and b_ij vary over the keys.

        Softmax cancels what all keys of a query have in common, so both are taken less their means
        over the keys; the sum of their root mean squares is the unit, 1 if there is nothing.
        """
        q, k = self.rotated or (self.q, self.k)
        plain = _centred(q @ k.transpose(-2, -1))
        unit = _root_mean_square(plain) + _root_mean_square(_centred(self.extra_weights()))
        return unit or 1.0

    def score_shares(self) -> HeadPairs:
        """Returns b_ij, less its mean over the keys, as a share of the attention scores."""
        return _centred(self.extra_weights()) / self.score_unit()

    def encoding_share(self) -> float:
        """Returns how much of the attention scores is the encoding's, from 0 to 1."""
        return _root_mean_square(self.score_shares())

    def attention(self) -> HeadPairs:
        """Returns the attention weights a_ij, averaged over the batch."""
        self._check_scores()
        arguments: dict[str, Any] = {"attn_mask": self.attn_mask, "scale": self.scale}
        q, k = self.q, self.k
        if self.rotated is not None:
            arguments |= {"table_q": q, "table_k": k}
            q, k = self.rotated
        if self.temperature is not None:
            arguments["temperature"] = self.temperature
        with torch.no_grad():
            return self.encoding.weights(q, k, grid=self.where, **arguments).mean(0)

    def attention_without(self) -> HeadPairs:
        """Returns the weights of the same queries and keys without the encoding."""
        self._check_scores()
        q, k = self.rotated or (self.q, self.k)
        q, scale = (q, self.scale) if self.temperature is None else (q * self.temperature, 1.0)
        return rpe_attention_weights(q, k, (), attn_mask=self.attn_mask, scale=scale).mean(0)

    def _check_scores(self) -> None:
        if self.encoding.spec.mode == "contextual" and self.encoding.spec.targets == "v":
            raise UserError(
                f"{self.name} has the encoding {self.encoding.spec}, which acts on values alone: "
                "it adds nothing to the attention's scores, so there is nothing to see"
            )


def _centred(scores: Tensor) -> Tensor:
    return scores - scores.mean(-1, keepdim=True)


def _root_mean_square(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def capture(model: nn.Module, *inputs: Any, **keywords: Any) -> list[CapturedAttention]:
    """Runs a model once, in eval mode and without gradients, and notes what its attentions did.

    Args:
        model: An equipped model of any library; its training mode is as before afterwards.
        inputs: What it is called with.
        keywords: What it is called with by name.

    Returns:
        The calls of equipped attentions, in the order in which they were made.

    Examples:
        >>> import irpe, irpe.viz, timm, torch
        >>> plain = timm.create_model("vit_tiny_patch16_224", depth=1)
        >>> model = irpe.equip(plain, "product-contextual-k")
        >>> calls = irpe.viz.capture(model, torch.randn(1, 3, 224, 224))
        >>> [call.name for call in calls]
        ['blocks.0.attn']
    """
    calls: list[CapturedAttention] = []
    with torch.no_grad(), eval_mode(model), _noting(model, calls):
        model(*inputs, **keywords)
    return calls


def _whole_grid(where: Any) -> Grid | Positions:
    """Returns the grid, also of positions whose queries and keys are all of one."""
    if not isinstance(where, Positions):
        return Grid.of(where)
    queries, keys = where.sides
    return queries if isinstance(queries, Grid) and queries == keys else where


@contextmanager
def _noting(model: nn.Module, calls: list[CapturedAttention]) -> Generator[None]:
    """Appends every call of an equipped attention to a list, as long as the context lasts."""
    handles: list[Any] = []
    for name, attention in equipped_attentions(model).items():

        def note(encoding: Any, args: Any, kwargs: Any, name: str = name) -> None:
            entering = tuple(x.detach().float().cpu() for x in args[:2])
            rotates = kwargs.get("table_q") is not None
            met = (kwargs["table_q"], kwargs["table_k"]) if rotates else args[:2]
            q, k = (x.detach().float().cpu() for x in met)
            rotated = entering if rotates else None
            mask = kwargs.get("attn_mask")
            mask = None if mask is None else mask.detach().cpu()
            tables = copy.deepcopy(encoding).float().cpu()
            grid, scale = _whole_grid(kwargs["grid"]), kwargs.get("scale")
            temperature = kwargs.get("temperature")
            if temperature is not None:
                temperature = temperature.detach().float().cpu()
            calls.append(
                CapturedAttention(name, tables, q, k, grid, mask, scale, rotated, temperature)
            )

        encoding = active_encoding(attention)
        handles.append(encoding.register_forward_pre_hook(note, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
