"""`irpe show`: the figures of the paper and the explorer page, written to files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from irpe.cli import robustness
from irpe.cli.load import load_model
from irpe.cli.profile import parse_sizes
from irpe.core.grid import Grid
from irpe.core.index import Clip, Piecewise, parse_index
from irpe.extras import require
from irpe.files import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from irpe.viz.capture import CapturedAttention

app = typer.Typer(
    help="Draw the figures of the paper, and the explorer page.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Output = Annotated[Path, typer.Option("-o", "--output", help="The file, .png or .svg.")]
Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="The folder of a run or of a saved model.")
]
Picture = Annotated[
    Path | None,
    typer.Argument(metavar="IMAGE", help="A picture; by default the one in the package."),
]
Blocks = Annotated[
    list[int] | None,
    typer.Option("--block", help="Index of an equipped attention, from the input; repeat it."),
]


@app.command(epilog="Example: `irpe show index --index 1.9:3.8:15.2 -o index.svg`")
def index(
    output: Output = Path("index.png"),
    piecewise: Annotated[
        str, typer.Option("--index", help="RATIO or ALPHA:BETA:GAMMA of the piecewise function.")
    ] = "4",
    clip: Annotated[
        float | None, typer.Option(help="Beta of the clip function; by default as many buckets.")
    ] = None,
) -> None:
    """The piecewise index function against the clip function (Fig. 2)."""
    from irpe.viz import plot_index

    function = parse_index(piecewise)
    if not isinstance(function, Piecewise):
        raise ValueError(f"index {piecewise!r} is not a piecewise function: pass it with --clip")
    _write(plot_index(function, None if clip is None else Clip(clip)), output)


@app.command(epilog="Example: `irpe show buckets product-contextual-k@1.9 --grid 7x28 --at 3,14`")
def buckets(
    specs: Annotated[
        list[str] | None,
        typer.Argument(metavar="SPEC", help="Encodings; by default the four methods."),
    ] = None,
    output: Output = Path("buckets.png"),
    grid: Annotated[str, typer.Option(help="Rows x columns of patches.")] = "14x14",
    prefix: Annotated[int, typer.Option(help="Tokens before the patches.")] = 1,
    at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROW,COLUMN", help="A reference patch; repeat it. Default: corner and centre."
        ),
    ] = None,
) -> None:
    """Which patches share a bucket, seen from a reference patch (Fig. 6-9)."""
    from irpe.viz import plot_buckets

    arguments: dict[str, Any] = {"specs": specs} if specs else {}
    references = [_parse_patch(text) for text in at] if at else None
    _write(plot_buckets(**arguments, grid=_parse_grid(grid), num_prefix_tokens=prefix,
                        references=references), output)  # fmt: skip


@app.command(epilog="Example: `irpe show weights runs/k photo.jpg --block 0 --block 10`")
def weights(
    run: Run,
    image: Picture = None,
    output: Output = Path("weights.png"),
    block: Blocks = None,
    head: Annotated[
        list[int] | None, typer.Option(help="A head; repeat it. By default the mean of all.")
    ] = None,
) -> None:
    """The extra weights b_ij of 5 x 5 reference patches (Fig. 5).

    By default the first and the last but one of the equipped attentions are drawn, as in the paper:
    where a model reads its class token alone, the last one learns nothing for patches.
    """
    from irpe.viz import plot_weights

    calls, _ = _capture(run, image)
    _write(plot_weights(_choose(calls, block), head or None), output)


@app.command(epilog="Example: `irpe show attention runs/k photo.jpg --patch 3,5 --head 0`")
def attention(
    run: Run,
    image: Picture = None,
    output: Output = Path("attention.png"),
    patch: Annotated[
        str | None,
        typer.Option(metavar="ROW,COLUMN", help="The patch that attends; by default the centre."),
    ] = None,
    block: Blocks = None,
    head: Annotated[int | None, typer.Option(help="A head; by default the mean of all.")] = None,
) -> None:
    """Attention of one patch, with the encoding and with all tables zero.

    By default the first and the last but one of the equipped attentions are drawn.
    """
    from irpe.viz import plot_attention
    from irpe.viz.buckets import check_image_grid

    calls, seen = _capture(run, image)
    chosen = _choose(calls, block)
    rows, columns = check_image_grid(chosen[0].grid).shape
    place = (rows // 2, columns // 2) if patch is None else _parse_patch(patch)
    is_placed = all(call.sees_whole_image for call in chosen)  # windows have no place of their own
    _write(plot_attention(chosen, place, seen if is_placed else None, head), output)


@app.command(epilog="Example: `irpe show tables runs/k --block 0 --block 5`")
def tables(run: Run, output: Output = Path("tables.png"), block: Blocks = None) -> None:
    """The learned tables as images, all blocks by default."""
    from irpe.viz import plot_tables

    _write(plot_tables(load_model(run), block or None), output)


@app.command(epilog="Example: `irpe show locality runs/k photos/*.jpg`")
def locality(
    run: Run,
    images: Annotated[
        list[Path] | None,
        typer.Argument(metavar="IMAGE", help="Pictures; by default the one in the package."),
    ] = None,
    output: Output = Path("locality.png"),
) -> None:
    """The mean attended distance of each block, with the encoding and with all tables zero.

    "Zero" takes the same queries and keys, so that the difference is what the encoding does in that
    block alone. Attention is averaged over heads and pictures; prefix tokens are left out. Printed
    as a table, drawn as curves.
    """
    from irpe.viz import measure_locality, plot_locality

    measured = measure_locality(_capture(run, *images or [])[0])
    figure = plot_locality(measured)
    typer.echo("mean attended distance, in patches")
    width = max(map(len, (*measured.names, "block")))
    typer.echo(f"{'block':{width}}  {'with':>7}  {'zero':>7}  {'change':>7}  {'uniform':>7}")
    columns = (measured.names, measured.with_encoding, measured.without_encoding, measured.uniform)
    for name, with_it, without, uniform in zip(*columns, strict=True):
        change = with_it - without
        typer.echo(
            f"{name:{width}}  {with_it:7.3f}  {without:7.3f}  {change:+7.3f}  {uniform:7.3f}"
        )
    _write(figure, output)


@app.command(epilog="Example: `irpe show cost --compare -e product-contextual-k -e shaw`")
def cost(
    model: Annotated[
        str, typer.Argument(help="The model, by its timm name.")
    ] = "deit_small_patch16_224",
    output: Output = Path("cost.png"),
    encoding: Annotated[
        list[str] | None,
        typer.Option("--encoding", "-e", help="An encoding; repeat it [product-contextual-k]."),
    ] = None,
    resolutions: Annotated[
        str, typer.Option(help="Sides of the images, in pixels.")
    ] = "224,384,512,768,1024",
    compare: Annotated[
        bool, typer.Option("--compare", help="Extra time and memory instead (Fig. 10).")
    ] = False,
    rounds: Annotated[int, typer.Option(help="Timed forward passes, for --compare.")] = 10,
) -> None:
    """What an encoding costs: extra MACs by resolution (Fig. 4), or time and memory (Fig. 10).

    The numbers are those of `irpe profile --resolutions` and `irpe profile --compare`.
    """
    from irpe.viz.canvas import FORMATS, check_output

    check_output(output, FORMATS)
    encodings = encoding or ["product-contextual-k"]
    if compare:
        _write(_cost_bars(model, encodings, rounds), output)
        return
    _write(_cost_curves(model, encodings, parse_sizes(resolutions)), output)


@app.command(epilog="Example: `irpe show training runs/*`")
def training(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs.")],
    output: Output = Path("training.png"),
) -> None:
    """The curves of several training runs: score and losses by epoch."""
    require("accelerate", "train")
    from irpe.train.runs import read_metrics
    from irpe.viz import plot_training

    names = [run.name for run in runs]
    labels = names if len(set(names)) == len(names) else [str(run) for run in runs]
    metrics = {label: read_metrics(run) for label, run in zip(labels, runs, strict=True)}
    _write(plot_training(metrics), output)


app.command(epilog=robustness.EPILOG)(robustness.robustness)


@app.command(epilog="Example: `irpe show explorer --run runs/k -o page.html`")
def explorer(
    output: Annotated[Path, typer.Option("-o", "--output", help="The page, .html.")] = Path(
        "explorer.html"
    ),
    run: Annotated[
        Path | None, typer.Option(help="Show what this run, or saved model, has learned.")
    ] = None,
    image: Annotated[
        Path | None, typer.Option(help="The picture for --run; by default the package's.")
    ] = None,
    block: Blocks = None,
) -> None:
    """A page to explore grids, methods and index functions: one file, no network."""
    from irpe.viz import explorer_page
    from irpe.viz.canvas import check_output

    check_output(output, (".html",))
    if run is None and (image is not None or block):
        raise ValueError("--image and --block belong to a run: pass --run too")
    if run is None:
        page = explorer_page()
    else:
        calls, seen = _capture(run, image)
        page = explorer_page(_choose(calls, block) if block else calls, seen, run.resolve().name)
    write_text(output, page)
    typer.echo(f"wrote {output}")


def _cost_curves(model: str, encodings: list[str], sizes: list[int]) -> "Figure":
    from irpe.profile.resolutions import extra_macs_by_resolution
    from irpe.viz import plot_cost_curves

    curves: dict[str, list[int]] = {}
    for encoding in encodings:
        rows = extra_macs_by_resolution(model, encoding, sizes)
        curves[f"{encoding}, direct"] = [row.direct for row in rows]
        curves[f"{encoding}, efficient"] = [row.efficient for row in rows]
    return plot_cost_curves(sizes, curves)


def _cost_bars(model: str, encodings: list[str], rounds: int) -> "Figure":
    from irpe.profile.cost import measure_costs
    from irpe.viz import plot_cost_bars

    costs = measure_costs(model, encodings, rounds=max(1, rounds))
    plain = "the plain model"
    names = [plain, *(cost.encoding for cost in costs[1:])]
    times = {name: cost.time_ratio or 0.0 for name, cost in zip(names, costs, strict=True)}
    memory = {name: float(cost.memory or 0) for name, cost in zip(names, costs, strict=True)}
    return plot_cost_bars(times, memory, reference=plain)


def _capture(run: Path, *images: Path | None) -> "tuple[list[CapturedAttention], Any]":
    """Returns what the attentions of a run's model do with pictures, and the first picture."""
    from irpe.viz import capture, default_image, image_input, read_image

    pictures = [read_image(image) for image in images if image is not None] or [default_image()]
    model = load_model(run)
    inputs, seen = zip(*(image_input(model, picture) for picture in pictures), strict=True)
    shapes = {tuple(x.shape) for x in inputs}
    if len(shapes) > 1:
        raise ValueError("the model takes pictures of any size, and these differ: pass equal ones")
    return capture(model, torch.cat(inputs)), seen[0]


def _choose(
    calls: "list[CapturedAttention]", blocks: list[int] | None
) -> "list[CapturedAttention]":
    """Returns the chosen attentions, by default the first and the last but one."""
    from irpe.viz.tables import check_block

    blocks = blocks or [0, max(0, len(calls) - 2)]
    numbers = dict.fromkeys(check_block(number, len(calls)) for number in blocks)
    return [calls[number] for number in numbers]


def _parse_grid(text: str) -> Grid:
    try:
        return Grid(tuple(int(size) for size in text.split("x")))
    except ValueError:
        raise ValueError(f"grid {text!r} is not understood: write rows x columns, 7x28") from None


def _parse_patch(text: str) -> tuple[int, int]:
    try:
        row, column = (int(place) for place in text.split(","))
    except ValueError:
        raise ValueError(f"patch {text!r} is not understood: write row,column, 3,5") from None
    return row, column


def _write(figure: "Figure", output: Path) -> None:
    from irpe.viz import save_figure

    typer.echo(f"wrote {save_figure(figure, output)}")
