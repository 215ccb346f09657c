"""Weights from the Hugging Face hub without a network: from its cache, or an error at once."""

import socket
from collections.abc import Generator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies

_PATIENCE = 5.0  # seconds for a connection; a download may then take as long as it likes


@contextmanager
def cached_if_unreachable() -> Generator[None]:
    """Uses the cache of the hub alone where the hub cannot be reached: it retries for a minute.

    Examples:
        >>> import irpe.hub, timm
        >>> with irpe.hub.cached_if_unreachable():  # doctest: +SKIP
        ...     model = timm.create_model("deit_tiny_patch16_224", pretrained=True)
    """
    import huggingface_hub.constants as constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not is_reachable(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def is_reachable(address: str) -> bool:
    """Returns whether a server takes a connection; through a proxy only a request would tell.

    Args:
        address: Its address, as in "https://huggingface.co".
    """
    parts = urlsplit(address)
    if {parts.scheme, "all"} & getproxies().keys():
        return True
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        socket.create_connection((parts.hostname, port), _PATIENCE).close()
    except OSError:
        return False
    return True
