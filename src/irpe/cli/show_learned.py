"""`irpe show` for a trained model: what its attentions and tables have learned."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from irpe.cli.load import find_model, load_model
from irpe.cli.show_common import Output, label_of, parse_patch, write_figure
from irpe.errors import UserError
from irpe.files import write_text

if TYPE_CHECKING:
    from irpe.viz.capture import CapturedAttention

EPILOGS = {
    "weights": "Example: `irpe show weights runs/laptop photo.jpg --block 0 --block 1`",
    "attention": "Example: `irpe show attention runs/laptop photo.jpg --patch 3,5 --head 0`",
    "tables": "Example: `irpe show tables runs/laptop --block 0 --block 1`",
    "locality": "Example: `irpe show locality runs/laptop photos/*.jpg`",
    "explorer": "Example: `irpe show explorer --run runs/laptop -o page.html`",
}
_LONGEST = 43  # letters of a name beside four columns, in 80 characters


def _find_if_given(run: Path | None) -> Path | None:
    return None if run is None else find_model(run)


Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="The folder of a run or of a saved model.", callback=find_model
    ),
]
Picture = Annotated[
    Path | None,
    typer.Argument(metavar="IMAGE", help="A picture [the one in the package]."),
]
Blocks = Annotated[
    list[int] | None,
    typer.Option(
        "--block", metavar="INDEX", help="An equipped attention, from the input on; repeat it."
    ),
]


def weights(
    run: Run,
    image: Picture = None,
    output: Output = Path("weights.png"),
    block: Blocks = None,
    head: Annotated[
        list[int] | None,
        typer.Option(metavar="INDEX", help="A head; repeat it [the mean of all]."),
    ] = None,
) -> None:
    """What an encoding adds to the attention scores, b_ij (Fig. 5).

    Maps of 3 x 3 reference patches, in per cent of the scores before softmax, all on one scale: an
    encoding that does little is pale. (The effect that irpe train prints is another measure: how
    much the output of attention changes without the encoding.) By default the first and the last
    but one of the equipped attentions are drawn, as in the paper: where a model reads its class
    token alone, the last one learns nothing for patches.
    """
    from irpe.viz import plot_weights

    calls, seen = _capture(run, image)
    chosen = _choose(calls, block)
    write_figure(plot_weights(chosen, head or None, _whole_image(chosen, seen)), output)


def attention(
    run: Run,
    image: Picture = None,
    output: Output = Path("attention.png"),
    patch: Annotated[
        str | None,
        typer.Option(metavar="ROW,COLUMN", help="The patch that attends [the centre]."),
    ] = None,
    block: Blocks = None,
    head: Annotated[
        int | None, typer.Option(metavar="INDEX", help="A head [the mean of all].")
    ] = None,
) -> None:
    """Attention of one patch, with the encoding and without.

    Without it all tables are zero; queries and keys are the same. By default the first and the last
    but one of the equipped attentions are drawn.
    """
    from irpe.viz import plot_attention

    calls, seen = _capture(run, image)
    chosen = _choose(calls, block)
    query = None if patch is None else parse_patch(patch)
    write_figure(plot_attention(chosen, query, _whole_image(chosen, seen), head), output)


def tables(run: Run, output: Output = Path("tables.png"), block: Blocks = None) -> None:
    """How long the vector of each bucket is, where the bucket lies.

    Tables of the product method are maps around the query, others curves. All blocks by default.
    """
    from irpe.viz import plot_tables

    write_figure(plot_tables(load_model(run), block or None), output)


def locality(
    run: Run,
    images: Annotated[
        list[Path] | None,
        typer.Argument(metavar="IMAGE", help="Pictures [the one in the package]."),
    ] = None,
    output: Output = Path("locality.png"),
) -> None:
    """How far each block looks, with the encoding and without.

    The mean attended distance in patches. Without the encoding all tables are zero; queries and
    keys are the same, so that the change is what the encoding does in that block alone. Attention
    is averaged over heads and pictures; prefix tokens are left out. Printed as a table, the change
    drawn as bars.
    """
    from irpe.viz import measure_locality, plot_locality
    from irpe.viz.head_maps import short_name

    measured = measure_locality(_capture(run, *images or [])[0])
    figure = plot_locality(measured)
    typer.echo("mean attended distance, in patches")
    is_long = max(map(len, measured.names)) > _LONGEST
    names = [short_name(name) if is_long else name for name in measured.names]
    width = max(map(len, (*names, "block")))
    typer.echo(f"{'block':{width}}  {'with':>7}  {'zero':>7}  {'change':>7}  {'uniform':>7}")
    columns = (names, measured.with_encoding, measured.without_encoding, measured.uniform)
    for name, with_it, without, uniform in zip(*columns, strict=True):
        change = with_it - without
        typer.echo(
            f"{name:{width}}  {with_it:7.3f}  {without:7.3f}  {change:+7.3f}  {uniform:7.3f}"
        )
    write_figure(figure, output)


def explorer(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The page, .html.")
    ] = Path("explorer.html"),
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Show what this run, or saved model, has learned.",
            callback=_find_if_given,
        ),
    ] = None,
    image: Annotated[
        Path | None,
        typer.Option(metavar="IMAGE", help="The picture for --run [the one in the package]."),
    ] = None,
    block: Blocks = None,
) -> None:
    """A page to explore encodings and runs: one file, no network."""
    from irpe.viz import explorer_page
    from irpe.viz.canvas import check_output

    check_output(output, (".html",))
    if run is None and (image is not None or block):
        raise UserError("--image and --block belong to a run: pass --run too")
    if run is None:
        page = explorer_page()
    else:
        calls, seen = _capture(run, image)
        page = explorer_page(_choose(calls, block) if block else calls, seen, label_of(run))
    write_text(output, page)
    typer.echo(f"wrote {output}")


def _capture(run: Path, *images: Path | None) -> "tuple[list[CapturedAttention], Any]":
    """Returns what the attentions of a run's model do with pictures, and the first picture."""
    import torch

    from irpe.viz import capture, default_image, image_input, read_image

    pictures = [read_image(image) for image in images if image is not None] or [default_image()]
    model = load_model(run)
    inputs, seen = zip(*(image_input(model, picture) for picture in pictures), strict=True)
    shapes = {tuple(x.shape) for x in inputs}
    if len(shapes) > 1:
        raise UserError("the model takes pictures of any size, and these differ: pass equal ones")
    return capture(model, torch.cat(inputs)), seen[0]


def _whole_image(calls: "list[CapturedAttention]", seen: Any) -> Any:
    """Returns the picture if it is what the attentions saw: a window is not the picture."""
    return seen if all(call.sees_whole_image for call in calls) else None


def _choose(
    calls: "list[CapturedAttention]", blocks: list[int] | None
) -> "list[CapturedAttention]":
    """Returns the chosen attentions, by default the first and the last but one."""
    from irpe.viz.table_maps import check_block

    blocks = blocks or [0, max(0, len(calls) - 2)]
    indices = dict.fromkeys(check_block(index, len(calls)) for index in blocks)
    return [calls[index] for index in indices]
