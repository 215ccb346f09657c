"""`irpe show`: the figures of the paper and the explorer page, written to files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from irpe.cli import show_learned, show_robustness, show_sizes
from irpe.cli.profile import parse_sizes
from irpe.cli.show_common import Output, label_of, parse_grid, parse_patch, write_figure
from irpe.cli.show_positions import parse_positions
from irpe.errors import MissingFileError, UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_BUCKETS = 2**53

_ENCODINGS, _RUNS = "Encodings", "Trained runs"  # the headings of `irpe show --help`
_EPILOG = """Examples, on a run that `irpe train laptop --encoding product-contextual-k` makes:

`irpe show explorer --run runs/laptop -o page.html`

`irpe show weights runs/laptop photo.jpg --block 0 --block 1`

`irpe show buckets product-contextual-k --grid 7x28`

`irpe show training runs/*`
"""

app = typer.Typer(
    help="Draw the figures of the paper, and the explorer page, to files.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(
    rich_help_panel=_ENCODINGS,
    epilog="Example: `irpe show index --index 1.9:3.8:15.2 -o index.svg`",
)
def index(
    output: Output = Path("index.png"),
    piecewise: Annotated[
        str,
        typer.Option(
            "--index", metavar="INDEX", help="RATIO or ALPHA:BETA:GAMMA of the piecewise function."
        ),
    ] = "4",
    clip: Annotated[
        float | None,
        typer.Option(metavar="BETA", help="Of the clip function [as many buckets]."),
    ] = None,
) -> None:
    """From distance to bucket: piecewise and clip function (Fig. 2)."""
    from irpe.core.index import Clip, Piecewise, parse_index
    from irpe.viz import plot_index

    function = parse_index(piecewise)
    if not isinstance(function, Piecewise):
        raise UserError(f"index {piecewise!r} is not a piecewise function: pass it with --clip")
    write_figure(plot_index(function, None if clip is None else Clip(clip)), output)


@app.command(
    rich_help_panel=_ENCODINGS,
    epilog="Example: `irpe show buckets product-contextual-k@1.9 --grid 7x28 --at 3,14`",
)
def buckets(
    specs: Annotated[
        list[str] | None,
        typer.Argument(metavar="ENCODING", help="Encodings [the four methods]."),
    ] = None,
    output: Output = Path("buckets.png"),
    grid: Annotated[
        str, typer.Option(metavar="ROWSxCOLUMNS", help="The grid of patches.")
    ] = "14x14",
    prefix: Annotated[int, typer.Option(metavar="N", help="Tokens before the patches.")] = 1,
    at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROW,COLUMN", help="A reference patch; repeat it [corner and centre]."
        ),
    ] = None,
    queries: Annotated[
        str | None, typer.Option(metavar="ROWSxCOLUMNS", help="The grid of the queries [--grid].")
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(metavar="ROWSxCOLUMNS", help="The keys: cells of the queries' grid."),
    ] = None,
    points: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Points instead: a row and a column on each line."),
    ] = None,
) -> None:
    """Which patches share a bucket, seen from a patch (Fig. 6-9).

    With --keys, a coarser grid of keys is seen from the queries; with --points, points from points.
    """
    from irpe.viz import plot_buckets, plot_positions

    if queries or keys or points:
        for spec in specs or []:
            _check_num_buckets(spec)
        stars = [parse_patch(text) for text in at] if at else None
        positions = parse_positions(parse_grid(queries or grid), keys, points)
        chosen: dict[str, Any] = {"specs": specs} if specs else {}
        write_figure(plot_positions(positions, references=stars, **chosen), output)
        return
    arguments: dict[str, Any] = {"specs": specs} if specs else {}
    for spec in specs or []:
        _check_num_buckets(spec)
    references = [parse_patch(text) for text in at] if at else None
    write_figure(plot_buckets(**arguments, grid=parse_grid(grid), num_prefix_tokens=prefix,
                        references=references), output)  # fmt: skip


@app.command(
    rich_help_panel=_ENCODINGS,
    epilog="Example: `irpe show cost --compare -e product-contextual-k -e shaw`",
)
def cost(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model, by its timm name.")
    ] = "deit_small_patch16_224",
    output: Output = Path("cost.png"),
    encoding: Annotated[
        list[str] | None,
        typer.Option(
            "--encoding",
            "-e",
            metavar="TEXT",
            help="An encoding; repeat it [product-contextual-k].",
        ),
    ] = None,
    resolutions: Annotated[
        str, typer.Option(metavar="PIXELS,...", help="Sides of the images.")
    ] = "224,384,512,768,1024",
    compare: Annotated[
        bool, typer.Option("--compare", help="Extra time and memory instead (Fig. 10).")
    ] = False,
    rounds: Annotated[
        int, typer.Option(metavar="N", help="Timed forward passes, for --compare.")
    ] = 10,
) -> None:
    """Extra MACs by resolution (Fig. 4), or time and memory (Fig. 10).

    MACs are in per cent of those of the model without an encoding, on a logarithmic axis. The
    numbers are those of `irpe profile --resolutions` and `irpe profile --compare`.
    """
    from irpe.viz.canvas import FORMATS, check_output

    check_output(output, FORMATS)
    encodings = encoding or ["product-contextual-k"]
    if compare:
        write_figure(_cost_bars(model, encodings, rounds), output)
        return
    write_figure(_cost_curves(model, encodings, parse_sizes(resolutions)), output)


for _command in (show_learned.weights, show_learned.attention, show_learned.tables,
                 show_learned.locality):  # fmt: skip
    app.command(rich_help_panel=_RUNS, epilog=show_learned.EPILOGS[_command.__name__])(_command)


@app.command(rich_help_panel=_RUNS, epilog="Example: `irpe show training ABLATION/cells/*`")
def training(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs.")],
    output: Output = Path("training.png"),
) -> None:
    """Score and losses of training runs, by epoch.

    Runs of an ablation are named after their rows, and seeds of one row have one colour.
    """
    for run in runs:
        if not run.is_dir():
            raise MissingFileError(f"{run} is not a folder: pass the folders of runs")
    from irpe.train.runs import read_metrics
    from irpe.viz import plot_training

    labels = [label_of(run) for run in runs]
    is_unique = len({(run.name, label) for run, label in zip(runs, labels, strict=True)}) == len(
        runs
    )
    metrics: dict[str, list[Any]] = {}
    for run, label in zip(runs, labels, strict=True):
        metrics.setdefault(label if is_unique else str(run), []).append(read_metrics(run))
    write_figure(plot_training(metrics), output)


app.command(
    rich_help_panel=_RUNS,
    epilog=show_robustness.EPILOG,
    short_help="Top-1 at other input sizes, and on images that moved.",
)(show_robustness.robustness)
app.command(
    rich_help_panel=_RUNS,
    epilog=show_sizes.EPILOG,
    short_help="mIoU of segmenters on larger images, whole and in windows.",
)(show_sizes.sizes)
app.command(rich_help_panel=_ENCODINGS, epilog=show_learned.EPILOGS["explorer"])(
    show_learned.explorer
)


def _cost_curves(model: str, encodings: list[str], sizes: list[int]) -> "Figure":
    from irpe.profile.resolutions import extra_macs_by_resolution
    from irpe.viz import plot_cost_curves

    curves: dict[str, list[int]] = {}
    plain: list[int] = []
    for encoding in encodings:
        rows = extra_macs_by_resolution(model, encoding, sizes)
        curves[f"{encoding}, direct"] = [row.direct for row in rows]
        curves[f"{encoding}, efficient"] = [row.efficient for row in rows]
        plain = [row.plain for row in rows]
    return plot_cost_curves(sizes, curves, plain)


def _cost_bars(model: str, encodings: list[str], rounds: int) -> "Figure":
    from irpe.profile.cost import measure_costs
    from irpe.viz import plot_cost_bars

    costs = measure_costs(model, encodings, rounds=max(1, rounds))
    plain = "the plain model"
    names = [plain, *(cost.encoding for cost in costs[1:])]
    times = {name: cost.time_ratio or 0.0 for name, cost in zip(names, costs, strict=True)}
    memory = {name: float(cost.memory or 0) for name, cost in zip(names, costs, strict=True)}
    return plot_cost_bars(times, memory, reference=plain)


def _check_num_buckets(text: str) -> None:
    """Raises an error for an encoding with more buckets than integers can count."""
    from irpe.core.encodings import RPESpec, parse_encoding

    spec = parse_encoding(text)
    counts = spec.num_buckets(2, 1) if isinstance(spec, RPESpec) else ()
    if any(count > _MOST_BUCKETS for count in counts):
        raise UserError(
            f"{text} has more than {_MOST_BUCKETS:,} buckets: write a smaller ratio or beta"
        )
