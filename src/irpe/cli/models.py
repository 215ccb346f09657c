"""`irpe models`: what can be equipped."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from irpe.cli.formats import wrap

if TYPE_CHECKING:
    from irpe.adapters.supported import Support

EPILOG = """
**Examples**

`irpe models` (the families that `irpe.equip` knows)

`irpe models vit_base_patch14_dinov2 convnext_tiny` (whether these models of timm can be equipped)

For a model in memory: `print(irpe.supported(model))`
"""


def models(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Models of timm to ask about.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell which models can be equipped, and why not if not."""
    if not names:
        from irpe.adapters.hosts import SUPPORTED

        if as_json:
            typer.echo(json.dumps(SUPPORTED, indent=2))
            return
        for library, families in SUPPORTED.items():
            typer.echo(_wrapped(library, families))
        typer.echo("\nirpe models NAME asks about a model of timm; docs/reference lists all.")
        return
    found = {name: _ask(name) for name in names}
    if as_json:
        told = {n: {"supported": bool(yes), "reason": str(yes)} for n, yes in found.items()}
        typer.echo(json.dumps(told, indent=2))
        return
    for name, support in found.items():
        typer.echo(_wrapped(f"{name}: {'yes' if support else 'no'}", str(support)))


def _ask(name: str) -> "Support":
    from irpe.adapters.supported import supported
    from irpe.profile.cost import create

    return supported(create(name, "none", None, "meta"))


def _wrapped(heading: str, text: str) -> str:
    return "\n".join([heading, *wrap(text, "  ", "  ")])
