"""`position_probe`: how well a patch's row and column can be read from the features of a model."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from irpe.adapters.equip import equip
from irpe.adapters.equipped import is_equipped
from irpe.core.grid import Grid
from irpe.core.positions import Positions
from irpe.errors import UserError
from irpe.nn.modes import eval_mode
from irpe.relative.images import batches_of
from irpe.relative.lockstep import AttentionInput, Lockstep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RIDGES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # relative to the mean variance of the features


@dataclass(frozen=True)
class ProbedTokens:
    """How well position can be read from the tokens that enter one attention.

    Args:
        name: The attention's path in the model.
        row: R2 of the row, predicted linearly from a patch's token, on held-out images: 1 where it
            can be read exactly, 0 or less where nothing is known.
        column: R2 of the column.
    """

    name: str
    row: float
    column: float


@dataclass(frozen=True)
class PositionProbe:
    """How well position can be read from the features of a model, attention by attention."""

    attentions: tuple[ProbedTokens, ...]

    def __str__(self) -> str:
        width = max(len(each.name) for each in self.attentions)
        lines = [f"{'tokens that enter':{width}}  row: R2  column: R2"]
        lines += [
            f"{each.name:{width}}  {each.row:7.3f}  {each.column:10.3f}" for each in self.attentions
        ]
        return "\n".join(lines)

    def figure(self) -> "Figure":
        """Returns a picture: R2 of rows and columns, attention by attention."""
        from irpe.viz.conversions import plot_position_probe

        return plot_position_probe(
            {
                "row": [each.row for each in self.attentions],
                "column": [each.column for each in self.attentions],
            }
        )


def position_probe(
    model: nn.Module,
    images: Tensor | Iterable[Tensor],
    *,
    holdout: float = 0.25,
    seed: int = 0,
    batch_size: int = 16,
) -> PositionProbe:
    """Returns how well row and column can be read from the tokens that enter each attention.

    A linear map from a patch's token to its row and column is fitted with a ridge, in closed form,
    and its R2 measured on images that it was not fitted on. The model is not changed.

    Args:
        model: A model that `irpe.equip` takes, or an equipped one.
        images: Some dozens of images as the model takes them.
        holdout: The fraction of images to measure on; half of these choose the ridge.
        seed: Chooses these images.
        batch_size: Images at a time.

    Examples:
        >>> import irpe, timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2)  # pretrained=True
        >>> len(irpe.position_probe(model, torch.randn(8, 3, 224, 224)).attentions)
        2
    """
    fitting, held_out, _ = batches_of(images, None, holdout, seed, batch_size)
    probed = copy.deepcopy(model)
    if not any(map(is_equipped, probed.modules())):
        equip(probed, "product-bias-k")
    found: list[ProbedTokens] = []
    with eval_mode(probed), Lockstep([probed], [*fitting, *held_out]) as passes:
        while (reached := passes.advance()) is not None:
            (inputs,) = reached
            found.append(_probe(inputs[: len(fitting)], inputs[len(fitting) :]))
    return PositionProbe(tuple(found))


def _probe(fitting: list[AttentionInput], held_out: list[AttentionInput]) -> ProbedTokens:
    """Fits on some batches; the first half of the images held out chooses the ridge."""
    name = held_out[0].name
    tokens, targets = zip(*map(_patches, fitting), strict=True)
    x, y = torch.cat(tokens), torch.cat(targets)
    mean, centre = x.mean((0, 1)), y.mean((0, 1))
    x, y = (x - mean).flatten(0, 1), (y - centre).flatten(0, 1)
    values, vectors = torch.linalg.eigh(x.mT @ x / len(x))
    projected = vectors.mT @ (x.mT @ y / len(x))
    maps = [
        vectors @ (projected / (values.clamp(min=0) + ridge * values.mean()).unsqueeze(1))
        for ridge in RIDGES
    ]
    tokens, targets = zip(*map(_patches, held_out), strict=True)
    x, y = torch.cat(tokens) - mean, torch.cat(targets) - centre
    half = len(x) // 2
    scores = [float(_r2(x[:half] @ each, y[:half]).sum()) for each in maps]
    best = maps[scores.index(max(scores))]
    row, column = _r2(x[half:] @ best, y[half:]).tolist()
    return ProbedTokens(name, row, column)


def _patches(inputs: AttentionInput) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Returns the tokens of the patches (batch, patches, dim), and where they are: row, column."""
    tokens, where = inputs.tokens, inputs.grid
    grid = None if isinstance(where, Positions) else Grid.of(where)
    count = inputs.num_prefix_tokens + (grid.num_positions if grid else 0)
    if grid is None or grid.ndim != 2 or tokens.ndim != 3 or tokens.shape[1] != count:
        raise UserError(
            f"{inputs.name} takes tokens of shape {tuple(tokens.shape)} on {where}: the probe "
            "reads rows and columns from tokens that are one whole grid of an image"
        )
    patches = tokens[:, inputs.num_prefix_tokens :].double()
    return patches, grid.coordinates().to(patches).expand(len(patches), -1, -1)


def _r2(found: Tensor, true: Tensor) -> Tensor:
    """Returns R2 of each coordinate."""
    error = (found - true).square().sum((0, 1))
    return 1 - error / (true - true.mean((0, 1))).square().sum((0, 1))
