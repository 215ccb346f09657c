"""Colours that readers can distinguish, for curves and for classes."""

import colorsys

# Okabe and Ito's, which colour-blind readers can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def class_colours(count: int) -> list[tuple[int, int, int]]:
    """Returns a colour for each class: of seven that all readers can distinguish, then by hue.

    Args:
        count: The number of classes.
    """
    first = [to_rgb(colour) for colour in COLOURS[:7]]  # the eighth is grey
    hues = [(index * 0.618) % 1 for index in range(max(count - len(first), 0))]
    more = [colorsys.hsv_to_rgb(h, 0.45, 0.95 - 0.35 * (n % 2)) for n, h in enumerate(hues)]
    return [*first, *((round(255 * r), round(255 * g), round(255 * b)) for r, g, b in more)][:count]


def to_rgb(colour: str) -> tuple[int, int, int]:
    """Returns red, green and blue of a colour such as "#0072B2"."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return red, green, blue
