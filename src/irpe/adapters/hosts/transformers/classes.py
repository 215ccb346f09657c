"""transformers: its classes by their names, so that no model is imported that nobody uses."""

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

Entry = TypeVar("Entry")


def entry_of(module: object, table: Mapping[str, Entry]) -> Entry | None:
    """Returns the entry of a module's class, or of the class of transformers that it extends."""
    for kind in type(module).__mro__:
        if kind.__name__ in table and kind.__module__.startswith("transformers."):
            return table[kind.__name__]
    return None


def modules_of(model: nn.Module, name: str, prefix: str) -> dict[str, Any]:
    """Returns the modules of a model that are of the class with a name, by their paths."""
    modules = model.named_modules(prefix=prefix)
    return {path: module for path, module in modules if entry_of(module, {name: True})}
