"""`irpe encodings`: what there is to choose from."""

from dataclasses import asdict
from typing import Annotated

_FITS = (
    "Start with product-contextual-k (short: K); QKV where accuracy counts more than time.",
    "Images larger than in training: a learned absolute encoding, resampled, then contextual "
    "tables; rope-axial lost most, so give it its grid (+ref14) or train with +rescale2 "
    "(docs/how-to/other-sizes.md). Objects that move: contextual tables (docs/results.md).",
    "A trained model to fine-tune: every encoding without a * leaves its output as it is.",
    "A rotary backbone (DINOv3, EVA-02): it keeps its rotation, tables stand beside it.",
    "Both: rope-axial+product-contextual-k. Options: docs/how-to/choose-encoding.md.",
)


def encodings(*, as_json: Annotated[bool, "Print JSON."] = False) -> None:
    """List all encodings: what each is, and what it adds to DeiT-S."""
    from irpe.cli.console import print_json, print_lines
    from irpe.cli.parse import wrap
    from irpe.profile.catalogue import catalogue

    listed = catalogue()
    if as_json:
        model = {"model": "deit_small_patch16_224"}
        print_json({**model, "rows": [asdict(entry) for entry in listed]})
        return
    names = [entry.encoding + ("" if entry.keeps_output else " *") for entry in listed]
    width = max(map(len, names))
    print_lines(
        "Encodings, and what they add to DeiT-S at 224 x 224 (22.05 M, 4599 M MACs)\n",
        f"{'':{width}}  parameters  MACs (M)",
    )
    for name, entry in zip(names, listed, strict=True):
        macs = entry.extra_macs / 1e6
        print_lines(f"{name:{width}}  {entry.extra_parameters:>+10,}  {macs:>+8.1f}")
        print_lines(f"    {entry.line}")
    print_lines("\n* acts from the start: the output of a trained model changes\n")
    print_lines(*(line for fit in _FITS for line in wrap(fit, "- ", "  ")))
