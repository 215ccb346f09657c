"""`irpe profile`: what encodings cost, in parameters, MACs, time and memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from irpe.cli.bars import ProgressBar
from irpe.cli.formats import Format, Report
from irpe.errors import UserError
from irpe.extras import require
from irpe.files import check_writable, write_text

if TYPE_CHECKING:
    from irpe.profile.comparison import Comparison
    from irpe.profile.cost import EncodingCost
    from irpe.profile.resolutions import ExtraMacs

_MODEL, _ENCODING, _BATCH, _ROUNDS = "deit_small_patch16_224", "product-contextual-k", 1, 10


def profile(
    model: Annotated[
        str | None, typer.Argument(help=f"The name of a timm model [default: {_MODEL}]")
    ] = None,
    encoding: Annotated[
        list[str] | None,
        typer.Option("--encoding", "-e", help=f"May be repeated [default: {_ENCODING}]"),
    ] = None,
    resolution: Annotated[
        int | None, typer.Option(help="Height and width of the images [default: the model's]")
    ] = None,
    batch: Annotated[int | None, typer.Option(help=f"Images at once [default: {_BATCH}]")] = None,
    rounds: Annotated[
        int | None, typer.Option(help=f"Timed passes; 0 counts only [default: {_ROUNDS}]")
    ] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="The paper's Tables 2 and 5 beside what is counted")
    ] = False,
    resolutions: Annotated[
        str | None,
        typer.Option(help="Extra MACs, direct and efficient: 224,384,512 (Fig. 4)"),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Time and memory of all encodings (Fig. 10)")
    ] = False,
    form: Annotated[Format, typer.Option("--format", help="How to write it")] = Format.table,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file instead of the screen")
    ] = None,
) -> None:
    """Parameters, MACs, time and memory of a model with encodings."""
    if output is not None:
        check_writable(output)
    _check_name(model)
    measured = {"--resolution": resolution, "--batch": batch, "--rounds": rounds}
    if paper:
        others = {"MODEL": model, "--encoding": encoding, "--resolutions": resolutions}
        _refuse("--paper", {**others, "--compare": compare or None, **measured})
        from irpe.profile.comparison import compare_with_paper

        with ProgressBar() as bar:
            report = paper_report(compare_with_paper(progress=bar))
    elif resolutions is not None:
        _refuse("--resolutions", {"--compare": compare or None, **measured})
        sizes = parse_sizes(resolutions)
        report = _resolutions_report(model or _MODEL, _single(encoding), sizes)
    else:
        from irpe.profile.cost import COMPARED

        if compare:
            _refuse("--compare", {"--encoding": encoding})
        names: list[str] = [*COMPARED] if compare else encoding or [_ENCODING]
        report = _cost_report(
            model or _MODEL,
            names,
            resolution,
            _BATCH if batch is None else batch,
            _ROUNDS if rounds is None else rounds,
        )
    text = report.text(form)
    if output is None:
        typer.echo(text)
    else:
        write_text(output, text + "\n")
        typer.echo(f"written to {output}")


def _check_name(model: str | None) -> None:
    """Raises an error for the path of a model, unless it is also the name of one."""
    if model is None or not Path(model).exists():
        return
    timm: Any = require("timm", "timm")
    if not timm.is_model(model):
        raise UserError(
            f"MODEL {model!r} is a path: irpe profile takes the name of a model of timm, such as "
            f"{_MODEL}; for a model in memory there is irpe.profile.count_macs"
        )


def _refuse(option: str, others: dict[str, object]) -> None:
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise UserError(f"{option} cannot be combined with {', '.join(given)}")


def _single(encodings: list[str] | None) -> str:
    if encodings and len(encodings) > 1:
        raise UserError(f"--resolutions takes one encoding, not {', '.join(encodings)}")
    return encodings[0] if encodings else _ENCODING


def parse_sizes(text: str) -> list[int]:
    """Returns the sizes in a text such as "224,384"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 10 and int(part) for part in parts):
        raise UserError(f"--resolutions {text!r}: write sizes such as 224,384,512")
    return [int(part) for part in parts]


def paper_report(rows: "Sequence[Comparison]") -> Report:
    """Returns what the paper reports beside what is counted, as a report."""
    reasons = list(dict.fromkeys(reason for row in rows for reason in row.reasons))

    def cells(row: "Comparison") -> list[str]:
        p = row.published
        marks = ",".join(str(reasons.index(reason) + 1) for reason in row.reasons)
        return [
            f"T{p.table} {p.label}", f"{row.parameters / 1e6:.2f}", p.parameters,
            f"{row.macs / 1e6:.0f}", f"{p.macs}", f"{row.extra_macs / 1e6:.1f}",
            f"{row.formula_macs / 1e6:.1f}", f"{row.paper_extra_macs / 1e6:.0f}", marks or "ok",
        ]  # fmt: skip

    headings = "model", "params", "paper", "MACs", "paper", "extra", "closed", "paper", "ok"
    notes = [
        "Millions. extra: MACs beyond the plain model; closed: the same by the closed formulas. "
        "ok: extra MACs within 8 % or 2 M of the paper's, parameters as printed there. Totals here "
        "are up to 0.7 % lower: matrix products and convolutions are counted, the paper's counter "
        "adds other operations.",
        *(f"{number}: {reason}" for number, reason in enumerate(reasons, 1)),
    ]
    title = "The paper's costs (Tables 2 and 5) beside what is counted on timm's models"
    return Report(title, headings, [cells(row) for row in rows], notes, rows, {"tables": [2, 5]})


def _resolutions_report(model: str, encoding: str, sizes: list[int]) -> Report:
    from irpe.profile.resolutions import extra_macs_by_resolution

    with ProgressBar() as bar:
        rows = extra_macs_by_resolution(model, encoding, sizes, bar)

    def cells(row: "ExtraMacs") -> list[str]:
        extra = [
            text
            for macs in (row.direct, row.efficient)
            for text in (f"{macs / 1e6:.0f}", f"{100 * macs / row.plain:.2f} %")
        ]
        return [str(row.resolution), str(row.tokens), f"{row.plain / 1e6:.0f}", *extra]

    headings = "resolution", "tokens", "plain", "direct", "extra", "efficient", "extra"
    most = max(100 * row.efficient / row.plain for row in rows)
    notes = [
        "Millions of MACs for one image, counted. direct: the row of every pair is multiplied; "
        f"efficient: what the library runs. The efficient form adds at most {most:.2f} %."
    ]
    title = f"Extra MACs of {encoding} on {model} (Fig. 4)"
    conditions = {"model": model, "encoding": encoding}
    return Report(title, headings, [cells(row) for row in rows], notes, rows, conditions)


def _cost_report(
    model: str, encodings: list[str], resolution: int | None, batch: int, rounds: int
) -> Report:
    import torch

    from irpe.profile.cost import measure_costs

    refused: dict[str, str] = {}
    is_list = len(encodings) > 1  # one encoding that does not fit is an error, of several a note
    with ProgressBar() as bar:
        rows = measure_costs(
            model, encodings, resolution, batch, rounds, bar, refused if is_list else None
        )
    if is_list and len(refused) == len(encodings):
        raise UserError(next(iter(refused.values())))
    counted = "encoding", "params", "MACs", "extra", "closed"
    headings = (*counted, "ms", "time", "MB", "extra") if rounds else counted
    threads = torch.get_num_threads()
    notes = [
        "params, MACs: millions, MACs for one image. extra: beyond the plain model, none; closed: "
        "the extra MACs by the closed formulas."
    ]
    if rounds:
        notes += [
            f"ms: best of {rounds} forward passes, batch {batch}, float32, on the CPU with "
            f"{threads} thread{'s'[: threads > 1]}. time: relative to the plain model in turns "
            "with it; on a busy machine it moves much. More --rounds help.",
            "MB: tensors alive at once in a forward pass, beyond weights, images and bucket maps.",
        ]
    notes += [f"{name} is left out: {reason}" for name, reason in refused.items()]
    size = rows[0].resolution
    title = f"{model}, {size} x {size}"
    conditions = {"batch": batch, "rounds": rounds, "threads": threads, "torch": torch.__version__}
    return Report(title, headings, [_cost_cells(row) for row in rows], notes, rows, conditions)


def _cost_cells(row: "EncodingCost") -> list[str]:
    cells = [
        row.encoding, f"{row.parameters / 1e6:.3f}", f"{row.macs / 1e6:.0f}",
        f"{row.extra_macs / 1e6:.1f}", f"{row.formula_macs / 1e6:.1f}",
    ]  # fmt: skip
    if row.seconds is None or row.memory is None or row.extra_memory is None:
        return cells
    return [
        *cells, f"{row.seconds * 1e3:.0f}", f"{row.time_ratio:.2f}",
        f"{row.memory / 2**20:.1f}", f"{row.extra_memory / 2**20:.1f}",
    ]  # fmt: skip
