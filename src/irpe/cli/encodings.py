"""`irpe encodings`: what there is to choose from."""

from typing import Annotated

import typer

from irpe.cli.formats import Format, Report, wrap

_FITS = (
    "Start with product-contextual-k; -qkv where accuracy counts more than time.",
    "Images larger than in training: a learned absolute encoding, resampled, then contextual "
    "tables; rope-axial lost most. Objects that move: contextual tables (docs/results.md).",
    "A trained model to fine-tune: every encoding without a * leaves its output as it is.",
    "A rotary backbone (DINOv3, EVA-02): it keeps its rotation, tables stand beside it.",
    "Both: rope-axial+product-contextual-k. Options: docs/how-to/choose-encoding.md.",
)


def encodings(
    form: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.table,
) -> None:
    """List all encodings: what each is, and what it adds to DeiT-S."""
    from irpe.profile.catalogue import catalogue

    listed = catalogue()
    rows = [
        (
            entry.encoding + ("" if entry.keeps_output else " *"),
            f"{entry.extra_parameters:+,}",
            f"{entry.extra_macs / 1e6:+.1f}",
        )
        for entry in listed
    ]
    if form is Format.table:
        _print_lines(rows, [entry.line for entry in listed])
        return
    report = Report(
        title="Encodings, and what they add to DeiT-S at 224 x 224",
        columns=("encoding", "parameters", "MACs (M)"),
        rows=rows,
        notes=("* acts from the start: the output of a trained model changes", *_FITS),
        values=listed,
        conditions={"model": "deit_small_patch16_224"},
    )
    typer.echo(report.text(form))


def _print_lines(rows: list[tuple[str, str, str]], lines: list[str]) -> None:
    """Prints two lines for each encoding, so that they fit 80 columns."""
    width = max(len(name) for name, _, _ in rows)
    typer.echo("Encodings, and what they add to DeiT-S at 224 x 224 (22.05 M, 4599 M MACs)\n")
    typer.echo(f"{'':{width}}  parameters  MACs (M)")
    for (name, parameters, macs), line in zip(rows, lines, strict=True):
        typer.echo(f"{name:{width}}  {parameters:>10}  {macs:>8}\n    {line}")
    typer.echo("\n* acts from the start: the output of a trained model changes\n")
    for fit in _FITS:
        typer.echo("\n".join(wrap(fit, "- ", "  ")))
