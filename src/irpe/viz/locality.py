"""How far attention looks, block by block, with the encoding and without (conclusion 4)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from irpe.core.grid import Grid
from irpe.viz.canvas import COLOURS, COLUMN, new_figure, styled, whole_ticks
from irpe.viz.capture import CapturedAttention, HeadPairs

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    """

    names: tuple[str, ...]
    with_encoding: tuple[float, ...]
    without_encoding: tuple[float, ...]
    uniform: tuple[float, ...]


def measure_locality(calls: Sequence[CapturedAttention]) -> Locality:
    """Returns the mean attended distance of each captured attention, over heads and patches."""
    if not calls:
        raise ValueError("no attention was captured: pass what irpe.viz.capture returned")
    pairs = [(call, call.attention(), call.attention_without()) for call in calls]
    return Locality(
        tuple(call.name for call in calls),
        tuple(attended_distance(a, call.grid, call.num_prefix_tokens) for call, a, _ in pairs),
        tuple(attended_distance(a, call.grid, call.num_prefix_tokens) for call, _, a in pairs),
        tuple(float(_distances(call.grid).mean()) for call in calls),
    )


def attended_distance(weights: HeadPairs, grid: Grid, num_prefix_tokens: int) -> float:
    """Returns the mean distance from patches to the patches that they attend to.

    Args:
        weights: The attention weights a_ij.
        grid: The grid of the patches.
        num_prefix_tokens: The number of tokens before the patches.
    """
    patches = weights[:, num_prefix_tokens:, num_prefix_tokens:].double()
    reached = (patches * _distances(grid)).sum(-1) / patches.sum(-1)
    return float(reached.mean())


def _distances(grid: Grid) -> Tensor:
    positions = grid.coordinates().double()
    return (positions[:, None] - positions).square().sum(-1).sqrt()


@styled
def plot_locality(locality: Locality) -> "Figure":
    """Returns the curves of the mean attended distance over the blocks.

    Args:
        locality: What `measure_locality` returned.
    """
    figure = new_figure(COLUMN, 5.2)
    axes = figure.subplots()
    blocks = range(len(locality.names))
    axes.plot(blocks, locality.uniform, ":", color="#777777", label="uniform attention")
    without, with_it = locality.without_encoding, locality.with_encoding
    axes.plot(blocks, without, "s--", color=COLOURS[1], markersize=3.5, label="tables zero")
    axes.plot(blocks, with_it, "o-", color=COLOURS[0], markersize=3.5, label="with the encoding")
    axes.fill_between(blocks, with_it, without, color=COLOURS[0], alpha=0.12, linewidth=0)
    axes.set(xlabel="block", ylabel="attended distance, in patches")
    axes.set_ylim(0, 1.1 * max(*locality.uniform, *with_it, *without))
    whole_ticks(axes.xaxis)
    axes.legend(loc="lower right")
    return figure
