"""Packages whose names are loaded when they are first used."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from irpe.extras import missing


def lazy_names(
    package: str, sources: Mapping[str, Iterable[str]], extra: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a package whose names come from its modules.

    Args:
        package: The name of the package.
        sources: The public names, by the module that has them.
        extra: The extra of irpe that installs what these modules import, if not the core alone.
    """
    modules = {name: module for module, names in sources.items() for name in names}
    namespace = vars(sys.modules[package])

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        importlib.import_module("irpe.ops")  # registers the operators and what they cost
        try:
            value = getattr(importlib.import_module(modules[name]), name)
        except ModuleNotFoundError as error:
            if extra is None or not error.name:
                raise
            raise missing(error.name.partition(".")[0], extra) from error
        namespace[name] = value
        return value

    return load, lambda: sorted({*namespace, *modules})
