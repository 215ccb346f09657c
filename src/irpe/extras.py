"""Optional packages: imported when they are needed, asked for by the name of their extra."""

import importlib
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Returns an optional module, or raises an error that names the extra to install.

    Args:
        module: The module's name.
        extra: The extra of irpe that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise ModuleNotFoundError(
            f"{module} is not installed: pip install 'irpe[{extra}]'", name=error.name
        ) from None
