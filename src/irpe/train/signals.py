"""Requests to stop: SIGTERM and SIGINT as a flag that the training loop reads between steps."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

_STOPS = (signal.SIGTERM, signal.SIGINT)


class StoppedError(RuntimeError):
    """A run that was asked to stop, and saved itself."""


@contextmanager
def stop_requests() -> Generator[threading.Event]:
    """Turns SIGTERM and SIGINT into a request to stop; a second SIGINT ends the program at once."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in _STOPS}

    def ask(number: int, frame: object) -> None:
        stopped.set()
        if number == signal.SIGINT:  # a launcher may send SIGTERM twice, a user means it
            signal.signal(number, before[number])

    for number in _STOPS:
        signal.signal(number, ask)
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
