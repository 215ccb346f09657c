"""Where the labels of boxes go: near their box, inside the picture, off one another."""

from collections.abc import Iterable, Sequence

Box = Sequence[float]  # left, top, width, height
_ON_LABEL, _ON_OTHERS, _ON_OWN, _LATE = 10.0, 0.5, 1.0, 0.01  # what a place costs
_HIDDEN = 0.1  # the part of a label that may lie under those before it


def place_labels(
    boxes: Sequence[Box], sizes: Sequence[tuple[float, float]], bounds: tuple[float, float]
) -> list[tuple[float, float] | None]:
    """Returns the left and top of each label, `None` where there is no room for it.

    The first boxes choose first. A label stays clear of the labels before it above all, then of
    its own box if it would hide much of it, then of other boxes.

    Args:
        boxes: The boxes, the most important first.
        sizes: The width and height of each label.
        bounds: The width and height of the picture.
    """
    placed: list[Box] = []
    corners: list[tuple[float, float] | None] = []
    for number, (box, size) in enumerate(zip(boxes, sizes, strict=True)):
        others = [*boxes[:number], *boxes[number + 1 :]]
        choices = _places(box, size, bounds)
        costs = [_cost(choice, box, others, placed) + _LATE * n for n, choice in enumerate(choices)]
        best = choices[costs.index(min(costs))]
        has_room = _hidden(best, placed) <= _HIDDEN
        corners.append((best[0], best[1]) if has_room else None)
        placed += [best] if has_room else []
    return corners


def overlap(first: Box, second: Box) -> float:
    """Returns the area that two boxes share."""
    width, height = (
        min(first[axis] + first[axis + 2], second[axis] + second[axis + 2])
        - max(first[axis], second[axis])
        for axis in range(2)
    )
    return max(width, 0.0) * max(height, 0.0)


def _places(box: Box, size: tuple[float, float], bounds: tuple[float, float]) -> list[Box]:
    """Returns places for a label, the usual one first, moved into the picture."""
    (left, top, right, bottom), (width, height) = _corners(box), size
    middle = (left + right - width) / 2
    corners = [
        *((x, top - height) for x in (left, right - width, middle)),  # above
        *((x, bottom) for x in (left, right - width, middle)),  # below
        *((x, y) for y in (top, bottom - height) for x in (left, right - width)),  # inside
        *((x, y) for x in (right, left - width) for y in (top, bottom - height)),  # beside
        (middle, (top + bottom - height) / 2),
    ]
    return [
        (_within(x, bounds[0] - width), _within(y, bounds[1] - height), width, height)
        for x, y in corners
    ]


def _cost(label: Box, own: Box, others: Iterable[Box], placed: Iterable[Box]) -> float:
    area = label[2] * label[3]
    on_others = min(sum(overlap(label, other) for other in others) / area, 1.0)
    on_own = overlap(label, own) / max(own[2] * own[3], area)
    return _ON_LABEL * _hidden(label, placed) + _ON_OTHERS * on_others + _ON_OWN * on_own


def _hidden(label: Box, placed: Iterable[Box]) -> float:
    """Returns the part of a label that lies under others."""
    return sum(overlap(label, other) for other in placed) / (label[2] * label[3])


def _corners(box: Box) -> tuple[float, float, float, float]:
    left, top, width, height = box
    return left, top, left + width, top + height


def _within(value: float, most: float) -> float:
    return max(min(value, most), 0.0)
