"""`irpe show`, what it draws of trained runs: what attentions and tables have learned."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from irpe.cli.commands.show import parse_patch, write_figure
from irpe.errors import MissingFileError, UserError

if TYPE_CHECKING:
    from irpe.viz.capture import CapturedAttention

_PICTURE = "The picture, .png or .svg."
_RUN = "The folder of a run or of a saved model."
_IMAGE = "A picture [the one in the package]."
_BLOCK = "An equipped attention, from the input on; repeat it."
_LONGEST = 43  # letters of a name beside four columns, in 80 characters


def weights(
    run: Annotated[Path, _RUN, "RUN"],
    image: Annotated[Path | None, _IMAGE, "IMAGE"] = None,
    *,
    block: Annotated[list[int] | None, _BLOCK] = None,
    head: Annotated[list[int] | None, "A head; repeat it [the mean of all]."] = None,
    output: Annotated[Path, _PICTURE, "FILE"] = Path("weights.png"),
) -> None:
    """What an encoding adds to the attention scores, b_ij (Fig. 5).

    Maps of 3 x 3 reference patches, in per cent of the scores before softmax, all on one scale: an
    encoding that does little is pale. (The effect that irpe train prints is another measure: how
    much the output of attention changes without the encoding.) By default the first and the last
    but one of the equipped attentions are drawn, as in the paper: where a model reads its class
    token alone, the last one learns nothing for patches.

    Examples:
        irpe show weights runs/laptop photo.jpg --block 0 --block 1
    """
    calls, seen = capture_run(run, [image] if image else [])
    chosen = choose(calls, block)
    from irpe.viz import plot_weights

    write_figure(plot_weights(chosen, head or None, _whole_image(chosen, seen)), output)


def attention(
    run: Annotated[Path, _RUN, "RUN"],
    image: Annotated[Path | None, _IMAGE, "IMAGE"] = None,
    *,
    patch: Annotated[str | None, "The patch that attends [the centre].", "ROW,COLUMN"] = None,
    block: Annotated[list[int] | None, _BLOCK] = None,
    head: Annotated[int | None, "A head [the mean of all]."] = None,
    output: Annotated[Path, _PICTURE, "FILE"] = Path("attention.png"),
) -> None:
    """Attention of one patch, with the encoding and without.

    Without it all tables are zero; queries and keys are the same. By default the first and the last
    but one of the equipped attentions are drawn.

    Examples:
        irpe show attention runs/laptop photo.jpg --patch 3,5 --head 0
    """
    calls, seen = capture_run(run, [image] if image else [])
    chosen = choose(calls, block)
    from irpe.viz import plot_attention

    query = None if patch is None else parse_patch(patch)
    write_figure(plot_attention(chosen, query, _whole_image(chosen, seen), head), output)


def tables(
    run: Annotated[Path, _RUN, "RUN"],
    *,
    block: Annotated[list[int] | None, _BLOCK] = None,
    output: Annotated[Path, _PICTURE, "FILE"] = Path("tables.png"),
) -> None:
    """How long the vector of each bucket is, where the bucket lies.

    Tables of the product method are maps around the query, others curves. All blocks by default.

    Examples:
        irpe show tables runs/laptop --block 0 --block 1
    """
    from irpe.cli.load import load_model

    model = load_model(run)
    from irpe.viz import plot_tables

    write_figure(plot_tables(model, block or None), output)


def locality(
    run: Annotated[Path, _RUN, "RUN"],
    images: Annotated[list[Path] | None, "Pictures [the one in the package].", "IMAGE"] = None,
    *,
    output: Annotated[Path, _PICTURE, "FILE"] = Path("locality.png"),
) -> None:
    """How far each block looks, with the encoding and without.

    The mean attended distance in patches. Without the encoding all tables are zero; queries and
    keys are the same, so that the change is what the encoding does in that block alone. Attention
    is averaged over heads and pictures; prefix tokens are left out. Printed as a table, the change
    drawn as bars.

    Examples:
        irpe show locality runs/laptop photos/*.jpg
    """
    calls, _ = capture_run(run, images or [])
    from irpe.cli.console import print_table
    from irpe.viz import measure_locality, plot_locality
    from irpe.viz.attention_maps import short_name

    measured = measure_locality(calls)
    figure = plot_locality(measured)
    is_long = max(map(len, measured.names)) > _LONGEST
    names = [short_name(name) if is_long else name for name in measured.names]
    columns = (names, measured.with_encoding, measured.without_encoding, measured.uniform)
    rows = [
        [name, *(f"{value:.3f}" for value in (with_it, without)), f"{with_it - without:+.3f}",
         f"{uniform:.3f}"]
        for name, with_it, without, uniform in zip(*columns, strict=True)
    ]  # fmt: skip
    title = "mean attended distance, in patches"
    print_table(("block", "with", "zero", "change", "uniform"), rows, title)
    write_figure(figure, output)


def training(
    runs: Annotated[list[Path], "Folders of runs.", "RUN"],
    *,
    output: Annotated[Path, _PICTURE, "FILE"] = Path("training.png"),
) -> None:
    """Score and losses of training runs, by epoch.

    Runs of an ablation are named after their rows, and seeds of one row have one colour.

    Examples:
        irpe show training ABLATION/cells/*
    """
    for run in runs:
        if not run.is_dir():
            raise MissingFileError(f"{run} is not a folder: pass the folders of runs")
    from irpe.train.config import find_task
    from irpe.train.run import Run
    from irpe.viz import plot_training

    opened = [Run(run) for run in runs]
    num_names = len({(run.name, each.label) for run, each in zip(runs, opened, strict=True)})
    metrics: dict[str, list[Any]] = {}
    for each in opened:
        name = each.label if num_names == len(runs) else str(each)
        metrics.setdefault(name, []).append(each.metrics())
    measure = find_task(opened[0].config.task).measures[0] if opened[0].exists else None
    write_figure(plot_training(metrics, measure), output)


def star(
    run: Annotated[Path, _RUN, "RUN"],
    image: Annotated[Path | None, _IMAGE, "IMAGE"] = None,
    *,
    block: Annotated[int, "The equipped attention, from the input on."] = 0,
    head: Annotated[int | None, "A head [the mean of all]."] = None,
    output: Annotated[Path, "The moving picture, .gif or .webp.", "FILE"] = Path("star.gif"),
) -> None:
    """A moving star: which patches share a bucket, and what the tables add from there.

    Examples:
        irpe show star runs/laptop photo.jpg --block 1 -o star.gif
    """
    calls, seen = capture_run(run, [image] if image else [])
    chosen = choose(calls, [block])
    from irpe.cli.console import print_lines
    from irpe.viz import animate_star, save_animation

    pictures = animate_star(chosen[0], _whole_image(chosen, seen), head)
    print_lines(f"wrote {save_animation(pictures, output)}")


def capture_run(run: Path, images: Sequence[Path]) -> "tuple[list[CapturedAttention], Any]":
    """Returns what the attentions of a run's model do with pictures, and the first picture."""
    from irpe.cli.load import find_model, load_model

    find_model(run)
    import torch

    from irpe.viz import capture, default_image, image_input, read_image

    pictures = [read_image(image) for image in images] or [default_image()]
    model = load_model(run)
    inputs, seen = zip(*(image_input(model, picture) for picture in pictures), strict=True)
    shapes = {tuple(x.shape) for x in inputs}
    if len(shapes) > 1:
        raise UserError("the model takes pictures of any size, and these differ: pass equal ones")
    return capture(model, torch.cat(inputs)), seen[0]


def choose(calls: "list[CapturedAttention]", blocks: list[int] | None) -> "list[CapturedAttention]":
    """Returns the chosen attentions, by default the first and the last but one."""
    from irpe.viz.table_maps import check_block

    blocks = blocks or [0, max(0, len(calls) - 2)]
    indices = dict.fromkeys(check_block(index, len(calls)) for index in blocks)
    return [calls[index] for index in indices]


def _whole_image(calls: "list[CapturedAttention]", seen: Any) -> Any:
    """Returns the picture if it is what the attentions saw: a window is not the picture."""
    return seen if all(call.sees_whole_image for call in calls) else None
