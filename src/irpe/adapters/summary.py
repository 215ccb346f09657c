"""What a model was equipped with."""

from dataclasses import dataclass, replace

from torch import Tensor, nn

from irpe.adapters.effect import mean_effect, measure_effect, warn_of_effect
from irpe.adapters.equipped import (
    active_encoding,
    attentions_if_any,
    equipped_blocks,
    generator_of,
)
from irpe.adapters.grids import Measured, recorded_grid
from irpe.core.positions import Positions


@dataclass(frozen=True)
class AttentionSummary:
    """One equipped attention, or a block with a position generator (rows: its 3 x 3 offsets).

    Args:
        name: Its path in the model.
        spec: Its encoding, as text.
        grid: The grid of its last input, or of the first to come, or positions where queries and
            keys have other ones; `None` if not known yet.
        num_prefix_tokens: The number of tokens before the patches.
        num_buckets: The table rows of one role, in all its bucket maps.
        num_used_buckets: The table rows that are used on the grid; `None` if the grid is not known
            yet. There can be more than are learned: transformer-xl computes its rows, axial-deeplab
            has rows of zeros.
        num_parameters: The number of elements in all its tables.
        keeps_output: Whether equipping left the output as it was: rotary encodings, alibi-2d and
            cpvt do something from the start.
        effect: How much the attention's output changes without the encoding, from 0 on
            (`irpe.adapters.effect`); `None` if no images were given.
    """

    name: str
    spec: str
    grid: Measured | None
    num_prefix_tokens: int
    num_buckets: int
    num_used_buckets: int | None
    num_parameters: int
    keeps_output: bool
    effect: float | None = None


@dataclass(frozen=True)
class Summary:
    """All equipped attentions; `print` shows a table.

    Args:
        attentions: From the input on.
    """

    attentions: tuple[AttentionSummary, ...]

    @property
    def num_parameters(self) -> int:
        """The number of elements in all tables."""
        return sum(attention.num_parameters for attention in self.attentions)

    @property
    def effect(self) -> float | None:
        """The mean effect of the encodings; `None` if it was not measured."""
        return mean_effect({a.name: a.effect for a in self.attentions if a.effect is not None})

    def __str__(self) -> str:
        rows = [["attention", "encoding", "grid", "rows", "used", "parameters"]]
        rows += [_cells(attention) for attention in self.attentions]
        if self.effect is not None:
            shown = ["?" if a.effect is None else f"{a.effect:.1%}" for a in self.attentions]
            rows = [[*row, cell] for row, cell in zip(rows, ["effect", *shown], strict=True)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if column > 2 else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        total = f"{len(self.attentions)} attentions, {self.num_parameters:,} parameters in tables"
        changing = sorted({a.spec for a in self.attentions if not a.keeps_output})
        notes = [f"{spec} acts from the start: outputs differ from before" for spec in changing]
        return "\n".join([*lines, total, *notes, *self._about_effect()])

    def _about_effect(self) -> list[str]:
        if self.effect is None:
            return []
        meaning = f"without the encoding, the output of attention changes by {self.effect:.1%}"
        return [meaning, *warn_of_effect(self.effect, self.num_parameters > 0)]


def summary(model: nn.Module, images: Tensor | None = None) -> Summary:
    """Returns what was equipped: attentions, encoding, grid, rows, used rows, parameters.

    Args:
        model: An equipped model.
        images: A few images as the model takes them. With them the summary says how much of the
            attention the encoding is, and warns where that is next to nothing.

    Examples:
        >>> import irpe, timm
        >>> model = irpe.equip(timm.create_model("vit_tiny_patch16_224", depth=1), "product-bias-k")
        >>> print(irpe.summary(model))
        attention      encoding            grid     rows  used  parameters
        blocks.0.attn  product-bias-k@1.9  14x14+1    50    50          50
        1 attentions, 50 parameters in tables
    """
    attentions = attentions_if_any(model)
    effects = {} if images is None else measure_effect(model, images)
    blocks = [_summarize_block(name, block) for name, block in equipped_blocks(model).items()]
    found = [*(_summarize(name, module) for name, module in attentions.items()), *blocks]
    return Summary(tuple(replace(each, effect=effects.get(each.name)) for each in found))


def _cells(a: AttentionSummary) -> list[str]:
    if isinstance(a.grid, Positions):
        where = str(a.grid)
    else:
        where = "?" if a.grid is None else "x".join(map(str, a.grid))
        where += f"+{a.num_prefix_tokens}" if a.num_prefix_tokens else ""
    used = "?" if a.num_used_buckets is None else str(a.num_used_buckets)
    return [a.name, a.spec, where, str(a.num_buckets), used, f"{a.num_parameters:,}"]


def _summarize(name: str, attention: nn.Module) -> AttentionSummary:
    encoding, grid = active_encoding(attention), recorded_grid(attention)
    rows = encoding.spec.num_buckets(encoding.ndim, encoding.num_prefix_tokens)
    used = None
    if grid is not None:
        used = sum(bucket_map.num_used_buckets for bucket_map in encoding.maps(grid))
    return AttentionSummary(
        name=name,
        spec=str(encoding.spec),
        grid=grid,
        num_prefix_tokens=encoding.num_prefix_tokens,
        num_buckets=sum(rows),
        num_used_buckets=used,
        num_parameters=sum(table.numel() for table in encoding.parameters()),
        keeps_output=encoding.spec.keeps_output,
    )


def _summarize_block(name: str, block: nn.Module) -> AttentionSummary:
    generator = generator_of(block)
    return AttentionSummary(
        name=name,
        spec="cpvt",
        grid=recorded_grid(block),
        num_prefix_tokens=generator.num_prefix_tokens,
        num_buckets=generator.weight[0].numel(),
        num_used_buckets=generator.weight[0].numel(),
        num_parameters=sum(p.numel() for p in generator.parameters()),
        keeps_output=False,
    )
