"""Draws the picture that ships with the package: a bay, a boat, a house, trees.

python examples/draw_scene.py src/irpe/viz/assets/scene.png
"""

import random
import sys

from PIL import Image, ImageDraw

SIZE, FINE = 224, 4  # drawn four times as large, then made smaller, so that edges are smooth


def main(path: str) -> None:
    canvas = gradient((94, 160, 214), (250, 214, 165), (42, 96, 130), (20, 52, 84), horizon=0.55)
    draw = Pen(canvas)
    draw.disc(0.74, 0.30, 0.085, (255, 236, 170))
    draw.shape([(0, 0.50), (0.20, 0.31), (0.36, 0.45), (0.52, 0.36), (0.75, 0.56), (0, 0.56)], 92)
    draw.shape([(0.45, 0.56), (0.70, 0.44), (0.86, 0.50), (1, 0.42), (1, 0.56)], 118)
    draw.glitter()
    draw.boat()
    draw.meadow()
    for x, y, size in [(0.80, 0.80, 0.17), (0.93, 0.86, 0.21), (0.68, 0.88, 0.12)]:
        draw.tree(x, y, size)
    draw.house()
    canvas.resize((SIZE, SIZE), Image.Resampling.LANCZOS).save(path, optimize=True)


def gradient(top, low, near, deep, horizon: float) -> Image.Image:
    """Returns the sky above the horizon and the water below it."""
    side = SIZE * FINE
    canvas = Image.new("RGB", (side, side))
    draw = ImageDraw.Draw(canvas)
    for y in range(side):
        place = y / side
        start, end = (top, low) if place < horizon else (near, deep)
        part = place / horizon if place < horizon else (place - horizon) / (1 - horizon)
        colour = tuple(round(a + (b - a) * part) for a, b in zip(start, end, strict=True))
        draw.line([(0, y), (side, y)], fill=colour)
    return canvas


class Pen:
    """Draws in coordinates from 0 to 1."""

    def __init__(self, canvas: Image.Image) -> None:
        self.draw, self.side = ImageDraw.Draw(canvas), SIZE * FINE
        self.chance = random.Random(0)

    def shape(self, points, colour) -> None:
        """Fills a polygon."""
        colour = (colour // 2 + 20, colour // 2 + 44, colour) if isinstance(colour, int) else colour
        self.draw.polygon([(x * self.side, y * self.side) for x, y in points], fill=colour)

    def disc(self, x: float, y: float, radius: float, colour) -> None:
        """Fills a circle."""
        box = [(v + r) * self.side for r in (-radius, radius) for v in (x, y)]
        self.draw.ellipse(box, fill=colour)

    def box(self, x: float, y: float, width: float, height: float, colour) -> None:
        """Fills a rectangle."""
        self.shape([(x, y), (x + width, y), (x + width, y + height), (x, y + height)], colour)

    def glitter(self) -> None:
        """Draws light on the water."""
        for _ in range(90):
            y = self.chance.uniform(0.57, 0.80)
            x = self.chance.gauss(0.74, 0.05 + 0.25 * (y - 0.57))
            self.box(x, y, 0.012 + 0.06 * (y - 0.57), 0.004, (240, 214, 168))

    def boat(self) -> None:
        """Draws a boat."""
        self.shape([(0.36, 0.66), (0.36, 0.42), (0.52, 0.645)], (250, 248, 240))
        self.shape([(0.345, 0.65), (0.345, 0.47), (0.25, 0.64)], (226, 92, 62))
        self.shape([(0.24, 0.665), (0.54, 0.665), (0.49, 0.72), (0.28, 0.72)], (92, 48, 32))

    def meadow(self) -> None:
        """Draws the shore and its grass."""
        shore = [(0, 0.80), (0.25, 0.765), (0.55, 0.80), (0.80, 0.77), (1, 0.80), (1, 1), (0, 1)]
        self.shape(shore, (104, 142, 62))
        for _ in range(260):
            x, y = self.chance.random(), self.chance.uniform(0.82, 1)
            shade = self.chance.randint(-22, 22)
            self.box(x, y, 0.004, 0.018, (104 + shade, 150 + shade, 60))

    def tree(self, x: float, y: float, size: float) -> None:
        """Draws a tree."""
        self.box(x - 0.07 * size, y, 0.14 * size, 0.5 * size, (86, 58, 38))
        for dx, dy, r in [(0, -0.55, 0.42), (-0.3, -0.2, 0.4), (0.3, -0.2, 0.4), (0, -0.15, 0.42)]:
            self.disc(x + dx * size, y + dy * size, r * size, (38, 98 + round(60 * -dy), 58))

    def house(self) -> None:
        """Draws a house."""
        self.box(0.08, 0.74, 0.22, 0.15, (238, 226, 202))
        self.shape([(0.05, 0.75), (0.19, 0.63), (0.33, 0.75)], (168, 58, 44))
        self.box(0.165, 0.80, 0.05, 0.09, (88, 60, 44))
        for x in (0.105, 0.24):
            self.box(x, 0.785, 0.038, 0.038, (82, 132, 168))


if __name__ == "__main__":
    main(sys.argv[1])
