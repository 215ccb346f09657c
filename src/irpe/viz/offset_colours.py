"""Colours for buckets: the hue is the direction from the star, the lightness the distance.

The scale is the same for every method and every reference patch. A bucket without a direction is
grey; the bucket of the prefix tokens has a colour that the scale does not contain.
"""

import math

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from irpe.core.encodings.spec import RPESpec
from irpe.core.grid import Grid
from irpe.core.methods import METHODS

PREFIX = "#000000"
DIRECTIONS = {"above": (-1.0, 0.0), "right": (0.0, 1.0), "below": (1.0, 0.0), "left": (0.0, -1.0)}
DIRECTED = ("cross", "product")

Colour = tuple[float, float, float]


def bucket_colours(spec: RPESpec, grid: Grid) -> list[dict[int, Colour]]:
    """Returns the colour of each bucket that patches of a grid use, for each table.

    A bucket has the colour of the mean position of its keys, seen from the query; that of an
    undirected method has the grey of the mean distance.
    """
    offsets = grid.distinct_offsets().flatten(0, -2)
    return colours_of_offsets(spec, offsets, math.hypot(*(size - 1 for size in grid.shape)))


def colours_of_offsets(
    spec: RPESpec, offsets: Shaped[Tensor, "offsets 2"], farthest: float | None = None
) -> list[dict[int, Colour]]:
    """Returns the colour of each bucket that offsets, queries minus keys, use, for each table."""
    positions = -offsets.double()  # keys, seen from the query
    longest = float(positions.norm(dim=-1).max()) if farthest is None else farthest
    longest = max(longest, 1.0)
    is_whole = spec.method == "quantization"
    ids = METHODS[spec.method].ids(offsets.long() if is_whole else offsets, spec.index_function)
    colours: list[dict[int, Colour]] = []
    for axis, table in enumerate(ids):
        of_table: dict[int, Colour] = {}
        seen = positions.clone()
        if spec.method == "cross":  # one axis alone decides
            seen[:, 1 - axis] = 0
        for bucket in table.unique().tolist():
            members = seen[table == bucket]
            if spec.method in DIRECTED:
                row, column = (members.mean(0) / longest).tolist()
                of_table[bucket] = directed_colour(row, column)
            else:
                of_table[bucket] = grey(float(members.norm(dim=-1).mean()) / longest)
        colours.append(of_table)
    return colours


def directed_colour(row: float, column: float) -> Colour:
    """Returns the colour of a position seen from the star, in units of the farthest distance."""
    far = min(math.hypot(row, column), 1.0)
    hue = math.radians(255) - math.atan2(column, -row)  # blue above, then clockwise
    return _oklch(_lightness(far), 0.12 * min(1.0, 2.5 * math.sqrt(far)), hue)


def grey(far: float) -> Colour:
    """Returns the grey of a distance, in units of the farthest distance."""
    return _oklch(_lightness(far), 0.0, 0.0)


def _lightness(far: float) -> float:
    return 0.95 - 0.55 * far**0.65


def _oklch(lightness: float, chroma: float, hue: float) -> Colour:
    """Returns a colour of OKLCH, whose lightness is as perceived, in sRGB."""
    lab = torch.tensor([lightness, chroma * math.cos(hue), chroma * math.sin(hue)]).double()
    linear = (_FROM_LMS @ (_TO_LMS @ lab) ** 3).clamp(0, 1)
    red, green, blue = torch.where(
        linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055
    ).tolist()
    return red, green, blue


def _matrix(*rows: tuple[float, float, float]) -> Float[Tensor, "3 3"]:
    return torch.tensor(rows, dtype=torch.float64)


_TO_LMS = _matrix(
    (1.0, 0.3963377774, 0.2158037573),
    (1.0, -0.1055613458, -0.0638541728),
    (1.0, -0.0894841775, -1.2914855480),
)
_FROM_LMS = _matrix(
    (4.0767416621, -3.3077115913, 0.2309699292),
    (-1.2684380046, 2.6097574011, -0.3413193965),
    (-0.0041960863, -0.7034186147, 1.7076147010),
)
