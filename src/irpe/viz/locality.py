"""How far attention looks, block by block, with the encoding and without (conclusion 4)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from irpe.core.colours import COLOURS
from irpe.core.positions import Positions
from irpe.errors import UserError
from irpe.viz.attention_maps import short_name
from irpe.viz.canvas import COLUMN, new_figure, styled
from irpe.viz.capture import CapturedAttention, HeadPairs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEAST = 0.1  # patches: the axis reaches so far at least


@dataclass(frozen=True)
class Locality:
    """The mean attended distance of each attention, in patches.

    Prefix tokens have no position: they count neither as queries nor as keys, and the weights of
    the patches are scaled to sum to 1.

    Args:
        names: The attentions, from the input on.
        with_encoding: With the tables as learned.
        without_encoding: The same queries and keys with all tables zero.
        uniform: The distance if every patch attended to all patches alike.

    Examples:
        >>> import irpe, irpe.viz, timm, torch
        >>> plain = timm.create_model("vit_tiny_patch16_224", depth=1)
        >>> model = irpe.equip(plain, "product-contextual-k")
        >>> calls = irpe.viz.capture(model, torch.randn(1, 3, 224, 224))
        >>> locality = irpe.viz.measure_locality(calls)
        >>> locality.with_encoding == locality.without_encoding  # tables are zero at the start
        True
    """

    names: tuple[str, ...]
    with_encoding: tuple[float, ...]
    without_encoding: tuple[float, ...]
    uniform: tuple[float, ...]


def measure_locality(calls: Sequence[CapturedAttention]) -> Locality:
    """Returns the mean attended distance of each captured attention, over heads and patches.

    Examples:
        >>> import irpe, irpe.viz, timm, torch
        >>> plain = timm.create_model("vit_tiny_patch16_224", depth=1)
        >>> model = irpe.equip(plain, "product-contextual-k")
        >>> calls = irpe.viz.capture(model, torch.randn(1, 3, 224, 224))
        >>> irpe.viz.measure_locality(calls).names
        ('blocks.0.attn',)
    """
    if not calls:
        raise UserError("no attention was captured: pass what irpe.viz.capture returned")
    for call in calls:
        call.check_whole()
    return Locality(
        tuple(call.name for call in calls),
        tuple(_of(call, call.attention()) for call in calls),
        tuple(_of(call, call.attention_without()) for call in calls),
        tuple(float(_distances(call.positions).mean()) for call in calls),
    )


def _of(call: CapturedAttention, weights: HeadPairs) -> float:
    return attended_distance(weights, call.positions, call.num_prefix_tokens)


def attended_distance(weights: HeadPairs, where: Positions, num_prefix_tokens: int) -> float:
    """Returns the mean distance from patches to the patches that they attend to."""
    patches = weights[:, num_prefix_tokens:, num_prefix_tokens:].double()
    reached = (patches * _distances(where)).sum(-1) / patches.sum(-1)
    return float(reached.mean())


def _distances(where: Positions) -> Tensor:
    queries, keys = (places.double() for places in where.places())
    return (queries[:, None] - keys).square().sum(-1).sqrt()


@styled
def plot_locality(locality: Locality) -> "Figure":
    """Returns what the encoding changes of the mean attended distance, a bar for each block.

    Args:
        locality: What `measure_locality` returned.

    Examples:
        >>> import irpe, irpe.viz, timm, torch
        >>> plain = timm.create_model("vit_tiny_patch16_224", depth=1)
        >>> model = irpe.equip(plain, "product-contextual-k")
        >>> calls = irpe.viz.capture(model, torch.randn(1, 3, 224, 224))
        >>> figure = irpe.viz.plot_locality(irpe.viz.measure_locality(calls))
    """
    pairs = zip(locality.with_encoding, locality.without_encoding, strict=True)
    changes = [with_it - without for with_it, without in pairs]
    names = [short_name(name) for name in locality.names]
    figure = new_figure(COLUMN, 0.55 * len(names) + 1.8)
    axes = figure.subplots()
    colours = [COLOURS[0] if change < 0 else COLOURS[1] for change in changes]
    bars = axes.barh(names, changes, color=colours, height=0.6)
    bound = max(_LEAST, *map(abs, changes))
    axes.set_xlim(-1.1 * bound, 1.1 * bound)
    measured = zip(bars, changes, locality.without_encoding, locality.with_encoding, strict=True)
    for bar, change, without, with_it in measured:
        axes.annotate(
            f"{round(change, 2) + 0.0:+.2f}  ({without:.2f} → {with_it:.2f})",
            (0, bar.get_y() + bar.get_height() / 2), (3 if change < 0 else -3, 0),
            textcoords="offset points", ha="left" if change < 0 else "right", va="center",
            fontsize=6,
        )  # fmt: skip
    axes.axvline(0, color="black", linewidth=0.6)
    axes.invert_yaxis()
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(
        "change of the attended distance, in patches\n← nearer with the encoding | farther →"
    )
    return figure
