"""A moving picture: the star wanders over the bucket map, beside what the tables add from there."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from irpe import files
from irpe.core.encodings.spec import RPESpec
from irpe.core.grid import Grid
from irpe.errors import UserError
from irpe.viz.attention_maps import Patch, draw_picture, pick_head, short_name
from irpe.viz.bucket_maps import bucket_tables, draw_buckets
from irpe.viz.canvas import DIVERGING, check_output, draw_map, draw_star, new_figure, panels, styled
from irpe.viz.capture import CapturedAttention

if TYPE_CHECKING:
    from PIL.Image import Image

ANIMATIONS = (".gif", ".webp")
_WIDTH, _DPI = 5.2, 110  # of a panel, in centimetres; in dots per inch
_COLOURS = 224


@styled
def animate_star(
    call: CapturedAttention, image: Any = None, head: int | None = None
) -> "list[Image]":
    """Returns pictures of a star that goes once around: buckets, and b_ij, from where it is.

    The first map shows which patches share a bucket, as `plot_buckets` does; the second one what
    the learned tables add to the attention scores of the patch with the star, as `plot_weights`
    does, on one scale for all pictures.

    Args:
        call: The attention to draw, of `irpe.viz.capture`; its encoding has one bucket map.
        image: The picture that the model was given, shown on the left; `None` leaves it out.
        head: The head to draw; `None` draws the mean of all.

    Examples:
        >>> import irpe, irpe.viz, timm, torch
        >>> plain = timm.create_model("vit_tiny_patch16_224", depth=1)
        >>> model = irpe.equip(plain, "product-contextual-k")
        >>> (call,) = irpe.viz.capture(model, torch.randn(1, 3, 224, 224))
        >>> len(irpe.viz.animate_star(call))
        28
    """
    grid, spec = call.grid, call.encoding.spec
    if not isinstance(spec, RPESpec) or len(call.encoding.maps(grid)) != 1:
        raise UserError(
            f"{spec} does not have one bucket map: draw a run with product-contextual-k"
        )
    (table,) = bucket_tables(spec, grid, 0)
    first = call.num_prefix_tokens
    shares = pick_head(call.score_shares(), head)[first:, first:].view(-1, *grid.shape)
    bound = float(shares.abs().max()) or 1.0
    height = _WIDTH * grid.shape[0] / grid.shape[1] + 1.3  # the title takes the rest
    columns = 2 if image is None else 3
    pictures: list[Image] = []
    for patch in wander(grid):
        figure = new_figure(_WIDTH * columns, height)
        drawn = panels(figure, 1, columns, space=0.04)[0]
        if image is not None:
            draw_picture(drawn[0], image, grid)
            draw_star(drawn[0], *patch, size=9)
            drawn[0].set_title("image, with\nthe patch that attends")
        draw_buckets(drawn[-2], table, grid, 0, patch, cell=_WIDTH / grid.shape[1] * 28)
        drawn[-2].set_title(f"patches that share a bucket\n({spec.method})")
        weights = shares[patch[0] * grid.shape[1] + patch[1]]
        draw_map(drawn[-1], weights, cmap=DIVERGING, vmin=-bound, vmax=bound)
        draw_star(drawn[-1], *patch, size=9)
        drawn[-1].set_title(f"what the tables add to attention\n({short_name(call.name)})")
        pictures.append(_rendered(figure))
    return pictures


def wander(grid: Grid | Sequence[int]) -> list[Patch]:
    """Returns the patches of a round trip, clockwise, halfway between centre and border."""
    rows, columns = Grid.of(grid).shape
    top, left = rows // 4, columns // 4
    bottom, right = rows - 1 - top, columns - 1 - left
    across, down = range(left, right), range(top, bottom)
    trip = [(top, column) for column in across] + [(row, right) for row in down]
    trip += [(bottom, left + right - column) for column in across]
    trip += [(top + bottom - row, left) for row in down]
    return list(dict.fromkeys(trip)) or [(top, left)]


def _rendered(figure: Any) -> "Image":
    from PIL import Image

    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=_DPI, bbox_inches="tight", pad_inches=0.05)
    return Image.open(file).convert("RGB")


def save_animation(
    pictures: "Sequence[Image]", path: str | os.PathLike[str], seconds: float = 0.16
) -> Path:
    """Writes pictures as one that moves, GIF or WebP by the end of its name; returns where it is.

    Args:
        pictures: The pictures, all of one size.
        path: The file; its folder must exist.
        seconds: How long each is shown.

    Examples:
        >>> import irpe.viz, tempfile
        >>> pictures = [irpe.viz.default_image(), irpe.viz.default_image().rotate(90)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = irpe.viz.save_animation(pictures, f"{folder}/star.gif")
        >>> path.name
        'star.gif'
    """
    path = check_output(path, ANIMATIONS)
    file, arguments = io.BytesIO(), {"save_all": True, "duration": int(1000 * seconds), "loop": 0}
    first, *others = pictures
    if path.suffix == ".gif":
        from PIL import Image

        strip = Image.new("RGB", (first.width, first.height * len(pictures)))
        for index, picture in enumerate(pictures):
            strip.paste(picture, (0, index * first.height))
        palette = strip.quantize(
            _COLOURS, dither=Image.Dither.NONE
        )  # one for all: nothing flickers
        first, *others = (p.quantize(palette=palette, dither=Image.Dither.NONE) for p in pictures)
        first.save(file, "GIF", append_images=others, optimize=True, **arguments)
    else:
        first.save(file, "WEBP", append_images=others, lossless=True, method=6, **arguments)
    files.write_bytes(path, file.getvalue())
    return path
