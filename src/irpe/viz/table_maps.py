"""The learned tables: how long the vector of each bucket is, where the bucket lies.

Positions are those of the key, seen from the query: right and below are positive.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from irpe.adapters.equipped import active_encoding, equipped_attentions
from irpe.core.colours import COLOURS
from irpe.core.encodings import Joined
from irpe.core.encodings.spec import RPESpec
from irpe.core.index import Clip, Index
from irpe.core.methods import METHODS
from irpe.errors import UserError
from irpe.nn.tables import RelativePositionEncoding
from irpe.viz.attention_maps import short_name
from irpe.viz.canvas import DIVERGING, SEQUENTIAL, draw_map, draw_star, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ACROSS = 4  # panels side by side
_NEAR = 8  # patches: tables that are all zero are drawn up to there
_PANEL = 3.6  # centimetres: the width of a panel

ROLES = ("query", "key", "value", "bias")
_AXES = ("rows", "columns")
_FARTHEST = 128  # patches: tables are laid out up to there


@dataclass(frozen=True)
class TableNorms:
    """How long the vectors of a table are, one value for each bucket.

    Args:
        values: The norm of each row, the mean of all heads; the value itself for a bias that the
            heads share. Two axes for the product method, one for the others.
        positions: For each axis the position or the distance nearest to the query that a bucket
            stands for, NaN if it stands for none.
        prefix: The norm of the prefix row, if there is one.
        is_signed: Whether the values may be negative.
    """

    values: Float[Tensor, "*buckets"]
    positions: tuple[float, ...]
    prefix: float | None
    is_signed: bool


def table_norms(encoding: RelativePositionEncoding) -> dict[str, TableNorms]:
    """Returns the norms of each table of an encoding, by its role and axis, if it has several."""
    if encoding.ndim > 2:
        raise UserError(f"the tables are for {encoding.ndim} axes: a picture has one or two")
    norms: dict[str, TableNorms] = {}
    for role in ROLES:
        tables = [table.detach().float().cpu() for table in getattr(encoding, f"{role}_tables")]
        for table, axis in zip(tables, _AXES, strict=False):
            name = f"{role}, {axis}" if len(tables) > 1 else role
            norms[name] = _norms(encoding, table)
    if not norms:
        why = "it rotates queries and keys" if encoding.spec.method is None else "they are computed"
        raise UserError(
            f"the encoding {encoding.spec} has no learned tables to draw, {why}: see what it does "
            "with irpe show weights, attention or locality"
        )
    return norms


def _norms(encoding: RelativePositionEncoding, table: Tensor) -> TableNorms:
    is_signed = table.ndim == 2 and len(table) == 1
    lengths = table.abs() if table.ndim == 2 else table.norm(dim=-1)
    rows = table[0] if is_signed else lengths.mean(0)
    prefix = float(rows[-1]) if encoding.num_prefix_tokens else None
    rows = rows[:-1] if encoding.num_prefix_tokens else rows
    method = encoding.spec.method
    if method == "product":
        side = round(len(rows) ** (1 / encoding.ndim))
        rows = rows.view((side,) * encoding.ndim)
    if method in ("product", "cross"):
        rows = rows.flip(tuple(range(rows.ndim)))  # from query minus key to key minus query
    return TableNorms(rows, _positions(encoding, rows.shape[0]), prefix, is_signed)


def _positions(encoding: RelativePositionEncoding, count: int) -> tuple[float, ...]:
    spec = encoding.spec.tables if isinstance(encoding.spec, Joined) else encoding.spec
    index: Index = spec.index_function if isinstance(spec, RPESpec) else Clip(max(count // 2, 1))
    reach = min(math.ceil(index.saturation) + 1, _FARTHEST)
    along = torch.arange(reach + 1)
    if spec.method in ("product", "cross"):
        far = _nearest(index(along), along.double(), count // 2 + 1)
        return (*(-x for x in reversed(far[1:])), *far)
    offsets = torch.cartesian_prod(along, along) if encoding.ndim == 2 else along[:, None]
    assert spec.method is not None  # it has tables
    (ids,) = METHODS[spec.method].ids(offsets, index)
    return tuple(_nearest(ids, offsets.double().norm(dim=-1), count))


def _nearest(ids: Tensor, distances: Tensor, count: int) -> list[float]:
    """Returns the smallest distance of each bucket, NaN where it has none."""
    nearest = torch.full((count,), math.inf, dtype=torch.float64)
    nearest.scatter_reduce_(0, ids, distances, "amin")
    return nearest.masked_fill(nearest.isinf(), math.nan).tolist()


Panels = dict[str, list[TableNorms]]  # by the name of the attention; a table for each axis


@styled
def plot_tables(model: nn.Module, blocks: Sequence[int] | None = None) -> "Figure":
    """Returns the tables of a model: the norm of each bucket's vector, where the bucket lies.

    Tables of the product method are maps around the query, the star; all others are curves over the
    position along an axis, or over the distance. Panels of one role have one scale.

    Args:
        model: An equipped model.
        blocks: The indices of the attentions to draw, counted from the input; `None` draws all.

    Examples:
        >>> import irpe, irpe.viz, timm
        >>> plain = timm.create_model("vit_tiny_patch16_224", depth=1)
        >>> model = irpe.equip(plain, "product-contextual-k")
        >>> figure = irpe.viz.plot_tables(model)
    """
    named = list(equipped_attentions(model).items())
    chosen = range(len(named)) if blocks is None else blocks
    indices = [check_block(index, len(named)) for index in chosen]
    if not indices:
        raise UserError("nothing to draw: pass at least one block")
    roles: dict[str, Panels] = {}
    for index in indices:
        name, attention = named[index]
        for table, norms in table_norms(active_encoding(attention)).items():
            panels = roles.setdefault(table.partition(",")[0], {})
            panels.setdefault(short_name(name), []).append(norms)
    lines = {role: math.ceil(len(panels) / _ACROSS) for role, panels in roles.items()}
    across = min(max(map(len, roles.values())), _ACROSS)
    figure = new_figure(max(_PANEL * across + 1.6, 8.0), 3.8 * sum(lines.values()))
    grids: Any = figure.subfigures(len(roles), 1, squeeze=False, height_ratios=list(lines.values()))
    for part, (role, panels) in zip(grids[:, 0], roles.items(), strict=True):
        axes: Any = part.subplots(lines[role], across, squeeze=False)
        _draw_role(part, list(axes.flat), role, panels)
    return figure


def check_block(index: int, count: int) -> int:
    """Returns the index of an equipped attention, or raises an error."""
    if not -count <= index < count:
        raise UserError(f"block {index} does not exist: the model has 0 to {count - 1}")
    return index % count


def _draw_role(part: Any, drawn: "list[Axes]", role: str, panels: Panels) -> None:
    """Draws the tables of one role on one scale."""
    for axes in drawn[len(panels) :]:
        axes.set_axis_off()
    tables = [norms for tables in panels.values() for norms in tables]
    bound = max(float(norms.values.abs().max()) for norms in tables) or 1.0
    label = f"{role}: {'value' if tables[0].is_signed else 'norm'} of a bucket"
    image: Any = None
    for axes, (name, tables) in zip(drawn, panels.items(), strict=False):
        prefix = ", ".join(f"{norms.prefix:.2g}" for norms in tables if norms.prefix is not None)
        axes.set_title(f"{name}\nprefix {prefix}" if prefix else name)
        if tables[0].values.ndim == 2:
            image = _draw_positions(axes, tables[0], bound)
        else:
            _draw_curves(axes, tables, bound, is_first=axes is drawn[0])
    if image is None:
        part.supylabel(label, fontsize=7)
        return
    bar = part.colorbar(image, ax=drawn, aspect=25, pad=0.02, label=label)
    bar.outline.set_visible(False)


def _draw_positions(axes: "Axes", norms: TableNorms, bound: float) -> Any:
    """Draws a map around the query."""
    scale = (-bound, bound, DIVERGING) if norms.is_signed else (0.0, bound, SEQUENTIAL)
    image = draw_map(axes, norms.values, vmin=scale[0], vmax=scale[1], cmap=scale[2])
    middle = len(norms.positions) // 2
    draw_star(axes, middle, middle, 5)
    labels = _ranges(norms.positions)
    axes.set_xticks(range(len(labels)), labels, fontsize=5.5, rotation=90)
    axes.set_yticks(range(len(labels)), labels, fontsize=5.5)
    axes.set_xlabel("columns to the key")
    axes.set_ylabel("rows to the key")
    axes.tick_params(length=0, pad=1)
    return image


def _draw_curves(axes: "Axes", tables: list[TableNorms], bound: float, is_first: bool) -> None:
    """Draws curves over positions or distances; those that were never trained are left out."""
    for norms, axis, colour in zip(tables, ("rows", "columns"), COLOURS, strict=False):
        positions = torch.tensor(norms.positions)
        is_learned = (norms.values != 0) & positions.isfinite()
        is_shown = is_learned if is_learned.any() else positions.abs() < _NEAR  # NaN is not
        x, y = positions[is_shown].tolist(), norms.values[is_shown].tolist()
        axes.plot(x, y, "o-", color=colour, markersize=2, linewidth=0.8, label=axis)
    axes.set_ylim(-1.05 * bound if tables[0].is_signed else 0.0, 1.05 * bound)
    axes.grid(axis="y")
    is_distance = tables[0].positions[0] == 0
    axes.set_xlabel("distance, in patches" if is_distance else "patches to the key")
    if len(tables) > 1 and is_first:
        axes.legend(loc="best", handlelength=1.0)


def _ranges(positions: Sequence[float]) -> list[str]:
    """Returns what each bucket along an axis stands for: "0", "1", "2…4", "≥5"."""
    middle = len(positions) // 2
    known = [round(x) for x in positions[middle:] if not math.isnan(x)]
    labels = {
        start: str(start) if after == start + 1 else f"{start}…{after - 1}"
        for start, after in itertools.pairwise(known)
    }
    labels[known[-1]] = f"≥{known[-1]}" if known[-1] else "0"
    named = ("" if math.isnan(x) else labels[round(abs(x))] for x in positions)
    return [_mirrored(label) if x < 0 else label for x, label in zip(positions, named, strict=True)]


def _mirrored(label: str) -> str:
    """Returns the label of the negative of a range."""
    if label.startswith("≥"):
        return f"≤-{label[1:]}"
    start, dots, end = label.partition("…")
    return f"-{end}…-{start}" if dots else f"-{start}"
