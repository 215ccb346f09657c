"""`irpe convert`: a checkpoint of the paper's authors becomes an equipped model."""

from pathlib import Path
from typing import Annotated

import typer

import irpe

EXAMPLES = """
Examples:

`irpe convert deit_small_patch16_224_ctx_product_50_shared_k.pth -o small`

`irpe convert checkpoint.pth --model rpe-2.0-product-ctx-1-k -o detr`
"""

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="The authors' file; nothing in it is run.")
]
Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", help="For irpe.load_equipped to read.")
]
Name = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The authors' name of the model; by default the file's."),
]


def convert(file: File, output: Output, model: Name = None) -> None:
    """Convert a checkpoint that the paper's authors published."""
    loaded = irpe.load_published(file, model)
    irpe.save_equipped(loaded, output)
    attentions = irpe.summary(loaded).attentions
    typer.echo(
        f"{output}: {type(loaded).__name__}, {attentions[0].spec} in {len(attentions)} attentions; "
        f"read it with irpe.load_equipped({str(output)!r})"
    )
