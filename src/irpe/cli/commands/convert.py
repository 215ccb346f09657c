"""`irpe convert`: a checkpoint of the paper's authors becomes an equipped model."""

from pathlib import Path
from typing import Annotated


def convert(
    file: Annotated[Path, "The authors' file; nothing in it is run.", "FILE"],
    *,
    output: Annotated[Path | None, "Folder to write [FILE without its ending].", "DIR"] = None,
    model: Annotated[str | None, "The authors' name of the model [the file's].", "NAME"] = None,
) -> None:
    """Convert a checkpoint that the paper's authors published.

    Examples:
        irpe convert deit_small_patch16_224_ctx_product_50_shared_k.pth -o small
        irpe convert checkpoint.pth --model rpe-2.0-product-ctx-1-k -o detr
    """
    import irpe
    from irpe.cli.console import print_lines

    output = output or Path(file.stem)
    loaded = irpe.load_published(file, model)
    irpe.save_equipped(loaded, output)
    attentions = irpe.summary(loaded).attentions
    print_lines(
        f"{output}: {type(loaded).__name__}, {attentions[0].spec} in {len(attentions)} attentions; "
        f"read it with irpe.load_equipped({str(output)!r})"
    )
