"""Optional packages: imported when they are needed, asked for by the name of their extra."""

import importlib
import importlib.util
from types import ModuleType

from irpe.errors import MissingExtraError


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
        raise missing(module, extra) from None


def require_installed(extra: str, *modules: str) -> None:
    """Raises the error of `require` if an optional module is not installed, and imports none.

    Args:
        extra: The extra of irpe that installs them.
        modules: Their names.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise missing(module, extra)


def missing(module: str, extra: str) -> MissingExtraError:
    """Returns the error for an optional module that is not installed.

    Args:
        module: The module's name.
        extra: The extra of irpe that installs it.
    """
    error = MissingExtraError(f"{module} is not installed: pip install 'irpe[{extra}]'")
    error.name = module
    return error
