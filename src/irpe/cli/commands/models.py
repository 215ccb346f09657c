"""`irpe models`: what can be equipped."""

from typing import Annotated


def models(
    names: Annotated[list[str] | None, "Models of timm or transformers.", "NAME"] = None,
    *,
    as_json: Annotated[bool, "Print JSON."] = False,
) -> None:
    """Tell which models can be equipped, and why not if not.

    Without a name: the families that are known. For a model in memory: irpe.supported(model).

    Examples:
        irpe models
        irpe models vit_base_patch14_dinov2 convnext_tiny    # names of timm
        irpe models dinov2 facebook/dinov2-base    # types and names of transformers
    """
    from irpe.adapters.hosts import SUPPORTED
    from irpe.cli.console import print_json, print_lines
    from irpe.cli.parse import wrap

    if not names:
        if as_json:
            print_json(SUPPORTED)
            return
        for library, families in SUPPORTED.items():
            print_lines(library, *wrap(families, "  ", "  "))
        print_lines("\nirpe models NAME asks about a model; docs/reference lists all.")
        return
    from irpe.adapters.supported import supported
    from irpe.profile.models import create

    found = {name: supported(create(name, "none", None, "meta")) for name in names}
    if as_json:
        print_json({n: {"supported": bool(yes), "reason": str(yes)} for n, yes in found.items()})
        return
    for name, support in found.items():
        print_lines(f"{name}: {'yes' if support else 'no'}", *wrap(str(support), "  ", "  "))
